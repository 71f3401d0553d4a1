//! `toolcrib watch` and `toolcrib calls events`: prints events as they happen, one line each.
//!
//! When a stream breaks, the command reopens it after the last event it received, so no event is
//! lost or printed twice.

use std::time::Duration;

use clap::Args;
use reqwest::Response;
use serde_json::Value;
use toolcrib_protocol::sse::{SseEvent, SseParser};

use super::CommandContext;
use super::client::ApiClient;
use super::failure::{CommandFailure, exit};
use super::output::{
    TextStyle, format_clock_time, sanitize_line, str_member, terminal_width, u64_member,
};

const INITIAL_BACKOFF: Duration = Duration::from_millis(500);
const MAX_BACKOFF: Duration = Duration::from_secs(10);
/// Late reports follow the end of a call; those already stored arrive within this time.
const LATE_EVENT_WAIT: Duration = Duration::from_millis(300);

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  toolcrib watch
  toolcrib watch --run run_42
  toolcrib watch --json | jq -c 'select(.type == \"tool.call.failed\")'")]
pub struct WatchArgs {
    /// Only the calls of this run, from its start
    #[arg(long, value_name = "ID")]
    run: Option<String>,
}

pub async fn run(context: &CommandContext, args: WatchArgs) -> Result<(), CommandFailure> {
    let client = context.client()?;
    let path = match &args.run {
        Some(run) => vec!["v1", "runs", run.as_str(), "events"],
        None => vec!["v1", "events"],
    };
    let start_note = format!("watching {} (Ctrl-C to stop)", client.server());
    let (last_event_id, stops_at_call_end, only) = (None, false, None);
    EventWatcher { context, client, path, last_event_id, stops_at_call_end, only }
        .run(Some(&start_note))
        .await
}

/// Prints the events of approvals as they happen.
pub async fn approval_events(context: &CommandContext) -> Result<(), CommandFailure> {
    let client = context.client()?;
    let start_note = format!("watching approvals of {} (Ctrl-C to stop)", client.server());
    let (last_event_id, stops_at_call_end, only) = (None, false, Some("approval."));
    let path = vec!["v1", "events"];
    EventWatcher { context, client, path, last_event_id, stops_at_call_end, only }
        .run(Some(&start_note))
        .await
}

/// Prints all events of one call up to its end.
pub async fn call_events(context: &CommandContext, id: &str) -> Result<(), CommandFailure> {
    let client = context.client()?;
    let path = vec!["v1", "tool_calls", id, "events"];
    let (last_event_id, stops_at_call_end, only) = (None, true, None);
    EventWatcher { context, client, path, last_event_id, stops_at_call_end, only }.run(None).await
}

struct EventWatcher<'a> {
    context: &'a CommandContext,
    client: ApiClient,
    path: Vec<&'a str>,
    last_event_id: Option<String>,
    /// True if watching stops at the end of the call.
    stops_at_call_end: bool,
    /// Beginning of the types to print; `None` prints all.
    only: Option<&'static str>,
}

/// The reason why reading a stream stopped.
enum StreamEnd {
    /// The call has ended.
    CallEnded,
    /// The server closed the stream cleanly.
    Closed,
    /// The connection broke.
    Lost,
}

