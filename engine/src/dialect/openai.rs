//! The OpenAI chat format: `{id, type: "function", function: {name, arguments: "<json text>"}}`,
//! answered with a message whose role is `tool`.

use serde::Serialize;

use super::fields::Fields;
use super::{Answer, Entry, Form, arguments, written};
use crate::fault::Fault;
use crate::json::Json;

pub(super) fn read(fields: &Fields<'_>) -> Result<Entry, Fault> {
    let function = fields.object("function", "/function")?;
    let name = function.needed("name")?;
    let args = arguments::read(function.written("arguments"), "/function/arguments")?;
    Ok(Entry::new(Form::OpenAi, fields.text("id")?, name, args))
}

/// Returns the tool's name if it can be read.
pub(super) fn name_hint(fields: &Fields<'_>) -> Option<String> {
    fields.object("function", "/function").ok()?.hint("name")
}

#[derive(Serialize)]
struct Message<'a> {
    role: &'static str,
    tool_call_id: &'a str,
    content: &'a str,
}

pub(super) fn message(id: &str, answer: &Answer<'_>) -> Json {
    written(&Message { role: "tool", tool_call_id: id, content: answer.content })
}
