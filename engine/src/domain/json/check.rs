//! Checks that valid JSON can also be read as a value: nesting depth, number range, and no lone
//! surrogates. One pass over the bytes, without building a tree. Text that is not JSON at all is
//! left to the parser. Pure.

use std::borrow::Cow;

use super::{JsonError, MAX_DEPTH};

/// Numbers with fewer characters and no exponent are always in range: the largest has 309 digits.
const MAX_IN_RANGE_DIGITS: usize = 300;

/// Escape of U+FFFD, the replacement character. It has the same length as any other `\u` escape.
const REPLACEMENT: &[u8; 6] = b"\\ufffd";

/// Refuses a text that may be JSON but could not be read as a value, before anything parses it.
pub fn check(bytes: &[u8]) -> Result<(), JsonError> {
    scan(bytes, |at| Err(JsonError::at_offset(bytes, at, "half of a surrogate pair")))
}

/// Checks a reported payload like [`check`], but replaces lone surrogates with U+FFFD. They appear
/// if a text was truncated within an emoji.
pub fn replace_lone_surrogates(bytes: &[u8]) -> Result<Cow<'_, [u8]>, JsonError> {
    let mut halves = Vec::new();
    scan(bytes, |at| {
        halves.push(at);
        Ok(())
    })?;
    let mut mended = Cow::Borrowed(bytes);
    for at in halves {
        mended.to_mut()[at..at + REPLACEMENT.len()].copy_from_slice(REPLACEMENT);
    }
    Ok(mended)
}

fn scan(
    bytes: &[u8],
    mut half: impl FnMut(usize) -> Result<(), JsonError>,
) -> Result<(), JsonError> {
    let (mut at, mut depth) = (0, 0_usize);
    while let Some(byte) = bytes.get(at) {
        match byte {
            b'"' => {
                at = string_end(bytes, at + 1, &mut half)?;
                continue;
            }
            b'-' | b'0'..=b'9' => {
                at = number_end(bytes, at)?;
                continue;
            }
            b'[' | b'{' => {
                depth += 1;
                if depth > MAX_DEPTH {
                    let reason = format!("nested deeper than {MAX_DEPTH} levels");
                    return Err(JsonError::at_offset(bytes, at, &reason));
                }
            }
            b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        at += 1;
    }
    Ok(())
}

/// Returns the offset after a string that begins before `at`.
fn string_end(
    bytes: &[u8],
    mut at: usize,
    half: &mut impl FnMut(usize) -> Result<(), JsonError>,
) -> Result<usize, JsonError> {
    loop {
        let rest = bytes.get(at..).unwrap_or_default();
        let Some(next) = rest.iter().position(|byte| matches!(byte, b'"' | b'\\')) else {
            return Ok(bytes.len());
        };
        at += next;
        if bytes[at] == b'"' {
            return Ok(at + 1);
        }
        at += match (escaped_code_unit(bytes, at), escaped_code_unit(bytes, at + 6)) {
            (Some(0xd800..=0xdbff), Some(0xdc00..=0xdfff)) => 12,
            (Some(0xd800..=0xdfff), _) => {
                half(at)?;
                6
            }
            _ => 2,
        };
    }
}

/// Returns the code unit of the escape `\uXXXX` at an offset, if there is one.
fn escaped_code_unit(bytes: &[u8], at: usize) -> Option<u32> {
    let digits = bytes.get(at..at + 6)?.strip_prefix(b"\\u")?;
    digits.iter().try_fold(0, |unit, digit| Some(unit * 16 + char::from(*digit).to_digit(16)?))
}

/// Returns the offset after a number, or an error if the number is out of range.
fn number_end(bytes: &[u8], at: usize) -> Result<usize, JsonError> {
    let in_number = |byte: &u8| matches!(byte, b'0'..=b'9' | b'.' | b'e' | b'E' | b'+' | b'-');
    let length = bytes[at..].iter().position(|byte| !in_number(byte)).unwrap_or(bytes.len() - at);
    let number = &bytes[at..at + length];
    if length > MAX_IN_RANGE_DIGITS || number.iter().any(|byte| matches!(byte, b'e' | b'E')) {
        let read = std::str::from_utf8(number).ok().and_then(|number| number.parse::<f64>().ok());
        if read.is_some_and(f64::is_infinite) {
            return Err(JsonError::at_offset(bytes, at, "number out of range"));
        }
    }
    Ok(at + length)
}

#[cfg(test)]
mod tests {
    use serde_json::Value;
    use serde_json::value::RawValue;

    use super::*;

    #[test]
    fn the_check_accepts_exactly_what_serde_json_can_read() {
        let long = "7".repeat(309);
        let longest = format!("1{}", "0".repeat(308));
        let small = format!("0.{}1e401", "0".repeat(400));
        for text in [
            "1e400",
            "-1e400",
            "1E+400",
            "1e308",
            "1.7976931348623157e308",
            "1.7976931348623159e308",
            "1e-400",
            "0e400",
            "0e99999999999999999999",
            &long,
            &longest,
            &small,
            r#""\ud800""#,
            r#""\udc00""#,
            r#""\ud83d\ude00""#,
            r#""\ude00\ud83d""#,
            r#""\ud83d\ud83d\ude00""#,
            r#""\ud83dx""#,
            r#""\ud83d\n""#,
            r#""\\ud800""#,
            r#""\\\ud800""#,
            r#"{"\uDBFF": 1}"#,
            r#"["\"1e400", {"a": 1e5}]"#,
            r#"[1, -1e999]"#,
        ] {
            let raw: Box<RawValue> = serde_json::from_str(text).unwrap();
            let read = serde_json::from_str::<Value>(raw.get());
            assert_eq!(check(text.as_bytes()).is_ok(), read.is_ok(), "{text}: {read:?}");
        }
    }

    #[test]
    fn an_error_has_the_location_of_the_number_or_escape() {
        let message = |text: &str| check(text.as_bytes()).unwrap_err().to_string();
        assert_eq!(message("[1,\n  1e400]"), "number out of range at line 2 column 3");
        assert_eq!(message(r#"["ab\ud800"]"#), "half of a surrogate pair at line 1 column 5");
    }

    #[test]
    fn lone_surrogates_are_replaced_and_pairs_kept() {
        let text = br#"["\ud83d", "\ud83d\ude00", "x\ude00y", "\ud83d"]"#;
        let repaired = replace_lone_surrogates(text).unwrap();
        let value: Value = serde_json::from_slice(&repaired).unwrap();
        assert_eq!(value, serde_json::json!(["\u{fffd}", "😀", "x\u{fffd}y", "\u{fffd}"]));
        assert!(matches!(
            super::replace_lone_surrogates(br#""\ud83d\ude00""#),
            Ok(Cow::Borrowed(_))
        ));
        assert!(super::replace_lone_surrogates(b"1e400").is_err());
    }

    #[test]
    fn syntax_errors_are_left_to_the_parser() {
        for text in
            ["\"", "\"\\", "\"\\u", "\"\\ud8", "\"\\ud800", "1e", "-", "1e+", "é", "\"\\uzzzz\""]
        {
            let checked = check(text.as_bytes());
            assert!(checked.is_ok() || text.contains("\\ud800"), "{text}: {checked:?}");
        }
    }
}
