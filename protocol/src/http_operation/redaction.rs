//! Redacts secrets from everything that comes back, in every encoding that an upstream may use, so
//! that nothing stored contains them.

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE};
use serde_json::{Map, Value};

/// The replacement for a secret.
pub const REDACTED: &str = "[secret]";

/// Minimum length of a match within a text. A shorter secret is redacted only if it is the entire
/// text: as a part it would match in most words.
const SHORT: usize = 4;

/// The secrets of one request.
#[derive(Clone, Default)]
pub struct SecretRedactor {
    /// Each secret as is and in base64; other encodings are decoded from the text.
    variants: Vec<Vec<char>>,
}

impl std::fmt::Debug for SecretRedactor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} forms of secrets", self.variants.len())
    }
}

impl SecretRedactor {
    /// Adds a secret.
    pub fn add(&mut self, secret: &str) {
        if secret.is_empty() {
            return;
        }
        let (standard, in_urls) = (STANDARD.encode(secret), URL_SAFE.encode(secret));
        for variant in [secret, secret.trim(), &standard, &in_urls] {
            // Padding is often omitted.
            for variant in [variant, variant.trim_end_matches('=')] {
                let variant: Vec<char> = variant.chars().collect();
                if !variant.is_empty() && !self.variants.contains(&variant) {
                    self.variants.push(variant);
                }
            }
        }
    }

    /// Returns the text with secrets redacted, or `None` if it contains none.
    pub(crate) fn redact_if_present(&self, text: &str) -> Option<String> {
        let whole = |variant: &Vec<char>| match_ends(variant, text, 0).contains(&text.len());
        if self.variants.iter().any(whole) {
            return Some(REDACTED.to_owned());
        }
        let (mut output, mut copied, mut offset) = (String::new(), 0, 0);
        while let Some(first) = text[offset..].chars().next() {
            let Some(end) = self.longest_match_at(text, offset).filter(|end| end - offset >= SHORT)
            else {
                offset += first.len_utf8();
                continue;
            };
            output.push_str(&text[copied..offset]);
            output.push_str(REDACTED);
            (offset, copied) = (end, end);
        }
        (copied > 0).then(|| output + &text[copied..])
    }

    /// Returns the end of the longest secret that starts at this position.
    fn longest_match_at(&self, text: &str, offset: usize) -> Option<usize> {
        let first = decode_first_char(&text[offset..]).map(|reading| reading.map(|(read, _)| read));
        let begins =
            |variant: &&Vec<char>| variant.len() > 1 && first.contains(&variant.first().copied());
        let variants = self.variants.iter().filter(begins);
        variants.filter_map(|variant| match_ends(variant, text, offset).into_iter().max()).max()
    }

    /// Returns the text with secrets redacted.
    pub fn redact(&self, text: &str) -> String {
        self.redact_if_present(text).unwrap_or_else(|| text.to_owned())
    }

    /// Redacts secrets in a JSON value: in strings, in names, and in numbers that equal one.
    /// Returns whether there were any.
    pub fn redact_json(&self, value: &mut Value) -> bool {
        if self.variants.is_empty() {
            return false;
        }
        match value {
            Value::String(text) => match self.redact_if_present(text) {
                Some(clean) => {
                    *text = clean;
                    true
                }
                None => false,
            },
            Value::Number(number) => {
                let number = number.to_string();
                let is_secret =
                    self.variants.iter().any(|variant| number.chars().eq(variant.iter().copied()));
                if is_secret {
                    *value = Value::from(REDACTED);
                }
                is_secret
            }
            Value::Array(items) => items.iter_mut().fold(false, |any, i| self.redact_json(i) | any),
            Value::Object(map) => self.redact_object(map),
            Value::Null | Value::Bool(_) => false,
        }
    }

