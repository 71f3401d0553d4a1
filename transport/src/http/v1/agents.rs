//! Agents: those that can be called or woken, their turns, and their inboxes.

mod bodies;
pub(super) mod definition;
use axum::Json;
use axum::extract::{FromRequestParts, Path, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use toolcrib::domain::fault::{Code, Error};
use toolcrib::domain::utp::trace;
use toolcrib::utp::TurnResume;
use toolcrib_protocol::utp::turn::{
    self, DispatchBody, FinishBody, LeaseBody, resumed_body, turn_body,
};
use toolcrib_protocol::utp::wire;
use utoipa::{IntoParams, ToSchema};

use self::bodies::{InboxAckedBody, InboxBody, ResumedTurnBody, TurnSchema};
use self::definition::AgentBody;
use super::super::HttpState;
use crate::http::extract::{AuthenticatedCaller, JsonBody, NamePath, QueryParams};
use crate::http::problem::{ApiError, ProblemDetails};
use crate::http::wait_param::admit_long_poll;

/// The agents of the project.
#[derive(Serialize, ToSchema)]
pub(super) struct AgentList {
    agents: Vec<AgentBody>,
}

/// Lists the agents of the project.
#[utoipa::path(get, path = "/v1/agents", tag = "operators",
    responses((status = 200, body = AgentList)))]
pub(super) async fn list(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
) -> Json<AgentList> {
    let roster = state.engine.roster().list(&caller).into_iter().map(AgentBody::from);
    Json(AgentList { agents: roster.collect() })
}

/// Returns one agent.
#[utoipa::path(get, path = "/v1/agents/{agent_id}", tag = "operators",
    params(("agent_id" = String, Path, description = "The agent")),
    responses((status = 200, body = AgentBody), (status = 404, body = ProblemDetails)))]
pub(super) async fn show(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    NamePath(agent_id): NamePath,
) -> Result<Json<AgentBody>, ApiError> {
    Ok(Json(state.engine.roster().agent_entry(&caller, &agent_id)?.into()))
}

/// Removes an agent and its tool. Its open runs continue.
#[utoipa::path(delete, path = "/v1/agents/{agent_id}", tag = "operators",
    params(("agent_id" = String, Path, description = "The agent")),
    responses((status = 204), (status = 403, body = ProblemDetails),
        (status = 404, body = ProblemDetails)))]
pub(super) async fn drop_agent(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    NamePath(agent_id): NamePath,
) -> Result<StatusCode, ApiError> {
    state.engine.roster().remove_agent_entry(&caller, &agent_id).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Wait and page size of an inbox request.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct InboxQuery {
    /// Maximum time to wait for an item, in milliseconds (default: 0).
    wait_ms: Option<u64>,
    /// Maximum number of items, 1 to 200 (default: 20).
    limit: Option<usize>,
}

/// Lists the items of an agent's inbox, oldest first. Items stay until they are acknowledged.
#[utoipa::path(get, path = "/v1/agents/{agent_id}/inbox", tag = "agents",
    params(("agent_id" = String, Path, description = "The agent"), InboxQuery),
    responses((status = 200, body = InboxBody), (status = 403, body = ProblemDetails)))]
pub(super) async fn inbox(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    NamePath(agent_id): NamePath,
    QueryParams(query): QueryParams<InboxQuery>,
    request: Parts,
) -> Result<Json<Value>, ApiError> {
    let limit = query.limit.unwrap_or(20).clamp(1, 200);
    let wait_ms = query.wait_ms.unwrap_or(0);
    let _permit = admit_long_poll(&request, wait_ms)?;
    let items = state.engine.utp().inbox(&caller, &agent_id, limit, wait_ms).await?;
    Ok(Json(json!({ "items": items.iter().map(wire::inbox_item_json).collect::<Vec<_>>() })))
}

/// Inbox items to acknowledge.
#[derive(Deserialize, ToSchema)]
pub(super) struct InboxAckBody {
    inbox_ids: Vec<String>,
}

/// Acknowledges inbox items, which removes them. An item that is already removed is no error.
#[utoipa::path(post, path = "/v1/agents/{agent_id}/inbox/ack", tag = "agents",
    params(("agent_id" = String, Path, description = "The agent")), request_body = InboxAckBody,
    responses((status = 200, body = InboxAckedBody), (status = 403, body = ProblemDetails)))]
pub(super) async fn ack(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    NamePath(agent_id): NamePath,
    JsonBody(body): JsonBody<InboxAckBody>,
) -> Result<Json<Value>, ApiError> {
    let acked = state.engine.utp().take_from_inbox(&caller, &agent_id, &body.inbox_ids).await?;
    Ok(Json(json!({ "ok": true, "acked": acked })))
}

