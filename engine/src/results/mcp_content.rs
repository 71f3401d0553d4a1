//! Results in the format of MCP: their texts and media, as a model reads them. Pure.
//!
//! An MCP result is an envelope of parts. A model gets the texts as text and the images as images;
//! the envelope, and a structure that repeats the texts, would only cost tokens.

use std::fmt::Write;

use serde_json::{Map, Value};

use crate::domain::json::Json;
use crate::domain::json::cursor::{JsonCursor, JsonKind, decode_string};
use crate::results::embedded::decode_embedded_escapes;

/// Fields of an MCP result.
const FIELDS: [&str; 5] = ["content", "structuredContent", "isError", "_meta", "resultType"];
/// Types of the parts of an MCP result.
const PART_TYPES: [&str; 5] = ["text", "image", "audio", "resource", "resource_link"];
/// Maximum size of one image, recording or file that a model gets, in characters of base64.
const MAX_MEDIA_BYTES: usize = 5 << 20;
/// Maximum number of values of a structure that are searched in the texts.
const MAX_COMPARED_VALUES: usize = 200;

/// A result as a model reads it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ResultContent {
    /// All texts, with a mark in the position of each other part.
    pub text: String,
    /// Images, recordings and files.
    pub media: Vec<MediaPart>,
}

/// An image, a recording or a file in a result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MediaPart {
    /// Its type, which decides how a model API takes it.
    pub kind: MediaKind,
    /// Its media type, such as `image/png`.
    pub media_type: String,
    /// Its bytes in base64.
    pub data: String,
    /// Its name, if the result states one.
    pub name: Option<String>,
}

/// The type of a media part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MediaKind {
    /// An image.
    Image,
    /// A recording.
    Audio,
    /// Any other file.
    File,
}

impl MediaPart {
    /// Returns the part as a data URL.
    pub fn data_url(&self) -> String {
        format!("data:{};base64,{}", self.media_type, self.data)
    }
}

/// Returns the content of an MCP result, or `None` if the document is none.
pub fn read_content(data: &Json) -> Option<ResultContent> {
    let envelope = parse_envelope(data)?;
    let mut content = ResultContent::default();
    let parts = envelope.get("content").and_then(Value::as_array);
    for part in parts.into_iter().flatten() {
        content.push(part);
    }
    if let Some(structure) = envelope.get("structuredContent").filter(|value| !value.is_null())
        && !repeats(&content.text, structure)
    {
        content.push_line(&structure.to_string());
    }
    Some(content)
}

/// Returns an MCP result without the bytes of its media, and without a structure that its texts
/// repeat. Everything else keeps its position, so pointers into it are valid in the full result.
/// Returns `None` for any other document, and for a result that has neither.
pub(crate) fn without_media(data: &Json) -> Option<Json> {
    if !is_envelope(data.text()) {
        return None;
    }
    let (mut out, mut text_bytes) = (String::from("{"), 0);
    let (mut structure, mut has_media) = (None, false);
    for_each_entry(data.text(), |key, value| match key {
        "content" => {
            let mut strip = |value: &str, out: &mut String| {
                copy_object(out, value, |key, value, out| match key {
                    "data" | "blob" => has_media = true,
                    "resource" => copy_object(out, value, |key, value, out| match key {
                        "blob" => {}
                        _ => out.push_str(value),
                    }),
                    _ => out.push_str(value),
                });
            };
            out.push_str("\"content\":[");
            let mut cursor = JsonCursor::new(value);
            let mut is_first = true;
            cursor.enter();
            while cursor.advance() {
                if !std::mem::take(&mut is_first) {
                    out.push(',');
                }
                strip(cursor.read_value(), &mut out);
            }
            out.push(']');
            text_bytes = out.len();
        }
        "structuredContent" => structure = Some(value),
        _ => {}
    });
    let is_own = |structure: &&str| structure.len() > 2 * text_bytes;
    match structure.filter(is_own) {
        Some(structure) => {
            let _ = write!(out, ",\"structuredContent\":{structure}}}");
        }
        None => out.push('}'),
    }
    let is_changed = has_media || structure.is_some() || out.contains("\"resource\"");
    if is_changed { Json::parse(&out).ok() } else { None }
}

