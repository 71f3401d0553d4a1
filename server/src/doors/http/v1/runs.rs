//! Runs: agent loops that Toolcrib stores and drives. Start, show, list, add messages, cancel,
//! resume, replay.

mod asked;
pub(super) mod replay;
mod shown;
mod stream;

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use toolcrib::engine::RunQuery;
use toolcrib::fault::Error;
use toolcrib::run::{Run, RunStatus};
use utoipa::{IntoParams, ToSchema};

use self::asked::{MessagesBody, RunBody};
use self::shown::{RunAnswer, RunSummary, summary, whole};
use super::super::Door;
use super::super::answer::{Problem, Refused};
use super::super::paging;
use super::super::question::{Asked, Body, Carried, NamePath, Who, wrong_parameter};
use super::super::waiting::Wait;
use super::calls::{PAGE, page_limit, since, unknown_cursor};

pub(super) use stream::follow;

/// Starts a run.
///
/// Toolcrib sends the conversation to the model, executes the tools that the model calls, and
/// returns the results to it, until the model gives a final answer or the run reaches a limit.
/// Every step is stored and survives a crash.
#[utoipa::path(post, path = "/v1/runs", tag = "runs",
    params(Wait,
        ("Idempotency-Key" = Option<String>, Header, description = "Same key, same run")),
    request_body = RunBody,
    responses(
        (status = 200, description = "With wait_ms, when it is over; with stream, its events",
            body = RunAnswer),
        (status = 202, description = "It goes on", body = RunAnswer),
        (status = 400, body = Problem), (status = 403, body = Problem),
        (status = 413, body = Problem), (status = 422, body = Problem),
        (status = 503, body = Problem)))]
pub(super) async fn start(
    State(door): State<Door>,
    Who(caller): Who,
    wait: Wait,
    carried: Carried,
    headers: HeaderMap,
    Body(body): Body<RunBody>,
) -> Result<Response, Refused> {
    let key = carried.idempotency_key(body.idempotency_key()?)?;
    let (streams, wait_ms) = (body.stream()?, wait.ms(body.wait_ms()?));
    let mut new = body.read(door.engine.models().as_ref())?;
    (new.idempotency_key, new.traceparent, new.listens) = (key, carried.traceparent, streams);
    let started = Box::pin(door.engine.start_run(&caller, new)).await?;
    let (id, replayed) = (started.run.id.clone(), started.replayed);
    let mut answer = if streams {
        follow(door.engine, caller, &headers, id.clone(), 0, started.news).into_response()
    } else {
        let run = match wait_ms {
            None | Some(0) => started.run,
            Some(wait_ms) => door.engine.wait_run(&caller, &id, wait_ms).await?,
        };
        answered(&door, &caller, &run).await?
    };
    let headers = answer.headers_mut();
    if let Ok(place) = HeaderValue::from_str(&format!("/v1/runs/{id}")) {
        headers.insert(header::LOCATION, place);
    }
    if let Ok(id) = HeaderValue::from_str(&id) {
        headers.insert("toolcrib-run-id", id);
    }
    if replayed {
        headers.insert("idempotent-replayed", HeaderValue::from_static("true"));
    }
    Ok(answer)
}

/// Responds with 200 if the run has ended, and with 202 otherwise.
async fn answered(door: &Door, caller: &toolcrib::Caller, run: &Run) -> Result<Response, Refused> {
    let status = if run.status.is_over() { StatusCode::OK } else { StatusCode::ACCEPTED };
    let body = whole(&door.engine, caller, run).await?;
    Ok((status, Json(body)).into_response())
}

/// Returns a run: status, answer, steps, calls and usage.
#[utoipa::path(get, path = "/v1/runs/{run_id}", tag = "runs",
    params(("run_id" = String, Path, description = "The run"), Wait),
    responses((status = 200, body = RunAnswer), (status = 404, body = Problem)))]
pub(super) async fn show(
    State(door): State<Door>,
    Who(caller): Who,
    NamePath(run_id): NamePath,
    wait: Wait,
) -> Result<Response, Refused> {
    let run = match wait.ms(None) {
        None | Some(0) => door.engine.loop_run(&caller, &run_id).await?,
        Some(wait_ms) => door.engine.wait_run(&caller, &run_id, wait_ms).await?,
    };
    Ok(Json(whole(&door.engine, &caller, &run).await?).into_response())
}

