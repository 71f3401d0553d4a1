//! Writes JSON for models: characters as themselves in place of `\uXXXX`.
//!
//! Many serializers escape every character that is not ASCII. A model reads such a text badly, and
//! pays several tokens for each character. Pure.

use std::borrow::Cow;
use std::fmt::Write;

use super::cursor::decode_code_point;

/// Returns a JSON text with its `\uXXXX` escapes decoded, except those that JSON requires. Nothing
/// else changes, so every number keeps its digits. A text without such an escape is only scanned.
pub fn decode_unicode_escapes(text: &str) -> Cow<'_, str> {
    if !text.contains("\\u") {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('\\') {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        match rest.strip_prefix("\\u").and_then(decode_code_point) {
            Some((character, behind)) => {
                push_character(&mut out, character);
                rest = behind;
            }
            None => {
                // Another escape, or half of a surrogate pair, which is no character. The character
                // after a backslash never begins an escape.
                let end = rest.chars().take(2).map(char::len_utf8).sum();
                out.push_str(&rest[..end]);
                rest = &rest[end..];
            }
        }
    }
    out.push_str(rest);
    Cow::Owned(out)
}

fn push_character(out: &mut String, character: char) {
    match character {
        '"' => out.push_str("\\\""),
        '\\' => out.push_str("\\\\"),
        '\n' => out.push_str("\\n"),
        '\r' => out.push_str("\\r"),
        '\t' => out.push_str("\\t"),
        character if character.is_control() => {
            let _ = write!(out, "\\u{:04x}", u32::from(character));
        }
        character => out.push(character),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_are_decoded_and_all_else_stays() {
        let cases = [
            (r#"{"\u5317":"\u5317\u4EAC","n":0.10}"#, r#"{"北":"北京","n":0.10}"#),
            (r#"["\ud83d\ude00", 12345678901234567890.10]"#, r#"["😀", 12345678901234567890.10]"#),
            (r#"["\\u5317","\\\u5317","\n\/\u003cb\u003e"]"#, r#"["\\u5317","\\北","\n\/<b>"]"#),
            (r#"["\u0022\u005c\u000a\u0000\u007f"]"#, r#"["\"\\\n\u0000\u007f"]"#),
            (r#"["\ud83d","\ud83d\u5317"]"#, r#"["\ud83d","\ud83d北"]"#),
            (r#"["é\u00e9"]"#, r#"["éé"]"#),
            ("\"\\", "\"\\"),
        ];
        for (written, expected) in cases {
            assert_eq!(decode_unicode_escapes(written), expected);
        }
        assert!(matches!(decode_unicode_escapes(r#"["北","\n"]"#), Cow::Borrowed(_)));
    }

    #[test]
    fn the_decoded_text_has_the_same_value() {
        let written = r#"{"a\u0022":["\u5317\\u4eac\u005cn\u0008\u2028", 1.10, "\\\\u0041"]}"#;
        let value = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap();
        assert_eq!(value(&decode_unicode_escapes(written)), value(written));
    }
}
