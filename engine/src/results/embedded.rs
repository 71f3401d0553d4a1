//! Texts that hold JSON, as many tools return their data. Pure.

use std::borrow::Cow;

use serde::de::IgnoredAny;

use crate::domain::json::decode_unicode_escapes;

/// Returns the text if it is a JSON object or array, as many tools return their data.
pub(crate) fn embedded_json(text: &str) -> Option<&str> {
    let trimmed = text.trim();
    let has_brackets = trimmed.starts_with('{') && trimmed.ends_with('}')
        || trimmed.starts_with('[') && trimmed.ends_with(']');
    let is_json = || serde_json::from_str::<IgnoredAny>(trimmed).is_ok();
    (has_brackets && trimmed.len() > 2 && is_json()).then_some(trimmed)
}

/// Returns whether every line is a JSON object, and there are several.
pub(crate) fn is_json_lines(text: &str) -> bool {
    let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let is_object = |line: &str| line.starts_with('{') && line.ends_with('}');
    let is_json = |line: &str| serde_json::from_str::<IgnoredAny>(line).is_ok();
    let first = lines.next().is_some_and(|line| is_object(line) && is_json(line));
    first && lines.clone().next().is_some() && lines.all(is_object)
}

/// Returns a text as a model reads it: if it holds JSON, the characters that JSON need not escape
/// are written as themselves. Any other text stays as it is.
pub fn decode_embedded_escapes(text: &str) -> Cow<'_, str> {
    // Most texts have no escapes and need not be parsed.
    match text.contains("\\u") && (embedded_json(text).is_some() || is_json_lines(text)) {
        true => decode_unicode_escapes(text),
        false => Cow::Borrowed(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_are_decoded_only_in_texts_that_hold_json() {
        for (text, expected) in [
            (r#" {"city": "\u5317\u4eac"} "#, r#" {"city": "北京"} "#),
            ("{\"a\":\"\\u5317\"}\n{\"a\":\"\\u4eac\"}\n", "{\"a\":\"北\"}\n{\"a\":\"京\"}\n"),
            (r"let c = '\u5317';", r"let c = '\u5317';"),
            (r"{ \u5317 }", r"{ \u5317 }"),
        ] {
            assert_eq!(decode_embedded_escapes(text), expected);
        }
    }
}
