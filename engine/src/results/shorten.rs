//! Shortens a JSON value so that it keeps its structure, for readers that check it against a
//! schema. Pure.

use serde_json::{Map, Value};

use crate::results::tokens;

/// Items of an array and bytes of a text that are kept, from the most to the least.
const LEVELS: [(usize, usize); 8] =
    [(100, 2_000), (40, 800), (16, 400), (8, 200), (4, 100), (2, 60), (1, 30), (0, 12)];
/// Name of the entry that states the omission, where the schema permits one more entry.
const NOTE_KEY: &str = "toolcrib_digest";

/// Returns the value with fewer items and shorter texts, within the budget, and with a note of the
/// omission if there is a valid place for it. Returns `None` if no such value is valid.
pub fn shorten_value(
    value: &Value,
    note: &str,
    budget_tokens: usize,
    is_valid: impl Fn(&Value) -> bool,
) -> Option<Value> {
    if !tokens::exceeds(&value.to_string(), budget_tokens) {
        return Some(value.clone());
    }
    LEVELS.into_iter().find_map(|(items, text)| {
        let shorter = shorten(value, items, text);
        if tokens::exceeds(&shorter.to_string(), budget_tokens) || !is_valid(&shorter) {
            return None;
        }
        let mut noted = shorter.clone();
        if let Some(fields) = noted.as_object_mut().filter(|fields| !fields.contains_key(NOTE_KEY))
        {
            fields.insert(NOTE_KEY.to_owned(), note.into());
            if is_valid(&noted) {
                return Some(noted);
            }
        }
        Some(shorter)
    })
}

fn shorten(value: &Value, max_items: usize, max_text: usize) -> Value {
    let inner = |value: &Value| shorten(value, max_items, max_text);
    match value {
        Value::String(text) if text.len() > max_text => {
            let begin = &text[..text.floor_char_boundary(max_text)];
            Value::from(format!("{begin}… +{} bytes", text.len() - begin.len()))
        }
        Value::Array(items) => items.iter().take(max_items).map(inner).collect(),
        Value::Object(fields) => {
            let entry = |(key, value): (&String, &Value)| (key.clone(), inner(value));
            Value::Object(fields.iter().map(entry).collect::<Map<_, _>>())
        }
        other => other.clone(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_shortened_value_fits_keeps_its_structure_and_says_so() {
        let rows: Vec<Value> =
            (0..5_000).map(|n| json!({ "id": n, "text": "x".repeat(99) })).collect();
        let value = json!({ "rows": rows, "total": 5_000 });
        let shorter = shorten_value(&value, "see result.read", 500, |_| true).unwrap();
        assert!(!tokens::exceeds(&shorter.to_string(), 600));
        assert_eq!(
            (&shorter["total"], &shorter[NOTE_KEY]),
            (&json!(5_000), &json!("see result.read"))
        );
        assert_eq!(shorter["rows"][0]["id"], 0);
        let strict = |value: &Value| value.as_object().unwrap().len() == 2;
        assert!(shorten_value(&value, "note", 500, strict).unwrap().get(NOTE_KEY).is_none());
        let full = |value: &Value| value["rows"].as_array().unwrap().len() == 5_000;
        assert_eq!(shorten_value(&value, "note", 500, full), None);
        assert_eq!(shorten_value(&json!([1]), "note", 500, |_| true), Some(json!([1])));
    }
}
