//! JSON pointers (RFC 6901): resolves them, and reports the nearest existing value if there is
//! none. Pure.
//!
//! A pointer continues inside a string that holds JSON, because many tools return their data as
//! text: `/content/0/text/orders/7` selects an order in the text of an MCP result.

use std::borrow::Cow;

use serde_json::{Value, json};

use crate::domain::fault::{Code, Fault};
use crate::domain::json::cursor::{JsonCursor, JsonKind, decode_string};
use crate::results::embedded::embedded_json;

/// Maximum number of keys listed in the fault for a key that does not exist.
const MAX_KEYS_LISTED: usize = 30;

/// Escapes a key for use in a pointer.
pub(crate) fn escape_key(key: &str) -> String {
    key.replace('~', "~0").replace('/', "~1")
}

/// Returns a fault for an invalid field of a query.
pub(crate) fn invalid_field(field: &str, message: String) -> Fault {
    let problem = json!({ "pointer": format!("/{field}"), "message": message });
    Fault::new(Code::ValidationError, message)
        .with_detail(json!({ "field": field, "problems": [problem] }))
        .without_side_effect()
}

/// The value that a pointer selects.
#[derive(Debug, Clone)]
pub(crate) struct SelectedValue<'a> {
    /// The value as raw JSON.
    pub(crate) written: Cow<'a, str>,
    /// The array or object that contains it, as raw JSON; none for a whole document.
    pub(crate) container: Option<Cow<'a, str>>,
}

/// Returns the value that a pointer selects.
pub(crate) fn resolve_pointer<'a>(
    text: &'a str,
    pointer: &str,
) -> Result<SelectedValue<'a>, Fault> {
    let steps = parse_pointer(pointer)?;
    resolve_steps(text, &steps, String::new()).map_err(|nearest| nearest.into_fault(pointer))
}

fn resolve_steps<'a>(
    text: &'a str,
    steps: &[String],
    mut parent: String,
) -> Result<SelectedValue<'a>, NearestValue> {
    let mut cursor = JsonCursor::new(text);
    let mut container = None;
    for (n, step) in steps.iter().enumerate() {
        let mut before = cursor;
        if !descend(&mut cursor, step) {
            let decoded = (before.kind() == JsonKind::Text)
                .then(|| decode_string(before.read_value()).into_owned());
            let Some(json) = decoded.as_deref().and_then(embedded_json) else {
                return Err(NearestValue::describe(parent, before));
            };
            let SelectedValue { written, container } = resolve_steps(json, &steps[n..], parent)?;
            let owned = |text: Cow<'_, str>| Cow::Owned(text.into_owned());
            return Ok(SelectedValue { written: owned(written), container: container.map(owned) });
        }
        container = Some(Cow::Borrowed(before.read_value()));
        parent = format!("{parent}/{}", escape_key(step));
    }
    Ok(SelectedValue { written: Cow::Borrowed(cursor.read_value()), container })
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

/// The existing value nearest to a pointer that selects nothing.
struct NearestValue {
    pointer: String,
    kind: JsonKind,
    keys: Vec<Value>,
    count: usize,
}

impl NearestValue {
    fn describe(pointer: String, mut cursor: JsonCursor<'_>) -> Self {
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
        Self { pointer, kind, keys, count }
    }

    /// Returns the fault for the pointer that selects nothing.
    fn into_fault(self, pointer: &str) -> Fault {
        let Self { pointer: parent, kind, keys, count } = self;
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
}
