//! Runs: agent loops that Toolcrib stores and drives. Start, show, list, add messages, cancel,
//! resume, replay.

pub(super) mod replay;
mod request;
mod response;
pub(super) mod stream;
pub(super) mod tree;
use axum::Json;
use axum::extract::State;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use stream::stream_run;
use toolcrib::domain::fault::Error;
use toolcrib::domain::run::{Run, RunStatus};
use toolcrib::runs::RunQuery;
use utoipa::{IntoParams, ToSchema};

use super::super::HttpState;
use super::calls::{DEFAULT_PAGE_SIZE, parse_page_limit, parse_since, unknown_cursor};
use crate::auth::RequestCredentials;
use crate::delivery::{JOINED_HEADER, ResponseDeliveries};
use crate::http::extract::{
    AuthenticatedCaller, CallHeaders, NamePath, QueryParams, StrictJsonBody, invalid_parameter,
};
use crate::http::pagination;
use crate::http::problem::{ApiError, ProblemDetails};
use crate::http::v1::runs::request::{MessagesBody, RunBody};
use crate::http::v1::runs::response::{RunDetailBody, RunSummary, run_detail, to_summary};
use crate::http::wait_param::WaitParam;

/// Begins the cursor after a run whose caller chose its id.
const CHOSEN_ID_MARK: &str = "id:";

/// Starts a run.
///
/// Toolcrib sends the conversation to the model, executes the tools that the model calls, and
/// returns the results to it, until the model gives a final answer or the run reaches a limit.
/// Every step is stored and survives a crash.
#[utoipa::path(post, path = "/v1/runs", tag = "runs",
    params(WaitParam,
        ("Idempotency-Key" = Option<String>, Header, description = "Same key, same run")),
    request_body = RunBody,
    responses(
        (status = 200, description = "With wait_ms, the ended run; with stream, its events",
            body = RunDetailBody),
        (status = 202, description = "The run continues", body = RunDetailBody),
        (status = 400, body = ProblemDetails), (status = 403, body = ProblemDetails),
        (status = 413, body = ProblemDetails), (status = 422, body = ProblemDetails),
        (status = 503, body = ProblemDetails)))]
pub(super) async fn start(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    wait: WaitParam,
    carried: CallHeaders,
    credentials: RequestCredentials,
    StrictJsonBody(body): StrictJsonBody<RunBody>,
) -> Result<Response, ApiError> {
    let key = carried.idempotency_key(body.idempotency_key()?)?;
    let (streams, wait_ms) = (body.stream()?, wait.resolve_ms(body.wait_ms()?));
    let mut new = body.to_new_run(state.engine.runs().models().as_ref())?;
    new.rejoin = body.rejoin()?;
    (new.idempotency_key, new.traceparent, new.subscribes) = (key, carried.traceparent, streams);
    let started = Box::pin(state.engine.runs().start_run(&caller, new)).await?;
    let (id, replayed, joined) = (started.run.id.clone(), started.replayed, started.joined);
    let delivery = started.delivery;
    let mut answer = if streams {
        stream_run(state.engine.clone(), credentials, id.clone(), 0, started.subscription)
            .into_response()
    } else {
        let run = match wait_ms {
            None | Some(0) => started.run,
            Some(wait_ms) => state.engine.runs().wait_for_run(&caller, &id, wait_ms).await?,
        };
        let mut detail = run_detail(&state.engine, &caller, &run).await?;
        detail.joined = joined;
        detail_response(&run, detail)
    };
    let headers = answer.headers_mut();
    if let Ok(location) = HeaderValue::from_str(&format!("/v1/runs/{id}")) {
        headers.insert(header::LOCATION, location);
    }
    if let Ok(id) = HeaderValue::from_str(&id) {
        headers.insert("toolcrib-run-id", id);
    }
    if replayed {
        headers.insert("idempotent-replayed", HeaderValue::from_static("true"));
    }
    if joined && let Ok(id) = HeaderValue::from_str(&id) {
        headers.insert(JOINED_HEADER, id);
    }
    ResponseDeliveries::attach(&mut answer, delivery);
    Ok(answer)
}