/// Filters of the run list.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct Listing {
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
#[utoipa::path(get, path = "/v1/runs", tag = "runs", params(Listing),
    responses((status = 200, body = RunList), (status = 422, body = Problem)))]
pub(super) async fn list(
    State(door): State<Door>,
    Who(caller): Who,
    Asked(listing): Asked<Listing>,
) -> Result<Response, Refused> {
    let page = door.engine.loop_runs(&caller, query(listing)?).await?;
    let runs = page.runs.iter().map(summary).collect();
    let list = RunList { runs, next_cursor: page.before.clone() };
    Ok(paging::page(list, page.before))
}

fn query(listing: Listing) -> Result<RunQuery, Error> {
    let status = match listing.status.as_deref() {
        None | Some("") => None,
        Some(text) => Some(text.to_uppercase().parse::<RunStatus>().map_err(|()| {
            let known: Vec<&str> = RunStatus::ALL.iter().map(|status| status.as_str()).collect();
            wrong_parameter("status", format!("status must be one of {}", known.join(", ")))
        })?),
    };
    let before = listing.cursor.filter(|cursor| !cursor.is_empty());
    if before.as_ref().is_some_and(|cursor| !cursor.starts_with(Run::PREFIX)) {
        return Err(unknown_cursor());
    }
    Ok(RunQuery {
        status,
        model: listing.model.filter(|model| !model.is_empty()),
        since_ms: since(listing.since.as_deref())?,
        before,
        limit: page_limit(listing.limit, PAGE)?,
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
    responses((status = 200, body = RunSummary), (status = 403, body = Problem),
        (status = 404, body = Problem), (status = 409, body = Problem)))]
pub(super) async fn cancel(
    State(door): State<Door>,
    Who(caller): Who,
    NamePath(run_id): NamePath,
    Body(body): Body<CancelRunBody>,
) -> Result<Json<RunSummary>, Refused> {
    let run = door.engine.cancel_run(&caller, &run_id, body.reason).await?;
    Ok(Json(summary(&run)))
}

/// Adds user messages to a run. The run continues, even if it had ended.
#[utoipa::path(post, path = "/v1/runs/{run_id}/messages", tag = "runs",
    params(("run_id" = String, Path, description = "The run"), Wait),
    request_body = MessagesBody,
    responses((status = 200, description = "With wait_ms, when it is over", body = RunAnswer),
        (status = 202, description = "It goes on", body = RunAnswer),
        (status = 403, body = Problem), (status = 404, body = Problem),
        (status = 422, body = Problem)))]
pub(super) async fn say(
    State(door): State<Door>,
    Who(caller): Who,
    NamePath(run_id): NamePath,
    wait: Wait,
    Body(body): Body<MessagesBody>,
) -> Result<Response, Refused> {
    let wait_ms = wait.ms(body.wait_ms()?);
    let run = door.engine.say_to_run(&caller, &run_id, body.messages()?).await?;
    waited(&door, &caller, run, wait_ms).await
}

/// Resumes a run that failed or was canceled, from its last stored step.
#[utoipa::path(post, path = "/v1/runs/{run_id}/resume", tag = "runs",
    params(("run_id" = String, Path, description = "The run"), Wait),
    responses((status = 200, description = "With wait_ms, when it is over", body = RunAnswer),
        (status = 202, description = "It goes on", body = RunAnswer),
        (status = 403, body = Problem), (status = 404, body = Problem),
        (status = 409, body = Problem)))]
pub(super) async fn resume(
    State(door): State<Door>,
    Who(caller): Who,
    NamePath(run_id): NamePath,
    wait: Wait,
) -> Result<Response, Refused> {
    let run = door.engine.resume_run(&caller, &run_id).await?;
    waited(&door, &caller, run, wait.ms(None)).await
}

async fn waited(
    door: &Door,
    caller: &toolcrib::Caller,
    run: Run,
    wait_ms: Option<u64>,
) -> Result<Response, Refused> {
    let run = match wait_ms {
        None | Some(0) => run,
        Some(wait_ms) => door.engine.wait_run(caller, &run.id, wait_ms).await?,
    };
    answered(door, caller, &run).await
}
