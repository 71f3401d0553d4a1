//! Phrases of problem messages: types, formats, lists, and values truncated to fit a sentence.
//!
//! Never returns text of unbounded length, and truncates only between characters.

use std::collections::BTreeSet;
use std::io;

use serde_json::Value;

use super::SchemaProblem;

/// Maximum length of a rendered value, in characters.
const MAX_VALUE_CHARS: usize = 80;

/// Returns the first `limit` characters; the last is an ellipsis if something was omitted.
pub(super) fn truncate_chars(text: &str, limit: usize) -> String {
    if text.chars().nth(limit).is_none() {
        return text.to_string();
    }
    text.chars().take(limit.saturating_sub(1)).chain(['…']).collect()
}

/// Describes a value by its type and content, in at most 80 characters.
pub(super) fn describe_value(value: &Value) -> String {
    let kind = match value {
        Value::Null => return "null".to_string(),
        Value::Bool(_) => "a boolean",
        Value::Number(number) if number.is_f64() => "a number",
        Value::Number(_) => "an integer",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    };
    let limit = MAX_VALUE_CHARS - kind.chars().count() - 3;
    format!("{kind} ({})", truncated_json(value, limit))
}

pub(super) fn short_json(value: &Value) -> String {
    truncated_json(value, 120)
}

pub(super) fn quote(name: &str) -> String {
    format!("\"{}\"", truncate_chars(name, MAX_VALUE_CHARS))
}

/// Returns JSON truncated to `limit` characters, without serializing more of the value than needed.
fn truncated_json(value: &Value, limit: usize) -> String {
    // No character takes more than four bytes; the final truncation counts characters.
    let mut sink = TruncatingBuffer { bytes: Vec::new(), remaining: 4 * limit + 4 };
    let _ = serde_json::to_writer(&mut sink, value);
    let text = match String::from_utf8(sink.bytes) {
        Ok(text) => text,
        Err(error) => String::from_utf8_lossy(error.as_bytes()).into_owned(),
    };
    truncate_chars(&text, limit)
}

struct TruncatingBuffer {
    bytes: Vec<u8>,
    remaining: usize,
}

impl io::Write for TruncatingBuffer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let fits = bytes.len().min(self.remaining);
        self.bytes.extend_from_slice(&bytes[..fits]);
        self.remaining -= fits;
        if fits < bytes.len() { Err(io::Error::other("full")) } else { Ok(fits) }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Joins values into a list: the first twenty of them, in about 400 characters at most.
pub(super) fn join_values(values: &[Value]) -> String {
    let mut texts: Vec<String> = Vec::new();
    let mut length = 0;
    for value in values.iter().take(20) {
        let text = truncated_json(value, MAX_VALUE_CHARS);
        length += text.len();
        if length > 400 && !texts.is_empty() {
            break;
        }
        texts.push(text);
    }
    match values.len() - texts.len() {
        0 => texts.join(", "),
        more => format!("{}, … ({more} more)", texts.join(", ")),
    }
}

pub(super) fn pointer_label(pointer: &str) -> String {
    if pointer.is_empty() { "the value".to_string() } else { truncate_chars(pointer, 200) }
}

pub(super) fn pointer_location(pointer: &str) -> String {
    if pointer.is_empty() {
        "at the top level".to_string()
    } else {
        format!("at {}", pointer_label(pointer))
    }
}

pub(super) fn pluralize(number: u64, noun: &str) -> String {
    match (number, noun.strip_suffix('y')) {
        (1, _) => format!("1 {noun}"),
        (_, Some(stem)) => format!("{number} {stem}ies"),
        (_, None) => format!("{number} {noun}s"),
    }
}

pub(super) fn type_phrase<'t>(types: impl IntoIterator<Item = &'t str>) -> String {
    let worded = types.into_iter().map(|name| match name {
        "null" => "null".to_string(),
        "array" | "integer" | "object" => format!("an {name}"),
        _ => format!("a {name}"),
    });
    worded.collect::<Vec<_>>().join(" or ")
}

