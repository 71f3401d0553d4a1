//! Parses arguments that are JSON inside a string, as in the OpenAI formats.

use serde_json::json;
use serde_json::value::RawValue;

use super::fields::BorrowedText;
use super::parse_fault;
use crate::domain::fault::Fault;
use crate::domain::json::{Json, JsonError};

/// Bytes of text shown before and after the location of a fault.
const EXCERPT_BYTES: usize = 30;

/// Parses the arguments. Some servers send the object itself instead of a string, which is
/// accepted. A model without arguments often sends an empty string.
pub(super) fn read(raw: Option<&RawValue>, pointer: &str) -> Result<Json, Fault> {
    let Some(raw) = raw else { return Ok(Json::empty_object()) };
    let Ok(BorrowedText(text)) = serde_json::from_str(raw.get()) else {
        return Ok(Json::from_raw(raw));
    };
    if text.trim().is_empty() {
        return Ok(Json::empty_object());
    }
    Json::parse(&text).map_err(|error| fault(&error, &text, pointer))
}

fn fault(error: &JsonError, text: &str, pointer: &str) -> Fault {
    let offset = byte_offset(error, text);
    let near = excerpt(text, offset);
    let message = format!(
        "the arguments are not JSON: {error} (byte {offset}), near: {near} — \
         give all of them again as one JSON object"
    );
    let detail = json!({
        "pointer": pointer,
        "reason": error.reason,
        "line": error.line,
        "column": error.column,
        "offset": offset,
        "near": near,
    });
    parse_fault(pointer, message).with_detail(detail)
}

/// Converts line and column to a byte offset.
fn byte_offset(error: &JsonError, text: &str) -> usize {
    let lines = text.split_inclusive('\n').take(error.line.saturating_sub(1));
    let before: usize = lines.map(str::len).sum();
    (before + error.column.saturating_sub(1)).min(text.len())
}

fn excerpt(text: &str, offset: usize) -> String {
    let at = text.floor_char_boundary(offset);
    let begin = text.floor_char_boundary(at.saturating_sub(EXCERPT_BYTES));
    let end = text.ceil_char_boundary((at + EXCERPT_BYTES).min(text.len()));
    let (left, right) = (if begin > 0 { "…" } else { "" }, if end < text.len() { "…" } else { "" });
    format!("{left}{}{right}", &text[begin..end])
}