/// Returns whether a document is an MCP result. Reads only its upper levels.
fn is_envelope(text: &str) -> bool {
    if JsonKind::of(text) != JsonKind::Object {
        return false;
    }
    let (mut is_known, mut parts, mut fields) = (true, None, 0);
    for_each_entry(text, |key, value| {
        fields += 1;
        is_known &= FIELDS.contains(&key);
        if key == "content" {
            parts = Some(value);
        }
    });
    let Some(parts) = parts.filter(|parts| is_known && JsonKind::of(parts) == JsonKind::Array)
    else {
        return false;
    };
    let (mut cursor, mut count) = (JsonCursor::new(parts), 0);
    cursor.enter();
    while cursor.advance() {
        let mut is_part = false;
        let part = cursor.read_value();
        if JsonKind::of(part) == JsonKind::Object {
            for_each_entry(part, |key, value| {
                let kind = value.trim_matches('"');
                is_part |= key == "type" && PART_TYPES.contains(&kind);
            });
        }
        if !is_part {
            return false;
        }
        count += 1;
    }
    // An empty list alone can be anything.
    count > 0 || fields > 1
}

fn parse_envelope(data: &Json) -> Option<Map<String, Value>> {
    match is_envelope(data.text()).then(|| data.to_value()) {
        Some(Value::Object(fields)) => Some(fields),
        _ => None,
    }
}

/// Visits the entries of an object.
fn for_each_entry<'a>(written: &'a str, mut visitor: impl FnMut(&str, &'a str)) {
    let mut cursor = JsonCursor::new(written);
    cursor.enter();
    while cursor.advance() {
        let key = decode_string(cursor.read_key());
        let value = cursor.read_value();
        visitor(&key, value);
    }
}

/// Copies an object, with the entries that the visitor writes.
fn copy_object(out: &mut String, written: &str, mut visitor: impl FnMut(&str, &str, &mut String)) {
    if JsonKind::of(written) != JsonKind::Object {
        out.push_str(written);
        return;
    }
    out.push('{');
    let begin = out.len();
    for_each_entry(written, |key, value| {
        let before = out.len();
        if before > begin {
            out.push(',');
        }
        let _ = write!(out, "{}:", Value::from(key));
        let empty = out.len();
        visitor(key, value, out);
        if out.len() == empty {
            out.truncate(before);
        }
    });
    out.push('}');
}

/// Returns a link to a resource as text, for a reader who cannot follow it.
pub fn link_text(name: &str, uri: &str, description: Option<&str>) -> String {
    let about = description.map(|text| format!(": {text}")).unwrap_or_default();
    format!("[link to {name} {uri}{about}]")
}

impl ResultContent {
    fn push(&mut self, part: &Value) {
        let word = |name: &str| part.get(name).and_then(Value::as_str);
        match word("type") {
            Some("text") => {
                self.push_line(&decode_embedded_escapes(word("text").unwrap_or_default()));
            }
            Some("image") => self.push_media(MediaKind::Image, part, "data", None),
            Some("audio") => self.push_media(MediaKind::Audio, part, "data", None),
            Some("resource") => {
                let resource = part.get("resource").unwrap_or(&Value::Null);
                let uri = resource.get("uri").and_then(Value::as_str);
                match resource.get("text").and_then(Value::as_str) {
                    Some(text) => {
                        self.push_line(&format!("[resource {}]", uri.unwrap_or_default()));
                        self.push_line(&decode_embedded_escapes(text));
                    }
                    None => self.push_media(MediaKind::File, resource, "blob", uri),
                }
            }
            Some("resource_link") => {
                let (name, uri) = (word("name").unwrap_or_default(), word("uri"));
                self.push_line(&link_text(name, uri.unwrap_or_default(), word("description")));
            }
            _ => {}
        }
    }

    fn push_line(&mut self, line: &str) {
        if !self.text.is_empty() && !self.text.ends_with('\n') {
            self.text.push('\n');
        }
        self.text.push_str(line);
    }

