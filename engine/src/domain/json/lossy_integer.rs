//! Finds integers that lose precision when they are read as a number. Pure.

/// Returns the first integer of a JSON text that changes when it is read as a number: one that does
/// not fit 64 bits and differs from the nearest floating-point number.
pub fn find_lossy_integer(text: &str) -> Option<&str> {
    let bytes = text.as_bytes();
    let mut offset = 0;
    while offset < bytes.len() {
        match bytes[offset] {
            b'"' => offset = string_end(bytes, offset),
            b'-' | b'0'..=b'9' => {
                let is_number_byte =
                    |byte: &u8| matches!(byte, b'0'..=b'9' | b'+' | b'-' | b'.' | b'e' | b'E');
                let end =
                    offset + bytes[offset..].iter().take_while(|byte| is_number_byte(byte)).count();
                let number = &text[offset..end];
                if loses_precision(number) {
                    return Some(number);
                }
                offset = end;
            }
            _ => offset += 1,
        }
    }
    None
}

/// Returns the offset after the string that begins at `offset`.
fn string_end(bytes: &[u8], offset: usize) -> usize {
    let mut offset = offset + 1;
    while offset < bytes.len() && bytes[offset] != b'"' {
        offset += if bytes[offset] == b'\\' { 2 } else { 1 };
    }
    offset + 1
}

fn loses_precision(number: &str) -> bool {
    let is_integer = !number.contains(['.', 'e', 'E']);
    let fits_64_bits = || number.parse::<i64>().is_ok() || number.parse::<u64>().is_ok();
    let rounded = || number.parse().map_or(String::new(), |rounded: f64| format!("{rounded:.0}"));
    is_integer && !fits_64_bits() && rounded() != number
}

#[cfg(test)]
mod tests {
    use super::find_lossy_integer;

    #[test]
    fn only_integers_that_would_lose_precision_are_found() {
        for document in [
            "{}",
            r#"{"a": 18446744073709551615, "b": -9223372036854775808, "c": -0}"#,
            r#"[1.5e300, 3.14159265358979323846264338, 1e2, -1E-7]"#,
            r#"{"wei": "123456789012345678901234567890", "\"1": 1}"#,
            r#"{"a\\": 10000000000000000000000, "u": "é\""}"#,
        ] {
            assert_eq!(find_lossy_integer(document), None, "{document}");
        }
        for (text, number) in [
            (r#"{"wei":123456789012345678901234567890}"#, "123456789012345678901234567890"),
            (r#"["\\", {"a": [-9223372036854775809]}]"#, "-9223372036854775809"),
            (r#"18446744073709551617"#, "18446744073709551617"),
        ] {
            assert_eq!(find_lossy_integer(text), Some(number), "{text}");
        }
        let long = "9".repeat(400);
        assert_eq!(find_lossy_integer(&long), Some(long.as_str()));
    }
}
