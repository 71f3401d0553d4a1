//! The Anthropic format: a `{type: "tool_use", id, name, input: {…}}` block, answered with a
//! `tool_result` block that goes into the next user message.

use serde::Serialize;
use serde_json::{Value, json};

use super::fields::RawFields;
use super::{CallFormat, EntryAnswer, ParsedToolCall, parse_fault, to_json};
use crate::domain::fault::Fault;
use crate::domain::json::Json;
use crate::results::mcp_content::{MediaKind, MediaPart};

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
    content: ToolResultContent<'a>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    is_error: bool,
}

#[derive(Serialize)]
#[serde(untagged)]
enum ToolResultContent<'a> {
    Text(&'a str),
    Blocks(Vec<Value>),
}

pub(super) fn message(id: &str, answer: &EntryAnswer<'_>) -> Json {
    let is_error = answer.ok == Some(false);
    let media: Vec<Value> = answer.media.iter().filter_map(media_block).collect();
    let content = match media.is_empty() {
        true => ToolResultContent::Text(answer.content),
        false => {
            let text = json!({ "type": "text", "text": answer.content });
            ToolResultContent::Blocks([vec![text], media].concat())
        }
    };
    to_json(&ToolResultBlock { kind: "tool_result", tool_use_id: id, content, is_error })
}

/// Returns the block of an image or a document. The API takes no recordings.
fn media_block(part: &MediaPart) -> Option<Value> {
    let kind = match part.kind {
        MediaKind::Image => "image",
        MediaKind::File if part.media_type == "application/pdf" => "document",
        MediaKind::Audio | MediaKind::File => return None,
    };
    let source = json!({ "type": "base64", "media_type": part.media_type, "data": part.data });
    Some(json!({ "type": kind, "source": source }))
}
