//! OpenAI's API, for clients that know no other: models, chat completions, responses. The crib's
//! tools are offered to the model beside those that the client sends; calls of the crib's tools are
//! executed here, calls of the client's own are handed to it as always.

mod chat;
mod conversation;
mod fields;
mod models;
mod refusal;
mod responses;

use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::Door;

pub(super) fn routes() -> OpenApiRouter<Door> {
    OpenApiRouter::new()
        .routes(routes!(models::list))
        .routes(routes!(models::show))
        .routes(routes!(chat::complete))
        .routes(routes!(responses::respond))
}
