//! JSON pointers (RFC 6901): resolves them, and reports the nearest existing value if there is
//! none.

use serde_json::{Value, json};

use super::invalid_field;
use crate::domain::fault::{Code, Fault};
use crate::domain::json::cursor::{JsonCursor, JsonKind, decode_string};

/// Maximum number of keys listed in the fault for a key that does not exist.
const MAX_KEYS_LISTED: usize = 30;

/// Escapes a key for use in a pointer.
pub(crate) fn escape_key(key: &str) -> String {
    key.replace('~', "~0").replace('/', "~1")
}

/// Returns a cursor before the value that a pointer selects.
pub(super) fn resolve_pointer<'a>(text: &'a str, pointer: &str) -> Result<JsonCursor<'a>, Fault> {
    let mut cursor = JsonCursor::new(text);
    let mut parent = String::new();
    for step in parse_pointer(pointer)? {
        let before = cursor;
        if !descend(&mut cursor, &step) {
            return Err(not_found_fault(pointer, &parent, before));
        }
        parent = format!("{parent}/{}", escape_key(&step));
    }
    Ok(cursor)
}

fn parse_pointer(pointer: &str) -> Result<Vec<String>, Fault> {
    if pointer.is_empty() {
        return Ok(Vec::new());
    }
    let Some(rest) = pointer.strip_prefix('/') else {
        let message = "pointer must be empty or begin with /, such as /rows/10";
        return Err(invalid_field("pointer", message.into()));
    };
    let step = |written: &str| {
        let odd = written.split('~').skip(1).any(|after| !after.starts_with(['0', '1']));
        if odd {
            let message = "pointer has a ~ that is neither ~0 (for ~) nor ~1 (for /)";
            return Err(invalid_field("pointer", message.into()));
        }
        Ok(written.replace("~1", "/").replace("~0", "~"))
    };
    rest.split('/').map(step).collect()
}

/// Descends one level; returns false if there is no such member.
fn descend(cursor: &mut JsonCursor<'_>, step: &str) -> bool {
    match cursor.kind() {
        JsonKind::Object => {
            cursor.enter();
            while cursor.advance() {
                if decode_string(cursor.read_key()) == step {
                    return true;
                }
                cursor.read_value();
            }
            false
        }
        JsonKind::Array => {
            // An index has only one valid spelling: no sign, no leading zeros.
            let index = step.parse::<usize>().ok().filter(|index| index.to_string() == step);
            let Some(index) = index else { return false };
            cursor.enter();
            for _ in 0..index {
                if !cursor.advance() {
                    return false;
                }
                cursor.read_value();
            }
            cursor.advance()
        }
        _ => false,
    }
}

/// Returns the fault for a pointer that selects nothing, with the nearest existing value.
fn not_found_fault(pointer: &str, parent: &str, mut cursor: JsonCursor<'_>) -> Fault {
    let kind = cursor.kind();
    let (mut keys, mut count) = (Vec::new(), 0_usize);
    if matches!(kind, JsonKind::Object | JsonKind::Array) {
        cursor.enter();
        while cursor.advance() {
            if kind == JsonKind::Object {
                let key = decode_string(cursor.read_key());
                if keys.len() < MAX_KEYS_LISTED {
                    keys.push(Value::from(key.chars().take(100).collect::<String>()));
                }
            }
            cursor.read_value();
            count += 1;
        }
    }
    let name = if parent.is_empty() { "the result".to_owned() } else { format!("{parent:?}") };
    let has = match kind {
        JsonKind::Object => {
            let names: Vec<String> = keys.iter().map(Value::to_string).collect();
            let more = if count > keys.len() { ", …" } else { "" };
            format!("is an object with {count} keys: {}{more}", names.join(", "))
        }
        JsonKind::Array if count == 0 => "is an empty array".to_owned(),
        JsonKind::Array => format!("is an array of {count} items, 0 to {}", count - 1),
        other => format!("is a {} and has no parts", other.as_str()),
    };
    let excerpt: String = pointer.chars().take(200).collect();
    let message = format!("pointer: there is nothing at {excerpt:?}; {name} {has}");
    let mut detail = json!({
        "field": "pointer", "pointer": excerpt, "nearest": parent, "type": kind.as_str(),
    });
    match kind {
        JsonKind::Object => detail["keys"] = Value::Array(keys),
        JsonKind::Array => detail["items"] = count.into(),
        _ => {}
    }
    Fault::new(Code::NotFound, message).with_detail(detail).without_side_effect()
}
