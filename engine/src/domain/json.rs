//! JSON held as its original text: arguments and results are passed on byte for byte.
//!
//! A payload is validated once and then passed on, stored and returned unchanged, so `1.10` stays
//! `1.10` and a large result is not parsed and serialized again. Pure.

mod canonical;
mod check;
pub mod cursor;
mod lossy_integer;
mod unicode_escapes;
mod unique_keys;
use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;
use serde_json::value::RawValue;

pub use canonical::canonicalize;
pub use check::{check, replace_lone_surrogates};
pub use lossy_integer::find_lossy_integer;
pub use unicode_escapes::decode_unicode_escapes;
pub use unique_keys::{DuplicateKey, pointer_segment};

/// Maximum nesting depth of a document, enforced everywhere.
pub const MAX_DEPTH: usize = 64;

/// One JSON document, held as text and readable as a value. Cheap to clone.
#[derive(Clone)]
pub struct Json(Arc<RawValue>);

/// The reason why a text is not acceptable JSON, and the location.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{reason} at line {line} column {column}")]
pub struct JsonError {
    /// The problem.
    pub reason: String,
    /// Line, from 1.
    pub line: usize,
    /// Column, from 1.
    pub column: usize,
}

impl Json {
    /// Validates a text and wraps it.
    pub fn parse(text: &str) -> Result<Self, JsonError> {
        check(text.as_bytes())?;
        Self::from_stored(text)
    }

    /// Wraps a text from a store, which was validated before it was stored.
    pub fn from_stored(text: &str) -> Result<Self, JsonError> {
        let raw: Box<RawValue> = serde_json::from_str(text).map_err(JsonError::from)?;
        Ok(Self(raw.into()))
    }

    /// Wraps a part of a validated document.
    pub(crate) fn from_raw(raw: &RawValue) -> Self {
        Self(raw.to_owned().into())
    }

    /// Serializes a value.
    pub fn from_serialize<T: Serialize + ?Sized>(value: &T) -> Result<Self, serde_json::Error> {
        serde_json::value::to_raw_value(value).map(|raw| Self(raw.into()))
    }

    /// Serializes a value tree, which cannot fail.
    pub fn from_value(value: &Value) -> Self {
        Self::from_serialize(value).unwrap_or_else(|_| Self::null())
    }

    /// Returns `null`.
    pub fn null() -> Self {
        Self(RawValue::NULL.to_owned().into())
    }

    /// Returns `{}`.
    pub fn empty_object() -> Self {
        Self::from_value(&Value::Object(serde_json::Map::new()))
    }

    /// Returns the text.
    pub fn text(&self) -> &str {
        self.0.get()
    }

    /// Returns the items of an array, or `None` if the document is not an array.
    pub fn items(&self) -> Option<Vec<Self>> {
        let items: Vec<&RawValue> = serde_json::from_str(self.text()).ok()?;
        Some(items.into_iter().map(Self::from_raw).collect())
    }

    /// Returns the document in its canonical spelling, which is used to compare documents.
    pub fn canonical_text(&self) -> String {
        canonicalize(self.text())
    }

    /// Parses the value tree. The text was validated on arrival, so this cannot fail in practice.
    pub fn to_value(&self) -> Value {
        serde_json::from_str(self.0.get()).unwrap_or(Value::Null)
    }
}

impl fmt::Debug for Json {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}

/// Two documents are equal if their texts are equal or their canonical texts are. Numbers are
/// compared as written, not as the nearest doubles.
impl PartialEq for Json {
    fn eq(&self, other: &Self) -> bool {
        self.text() == other.text() || self.canonical_text() == other.canonical_text()
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

impl JsonError {
    /// Returns an error at a byte offset of a text.
    pub fn at_offset(text: &[u8], at: usize, reason: &str) -> Self {
        let before = &text[..at];
        let line = before.iter().filter(|byte| **byte == b'\n').count() + 1;
        let column = at - before.iter().rposition(|byte| *byte == b'\n').map_or(0, |n| n + 1) + 1;
        Self { reason: reason.to_owned(), line, column }
    }
}

impl From<serde_json::Error> for JsonError {
    fn from(error: serde_json::Error) -> Self {
        let (line, column) = (error.line(), error.column());
        let full = error.to_string();
        let location = format!(" at line {line} column {column}");
        let reason = full.strip_suffix(&location).unwrap_or(&full).to_owned();
        Self { reason, line, column }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn the_text_is_kept_unchanged() {
        assert_eq!(Json::parse("{\"a\": 1.10}").unwrap().text(), "{\"a\": 1.10}");
    }

    #[test]
    fn depth_65_is_refused_with_its_location() {
        let deep = |n: usize| format!("{}{}", "[".repeat(n), "]".repeat(n));
        assert!(Json::parse(&deep(64)).is_ok());
        let refused = Json::parse(&format!("\n{}", deep(65))).unwrap_err();
        assert_eq!((refused.line, refused.column), (2, 65));
        assert!(Json::parse(&format!("\"{}\"", "[".repeat(100))).is_ok(), "brackets in a string");
        assert!(Json::parse(&deep(100_000)).is_err());
    }

    #[test]
    fn text_that_is_not_a_json_value_is_refused() {
        for text in ["[1e400]", r#"{"a":"\ud800"}"#, r#"{"\udfff":1}"#] {
            assert!(Json::parse(text).is_err(), "{text}");
            assert!(serde_json::from_str::<Json>(text).is_err(), "{text}");
            let inside = format!(r#"{{"args":{text}}}"#);
            assert!(serde_json::from_str::<BTreeMap<String, Json>>(&inside).is_err(), "{text}");
        }
        let whole = Json::parse(r#"["\ud83d\ude00", 1e300]"#).unwrap();
        assert_eq!(whole.to_value(), serde_json::json!(["😀", 1e300]));
    }

    #[test]
    fn a_syntax_error_has_a_location() {
        let refused = Json::parse("{\"a\": }").unwrap_err();
        assert_eq!((refused.line, refused.column), (1, 7));
        assert!(!refused.reason.contains("line"), "{}", refused.reason);
    }

    #[test]
    fn equality_ignores_formatting_and_key_order() {
        let json = |text| Json::parse(text).unwrap();
        assert_eq!(json(r#"{"b": [1.10], "a": 1}"#), json(r#"{"a":1,"b":[1.1]}"#));
        assert_ne!(json("[18446744073709551616]"), json("[18446744073709551617]"));
    }
}
