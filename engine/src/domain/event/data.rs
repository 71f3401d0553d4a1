//! The data fields of an event record.

use std::borrow::Cow;
use std::fmt;

use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;

/// Named fields, on the wire a JSON object. Every call has records, and each has few fields, so the
/// fields are a list: static names need no allocation, and a linear search is fast.
#[derive(Debug, Clone, Default)]
pub struct EventData(Vec<(Cow<'static, str>, Value)>);

impl EventData {
    /// Initial capacity; most records have no more fields.
    const TYPICAL_LEN: usize = 4;

    /// Returns the field with this name.
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.0.iter().find(|(key, _)| key == name).map(|(_, value)| value)
    }

    /// Sets a field, replacing any previous value.
    pub fn insert(&mut self, name: impl Into<Cow<'static, str>>, value: Value) {
        let name = name.into();
        match self.0.iter_mut().find(|(key, _)| *key == name) {
            Some((_, current)) => *current = value,
            None => {
                if self.0.is_empty() {
                    self.0.reserve_exact(Self::TYPICAL_LEN);
                }
                self.0.push((name, value));
            }
        }
    }

    /// Removes a field and returns its value.
    pub fn remove(&mut self, name: &str) -> Option<Value> {
        let index = self.0.iter().position(|(key, _)| key == name)?;
        Some(self.0.remove(index).1)
    }

    /// Returns the number of fields.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns true if there are no fields.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Iterates over all fields.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.0.iter().map(|(name, value)| (name.as_ref(), value))
    }
}

/// Returns `Value::Null` for a missing field.
impl std::ops::Index<&str> for EventData {
    type Output = Value;

    fn index(&self, name: &str) -> &Value {
        self.get(name).unwrap_or(&Value::Null)
    }
}

/// Ignores the order of the fields.
impl PartialEq for EventData {
    fn eq(&self, other: &Self) -> bool {
        let is_same = |(name, value)| other.get(name) == Some(value);
        self.len() == other.len() && self.iter().all(is_same)
    }
}

impl Serialize for EventData {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.iter())
    }
}

impl<'de> Deserialize<'de> for EventData {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct EventDataVisitor;

        impl<'de> Visitor<'de> for EventDataVisitor {
            type Value = EventData;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<EventData, A::Error> {
                let mut data = EventData::default();
                while let Some((name, value)) = map.next_entry::<String, Value>()? {
                    data.insert(name, value);
                }
                Ok(data)
            }
        }

        deserializer.deserialize_map(EventDataVisitor)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn event_data_round_trips_through_a_json_object() {
        let mut data = EventData::default();
        data.insert("tool", json!("a.tool"));
        data.insert("by", json!("c0"));
        data.insert("by", json!("c1"));
        let value = serde_json::to_value(&data).unwrap();
        assert_eq!(value, json!({ "by": "c1", "tool": "a.tool" }));
        let read: EventData = serde_json::from_str(r#"{"by":"c1","tool":"a.tool"}"#).unwrap();
        assert_eq!(read, data, "in any order");
        assert_eq!((read.get("by"), read.get("to"), read.len()), (Some(&json!("c1")), None, 2));
        data.remove("by");
        assert_ne!(read, data);
        assert_ne!(data, read);
        assert!(serde_json::from_str::<EventData>("[]").is_err());
    }
}
