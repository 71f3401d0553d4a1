//! Canonical text of a JSON document: one text for all spellings of the same document, used to
//! compare documents and to compute fingerprints. Pure.
//!
//! It is computed from the text and not from a value tree: in such a tree an integer beyond 64 bits
//! becomes a double, and two different numbers may become the same double.

use std::borrow::Cow;

use serde_json::{Number, Value};

use super::cursor::{JsonCursor, JsonKind, decode_string};

/// Returns the document without whitespace, with its object keys sorted and its numbers and escapes
/// in one spelling. The text must be valid JSON.
pub fn canonicalize(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    write_value(&mut JsonCursor::new(text), &mut out);
    out
}

fn write_value(cursor: &mut JsonCursor<'_>, out: &mut String) {
    match cursor.kind() {
        JsonKind::Object => {
            cursor.enter();
            let mut members: Vec<(Cow<'_, str>, &str, JsonCursor<'_>)> = Vec::new();
            while cursor.advance() {
                let key = cursor.read_key();
                members.push((decode_string(key), key, *cursor));
                cursor.read_value();
            }
            // If a key is repeated, the last value counts, as in `serde_json::Value`.
            members.reverse();
            members.sort_by(|(a, ..), (b, ..)| a.cmp(b));
            members.dedup_by(|(a, ..), (b, ..)| a == b);
            out.push('{');
            for (n, (_, key, mut value)) in members.into_iter().enumerate() {
                if n > 0 {
                    out.push(',');
                }
                write_string(key, out);
                out.push(':');
                write_value(&mut value, out);
            }
            out.push('}');
        }
        JsonKind::Array => {
            cursor.enter();
            out.push('[');
            let mut first = true;
            while cursor.advance() {
                if !std::mem::take(&mut first) {
                    out.push(',');
                }
                write_value(cursor, out);
            }
            out.push(']');
        }
        JsonKind::Text => write_string(cursor.read_value(), out),
        JsonKind::Number => out.push_str(&canonicalize_number(cursor.read_value())),
        JsonKind::Bool | JsonKind::Null => out.push_str(cursor.read_value()),
    }
}

/// Writes a string literal, given with its quotation marks.
fn write_string(literal: &str, out: &mut String) {
    match literal.contains('\\') {
        // Escapes have several spellings; use the serializer's.
        true => out.push_str(&Value::from(decode_string(literal)).to_string()),
        false => out.push_str(literal),
    }
}

/// Returns a number as the serializer writes it if that preserves its value, and otherwise its
/// exact digits and exponent.
fn canonicalize_number(literal: &str) -> Cow<'_, str> {
    let Ok(number) = literal.parse::<Number>() else { return Cow::Borrowed(literal) };
    let text = number.to_string();
    if text == literal {
        return Cow::Borrowed(literal);
    }
    let (digits, exponent) = split_decimal(literal);
    if number.is_f64() && split_decimal(&text) != (digits.clone(), exponent) {
        let sign = if literal.starts_with('-') { "-" } else { "" };
        return Cow::Owned(format!("{sign}{digits}e{exponent}"));
    }
    Cow::Owned(text)
}

/// Returns the digits of a number without zeros at either end, and the power of ten to multiply
/// them by. Ignores the sign.
fn split_decimal(literal: &str) -> (String, i64) {
    let plain = literal.trim_start_matches('-');
    let (mantissa, exponent) = plain.split_once(['e', 'E']).unwrap_or((plain, "0"));
    // An exponent beyond 64 bits counts as 0. Validation refuses a positive one, unless all digits
    // are zeros.
    let exponent: i64 = exponent.parse().unwrap_or_default();
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let all_digits = format!("{whole}{fraction}");
    let significant = all_digits.trim_end_matches('0');
    let trailing_zeros = (all_digits.len() - significant.len()) as i64;
    let digits = significant.trim_start_matches('0').to_owned();
    if digits.is_empty() {
        return (digits, 0);
    }
    let exponent = exponent.saturating_sub(fraction.len() as i64).saturating_add(trailing_zeros);
    (digits, exponent)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assert_all_same(texts: &[&str]) {
        for text in texts {
            assert_eq!(canonicalize(text), canonicalize(texts[0]), "{text}");
        }
    }

    #[test]
    fn key_order_whitespace_and_escapes_do_not_matter() {
        assert_all_same(&[
            r#"{"a":{"c":2,"d":1},"b":[1,2]}"#,
            r#" { "b": [1, 2], "a": {"d":1,"c":2} } "#,
        ]);
        assert_all_same(&[r#"["é/","\n"]"#, r#"["\u00E9\/","\u000a"]"#]);
        assert_all_same(&[r#"{"a":1}"#, r#"{"a":2,"\u0061":1}"#]);
        assert_all_same(&["1.1", "1.10", "11e-1", "0.11E+1"]);
        assert_all_same(&["100.0", "1e2", "1E+2", "1000e-1"]);
        assert_all_same(&[
            "18446744073709551616",
            "18446744073709551616.0",
            "1844674407370955161600e-2",
        ]);
        assert_eq!(
            canonicalize(r#"{"":[],"a b":{}, "c":[true,null]}"#),
            r#"{"":[],"a b":{},"c":[true,null]}"#
        );
    }

    #[test]
    fn long_numbers_keep_their_differences() {
        for (a, b) in [
            ("18446744073709551616", "18446744073709551617"),
            ("100000000000000000001", "100000000000000000002"),
            ("-18446744073709551616", "18446744073709551616"),
            ("0.1", "0.1000000000000000000001"),
            ("1e300", "1.00000000000000000001e300"),
            ("9007199254740993", "9007199254740992"),
            ("[1,2]", "[12]"),
            (r#""1""#, "1"),
        ] {
            assert_ne!(canonicalize(a), canonicalize(b));
        }
    }

    /// Fingerprints in existing databases were computed from this text.
    #[test]
    fn usual_documents_equal_the_output_of_serde_json() {
        for text in [
            r#"{"a":[1,-2,3.5,1e-7,18446744073709551615],"b":"x\"\\\u0007😀"}"#,
            r#"{"n":{"m":[true,false,null,"",0,0.0,-0.0]}}"#,
            "1.5e300",
            "123456789.125",
        ] {
            let value: Value = serde_json::from_str(text).unwrap();
            assert_eq!(canonicalize(text), value.to_string());
        }
    }
}
