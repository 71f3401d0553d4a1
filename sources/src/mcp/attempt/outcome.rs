//! Converts an upstream's response to the outcome of the attempt: a result, or a fault that says
//! what went wrong and whether the call may have taken effect.

use rmcp::ServiceError;
use rmcp::model::{CallToolResult, ErrorCode, ErrorData, InputRequest};
use serde_json::{Map, Value, json};
use toolcrib::Json;
use toolcrib::domain::fault::{Code, Fault};
use toolcrib::domain::tool::Effect;
use toolcrib::ports::source::Attempt;
use toolcrib_protocol::outbound::parse_retry_after_ms;

use crate::mcp::connection::http_error::{HttpTransportError, http_failure, was_never_sent};
use crate::mcp::upstream::UpstreamServer;

/// Maximum size of a failed result that is stored as the fault's detail.
const MAX_DETAIL_BYTES: usize = 16 << 10;

/// Returns the result in MCP's form, as it is stored. A result marked as an error becomes a fault.
pub(super) fn outcome_from_result(
    attempt: &Attempt,
    mut result: CallToolResult,
) -> Result<Json, Fault> {
    result.result_type = None;
    if result.is_error != Some(true) {
        return Json::from_serialize(&result)
            .map_err(|error| malformed_answer_fault(attempt, error.to_string()));
    }
    let words = result.content.iter().filter_map(|block| block.as_text());
    let words: Vec<&str> = words.map(|block| block.text.as_str()).collect();
    let words: String = words.join("\n").chars().take(4_000).collect();
    let message = match words.trim() {
        "" => format!("{} failed and gave no reason", attempt.tool),
        text => text.to_owned(),
    };
    let fault = Fault::runtime(message);
    match serde_json::to_value(&result) {
        Ok(value) if value.to_string().len() <= MAX_DETAIL_BYTES => {
            Err(fault.with_detail(json!({ "result": value })))
        }
        _ => Err(fault),
    }
}

/// Returns the fault for a response that cannot be understood: the tool has run, with an unknown
/// outcome.
pub(super) fn malformed_answer_fault(attempt: &Attempt, message: String) -> Fault {
    uncertain_outcome_fault(attempt, format!("{}: {message}", attempt.tool))
}

/// Returns the fault for a call that may have taken effect. It is retryable unless the tool is
/// irreversible; in that case the message says that the outcome is unknown.
fn uncertain_outcome_fault(attempt: &Attempt, message: String) -> Fault {
    match attempt.effect {
        Effect::Irreversible => {
            let message = format!(
                "{message}; it may have taken effect and was not retried: a retry is not safe"
            );
            Fault::new(Code::OutcomeUnknown, message).retryable(false)
        }
        _ => Fault::new(Code::UpstreamUnavailable, message).retryable(true),
    }
}

/// Returns the fault for a call that needs another revision of MCP, which Toolcrib uses with the
/// upstream from now on. The tool may have taken effect before it sent its elicitation.
pub(super) fn other_revision_fault(name: &str, attempt: &Attempt, text: &str) -> Fault {
    let text: String = text.chars().take(400).collect();
    let message = format!(
        "{name} cannot serve {} in revision 2026-07-28 of MCP ({text}); Toolcrib now uses \
         2025-11-25 for it",
        attempt.tool
    );
    uncertain_outcome_fault(attempt, message)
}

/// Returns the fault for an overloaded upstream, which may have set a time to retry. A call refused
/// with 429 has not started; with any other status it may have.
pub(super) fn overloaded_fault(
    name: &str,
    attempt: &Attempt,
    status: u16,
    after_ms: Option<u64>,
) -> Fault {
    let when = after_ms.map(|ms| format!(", retry after {} s", ms.div_ceil(1_000)));
    let when = when.unwrap_or_default();
    let tool = &attempt.tool;
    let message = match status {
        429 | 503 => format!("{name} rejected {tool} (HTTP {status}{when})"),
        _ => format!("{name} returned an invalid response to {tool} (HTTP {status}{when})"),
    };
    let fault = match status {
        429 => Fault::new(Code::RateLimited, message).without_side_effect(),
        _ => uncertain_outcome_fault(attempt, message),
    };
    fault.with_retry_after(after_ms)
}

