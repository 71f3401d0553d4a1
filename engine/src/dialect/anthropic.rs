//! The Anthropic format: a `{type: "tool_use", id, name, input: {…}}` block, answered with a
//! `tool_result` block that goes into the next user message.

use serde::Serialize;

use super::fields::Fields;
use super::{Answer, Entry, Form, misfit, written};
use crate::fault::Fault;
use crate::json::Json;

pub(super) fn read(fields: &Fields<'_>) -> Result<Entry, Fault> {
    let (id, name) = (fields.text("id")?, fields.needed("name")?);
    let input = fields.raw("input").unwrap_or_else(Json::empty_object);
    if !input.text().starts_with('{') {
        return Err(misfit("/input", "input must be an object"));
    }
    Ok(Entry::new(Form::Anthropic, id, name, input))
}

#[derive(Serialize)]
struct Block<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    tool_use_id: &'a str,
    content: &'a str,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    is_error: bool,
}

pub(super) fn message(id: &str, answer: &Answer<'_>) -> Json {
    let is_error = answer.ok == Some(false);
    let (kind, content) = ("tool_result", answer.content);
    written(&Block { kind, tool_use_id: id, content, is_error })
}
