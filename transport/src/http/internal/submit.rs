//! Reports on a call: acknowledgement, progress, result.

use axum::Json;
use axum::extract::{Request, State};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use toolcrib::AttemptProgress;
use toolcrib::calls::AttemptReport;
use toolcrib::domain::fault::{Code, Error, Fault};
use utoipa::ToSchema;

use super::super::HttpState;
use super::super::wire::parse_reported_fault;
use crate::http::extract::{self, AuthenticatedCaller, CallPath, JsonBody};
use crate::http::problem::{ApiError, ProblemDetails};

/// The result of a call.
#[derive(Deserialize, ToSchema)]
pub(super) struct SubmitBody {
    /// `SUCCEEDED` or `FAILED`.
    status: String,
    #[serde(default)]
    #[schema(value_type = Option<serde_json::Value>)]
    result: Option<toolcrib::Json>,
    /// A text, or `{message, code?, detail?, retryable?, happened?}`.
    #[serde(default)]
    #[schema(value_type = Option<serde_json::Value>)]
    error: Option<Value>,
    /// The client that reports; it must own the call.
    client_id: Option<String>,
    /// Number of the attempt (default: the current one).
    attempt: Option<u32>,
}

impl SubmitBody {
    pub(super) fn into_report(self) -> Result<AttemptReport, Error> {
        let result = match self.status.to_uppercase().as_str() {
            "SUCCEEDED" => Ok(self.result.unwrap_or_else(toolcrib::Json::null)),
            "FAILED" => Err(parse_reported_fault(self.error.as_ref())),
            _ => {
                let message = "status must be SUCCEEDED or FAILED";
                return Err(Fault::new(Code::ValidationError, message).into());
            }
        };
        Ok(AttemptReport { attempt: self.attempt, client_id: self.client_id, result })
    }

    pub(super) fn with_client_id(self, client_id: &str) -> Self {
        Self { client_id: Some(client_id.to_owned()), ..self }
    }
}

/// The status of the call after the report.
#[derive(Serialize, ToSchema)]
#[schema(as = SubmittedBody)]
pub(super) struct CallStatusBody {
    ok: bool,
    tool_call_id: String,
    /// Status of the call: the submitted one, or PENDING if it will be retried.
    status: &'static str,
}

/// Reads a report. A report that is too large becomes a failure of its attempt; the additional
/// error is the response to the client.
async fn read_report(
    state: &HttpState,
    request: Request,
) -> Result<(AttemptReport, Option<Error>), Error> {
    let limit = state.max_result_body_bytes();
    let too_large = |bytes: Option<usize>| {
        let size = bytes.map_or_else(String::new, |bytes| format!("{bytes} bytes, "));
        let message = format!("the submitted result is too large: {size}over the limit of {limit}");
        Fault::new(Code::PayloadTooLarge, message)
    };
    let refused = |attempt, client_id, fault: Fault| {
        let error = fault.clone().into();
        Ok((AttemptReport { attempt, client_id, result: Err(fault) }, Some(error)))
    };
    let read = extract::read_body(request, state.max_report_bytes()).await;
    let bytes = match read.map_err(ApiError::into_error) {
        Ok(bytes) => bytes,
        Err(error) if error.code() == Code::PayloadTooLarge => {
            return refused(None, None, too_large(None));
        }
        Err(error) => return Err(error),
    };
    let mended = extract::replace_lone_surrogates(&bytes).map_err(ApiError::into_error)?;
    let body: SubmitBody = extract::parse_checked_json(&mended).map_err(ApiError::into_error)?;
    if bytes.len() > limit {
        return refused(body.attempt, body.client_id, too_large(Some(bytes.len())));
    }
    Ok((body.into_report()?, None))
}

/// Submits the result of a call.
///
/// Submitting the same result again returns the same response; a different one returns 409.
#[utoipa::path(post, path = "/internal/tool_calls/{tool_call_id}/submit", tag = "providers",
    params(("tool_call_id" = String, Path, description = "The ticket")),
    request_body = SubmitBody,
    responses((status = 200, body = CallStatusBody), (status = 403, body = ProblemDetails),
        (status = 404, body = ProblemDetails), (status = 409, body = ProblemDetails),
        (status = 413, body = ProblemDetails)))]
pub(super) async fn submit(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    CallPath(id): CallPath,
    request: Request,
) -> Result<Json<CallStatusBody>, ApiError> {
    let (report, too_large) = read_report(&state, request).await?;
    let call = state.engine.calls().report(&caller, &id, report).await?;
    if let Some(error) = too_large {
        return Err(error.into());
    }
    let (tool_call_id, status) = (id.to_string(), call.status.as_str());
    Ok(Json(CallStatusBody { ok: true, tool_call_id, status }))
}

/// The client that takes a call.
#[derive(Deserialize, ToSchema)]
pub(super) struct CallAckBody {
    client_id: String,
    attempt: Option<u32>,
}

/// Acknowledges a call: it becomes RUNNING and belongs to this client.
#[utoipa::path(post, path = "/internal/tool_calls/{tool_call_id}/ack", tag = "providers",
    params(("tool_call_id" = String, Path, description = "The ticket")),
    request_body = CallAckBody,
    responses((status = 200, body = CallStatusBody), (status = 403, body = ProblemDetails),
        (status = 404, body = ProblemDetails), (status = 409, body = ProblemDetails)))]
pub(super) async fn ack(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    CallPath(id): CallPath,
    JsonBody(body): JsonBody<CallAckBody>,
) -> Result<Json<CallStatusBody>, ApiError> {
    let call =
        state.engine.calls().acknowledge_call(&caller, &id, &body.client_id, body.attempt).await?;
    let (tool_call_id, status) = (id.to_string(), call.status.as_str());
    Ok(Json(CallStatusBody { ok: true, tool_call_id, status }))
}

/// The progress of a call.
#[derive(Deserialize, ToSchema)]
pub(super) struct ProgressBody {
    client_id: Option<String>,
    attempt: Option<u32>,
    /// 0 to 100.
    percent: Option<f64>,
    message: Option<String>,
    #[schema(value_type = Option<serde_json::Value>)]
    data: Option<Value>,
}

impl ProgressBody {
    pub(super) fn into_parts(self) -> (Option<String>, Option<u32>, AttemptProgress) {
        let Self { client_id, attempt, percent, message, data } = self;
        (client_id, attempt, AttemptProgress { percent, message, data })
    }
}

/// The response to a progress report.
#[derive(Serialize, ToSchema)]
#[schema(as = NotedBody)]
pub(super) struct ProgressAckBody {
    ok: bool,
}

/// Reports the progress of a call, which appears in its event stream.
#[utoipa::path(post, path = "/internal/tool_calls/{tool_call_id}/progress", tag = "providers",
    params(("tool_call_id" = String, Path, description = "The ticket")),
    request_body = ProgressBody,
    responses((status = 200, body = ProgressAckBody), (status = 403, body = ProblemDetails),
        (status = 404, body = ProblemDetails), (status = 409, body = ProblemDetails)))]
pub(super) async fn progress(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    CallPath(id): CallPath,
    JsonBody(body): JsonBody<ProgressBody>,
) -> Result<Json<ProgressAckBody>, ApiError> {
    let (client_id, attempt, progress) = body.into_parts();
    state
        .engine
        .calls()
        .report_progress(&caller, &id, client_id.as_deref(), attempt, progress)
        .await?;
    Ok(Json(ProgressAckBody { ok: true }))
}
