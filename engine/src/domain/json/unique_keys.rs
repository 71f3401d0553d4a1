//! Reads a document as a value and refuses repeated keys. Pure.
//!
//! JSON leaves the meaning of a repeated key open: one parser takes the first value, another the
//! last. A validator that sees one of them and an executor that sees the other would disagree about
//! the arguments of a call.

use std::cell::RefCell;
use std::fmt;

use serde::de::{self, DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use super::Json;

/// A key that an object of a document has twice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DuplicateKey {
    /// The key.
    pub key: String,
    /// JSON pointer of the member with this key.
    pub pointer: String,
}

impl Json {
    /// Parses the value tree, as [`Json::to_value`] does, and refuses an object that has the same
    /// key twice, at any depth.
    pub fn to_value_with_unique_keys(&self) -> Result<Value, DuplicateKey> {
        let duplicate = RefCell::new(None);
        let mut deserializer = serde_json::Deserializer::from_str(self.text());
        let value = ValueSeed { duplicate: &duplicate }.deserialize(&mut deserializer);
        match duplicate.into_inner() {
            Some(duplicate) => Err(duplicate),
            // The text was validated on arrival.
            None => Ok(value.unwrap_or(Value::Null)),
        }
    }
}

/// Returns the segment of a JSON pointer that selects this member: `/` and the escaped name.
pub fn pointer_segment(name: &str) -> String {
    format!("/{}", name.replace('~', "~0").replace('/', "~1"))
}

/// Deserializes a value. The innermost object that has a duplicate records it; each container
/// around it then adds its own segment in front of the pointer.
#[derive(Clone, Copy)]
struct ValueSeed<'a> {
    duplicate: &'a RefCell<Option<DuplicateKey>>,
}

impl ValueSeed<'_> {
    fn add_segment(self, segment: impl FnOnce() -> String) {
        if let Some(duplicate) = self.duplicate.borrow_mut().as_mut() {
            duplicate.pointer.insert_str(0, &segment());
        }
    }
}

impl<'de> DeserializeSeed<'de> for ValueSeed<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for ValueSeed<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E: de::Error>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E: de::Error>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<Value, E> {
        Ok(Value::Number(value.into()))
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<Value, E> {
        Ok(Value::Number(value.into()))
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> Result<Value, E> {
        Ok(Number::from_f64(value).map_or(Value::Null, Value::Number))
    }

    fn visit_str<E: de::Error>(self, value: &str) -> Result<Value, E> {
        Ok(Value::String(value.to_owned()))
    }

    fn visit_string<E: de::Error>(self, value: String) -> Result<Value, E> {
        Ok(Value::String(value))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut values = Vec::new();
        loop {
            match items.next_element_seed(self) {
                Ok(Some(value)) => values.push(value),
                Ok(None) => return Ok(Value::Array(values)),
                Err(error) => {
                    self.add_segment(|| format!("/{}", values.len()));
                    return Err(error);
                }
            }
        }
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Value, A::Error> {
        let mut values = Map::new();
        while let Some(key) = members.next_key::<String>()? {
            if values.contains_key(&key) {
                let pointer = pointer_segment(&key);
                *self.duplicate.borrow_mut() = Some(DuplicateKey { key, pointer });
                return Err(de::Error::custom("a key is repeated"));
            }
            match members.next_value_seed(self) {
                Ok(value) => drop(values.insert(key, value)),
                Err(error) => {
                    self.add_segment(|| pointer_segment(&key));
                    return Err(error);
                }
            }
        }
        Ok(Value::Object(values))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_without_repeated_keys_are_read_as_before() {
        for text in [
            r#"{"a":[1,-2,1.10,1e300,18446744073709551615,100000000000000000001],"b":{"a":null}}"#,
            r#"["é😀\u00e9",true,false,{},[],""]"#,
            "7",
            r#"{"a":1,"A":2,"":3}"#,
        ] {
            let json = Json::parse(text).unwrap();
            assert_eq!(json.to_value_with_unique_keys(), Ok(json.to_value()), "{text}");
        }
    }

    #[test]
    fn a_repeated_key_is_found_at_any_depth() {
        for (text, key, pointer) in [
            (r#"{"a":1,"b":2,"a":3}"#, "a", "/a"),
            (r#"{"x":[{"y":0},{"a/b":1,"a/b":1}]}"#, "a/b", "/x/1/a~1b"),
            (r#"{"a":1,"\u0061":2}"#, "a", "/a"),
            (r#"[[{"":1,"":2}]]"#, "", "/0/0/"),
        ] {
            let found = Json::parse(text).unwrap().to_value_with_unique_keys().unwrap_err();
            assert_eq!((found.key.as_str(), found.pointer.as_str()), (key, pointer), "{text}");
        }
    }
}