/// Leases a turn: a new one, or one whose lease has expired.
///
/// `traceparent` and `tracestate` may also be sent as headers.
#[utoipa::path(post, path = "/v1/agents/{agent_id}/turns", tag = "agents",
    params(("agent_id" = String, Path, description = "The agent")), request_body = LeaseBody,
    responses((status = 201, body = TurnSchema), (status = 403, body = ProblemDetails),
        (status = 404, body = ProblemDetails), (status = 409, body = ProblemDetails),
        (status = 422, body = ProblemDetails)))]
pub(super) async fn lease(
    State(http_state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    NamePath(agent_id): NamePath,
    headers: HeaderMap,
    JsonBody(body): JsonBody<LeaseBody>,
) -> Result<Response, ApiError> {
    let header =
        |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).map(str::to_owned);
    let mut request = body.into_lease();
    request.traceparent = request.traceparent.or_else(|| header("traceparent"));
    // Any proxy may add this header, so an invalid one does not refuse the turn.
    let state = || header("tracestate").filter(|state| trace::is_valid_tracestate(state));
    request.tracestate = request.tracestate.or_else(state);
    let turn = http_state.engine.utp().lease_turn(&caller, &agent_id, request).await?;
    Ok((StatusCode::CREATED, Json(turn_body(&turn, &[]))).into_response())
}

/// An agent and a turn from the path.
pub(super) struct TurnPath {
    agent: String,
    turn: String,
}

impl FromRequestParts<HttpState> for TurnPath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &HttpState) -> Result<Self, ApiError> {
        let path = Path::<(String, String)>::from_request_parts(parts, state).await;
        let unreadable = |_| Error::refused(Code::BadRequest, "the path is not UTF-8");
        let Path((agent, turn)) = path.map_err(unreadable)?;
        Ok(Self { agent, turn })
    }
}

/// Returns one turn, with the calls of its step.
#[utoipa::path(get, path = "/v1/agents/{agent_id}/turns/{agent_turn_id}", tag = "agents",
    params(("agent_id" = String, Path, description = "The agent"),
        ("agent_turn_id" = String, Path, description = "The turn")),
    responses((status = 200, body = TurnSchema), (status = 404, body = ProblemDetails)))]
pub(super) async fn show_turn(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    path: TurnPath,
) -> Result<Json<Value>, ApiError> {
    let turn = state.engine.utp().turn(&caller, &path.agent, &path.turn).await?;
    let calls = state.engine.utp().step_calls(&turn).await?;
    Ok(Json(turn_body(&turn, &calls)))
}

/// Dispatches the calls of a step and suspends the turn until all of them have ended.
#[utoipa::path(post, path = "/v1/agents/{agent_id}/turns/{agent_turn_id}/dispatch", tag = "agents",
    params(("agent_id" = String, Path, description = "The agent"),
        ("agent_turn_id" = String, Path, description = "The turn")),
    request_body = DispatchBody,
    responses((status = 200, description = "The turn with its calls", body = TurnSchema),
        (status = 404, body = ProblemDetails), (status = 409, body = ProblemDetails),
        (status = 422, body = ProblemDetails)))]
pub(super) async fn dispatch(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    path: TurnPath,
    JsonBody(body): JsonBody<DispatchBody>,
) -> Result<Json<Value>, ApiError> {
    let dispatch = body.into_dispatch();
    let sent =
        Box::pin(state.engine.utp().dispatch_step(&caller, &path.agent, &path.turn, dispatch))
            .await?;
    Ok(Json(turn_body(&sent.turn, &sent.calls)))
}

/// A request to change the state of a turn.
#[derive(Deserialize, ToSchema)]
pub(super) struct TurnBody {
    /// The epoch as the agent knows it. Not required for stop.
    turn_epoch: Option<u64>,
    /// For stop: the reason, published with the end of the turn.
    reason: Option<String>,
    /// For resume: maximum time to wait for open calls, in milliseconds.
    wait_ms: Option<u64>,
    /// For resume: id of the request. Repeating it with the same id returns the same results, in
    /// case the response was lost.
    request_id: Option<String>,
}

impl TurnBody {
    fn epoch(&self) -> Result<u64, Error> {
        let missing = || Error::refused(Code::ValidationError, "turn_epoch is missing");
        self.turn_epoch.ok_or_else(missing)
    }

