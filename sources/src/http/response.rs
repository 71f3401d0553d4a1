//! Converts an HTTP response to a result or a fault.

use std::time::Duration;

use reqwest::StatusCode;
use serde_json::{Value, json};
use toolcrib::domain::fault::{Code, Fault};
use toolcrib::domain::json::{self, Json};
use toolcrib_protocol::http_operation::OperationRequest;

use super::client::{HttpApiError, HttpApiResponse};
use super::origin;

/// Maximum number of characters of a body in a fault.
const MAX_EXCERPT_CHARS: usize = 2_000;

/// The call that a response belongs to.
pub(super) struct HttpCallContext<'a> {
    pub(super) tool: &'a str,
    pub(super) tool_call_id: &'a str,
}

/// Interprets a response. The result and the fault contain no secrets.
pub(super) fn interpret_response(
    request: &OperationRequest,
    response: Result<HttpApiResponse, HttpApiError>,
    took: Duration,
    about: &HttpCallContext<'_>,
) -> Result<Json, Fault> {
    let host = origin(&request.url);
    let response = response.map_err(|error| {
        let mut fault = fault_from_error(&host, error);
        fault.message = request.secrets.redact(&fault.message);
        fault
    })?;
    if !response.status.is_success() {
        return Err(status_fault(&host, &response, about));
    }
    let latency_ms = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
    match request.jina {
        true => map_jina_response(&host, &response, latency_ms, about),
        false => map_response(&host, request, &response),
    }
}

fn fault_from_error(host: &str, error: HttpApiError) -> Fault {
    match error {
        HttpApiError::InvalidRequest(reason) => {
            toolcrib_protocol::http_operation::bad_request_fault(reason)
        }
        HttpApiError::Forbidden(reason) => {
            Fault::new(Code::PermissionDenied, reason).without_side_effect()
        }
        HttpApiError::Unreachable(reason) => {
            Fault::unreachable(format!("{host} cannot be reached: {reason}"))
        }
        HttpApiError::Interrupted(reason) => {
            Fault::new(Code::UpstreamUnavailable, format!("{host} broke off: {reason}"))
        }
        HttpApiError::TimedOut(limit) => {
            let message = format!("{host} did not answer within {} ms", limit.as_millis());
            // The time of one request: the effect of the tool decides if another attempt follows.
            Fault::new(Code::Timeout, message).retryable(true)
        }
        HttpApiError::TooLarge(limit) => {
            let message = format!(
                "the answer of {host} is over the limit of {limit} bytes (http.max_response_bytes)"
            );
            Fault::new(Code::PayloadTooLarge, message)
        }
        HttpApiError::RedirectRefused(problem) => {
            Fault::new(Code::UpstreamUnavailable, format!("{host} {problem}")).retryable(false)
        }
    }
}

/// Returns the fault code for a status, and whether the call was refused before it had any effect.
fn code_for_status(status: StatusCode) -> (Code, bool) {
    match status.as_u16() {
        401 => (Code::Unauthenticated, true),
        403 => (Code::PermissionDenied, true),
        404 | 410 => (Code::NotFound, true),
        408 => (Code::Timeout, false),
        409 => (Code::Conflict, true),
        413 => (Code::PayloadTooLarge, true),
        422 => (Code::ValidationError, true),
        429 => (Code::RateLimited, true),
        400..=499 => (Code::BadRequest, true),
        _ => (Code::UpstreamUnavailable, false),
    }
}

/// Returns the advice for a status of the API. The API refused the request, not Toolcrib.
fn hint_for_status(status: StatusCode) -> &'static str {
    match status.as_u16() {
        401 | 403 => {
            "the API refused the credentials of this tool: check the environment variables of the \
             server that its definition names"
        }
        404 | 410 => {
            "the API has nothing there: check the arguments, and the URL in the tool's definition"
        }
        408 | 429 | 503 => "the API is busy: call again later; detail.details has its answer",
        400..=499 => "the API refused the arguments: detail.details has its answer",
        _ => "the API itself failed: detail.details has its answer",
    }
}

fn status_fault(host: &str, response: &HttpApiResponse, about: &HttpCallContext<'_>) -> Fault {
    let status = response.status.as_u16();
    let (code, refused) = code_for_status(response.status);
    let fault = Fault::new(code, format!("HTTP {status} from {host}"));
    let mut detail = json!({
        "status_code": status,
        "details": redacted_body(response),
        "tool_name": about.tool,
        "tool_call_id": about.tool_call_id,
    });
    // The engine reads this field as the time to wait before a retry.
    if let Some(ms) = response.retry_after_ms.filter(|_| matches!(status, 429 | 503)) {
        detail["retry_after_ms"] = ms.into();
    }
    let fault = fault.with_detail(detail).with_hint(hint_for_status(response.status));
    if refused { fault.without_side_effect() } else { fault }
}

