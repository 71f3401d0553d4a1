//! The OpenAI Responses format: a `{type: "function_call", id, call_id, name, arguments}` item,
//! answered with a `function_call_output` item. The item's `id` is not the call's id.

use serde::Serialize;

use super::fields::RawFields;
use super::{CallFormat, EntryAnswer, ParsedToolCall, arguments, to_json};
use crate::domain::fault::Fault;
use crate::domain::json::Json;

pub(super) fn read(fields: &RawFields<'_>) -> Result<ParsedToolCall, Fault> {
    let (id, name) = (fields.text("call_id")?, fields.required_text("name")?);
    let args = arguments::read(fields.raw_value("arguments"), "/arguments")?;
    Ok(ParsedToolCall::new(CallFormat::Responses, id, name, args))
}

#[derive(Serialize)]
struct FunctionCallOutput<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    call_id: &'a str,
    output: &'a str,
}

pub(super) fn message(id: &str, answer: &EntryAnswer<'_>) -> Json {
    to_json(&FunctionCallOutput {
        kind: "function_call_output",
        call_id: id,
        output: answer.content,
    })
}
