//! Rules, clients and the audit log. Requires an admin key, or the operator on the local
//! machine.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use serde::{Deserialize, Serialize};
use serde_json::json;
use toolcrib::Caller;
use toolcrib::domain::access_rules::{AccessRule, RuleVerdict};
use toolcrib::domain::directory::AuditEntry;
use toolcrib::domain::fault::{Code, Error, Fault};
use utoipa::{IntoParams, ToSchema};

use super::super::HttpState;
use crate::http::extract::{AuthenticatedCaller, JsonBody, QueryParams};
use crate::http::problem::{ApiError, ProblemDetails};

/// A rule that allows or denies tools to an agent.
#[derive(Serialize, Deserialize, ToSchema)]
pub(super) struct RuleBody {
    /// An agent, or `*`.
    agent: String,
    /// A tool or a pattern: `weather.query`, `weather.*`, `*`.
    pattern: String,
    /// `allow` or `deny`; `deny` takes precedence.
    verdict: String,
}

/// The project's rules.
#[derive(Serialize, ToSchema)]
pub(super) struct RuleList {
    rules: Vec<RuleBody>,
}

/// Lists the project's rules.
#[utoipa::path(get, path = "/v1/rules", tag = "operators",
    responses((status = 200, body = RuleList), (status = 403, body = ProblemDetails)))]
pub(super) async fn list_rules(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
) -> Result<Json<RuleList>, ApiError> {
    let rules = state.engine.admin().rules(&caller)?;
    let body = |rule: &AccessRule| RuleBody {
        agent: rule.as_short().map_or("*", |(agent, _)| agent).to_owned(),
        pattern: rule.as_short().map_or("*", |(_, pattern)| pattern).to_owned(),
        verdict: rule.verdict.as_str().to_owned(),
    };
    Ok(Json(RuleList { rules: rules.iter().map(body).collect() }))
}

/// Allows or denies tools to an agent, effective from the next call.
#[utoipa::path(put, path = "/v1/rules", tag = "operators", request_body = RuleBody,
    responses((status = 200, body = RuleBody), (status = 403, body = ProblemDetails),
        (status = 422, body = ProblemDetails)))]
pub(super) async fn put_rule(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    JsonBody(body): JsonBody<RuleBody>,
) -> Result<Json<RuleBody>, ApiError> {
    let verdict = match body.verdict.as_str() {
        "allow" => RuleVerdict::Allow,
        "deny" => RuleVerdict::Deny,
        "ask" => RuleVerdict::Ask,
        _ => {
            let message = "verdict must be allow, deny or ask";
            return Err(Error::refused(Code::ValidationError, message).into());
        }
    };
    let rule = AccessRule::short(&caller.project, &body.agent, &body.pattern, verdict);
    state.engine.admin().set_rule(&caller, rule).await?;
    Ok(Json(body))
}

/// Identifies a rule.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct RuleQuery {
    agent: String,
    pattern: String,
}

/// Deletes a rule.
#[utoipa::path(delete, path = "/v1/rules", tag = "operators", params(RuleQuery),
    responses((status = 204), (status = 404, body = ProblemDetails)))]
pub(super) async fn drop_rule(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    QueryParams(which): QueryParams<RuleQuery>,
) -> Result<StatusCode, ApiError> {
    let project = caller.project.clone();
    state.engine.admin().remove_rule(&caller, &project, &which.agent, &which.pattern).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// An entry of the audit log.
#[derive(Serialize, ToSchema)]
pub(super) struct AuditBody {
    at_ms: u64,
    agent: String,
    /// `call.denied`, `key.created`, `key.revoked`, `rule.set` or `rule.removed`.
    action: String,
    subject: String,
    reason: String,
}

impl From<AuditEntry> for AuditBody {
    fn from(entry: AuditEntry) -> Self {
        let AuditEntry { at_ms, agent, action, subject, reason, .. } = entry;
        Self { at_ms, agent, action, subject, reason }
    }
}

/// Denied calls and administrative changes, newest first.
#[derive(Serialize, ToSchema)]
pub(super) struct AuditList {
    audit: Vec<AuditBody>,
}

/// Page size of the audit log.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct AuditQuery {
    /// Maximum number of entries, 1 to 1000 (default: 100).
    limit: Option<usize>,
}

/// Returns denied calls and administrative changes, newest first.
#[utoipa::path(get, path = "/v1/audit", tag = "operators", params(AuditQuery),
    responses((status = 200, body = AuditList), (status = 403, body = ProblemDetails),
        (status = 422, body = ProblemDetails)))]
pub(super) async fn audit(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    QueryParams(how_many): QueryParams<AuditQuery>,
) -> Result<Json<AuditList>, ApiError> {
    let limit = how_many.limit.unwrap_or(100);
    if !(1..=1_000).contains(&limit) {
        let fault = Fault::new(Code::ValidationError, "limit must be from 1 to 1000");
        return Err(Error::from(fault.with_detail(json!({ "field": "limit" }))).into());
    }
    let entries = state.engine.admin().audit_log(&caller, limit).await?;
    Ok(Json(AuditList { audit: entries.into_iter().map(AuditBody::from).collect() }))
}

/// A client that provides tools.
#[derive(Serialize, ToSchema)]
pub(super) struct ClientBody {
    client_id: String,
    connections: usize,
    /// Number of requests that the client has received and not answered.
    in_hand: usize,
    tools: Vec<String>,
    /// Null if the client was not seen since the server started.
    last_seen_ms: Option<u64>,
}

/// The clients of a project.
#[derive(Serialize, ToSchema)]
pub(super) struct ClientList {
    clients: Vec<ClientBody>,
}

/// Lists the registered clients, connected or not.
#[utoipa::path(get, path = "/v1/clients", tag = "operators",
    responses((status = 200, body = ClientList), (status = 403, body = ProblemDetails)))]
pub(super) async fn clients(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
) -> Result<Json<ClientList>, ApiError> {
    let caller: Caller = caller;
    let clients = state.engine.clients().clients(&caller)?.into_iter().map(|view| ClientBody {
        client_id: view.client_id,
        connections: view.connections,
        in_hand: view.leased,
        tools: view.tools,
        last_seen_ms: view.last_seen_ms,
    });
    Ok(Json(ClientList { clients: clients.collect() }))
}
