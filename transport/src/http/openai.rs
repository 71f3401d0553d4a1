//! OpenAI's API, for programs that speak no other: models, chat completions, responses. Toolcrib
//! offers its tools to the model in addition to those that the request defines. It executes calls
//! of its own tools here and returns calls of the request's tools to the caller, as OpenAI does.

mod chat;
mod conversation;
mod error;
mod fields;
mod live;
mod models;
mod responses;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::HttpState;

pub use live::LiveConversations;

pub(super) fn routes() -> OpenApiRouter<HttpState> {
    OpenApiRouter::new()
        .routes(routes!(models::list))
        .routes(routes!(models::show))
        .routes(routes!(chat::complete))
        .routes(routes!(responses::create_response))
}
