//! Redacts secrets from everything that comes back, in every encoding that an upstream may use, so
//! that nothing stored contains them: as is, percent-encoded, with the escapes of JSON and HTML,
//! and in both alphabets of base64, also as a part of a longer text that was encoded.

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE};
use serde_json::{Map, Value};
use toolcrib::Json;
use toolcrib::domain::fault::Fault;

/// The replacement for a secret.
pub const REDACTED: &str = "[secret]";

/// Minimum length of a match within a text. A shorter secret is redacted only if it is the entire
/// text: as a part it would match in most words.
const SHORT: usize = 4;

/// Minimum length of the base64 form of a secret within a longer encoded text. Shorter forms would
/// match in other data.
const SHORT_BASE64: usize = 8;
/// Minimum length of a part of a secret that is recognized without the characters before it.
const SHORT_INNER: usize = 8;

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
                self.add_variant(variant);
            }
        }
        for variant in inner_base64(secret.as_bytes()) {
            self.add_variant(variant);
        }
    }

    fn add_variant(&mut self, variant: Vec<char>) {
        if !variant.is_empty() && !self.variants.contains(&variant) {
            self.variants.push(variant);
        }
    }

    /// Adds the secrets of another redactor.
    pub fn extend(&mut self, other: &Self) {
        other.variants.iter().for_each(|variant| self.add_variant(variant.clone()));
    }

    /// Returns true if there is nothing to redact.
    pub fn is_empty(&self) -> bool {
        self.variants.is_empty()
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

    /// Redacts a fault: its message, and the values of its detail.
    pub fn redact_fault(&self, mut fault: Fault) -> Fault {
        if let Some(message) = self.redact_if_present(&fault.message) {
            fault.message = message;
        }
        if let Some(detail) = &mut fault.detail {
            self.redact_json(detail);
        }
        fault
    }

    /// Redacts a JSON document. Returns it unchanged, to the letter, if it has no secret.
    pub fn redact_document(&self, document: Json) -> Json {
        // Most documents have none, which the text shows without a tree of values.
        if self.is_empty() || self.redact_if_present(document.text()).is_none() {
            return document;
        }
        let mut value = document.to_value();
        self.redact_json(&mut value);
        Json::from_serialize(&value).unwrap_or_else(|_| Json::null())
    }

    /// Returns the text with secrets redacted.
    pub fn redact(&self, text: &str) -> String {
        self.redact_if_present(text).unwrap_or_else(|| text.to_owned())
    }

    /// Redacts secrets in a JSON value: in strings, in names, and in numbers that equal a secret.
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

/// Returns the characters of a secret's base64 form that do not depend on the bytes around it, for
/// each of its three possible offsets in the encoded text and both alphabets.
fn inner_base64(secret: &[u8]) -> Vec<Vec<char>> {
    let mut forms = Vec::new();
    for offset in 0..3 {
        let padded = [&[0; 2][..offset], secret].concat();
        // The first characters hold bits of the bytes before the secret, the last ones of those
        // after it.
        let (first, last) = ((offset * 8).div_ceil(6), padded.len() * 8 / 6);
        for text in [STANDARD.encode(&padded), URL_SAFE.encode(&padded)] {
            let form: Vec<char> = text.chars().take(last).skip(first).collect();
            if form.len() >= SHORT_BASE64 {
                forms.push(form);
            }
        }
    }
    forms
}

/// Redacts a text that arrives in parts, each of which is released at once. A secret that is split
/// between parts is redacted in each of them.
#[derive(Debug, Default)]
pub struct StreamRedactor {
    /// For each form of a secret in which the last part ended: its index in the redactor, and the
    /// number of matched characters.
    partial: Vec<(usize, usize)>,
}

impl StreamRedactor {
    /// Returns the next part with secrets redacted.
    pub fn redact_part(&mut self, secrets: &SecretRedactor, part: &str) -> String {
        if part.is_empty() {
            return String::new();
        }
        let continued = self.continued_length(secrets, part).max(inner_length(secrets, part));
        let (start, rest) = (&part[..continued], &part[continued..]);
        let mut output = if start.is_empty() { String::new() } else { REDACTED.to_owned() };
        let characters: Vec<char> = rest.chars().collect();
        let mut longest = 0;
        for (index, variant) in secrets.variants.iter().enumerate() {
            for length in 1..variant.len().min(characters.len() + 1) {
                if characters.ends_with(&variant[..length]) {
                    self.partial.push((index, length));
                    longest = longest.max(length);
                }
            }
        }
        // A few characters reveal nothing and occur in many words.
        let held = if longest >= SHORT { longest } else { 0 };
        let kept: String = characters[..characters.len() - held].iter().collect();
        output += &secrets.redact(&kept);
        if held > 0 {
            output += REDACTED;
        }
        output
    }

    /// Returns the length of the start of a part that continues a secret.
    fn continued_length(&mut self, secrets: &SecretRedactor, part: &str) -> usize {
        let mut continued = 0;
        let mut further = Vec::new();
        for (index, matched) in std::mem::take(&mut self.partial) {
            let Some(rest) = secrets.variants.get(index).and_then(|all| all.get(matched..)) else {
                continue;
            };
            let common = part.chars().zip(rest).take_while(|(read, expected)| read == *expected);
            let common: Vec<char> = common.map(|(read, _)| read).collect();
            let bytes: usize = common.iter().map(|read| read.len_utf8()).sum();
            if common.len() == rest.len() {
                continued = continued.max(bytes);
            } else if bytes == part.len() && bytes > 0 {
                // The whole part is inside the secret, which continues in the next part.
                further.push((index, matched + common.len()));
                continued = continued.max(bytes);
            }
        }
        self.partial = further;
        continued
    }
}

/// Returns the length of the start of a part that is the end of a secret, or lies inside of one,
/// without its beginning: parts can arrive in another order than they were sent in.
fn inner_length(secrets: &SecretRedactor, part: &str) -> usize {
    let longest = secrets.variants.iter().map(Vec::len).max().unwrap_or(0);
    let characters: Vec<char> = part.chars().take(longest).collect();
    let is_inside = |variant: &Vec<char>| {
        characters.len() >= SHORT_INNER
            && variant.windows(characters.len()).any(|at| at == characters)
    };
    let inside = secrets.variants.iter().any(is_inside).then_some(characters.len());
    let ends = secrets.variants.iter().filter_map(|variant| {
        (1..=variant.len().saturating_sub(SHORT_INNER))
            .map(|start| &variant[start..])
            .find(|end| characters.starts_with(end))
            .map(<[char]>::len)
    });
    let count = ends.chain(inside).max().unwrap_or(0);
    characters[..count].iter().map(|character| character.len_utf8()).sum()
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

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: &str = "hunter2-hunter2/+ü";

    fn redactor() -> SecretRedactor {
        let mut secrets = SecretRedactor::default();
        secrets.add(SECRET);
        secrets
    }

    #[test]
    fn a_secret_inside_of_encoded_text_is_redacted_at_every_offset() {
        let secrets = redactor();
        for before in ["", "a", "ab", "abc", "user:", "{\"key\":\""] {
            for behind in ["", "x", "xy", "\"}"] {
                let plain = format!("{before}{SECRET}{behind}");
                for encoded in [
                    STANDARD.encode(&plain),
                    URL_SAFE.encode(&plain),
                    STANDARD.encode(&plain).trim_end_matches('=').to_owned(),
                ] {
                    let redacted = secrets.redact(&encoded);
                    assert!(redacted.contains(REDACTED), "{plain}: {redacted}");
                    // At most the characters at the border, which share bits with others, remain.
                    let rest = redacted.replace(REDACTED, "").len();
                    assert!(rest <= (before.len() + behind.len()) * 4 / 3 + 6, "{redacted}");
                }
            }
        }
        let unrelated = STANDARD.encode("a text that has nothing to do with it, at all");
        assert_eq!(secrets.redact(&unrelated), unrelated);
    }

    #[test]
    fn a_secret_is_redacted_wherever_a_stream_is_split() {
        let secrets = redactor();
        let text = format!("before {SECRET} between {SECRET}{SECRET} behind");
        let ends: Vec<usize> = text.char_indices().map(|(offset, _)| offset).collect();
        for first in &ends {
            for second in ends.iter().filter(|second| *second >= first) {
                let mut stream = StreamRedactor::default();
                let parts = [&text[..*first], &text[*first..*second], &text[*second..]];
                let parts: Vec<String> =
                    parts.iter().map(|part| stream.redact_part(&secrets, part)).collect();
                let joined = parts.concat();
                assert!(!joined.contains(SECRET), "{parts:?}");
                // Not more than three characters of a secret remain at a border.
                for part in &parts {
                    let rest = part.replace(REDACTED, "");
                    assert!(!rest.contains("hunt"), "{parts:?}");
                    assert!(!rest.contains("2-hu"), "{parts:?}");
                }
                assert!(joined.starts_with("before ") && joined.ends_with(" behind"), "{parts:?}");
            }
        }
    }

    #[test]
    fn documents_without_a_secret_stay_to_the_letter() {
        let secrets = redactor();
        let text = "{ \"a\" : 1.50 }";
        let Ok(document) = Json::parse(text) else { unreachable!() };
        assert_eq!(secrets.redact_document(document).text(), text);
        let Ok(document) = Json::from_serialize(&serde_json::json!({ "a": SECRET })) else {
            unreachable!()
        };
        assert_eq!(secrets.redact_document(document).text(), r#"{"a":"[secret]"}"#);
    }
}
