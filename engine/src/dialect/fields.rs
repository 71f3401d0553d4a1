//! Reads and type-checks the fields of a tool call without copying them.

use std::borrow::Cow;
use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::misfit;
use crate::fault::Fault;
use crate::json::Json;

/// The fields of an object, borrowed from its text. A field that is `null` counts as missing,
/// because model libraries serialize missing fields that way. If a field is repeated, the last one
/// wins.
pub(super) struct Fields<'a> {
    fields: Vec<(Cow<'a, str>, &'a RawValue)>,
    /// JSON pointer of the object within the entry.
    place: &'static str,
}

impl<'a> Fields<'a> {
    /// Parses the fields of an entry.
    pub(super) fn of(entry: &'a Json) -> Result<Self, Fault> {
        Self::within(entry.text(), "")
    }

    fn within(object: &'a str, place: &'static str) -> Result<Self, Fault> {
        let read: Result<Object<'a>, _> = serde_json::from_str(object);
        let Ok(Object(mut fields)) = read else {
            let shown: String = object.chars().take(40).collect();
            return Err(misfit(place, format!("a call of a tool is an object, not {shown}")));
        };
        fields.retain(|(_, value)| value.get() != "null");
        Ok(Self { fields, place })
    }

    fn get(&self, name: &str) -> Option<&'a RawValue> {
        let named = self.fields.iter().rfind(|(field, _)| field == name);
        named.map(|(_, value)| *value)
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.get(name).is_some()
    }

    pub(super) fn raw(&self, name: &str) -> Option<Json> {
        self.get(name).map(Json::part)
    }

    /// Returns a field's raw JSON.
    pub(super) fn written(&self, name: &str) -> Option<&'a RawValue> {
        self.get(name)
    }

    /// Returns an optional string, borrowed where possible.
    pub(super) fn word(&self, name: &str) -> Result<Option<Cow<'a, str>>, Fault> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let refused = |_| self.refused(name, "must be a text");
        serde_json::from_str(value.get()).map(|Key(word)| Some(word)).map_err(refused)
    }

    /// Parses the object in a field.
    pub(super) fn object(&self, name: &str, place: &'static str) -> Result<Self, Fault> {
        match self.get(name) {
            Some(object) => Self::within(object.get(), place),
            None => Err(misfit(place, format!("{name} is missing"))),
        }
    }

    /// Returns an optional string.
    pub(super) fn text(&self, name: &str) -> Result<Option<String>, Fault> {
        Ok(self.word(name)?.map(Cow::into_owned))
    }

    /// Returns a required string.
    pub(super) fn needed(&self, name: &str) -> Result<String, Fault> {
        self.text(name)?.ok_or_else(|| self.refused(name, "is missing"))
    }

    /// Returns a string if the field holds one. Used to identify an entry that cannot be parsed.
    pub(super) fn hint(&self, name: &str) -> Option<String> {
        self.text(name).ok().flatten()
    }

    /// Returns an optional non-negative integer.
    pub(super) fn number<N>(&self, name: &str) -> Result<Option<N>, Fault>
    where
        N: serde::de::DeserializeOwned,
    {
        let Some(value) = self.get(name) else { return Ok(None) };
        let refused =
            |_| self.refused(name, "must be a whole number, not below 0 and not too large");
        serde_json::from_str(value.get()).map(Some).map_err(refused)
    }

    fn refused(&self, name: &str, what: &str) -> Fault {
        misfit(&format!("{}/{name}", self.place), format!("{name} {what}"))
    }
}

/// The fields of an object, in order and not copied.
struct Object<'a>(Vec<(Cow<'a, str>, &'a RawValue)>);

impl<'de: 'a, 'a> Deserialize<'de> for Object<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(InOrder).map(Object)
    }
}

struct InOrder;

impl<'de> Visitor<'de> for InOrder {
    type Value = Vec<(Cow<'de, str>, &'de RawValue)>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut fields = Vec::with_capacity(8);
        while let Some((Key(key), value)) = map.next_entry()? {
            fields.push((key, value));
        }
        Ok(fields)
    }
}

/// A string, borrowed if it contains no escapes.
#[derive(serde::Deserialize)]
pub(super) struct Key<'a>(#[serde(borrow)] pub(super) Cow<'a, str>);
