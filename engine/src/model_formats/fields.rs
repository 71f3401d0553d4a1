//! Reads and type-checks the fields of a tool call without copying them.

use std::borrow::Cow;
use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::parse_fault;
use crate::domain::fault::Fault;
use crate::domain::json::Json;

/// The fields of an object, borrowed from its text. A field that is `null` counts as missing,
/// because model libraries serialize missing fields that way. If a field is repeated, the last
/// value that is not `null` wins.
pub(super) struct RawFields<'a> {
    fields: Vec<(Cow<'a, str>, &'a RawValue)>,
    /// JSON pointer of the object within the entry.
    pointer: &'static str,
}

impl<'a> RawFields<'a> {
    /// Parses the fields of an entry.
    pub(super) fn parse(entry: &'a Json) -> Result<Self, Fault> {
        Self::parse_object(entry.text(), "")
    }

    fn parse_object(object: &'a str, pointer: &'static str) -> Result<Self, Fault> {
        let read: Result<RawObject<'a>, _> = serde_json::from_str(object);
        let Ok(RawObject(mut fields)) = read else {
            let excerpt: String = object.chars().take(40).collect();
            return Err(parse_fault(
                pointer,
                format!("a tool call must be an object, not {excerpt}"),
            ));
        };
        fields.retain(|(_, value)| value.get() != "null");
        Ok(Self { fields, pointer })
    }

    fn get(&self, name: &str) -> Option<&'a RawValue> {
        let found = self.fields.iter().rfind(|(field, _)| field == name);
        found.map(|(_, value)| *value)
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.get(name).is_some()
    }

    /// Returns the names of the fields.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.fields.iter().map(|(name, _)| name.as_ref())
    }

    pub(super) fn json(&self, name: &str) -> Option<Json> {
        self.get(name).map(Json::from_raw)
    }

    /// Returns a field's raw JSON.
    pub(super) fn raw_value(&self, name: &str) -> Option<&'a RawValue> {
        self.get(name)
    }

    /// Returns an optional string, borrowed where possible.
    pub(super) fn borrowed_text(&self, name: &str) -> Result<Option<Cow<'a, str>>, Fault> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let refused = |_| self.field_fault(name, "must be a text");
        serde_json::from_str(value.get()).map(|BorrowedText(word)| Some(word)).map_err(refused)
    }

    /// Parses the object in a field.
    pub(super) fn object(&self, name: &str, pointer: &'static str) -> Result<Self, Fault> {
        match self.get(name) {
            Some(object) => Self::parse_object(object.get(), pointer),
            None => Err(parse_fault(pointer, format!("{name} is missing"))),
        }
    }

    /// Returns an optional string.
    pub(super) fn text(&self, name: &str) -> Result<Option<String>, Fault> {
        Ok(self.borrowed_text(name)?.map(Cow::into_owned))
    }

    /// Returns a required string.
    pub(super) fn required_text(&self, name: &str) -> Result<String, Fault> {
        self.text(name)?.ok_or_else(|| self.field_fault(name, "is missing"))
    }

    /// Returns a string if the field holds one. Used to identify an entry that cannot be parsed.
    pub(super) fn text_if_valid(&self, name: &str) -> Option<String> {
        self.text(name).ok().flatten()
    }

    /// Returns an optional non-negative integer.
    pub(super) fn number<N>(&self, name: &str) -> Result<Option<N>, Fault>
    where
        N: serde::de::DeserializeOwned,
    {
        let Some(value) = self.get(name) else { return Ok(None) };
        let refused =
            |_| self.field_fault(name, "must be a whole number, not below 0 and not too large");
        serde_json::from_str(value.get()).map(Some).map_err(refused)
    }

    fn field_fault(&self, name: &str, problem: &str) -> Fault {
        parse_fault(&format!("{}/{name}", self.pointer), format!("{name} {problem}"))
    }
}

/// The fields of an object, in order and not copied.
struct RawObject<'a>(Vec<(Cow<'a, str>, &'a RawValue)>);

impl<'de: 'a, 'a> Deserialize<'de> for RawObject<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(RawObjectVisitor).map(RawObject)
    }
}

struct RawObjectVisitor;

impl<'de> Visitor<'de> for RawObjectVisitor {
    type Value = Vec<(Cow<'de, str>, &'de RawValue)>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut fields = Vec::with_capacity(8);
        while let Some((BorrowedText(key), value)) = map.next_entry()? {
            fields.push((key, value));
        }
        Ok(fields)
    }
}

/// A string, borrowed if it contains no escapes.
#[derive(serde::Deserialize)]
pub(super) struct BorrowedText<'a>(#[serde(borrow)] pub(super) Cow<'a, str>);
