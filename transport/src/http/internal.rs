//! Internal HTTP API: for clients that provide tools and execute calls.

mod ingress;
mod register;
mod submit;
use axum::routing::{delete, get};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::HttpState;

pub(super) fn routes() -> OpenApiRouter<HttpState> {
    OpenApiRouter::new()
        .routes(routes!(register::register))
        .routes(routes!(register::withdraw))
        .routes(routes!(register::forget_client))
        .routes(routes!(submit::submit))
        .routes(routes!(submit::ack))
        .routes(routes!(submit::progress))
        .routes(routes!(ingress::poll::poll))
        .routes(routes!(ingress::sse::sse))
        // A tool may have any name, including `register`, which is also a path here.
        .route("/internal/tools/register", delete(register::withdraw_register))
        // OpenAPI cannot describe a WebSocket; docs/protocol/ingress.md does.
        .route("/internal/ingress/ws", get(ingress::ws::ws))
}
