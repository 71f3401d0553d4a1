//! The Anthropic format: a `{type: "tool_use", id, name, input: {…}}` block, answered with a
//! `tool_result` block that goes into the next user message.

use serde::Serialize;

use super::fields::RawFields;
use super::{CallFormat, EntryAnswer, ParsedToolCall, parse_fault, to_json};
use crate::domain::fault::Fault;
use crate::domain::json::Json;

pub(super) fn read(fields: &RawFields<'_>) -> Result<ParsedToolCall, Fault> {
    let (id, name) = (fields.text("id")?, fields.required_text("name")?);
    let input = fields.json("input").unwrap_or_else(Json::empty_object);
    if !input.text().starts_with('{') {
        return Err(parse_fault("/input", "input must be an object"));
    }
    Ok(ParsedToolCall::new(CallFormat::Anthropic, id, name, input))
}

#[derive(Serialize)]
struct ToolResultBlock<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    tool_use_id: &'a str,
    content: &'a str,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    is_error: bool,
}

pub(super) fn message(id: &str, answer: &EntryAnswer<'_>) -> Json {
    let is_error = answer.ok == Some(false);
    let (kind, content) = ("tool_result", answer.content);
    to_json(&ToolResultBlock { kind, tool_use_id: id, content, is_error })
}
