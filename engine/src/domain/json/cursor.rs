//! Walks through a JSON text without parsing it into a tree. Pure.
//!
//! A [`JsonCursor`] stands before a value and can step over it or into it. It does not allocate and
//! reads each byte once, so finding a part of a large document takes no longer than reading it. The
//! text must be valid JSON; on anything else the results are meaningless, but every walk still
//! terminates.

use std::borrow::Cow;

/// The type of a JSON value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum JsonKind {
    /// An object: `{…}`.
    Object,
    /// An array: `[…]`.
    Array,
    /// A string.
    Text,
    /// A number.
    Number,
    /// `true` or `false`.
    Bool,
    /// `null`, or the end of the text.
    Null,
}

impl JsonKind {
    /// Returns the type of the value that a text begins with.
    pub fn of(text: &str) -> Self {
        JsonCursor::new(text).kind()
    }

    /// Returns the type's name on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Object => "object",
            Self::Array => "array",
            Self::Text => "text",
            Self::Number => "number",
            Self::Bool => "boolean",
            Self::Null => "null",
        }
    }
}

/// A position in a JSON text, before a value.
#[derive(Debug, Clone, Copy)]
pub struct JsonCursor<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> JsonCursor<'a> {
    /// Creates a cursor before the value that the text begins with.
    pub fn new(text: &'a str) -> Self {
        let mut cursor = Self { text, at: 0 };
        cursor.skip_space();
        cursor
    }

    /// Returns a cursor before a value at another offset of the same text.
    pub fn at_position(&self, at: usize) -> Self {
        Self { text: self.text, at: at.min(self.text.len()) }
    }

    /// Returns the byte offset of the cursor.
    pub fn position(&self) -> usize {
        self.at
    }

    /// Returns the text between an earlier offset and the cursor.
    pub fn text_since(&self, begin: usize) -> &'a str {
        self.text.get(begin..self.at).unwrap_or_default()
    }

    /// Returns the type of the next value.
    pub fn kind(&self) -> JsonKind {
        match self.byte() {
            Some(b'{') => JsonKind::Object,
            Some(b'[') => JsonKind::Array,
            Some(b'"') => JsonKind::Text,
            Some(b't' | b'f') => JsonKind::Bool,
            Some(b'n') | None => JsonKind::Null,
            Some(_) => JsonKind::Number,
        }
    }

    /// Steps into an array or an object.
    pub fn enter(&mut self) {
        self.at = (self.at + 1).min(self.text.len());
        self.skip_space();
    }

    /// Returns whether there is another item or entry; if not, steps out past the closing bracket.
    pub fn advance(&mut self) -> bool {
        self.skip_space();
        if self.byte() == Some(b',') {
            self.at += 1;
            self.skip_space();
        }
        match self.byte() {
            None => false,
            Some(b']' | b'}') => {
                self.at += 1;
                false
            }
            Some(_) => true,
        }
    }

    /// Steps over an entry's key and returns it as raw JSON, with its quotes.
    pub fn read_key(&mut self) -> &'a str {
        let key = self.read_value();
        self.skip_space();
        if self.byte() == Some(b':') {
            self.at += 1;
        }
        self.skip_space();
        key
    }

    /// Steps over a value and returns it as raw JSON.
    pub fn read_value(&mut self) -> &'a str {
        let begin = self.at;
        match self.byte() {
            Some(b'"') => self.skip_string(),
            Some(b'{' | b'[') => self.skip_nested(),
            _ => self.skip_plain(),
        }
        self.text.get(begin..self.at).unwrap_or_default()
    }

    fn byte(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    fn skip_space(&mut self) {
        while let Some(b' ' | b'\n' | b'\r' | b'\t') = self.byte() {
            self.at += 1;
        }
    }

    fn skip_plain(&mut self) {
        let rest = self.text.as_bytes().get(self.at..).unwrap_or_default();
        let ends = |byte: &u8| matches!(byte, b',' | b']' | b'}' | b' ' | b'\n' | b'\r' | b'\t');
        self.at += rest.iter().position(ends).unwrap_or(rest.len());
    }

    fn skip_string(&mut self) {
        self.at = string_end(self.text.as_bytes(), self.at);
    }

    fn skip_nested(&mut self) {
        let bytes = self.text.as_bytes();
        let mut depth = 0_usize;
        while let Some(byte) = bytes.get(self.at) {
            match byte {
                b'"' => {
                    self.at = string_end(bytes, self.at);
                    continue;
                }
                b'{' | b'[' => depth += 1,
                b'}' | b']' => depth = depth.saturating_sub(1),
                _ => {}
            }
            self.at += 1;
            if depth == 0 {
                return;
            }
        }
    }
}

/// Bytes of a string that are compared one by one before the search by vector instructions begins.
const SHORT_STRING_BYTES: usize = 24;

