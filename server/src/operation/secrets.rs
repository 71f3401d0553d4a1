//! Values that must be in nothing that is kept: they are taken out of everything that comes back,
//! however an upstream writes them.

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE};
use serde_json::{Map, Value};

/// What stands in the place of a secret.
pub const SCRUBBED: &str = "[secret]";

/// A shorter one is taken out only where it is the whole of a text: as a part of one it would be
/// found in every other word.
const SHORT: usize = 4;

/// The secrets of one request.
#[derive(Clone, Default)]
pub struct Secrets {
    /// Each as it is and in base64; the other spellings are read from the text.
    known: Vec<Vec<char>>,
}

impl std::fmt::Debug for Secrets {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} forms of secrets", self.known.len())
    }
}

impl Secrets {
    /// One more.
    pub fn add(&mut self, secret: &str) {
        if secret.is_empty() {
            return;
        }
        let (standard, in_urls) = (STANDARD.encode(secret), URL_SAFE.encode(secret));
        for form in [secret, secret.trim(), &standard, &in_urls] {
            // Padding is left off as often as not.
            for form in [form, form.trim_end_matches('=')] {
                let form: Vec<char> = form.chars().collect();
                if !form.is_empty() && !self.known.contains(&form) {
                    self.known.push(form);
                }
            }
        }
    }

    /// A text without them; none when there were none in it.
    pub fn scrubbed(&self, text: &str) -> Option<String> {
        let whole = |form: &Vec<char>| spelled(form, text, 0).contains(&text.len());
        if self.known.iter().any(whole) {
            return Some(SCRUBBED.to_owned());
        }
        let (mut made, mut kept, mut at) = (String::new(), 0, 0);
        while let Some(first) = text[at..].chars().next() {
            let Some(end) = self.longest(text, at).filter(|end| end - at >= SHORT) else {
                at += first.len_utf8();
                continue;
            };
            made.push_str(&text[kept..at]);
            made.push_str(SCRUBBED);
            (at, kept) = (end, end);
        }
        (kept > 0).then(|| made + &text[kept..])
    }

    /// Where the longest that begins here ends.
    fn longest(&self, text: &str, at: usize) -> Option<usize> {
        let first = readings(&text[at..]).map(|reading| reading.map(|(read, _)| read));
        let begins = |form: &&Vec<char>| form.len() > 1 && first.contains(&form.first().copied());
        let forms = self.known.iter().filter(begins);
        forms.filter_map(|form| spelled(form, text, at).into_iter().max()).max()
    }

    /// The same of a text that is wanted in any case.
    pub fn clean(&self, text: &str) -> String {
        self.scrubbed(text).unwrap_or_else(|| text.to_owned())
    }

    /// Takes them out of a tree of values: texts, names, and numbers that are one. Answers whether
    /// there were any.
    pub fn scrub(&self, value: &mut Value) -> bool {
        if self.known.is_empty() {
            return false;
        }
        match value {
            Value::String(text) => match self.scrubbed(text) {
                Some(clean) => {
                    *text = clean;
                    true
                }
                None => false,
            },
            Value::Number(number) => {
                let number = number.to_string();
                let known = self.known.iter().any(|form| number.chars().eq(form.iter().copied()));
                if known {
                    *value = Value::from(SCRUBBED);
                }
                known
            }
            Value::Array(items) => items.iter_mut().fold(false, |any, i| self.scrub(i) | any),
            Value::Object(map) => self.scrub_map(map),
            Value::Null | Value::Bool(_) => false,
        }
    }

    fn scrub_map(&self, map: &mut Map<String, Value>) -> bool {
        let mut any = map.values_mut().fold(false, |any, value| self.scrub(value) | any);
        let named: Vec<(String, String)> =
            map.keys().filter_map(|name| Some((name.clone(), self.scrubbed(name)?))).collect();
        for (name, clean) in named {
            if let Some(value) = map.remove(&name) {
                map.insert(clean, value);
            }
            any = true;
        }
        any
    }
}

/// Where a secret that begins here ends, each character written in any way; in none, when it does
/// not begin here.
fn spelled(form: &[char], text: &str, at: usize) -> Vec<usize> {
    let mut ends = vec![at];
    for wanted in form {
        let mut next = Vec::new();
        for at in ends {
            let readings = readings(&text[at..]);
            let fitting = readings.into_iter().flatten().filter(|(read, _)| read == wanted);
            next.extend(fitting.map(|(_, length)| at + length));
        }
        // Two ways to the same place are one.
        next.sort_unstable();
        next.dedup();
        ends = next;
        if ends.is_empty() {
            break;
        }
    }
    ends
}

/// What the beginning of a text can stand for, and how much of it: the character itself, or as
/// URLs, forms, JSON and HTML write it.
fn readings(text: &str) -> [Option<(char, usize)>; 3] {
    let Some(first) = text.chars().next() else { return [None; 3] };
    let escaped = match first {
        '%' => percent(text),
        '\\' => backslash(text),
        '&' => entity(text),
        _ => None,
    };
    [Some((first, first.len_utf8())), escaped, (first == '+').then_some((' ', 1))]
}

/// `%2F`, `%c3%bc`: as many bytes as the character has.
fn percent(text: &str) -> Option<(char, usize)> {
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

/// `\/`, `\n`, `\u002b`, and two of the last for what is outside of the plane that they cover.
fn backslash(text: &str) -> Option<(char, usize)> {
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

/// `&amp;`, `&#39;`, `&#x2F;`.
fn entity(text: &str) -> Option<(char, usize)> {
    // The longest is &#x10FFFF;.
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
