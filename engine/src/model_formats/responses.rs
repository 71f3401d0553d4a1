//! The OpenAI Responses format: a `{type: "function_call", id, call_id, name, arguments}` item,
//! answered with a `function_call_output` item. The item's `id` is not the call's id.

use serde::Serialize;
use serde_json::{Value, json};

use super::fields::RawFields;
use super::{CallFormat, EntryAnswer, ParsedToolCall, arguments, to_json};
use crate::domain::fault::Fault;
use crate::domain::json::Json;
use crate::results::mcp_content::{MediaKind, MediaPart};

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
    output: FunctionOutput<'a>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum FunctionOutput<'a> {
    Text(&'a str),
    Parts(Vec<Value>),
}

pub(super) fn message(id: &str, answer: &EntryAnswer<'_>) -> Json {
    let parts: Vec<Value> = answer.media.iter().filter_map(media_part).collect();
    let output = match parts.is_empty() {
        true => FunctionOutput::Text(answer.content),
        false => {
            let text = json!({ "type": "input_text", "text": answer.content });
            FunctionOutput::Parts([vec![text], parts].concat())
        }
    };
    to_json(&FunctionCallOutput { kind: "function_call_output", call_id: id, output })
}

/// Returns the input part of an image or a file. The API takes no recordings here.
fn media_part(part: &MediaPart) -> Option<Value> {
    match part.kind {
        MediaKind::Image => Some(json!({ "type": "input_image", "image_url": part.data_url() })),
        MediaKind::File if part.media_type == "application/pdf" => {
            let name = part.name.as_deref().unwrap_or("file.pdf");
            Some(json!({ "type": "input_file", "filename": name, "file_data": part.data_url() }))
        }
        MediaKind::Audio | MediaKind::File => None,
    }
}
