//! JSON as it was given: arguments and results travel as their own text.
//!
//! A payload is checked to be JSON once and then carried, stored and answered byte for byte, so
//! `1.10` stays `1.10` and a large result is not taken apart and put together again. Pure.

mod canonical;
mod check;
pub mod cursor;
mod rounded;

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;
use serde_json::value::RawValue;

pub use canonical::canonical;
pub use check::{check, mended};
pub use rounded::rounded;

/// How deep a document may nest, everywhere.
pub const MAX_DEPTH: usize = 64;

/// One JSON document, kept as text, which can be read as a value. Cheap to clone.
#[derive(Clone)]
pub struct Json(Arc<RawValue>);

/// Why a text is not acceptable JSON, and where.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{reason} at line {line} column {column}")]
pub struct NotJson {
    /// What is wrong.
    pub reason: String,
    /// Line, from 1.
    pub line: usize,
    /// Column, from 1.
    pub column: usize,
}

impl Json {
    /// Checks a text and keeps it.
    pub fn parse(text: &str) -> Result<Self, NotJson> {
        check(text.as_bytes())?;
        Self::kept(text)
    }

    /// What a store gives back: it was checked before it was kept.
    pub fn kept(text: &str) -> Result<Self, NotJson> {
        let raw: Box<RawValue> = serde_json::from_str(text).map_err(NotJson::from)?;
        Ok(Self(raw.into()))
    }

    /// A part of a document that was checked.
    pub(crate) fn part(raw: &RawValue) -> Self {
        Self(raw.to_owned().into())
    }

    /// The JSON of a value.
    pub fn of<T: Serialize + ?Sized>(value: &T) -> Result<Self, serde_json::Error> {
        serde_json::value::to_raw_value(value).map(|raw| Self(raw.into()))
    }

    /// The JSON of a value tree, which always has one.
    pub fn of_value(value: &Value) -> Self {
        Self::of(value).unwrap_or_else(|_| Self::null())
    }

    /// `null`.
    pub fn null() -> Self {
        Self(RawValue::NULL.to_owned().into())
    }

    /// `{}`.
    pub fn empty_object() -> Self {
        Self::of_value(&Value::Object(serde_json::Map::new()))
    }

    /// The text.
    pub fn text(&self) -> &str {
        self.0.get()
    }

    /// The items of an array; none where it is no array.
    pub fn items(&self) -> Option<Vec<Self>> {
        let items: Vec<&RawValue> = serde_json::from_str(self.text()).ok()?;
        Some(items.into_iter().map(Self::part).collect())
    }

    /// The same document in the one spelling that documents are compared by.
    pub fn canonical(&self) -> String {
        canonical(self.text())
    }

    /// The value tree. The text was checked when it came in, so this cannot fail in practice.
    pub fn value(&self) -> Value {
        serde_json::from_str(self.0.get()).unwrap_or(Value::Null)
    }
}

impl fmt::Debug for Json {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}

/// The same text; or, where the texts differ, the same document. Numbers are compared as they are
/// written, and not as the doubles next to them.
impl PartialEq for Json {
    fn eq(&self, other: &Self) -> bool {
        self.text() == other.text() || self.canonical() == other.canonical()
    }
}

impl Serialize for Json {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let raw = Box::<RawValue>::deserialize(deserializer)?;
        check(raw.get().as_bytes()).map_err(serde::de::Error::custom)?;
        Ok(Self(raw.into()))
    }
}

impl NotJson {
    /// What is wrong with a text at a place in it, counted in bytes.
    pub fn at(text: &[u8], at: usize, reason: &str) -> Self {
        let before = &text[..at];
        let line = before.iter().filter(|byte| **byte == b'\n').count() + 1;
        let column = at - before.iter().rposition(|byte| *byte == b'\n').map_or(0, |n| n + 1) + 1;
        Self { reason: reason.to_owned(), line, column }
    }
}

impl From<serde_json::Error> for NotJson {
    fn from(error: serde_json::Error) -> Self {
        let (line, column) = (error.line(), error.column());
        let full = error.to_string();
        let place = format!(" at line {line} column {column}");
        let reason = full.strip_suffix(&place).unwrap_or(&full).to_owned();
        Self { reason, line, column }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn text_is_kept_as_given() {
        assert_eq!(Json::parse("{\"a\": 1.10}").unwrap().text(), "{\"a\": 1.10}");
    }

    #[test]
    fn depth_64_passes_and_65_says_where() {
        let deep = |n: usize| format!("{}{}", "[".repeat(n), "]".repeat(n));
        assert!(Json::parse(&deep(64)).is_ok());
        let refused = Json::parse(&format!("\n{}", deep(65))).unwrap_err();
        assert_eq!((refused.line, refused.column), (2, 65));
        assert!(Json::parse(&format!("\"{}\"", "[".repeat(100))).is_ok(), "brackets in a string");
        assert!(Json::parse(&deep(100_000)).is_err());
    }

    #[test]
    fn what_cannot_be_read_as_a_value_does_not_become_json() {
        for text in ["[1e400]", r#"{"a":"\ud800"}"#, r#"{"\udfff":1}"#] {
            assert!(Json::parse(text).is_err(), "{text}");
            assert!(serde_json::from_str::<Json>(text).is_err(), "{text}");
            let inside = format!(r#"{{"args":{text}}}"#);
            assert!(serde_json::from_str::<BTreeMap<String, Json>>(&inside).is_err(), "{text}");
        }
        let whole = Json::parse(r#"["\ud83d\ude00", 1e300]"#).unwrap();
        assert_eq!(whole.value(), serde_json::json!(["😀", 1e300]));
    }

    #[test]
    fn not_json_says_where() {
        let refused = Json::parse("{\"a\": }").unwrap_err();
        assert_eq!((refused.line, refused.column), (1, 7));
        assert!(!refused.reason.contains("line"), "{}", refused.reason);
    }

    #[test]
    fn documents_are_the_same_however_they_are_written() {
        let json = |text| Json::parse(text).unwrap();
        assert_eq!(json(r#"{"b": [1.10], "a": 1}"#), json(r#"{"a":1,"b":[1.1]}"#));
        assert_ne!(json("[18446744073709551616]"), json("[18446744073709551617]"));
    }
}
