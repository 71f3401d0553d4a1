//! Converts an HTTP response to a result or a fault.

use std::time::Duration;

use reqwest::StatusCode;
use serde_json::{Value, json};
use toolcrib::fault::{Code, Fault};
use toolcrib::json::{self, Json};

use super::client::{Came, Trouble};
use super::place;
use crate::operation::Request;

/// Maximum number of characters of a body in a fault.
const SHOWN: usize = 2_000;

/// The call that a response belongs to.
pub(super) struct About<'a> {
    pub(super) tool: &'a str,
    pub(super) tool_call_id: &'a str,
}

/// Interprets a response. The result and the fault contain no secrets.
pub(super) fn read(
    request: &Request,
    came: Result<Came, Trouble>,
    took: Duration,
    about: &About<'_>,
) -> Result<Json, Fault> {
    let host = place(&request.url);
    let came = came.map_err(|trouble| {
        let mut fault = trouble_of(&host, trouble);
        fault.message = request.secrets.clean(&fault.message);
        fault
    })?;
    if !came.status.is_success() {
        return Err(refusal(&host, &came, about));
    }
    let latency_ms = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
    match request.jina {
        true => jina(&host, &came, latency_ms, about),
        false => plain(&host, request, &came),
    }
}

fn trouble_of(host: &str, trouble: Trouble) -> Fault {
    match trouble {
        Trouble::Unsendable(why) => crate::operation::bad(why),
        Trouble::Forbidden(why) => Fault::new(Code::PermissionDenied, why).not_happened(),
        Trouble::Unreachable(why) => Fault::unreachable(format!("{host} cannot be reached: {why}")),
        Trouble::Broken(why) => {
            Fault::new(Code::UpstreamUnavailable, format!("{host} broke off: {why}"))
        }
        Trouble::Slow(limit) => {
            let message = format!("{host} did not answer within {} ms", limit.as_millis());
            Fault::new(Code::Timeout, message)
        }
        Trouble::TooLarge(limit) => {
            let message = format!(
                "the answer of {host} is over the limit of {limit} bytes (http.max_response_bytes)"
            );
            Fault::new(Code::PayloadTooLarge, message)
        }
        Trouble::Elsewhere(what) => {
            Fault::new(Code::UpstreamUnavailable, format!("{host} {what}")).retryable(false)
        }
    }
}

/// Returns the fault code for a status, and whether the call was refused before it had any effect.
fn code_of(status: StatusCode) -> (Code, bool) {
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

fn refusal(host: &str, came: &Came, about: &About<'_>) -> Fault {
    let status = came.status.as_u16();
    let (code, refused) = code_of(came.status);
    let fault = Fault::new(code, format!("HTTP {status} from {host}"));
    let mut detail = json!({
        "status_code": status,
        "details": shown(came),
        "tool_name": about.tool,
        "tool_call_id": about.tool_call_id,
    });
    // The engine reads this field as the time to wait before a retry.
    if let Some(ms) = came.retry_after_ms.filter(|_| matches!(status, 429 | 503)) {
        detail["retry_after_ms"] = ms.into();
    }
    let fault = fault.with_detail(detail);
    if refused { fault.not_happened() } else { fault }
}

/// Returns a body for display, redacted and truncated; as JSON if it is JSON.
fn shown(came: &Came) -> Value {
    let text = String::from_utf8_lossy(&came.body);
    let parsed = json::check(text.as_bytes()).ok().and_then(|()| serde_json::from_str(&text).ok());
    if let Some(mut value @ (Value::Object(_) | Value::Array(_))) = parsed {
        came.secrets.scrub(&mut value);
        if value.to_string().len() <= SHOWN {
            return value;
        }
        return Value::from(value.to_string().chars().take(SHOWN).collect::<String>());
    }
    Value::from(came.secrets.clean(&text).chars().take(SHOWN).collect::<String>())
}

fn is_json(came: &Came) -> bool {
    let kind = came.content_type.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    kind == "application/json" || kind.ends_with("+json") || kind == "text/json"
}

fn unreadable(host: &str, why: &str) -> Fault {
    Fault::runtime(format!("the answer of {host} cannot be read: {why}")).retryable(false)
}

/// Parses the body and redacts its secrets. Also returns whether the body is unchanged.
fn parsed(host: &str, came: &Came) -> Result<(Value, bool), Fault> {
    let wrong = |why: String| unreadable(host, &came.secrets.clean(&why));
    json::check(&came.body).map_err(|error| wrong(error.to_string()))?;
    let mut value: Value =
        serde_json::from_slice(&came.body).map_err(|error| wrong(error.to_string()))?;
    let changed = came.secrets.scrub(&mut value);
    Ok((value, !changed))
}

fn plain(host: &str, request: &Request, came: &Came) -> Result<Json, Fault> {
    if came.body.is_empty() {
        return Ok(Json::of_value(&json!({ "status_code": came.status.as_u16() })));
    }
    if !is_json(came) {
        let text = text(host, came)?;
        return Ok(Json::of_value(&json!({ "data": text })));
    }
    let (value, untouched) = parsed(host, came)?;
    if let Some(pointer) = &request.mapping.pointer {
        return value
            .pointer(pointer)
            .map(Json::of_value)
            .ok_or_else(|| unreadable(host, &format!("there is nothing at {pointer} in it")));
    }
    // Stores the body byte for byte if nothing was redacted.
    let as_it_came = std::str::from_utf8(&came.body).ok().filter(|_| untouched);
    let kept = as_it_came.and_then(|text| Json::parse(text).ok());
    Ok(kept.unwrap_or_else(|| Json::of_value(&value)))
}

fn text(host: &str, came: &Came) -> Result<String, Fault> {
    match std::str::from_utf8(&came.body) {
        Ok(text) => Ok(came.secrets.clean(text)),
        Err(_) if came.content_type.starts_with("text/") => {
            Ok(came.secrets.clean(&String::from_utf8_lossy(&came.body)))
        }
        Err(_) => {
            let kind = came.secrets.clean(&came.content_type);
            Err(unreadable(host, &format!("it is not text but \"{kind}\"")))
        }
    }
}

fn jina(host: &str, came: &Came, latency_ms: u64, about: &About<'_>) -> Result<Json, Fault> {
    if !is_json(came) {
        let text = text(host, came)?;
        return Ok(Json::of_value(&json!({ "data": text, "latency_ms": latency_ms })));
    }
    let (mut value, _) = parsed(host, came)?;
    if let Some(error) = value.get("error").filter(|error| !error.is_null()) {
        let fault = Fault::new(Code::UpstreamUnavailable, format!("{host} answered with an error"));
        return Err(fault.with_detail(json!({
            "details": cut(error),
            "tool_name": about.tool,
            "tool_call_id": about.tool_call_id,
        })));
    }
    match &mut value {
        Value::Object(fields) => {
            fields.entry("latency_ms").or_insert(latency_ms.into());
            Ok(Json::of_value(&value))
        }
        _ => Ok(Json::of_value(&json!({ "value": value, "latency_ms": latency_ms }))),
    }
}

fn cut(value: &Value) -> Value {
    match value.to_string() {
        text if text.len() > SHOWN => Value::from(text.chars().take(SHOWN).collect::<String>()),
        _ => value.clone(),
    }
}
