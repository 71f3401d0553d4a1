//! `toolcrib run --replay`: replays a recorded run and shows the steps that differ.

use serde_json::{Value, json};

use super::super::Context;
use super::super::client::Client;
use super::super::failure::{Failure, exit};
use super::super::output::{Tone, number, plain, text};
use super::Messages;

/// Maximum number of characters shown of a text or of arguments.
const SHOWN: usize = 160;

pub(super) async fn run(
    context: &Context,
    client: &Client,
    run: &str,
    model: Option<&str>,
) -> Result<(), Failure> {
    let path = ["v1", "runs", run, "replay"];
    let stream = client.stream_of(&path, json!({ "model": model })).await?;
    let mut messages = Messages::new(stream);
    while let Some(batch) = messages.next().await? {
        for message in batch {
            let event = message.value();
            if context.output.json {
                context.output.value_line(&event)?;
            }
            match text(&event, "type") {
                "replay.asking" if !context.output.json => {
                    let step = number(&event, "step").unwrap_or_default();
                    context.output.note(&format!("step {step}"));
                }
                "replay.finished" => return finished(context, &event),
                "replay.failed" => {
                    let error = &event["error"];
                    let (code, message) = (text(error, "code"), text(error, "message"));
                    return Err(Failure::new(exit::FAILURE, code, message));
                }
                _ => {}
            }
        }
    }
    Err(Failure::unreachable("the connection broke before the end; nothing was changed"))
}

fn finished(context: &Context, event: &Value) -> Result<(), Failure> {
    let output = context.output;
    let same = event["same"] == true;
    if !output.json {
        let answer = text(event, "answer");
        for difference in event["differences"].as_array().into_iter().flatten() {
            let step = number(difference, "step").unwrap_or_default();
            let heading = output.tone(&format!("step {step} went another way"), Tone::Doubtful);
            output.line(&heading)?;
            output.line(&format!("  recorded  {}", shown(&difference["recorded"])))?;
            output.line(&format!("  now       {}", shown(&difference["now"])))?;
        }
        output.line(&format!("answer: {}", plain(answer)))?;
        if same {
            output.note(&output.message_tone("the same as recorded", Tone::Good));
        }
        if let Some(count) = number(event, "unrecorded_calls").filter(|count| *count > 0) {
            output.note(&format!("{count} calls have no recorded result, and were not made"));
        }
    }
    // As in diff: 0 if the runs are the same, 1 if they differ.
    if same { Ok(()) } else { Err(Failure::said(exit::FAILURE)) }
}

/// Formats what the model did in a step, shortened.
fn shown(reply: &Value) -> String {
    if reply.is_null() {
        return "no such step".to_owned();
    }
    let calls = reply["calls"].as_array().map_or(&[][..], Vec::as_slice);
    let said = match calls.is_empty() {
        true => format!("\"{}\"", text(reply, "text")),
        false => {
            let one = |call: &Value| format!("{} {}", text(call, "name"), text(call, "arguments"));
            calls.iter().map(one).collect::<Vec<_>>().join(", ")
        }
    };
    let short: String = plain(&said).chars().take(SHOWN).collect();
    if said.chars().count() > SHOWN { format!("{short}…") } else { short }
}