    /// Returns the reason, truncated to the published length.
    fn reason(&self) -> Option<String> {
        self.reason.as_deref().map(turn::truncate_reason)
    }
}

/// Renews the lease of a running turn.
#[utoipa::path(post, path = "/v1/agents/{agent_id}/turns/{agent_turn_id}/renew", tag = "agents",
    params(("agent_id" = String, Path, description = "The agent"),
        ("agent_turn_id" = String, Path, description = "The turn")), request_body = TurnBody,
    responses((status = 200, body = TurnSchema), (status = 404, body = ProblemDetails),
        (status = 409, body = ProblemDetails)))]
pub(super) async fn renew(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    path: TurnPath,
    JsonBody(body): JsonBody<TurnBody>,
) -> Result<Json<Value>, ApiError> {
    let turn =
        state.engine.utp().renew_lease(&caller, &path.agent, &path.turn, body.epoch()?).await?;
    Ok(Json(turn_body(&turn, &[])))
}

/// Suspends a turn whose calls were dispatched without suspending it.
#[utoipa::path(post, path = "/v1/agents/{agent_id}/turns/{agent_turn_id}/suspend", tag = "agents",
    params(("agent_id" = String, Path, description = "The agent"),
        ("agent_turn_id" = String, Path, description = "The turn")), request_body = TurnBody,
    responses((status = 200, body = TurnSchema), (status = 404, body = ProblemDetails),
        (status = 409, body = ProblemDetails)))]
pub(super) async fn suspend(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    path: TurnPath,
    JsonBody(body): JsonBody<TurnBody>,
) -> Result<Json<Value>, ApiError> {
    let turn =
        state.engine.utp().suspend_turn(&caller, &path.agent, &path.turn, body.epoch()?).await?;
    Ok(Json(turn_body(&turn, &[])))
}

/// Resumes a turn with the results of its step.
///
/// The turn continues in a new epoch, or ends if a result terminates it.
#[utoipa::path(post, path = "/v1/agents/{agent_id}/turns/{agent_turn_id}/resume", tag = "agents",
    params(("agent_id" = String, Path, description = "The agent"),
        ("agent_turn_id" = String, Path, description = "The turn")), request_body = TurnBody,
    responses((status = 200, description = "The turn with the results", body = ResumedTurnBody),
        (status = 404, body = ProblemDetails),
        (status = 409, description = "Calls are still open, or the turn is not suspended", body = ProblemDetails)))]
pub(super) async fn resume(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    path: TurnPath,
    JsonBody(body): JsonBody<TurnBody>,
) -> Result<Json<Value>, ApiError> {
    let (epoch, wait_ms) = (body.epoch()?, body.wait_ms.unwrap_or(0));
    let resume = TurnResume { epoch, wait_ms, request_id: body.request_id };
    let resumed = state.engine.utp().resume_turn(&caller, &path.agent, &path.turn, resume).await?;
    Ok(Json(resumed_body(&resumed)))
}

/// Ends a running turn.
#[utoipa::path(post, path = "/v1/agents/{agent_id}/turns/{agent_turn_id}/finish", tag = "agents",
    params(("agent_id" = String, Path, description = "The agent"),
        ("agent_turn_id" = String, Path, description = "The turn")), request_body = FinishBody,
    responses((status = 200, body = TurnSchema), (status = 404, body = ProblemDetails),
        (status = 409, body = ProblemDetails)))]
pub(super) async fn finish(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    path: TurnPath,
    JsonBody(body): JsonBody<FinishBody>,
) -> Result<Json<Value>, ApiError> {
    let finish = body.into_finish()?;
    let turn = state.engine.utp().finish_turn(&caller, &path.agent, &path.turn, finish).await?;
    Ok(Json(turn_body(&turn, &[])))
}

/// Stops a turn that has not ended, and cancels its open calls. Stopping it twice has no effect.
#[utoipa::path(post, path = "/v1/agents/{agent_id}/turns/{agent_turn_id}/stop", tag = "agents",
    params(("agent_id" = String, Path, description = "The agent"),
        ("agent_turn_id" = String, Path, description = "The turn")), request_body = TurnBody,
    responses((status = 200, body = TurnSchema), (status = 404, body = ProblemDetails),
        (status = 409, body = ProblemDetails)))]
pub(super) async fn stop(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    path: TurnPath,
    JsonBody(body): JsonBody<TurnBody>,
) -> Result<Json<Value>, ApiError> {
    let turn =
        state.engine.utp().stop_turn(&caller, &path.agent, &path.turn, body.reason()).await?;
    Ok(Json(turn_body(&turn, &[])))
}