impl EventWatcher<'_> {
    async fn run(mut self, start_note: Option<&str>) -> Result<(), CommandFailure> {
        let output = self.context.output;
        // The first attempt is not retried: an unreachable server is probably a wrong URL.
        let mut stream = self.client.open_event_stream(&self.path, None).await?;
        if let Some(start_note) = start_note {
            output.print_note(start_note);
        }
        loop {
            let seen = self.last_event_id.clone();
            match self.read_stream(stream).await? {
                StreamEnd::CallEnded => return Ok(()),
                // A stream that closes cleanly without a new event has no more events.
                StreamEnd::Closed if self.stops_at_call_end && seen == self.last_event_id => {
                    return Ok(());
                }
                StreamEnd::Closed | StreamEnd::Lost => {
                    output.print_note("stream lost; reconnecting")
                }
            }
            stream = self.reconnect().await?;
            output.print_note("reconnected");
        }
    }

    async fn reconnect(&self) -> Result<Response, CommandFailure> {
        let mut pause = INITIAL_BACKOFF;
        loop {
            tokio::time::sleep(pause).await;
            match self.client.open_event_stream(&self.path, self.last_event_id.as_deref()).await {
                Ok(stream) => return Ok(stream),
                Err(failure) if failure.exit == exit::UNREACHABLE || failure.retryable => {
                    pause = (pause * 2).min(MAX_BACKOFF);
                }
                Err(failure) => return Err(failure),
            }
        }
    }

    async fn read_stream(&mut self, mut stream: Response) -> Result<StreamEnd, CommandFailure> {
        let mut parser = SseParser::default();
        let mut ended = false;
        loop {
            let chunk = if ended {
                match tokio::time::timeout(LATE_EVENT_WAIT, stream.chunk()).await {
                    Ok(chunk) => chunk,
                    Err(_) => return Ok(StreamEnd::CallEnded),
                }
            } else {
                stream.chunk().await
            };
            let messages = match chunk {
                _ if ended && !matches!(chunk, Ok(Some(_))) => return Ok(StreamEnd::CallEnded),
                Ok(Some(bytes)) => parser.push(&bytes).map_err(|_| {
                    let message = "an event of the server exceeds the size limit";
                    CommandFailure::new(exit::FAILURE, "NOT_SSE", message)
                })?,
                Ok(None) => return Ok(StreamEnd::Closed),
                Err(_) => return Ok(StreamEnd::Lost),
            };
            for message in messages {
                ended |= self.stops_at_call_end && is_call_end(&message);
                self.print_event(&message)?;
            }
            self.last_event_id = parser.last_id().map(str::to_owned).or(self.last_event_id.take());
        }
    }

    fn print_event(&self, message: &SseEvent) -> Result<(), CommandFailure> {
        let event = message.to_json();
        let output = self.context.output;
        if self.only.is_some_and(|only| !str_member(&event, "type").starts_with(only)) {
            return Ok(());
        }
        if output.json {
            return output.print_json_line(&event);
        }
        let kind = str_member(&event, "type");
        let event_name = kind.strip_prefix("tool.call.").unwrap_or(kind);
        let style = event_style(event_name);
        let event_name = format!("{:<10}", sanitize_line(event_name));
        let time = u64_member(&event, "at_ms").map(format_clock_time).unwrap_or_default();
        let id = sanitize_line(str_member(&event, "tool_call_id"));
        let attempt = u64_member(&event, "attempt").unwrap_or_default();
        let tool = sanitize_line(str_member(&event, "tool"));
        let fields = format_other_fields(&event);
        let head = format!("{time}  {event_name}");
        let rest = format!("{tool:<20}  {id}  attempt {attempt}{fields}");
        let lines = wrap_line(&format!("{head}  {rest}"), terminal_width());
        // The first line begins with the head, which is shorter than every terminal that wraps.
        let painted = format!(
            "{}  {}",
            output.paint(&time, TextStyle::Dim),
            output.paint(&event_name, style)
        );
        match lines.strip_prefix(&head) {
            Some(rest) => output.print_line(&format!("{painted}{rest}")),
            None => output.print_line(&lines),
        }
    }
}

/// Breaks a line that is too wide for the terminal between two words, so that no id is broken.
/// The continuation is indented.
fn wrap_line(line: &str, width: Option<u16>) -> String {
    const INDENT: &str = "    ";
    let line = line.trim_end();
    let width = width.map_or(usize::MAX, usize::from);
    let (mut text, mut column) = (String::new(), 0);
    for word in line.split_inclusive(' ') {
        let word_width = word.trim_end().chars().count();
        if word_width > 0 && column > INDENT.len() && column + word_width > width {
            text.truncate(text.trim_end().len());
            text.push('\n');
            text.push_str(INDENT);
            column = INDENT.len();
        }
        text.push_str(word);
        column += word.chars().count();
    }
    text
}

