//! Background tasks: a view of calls for callers that do not wait for them.

use axum::Json;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use toolcrib::Call;
use toolcrib::calls::{CallQuery, Until};
use toolcrib::domain::event::EventRecord;
use toolcrib_protocol::background_task::{parse_status, task_status};
use utoipa::{IntoParams, ToSchema};

use super::super::HttpState;
use super::super::wire::{FaultBody, MetricsBody};
use super::calls::{CancelCallBody, parse_page};
use super::events::{EventStreamQuery, SseResponse, resume_position, stream_task_events};
use crate::auth::RequestCredentials;
use crate::http::extract::{
    AuthenticatedCaller, CallPath, JsonBody, QueryParams, invalid_parameter,
};
use crate::http::pagination;
use crate::http::problem::{ApiError, ProblemDetails};
use crate::http::wait_param::{WaitParam, set_retry_after};

/// A task, with its outcome once it has ended.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct TaskBody<'a> {
    /// The ticket.
    task_id: &'a str,
    /// The same as `task_id`.
    tool_call_id: &'a str,
    /// The caller's own id for the call.
    call_id: Option<&'a str>,
    run_id: &'a str,
    tool_name: &'a str,
    /// `submitted`, `running`, `completed`, `failed`, `timeout` or `canceled`.
    status: &'static str,
    /// True if the tool is async. Calls of other tools are shown as well.
    #[serde(rename = "async")]
    background: bool,
    /// The last reported progress. Omitted in lists.
    #[serde(skip_serializing_if = "Option::is_none")]
    progress: Option<TaskProgress>,
    #[schema(value_type = Option<serde_json::Value>)]
    result: Option<toolcrib::Json>,
    error: Option<FaultBody>,
    metrics: Option<MetricsBody>,
    /// Unix seconds.
    created_at: u64,
    /// Unix seconds.
    completed_at: Option<u64>,
    created_at_ms: u64,
    started_at_ms: Option<u64>,
    completed_at_ms: Option<u64>,
    /// Time at which the task times out, in Unix milliseconds.
    deadline_at_ms: u64,
}

/// Reported progress of a task.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct TaskProgress {
    /// 0 to 100.
    #[serde(skip_serializing_if = "Option::is_none")]
    percent: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<serde_json::Value>)]
    data: Option<Value>,
    at_ms: u64,
}

impl std::convert::From<EventRecord> for TaskProgress {
    fn from(mut record: EventRecord) -> Self {
        Self {
            percent: record.data.get("percent").and_then(Value::as_f64),
            message: record.data.get("message").and_then(Value::as_str).map(str::to_owned),
            data: record.data.remove("data"),
            at_ms: record.at_ms,
        }
    }
}

impl<'a> TaskBody<'a> {
    fn new(call: &'a Call, progress: Option<EventRecord>) -> Self {
        let outcome = call.outcome.as_ref();
        Self {
            task_id: call.id.as_str(),
            tool_call_id: call.id.as_str(),
            call_id: call.origin.caller_call_id.as_deref(),
            run_id: &call.run_id,
            tool_name: &call.tool_name,
            status: task_status(call.status),
            background: call.origin.background,
            progress: progress.map(TaskProgress::from),
            result: outcome.and_then(|outcome| outcome.data.clone()),
            error: outcome.and_then(|outcome| outcome.error.as_ref()).map(FaultBody::from),
            metrics: outcome.map(|outcome| MetricsBody::from(outcome.metrics)),
            created_at: call.created_ms / 1_000,
            completed_at: call.completed_ms.map(|ms| ms / 1_000),
            created_at_ms: call.created_ms,
            started_at_ms: call.started_ms,
            completed_at_ms: call.completed_ms,
            deadline_at_ms: call.deadline_ms,
        }
    }
}

/// Returns a task. With `wait_ms`, responds once the task has ended or the wait has expired.
#[utoipa::path(get, path = "/v1/tasks/{task_id}", tag = "agents",
    params(("task_id" = String, Path, description = "The ticket"), WaitParam),
    responses((status = 200, body = TaskBody), (status = 404, body = ProblemDetails)))]
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
    let progress = state.engine.calls().newest_progress(&caller, &id).await?;
    let mut answer = Json(TaskBody::new(&call, progress)).into_response();
    if !call.status.is_terminal() {
        set_retry_after(&mut answer);
    }
    Ok(answer)
}

