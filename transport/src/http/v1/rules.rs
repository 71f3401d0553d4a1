//! Access rules. Requires an admin key, or the operator on the local machine; auditors read them.
//!
//! The engine reads and writes the documents, because files and the configuration have the same
//! form; the structs here describe them in the OpenAPI document.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use toolcrib::domain::fault::{Code, Error};
use toolcrib::registry::rules;
use utoipa::{IntoParams, ToSchema};

use super::super::HttpState;
use crate::http::extract::{AuthenticatedCaller, JsonBody, NamePath, QueryParams};
use crate::http::problem::{ApiError, ProblemDetails};

/// An access rule. An absent list matches everything; a list holds patterns in which `*` stands for
/// any characters.
#[derive(Serialize, ToSchema)]
#[allow(dead_code, reason = "describes the document")]
pub(super) struct RuleBody {
    /// Name of the rule, unique in the project. A request that names the rule in its path may omit
    /// it.
    #[schema(required = false)]
    id: String,
    /// `allow`, `deny` or `ask`. Deny takes precedence over ask, ask over allow.
    verdict: String,
    /// Agents.
    agents: Option<Vec<String>>,
    /// Groups; one of the caller's must match.
    groups: Option<Vec<String>>,
    /// Users that the agent acts for.
    users: Option<Vec<String>>,
    /// Sessions. Without an asserted session the run is the session; rules that allow never match
    /// it.
    sessions: Option<Vec<String>>,
    /// Environments of the credentials.
    environments: Option<Vec<String>>,
    /// Tools: `weather.query`, `weather.*`.
    tools: Option<Vec<String>>,
    /// Sources: `server`, `client`, an executor such as `mcp`, or the name of an upstream.
    sources: Option<Vec<String>>,
    /// `read`, `idempotent`, `irreversible`.
    effects: Option<Vec<String>>,
    /// The lowest risk that matches: `low`, `medium`, `high` or `critical`.
    risk_min: Option<String>,
    /// `list`, `invoke`, `read`, `cancel`, `approve`, `register`, `administer` (default: `list`,
    /// `invoke`).
    actions: Option<Vec<String>>,
    /// CEL expression over `args`, `caller`, `tool` and `now`.
    when: Option<String>,
    /// Agents, groups and users who may approve; only with `ask`.
    approvers: Option<Vec<String>>,
    /// Time until a call without a decision fails; only with `ask`.
    expires_in_ms: Option<u64>,
    /// Text for people.
    note: Option<String>,
    /// The agent of a rule of the short form.
    agent: Option<String>,
    /// The pattern of a rule of the short form.
    pattern: Option<String>,
}

/// The project's rules.
#[derive(Serialize, ToSchema)]
#[allow(dead_code, reason = "describes the document")]
pub(super) struct RuleList {
    /// Number of the version of the set; every change makes a new one.
    version: u64,
    rules: Vec<RuleBody>,
}

/// Lists the project's rules.
#[utoipa::path(get, path = "/v1/rules", tag = "operators",
    responses((status = 200, body = RuleList), (status = 403, body = ProblemDetails)))]
pub(super) async fn list(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
) -> Result<Json<Value>, ApiError> {
    Ok(Json(rules::render_rule_set(&state.engine.admin().rules(&caller)?)))
}

/// A whole set of rules, or one rule of the short form.
#[derive(Serialize, ToSchema)]
#[allow(dead_code, reason = "describes the document")]
pub(super) struct RuleSetBody {
    /// The rules that replace all present ones.
    rules: Option<Vec<RuleBody>>,
    /// Short form: an agent, or `*`.
    agent: Option<String>,
    /// Short form: a tool or a pattern.
    pattern: Option<String>,
    /// Short form: `allow`, `deny` or `ask`.
    verdict: Option<String>,
}

/// Replaces all rules, or sets one rule of the short form; effective from the next call, and for
/// calls that wait. A refused set leaves the present one in force.
#[utoipa::path(put, path = "/v1/rules", tag = "operators", request_body = RuleSetBody,
    responses((status = 200, body = RuleList), (status = 403, body = ProblemDetails),
        (status = 422, body = ProblemDetails)))]
pub(super) async fn put_all(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    JsonBody(body): JsonBody<Value>,
) -> Result<Json<Value>, ApiError> {
    let admin = state.engine.admin();
    if body.get("rules").is_some() {
        let set = rules::parse_rule_set(&caller.project, &body)?;
        let summary = format!("replaced by a set of {}", set.len());
        admin.replace_rules(&caller, &caller.project, set, &summary).await?;
        return Ok(Json(rules::render_rule_set(&admin.rules(&caller)?)));
    }
    if ["agent", "pattern", "verdict"].iter().any(|field| body.get(field).is_none()) {
        let message = "send rules (a whole set), or agent, pattern and verdict (the short form); \
                       PUT /v1/rules/{id} sets one rule";
        return Err(Error::refused(Code::BadRequest, message).into());
    }
    let rule = rules::parse_rule(&caller.project, None, &body, "")?;
    admin.set_rule(&caller, rule).await?;
    Ok(Json(body))
}

