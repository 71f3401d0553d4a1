//! The OpenAI chat format: `{id, type: "function", function: {name, arguments: "<json text>"}}`,
//! answered with a message whose role is `tool`.

use serde::Serialize;
use serde_json::{Value, json};

use super::fields::RawFields;
use super::{CallFormat, EntryAnswer, MEDIA_MESSAGE_PREFIX, ParsedToolCall, arguments, to_json};
use crate::domain::fault::Fault;
use crate::domain::json::Json;
use crate::results::mcp_content::{MediaKind, MediaPart};

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

/// Returns a user message with images, recordings and files.
pub(super) fn media_message(tool: &str, id: &str, media: &[MediaPart]) -> Option<Json> {
    let part = |part: &MediaPart| match part.kind {
        MediaKind::Image => {
            Some(json!({ "type": "image_url", "image_url": { "url": part.data_url() } }))
        }
        MediaKind::Audio => {
            let format = match part.media_type.as_str() {
                "audio/wav" | "audio/x-wav" | "audio/wave" => "wav",
                "audio/mpeg" | "audio/mp3" => "mp3",
                // The API takes no other formats.
                _ => return None,
            };
            let audio = json!({ "data": part.data, "format": format });
            Some(json!({ "type": "input_audio", "input_audio": audio }))
        }
        MediaKind::File if part.media_type == "application/pdf" => {
            let name = part.name.as_deref().unwrap_or("file.pdf");
            let file = json!({ "filename": name, "file_data": part.data_url() });
            Some(json!({ "type": "file", "file": file }))
        }
        MediaKind::File => None,
    };
    let parts: Vec<Value> = media.iter().filter_map(part).collect();
    if parts.is_empty() {
        return None;
    }
    let text = format!("{MEDIA_MESSAGE_PREFIX} {id} ({tool}):");
    let mut content = vec![json!({ "type": "text", "text": text })];
    content.extend(parts);
    Some(Json::from_value(&json!({ "role": "user", "content": content })))
}