/// Filters of the task list.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct TaskListQuery {
    /// Only tasks of this run.
    run_id: Option<String>,
    /// Only tasks of this tool.
    tool_name: Option<String>,
    /// Only tasks in this status: `submitted`, `running`, `completed`, `failed`, `timeout`,
    /// `canceled`.
    status: Option<String>,
    /// Maximum number of tasks, 1 to 200 (default: 50).
    limit: Option<u64>,
    /// `next_cursor` of the previous page.
    cursor: Option<String>,
}

/// A page of tasks, newest first.
#[derive(Serialize, ToSchema)]
pub(super) struct TaskList<'a> {
    tasks: Vec<TaskBody<'a>>,
    /// Cursor of the next page; null on the last page.
    next_cursor: Option<String>,
}

/// Lists the background tasks of the project that the caller may read, newest first.
#[utoipa::path(get, path = "/v1/tasks", tag = "agents", params(TaskListQuery),
    responses((status = 200, body = TaskList), (status = 422, body = ProblemDetails)))]
pub(super) async fn list(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    QueryParams(listing): QueryParams<TaskListQuery>,
) -> Result<Response, ApiError> {
    let status = match listing.status.as_deref() {
        None | Some("") => None,
        Some(word) => Some(parse_status(&word.to_lowercase()).ok_or_else(|| {
            let statuses = toolcrib::Status::ALL.map(task_status).join(", ");
            invalid_parameter("status", format!("status must be one of {statuses}"))
        })?),
    };
    let (before, limit) = parse_page(listing.cursor.as_deref(), listing.limit)?;
    let query = CallQuery {
        run_id: listing.run_id,
        tool_name: listing.tool_name,
        status,
        background: true,
        since_ms: None,
        before,
        limit,
    };
    let page = state.engine.calls().calls(&caller, query).await?;
    let next_cursor = page.next_before.map(|id| id.to_string());
    let list = TaskList {
        tasks: page.calls.iter().map(|call| TaskBody::new(call, None)).collect(),
        next_cursor: next_cursor.clone(),
    };
    Ok(pagination::page_response(list, next_cursor))
}

/// Cancels a task and notifies its executor. Canceling twice has the same effect as once.
#[utoipa::path(post, path = "/v1/tasks/{task_id}/cancel", tag = "agents",
    params(("task_id" = String, Path, description = "The ticket")),
    request_body = CancelCallBody,
    responses((status = 200, body = TaskBody), (status = 404, body = ProblemDetails),
        (status = 409, description = "It has already ended", body = ProblemDetails)))]
pub(super) async fn cancel(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    CallPath(id): CallPath,
    JsonBody(body): JsonBody<CancelCallBody>,
) -> Result<Response, ApiError> {
    let call = state.engine.calls().cancel(&caller, &id, body.reason()).await?;
    Ok(Json(TaskBody::new(&call, None)).into_response())
}

/// Streams the events of one task until it ends.
///
/// The events are `task.submit`, `task.progress`, and `task.completed` or `task.failed`.
#[utoipa::path(get, path = "/v1/tasks/{task_id}/events", tag = "agents",
    params(("task_id" = String, Path, description = "The ticket"), EventStreamQuery,
        ("Last-Event-ID" = Option<u64>, Header, description = "Continue after this event")),
    responses((status = 200, description = "Server-sent events", content_type = "text/event-stream"),
        (status = 404, body = ProblemDetails)))]
pub(super) async fn events(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    CallPath(id): CallPath,
    QueryParams(from): QueryParams<EventStreamQuery>,
    headers: HeaderMap,
    credentials: RequestCredentials,
) -> Result<SseResponse, ApiError> {
    state.engine.calls().call(&caller, &id).await?;
    let after = resume_position(&headers, &from)?.unwrap_or(0);
    Ok(stream_task_events(state.engine.clone(), credentials, id, after))
}
