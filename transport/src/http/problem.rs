//! Errors as `application/problem+json` (RFC 9457). Only this module turns a fault into HTTP.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::Value;
use toolcrib::domain::fault::{Code, Error, Fault};
use toolcrib::domain::trace::TraceParent;
use utoipa::ToSchema;

use super::wire::FaultBody;

/// A refused request (RFC 9457). `error` is the same object that a failed call carries.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[schema(as = Problem)]
pub(super) struct ProblemDetails {
    /// URL of the page that explains the code.
    #[serde(rename = "type")]
    kind: String,
    /// Short title of the code.
    title: String,
    /// The HTTP status.
    status: u16,
    /// Explanation of the error in this request, and how to fix it.
    detail: String,
    /// The requested path.
    #[serde(skip_serializing_if = "Option::is_none")]
    instance: Option<String>,
    /// The error code, for programs.
    code: String,
    /// One line of advice on the cause, or on the code in general.
    hint: String,
    /// The invalid fields and parameters, if they are known.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    errors: Vec<FieldError>,
    /// The trace id of the request, if it carried a `traceparent`.
    #[serde(skip_serializing_if = "Option::is_none")]
    trace_id: Option<String>,
    error: FaultBody,
}

/// One invalid field or parameter of a request.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[schema(as = Wrong)]
struct FieldError {
    /// Position in the body, as a JSON pointer in a fragment.
    #[serde(skip_serializing_if = "Option::is_none")]
    pointer: Option<String>,
    /// Name of the query parameter.
    #[serde(skip_serializing_if = "Option::is_none")]
    parameter: Option<String>,
    /// Explanation of the error.
    detail: String,
}

impl FieldError {
    /// Collects the field errors of a fault. Problems that the fault lists are in the arguments,
    /// unless it says that they are in the body, or names a parameter or a pointer.
    fn from_fault(fault: &Fault) -> Vec<Self> {
        let detail_field = |name: &str| fault.detail.as_ref().and_then(|detail| detail.get(name));
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let whole = |pointer, parameter| Self { pointer, parameter, detail: fault.message.clone() };
        if let Some(parameter) = detail_field("field").and_then(text) {
            return vec![whole(None, Some(parameter))];
        }
        if let Some(pointer) = detail_field("pointer").and_then(Value::as_str) {
            return vec![whole(Some(format!("#{pointer}")), None)];
        }
        let root =
            if detail_field("in").is_some_and(|part| part == "body") { "#" } else { "#/args" };
        let problems = detail_field("problems").and_then(Value::as_array).into_iter().flatten();
        let argument_problems = problems.map(|problem| Self {
            pointer: problem["pointer"].as_str().map(|pointer| format!("{root}{pointer}")),
            parameter: None,
            detail: problem["message"].as_str().unwrap_or_default().to_owned(),
        });
        argument_problems.collect()
    }
}

/// Builds the problem response of a fault.
pub(crate) fn problem_response(fault: &Fault, retry_after_ms: Option<u64>) -> Response {
    let status = StatusCode::from_u16(fault.code.http_status()).unwrap_or_default();
    problem_with_status(status, fault, retry_after_ms)
}

/// Builds the problem response of a fault with a status other than the code's own.
pub(super) fn problem_with_status(
    status: StatusCode,
    fault: &Fault,
    retry_after_ms: Option<u64>,
) -> Response {
    let code = fault.code;
    let body = ProblemDetails {
        kind: format!("/docs/errors#{}", code.as_str().to_lowercase()),
        title: code.title().to_owned(),
        status: status.as_u16(),
        detail: fault.message.clone(),
        instance: None,
        code: code.as_str().to_owned(),
        hint: fault.hint().to_owned(),
        errors: FieldError::from_fault(fault),
        trace_id: None,
        error: FaultBody::from(fault),
    };
    let mut answer = (status, Json(&body)).into_response();
    answer.extensions_mut().insert(body);
    let headers = answer.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
    if let Some(ms) = retry_after_ms {
        headers.insert(header::RETRY_AFTER, HeaderValue::from(ms.div_ceil(1_000).max(1)));
    }
    if code == Code::Unauthenticated {
        headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    answer
}

/// Builds the HTTP response of an error, for other transports that run over HTTP.
pub(crate) fn error_response(error: Error) -> Response {
    ApiError(error).into_response()
}

/// Adds the path and the trace of the request to a problem response.
pub(super) fn with_request_details(
    mut answer: Response,
    uri: &Uri,
    trace: Option<&TraceParent>,
) -> Response {
    if let Some(mut body) = answer.extensions_mut().remove::<ProblemDetails>() {
        body.instance = Some(uri.path().to_owned());
        body.trace_id = trace.map(TraceParent::trace_id_text);
        answer.headers_mut().remove(header::CONTENT_LENGTH);
        *answer.body_mut() = Json(body).into_response().into_body();
    }
    answer
}

/// The error type of every handler.
pub(crate) struct ApiError(Error);

impl ApiError {
    /// Returns the error itself, for a transport that does not respond over HTTP.
    pub(super) fn into_error(self) -> Error {
        self.0
    }
}

impl From<Error> for ApiError {
    fn from(error: Error) -> Self {
        Self(error)
    }
}

impl From<Fault> for ApiError {
    fn from(fault: Fault) -> Self {
        Self(fault.into())
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        match self.0 {
            Error::Refused { fault, retry_after_ms } => problem_response(&fault, retry_after_ms),
            Error::Internal(source) => {
                let mut chain = source.to_string();
                let mut next = source.source();
                while let Some(cause) = next {
                    chain = format!("{chain}: {cause}");
                    next = cause.source();
                }
                tracing::error!(error = chain, "internal error");
                problem_response(
                    &Fault::new(Code::Internal, "internal error; see the server's log"),
                    None,
                )
            }
        }
    }
}
