//! What an upstream's answer means for the call: its result, or a fault that says what happened and
//! whether it can have taken effect.

use rmcp::ServiceError;
use rmcp::model::{CallToolResult, ErrorCode};
use serde_json::json;
use toolcrib::Json;
use toolcrib::fault::{Code, Fault};
use toolcrib::source::Attempt;
use toolcrib::tool::Effect;

use super::connection::never_sent;
use super::upstream::Upstream;

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

/// What went wrong with a request.
pub(super) fn of_error(
    upstream: &Upstream,
    attempt: &Attempt,
    error: &ServiceError,
    known: Option<String>,
) -> Fault {
    let name = &upstream.settings.name;
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
