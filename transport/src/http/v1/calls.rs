//! Calls: show, list, cancel, answer elicitations.

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use toolcrib::calls::{CallQuery, Until};
use toolcrib::domain::fault::Error;
use toolcrib::{Call, CallId, Status};
use utoipa::{IntoParams, ToSchema};

use super::super::HttpState;
use super::super::wire::CallBody;
use crate::elicitation_answers;
use crate::http::extract::{
    AuthenticatedCaller, CallPath, JsonBody, QueryParams, invalid_parameter,
};
use crate::http::pagination;
use crate::http::problem::{ApiError, ProblemDetails};
use crate::http::wait_param::{WaitParam, set_retry_after};

/// Returns a call. With `wait_ms`, responds once the call has ended or the wait has expired.
#[utoipa::path(get, path = "/v1/tool_calls/{tool_call_id}", tag = "agents",
    params(("tool_call_id" = String, Path, description = "The ticket"), WaitParam),
    responses((status = 200, body = CallBody), (status = 404, body = ProblemDetails)))]
pub(super) async fn show(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    CallPath(id): CallPath,
    wait: WaitParam,
) -> Result<Response, ApiError> {
    let call = match wait.resolve_ms(None) {
        None | Some(0) => state.engine.calls().call(&caller, &id).await?,
        Some(wait_ms) => {
            state.engine.calls().wait(&caller, &id, Until::EndedWithin(wait_ms)).await?
        }
    };
    Ok(call_response(&state, &call))
}

fn call_response(state: &HttpState, call: &Call) -> Response {
    let mut answer = Json(CallBody::new(&state.engine, call)).into_response();
    if !call.status.is_terminal() {
        set_retry_after(&mut answer);
    }
    answer
}

/// Filters of the call list.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct CallListQuery {
    /// Only calls of this run.
    run_id: Option<String>,
    /// Only calls of this tool.
    tool_name: Option<String>,
    /// Only calls in this status.
    status: Option<String>,
    /// Only calls created since this time: Unix seconds or milliseconds, or an RFC 3339 time.
    since: Option<String>,
    /// Maximum number of calls, 1 to 200 (default: 50).
    limit: Option<u64>,
    /// `next_cursor` of the previous page.
    cursor: Option<String>,
}

/// A page of calls, newest first.
#[derive(Serialize, ToSchema)]
pub(super) struct CallList<'a> {
    tool_calls: Vec<CallBody<'a>>,
    /// Cursor of the next page; null on the last page.
    next_cursor: Option<String>,
}

/// Lists the project's calls, newest first.
#[utoipa::path(get, path = "/v1/tool_calls", tag = "agents", params(CallListQuery),
    responses((status = 200, body = CallList), (status = 422, body = ProblemDetails)))]
pub(super) async fn list(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    QueryParams(listing): QueryParams<CallListQuery>,
) -> Result<Response, ApiError> {
    let page = state.engine.calls().calls(&caller, parse_query(listing)?).await?;
    let next_cursor = page.next_before.map(|id| id.to_string());
    let list = CallList {
        tool_calls: page.calls.iter().map(|call| CallBody::new(&state.engine, call)).collect(),
        next_cursor: next_cursor.clone(),
    };
    Ok(pagination::page_response(list, next_cursor))
}

fn parse_query(listing: CallListQuery) -> Result<CallQuery, Error> {
    let status = match listing.status.as_deref() {
        None | Some("") => None,
        Some(text) => Some(text.to_uppercase().parse::<Status>().map_err(|()| {
            let statuses: Vec<&str> = Status::ALL.iter().map(|status| status.as_str()).collect();
            invalid_parameter("status", format!("status must be one of {}", statuses.join(", ")))
        })?),
    };
    let since_ms = parse_since(listing.since.as_deref())?;
    let (before, limit) = parse_page(listing.cursor.as_deref(), listing.limit)?;
    Ok(CallQuery {
        run_id: listing.run_id,
        tool_name: listing.tool_name,
        status,
        background: false,
        since_ms,
        before,
        limit,
    })
}

/// Parses `since` into Unix milliseconds.
pub(super) fn parse_since(text: Option<&str>) -> Result<Option<u64>, Error> {
    let Some(text) = text.filter(|text| !text.is_empty()) else { return Ok(None) };
    let message = "since must be Unix seconds or milliseconds, or an RFC 3339 time";
    parse_time(text).map(Some).ok_or_else(|| invalid_parameter("since", message))
}