/// Returns a body for display, redacted and truncated; as JSON if it is JSON.
fn redacted_body(response: &HttpApiResponse) -> Value {
    let text = String::from_utf8_lossy(&response.body);
    let parsed = json::check(text.as_bytes()).ok().and_then(|()| serde_json::from_str(&text).ok());
    if let Some(mut value @ (Value::Object(_) | Value::Array(_))) = parsed {
        response.secrets.redact_json(&mut value);
        if value.to_string().len() <= MAX_EXCERPT_CHARS {
            return value;
        }
        return Value::from(value.to_string().chars().take(MAX_EXCERPT_CHARS).collect::<String>());
    }
    Value::from(response.secrets.redact(&text).chars().take(MAX_EXCERPT_CHARS).collect::<String>())
}

fn is_json(response: &HttpApiResponse) -> bool {
    let kind =
        response.content_type.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    kind == "application/json" || kind.ends_with("+json") || kind == "text/json"
}

fn unreadable_response_fault(host: &str, reason: &str) -> Fault {
    Fault::runtime(format!("the answer of {host} cannot be read: {reason}")).retryable(false)
}

/// Parses the body and redacts its secrets. Also returns whether the body is unchanged.
fn parse_redacted(host: &str, response: &HttpApiResponse) -> Result<(Value, bool), Fault> {
    let unreadable =
        |reason: String| unreadable_response_fault(host, &response.secrets.redact(&reason));
    json::check(&response.body).map_err(|error| unreadable(error.to_string()))?;
    let mut value: Value =
        serde_json::from_slice(&response.body).map_err(|error| unreadable(error.to_string()))?;
    let changed = response.secrets.redact_json(&mut value);
    Ok((value, !changed))
}

fn map_response(
    host: &str,
    request: &OperationRequest,
    response: &HttpApiResponse,
) -> Result<Json, Fault> {
    if response.body.is_empty() {
        return Ok(Json::from_value(&json!({ "status_code": response.status.as_u16() })));
    }
    if !is_json(response) {
        let text = decode_text(host, response)?;
        return Ok(Json::from_value(&json!({ "data": text })));
    }
    let (value, untouched) = parse_redacted(host, response)?;
    if let Some(pointer) = &request.mapping.pointer {
        return value.pointer(pointer).map(Json::from_value).ok_or_else(|| {
            unreadable_response_fault(host, &format!("there is nothing at {pointer} in it"))
        });
    }
    // Stores the body byte for byte if nothing was redacted.
    let unchanged = std::str::from_utf8(&response.body).ok().filter(|_| untouched);
    let parsed = unchanged.and_then(|text| Json::parse(text).ok());
    Ok(parsed.unwrap_or_else(|| Json::from_value(&value)))
}

fn decode_text(host: &str, response: &HttpApiResponse) -> Result<String, Fault> {
    match std::str::from_utf8(&response.body) {
        Ok(text) => Ok(response.secrets.redact(text)),
        Err(_) if response.content_type.starts_with("text/") => {
            Ok(response.secrets.redact(&String::from_utf8_lossy(&response.body)))
        }
        Err(_) => {
            let kind = response.secrets.redact(&response.content_type);
            Err(unreadable_response_fault(host, &format!("it is not text but \"{kind}\"")))
        }
    }
}

fn map_jina_response(
    host: &str,
    response: &HttpApiResponse,
    latency_ms: u64,
    about: &HttpCallContext<'_>,
) -> Result<Json, Fault> {
    if !is_json(response) {
        let text = decode_text(host, response)?;
        return Ok(Json::from_value(&json!({ "data": text, "latency_ms": latency_ms })));
    }
    let (mut value, _) = parse_redacted(host, response)?;
    if let Some(error) = value.get("error").filter(|error| !error.is_null()) {
        let fault = Fault::new(Code::UpstreamUnavailable, format!("{host} answered with an error"));
        return Err(fault.with_detail(json!({
            "details": truncate_json(error),
            "tool_name": about.tool,
            "tool_call_id": about.tool_call_id,
        })));
    }
    match &mut value {
        Value::Object(fields) => {
            fields.entry("latency_ms").or_insert(latency_ms.into());
            Ok(Json::from_value(&value))
        }
        _ => Ok(Json::from_value(&json!({ "value": value, "latency_ms": latency_ms }))),
    }
}

fn truncate_json(value: &Value) -> Value {
    match value.to_string() {
        text if text.len() > MAX_EXCERPT_CHARS => {
            Value::from(text.chars().take(MAX_EXCERPT_CHARS).collect::<String>())
        }
        _ => value.clone(),
    }
}