    fn redact_object(&self, map: &mut Map<String, Value>) -> bool {
        let mut any = map.values_mut().fold(false, |any, value| self.redact_json(value) | any);
        let renames: Vec<(String, String)> = map
            .keys()
            .filter_map(|name| Some((name.clone(), self.redact_if_present(name)?)))
            .collect();
        for (name, clean) in renames {
            if let Some(value) = map.remove(&name) {
                map.insert(clean, value);
            }
            any = true;
        }
        any
    }
}

/// Returns the possible ends of a secret that starts at this position, with each character in any
/// encoding. Empty if the secret does not start here.
fn match_ends(variant: &[char], text: &str, offset: usize) -> Vec<usize> {
    let mut ends = vec![offset];
    for expected in variant {
        let mut next = Vec::new();
        for offset in ends {
            let readings = decode_first_char(&text[offset..]);
            let fitting = readings.into_iter().flatten().filter(|(read, _)| read == expected);
            next.extend(fitting.map(|(_, length)| offset + length));
        }
        // Two decodings that end at the same position are one.
        next.sort_unstable();
        next.dedup();
        ends = next;
        if ends.is_empty() {
            break;
        }
    }
    ends
}

/// Returns the characters that the start of a text can stand for, each with its length: the
/// character itself, or its encoding in URLs, forms, JSON and HTML.
fn decode_first_char(text: &str) -> [Option<(char, usize)>; 3] {
    let Some(first) = text.chars().next() else { return [None; 3] };
    let escaped = match first {
        '%' => decode_percent(text),
        '\\' => decode_backslash(text),
        '&' => decode_html_entity(text),
        _ => None,
    };
    [Some((first, first.len_utf8())), escaped, (first == '+').then_some((' ', 1))]
}

/// Decodes `%2F` or `%c3%bc`: as many bytes as the character has.
fn decode_percent(text: &str) -> Option<(char, usize)> {
    let mut bytes = Vec::with_capacity(4);
    let mut rest = text;
    while let Some(digits) = rest.strip_prefix('%').and_then(|rest| rest.get(..2)) {
        bytes.push(u8::from_str_radix(digits, 16).ok()?);
        if let Ok(read) = std::str::from_utf8(&bytes) {
            return Some((read.chars().next()?, text.len() - rest.len() + 3));
        }
        rest = rest.get(3..).filter(|_| bytes.len() < 4)?;
    }
    None
}

/// Decodes `\/`, `\n` or `\u002b`, and surrogate pairs for characters outside the basic plane.
fn decode_backslash(text: &str) -> Option<(char, usize)> {
    let unit = |text: &str| {
        let digits = text.strip_prefix("\\u").and_then(|rest| rest.get(..4))?;
        u16::from_str_radix(digits, 16).ok()
    };
    if let Some(high) = unit(text) {
        let low = text.get(6..).and_then(unit);
        let units = [Some(high), low].into_iter().flatten();
        let read = char::decode_utf16(units).next()?.ok()?;
        return Some((read, 6 * read.len_utf16()));
    }
    let read = match text.chars().nth(1)? {
        same @ ('"' | '\\' | '/' | '\'') => same,
        'b' => '\u{8}',
        'f' => '\u{c}',
        'n' => '\n',
        'r' => '\r',
        't' => '\t',
        _ => return None,
    };
    Some((read, 2))
}

/// Decodes `&amp;`, `&#39;` or `&#x2F;`.
fn decode_html_entity(text: &str) -> Option<(char, usize)> {
    // The longest entity is `&#x10FFFF;`.
    let end = text.bytes().take(10).position(|byte| byte == b';')?;
    let read = match text.get(1..end)? {
        "amp" => '&',
        "lt" => '<',
        "gt" => '>',
        "quot" => '"',
        "apos" => '\'',
        other => {
            let number = other.strip_prefix('#')?;
            let number = match number.strip_prefix(['x', 'X']) {
                Some(digits) => u32::from_str_radix(digits, 16),
                None => number.parse(),
            };
            char::from_u32(number.ok()?)?
        }
    };
    Some((read, end + 1))
}