/// Responds with 200 if the run has ended, and with 202 otherwise.
async fn run_response(
    state: &HttpState,
    caller: &toolcrib::Caller,
    run: &Run,
) -> Result<Response, ApiError> {
    Ok(detail_response(run, run_detail(&state.engine, caller, run).await?))
}

fn detail_response(run: &Run, detail: RunDetailBody) -> Response {
    let status = if run.status.is_terminal() { StatusCode::OK } else { StatusCode::ACCEPTED };
    (status, Json(detail)).into_response()
}

/// Returns a run: status, answer, steps, calls and usage.
#[utoipa::path(get, path = "/v1/runs/{run_id}", tag = "runs",
    params(("run_id" = String, Path, description = "The run"), WaitParam),
    responses((status = 200, body = RunDetailBody), (status = 404, body = ProblemDetails)))]
pub(super) async fn show(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    NamePath(run_id): NamePath,
    wait: WaitParam,
) -> Result<Response, ApiError> {
    let run = match wait.resolve_ms(None) {
        None | Some(0) => state.engine.runs().find_run(&caller, &run_id).await?,
        Some(wait_ms) => state.engine.runs().wait_for_run(&caller, &run_id, wait_ms).await?,
    };
    Ok(Json(run_detail(&state.engine, &caller, &run).await?).into_response())
}

/// Filters of the run list.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct RunListQuery {
    /// Only runs in this status: `RUNNING`, `WAITING`, `SUCCEEDED`, `FAILED` or `CANCELED`.
    status: Option<String>,
    /// Only runs with this model.
    model: Option<String>,
    /// Only runs created since this time: Unix seconds or milliseconds, or an RFC 3339 time.
    since: Option<String>,
    /// Maximum number of runs, 1 to 200 (default: 50).
    limit: Option<u64>,
    /// `next_cursor` of the previous page.
    cursor: Option<String>,
}

/// A page of runs, newest first.
#[derive(Serialize, ToSchema)]
pub(super) struct RunList {
    runs: Vec<RunSummary>,
    /// Cursor of the next page; null on the last page.
    next_cursor: Option<String>,
}

/// Lists the project's runs, newest first.
#[utoipa::path(get, path = "/v1/runs", tag = "runs", params(RunListQuery),
    responses((status = 200, body = RunList), (status = 422, body = ProblemDetails)))]
pub(super) async fn list(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    QueryParams(listing): QueryParams<RunListQuery>,
) -> Result<Response, ApiError> {
    let page = state.engine.runs().list_runs(&caller, parse_query(listing)?).await?;
    let runs = page.runs.iter().map(to_summary).collect();
    let next_cursor = page.next_before.map(cursor_after);
    let list = RunList { runs, next_cursor: next_cursor.clone() };
    Ok(pagination::page_response(list, next_cursor))
}

/// Returns the cursor of the page after this run. The run of a conversation may have any id that
/// its caller gave it; its cursor is marked, so that arbitrary words are still refused.
fn cursor_after(run_id: String) -> String {
    match run_id.starts_with(Run::PREFIX) {
        true => run_id,
        false => format!("{CHOSEN_ID_MARK}{run_id}"),
    }
}

fn parse_cursor(cursor: &str) -> Result<String, Error> {
    let chosen = cursor.strip_prefix(CHOSEN_ID_MARK);
    let id = chosen.or_else(|| cursor.starts_with(Run::PREFIX).then_some(cursor));
    id.map(str::to_owned).ok_or_else(unknown_cursor)
}