    fn push_media(&mut self, kind: MediaKind, part: &Value, field: &str, uri: Option<&str>) {
        let data = part.get(field).and_then(Value::as_str).unwrap_or_default();
        let media_type = part.get("mimeType").and_then(Value::as_str);
        let media_type = media_type.unwrap_or("application/octet-stream");
        let kind = match kind {
            MediaKind::File if media_type.starts_with("image/") => MediaKind::Image,
            MediaKind::File if media_type.starts_with("audio/") => MediaKind::Audio,
            kind => kind,
        };
        let noun = match kind {
            MediaKind::Image => "image",
            MediaKind::Audio => "audio",
            MediaKind::File => "file",
        };
        let name = uri.map(|uri| format!(" {uri}")).unwrap_or_default();
        let bytes = data.len() / 4 * 3;
        let is_too_large = data.len() > MAX_MEDIA_BYTES;
        let size = if is_too_large { ", too large to be shown" } else { "" };
        self.push_line(&format!("[{noun}{name}: {media_type}, {bytes} bytes{size}]"));
        if !is_too_large && !data.is_empty() {
            let (media_type, data) = (media_type.to_owned(), data.to_owned());
            self.media.push(MediaPart { kind, media_type, data, name: uri.map(str::to_owned) });
        }
    }
}

/// Returns whether a text contains everything that a structure has.
fn repeats(text: &str, structure: &Value) -> bool {
    if text.trim().is_empty() {
        return structure.as_object().is_some_and(Map::is_empty);
    }
    if serde_json::from_str::<Value>(text).is_ok_and(|value| value == *structure) {
        return true;
    }
    let mut left = MAX_COMPARED_VALUES;
    contains_values(text, structure, &mut left)
}

fn contains_values(text: &str, value: &Value, left: &mut usize) -> bool {
    if *left == 0 {
        return true;
    }
    match value {
        Value::Array(items) => items.iter().all(|item| contains_values(text, item, left)),
        Value::Object(fields) => fields.values().all(|item| contains_values(text, item, left)),
        scalar => {
            *left -= 1;
            match scalar {
                Value::String(word) => text.contains(word.trim()),
                Value::Null => true,
                other => text.contains(&other.to_string()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(value: &Value) -> ResultContent {
        read_content(&Json::from_value(value)).unwrap()
    }

    #[test]
    fn texts_are_read_once_and_media_as_media() {
        let file = "fn main() {}\n".repeat(50);
        let both = json!({ "content": [{ "type": "text", "text": file }],
            "structuredContent": { "content": file }, "isError": false });
        assert_eq!(read(&both), ResultContent { text: file, media: vec![] });
        let mixed = json!({ "content": [
            { "type": "text", "text": "Here it is:" },
            { "type": "image", "data": "QUJD", "mimeType": "image/png" },
            { "type": "resource", "resource": { "uri": "file:///a.pdf", "blob": "QUJD",
                "mimeType": "application/pdf" } },
            { "type": "resource_link", "uri": "file:///b", "name": "b" },
        ] });
        let content = read(&mixed);
        assert_eq!(
            content.text,
            "Here it is:\n[image: image/png, 3 bytes]\n[file file:///a.pdf: application/pdf, 3 \
             bytes]\n[link to b file:///b]"
        );
        assert_eq!(content.media[0].data_url(), "data:image/png;base64,QUJD");
        assert_eq!(content.media[1].kind, MediaKind::File);
        let typed = json!({ "content": [{ "type": "text", "text": "done" }],
            "structuredContent": { "id": 7 } });
        assert_eq!(read(&typed).text, "done\n{\"id\":7}");
    }

    #[test]
    fn other_documents_are_no_mcp_results() {
        for value in [
            json!({ "content": "text" }),
            json!({ "content": [], }),
            json!({ "content": [{ "type": "text", "text": "a" }], "id": 7 }),
            json!({ "content": [{ "type": "paragraph" }] }),
            json!([1]),
        ] {
            assert_eq!(read_content(&Json::from_value(&value)), None, "{value}");
        }
    }
}
