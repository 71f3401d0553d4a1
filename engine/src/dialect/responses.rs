//! The OpenAI Responses format: a `{type: "function_call", id, call_id, name, arguments}` item,
//! answered with a `function_call_output` item. The item's `id` is not the call's id.

use serde::Serialize;

use super::fields::Fields;
use super::{Answer, Entry, Form, arguments, written};
use crate::fault::Fault;
use crate::json::Json;

pub(super) fn read(fields: &Fields<'_>) -> Result<Entry, Fault> {
    let (id, name) = (fields.text("call_id")?, fields.needed("name")?);
    let args = arguments::read(fields.written("arguments"), "/arguments")?;
    Ok(Entry::new(Form::Responses, id, name, args))
}

#[derive(Serialize)]
struct Item<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    call_id: &'a str,
    output: &'a str,
}

pub(super) fn message(id: &str, answer: &Answer<'_>) -> Json {
    written(&Item { kind: "function_call_output", call_id: id, output: answer.content })
}
