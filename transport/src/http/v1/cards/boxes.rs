//! Boxes: ordered sets of cards.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use serde::{Deserialize, Serialize};
use toolcrib::domain::agent::CardBox;
use utoipa::ToSchema;

use super::super::super::HttpState;
use crate::http::extract::{AuthenticatedCaller, NamePath, StrictJsonBody};
use crate::http::problem::{ApiError, ProblemDetails};

/// Cards to put into a new box.
#[derive(Deserialize, ToSchema)]
pub(crate) struct NewBoxBody {
    /// Ids of the cards, in order.
    #[serde(default)]
    card_ids: Vec<String>,
    /// Boxes whose cards come before these.
    #[serde(default)]
    parent_ids: Vec<String>,
}

/// A box.
#[derive(Serialize, ToSchema)]
pub(crate) struct BoxBody {
    /// A UUID; `context_box_id` in requests.
    box_id: String,
    project_id: String,
    /// Ids of all its cards in order, inherited ones first.
    card_ids: Vec<String>,
    parent_ids: Vec<String>,
    created_by: String,
    created_at_ms: u64,
}

impl BoxBody {
    fn new(found: CardBox, card_ids: Vec<String>) -> Self {
        Self {
            box_id: found.box_id,
            project_id: found.project,
            card_ids,
            parent_ids: found.parent_ids,
            created_by: found.created_by,
            created_at_ms: found.created_ms,
        }
    }
}

/// Creates a box with these cards. A box never changes.
#[utoipa::path(post, path = "/v1/boxes", tag = "agents", request_body = NewBoxBody,
    responses((status = 201, body = BoxBody), (status = 403, body = ProblemDetails),
        (status = 422, body = ProblemDetails)))]
pub(crate) async fn create_box(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    StrictJsonBody(body): StrictJsonBody<NewBoxBody>,
) -> Result<(StatusCode, Json<BoxBody>), ApiError> {
    let utp = state.engine.utp();
    let created = utp.boxes().create_box(&caller, body.card_ids, body.parent_ids).await?;
    let (found, card_ids) = utp.boxes().card_box(&caller, &created.box_id).await?;
    Ok((StatusCode::CREATED, Json(BoxBody::new(found, card_ids))))
}

/// Returns a box with the ids of its cards, in order.
#[utoipa::path(get, path = "/v1/boxes/{box_id}", tag = "agents",
    params(("box_id" = String, Path, description = "The box")),
    responses((status = 200, body = BoxBody), (status = 404, body = ProblemDetails)))]
pub(crate) async fn show_box(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    NamePath(box_id): NamePath,
) -> Result<Json<BoxBody>, ApiError> {
    let (found, card_ids) = state.engine.utp().boxes().card_box(&caller, &box_id).await?;
    Ok(Json(BoxBody::new(found, card_ids)))
}
