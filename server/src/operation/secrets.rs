//! Values that must be in nothing that is kept: they are taken out of everything that comes back,
//! however an upstream writes them.

use serde_json::{Map, Value};

use super::encoded;

/// What stands in the place of a secret.
pub const SCRUBBED: &str = "[secret]";

/// A shorter one is taken out only where it is the whole of a text: as a part of one it would be
/// found in every other word.
const SHORT: usize = 4;

/// The secrets of one request.
#[derive(Clone, Default)]
pub struct Secrets {
    /// In every spelling, the longest first.
    spellings: Vec<String>,
}

impl std::fmt::Debug for Secrets {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} spellings of secrets", self.spellings.len())
    }
}

impl Secrets {
    /// One more.
    pub fn add(&mut self, secret: &str) {
        if secret.is_empty() {
            return;
        }
        let percent = encoded(secret);
        let json = Value::from(secret).to_string();
        let spellings = [
            secret.to_owned(),
            percent.to_lowercase(),
            percent.replace("%20", "+"),
            percent,
            json.trim_matches('"').to_owned(),
            secret.trim().to_owned(),
        ];
        for spelling in spellings {
            if !spelling.is_empty() && !self.spellings.contains(&spelling) {
                self.spellings.push(spelling);
            }
        }
        self.spellings.sort_by_key(|spelling| std::cmp::Reverse(spelling.len()));
    }

    /// A text without them; none when there were none in it.
    pub fn scrubbed(&self, text: &str) -> Option<String> {
        let mut made: Option<String> = None;
        for spelling in &self.spellings {
            let now = made.as_deref().unwrap_or(text);
            if now == spelling {
                return Some(SCRUBBED.to_owned());
            }
            if spelling.len() >= SHORT && now.contains(spelling.as_str()) {
                made = Some(now.replace(spelling.as_str(), SCRUBBED));
            }
        }
        made
    }

    /// The same of a text that is wanted in any case.
    pub fn clean(&self, text: &str) -> String {
        self.scrubbed(text).unwrap_or_else(|| text.to_owned())
    }

    /// Takes them out of a tree of values: texts, names, and numbers that are one. Answers whether
    /// there were any.
    pub fn scrub(&self, value: &mut Value) -> bool {
        if self.spellings.is_empty() {
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
                let known = self.spellings.contains(&number.to_string());
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
