//! The fields of an entry, each still as its own text, and what they must be.

use std::collections::BTreeMap;

use super::misfit;
use crate::fault::Fault;
use crate::json::Json;

/// The fields of an object. Those that are `null` are not there: model libraries write them so.
pub(super) struct Fields {
    fields: BTreeMap<String, Json>,
    /// Where the object is within the entry.
    place: &'static str,
}

impl Fields {
    /// The fields of an entry.
    pub(super) fn of(entry: &Json) -> Result<Self, Fault> {
        Self::within(entry, "")
    }

    fn within(object: &Json, place: &'static str) -> Result<Self, Fault> {
        let read: Result<BTreeMap<String, Json>, _> = serde_json::from_str(object.text());
        let Ok(mut fields) = read else {
            let shown: String = object.text().chars().take(40).collect();
            return Err(misfit(place, format!("a call of a tool is an object, not {shown}")));
        };
        fields.retain(|_, value| value.text() != "null");
        Ok(Self { fields, place })
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.fields.contains_key(name)
    }

    pub(super) fn raw(&self, name: &str) -> Option<&Json> {
        self.fields.get(name)
    }

    /// The object in a field.
    pub(super) fn object(&self, name: &str, place: &'static str) -> Result<Self, Fault> {
        match self.fields.get(name) {
            Some(object) => Self::within(object, place),
            None => Err(misfit(place, format!("{name} is missing"))),
        }
    }

    /// A text, if it is there.
    pub(super) fn text(&self, name: &str) -> Result<Option<String>, Fault> {
        let Some(value) = self.fields.get(name) else { return Ok(None) };
        let refused = |_| self.refused(name, "must be a text");
        serde_json::from_str(value.text()).map(Some).map_err(refused)
    }

    /// A text that must be there.
    pub(super) fn needed(&self, name: &str) -> Result<String, Fault> {
        self.text(name)?.ok_or_else(|| self.refused(name, "is missing"))
    }

    /// A text, where it is one: for telling whose fault it is.
    pub(super) fn hint(&self, name: &str) -> Option<String> {
        self.text(name).ok().flatten()
    }

    /// A whole number from 0, if it is there.
    pub(super) fn number<N>(&self, name: &str) -> Result<Option<N>, Fault>
    where
        N: serde::de::DeserializeOwned,
    {
        let Some(value) = self.fields.get(name) else { return Ok(None) };
        let refused =
            |_| self.refused(name, "must be a whole number, not below 0 and not too large");
        serde_json::from_str(value.text()).map(Some).map_err(refused)
    }

    fn refused(&self, name: &str, what: &str) -> Fault {
        misfit(&format!("{}/{name}", self.place), format!("{name} {what}"))
    }
}
