//! Finds equal items of an array in time proportional to its size.

use std::collections::HashMap;
use std::fmt::Write as _;

use serde_json::{Number, Value};

/// Returns the first two equal items, or `None` if `go_on` stops the search early.
pub(super) fn find_duplicates(
    items: &[Value],
    go_on: impl Fn(usize) -> bool,
) -> Option<(usize, usize)> {
    let mut seen = HashMap::with_capacity(items.len().min(1024));
    for (index, item) in items.iter().enumerate() {
        let mut text = String::new();
        canonical(item, &mut text);
        if !go_on(text.len()) {
            return None;
        }
        if let Some(first) = seen.insert(text, index) {
            return Some((first, index));
        }
    }
    None
}

/// Writes text that is equal for equal JSON values: numbers by value, members sorted by name.
fn canonical(value: &Value, out: &mut String) {
    match value {
        Value::Number(number) => canonical_number(number, out),
        Value::Array(items) => {
            out.push('[');
            for item in items {
                canonical(item, out);
                out.push(',');
            }
            out.push(']');
        }
        Value::Object(members) => {
            let mut members: Vec<_> = members.iter().collect();
            members.sort_by_key(|(name, _)| *name);
            out.push('{');
            for (name, member) in members {
                // The length comes first, so that no name can imitate the text of another value.
                let _ = write!(out, "{}:{name}", name.len());
                canonical(member, out);
                out.push(',');
            }
            out.push('}');
        }
        Value::String(text) => {
            let _ = write!(out, "\"{}:{text}", text.len());
        }
        other => {
            let _ = write!(out, "{other}");
        }
    }
}

fn canonical_number(number: &Number, out: &mut String) {
    let whole = |float: f64| float.fract() == 0.0 && float.abs() < 1e38;
    let _ = match (number.as_i128(), number.as_f64()) {
        (Some(integer), _) => write!(out, "{integer}"),
        (None, Some(float)) if whole(float) => write!(out, "{}", float as i128),
        (None, Some(float)) => write!(out, "{float:e}"),
        (None, None) => write!(out, "{number}"),
    };
}