pub(super) fn format_phrase(format: &str) -> String {
    let worded = match format {
        "date-time" => "a date and time such as 2025-01-31T13:45:00Z",
        "date" => "a date such as 2025-01-31",
        "time" => "a time such as 13:45:00Z",
        "duration" => "an ISO 8601 duration such as PT1H30M",
        "email" | "idn-email" => "an e-mail address",
        "hostname" | "idn-hostname" => "a host name",
        "ipv4" => "an IPv4 address such as 192.0.2.1",
        "ipv6" => "an IPv6 address such as 2001:db8::1",
        "uri" | "iri" => "an absolute URI such as https://example.com/path",
        "uri-reference" | "iri-reference" => "a URI or a relative reference",
        "uri-template" => "a URI template such as /items/{id}",
        "uuid" => "a UUID such as 123e4567-e89b-12d3-a456-426614174000",
        "json-pointer" => "a JSON pointer such as /items/0",
        "relative-json-pointer" => "a relative JSON pointer such as 1/name",
        "regex" => "a regular expression",
        other => return format!("a string in the format {}", quote(other)),
    };
    format!("{worded} (format {format})")
}

/// Returns the problem without the value, for readers who must not see it.
pub(super) fn redact_value(problem: SchemaProblem, instance: &Value) -> SchemaProblem {
    if problem.given == "nothing" {
        return problem;
    }
    let SchemaProblem { pointer, expected, .. } = problem;
    let kind = match instance.pointer(&pointer) {
        Some(Value::Null) => "null",
        Some(Value::Bool(_)) => "a boolean",
        Some(Value::Number(_)) => "a number",
        Some(Value::String(_)) => "a string",
        Some(Value::Array(_)) => "an array",
        Some(Value::Object(_)) => "an object",
        None => "something else",
    };
    let message = format!("{}: expected {expected}, but {kind} was given", pointer_label(&pointer));
    SchemaProblem { pointer, expected, given: kind.to_owned(), message }
}

/// Phrases a problem as one of several alternatives of the value at `base`.
pub(super) fn alternative_phrase(problem: &SchemaProblem, base: &str) -> String {
    let inner = problem.pointer.strip_prefix(base).unwrap_or(&problem.pointer);
    match inner.strip_prefix('/') {
        None => problem.expected.clone(),
        Some(name) if problem.given == "nothing" => {
            format!("an object with the property {}", quote(name))
        }
        Some(name) => format!("an object whose {} is {}", quote(name), problem.expected),
    }
}

/// Returns the known name that an unknown one is most likely a misspelling of.
pub fn nearest_name<'n>(name: &str, candidates: &BTreeSet<&'n str>) -> Option<&'n str> {
    // A comparison costs the product of both lengths, and a name that long is unlikely to be a
    // typo.
    if name.len() > 64 {
        return None;
    }
    let normalize = |name: &str| name.to_lowercase().replace(['_', '-', ' '], "");
    let plain_name = normalize(name);
    let near = candidates
        .iter()
        .filter(|other| other.len() <= 64)
        .map(|other| (strsim::damerau_levenshtein(&plain_name, &normalize(other)), *other));
    let (distance, other) = near.min_by_key(|(distance, _)| *distance)?;
    (distance <= (plain_name.chars().count() / 3).max(1)).then_some(other)
}

/// Returns the reason why a pattern was refused.
pub(super) fn pattern_refusal_reason(pattern: &str) -> String {
    let mut escaped = false;
    let mut backwards = false;
    for c in pattern.chars() {
        backwards |= escaped && (c.is_ascii_digit() && c != '0' || c == 'k');
        escaped = c == '\\' && !escaped;
    }
    let around = ["(?=", "(?!", "(?<=", "(?<!"].iter().any(|look| pattern.contains(look));
    if around || backwards {
        return "the pattern needs look-around or back-references, which are not supported because \
                they can take unbounded time; write it without them"
            .to_string();
    }
    "the pattern is not a valid regular expression, or too large when compiled".to_string()
}
