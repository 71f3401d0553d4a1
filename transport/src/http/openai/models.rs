//! OpenAI's models API.

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::{Extensions, HeaderMap};
use serde::Serialize;
use toolcrib::domain::fault::{Code, Error};
use utoipa::ToSchema;

use super::super::HttpState;
use crate::auth;
use crate::http::openai::error::{OpenAiError, OpenAiErrorBody, model_not_found};

/// A model.
#[derive(Serialize, ToSchema)]
pub(super) struct ModelBody {
    id: String,
    /// `model`.
    object: &'static str,
    /// Unix seconds. Always 0, because the time is unknown.
    created: u64,
    owned_by: &'static str,
}

/// The configured models.
#[derive(Serialize, ToSchema)]
pub(super) struct ModelsBody {
    /// `list`.
    object: &'static str,
    /// The models; the first is the default.
    data: Vec<ModelBody>,
}

fn model_body(id: String) -> ModelBody {
    ModelBody { id, object: "model", created: 0, owned_by: "toolcrib" }
}

/// Lists the configured models. Other models of the configured endpoint can be requested as well.
#[utoipa::path(get, path = "/v1/models", tag = "models",
    responses((status = 200, body = ModelsBody), (status = 401, body = OpenAiErrorBody)))]
pub(super) async fn list(
    State(state): State<HttpState>,
    headers: HeaderMap,
    extensions: Extensions,
) -> Result<Json<ModelsBody>, OpenAiError> {
    auth::authenticate_request(&state.engine, &state.settings.origins, &headers, &extensions)?;
    let data = state.engine.runs().models().names().into_iter().map(model_body).collect();
    Ok(Json(ModelsBody { object: "list", data }))
}

/// Returns one model.
#[utoipa::path(get, path = "/v1/models/{model}", tag = "models",
    params(("model" = String, Path, description = "Its name")),
    responses((status = 200, body = ModelBody), (status = 400, body = OpenAiErrorBody),
        (status = 404, body = OpenAiErrorBody)))]
pub(super) async fn show(
    State(state): State<HttpState>,
    path: Result<Path<String>, PathRejection>,
    headers: HeaderMap,
    extensions: Extensions,
) -> Result<Json<ModelBody>, OpenAiError> {
    auth::authenticate_request(&state.engine, &state.settings.origins, &headers, &extensions)?;
    let unreadable = |_| OpenAiError(Error::refused(Code::BadRequest, "the path is not UTF-8"));
    let Path(model) = path.map_err(unreadable)?;
    let names = state.engine.runs().models().names();
    match names.contains(&model) {
        true => Ok(Json(model_body(model))),
        false => Err(model_not_found(&model, &names)),
    }
}
