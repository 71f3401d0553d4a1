//! Exact sums of decimal numbers. Pure.
//!
//! Amounts such as 2122.20 have no exact binary form, so a sum of many of them would be off in its
//! last digits. Sums are kept as whole numbers of the smallest unit as long as that is possible.

/// Maximum number of digits after the point that are added exactly.
const MAX_SCALE: u32 = 12;
/// Maximum number of digits of one number that is added exactly.
const MAX_DIGITS: usize = 24;

/// A sum of numbers, exact as long as the numbers permit it.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct DecimalSum {
    mantissa: i128,
    scale: u32,
    /// The sum as a binary number, from the first number that cannot be added exactly.
    inexact: Option<f64>,
}

impl DecimalSum {
    /// Adds a number.
    pub(crate) fn add(&mut self, written: &str) {
        if self.inexact.is_none()
            && let Some((mantissa, scale)) = parse_decimal(written)
            && let Some((sum, scale)) = add_scaled(self.mantissa, self.scale, mantissa, scale)
        {
            (self.mantissa, self.scale) = (sum, scale);
            return;
        }
        let so_far = self.to_f64();
        self.inexact = Some(so_far + parse_number(written).unwrap_or_default());
    }

    /// Returns the sum as a binary number.
    pub(crate) fn to_f64(&self) -> f64 {
        self.inexact.unwrap_or_else(|| self.mantissa as f64 / 10_f64.powi(self.scale.cast_signed()))
    }

    /// Returns the sum as a JSON number.
    pub(crate) fn to_json(&self) -> String {
        if let Some(sum) = self.inexact {
            return serde_json::Value::from(sum).to_string();
        }
        let scale = self.scale as usize;
        let digits = self.mantissa.unsigned_abs().to_string();
        let digits = format!("{digits:0>width$}", width = scale + 1);
        let (whole, part) = digits.split_at(digits.len() - scale);
        let sign = if self.mantissa < 0 { "-" } else { "" };
        match part {
            "" => format!("{sign}{whole}"),
            part => format!("{sign}{whole}.{part}"),
        }
    }
}

fn add_scaled(a: i128, a_scale: u32, b: i128, b_scale: u32) -> Option<(i128, u32)> {
    let scale = a_scale.max(b_scale);
    let widen = |value: i128, from: u32| value.checked_mul(10_i128.checked_pow(scale - from)?);
    Some((widen(a, a_scale)?.checked_add(widen(b, b_scale)?)?, scale))
}

fn parse_decimal(written: &str) -> Option<(i128, u32)> {
    let (sign, digits) = match written.as_bytes() {
        [b'-', digits @ ..] => (-1, digits),
        digits => (1, digits),
    };
    if digits.is_empty() || digits.len() > MAX_DIGITS {
        return None;
    }
    let (mut mantissa, mut scale, mut has_point) = (0_i128, 0, false);
    for byte in digits {
        match byte {
            b'0'..=b'9' => {
                mantissa = mantissa * 10 + i128::from(byte - b'0');
                scale += u32::from(has_point);
            }
            b'.' if !has_point => has_point = true,
            _ => return None,
        }
    }
    (scale <= MAX_SCALE).then_some((sign * mantissa, scale))
}

/// Parses a plain number. Texts such as `nan` and `1e999` are no numbers here.
pub(crate) fn parse_number(text: &str) -> Option<f64> {
    let first = *text.as_bytes().first()?;
    let looks_like = first.is_ascii_digit() || matches!(first, b'-' | b'+' | b'.');
    let number = text.parse::<f64>().ok().filter(|_| looks_like)?;
    number.is_finite().then_some(number)
}

/// Returns whether a text is a number as JSON writes it.
pub(crate) fn is_json_number(text: &str) -> bool {
    let unsigned = text.strip_prefix('-').unwrap_or(text);
    let bytes = unsigned.as_bytes();
    let begins_well = match bytes {
        [b'0'] => true,
        [b'0', next, ..] => *next == b'.',
        [first, ..] => first.is_ascii_digit(),
        [] => false,
    };
    let plain = bytes.iter().all(|byte| byte.is_ascii_digit() || *byte == b'.');
    let points = bytes.iter().filter(|byte| **byte == b'.').count();
    begins_well && plain && points <= 1 && !text.ends_with('.') && text.len() <= MAX_DIGITS
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum(numbers: &[&str]) -> String {
        let mut sum = DecimalSum::default();
        numbers.iter().for_each(|number| sum.add(number));
        sum.to_json()
    }

    #[test]
    fn amounts_add_up_exactly() {
        assert_eq!(sum(&["0.1", "0.2"]), "0.3");
        assert_eq!(sum(&["2122.20", "-0.05", "1"]), "2123.15");
        assert_eq!(sum(&["-0.5", "0.25"]), "-0.25");
        assert_eq!(sum(&[]), "0");
        assert_eq!(sum(&["1e3", "1"]), "1001.0");
        assert_eq!(sum(&vec!["0.1"; 100_000]), "10000.0");
    }

    #[test]
    fn numbers_of_json_are_told_from_other_texts() {
        for text in ["0", "-1", "1.50", "0.5", "10"] {
            assert!(is_json_number(text), "{text}");
        }
        for text in ["", "-", "01", "1.", ".5", "1e3", "1.2.3", "+1", "nan", "0x1"] {
            assert!(!is_json_number(text), "{text}");
        }
        assert_eq!(parse_number("inf"), None);
        assert_eq!(parse_number("1e999"), None);
        assert_eq!(parse_number("+1.5"), Some(1.5));
    }
}
