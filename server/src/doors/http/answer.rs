//! Refusals as `application/problem+json`. The only place where a fault becomes HTTP.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use toolcrib::fault::{Code, Error, Fault};
use toolcrib::trace::TraceParent;
use utoipa::ToSchema;

use super::wire::FaultBody;

/// A refused request (RFC 9457), with the fault as on a call.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Problem {
    /// Where the code is explained.
    #[serde(rename = "type")]
    kind: String,
    /// A few words.
    title: String,
    /// The HTTP status.
    status: u16,
    /// What is wrong here, and what to do.
    detail: String,
    /// The code alone, for programs.
    code: String,
    /// One line: what to do about this code.
    hint: String,
    /// The trace that the request was part of, if it said so.
    #[serde(skip_serializing_if = "Option::is_none")]
    trace_id: Option<String>,
    error: FaultBody,
}

/// A refusal as an answer.
pub(super) fn problem(fault: &Fault, retry_after_ms: Option<u64>) -> Response {
    let status = StatusCode::from_u16(fault.code.http_status()).unwrap_or_default();
    problem_as(status, fault, retry_after_ms)
}

/// The same with another status than the code's own.
pub(super) fn problem_as(
    status: StatusCode,
    fault: &Fault,
    retry_after_ms: Option<u64>,
) -> Response {
    let code = fault.code;
    let body = Problem {
        kind: format!("/docs/errors#{}", code.as_str().to_lowercase()),
        title: code.title().to_owned(),
        status: status.as_u16(),
        detail: fault.message.clone(),
        code: code.as_str().to_owned(),
        hint: code.help().to_owned(),
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

/// The same refusal with the trace that the request was part of.
pub(super) fn traced(mut answer: Response, trace: &TraceParent) -> Response {
    if let Some(mut body) = answer.extensions_mut().remove::<Problem>() {
        body.trace_id = Some(trace.trace_id_text());
        answer.headers_mut().remove(header::CONTENT_LENGTH);
        *answer.body_mut() = Json(body).into_response().into_body();
    }
    answer
}

/// What every handler may fail with.
pub(super) struct Refused(Error);

impl Refused {
    /// The refusal itself, for a door that does not answer with HTTP.
    pub(super) fn into_error(self) -> Error {
        self.0
    }
}

impl From<Error> for Refused {
    fn from(error: Error) -> Self {
        Self(error)
    }
}

impl From<Fault> for Refused {
    fn from(fault: Fault) -> Self {
        Self(fault.into())
    }
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        match self.0 {
            Error::Refused { fault, retry_after_ms } => problem(&fault, retry_after_ms),
            Error::Internal(source) => {
                let mut chain = source.to_string();
                let mut next = source.source();
                while let Some(cause) = next {
                    chain = format!("{chain}: {cause}");
                    next = cause.source();
                }
                tracing::error!(error = chain, "internal error");
                problem(&Fault::new(Code::Internal, "internal error; see the server's log"), None)
            }
        }
    }
}
