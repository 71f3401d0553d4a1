//! Waits for the outcome of a call, prints it, and decides the exit code of the command.

use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use serde_json::Value;

use super::CommandContext;
use super::client::{ApiClient, ApiRequest};
use super::failure::{CommandFailure, exit, hint_for_outcome};
use super::output::{self, Output, TextStyle, now_ms, sanitize_line, str_member, u64_member};

/// Time that one request waits for the outcome; shorter than the timeouts of common proxies.
const POLL_WAIT: Duration = Duration::from_secs(20);
/// Pause after a request that returned sooner than this.
const POLL_PAUSE: Duration = Duration::from_millis(300);
/// Time that the first request waits. Short, so that the command soon shows why a call cannot
/// start.
const FIRST_POLL_WAIT: Duration = Duration::from_secs(1);

/// Polls until the call has ended or the deadline has passed. Continues while the server is
/// unreachable, because the call is stored.
pub async fn await_outcome(
    output: Output,
    client: &ApiClient,
    spinner: &ProgressBar,
    initial: Value,
    deadline: Instant,
) -> Result<Value, CommandFailure> {
    let mut call = initial;
    let id = str_member(&call, "tool_call_id").to_owned();
    let tool = sanitize_line(str_member(&call, "tool_name"));
    let mut last_failure: Option<CommandFailure> = None;
    let mut poll_wait = FIRST_POLL_WAIT;
    let mut is_hold_shown = false;
    while !is_terminal(&call) {
        let remaining = deadline.saturating_duration_since(Instant::now());
        if remaining.is_zero() {
            return match last_failure {
                Some(failure) => Err(failure.hint(resume_hint(&id))),
                None => Ok(call),
            };
        }
        let status = sanitize_line(str_member(&call, "status"));
        if let Some(detail) = hold_detail(&call).filter(|_| !is_hold_shown) {
            spinner.suspend(|| output.print_note(&detail));
            is_hold_shown = true;
        }
        spinner.set_message(match last_failure {
            None => format!("{tool}  {status}  {id}"),
            Some(_) => format!("{tool}  server unreachable, the call is stored, retrying  {id}"),
        });
        let poll_start = Instant::now();
        let path = ["v1", "tool_calls", id.as_str()];
        let request = ApiRequest::get(&path).wait(remaining.min(poll_wait));
        poll_wait = POLL_WAIT;
        let answer = tokio::select! {
            answer = client.request_json(request) => answer,
            _ = tokio::signal::ctrl_c() => {
                // Not yet reported: the hint must be printed.
                let interrupted =
                    CommandFailure { is_reported: false, ..CommandFailure::interrupted() };
                return Err(interrupted.hint(resume_hint(&id)));
            }
        };
        match answer {
            Ok(current) => {
                call = current;
                last_failure = None;
            }
            Err(failure) if failure.exit == exit::UNREACHABLE => last_failure = Some(failure),
            Err(failure) => return Err(failure),
        }
        // The server may respond without waiting, or be unreachable.
        if poll_start.elapsed() < POLL_PAUSE && !is_terminal(&call) {
            tokio::time::sleep(POLL_PAUSE).await;
        }
    }
    Ok(call)
}

fn resume_hint(id: &str) -> String {
    format!("the call continues; resume with: toolcrib calls get {} --wait", sanitize_line(id))
}

/// Returns the server's description of what an open call waits for, if there is one.
pub fn hold_detail(call: &Value) -> Option<String> {
    call["hold_details"]["message"].as_str().map(sanitize_line)
}

/// Returns the hint for a call that waits for answers: its questions, and the command that answers
/// them.
fn answer_hint(id: &str, questions: &Value) -> String {
    let texts = questions.as_object().into_iter().flatten().map(|(key, question)| {
        let message = question["params"]["message"].as_str().unwrap_or_default();
        format!("{} \"{}\"", sanitize_line(key), sanitize_line(message))
    });
    let (id, texts) = (sanitize_line(id), texts.collect::<Vec<_>>().join(", "));
    format!(
        "the call waits for answers: {texts}; answer with: toolcrib calls answer {id} --question KEY FIELD=VALUE"
    )
}

fn is_terminal(call: &Value) -> bool {
    matches!(str_member(call, "status"), "SUCCEEDED" | "FAILED" | "TIMEOUT" | "CANCELED")
}