fn parse_query(listing: RunListQuery) -> Result<RunQuery, Error> {
    let status = match listing.status.as_deref() {
        None | Some("") => None,
        Some(text) => Some(text.to_uppercase().parse::<RunStatus>().map_err(|()| {
            let statuses: Vec<&str> = RunStatus::ALL.iter().map(|status| status.as_str()).collect();
            invalid_parameter("status", format!("status must be one of {}", statuses.join(", ")))
        })?),
    };
    let cursor = listing.cursor.filter(|cursor| !cursor.is_empty());
    let before = cursor.as_deref().map(parse_cursor).transpose()?;
    Ok(RunQuery {
        status,
        model: listing.model.filter(|model| !model.is_empty()),
        since_ms: parse_since(listing.since.as_deref())?,
        before,
        limit: parse_page_limit(listing.limit, DEFAULT_PAGE_SIZE)?,
    })
}

/// The reason for a cancellation.
#[derive(Deserialize, ToSchema)]
pub(super) struct CancelRunBody {
    reason: Option<String>,
}

/// Cancels a run and its open calls.
#[utoipa::path(post, path = "/v1/runs/{run_id}/cancel", tag = "runs",
    params(("run_id" = String, Path, description = "The run")),
    request_body = CancelRunBody,
    responses((status = 200, body = RunSummary), (status = 403, body = ProblemDetails),
        (status = 404, body = ProblemDetails), (status = 409, body = ProblemDetails)))]
pub(super) async fn cancel(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    NamePath(run_id): NamePath,
    StrictJsonBody(body): StrictJsonBody<CancelRunBody>,
) -> Result<Json<RunSummary>, ApiError> {
    let run = state.engine.runs().cancel_run(&caller, &run_id, body.reason).await?;
    Ok(Json(to_summary(&run)))
}

/// Adds user messages to a run. The run continues, even if it had ended.
#[utoipa::path(post, path = "/v1/runs/{run_id}/messages", tag = "runs",
    params(("run_id" = String, Path, description = "The run"), WaitParam),
    request_body = MessagesBody,
    responses((status = 200, description = "With wait_ms, the ended run", body = RunDetailBody),
        (status = 202, description = "The run continues", body = RunDetailBody),
        (status = 403, body = ProblemDetails), (status = 404, body = ProblemDetails),
        (status = 422, body = ProblemDetails)))]
pub(super) async fn add_messages(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    NamePath(run_id): NamePath,
    wait: WaitParam,
    StrictJsonBody(body): StrictJsonBody<MessagesBody>,
) -> Result<Response, ApiError> {
    let wait_ms = wait.resolve_ms(body.wait_ms()?);
    let run = state.engine.runs().add_run_messages(&caller, &run_id, body.messages()?).await?;
    wait_and_respond(&state, &caller, run, wait_ms).await
}

/// Resumes a run that failed or was canceled, from its last stored step.
#[utoipa::path(post, path = "/v1/runs/{run_id}/resume", tag = "runs",
    params(("run_id" = String, Path, description = "The run"), WaitParam),
    responses((status = 200, description = "With wait_ms, the ended run", body = RunDetailBody),
        (status = 202, description = "The run continues", body = RunDetailBody),
        (status = 403, body = ProblemDetails), (status = 404, body = ProblemDetails),
        (status = 409, body = ProblemDetails)))]
pub(super) async fn resume(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    NamePath(run_id): NamePath,
    wait: WaitParam,
) -> Result<Response, ApiError> {
    let run = state.engine.runs().resume_run(&caller, &run_id).await?;
    wait_and_respond(&state, &caller, run, wait.resolve_ms(None)).await
}

async fn wait_and_respond(
    state: &HttpState,
    caller: &toolcrib::Caller,
    run: Run,
    wait_ms: Option<u64>,
) -> Result<Response, ApiError> {
    let run = match wait_ms {
        None | Some(0) => run,
        Some(wait_ms) => state.engine.runs().wait_for_run(caller, &run.id, wait_ms).await?,
    };
    run_response(state, caller, &run).await
}