/// Returns the offset after the string that begins at `begin`.
fn string_end(bytes: &[u8], begin: usize) -> usize {
    let mut at = begin + 1;
    // Most strings are short, for which a plain loop is faster.
    let short = bytes.get(at..).unwrap_or_default();
    for byte in short.iter().take(SHORT_STRING_BYTES) {
        match byte {
            b'"' => return at + 1,
            b'\\' => break,
            _ => at += 1,
        }
    }
    while let Some(found) = bytes.get(at..).and_then(|rest| memchr::memchr2(b'"', b'\\', rest)) {
        match bytes[at + found] {
            b'"' => return at + found + 1,
            _ => at += found + 2,
        }
    }
    bytes.len()
}

/// Decodes a raw JSON string with its quotes.
pub fn decode_string(written: &str) -> Cow<'_, str> {
    let inner = written.strip_prefix('"').unwrap_or(written);
    let inner = inner.strip_suffix('"').unwrap_or(inner);
    if !inner.as_bytes().contains(&b'\\') {
        return Cow::Borrowed(inner);
    }
    // A lone surrogate is valid JSON but not text; such a string is returned as written.
    unescape(inner).map_or(Cow::Borrowed(inner), Cow::Owned)
}

/// Unescapes a string into one allocation that is large enough from the start, so that a long text
/// is not copied while it grows.
fn unescape(inner: &str) -> Option<String> {
    let mut text = String::with_capacity(inner.len());
    let mut rest = inner;
    while let Some(at) = memchr::memchr(b'\\', rest.as_bytes()) {
        text.push_str(&rest[..at]);
        let (character, behind) = decode_escape(&rest[at + 1..])?;
        text.push(character);
        rest = behind;
    }
    text.push_str(rest);
    Some(text)
}

/// Decodes an escape and returns its character and the remaining text.
fn decode_escape(written: &str) -> Option<(char, &str)> {
    let mut characters = written.chars();
    let character = match characters.next()? {
        'n' => '\n',
        'r' => '\r',
        't' => '\t',
        'b' => '\u{8}',
        'f' => '\u{c}',
        'u' => return decode_code_point(characters.as_str()),
        other => other,
    };
    Some((character, characters.as_str()))
}

/// Decodes the digits of a `\uXXXX` escape, with the second one of a pair, and returns the
/// character and the remaining text. Returns `None` for half of a pair.
pub(super) fn decode_code_point(written: &str) -> Option<(char, &str)> {
    let unit = |text: &str| u16::from_str_radix(text.get(..4)?, 16).ok();
    let (first, rest) = (unit(written)?, written.get(4..)?);
    // A character beyond U+FFFF is written as two escapes.
    let second = rest.strip_prefix("\\u").and_then(unit);
    let mut decoded = char::decode_utf16([first].into_iter().chain(second));
    let character = decoded.next()?.ok()?;
    let rest = if character.len_utf16() == 2 { rest.get(6..)? } else { rest };
    Some((character, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cursor_steps_over_and_into_values() {
        let text = r#" {"a" : [1, "]\"", {"x":null}] , "b":-1.5e3,"c":true, "d\n":{} } "#;
        let mut cursor = JsonCursor::new(text);
        assert_eq!(cursor.kind(), JsonKind::Object);
        let mut found = Vec::new();
        cursor.enter();
        while cursor.advance() {
            let key = decode_string(cursor.read_key());
            found.push((key.into_owned(), cursor.kind(), cursor.read_value()));
        }
        let expected = [
            ("a", JsonKind::Array, r#"[1, "]\"", {"x":null}]"#),
            ("b", JsonKind::Number, "-1.5e3"),
            ("c", JsonKind::Bool, "true"),
            ("d\n", JsonKind::Object, "{}"),
        ];
        let expected = expected.map(|(key, kind, text)| (key.to_owned(), kind, text));
        assert_eq!(found, expected);
        assert_eq!(text[cursor.position()..].trim(), "");
    }

    #[test]
    fn iteration_over_malformed_text_ends() {
        for text in ["", "[", "[,,", "{", "{\"", "[1 2", "\"\\", "]", "{]}", "[é,\"é"] {
            let mut cursor = JsonCursor::new(text);
            let mut steps = 0;
            cursor.enter();
            while cursor.advance() {
                cursor.read_value();
                steps += 1;
                assert!(steps < 100, "{text}");
            }
        }
    }

    #[test]
    fn a_lone_surrogate_is_decoded_as_written() {
        assert_eq!(decode_string(r#""a\ud800""#), r"a\ud800");
        assert_eq!(decode_string(r#""\u00e9\n""#), "é\n");
    }

    #[test]
    fn escapes_are_decoded_as_serde_json_does() {
        for written in [
            r#""""#,
            r#""plain é 🦀""#,
            r#""\"\\\/\b\f\n\r\t""#,
            r#""\u0041\u00e9\u20ac x""#,
            r#""\ud83e\udd80 and \uD83E\uDD80\u0041""#,
            r#""\u0000\u001f""#,
        ] {
            let expected: String = serde_json::from_str(written).unwrap();
            assert_eq!(decode_string(written), expected, "{written}");
        }
        for odd in [r#""\udd80\ud83e""#, r#""\ud83e\u0041""#, r#""\ud83ex""#] {
            assert_eq!(decode_string(odd), odd.trim_matches('"'));
        }
    }
}