/// Prints the outcome: a summary line for people, and the result. The error has the exit code of a
/// call that did not succeed.
pub fn print_outcome(
    context: &CommandContext,
    call: &Value,
    waited: Duration,
) -> Result<(), CommandFailure> {
    let output = context.output;
    if output.json {
        output.print_json(call)?;
    }
    let failure = match str_member(call, "status") {
        "SUCCEEDED" => {
            output.print_note(&summary_line(context, call));
            return if output.json { Ok(()) } else { output.print_json(&call["result"]) };
        }
        "FAILED" => outcome_failure(call, exit::TOOL_FAILED),
        "TIMEOUT" => outcome_failure(call, exit::TIMED_OUT),
        "CANCELED" => outcome_failure(call, exit::FAILURE),
        status => {
            let status = sanitize_line(status);
            let time = output::format_duration(waited.as_millis() as u64);
            let message = format!("still {status} after {time} of waiting");
            let message = match hold_detail(call) {
                Some(detail) => format!("{message}: {detail}"),
                None => message,
            };
            let id = str_member(call, "tool_call_id");
            let hint = if call["hold_details"]["questions"].is_object() {
                answer_hint(id, &call["hold_details"]["questions"])
            } else {
                resume_hint(id)
            };
            CommandFailure::new(exit::TIMED_OUT, "STILL_OPEN", message).hint(hint)
        }
    };
    output.print_note(&summary_line(context, call));
    Err(failure)
}

/// Formats the summary line: `✓ weather.query  SUCCEEDED in 212 ms   tc_…   attempt 1`
pub fn summary_line(context: &CommandContext, call: &Value) -> String {
    let status = str_member(call, "status");
    let (symbol, style) = match status {
        "SUCCEEDED" => ("✓", TextStyle::Success),
        "PENDING" | "RUNNING" => ("…", TextStyle::Warning),
        _ => ("✗", TextStyle::Error),
    };
    let symbol = context.output.paint_message(symbol, style);
    let tool = sanitize_line(str_member(call, "tool_name"));
    let executed_tool = str_member(call, "ran_tool");
    let executed_tool =
        if executed_tool.is_empty() || executed_tool == str_member(call, "tool_name") {
            String::new()
        } else {
            format!(" (ran {})", sanitize_line(executed_tool))
        };
    let duration = elapsed_ms(call).map_or_else(String::new, |ms| {
        format!(" {} {}", if is_terminal(call) { "in" } else { "for" }, output::format_duration(ms))
    });
    let id = sanitize_line(str_member(call, "tool_call_id"));
    let attempt = u64_member(call, "attempt").unwrap_or_default();
    format!(
        "{symbol} {tool}{executed_tool}  {}{duration}   {id}   attempt {attempt}",
        sanitize_line(status)
    )
}

fn outcome_failure(call: &Value, exit: u8) -> CommandFailure {
    let error = &call["error"];
    let code = str_member(error, "code");
    let message = match str_member(error, "message") {
        "" => format!("the call ended as {}", sanitize_line(str_member(call, "status"))),
        message => message.to_owned(),
    };
    let message = format!("{}: {message}", sanitize_line(code));
    let mut failure = CommandFailure::new(exit, code, message);
    failure.hint = hint_for_outcome(error);
    failure.retryable = error["retryable"].as_bool().unwrap_or(false);
    failure.detail = error.get("detail").filter(|detail| !detail.is_null()).cloned();
    failure
}

/// Returns the time from the creation of a call to its end, or to now if it has not ended.
pub fn elapsed_ms(call: &Value) -> Option<u64> {
    if let Some(ms) = u64_member(&call["outcome"]["metrics"], "latency_ms") {
        return Some(ms);
    }
    let end = u64_member(call, "completed_at_ms").unwrap_or_else(now_ms);
    u64_member(call, "created_at_ms").map(|begin| end.saturating_sub(begin))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn every_outcome_has_its_exit_code() {
        let context = crate::cli::tests::context(true);
        let exit_code = |status: &str| {
            let call = json!({"tool_call_id": "tc_1", "status": status, "error": {"code": "X"}});
            print_outcome(&context, &call, Duration::ZERO).err().map(|failure| failure.exit)
        };
        assert_eq!(exit_code("SUCCEEDED"), None);
        assert_eq!(exit_code("FAILED"), Some(exit::TOOL_FAILED));
        assert_eq!(exit_code("TIMEOUT"), Some(exit::TIMED_OUT));
        assert_eq!(exit_code("CANCELED"), Some(exit::FAILURE));
        assert_eq!(exit_code("RUNNING"), Some(exit::TIMED_OUT));
        assert_eq!(exit_code("\u{1b}?"), Some(exit::TIMED_OUT));
    }

    #[test]
    fn the_summary_line_of_a_call() {
        let context = crate::cli::tests::context(false);
        let call = json!({"tool_call_id": "tc_1", "status": "SUCCEEDED", "tool_name": "a.b",
            "ran_tool": "c.d", "attempt": 2, "outcome": {"metrics": {"latency_ms": 212}}});
        let line = summary_line(&context, &call);
        assert_eq!(line, "✓ a.b (ran c.d)  SUCCEEDED in 212 ms   tc_1   attempt 2");
    }
}