/// Default page size.
pub(super) const DEFAULT_PAGE_SIZE: u64 = 50;

pub(super) fn unknown_cursor() -> Error {
    invalid_parameter("cursor", "cursor is not valid")
}

/// Validates the page size.
pub(super) fn parse_page_limit(limit: Option<u64>, default: u64) -> Result<usize, Error> {
    let limit = limit.unwrap_or(default);
    if !(1..=200).contains(&limit) {
        return Err(invalid_parameter("limit", "limit must be from 1 to 200"));
    }
    Ok(limit as usize)
}

/// Parses the cursor and the page size.
pub(super) fn parse_page(
    cursor: Option<&str>,
    limit: Option<u64>,
) -> Result<(Option<CallId>, usize), Error> {
    let before = match cursor {
        None | Some("") => None,
        Some(text) => Some(text.parse().map_err(|_| unknown_cursor())?),
    };
    Ok((before, parse_page_limit(limit, DEFAULT_PAGE_SIZE)?))
}

/// Parses a time given as Unix seconds, Unix milliseconds or RFC 3339 into Unix milliseconds.
pub(super) fn parse_time(text: &str) -> Option<u64> {
    // Seconds stay below this until the year 5138; milliseconds have been above it since 1973.
    const SECONDS_BELOW: u64 = 100_000_000_000;
    if let Ok(number) = text.parse::<u64>() {
        return Some(if number < SECONDS_BELOW { number * 1_000 } else { number });
    }
    let time: jiff::Timestamp = text.parse().ok()?;
    u64::try_from(time.as_millisecond()).ok()
}

/// The reason for a cancellation.
#[derive(Deserialize, ToSchema)]
#[schema(as = CancelBody)]
pub(super) struct CancelCallBody {
    reason: Option<String>,
}

impl CancelCallBody {
    /// Returns the reason, truncated to the stored length.
    pub(super) fn reason(self) -> Option<String> {
        self.reason.map(|reason| reason.chars().take(500).collect())
    }
}

/// Cancels a call and notifies its executor. Canceling twice has the same effect as once.
#[utoipa::path(post, path = "/v1/tool_calls/{tool_call_id}/cancel", tag = "agents",
    params(("tool_call_id" = String, Path, description = "The ticket")),
    request_body = CancelCallBody,
    responses((status = 200, body = CallBody), (status = 404, body = ProblemDetails),
        (status = 409, description = "It has already ended", body = ProblemDetails)))]
pub(super) async fn cancel(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    CallPath(id): CallPath,
    JsonBody(body): JsonBody<CancelCallBody>,
) -> Result<Response, ApiError> {
    let call = state.engine.calls().cancel(&caller, &id, body.reason()).await?;
    Ok(Json(CallBody::new(&state.engine, &call)).into_response())
}

/// Answers to a tool's questions (MCP elicitation).
#[derive(Deserialize, ToSchema)]
#[schema(as = AnswerBody)]
pub(super) struct ElicitationAnswerBody {
    /// Answers, by the keys of the questions.
    #[schema(value_type = Object)]
    answers: serde_json::Map<String, serde_json::Value>,
}

/// Answers all or some of the questions of a call's tool (`hold_details.questions`).
///
/// With the last answer the call continues.
#[utoipa::path(post, path = "/v1/tool_calls/{tool_call_id}/answer", tag = "agents",
    params(("tool_call_id" = String, Path, description = "The ticket")),
    request_body = ElicitationAnswerBody,
    responses((status = 200, body = CallBody), (status = 404, body = ProblemDetails),
        (status = 409, description = "It does not wait for answers", body = ProblemDetails),
        (status = 422, description = "An answer does not fit the form", body = ProblemDetails)))]
pub(super) async fn answer(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    CallPath(id): CallPath,
    JsonBody(body): JsonBody<ElicitationAnswerBody>,
) -> Result<Response, ApiError> {
    if caller.may_invoke() {
        let call = state.engine.calls().call(&caller, &id).await?;
        elicitation_answers::check_answers(&call, &body.answers).await?;
    }
    let call = state.engine.calls().answer_elicitation(&caller, &id, body.answers).await?;
    Ok(call_response(&state, &call))
}
