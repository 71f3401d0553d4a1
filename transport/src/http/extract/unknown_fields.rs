//! Finds the fields of a request that its type does not know.
//!
//! serde ignores unknown fields, so a misspelt `idempotencyKey` would have no effect and no
//! error. [`parse`] reads a value as usual and collects every unknown field on the way, with its
//! position and the known name that it resembles. The route decides about strictness, not the
//! type: the same types are read leniently where a protocol requires that.
//!
//! The known names are those that serde's derive passes to `deserialize_struct`, aliases
//! included. Values of any shape ([`serde_json::Value`], [`toolcrib::Json`]), variants of enums
//! and structs with `flatten` are read without a check.

use std::cell::RefCell;
use std::fmt;

use serde::de::value::StrDeserializer;
use serde::de::{
    DeserializeOwned, DeserializeSeed, Deserializer, EnumAccess, IgnoredAny, IntoDeserializer,
    MapAccess, SeqAccess, Visitor,
};
use toolcrib::domain::json::pointer_segment;
use toolcrib::schema::UnknownField;

/// Reads a value, and collects the unknown fields of all structs in it. The pointers begin with
/// `base`, the position of the value in the body.
pub(crate) fn parse<'de, T, D>(
    deserializer: D,
    base: &str,
) -> (Result<T, D::Error>, Vec<UnknownField>)
where
    T: DeserializeOwned,
    D: Deserializer<'de>,
{
    let findings = Findings { base, path: RefCell::default(), unknown: RefCell::default() };
    let value =
        T::deserialize(FieldChecker { inner: deserializer, fields: None, findings: &findings });
    (value, findings.unknown.into_inner())
}

/// One step from the body to a value in it.
enum Segment {
    /// A known field of a struct.
    Field(&'static str),
    /// A key of a map.
    Key(String),
    /// A position in a list.
    Item(usize),
}

/// The current position, and the unknown fields so far.
struct Findings<'b> {
    base: &'b str,
    path: RefCell<Vec<Segment>>,
    unknown: RefCell<Vec<UnknownField>>,
}

impl Findings<'_> {
    fn record(&self, name: &str, known: &'static [&'static str]) {
        let mut pointer = self.base.to_owned();
        for segment in self.path.borrow().iter() {
            match segment {
                Segment::Field(name) => pointer += &pointer_segment(name),
                Segment::Key(key) => pointer += &pointer_segment(key),
                Segment::Item(position) => pointer += &format!("/{position}"),
            }
        }
        self.unknown.borrow_mut().push(UnknownField::new(&pointer, name, known));
    }

    /// Runs `read` one step deeper.
    fn within<T>(&self, segment: Segment, read: impl FnOnce() -> T) -> T {
        self.path.borrow_mut().push(segment);
        let value = read();
        self.path.borrow_mut().pop();
        value
    }
}

/// A deserializer, visitor, seed or access of serde whose structs are checked.
struct FieldChecker<'f, X> {
    inner: X,
    /// Names that the struct being read knows; `None` outside of structs.
    fields: Option<&'static [&'static str]>,
    findings: &'f Findings<'f>,
}

impl<'f, X> FieldChecker<'f, X> {
    fn wrap<Y>(&self, inner: Y) -> FieldChecker<'f, Y> {
        FieldChecker { inner, fields: None, findings: self.findings }
    }
}

/// Forwards methods of a deserializer with a checked visitor.
macro_rules! forward_checked {
    ($($method:ident($($argument:ident: $type:ty),*))*) => {$(
        fn $method<V: Visitor<'de>>(
            self, $($argument: $type,)* visitor: V,
        ) -> Result<V::Value, D::Error> {
            let visitor = self.wrap(visitor);
            self.inner.$method($($argument,)* visitor)
        }
    )*};
}

/// Forwards methods of a deserializer with the visitor itself: these values contain no struct.
macro_rules! forward_unchecked {
    ($($method:ident)*) => {$(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
            self.inner.$method(visitor)
        }
    )*};
}

impl<'de, D: Deserializer<'de>> Deserializer<'de> for FieldChecker<'_, D> {
    type Error = D::Error;

    forward_unchecked! {
        deserialize_any deserialize_bool deserialize_i8 deserialize_i16 deserialize_i32
        deserialize_i64 deserialize_i128 deserialize_u8 deserialize_u16 deserialize_u32
        deserialize_u64 deserialize_u128 deserialize_f32 deserialize_f64 deserialize_char
        deserialize_str deserialize_string deserialize_bytes deserialize_byte_buf
        deserialize_unit deserialize_identifier deserialize_ignored_any
    }

