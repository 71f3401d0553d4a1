//! Calls: show, list, cancel, answer elicitations.

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use toolcrib::engine::CallQuery;
use toolcrib::fault::Error;
use toolcrib::{Call, CallId, Status};
use utoipa::{IntoParams, ToSchema};

use super::super::Door;
use super::super::answer::{Problem, Refused};
use super::super::paging;
use super::super::question::{Asked, Body, CallPath, Who, wrong_parameter};
use super::super::waiting::{Wait, poll_later};
use super::super::wire::CallBody;
use crate::doors::form;

/// Returns a call. With `wait_ms`, responds once the call has ended or the wait has expired.
#[utoipa::path(get, path = "/v1/tool_calls/{tool_call_id}", tag = "agents",
    params(("tool_call_id" = String, Path, description = "The ticket"), Wait),
    responses((status = 200, body = CallBody), (status = 404, body = Problem)))]
pub(super) async fn show(
    State(door): State<Door>,
    Who(caller): Who,
    CallPath(id): CallPath,
    wait: Wait,
) -> Result<Response, Refused> {
    let call = match wait.ms(None) {
        None | Some(0) => door.engine.call(&caller, &id).await?,
        Some(wait_ms) => door.engine.wait(&caller, &id, wait_ms).await?,
    };
    Ok(shown(&door, &call))
}

fn shown(door: &Door, call: &Call) -> Response {
    let mut answer = Json(CallBody::of(&door.engine, call)).into_response();
    if !call.status.is_terminal() {
        poll_later(&mut answer);
    }
    answer
}

/// Filters of the call list.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct Listing {
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
#[utoipa::path(get, path = "/v1/tool_calls", tag = "agents", params(Listing),
    responses((status = 200, body = CallList), (status = 422, body = Problem)))]
pub(super) async fn list(
    State(door): State<Door>,
    Who(caller): Who,
    Asked(listing): Asked<Listing>,
) -> Result<Response, Refused> {
    let page = door.engine.calls(&caller, query(listing)?).await?;
    let next_cursor = page.before.map(|id| id.to_string());
    let list = CallList {
        tool_calls: page.calls.iter().map(|call| CallBody::of(&door.engine, call)).collect(),
        next_cursor: next_cursor.clone(),
    };
    Ok(paging::page(list, next_cursor))
}

fn query(listing: Listing) -> Result<CallQuery, Error> {
    let status = match listing.status.as_deref() {
        None | Some("") => None,
        Some(text) => Some(text.to_uppercase().parse::<Status>().map_err(|()| {
            let known: Vec<&str> = Status::ALL.iter().map(|status| status.as_str()).collect();
            wrong_parameter("status", format!("status must be one of {}", known.join(", ")))
        })?),
    };
    let since_ms = since(listing.since.as_deref())?;
    let (before, limit) = page_of(listing.cursor.as_deref(), listing.limit)?;
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
pub(super) fn since(text: Option<&str>) -> Result<Option<u64>, Error> {
    let Some(text) = text.filter(|text| !text.is_empty()) else { return Ok(None) };
    let message = "since must be Unix seconds or milliseconds, or an RFC 3339 time";
    time(text).map(Some).ok_or_else(|| wrong_parameter("since", message))
}

/// Default page size.
pub(super) const PAGE: u64 = 50;

pub(super) fn unknown_cursor() -> Error {
    wrong_parameter("cursor", "cursor is not one that was given out")
}

/// Validates the page size.
pub(super) fn page_limit(limit: Option<u64>, usual: u64) -> Result<usize, Error> {
    let limit = limit.unwrap_or(usual);
    if !(1..=200).contains(&limit) {
        return Err(wrong_parameter("limit", "limit must be from 1 to 200"));
    }
    Ok(limit as usize)
}

/// Parses the cursor and the page size.
pub(super) fn page_of(
    cursor: Option<&str>,
    limit: Option<u64>,
) -> Result<(Option<CallId>, usize), Error> {
    let before = match cursor {
        None | Some("") => None,
        Some(text) => Some(text.parse().map_err(|_| unknown_cursor())?),
    };
    Ok((before, page_limit(limit, PAGE)?))
}

/// Parses a time given as Unix seconds, Unix milliseconds or RFC 3339 into Unix milliseconds.
fn time(text: &str) -> Option<u64> {
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
pub(super) struct CancelBody {
    reason: Option<String>,
}

impl CancelBody {
    /// Returns the reason, cut to the stored length.
    pub(super) fn reason(self) -> Option<String> {
        self.reason.map(|reason| reason.chars().take(500).collect())
    }
}

/// Cancels a call and notifies its executor. Canceling twice has the same effect as once.
#[utoipa::path(post, path = "/v1/tool_calls/{tool_call_id}/cancel", tag = "agents",
    params(("tool_call_id" = String, Path, description = "The ticket")),
    request_body = CancelBody,
    responses((status = 200, body = CallBody), (status = 404, body = Problem),
        (status = 409, description = "It has ended otherwise", body = Problem)))]
pub(super) async fn cancel(
    State(door): State<Door>,
    Who(caller): Who,
    CallPath(id): CallPath,
    Body(body): Body<CancelBody>,
) -> Result<Response, Refused> {
    let call = door.engine.cancel(&caller, &id, body.reason()).await?;
    Ok(Json(CallBody::of(&door.engine, &call)).into_response())
}

/// Answers to a tool's questions (MCP elicitation).
#[derive(Deserialize, ToSchema)]
pub(super) struct AnswerBody {
    /// Answers, by the keys of the questions.
    #[schema(value_type = Object)]
    answers: serde_json::Map<String, serde_json::Value>,
}

/// Answers all or some of the questions of a call's tool (`hold.questions`).
///
/// With the last answer the call continues.
#[utoipa::path(post, path = "/v1/tool_calls/{tool_call_id}/answer", tag = "agents",
    params(("tool_call_id" = String, Path, description = "The ticket")),
    request_body = AnswerBody,
    responses((status = 200, body = CallBody), (status = 404, body = Problem),
        (status = 409, description = "It does not wait for answers", body = Problem),
        (status = 422, description = "An answer does not fit the form", body = Problem)))]
pub(super) async fn answer(
    State(door): State<Door>,
    Who(caller): Who,
    CallPath(id): CallPath,
    Body(body): Body<AnswerBody>,
) -> Result<Response, Refused> {
    if caller.may_invoke() {
        let call = door.engine.call(&caller, &id).await?;
        form::check(&call, &body.answers)?;
    }
    let call = door.engine.answer(&caller, &id, body.answers).await?;
    Ok(shown(&door, &call))
}