/// Returns the fault for an HTTP refusal, where that says more than a lost response.
fn http_refusal_fault(name: &str, attempt: &Attempt, error: &ServiceError) -> Option<Fault> {
    match http_failure(error)? {
        HttpTransportError::HttpStatus(refusal) => {
            let after_ms = refusal.retry_after.as_deref().and_then(parse_retry_after_ms);
            Some(overloaded_fault(name, attempt, refusal.status, after_ms))
        }
        HttpTransportError::AuthRequired(_) | HttpTransportError::InsufficientScope(_) => {
            Some(Fault::unreachable(format!("{name} refused the credentials")))
        }
        _ => None,
    }
}

/// Error code with which a server of revision 2025-11-25 requires URLs to be opened first.
const URL_ELICITATION_REQUIRED: i32 = -32042;

/// Returns the URLs that an error requires to be opened, as elicitations. The tool has not started,
/// and is called again once they were opened.
pub(super) fn url_elicitations(error: &ErrorData) -> Option<Map<String, Value>> {
    let data = error.data.as_ref().filter(|_| error.code.0 == URL_ELICITATION_REQUIRED)?;
    let elicitations = data.get("elicitations")?.as_array()?.iter();
    let questions = elicitations.filter_map(|elicitation| {
        let key = elicitation.get("elicitationId")?.as_str()?.to_owned();
        let mut params = elicitation.as_object()?.clone();
        params.insert("mode".to_owned(), "url".into());
        let question = json!({ "method": "elicitation/create", "params": params });
        // Skips entries that are not valid elicitations.
        serde_json::from_value::<InputRequest>(question.clone()).ok()?;
        Some((key, question))
    });
    let questions: Map<String, Value> = questions.collect();
    (!questions.is_empty()).then_some(questions)
}

/// Returns the fault for a call whose required URLs were not opened, if that is the case.
pub(super) fn url_not_opened_fault(attempt: &Attempt) -> Option<Fault> {
    let answers = attempt.elicitation.as_ref().map(|elicitation| &elicitation.answers);
    let refused = answers.into_iter().flatten().any(|(_, answer)| answer["action"] != "accept");
    let message = || format!("{} requires a URL to be opened, which was not done", attempt.tool);
    refused.then(|| Fault::runtime(message()).without_side_effect().retryable(false))
}

/// Converts the error of a request to a fault.
pub(super) fn fault_from_error(
    upstream: &UpstreamServer,
    attempt: &Attempt,
    error: &ServiceError,
    problem: Option<String>,
) -> Fault {
    let name = &upstream.settings.name;
    if let Some(fault) = http_refusal_fault(name, attempt, error) {
        return fault;
    }
    match error {
        ServiceError::McpError(error) => {
            let text: String = upstream.redact(&error.message).chars().take(2_000).collect();
            match error.code {
                ErrorCode::INVALID_PARAMS => {
                    Fault::new(Code::ValidationError, format!("{name}: {text}"))
                        .without_side_effect()
                }
                ErrorCode::METHOD_NOT_FOUND => {
                    Fault::new(Code::ToolNotFound, format!("{name}: {text}")).without_side_effect()
                }
                ErrorCode::MISSING_REQUIRED_CLIENT_CAPABILITY => {
                    let message =
                        format!("{name} requires a capability that Toolcrib does not have: {text}");
                    Fault::new(Code::UpstreamUnavailable, message)
                        .without_side_effect()
                        .retryable(false)
                }
                _ => Fault::runtime(format!("{name}: {text}")),
            }
        }
        error if was_never_sent(error) => {
            let message =
                format!("{name} cannot be reached at {}", upstream.settings.display_address());
            Fault::unreachable(message)
        }
        ServiceError::TransportClosed | ServiceError::Cancelled { .. } => {
            let reason = problem.unwrap_or_else(|| "it went away".to_owned());
            uncertain_outcome_fault(
                attempt,
                format!("{name} did not finish {}: {reason}", attempt.tool),
            )
        }
        error => {
            let text = upstream.redact(&error.to_string());
            let text: String = text.chars().take(400).collect();
            let reason = problem.unwrap_or(text);
            uncertain_outcome_fault(
                attempt,
                format!("{name} returned an invalid response to {}: {reason}", attempt.tool),
            )
        }
    }
}