    forward_checked! {
        deserialize_option()
        deserialize_seq()
        deserialize_map()
        deserialize_tuple(len: usize)
        deserialize_tuple_struct(name: &'static str, len: usize)
        deserialize_enum(name: &'static str, variants: &'static [&'static str])
    }

    fn deserialize_unit_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        visitor: V,
    ) -> Result<V::Value, D::Error> {
        self.inner.deserialize_unit_struct(name, visitor)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        visitor: V,
    ) -> Result<V::Value, D::Error> {
        // serde_json passes raw values and exact numbers as newtypes with names of its own.
        if name.starts_with("$serde_json::") {
            return self.inner.deserialize_newtype_struct(name, visitor);
        }
        let visitor = self.wrap(visitor);
        self.inner.deserialize_newtype_struct(name, visitor)
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, D::Error> {
        let visitor =
            FieldChecker { inner: visitor, fields: Some(fields), findings: self.findings };
        self.inner.deserialize_struct(name, fields, visitor)
    }

    fn is_human_readable(&self) -> bool {
        self.inner.is_human_readable()
    }
}

/// Forwards methods of a visitor for values without parts.
macro_rules! visit_scalars {
    ($($method:ident: $type:ty),* $(,)?) => {$(
        fn $method<E: serde::de::Error>(self, value: $type) -> Result<V::Value, E> {
            self.inner.$method(value)
        }
    )*};
}

impl<'de, V: Visitor<'de>> Visitor<'de> for FieldChecker<'_, V> {
    type Value = V::Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.expecting(f)
    }

    visit_scalars! {
        visit_bool: bool, visit_i64: i64, visit_i128: i128, visit_u64: u64, visit_u128: u128,
        visit_f64: f64, visit_char: char, visit_str: &str, visit_borrowed_str: &'de str,
        visit_string: String, visit_bytes: &[u8], visit_borrowed_bytes: &'de [u8],
        visit_byte_buf: Vec<u8>,
    }

    fn visit_none<E: serde::de::Error>(self) -> Result<V::Value, E> {
        self.inner.visit_none()
    }

    fn visit_unit<E: serde::de::Error>(self) -> Result<V::Value, E> {
        self.inner.visit_unit()
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<V::Value, D::Error> {
        let deserializer = self.wrap(deserializer);
        self.inner.visit_some(deserializer)
    }

    fn visit_newtype_struct<D: Deserializer<'de>>(
        self,
        deserializer: D,
    ) -> Result<V::Value, D::Error> {
        let deserializer = self.wrap(deserializer);
        self.inner.visit_newtype_struct(deserializer)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, access: A) -> Result<V::Value, A::Error> {
        let access = CheckedItems { access: self.wrap(access), position: 0 };
        self.inner.visit_seq(access)
    }

    fn visit_map<A: MapAccess<'de>>(self, access: A) -> Result<V::Value, A::Error> {
        let access = FieldChecker { inner: access, fields: self.fields, findings: self.findings };
        self.inner.visit_map(CheckedFields { access, segment: None })
    }

    fn visit_enum<A: EnumAccess<'de>>(self, access: A) -> Result<V::Value, A::Error> {
        self.inner.visit_enum(access)
    }
}

impl<'de, S: DeserializeSeed<'de>> DeserializeSeed<'de> for FieldChecker<'_, S> {
    type Value = S::Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<S::Value, D::Error> {
        let deserializer = self.wrap(deserializer);
        self.inner.deserialize(deserializer)
    }
}

/// The items of a list.
struct CheckedItems<'f, A> {
    access: FieldChecker<'f, A>,
    position: usize,
}

impl<'de, A: SeqAccess<'de>> SeqAccess<'de> for CheckedItems<'_, A> {
    type Error = A::Error;

    fn next_element_seed<S: DeserializeSeed<'de>>(
        &mut self,
        seed: S,
    ) -> Result<Option<S::Value>, A::Error> {
        let (seed, findings) = (self.access.wrap(seed), self.access.findings);
        let inner = &mut self.access.inner;
        let item = findings.within(Segment::Item(self.position), || inner.next_element_seed(seed));
        self.position += 1;
        item
    }

    fn size_hint(&self) -> Option<usize> {
        self.access.inner.size_hint()
    }
}

/// The fields of a struct, or the entries of a map.
struct CheckedFields<'f, A> {
    access: FieldChecker<'f, A>,
    /// The key whose value comes next.
    segment: Option<Segment>,
}

