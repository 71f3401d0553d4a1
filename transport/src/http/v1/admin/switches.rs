//! Kill switches: turn a tool, an agent, a source or a project off, and on again. Requires an admin
//! key or the operator; auditors may read.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use serde::{Deserialize, Serialize};
use toolcrib::domain::directory::kill_switches::{KillSwitch, SwitchKind};
use toolcrib::domain::fault::{Code, Error};
use utoipa::ToSchema;

use crate::http::HttpState;
use crate::http::extract::{AuthenticatedCaller, KindAndNamePath, StrictJsonBody};
use crate::http::problem::{ApiError, ProblemDetails};

/// The reason of a switch.
#[derive(Deserialize, ToSchema)]
pub(in crate::http::v1) struct SwitchReasonBody {
    /// The reason, as callers and models read it: 1 to 1000 bytes.
    #[serde(default)]
    reason: String,
}

/// A switch that is set: its subject is off.
#[derive(Serialize, ToSchema)]
pub(in crate::http::v1) struct SwitchBody {
    /// `tool`, `agent`, `source` or `project`.
    kind: String,
    /// Name of the subject. For tools and sources it can be a pattern.
    name: String,
    /// Project that the switch belongs to.
    project: String,
    reason: String,
    /// Agent name of the caller that set the switch.
    set_by: String,
    set_at_ms: u64,
}

impl From<KillSwitch> for SwitchBody {
    fn from(switch: KillSwitch) -> Self {
        let KillSwitch { project, kind, name, reason, set_by, set_ms } = switch;
        let kind = kind.as_str().to_owned();
        Self { kind, name, project, reason, set_by, set_at_ms: set_ms }
    }
}

/// The switches that are set.
#[derive(Serialize, ToSchema)]
pub(in crate::http::v1) struct SwitchList {
    switches: Vec<SwitchBody>,
}

fn parse_kind(kind: &str) -> Result<SwitchKind, Error> {
    kind.parse().map_err(|()| {
        let kinds = SwitchKind::ALL.map(SwitchKind::as_str).join(", ");
        let excerpt: String = kind.chars().take(40).collect();
        let message = format!("switches have no kind \"{excerpt}\"; the kinds are {kinds}");
        Error::refused(Code::ValidationError, message)
    })
}

/// Lists the switches that are set.
#[utoipa::path(get, path = "/v1/switches", tag = "operators",
    responses((status = 200, body = SwitchList), (status = 403, body = ProblemDetails)))]
pub(in crate::http::v1) async fn list_switches(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
) -> Result<Json<SwitchList>, ApiError> {
    let switches = state.engine.admin().switches(&caller)?;
    Ok(Json(SwitchList { switches: switches.into_iter().map(SwitchBody::from).collect() }))
}

/// Returns one switch.
#[utoipa::path(get, path = "/v1/switches/{kind}/{name}", tag = "operators",
    params(("kind" = String, Path, description = "tool, agent, source or project"),
        ("name" = String, Path, description = "The subject, or a pattern")),
    responses((status = 200, body = SwitchBody), (status = 403, body = ProblemDetails),
        (status = 404, body = ProblemDetails), (status = 422, body = ProblemDetails)))]
pub(in crate::http::v1) async fn show_switch(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    KindAndNamePath { kind, name }: KindAndNamePath,
) -> Result<Json<SwitchBody>, ApiError> {
    let switch = state.engine.admin().switch(&caller, parse_kind(&kind)?, &name)?;
    Ok(Json(switch.into()))
}

/// Switches a subject off.
///
/// New calls are refused with the reason. Open calls end as FAILED with it within a second, and
/// attempts in flight are canceled at their source.
#[utoipa::path(put, path = "/v1/switches/{kind}/{name}", tag = "operators",
    request_body = SwitchReasonBody,
    params(("kind" = String, Path, description = "tool, agent, source or project"),
        ("name" = String, Path, description = "The subject, or a pattern")),
    responses((status = 200, body = SwitchBody), (status = 403, body = ProblemDetails),
        (status = 422, body = ProblemDetails)))]
pub(in crate::http::v1) async fn put_switch(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    KindAndNamePath { kind, name }: KindAndNamePath,
    StrictJsonBody(body): StrictJsonBody<SwitchReasonBody>,
) -> Result<Json<SwitchBody>, ApiError> {
    let kind = parse_kind(&kind)?;
    let switch = state.engine.admin().set_switch(&caller, kind, &name, &body.reason).await?;
    Ok(Json(switch.into()))
}

/// Switches a subject on again. Calls that the switch ended stay ended.
#[utoipa::path(delete, path = "/v1/switches/{kind}/{name}", tag = "operators",
    params(("kind" = String, Path, description = "tool, agent, source or project"),
        ("name" = String, Path, description = "The subject, or a pattern")),
    responses((status = 204), (status = 403, body = ProblemDetails),
        (status = 404, body = ProblemDetails), (status = 422, body = ProblemDetails)))]
pub(in crate::http::v1) async fn drop_switch(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    KindAndNamePath { kind, name }: KindAndNamePath,
) -> Result<StatusCode, ApiError> {
    state.engine.admin().remove_switch(&caller, parse_kind(&kind)?, &name).await?;
    Ok(StatusCode::NO_CONTENT)
}