/// Identifies the rules of the short form on one agent and pattern.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct RuleQuery {
    agent: String,
    pattern: String,
}

/// Deletes the rules of the short form on an agent and a pattern.
#[utoipa::path(delete, path = "/v1/rules", tag = "operators", params(RuleQuery),
    responses((status = 204), (status = 404, body = ProblemDetails)))]
pub(super) async fn drop_short(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    QueryParams(which): QueryParams<RuleQuery>,
) -> Result<StatusCode, ApiError> {
    let project = caller.project.clone();
    state.engine.admin().remove_rule(&caller, &project, &which.agent, &which.pattern).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Returns one rule.
#[utoipa::path(get, path = "/v1/rules/{id}", tag = "operators",
    params(("id" = String, Path, description = "The rule")),
    responses((status = 200, body = RuleBody), (status = 404, body = ProblemDetails)))]
pub(super) async fn show(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    NamePath(id): NamePath,
) -> Result<Json<Value>, ApiError> {
    Ok(Json(rules::render_rule(&state.engine.admin().rule(&caller, &id)?)))
}

/// Sets one rule; effective from the next call, and for calls that wait.
#[utoipa::path(put, path = "/v1/rules/{id}", tag = "operators", request_body = RuleBody,
    params(("id" = String, Path, description = "The rule")),
    responses((status = 200, body = RuleBody), (status = 403, body = ProblemDetails),
        (status = 422, body = ProblemDetails)))]
pub(super) async fn put(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    NamePath(id): NamePath,
    JsonBody(body): JsonBody<Value>,
) -> Result<Json<Value>, ApiError> {
    let rule = rules::parse_rule(&caller.project, Some(&id), &body, "")?;
    let written = rules::render_rule(&rule);
    state.engine.admin().set_rule(&caller, rule).await?;
    Ok(Json(written))
}

/// Deletes one rule.
#[utoipa::path(delete, path = "/v1/rules/{id}", tag = "operators",
    params(("id" = String, Path, description = "The rule")),
    responses((status = 204), (status = 404, body = ProblemDetails)))]
pub(super) async fn drop_rule(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    NamePath(id): NamePath,
) -> Result<StatusCode, ApiError> {
    let project = caller.project.clone();
    state.engine.admin().remove_rule_by_id(&caller, &project, &id).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// One version of the rules.
#[derive(Serialize, ToSchema)]
#[allow(dead_code, reason = "describes the document")]
pub(super) struct RuleVersionBody {
    version: u64,
    at_ms: u64,
    /// Agent that made the change.
    agent: String,
    /// The change in words.
    summary: String,
}

/// The stored versions of the rules.
#[derive(Serialize, ToSchema)]
#[allow(dead_code, reason = "describes the document")]
pub(super) struct RuleVersionList {
    versions: Vec<RuleVersionBody>,
}

/// Lists the stored versions of the rules, newest first.
#[utoipa::path(get, path = "/v1/rules/versions", tag = "operators",
    responses((status = 200, body = RuleVersionList), (status = 403, body = ProblemDetails)))]
pub(super) async fn versions(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
) -> Result<Json<Value>, ApiError> {
    Ok(Json(rules::render_versions(&state.engine.admin().rule_versions(&caller).await?)))
}

/// The version to return to.
#[derive(Serialize, ToSchema)]
#[allow(dead_code, reason = "describes the document")]
pub(super) struct RollbackBody {
    version: u64,
}

/// Makes the rules of an earlier version the present ones, as a new version.
#[utoipa::path(post, path = "/v1/rules/rollback", tag = "operators", request_body = RollbackBody,
    responses((status = 200, body = RuleList), (status = 404, body = ProblemDetails),
        (status = 422, body = ProblemDetails)))]
pub(super) async fn rollback(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    JsonBody(body): JsonBody<Value>,
) -> Result<Json<Value>, ApiError> {
    let admin = state.engine.admin();
    admin.roll_back_rules(&caller, &caller.project, rules::parse_rollback(&body)?).await?;
    Ok(Json(rules::render_rule_set(&admin.rules(&caller)?)))
}

/// An imagined request.
#[derive(Serialize, ToSchema)]
#[allow(dead_code, reason = "describes the document")]
pub(super) struct ExplainBody {
    agent: String,
    user: Option<String>,
    session: Option<String>,
    environment: Option<String>,
    groups: Option<Vec<String>>,
    roles: Option<Vec<String>>,
    /// The run, which is the session of a caller that asserts none.
    run_id: Option<String>,
    tool: String,
    /// Without arguments, conditions on them are left open.
    args: Option<Value>,
    /// Default: `invoke`.
    action: Option<String>,
}

