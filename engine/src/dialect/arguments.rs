//! Arguments that are JSON inside a text, as OpenAI's forms have them.

use serde_json::json;
use serde_json::value::RawValue;

use super::fields::Key;
use super::misfit;
use crate::fault::Fault;
use crate::json::{Json, NotJson};

/// So much of the text is shown before and after the place of a fault.
const NEAR: usize = 30;

/// The arguments. Some servers write the object itself and not its text, which is as good; a model
/// that has no arguments to give often writes an empty text.
pub(super) fn read(given: Option<&RawValue>, pointer: &str) -> Result<Json, Fault> {
    let Some(given) = given else { return Ok(Json::empty_object()) };
    let Ok(Key(text)) = serde_json::from_str(given.get()) else { return Ok(Json::part(given)) };
    if text.trim().is_empty() {
        return Ok(Json::empty_object());
    }
    Json::parse(&text).map_err(|error| fault(&error, &text, pointer))
}

fn fault(error: &NotJson, text: &str, pointer: &str) -> Fault {
    let offset = offset(error, text);
    let near = near(text, offset);
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
    misfit(pointer, message).with_detail(detail)
}

/// The byte that line and column mean.
fn offset(error: &NotJson, text: &str) -> usize {
    let lines = text.split_inclusive('\n').take(error.line.saturating_sub(1));
    let before: usize = lines.map(str::len).sum();
    (before + error.column.saturating_sub(1)).min(text.len())
}

fn near(text: &str, offset: usize) -> String {
    let at = text.floor_char_boundary(offset);
    let begin = text.floor_char_boundary(at.saturating_sub(NEAR));
    let end = text.ceil_char_boundary((at + NEAR).min(text.len()));
    let (left, right) = (if begin > 0 { "…" } else { "" }, if end < text.len() { "…" } else { "" });
    format!("{left}{}{right}", &text[begin..end])
}
