//! `toolcrib watch` and `toolcrib calls events`: prints events as they happen, one line each.
//!
//! When a stream breaks, the command reopens it after the last event it received, so no event is
//! lost or printed twice.

use std::time::Duration;

use clap::Args;
use reqwest::Response;
use serde_json::Value;

use super::Context;
use super::client::Client;
use super::failure::{Failure, exit};
use super::output::{Tone, clock, number, plain, text};
use crate::sse::{Message, Parser};

const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// Late reports follow the end of a call; those already stored arrive within this time.
const AFTER_THE_END: Duration = Duration::from_millis(300);

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

pub async fn run(context: &Context, args: WatchArgs) -> Result<(), Failure> {
    let client = context.client()?;
    let path = match &args.run {
        Some(run) => vec!["v1", "runs", run.as_str(), "events"],
        None => vec!["v1", "events"],
    };
    let watched = format!("watching {} (Ctrl-C to stop)", client.server());
    Watching { context, client, path, last: None, until_end: false }.run(Some(&watched)).await
}

/// Prints all events of one call up to its end.
pub async fn call_events(context: &Context, id: &str) -> Result<(), Failure> {
    let client = context.client()?;
    let path = vec!["v1", "tool_calls", id, "events"];
    Watching { context, client, path, last: None, until_end: true }.run(None).await
}

struct Watching<'a> {
    context: &'a Context,
    client: Client,
    path: Vec<&'a str>,
    last: Option<String>,
    /// True if watching stops at the end of the call.
    until_end: bool,
}

/// The reason why reading a stream stopped.
enum Stop {
    /// The call has ended.
    End,
    /// The server closed the stream cleanly.
    Closed,
    /// The connection broke.
    Lost,
}

impl Watching<'_> {
    async fn run(mut self, begin: Option<&str>) -> Result<(), Failure> {
        let output = self.context.output;
        // The first attempt is not retried: an unreachable server is probably a wrong URL.
        let mut stream = self.client.stream(&self.path, None).await?;
        if let Some(begin) = begin {
            output.note(begin);
        }
        loop {
            let seen = self.last.clone();
            match self.follow(stream).await? {
                Stop::End => return Ok(()),
                // A stream that closes cleanly without a new event has no more events.
                Stop::Closed if self.until_end && seen == self.last => return Ok(()),
                Stop::Closed | Stop::Lost => output.note("stream lost; connecting again"),
            }
            stream = self.reconnect().await?;
            output.note("connected again");
        }
    }

    async fn reconnect(&self) -> Result<Response, Failure> {
        let mut pause = FIRST_PAUSE;
        loop {
            tokio::time::sleep(pause).await;
            match self.client.stream(&self.path, self.last.as_deref()).await {
                Ok(stream) => return Ok(stream),
                Err(failure) if failure.exit == exit::UNREACHABLE || failure.retryable => {
                    pause = (pause * 2).min(LONGEST_PAUSE);
                }
                Err(failure) => return Err(failure),
            }
        }
    }

    async fn follow(&mut self, mut stream: Response) -> Result<Stop, Failure> {
        let mut parser = Parser::default();
        let mut ended = false;
        loop {
            let chunk = if ended {
                match tokio::time::timeout(AFTER_THE_END, stream.chunk()).await {
                    Ok(chunk) => chunk,
                    Err(_) => return Ok(Stop::End),
                }
            } else {
                stream.chunk().await
            };
            let messages = match chunk {
                _ if ended && !matches!(chunk, Ok(Some(_))) => return Ok(Stop::End),
                Ok(Some(bytes)) => parser.push(&bytes).map_err(|_| {
                    let message = "the server sends an event without an end";
                    Failure::new(exit::FAILURE, "NOT_SSE", message)
                })?,
                Ok(None) => return Ok(Stop::Closed),
                Err(_) => return Ok(Stop::Lost),
            };
            for message in messages {
                ended |= self.until_end && is_end(&message);
                self.show(&message)?;
            }
            self.last = parser.last_id().map(str::to_owned).or(self.last.take());
        }
    }

    fn show(&self, message: &Message) -> Result<(), Failure> {
        let event = message.value();
        let output = self.context.output;
        if output.json {
            return output.value_line(&event);
        }
        let kind = text(&event, "type");
        let word = kind.strip_prefix("tool.call.").unwrap_or(kind);
        let word = output.tone(&format!("{:<10}", plain(word)), tone(word));
        let at = number(&event, "at_ms").map(clock).unwrap_or_default();
        let at = output.tone(&at, Tone::Quiet);
        let id = plain(text(&event, "tool_call_id"));
        let attempt = number(&event, "attempt").unwrap_or_default();
        let tool = plain(text(&event, "tool"));
        let line = format!("{at}  {word}  {tool:<20}  {id}  attempt {attempt}{}", facts(&event));
        output.line(line.trim_end())
    }
}

fn is_end(message: &Message) -> bool {
    let event = message.value();
    let kind = text(&event, "type");
    let word = kind.strip_prefix("tool.call.").unwrap_or_default();
    matches!(word, "finished" | "failed" | "timeout" | "canceled")
}

fn tone(word: &str) -> Tone {
    match word {
        "finished" => Tone::Good,
        "failed" | "timeout" => Tone::Bad,
        "canceled" | "retrying" | "fallback" | "recovered" | "late" => Tone::Doubtful,
        _ => Tone::Strong,
    }
}

/// Formats the other fields of the event, shortened.
fn facts(event: &Value) -> String {
    // The run id and the caller's call id are for programs; the line is long enough without them.
    const SAID: [&str; 8] =
        ["number", "type", "tool_call_id", "run_id", "call_id", "at_ms", "attempt", "tool"];
    let Some(members) = event.as_object() else {
        return format!("  {}", plain(&event.to_string()));
    };
    let mut text = String::new();
    for (name, value) in members {
        if SAID.contains(&name.as_str()) || value.is_null() {
            continue;
        }
        let shown = match value {
            Value::String(word) => plain(word),
            Value::Object(error) if error.contains_key("message") => {
                let part = |name: &str| error.get(name).and_then(Value::as_str).unwrap_or_default();
                plain(&format!("{}: {}", part("code"), part("message")))
            }
            other => plain(&other.to_string()),
        };
        let short: String = shown.chars().take(120).collect();
        text.push_str(&format!("  {}={short}", plain(name)));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_event_is_one_harmless_line() {
        let event = json!({"number": 1, "type": "tool.call.failed", "tool_name": "a\u{1b}b\n",
            "error": {"code": "TIMEOUT", "message": "m"}, "next_ms": 5, "gone": null});
        let line = facts(&event);
        assert!(line.contains("tool_name=a\u{fffd}b "), "{line}");
        assert!(line.contains("error=TIMEOUT: m") && line.contains("next_ms=5"), "{line}");
        assert!(!line.contains('\n') && !line.contains("gone"), "{line}");
        assert_eq!(facts(&json!("x")), "  \"x\"");
    }

    #[test]
    fn the_end_of_a_call_is_recognised() {
        let message = |data: &str| Message { id: None, data: data.to_owned() };
        assert!(is_end(&message(r#"{"type":"tool.call.finished"}"#)));
        assert!(!is_end(&message(r#"{"type":"tool.call.late"}"#)));
        assert!(!is_end(&message("nonsense")));
    }
}
