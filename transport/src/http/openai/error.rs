//! Errors in the format that OpenAI's SDKs expect: `{error: {message, type, param, code}}`.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::Value;
use toolcrib::domain::fault::{Code, Error, Fault};
use utoipa::ToSchema;

use crate::http::problem::ApiError;

/// The error of a refused request.
pub(super) struct OpenAiError(pub(super) Error);

/// A refused request, in OpenAI's format.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[schema(as = RefusalBody)]
pub(super) struct OpenAiErrorBody {
    pub(super) error: OpenAiErrorDetail,
}

/// Details of the error.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[schema(as = ErrorBody)]
pub(super) struct OpenAiErrorDetail {
    /// Explanation of the error in this request, and how to fix it.
    message: String,
    /// `invalid_request_error`, `rate_limit_error`, `server_error`, ….
    #[serde(rename = "type")]
    kind: &'static str,
    /// The invalid field.
    param: Option<String>,
    /// The error code: OpenAI's if there is one, otherwise a code of docs/errors.md.
    code: String,
}

impl From<Error> for OpenAiError {
    fn from(error: Error) -> Self {
        Self(error)
    }
}

impl From<Fault> for OpenAiError {
    fn from(fault: Fault) -> Self {
        Self(fault.into())
    }
}

impl From<ApiError> for OpenAiError {
    fn from(refused: ApiError) -> Self {
        Self(refused.into_error())
    }
}

/// Builds the error for an invalid field.
pub(super) fn invalid_field(param: &str, message: impl std::fmt::Display) -> OpenAiError {
    let detail = serde_json::json!({ "pointer": format!("/{}", param.replace('.', "/")) });
    let message = format!("{param} {message}");
    let fault =
        Fault::new(Code::ValidationError, message).without_side_effect().with_detail(detail);
    OpenAiError(fault.into())
}

/// Builds the error for an unknown model.
pub(super) fn model_not_found(name: &str, names: &[String]) -> OpenAiError {
    let excerpt: String = name.chars().filter(|c| !c.is_control()).take(80).collect();
    let message = format!("there is no model \"{excerpt}\"; there are: {}", names.join(", "));
    let detail = serde_json::json!({ "pointer": "/model", "code": "model_not_found" });
    let fault = Fault::new(Code::NotFound, message).without_side_effect().with_detail(detail);
    OpenAiError(fault.into())
}

impl OpenAiError {
    /// Returns the HTTP status of the model endpoint, if the endpoint refused the request.
    fn upstream_status(fault: &Fault) -> Option<u16> {
        let status = fault.detail.as_ref()?.get("http_status")?.as_u64()?;
        u16::try_from(status).ok()
    }

    /// Returns the HTTP status of the response. An invalid field is 400 on these routes. The model
    /// endpoint's own 400, 404, 413, 422 or 429 is kept. A problem with Toolcrib's key at the
    /// endpoint is not reported as an error of the caller.
    fn status(fault: &Fault) -> u16 {
        match (fault.code, Self::upstream_status(fault)) {
            (Code::ValidationError | Code::BadRequest, _) => 400,
            (Code::UpstreamUnavailable, Some(status @ (400 | 404 | 413 | 422 | 429))) => status,
            (code, _) => code.http_status(),
        }
    }

    /// Returns the status and the body of the response.
    pub(super) fn body(&self) -> (u16, OpenAiErrorBody) {
        let Error::Refused { fault, .. } = &self.0 else {
            let message = "internal error; see the server's log".to_owned();
            let (kind, code) = ("server_error", Code::Internal.as_str().to_owned());
            return (
                500,
                OpenAiErrorBody { error: OpenAiErrorDetail { message, kind, param: None, code } },
            );
        };
        let status = Self::status(fault);
        let detail = |field: &str| fault.detail.as_ref()?.get(field).and_then(Value::as_str);
        let kind = match status {
            401 => "authentication_error",
            403 => "permission_error",
            429 => "rate_limit_error",
            400..=499 => "invalid_request_error",
            _ => "server_error",
        };
        let code = match (detail("code"), fault.code) {
            (Some(code), _) => code.to_owned(),
            (None, Code::Unauthenticated) => "invalid_api_key".to_owned(),
            (None, code) => code.as_str().to_owned(),
        };
        let param =
            detail("pointer").map(|pointer| pointer.trim_start_matches('/').replace('/', "."));
        let message = fault.message.clone();
        (status, OpenAiErrorBody { error: OpenAiErrorDetail { message, kind, param, code } })
    }

    /// Returns the time after which to retry: Toolcrib's, or that of the model endpoint.
    fn retry_after_ms(&self) -> Option<u64> {
        let Error::Refused { fault, retry_after_ms } = &self.0 else { return None };
        retry_after_ms.or_else(|| fault.retry_after_ms())
    }

    /// Logs the error if it is internal.
    pub(super) fn log_internal(self) -> Self {
        if let Error::Internal(source) = &self.0 {
            let mut chain = source.to_string();
            let mut next = source.source();
            while let Some(cause) = next {
                chain = format!("{chain}: {cause}");
                next = cause.source();
            }
            tracing::error!(error = chain, "internal error");
        }
        self
    }
}

impl IntoResponse for OpenAiError {
    fn into_response(self) -> Response {
        let refusal = self.log_internal();
        let (status, body) = refusal.body();
        let mut answer = Json(body).into_response();
        *answer.status_mut() = StatusCode::from_u16(status).unwrap_or_default();
        let headers = answer.headers_mut();
        if let Some(ms) = refusal.retry_after_ms() {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(ms.div_ceil(1_000).max(1)));
        }
        if status == 401 {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        answer
    }
}
