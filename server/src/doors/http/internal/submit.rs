//! Reports on a call: acknowledgement, progress, result.

use axum::Json;
use axum::extract::{Request, State};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use toolcrib::Progress;
use toolcrib::engine::Report;
use toolcrib::fault::{Code, Error, Fault};
use utoipa::ToSchema;

use super::super::Door;
use super::super::answer::{Problem, Refused};
use super::super::question::{self, Body, CallPath, Who};
use super::super::wire::reported_fault;

/// The result of a call.
#[derive(Deserialize, ToSchema)]
pub(super) struct SubmitBody {
    /// `SUCCEEDED` or `FAILED`.
    status: String,
    #[serde(default)]
    #[schema(value_type = Option<Object>)]
    result: Option<toolcrib::Json>,
    /// A text, or `{message, code?, detail?, retryable?, happened?}`.
    #[serde(default)]
    #[schema(value_type = Option<Object>)]
    error: Option<Value>,
    /// The client that reports; it must own the call.
    client_id: Option<String>,
    /// Number of the attempt (default: the current one).
    attempt: Option<u32>,
}

impl SubmitBody {
    pub(super) fn report(self) -> Result<Report, Error> {
        let result = match self.status.to_uppercase().as_str() {
            "SUCCEEDED" => Ok(self.result.unwrap_or_else(toolcrib::Json::null)),
            "FAILED" => Err(reported_fault(self.error.as_ref())),
            _ => {
                let message = "status must be SUCCEEDED or FAILED";
                return Err(Fault::new(Code::ValidationError, message).into());
            }
        };
        Ok(Report { attempt: self.attempt, client_id: self.client_id, result })
    }

    pub(super) fn said_by(self, client_id: &str) -> Self {
        Self { client_id: Some(client_id.to_owned()), ..self }
    }
}

/// The status of the call after the report.
#[derive(Serialize, ToSchema)]
pub(super) struct SubmittedBody {
    ok: bool,
    tool_call_id: String,
    /// Status of the call: the submitted one, or PENDING if it will be retried.
    status: &'static str,
}

/// Reads a report. A report that is too large becomes a failure of its attempt; the additional
/// error is the response to the client.
async fn submitted(door: &Door, request: Request) -> Result<(Report, Option<Error>), Error> {
    let limit = door.max_result_body_bytes();
    let too_large = |bytes: Option<usize>| {
        let size = bytes.map_or_else(String::new, |bytes| format!("{bytes} bytes, "));
        let message = format!("the submitted result is too large: {size}over the limit of {limit}");
        Fault::new(Code::PayloadTooLarge, message)
    };
    let refused = |attempt, client_id, fault: Fault| {
        let error = fault.clone().into();
        Ok((Report { attempt, client_id, result: Err(fault) }, Some(error)))
    };
    let read = question::read(request, door.max_report_bytes()).await;
    let bytes = match read.map_err(Refused::into_error) {
        Ok(bytes) => bytes,
        Err(error) if error.code() == Code::PayloadTooLarge => {
            return refused(None, None, too_large(None));
        }
        Err(error) => return Err(error),
    };
    let mended = question::mended(&bytes).map_err(Refused::into_error)?;
    let body: SubmitBody = question::parse_checked(&mended).map_err(Refused::into_error)?;
    if bytes.len() > limit {
        return refused(body.attempt, body.client_id, too_large(Some(bytes.len())));
    }
    Ok((body.report()?, None))
}

/// Submits the result of a call.
///
/// Submitting the same result again returns the same response; a different one returns 409.
#[utoipa::path(post, path = "/internal/tool_calls/{tool_call_id}/submit", tag = "providers",
    params(("tool_call_id" = String, Path, description = "The ticket")),
    request_body = SubmitBody,
    responses((status = 200, body = SubmittedBody), (status = 403, body = Problem),
        (status = 404, body = Problem), (status = 409, body = Problem),
        (status = 413, body = Problem)))]
pub(super) async fn submit(
    State(door): State<Door>,
    Who(caller): Who,
    CallPath(id): CallPath,
    request: Request,
) -> Result<Json<SubmittedBody>, Refused> {
    let (report, too_large) = submitted(&door, request).await?;
    let call = door.engine.report(&caller, &id, report).await?;
    if let Some(error) = too_large {
        return Err(error.into());
    }
    let (tool_call_id, status) = (id.to_string(), call.status.as_str());
    Ok(Json(SubmittedBody { ok: true, tool_call_id, status }))
}

/// The client that takes a call.
#[derive(Deserialize, ToSchema)]
pub(super) struct AckBody {
    client_id: String,
    attempt: Option<u32>,
}

/// Acknowledges a call: it becomes RUNNING and belongs to this client.
#[utoipa::path(post, path = "/internal/tool_calls/{tool_call_id}/ack", tag = "providers",
    params(("tool_call_id" = String, Path, description = "The ticket")),
    request_body = AckBody,
    responses((status = 200, body = SubmittedBody), (status = 403, body = Problem),
        (status = 404, body = Problem), (status = 409, body = Problem)))]
pub(super) async fn ack(
    State(door): State<Door>,
    Who(caller): Who,
    CallPath(id): CallPath,
    Body(body): Body<AckBody>,
) -> Result<Json<SubmittedBody>, Refused> {
    let call = door.engine.take(&caller, &id, &body.client_id, body.attempt).await?;
    let (tool_call_id, status) = (id.to_string(), call.status.as_str());
    Ok(Json(SubmittedBody { ok: true, tool_call_id, status }))
}

/// The progress of a call.
#[derive(Deserialize, ToSchema)]
pub(super) struct ProgressBody {
    client_id: Option<String>,
    attempt: Option<u32>,
    /// 0 to 100.
    percent: Option<f64>,
    message: Option<String>,
    #[schema(value_type = Option<Object>)]
    data: Option<Value>,
}

impl ProgressBody {
    pub(super) fn split(self) -> (Option<String>, Option<u32>, Progress) {
        let Self { client_id, attempt, percent, message, data } = self;
        (client_id, attempt, Progress { percent, message, data })
    }
}

/// The response to a progress report.
#[derive(Serialize, ToSchema)]
pub(super) struct NotedBody {
    ok: bool,
}

/// Reports the progress of a call, which appears in its event stream.
#[utoipa::path(post, path = "/internal/tool_calls/{tool_call_id}/progress", tag = "providers",
    params(("tool_call_id" = String, Path, description = "The ticket")),
    request_body = ProgressBody,
    responses((status = 200, body = NotedBody), (status = 403, body = Problem),
        (status = 404, body = Problem), (status = 409, body = Problem)))]
pub(super) async fn progress(
    State(door): State<Door>,
    Who(caller): Who,
    CallPath(id): CallPath,
    Body(body): Body<ProgressBody>,
) -> Result<Json<NotedBody>, Refused> {
    let (client_id, attempt, progress) = body.split();
    door.engine.progress(&caller, &id, client_id.as_deref(), attempt, progress).await?;
    Ok(Json(NotedBody { ok: true }))
}
