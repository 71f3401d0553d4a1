//! `toolcrib run --replay`: replays a recorded run and shows the steps that differ.

use serde_json::{Value, json};

use super::super::CommandContext;
use super::super::client::ApiClient;
use super::super::failure::{CommandFailure, exit};
use super::super::output::{TextStyle, sanitize_line, str_member, u64_member};
use super::RunEventReader;

/// Maximum number of characters shown of a text or of arguments.
const MAX_EXCERPT_CHARS: usize = 160;

pub(super) async fn replay_run(
    context: &CommandContext,
    client: &ApiClient,
    run: &str,
    model: Option<&str>,
) -> Result<(), CommandFailure> {
    let path = ["v1", "runs", run, "replay"];
    let stream = client.post_event_stream(&path, json!({ "model": model })).await?;
    let mut messages = RunEventReader::new(stream);
    while let Some(batch) = messages.next().await? {
        for message in batch {
            let event = message.to_json();
            if context.output.json {
                context.output.print_json_line(&event)?;
            }
            match str_member(&event, "type") {
                "replay.asking" if !context.output.json => {
                    let step = u64_member(&event, "step").unwrap_or_default();
                    context.output.print_note(&format!("step {step}"));
                }
                "replay.finished" => return print_replay_result(context, &event),
                "replay.failed" => {
                    let error = &event["error"];
                    let (code, message) = (str_member(error, "code"), str_member(error, "message"));
                    return Err(CommandFailure::new(exit::FAILURE, code, message));
                }
                _ => {}
            }
        }
    }
    Err(CommandFailure::unreachable("the connection broke before the end; nothing was changed"))
}

fn print_replay_result(context: &CommandContext, event: &Value) -> Result<(), CommandFailure> {
    let output = context.output;
    let is_same = event["same"] == true;
    if !output.json {
        let answer = str_member(event, "answer");
        for difference in event["differences"].as_array().into_iter().flatten() {
            let step = u64_member(difference, "step").unwrap_or_default();
            let heading = output.paint(&format!("step {step} differs"), TextStyle::Warning);
            output.print_line(&heading)?;
            output.print_line(&format!("  recorded  {}", format_reply(&difference["recorded"])))?;
            output.print_line(&format!("  now       {}", format_reply(&difference["now"])))?;
        }
        output.print_line(&format!("answer: {}", sanitize_line(answer)))?;
        if is_same {
            output.print_note(&output.paint_message("the same as recorded", TextStyle::Success));
        }
        if let Some(count) = u64_member(event, "unrecorded_calls").filter(|count| *count > 0) {
            output.print_note(&format!("{count} calls have no recorded result, and were not made"));
        }
    }
    // As in diff: 0 if the runs are the same, 1 if they differ.
    if is_same { Ok(()) } else { Err(CommandFailure::already_reported(exit::FAILURE)) }
}

/// Formats what the model did in a step, shortened.
fn format_reply(reply: &Value) -> String {
    if reply.is_null() {
        return "no such step".to_owned();
    }
    let calls = reply["calls"].as_array().map_or(&[][..], Vec::as_slice);
    let text = match calls.is_empty() {
        true => format!("\"{}\"", str_member(reply, "text")),
        false => {
            let describe_call = |call: &Value| {
                format!("{} {}", str_member(call, "name"), str_member(call, "arguments"))
            };
            calls.iter().map(describe_call).collect::<Vec<_>>().join(", ")
        }
    };
    let short: String = sanitize_line(&text).chars().take(MAX_EXCERPT_CHARS).collect();
    if text.chars().count() > MAX_EXCERPT_CHARS { format!("{short}…") } else { short }
}