/// One rule that was considered.
#[derive(Serialize, ToSchema)]
#[allow(dead_code, reason = "describes the document")]
pub(super) struct ConsideredRuleBody {
    rule_id: String,
    verdict: String,
    matches: bool,
    reason: String,
}

/// The explanation of a decision.
#[derive(Serialize, ToSchema)]
#[allow(dead_code, reason = "describes the document")]
pub(super) struct ExplanationBody {
    /// `allow`, `ask` or `deny`.
    decision: String,
    rule_id: Option<String>,
    reason: String,
    /// The rules on this action and tool, in the order of precedence.
    considered: Vec<ConsideredRuleBody>,
}

/// Explains the decision about an imagined request.
#[utoipa::path(post, path = "/v1/rules/explain", tag = "operators", request_body = ExplainBody,
    responses((status = 200, body = ExplanationBody), (status = 403, body = ProblemDetails),
        (status = 422, body = ProblemDetails)))]
pub(super) async fn explain(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    JsonBody(body): JsonBody<Value>,
) -> Result<Json<Value>, ApiError> {
    let request = rules::parse_explain_request(&body)?;
    let explanation = state.engine.admin().explain_rules(&caller, request).await?;
    Ok(Json(rules::render_explanation(&explanation)))
}

/// Rules to lint in place of the present ones.
#[derive(Serialize, ToSchema)]
#[allow(dead_code, reason = "describes the document")]
pub(super) struct LintBody {
    rules: Option<Vec<RuleBody>>,
}

/// A rule that has no effect, or whose condition fails.
#[derive(Serialize, ToSchema)]
#[allow(dead_code, reason = "describes the document")]
pub(super) struct RuleFindingBody {
    rule_id: String,
    /// `shadowed`, `never_matches` or `fails`.
    kind: String,
    message: String,
    shadowed_by: Option<String>,
}

/// Findings about rules.
#[derive(Serialize, ToSchema)]
#[allow(dead_code, reason = "describes the document")]
pub(super) struct RuleFindingList {
    findings: Vec<RuleFindingBody>,
}

/// Lists shadowed rules, rules that match nothing, and rules whose condition fails.
#[utoipa::path(post, path = "/v1/rules/lint", tag = "operators", request_body = LintBody,
    responses((status = 200, body = RuleFindingList), (status = 403, body = ProblemDetails),
        (status = 422, body = ProblemDetails)))]
pub(super) async fn lint(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    JsonBody(body): JsonBody<Value>,
) -> Result<Json<Value>, ApiError> {
    let proposed = rules::parse_lint_request(&caller.project, &body)?;
    let findings = state.engine.admin().lint_rules(&caller, proposed).await?;
    Ok(Json(rules::render_findings(&findings)))
}

/// A proposed set of rules.
#[derive(Serialize, ToSchema)]
#[allow(dead_code, reason = "describes the document")]
pub(super) struct RehearseBody {
    rules: Vec<RuleBody>,
    /// Days to look back, 1 to 366 (default: 7).
    days: Option<u32>,
}

/// A difference, for all calls of one agent and tool.
#[derive(Serialize, ToSchema)]
#[allow(dead_code, reason = "describes the document")]
pub(super) struct RehearsedChangeBody {
    tool: String,
    agent: String,
    /// Decision of the present rules.
    before: String,
    /// Decision of the proposed rules.
    after: String,
    rule_id: Option<String>,
    calls: u64,
    /// Id of the newest of these calls.
    example: String,
}

/// The result of a rehearsal.
#[derive(Serialize, ToSchema)]
#[allow(dead_code, reason = "describes the document")]
pub(super) struct RehearsalBody {
    /// Number of recorded calls that were decided again.
    calls: u64,
    /// Number of them that would be decided differently.
    changed: u64,
    changes: Vec<RehearsedChangeBody>,
    truncated: bool,
}

/// Decides recorded calls again by a proposed set of rules, and lists what would change.
#[utoipa::path(post, path = "/v1/rules/rehearse", tag = "operators", request_body = RehearseBody,
    responses((status = 200, body = RehearsalBody), (status = 403, body = ProblemDetails),
        (status = 422, body = ProblemDetails)))]
pub(super) async fn rehearse(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    JsonBody(body): JsonBody<Value>,
) -> Result<Json<Value>, ApiError> {
    let (proposed, days) = rules::parse_rehearsal(&caller.project, &body)?;
    let rehearsal = state.engine.admin().rehearse_rules(&caller, proposed, days).await?;
    Ok(Json(rules::render_rehearsal(&rehearsal)))
}