impl<'de, A: MapAccess<'de>> MapAccess<'de> for CheckedFields<'_, A> {
    type Error = A::Error;

    fn next_key_seed<S: DeserializeSeed<'de>>(
        &mut self,
        seed: S,
    ) -> Result<Option<S::Value>, A::Error> {
        while let Some(key) = self.access.inner.next_key::<String>()? {
            let Some(known) = self.access.fields else {
                let deserializer: StrDeserializer<'_, A::Error> = key.as_str().into_deserializer();
                let value = seed.deserialize(deserializer)?;
                self.segment = Some(Segment::Key(key));
                return Ok(Some(value));
            };
            if let Some(field) = known.iter().find(|field| **field == key) {
                self.segment = Some(Segment::Field(field));
                let deserializer: StrDeserializer<'_, A::Error> = (*field).into_deserializer();
                return seed.deserialize(deserializer).map(Some);
            }
            self.access.findings.record(&key, known);
            self.access.inner.next_value::<IgnoredAny>()?;
        }
        Ok(None)
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, A::Error> {
        let (seed, findings) = (self.access.wrap(seed), self.access.findings);
        let inner = &mut self.access.inner;
        match self.segment.take() {
            Some(segment) => findings.within(segment, || inner.next_value_seed(seed)),
            None => inner.next_value_seed(seed),
        }
    }

    fn size_hint(&self) -> Option<usize> {
        self.access.inner.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde::Deserialize;

    use super::*;

    #[derive(Debug, Deserialize)]
    struct Order {
        #[serde(alias = "customer_name")]
        customer: Option<String>,
        #[serde(default)]
        lines: Vec<Line>,
        #[serde(default)]
        prices: BTreeMap<String, Line>,
        raw: Option<toolcrib::Json>,
        value: Option<serde_json::Value>,
    }

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Line {
        quantity: u32,
    }

    fn parse_order(text: &str) -> (serde_json::Result<Order>, Vec<UnknownField>) {
        parse(&mut serde_json::Deserializer::from_str(text), "")
    }

    fn messages(text: &str) -> Vec<(String, String)> {
        let (_, unknown) = parse_order(text);
        unknown.iter().map(|field| (field.pointer().to_owned(), field.message())).collect()
    }

    #[test]
    fn every_unknown_field_is_found_with_its_position_and_the_name_it_resembles() {
        let found = messages(
            r#"{"costumer": "a", "lines": [{"quantity": 1}, {"Quantity": 2, "quantity": 3}],
                "prices": {"a/b": {"quantity": 1, "zzz": 1}}, "unrelated_thing": {"x": [1]}}"#,
        );
        let known = "customer, customer_name, lines, prices, raw, value";
        let expected = [
            ("/costumer", "unknown field `costumer`; did you mean `customer`?".to_owned()),
            ("/lines/1/Quantity", "unknown field `Quantity`; did you mean `quantity`?".into()),
            ("/prices/a~1b/zzz", "unknown field `zzz`; known fields are quantity".into()),
            (
                "/unrelated_thing",
                format!("unknown field `unrelated_thing`; known fields are {known}"),
            ),
        ];
        let expected: Vec<_> =
            expected.into_iter().map(|(at, text)| (at.to_owned(), text)).collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn known_fields_aliases_and_values_of_any_shape_are_read_as_usual() {
        let text = r#"{"customer_name": "b", "lines": [{"quantity": 7}],
            "raw": {"any": [1.50, {"x": null}]}, "value": {"any": {"thing": 1}}}"#;
        let (order, unknown) = parse_order(text);
        let order = order.unwrap();
        assert_eq!(unknown, []);
        assert_eq!(order.customer.as_deref(), Some("b"));
        assert_eq!(order.lines[0].quantity, 7);
        assert_eq!(order.prices.len(), 0);
        assert_eq!(order.raw.unwrap().text(), r#"{"any": [1.50, {"x": null}]}"#);
        assert_eq!(order.value.unwrap()["any"]["thing"], 1);
    }

    #[test]
    fn a_misspelt_required_field_is_reported_as_unknown() {
        let (line, unknown): (serde_json::Result<Line>, _) =
            parse(&mut serde_json::Deserializer::from_str(r#"{"quantty": 1}"#), "/lines/0");
        assert!(line.is_err());
        assert_eq!(unknown[0].pointer(), "/lines/0/quantty");
        assert_eq!(unknown[0].suggestion(), Some("quantity"));
    }
}
