//! Usage limits: the calls that an agent, a user, a tool or a project may make per minute, have
//! open and run at the same time. Requires an admin key or the operator; auditors may read.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use serde::{Deserialize, Serialize};
use toolcrib::domain::directory::usage_limits::{LimitKind, LimitValues, UsageLimit};
use toolcrib::domain::fault::{Code, Error};
use utoipa::ToSchema;

use crate::http::HttpState;
use crate::http::extract::{AuthenticatedCaller, KindAndNamePath, StrictJsonBody};
use crate::http::problem::{ApiError, ProblemDetails};

/// The values of a limit. At least one is required; an absent value sets no limit.
#[derive(Deserialize, ToSchema)]
pub(in crate::http::v1) struct LimitValuesBody {
    /// Maximum number of calls accepted in any 60 seconds.
    per_minute: Option<u32>,
    /// Maximum number of calls without an outcome.
    max_open: Option<u32>,
    /// Maximum number of attempts in flight. Further calls are queued.
    max_parallel: Option<u32>,
}

/// A limit.
#[derive(Serialize, ToSchema)]
pub(in crate::http::v1) struct LimitBody {
    /// `agent`, `user`, `tool` or `project`.
    kind: String,
    /// Name of the member, or `*` for each member without a value of its own.
    name: String,
    /// Project that the limit belongs to.
    project: String,
    per_minute: Option<u32>,
    max_open: Option<u32>,
    max_parallel: Option<u32>,
    updated_at_ms: u64,
}

impl From<UsageLimit> for LimitBody {
    fn from(limit: UsageLimit) -> Self {
        let UsageLimit { project, kind, name, values, updated_ms } = limit;
        Self {
            kind: kind.as_str().to_owned(),
            name,
            project,
            per_minute: values.per_minute,
            max_open: values.max_open,
            max_parallel: values.max_parallel,
            updated_at_ms: updated_ms,
        }
    }
}

/// The limits of a project.
#[derive(Serialize, ToSchema)]
pub(in crate::http::v1) struct LimitList {
    limits: Vec<LimitBody>,
}

fn parse_kind(kind: &str) -> Result<LimitKind, Error> {
    kind.parse().map_err(|()| {
        let kinds = LimitKind::ALL.map(LimitKind::as_str).join(", ");
        let excerpt: String = kind.chars().take(40).collect();
        let message = format!("limits have no kind \"{excerpt}\"; the kinds are {kinds}");
        Error::refused(Code::ValidationError, message)
    })
}

/// Lists the stored limits of the project.
#[utoipa::path(get, path = "/v1/limits", tag = "operators",
    responses((status = 200, body = LimitList), (status = 403, body = ProblemDetails)))]
pub(in crate::http::v1) async fn list_limits(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
) -> Result<Json<LimitList>, ApiError> {
    let limits = state.engine.admin().limits(&caller)?;
    Ok(Json(LimitList { limits: limits.into_iter().map(LimitBody::from).collect() }))
}

/// Returns the stored limit of a member.
#[utoipa::path(get, path = "/v1/limits/{kind}/{name}", tag = "operators",
    params(("kind" = String, Path, description = "agent, user, tool or project"),
        ("name" = String, Path, description = "The member, or * for each member")),
    responses((status = 200, body = LimitBody), (status = 403, body = ProblemDetails),
        (status = 404, body = ProblemDetails), (status = 422, body = ProblemDetails)))]
pub(in crate::http::v1) async fn show_limit(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    KindAndNamePath { kind, name }: KindAndNamePath,
) -> Result<Json<LimitBody>, ApiError> {
    let limit = state.engine.admin().limit(&caller, parse_kind(&kind)?, &name)?;
    Ok(Json(limit.into()))
}

/// Sets the limit of a member, or replaces it. Applies at once to every transport.
#[utoipa::path(put, path = "/v1/limits/{kind}/{name}", tag = "operators",
    request_body = LimitValuesBody,
    params(("kind" = String, Path, description = "agent, user, tool or project"),
        ("name" = String, Path, description = "The member, or * for each member")),
    responses((status = 200, body = LimitBody), (status = 403, body = ProblemDetails),
        (status = 422, body = ProblemDetails)))]
pub(in crate::http::v1) async fn put_limit(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    KindAndNamePath { kind, name }: KindAndNamePath,
    StrictJsonBody(body): StrictJsonBody<LimitValuesBody>,
) -> Result<Json<LimitBody>, ApiError> {
    let LimitValuesBody { per_minute, max_open, max_parallel } = body;
    let values = LimitValues { per_minute, max_open, max_parallel };
    let kind = parse_kind(&kind)?;
    let limit = state.engine.admin().set_limit(&caller, kind, &name, values).await?;
    Ok(Json(limit.into()))
}

/// Removes the limit of a member.
#[utoipa::path(delete, path = "/v1/limits/{kind}/{name}", tag = "operators",
    params(("kind" = String, Path, description = "agent, user, tool or project"),
        ("name" = String, Path, description = "The member, or * for each member")),
    responses((status = 204), (status = 403, body = ProblemDetails),
        (status = 404, body = ProblemDetails), (status = 422, body = ProblemDetails)))]
pub(in crate::http::v1) async fn drop_limit(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    KindAndNamePath { kind, name }: KindAndNamePath,
) -> Result<StatusCode, ApiError> {
    state.engine.admin().remove_limit(&caller, parse_kind(&kind)?, &name).await?;
    Ok(StatusCode::NO_CONTENT)
}
