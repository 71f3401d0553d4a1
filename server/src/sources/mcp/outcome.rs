//! What an upstream's answer means for the call: its result, or a fault that says what happened and
//! whether it can have taken effect.

use rmcp::ServiceError;
use rmcp::model::{CallToolResult, ErrorCode, ErrorData, InputRequest};
use serde_json::{Map, Value, json};
use toolcrib::Json;
use toolcrib::fault::{Code, Fault};
use toolcrib::source::Attempt;
use toolcrib::tool::Effect;

use super::connection::{Failed, http_failure, never_sent};
use super::upstream::Upstream;
use crate::outbound::read_retry_after;

/// How much of a failure's content is kept beside its words.
const KEPT_BYTES: usize = 16 << 10;

/// The result as it is kept: in MCP's own words. A failure in words is a fault.
pub(super) fn of_result(attempt: &Attempt, mut result: CallToolResult) -> Result<Json, Fault> {
    result.result_type = None;
    if result.is_error != Some(true) {
        return Json::of(&result).map_err(|error| garbled(attempt, error.to_string()));
    }
    let words = result.content.iter().filter_map(|block| block.as_text());
    let words: Vec<&str> = words.map(|block| block.text.as_str()).collect();
    let words: String = words.join("\n").chars().take(4_000).collect();
    let message = match words.trim() {
        "" => format!("{} failed without saying why", attempt.tool),
        said => said.to_owned(),
    };
    let fault = Fault::runtime(message);
    match serde_json::to_value(&result) {
        Ok(value) if value.to_string().len() <= KEPT_BYTES => {
            Err(fault.with_detail(json!({ "result": value })))
        }
        _ => Err(fault),
    }
}

/// It answered, and nobody can understand it: it has run, and what came of it is unknown.
pub(super) fn garbled(attempt: &Attempt, message: String) -> Fault {
    unknown(attempt, format!("{}: {message}", attempt.tool))
}

/// It may have happened. Where that does no harm it may be tried again; otherwise it says so.
fn unknown(attempt: &Attempt, message: String) -> Fault {
    match attempt.effect {
        Effect::Irreversible => {
            let message = format!("{message}; it may have happened, and was not tried again");
            Fault::new(Code::OutcomeUnknown, message).retryable(false)
        }
        _ => Fault::new(Code::UpstreamUnavailable, message).retryable(true),
    }
}

/// It has too much to do, and may have said when to come again. What is turned away with 429 has
/// not begun; behind any other status it may have.
pub(super) fn busy(name: &str, attempt: &Attempt, status: u16, after_ms: Option<u64>) -> Fault {
    let when = after_ms.map(|ms| format!(", to come again after {} s", ms.div_ceil(1_000)));
    let when = when.unwrap_or_default();
    let tool = &attempt.tool;
    let message = match status {
        429 | 503 => format!("{name} turned {tool} away (HTTP {status}{when})"),
        _ => format!("{name} did not answer {tool} properly (HTTP {status}{when})"),
    };
    let fault = match status {
        429 => Fault::new(Code::RateLimited, message).not_happened(),
        _ => unknown(attempt, message),
    };
    fault.come_again_after(after_ms)
}

/// What an upstream over HTTP refused with, where that is more than a lost answer.
fn refused(name: &str, attempt: &Attempt, error: &ServiceError) -> Option<Fault> {
    match http_failure(error)? {
        Failed::HttpStatus(said) => {
            let after_ms = said.retry_after.as_deref().and_then(read_retry_after);
            Some(busy(name, attempt, said.status, after_ms))
        }
        Failed::AuthRequired(_) | Failed::InsufficientScope(_) => {
            Some(Fault::unreachable(format!("{name} does not let us in")))
        }
        _ => None,
    }
}

/// The error with which a server of 2025-11-25 says that somebody must open addresses first.
const OPEN_FIRST: i32 = -32042;

/// Those addresses, as questions: it has not begun, and is called again once they were opened.
pub(super) fn addresses(error: &ErrorData) -> Option<Map<String, Value>> {
    let asked = error.data.as_ref().filter(|_| error.code.0 == OPEN_FIRST)?;
    let asked = asked.get("elicitations")?.as_array()?.iter().filter_map(|asked| {
        let key = asked.get("elicitationId")?.as_str()?.to_owned();
        let mut params = asked.as_object()?.clone();
        params.insert("mode".to_owned(), "url".into());
        let question = json!({ "method": "elicitation/create", "params": params });
        // Only what can be put to somebody is a question.
        serde_json::from_value::<InputRequest>(question.clone()).ok()?;
        Some((key, question))
    });
    let asked: Map<String, Value> = asked.collect();
    (!asked.is_empty()).then_some(asked)
}

/// Why a call that wanted addresses to be opened is not made again.
pub(super) fn not_opened(attempt: &Attempt) -> Option<Fault> {
    let answers = attempt.dialogue.as_ref().map(|dialogue| &dialogue.answers);
    let refused = answers.into_iter().flatten().any(|(_, answer)| answer["action"] != "accept");
    let message = || format!("{} needs an address to be opened, and it was not", attempt.tool);
    refused.then(|| Fault::runtime(message()).not_happened().retryable(false))
}

/// What went wrong with a request.
pub(super) fn of_error(
    upstream: &Upstream,
    attempt: &Attempt,
    error: &ServiceError,
    known: Option<String>,
) -> Fault {
    let name = &upstream.settings.name;
    if let Some(fault) = refused(name, attempt, error) {
        return fault;
    }
    match error {
        ServiceError::McpError(error) => {
            let said: String = upstream.clean(&error.message).chars().take(2_000).collect();
            match error.code {
                ErrorCode::INVALID_PARAMS => {
                    Fault::new(Code::ValidationError, format!("{name}: {said}")).not_happened()
                }
                ErrorCode::METHOD_NOT_FOUND => {
                    Fault::new(Code::ToolNotFound, format!("{name}: {said}")).not_happened()
                }
                ErrorCode::MISSING_REQUIRED_CLIENT_CAPABILITY => {
                    let message = format!("{name} needs what Toolcrib cannot do for it: {said}");
                    Fault::new(Code::UpstreamUnavailable, message).not_happened().retryable(false)
                }
                _ => Fault::runtime(format!("{name}: {said}")),
            }
        }
        error if never_sent(error) => {
            let message = format!("{name} cannot be reached at {}", upstream.settings.place());
            Fault::unreachable(message)
        }
        ServiceError::TransportClosed | ServiceError::Cancelled { .. } => {
            let why = known.unwrap_or_else(|| "it went away".to_owned());
            unknown(attempt, format!("{name} did not finish {}: {why}", attempt.tool))
        }
        error => {
            let said = upstream.clean(&error.to_string());
            let said: String = said.chars().take(400).collect();
            let why = known.unwrap_or(said);
            unknown(attempt, format!("{name} did not answer {} properly: {why}", attempt.tool))
        }
    }
}
