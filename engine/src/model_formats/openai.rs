//! The OpenAI chat format: `{id, type: "function", function: {name, arguments: "<json text>"}}`,
//! answered with a message whose role is `tool`.

use serde::Serialize;

use super::fields::RawFields;
use super::{CallFormat, EntryAnswer, ParsedToolCall, arguments, to_json};
use crate::domain::fault::Fault;
use crate::domain::json::Json;

pub(super) fn read(fields: &RawFields<'_>) -> Result<ParsedToolCall, Fault> {
    let function = fields.object("function", "/function")?;
    let name = function.required_text("name")?;
    let args = arguments::read(function.raw_value("arguments"), "/function/arguments")?;
    Ok(ParsedToolCall::new(CallFormat::OpenAi, fields.text("id")?, name, args))
}

/// Returns the tool's name if it can be read.
pub(super) fn name_hint(fields: &RawFields<'_>) -> Option<String> {
    fields.object("function", "/function").ok()?.text_if_valid("name")
}

#[derive(Serialize)]
struct OpenAiToolMessage<'a> {
    role: &'static str,
    tool_call_id: &'a str,
    content: &'a str,
}

pub(super) fn message(id: &str, answer: &EntryAnswer<'_>) -> Json {
    to_json(&OpenAiToolMessage { role: "tool", tool_call_id: id, content: answer.content })
}