fn is_call_end(message: &SseEvent) -> bool {
    let event = message.to_json();
    let kind = str_member(&event, "type");
    let event_name = kind.strip_prefix("tool.call.").unwrap_or_default();
    matches!(event_name, "finished" | "failed" | "timeout" | "canceled")
}

fn event_style(event_name: &str) -> TextStyle {
    match event_name {
        "finished" => TextStyle::Success,
        "failed" | "timeout" => TextStyle::Error,
        "canceled" | "retrying" | "fallback" | "recovered" | "late" => TextStyle::Warning,
        _ => TextStyle::Bold,
    }
}

/// Formats the other fields of the event, shortened.
fn format_other_fields(event: &Value) -> String {
    // The run id and the caller's call id are for programs; the line is long enough without them.
    const OMITTED_FIELDS: [&str; 8] =
        ["number", "type", "tool_call_id", "run_id", "call_id", "at_ms", "attempt", "tool"];
    let Some(members) = event.as_object() else {
        return format!("  {}", sanitize_line(&event.to_string()));
    };
    let mut text = String::new();
    for (name, value) in members {
        if OMITTED_FIELDS.contains(&name.as_str()) || value.is_null() {
            continue;
        }
        let value_text = match value {
            Value::String(event_name) => sanitize_line(event_name),
            Value::Object(error) if error.contains_key("message") => {
                let part = |name: &str| error.get(name).and_then(Value::as_str).unwrap_or_default();
                sanitize_line(&format!("{}: {}", part("code"), part("message")))
            }
            other => sanitize_line(&other.to_string()),
        };
        let short: String = value_text.chars().take(120).collect();
        text.push_str(&format!("  {}={short}", sanitize_line(name)));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_line_fits_the_terminal_and_keeps_its_ids_whole() {
        let id = "tc_01M7P1V4D34HE398TZXP761C7H";
        let line = format!(
            "12:03:04.123  failed      demo.greet            {id}  attempt 1  \
             error=TIMEOUT: the call did not end in time  next_ms=5"
        );
        assert_eq!(wrap_line(&line, None), line);
        assert_eq!(wrap_line(&line, Some(200)), line);
        for width in 40..150 {
            let wrapped = wrap_line(&line, Some(width));
            assert!(wrapped.lines().all(|part| part.chars().count() <= usize::from(width)));
            assert!(wrapped.contains(id), "{width}:\n{wrapped}");
            let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
            assert_eq!(words(&wrapped), words(&line), "{width}:\n{wrapped}");
        }
    }

    #[test]
    fn an_event_is_printed_as_one_sanitized_line() {
        let event = json!({"number": 1, "type": "tool.call.failed", "tool_name": "a\u{1b}b\n",
            "error": {"code": "TIMEOUT", "message": "m"}, "next_ms": 5, "gone": null});
        let line = format_other_fields(&event);
        assert!(line.contains("tool_name=a\u{fffd}b "), "{line}");
        assert!(line.contains("error=TIMEOUT: m") && line.contains("next_ms=5"), "{line}");
        assert!(!line.contains('\n') && !line.contains("gone"), "{line}");
        assert_eq!(format_other_fields(&json!("x")), "  \"x\"");
    }

    #[test]
    fn the_end_of_a_call_is_recognized() {
        let message = |data: &str| SseEvent { id: None, data: data.to_owned() };
        assert!(is_call_end(&message(r#"{"type":"tool.call.finished"}"#)));
        assert!(!is_call_end(&message(r#"{"type":"tool.call.late"}"#)));
        assert!(!is_call_end(&message("nonsense")));
    }
}
