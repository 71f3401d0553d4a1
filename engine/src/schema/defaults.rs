//! Adds the `default`s of a schema to arguments that lack them.
//!
//! Works on the text of the arguments, so that everything that the caller sent stays as written:
//! numbers of any length, and the order of the members. A default is added only where it is
//! unambiguous:
//!
//! - to an object that lacks a property whose schema in `properties` has a `default`; never over a
//!   given value, and `null` is a given value;
//! - in nested objects, in the items of arrays (`items`, `prefixItems`, `additionalItems`) and in
//!   the values that `additionalProperties` describes;
//! - through `$ref` within the document and through `allOf`, which always apply;
//! - through `anyOf` and `oneOf` only if exactly one branch accepts the type of the value, as for a
//!   nullable object. Conditional keywords (`if`, `dependentSchemas`, `not`, `patternProperties`)
//!   add nothing.
//!
//! A default that contradicts its own `type`, `enum` or `const` is ignored. An added default gets
//! its own defaults in turn. If a schema refers to itself, the default that it adds within its own
//! default is copied unchanged, so that the expansion ends.

use std::borrow::Cow;

use jsonschema::Draft;
use serde_json::Value;

use crate::domain::json::Json;
use crate::domain::json::cursor::{JsonCursor, JsonKind, decode_string};

/// Maximum number of subschemas visited for one instance.
const MAX_STEPS: usize = 1_000_000;
/// Deepest level at which containers get defaults; deeper ones are copied unchanged.
const MAX_LEVELS: usize = 64;

/// The arguments with their defaults exceed the size limit, or finding the defaults takes too
/// many steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DefaultsTooLarge;

/// Returns true if the schema may contain a default.
pub(super) fn has_defaults(schema: &Value) -> bool {
    match schema {
        Value::Object(members) => {
            members.contains_key("default") || members.values().any(has_defaults)
        }
        Value::Array(items) => items.iter().any(has_defaults),
        _ => false,
    }
}

/// Returns the instance with the missing defaults added, or `None` if there is nothing to add.
pub(super) fn add_defaults(
    schema: &Value,
    draft: Draft,
    instance: &Json,
    max_bytes: usize,
) -> Result<Option<Json>, DefaultsTooLarge> {
    let mut writer = DefaultsWriter {
        root: schema,
        ignores_ref_siblings: draft == Draft::Draft7,
        text: String::with_capacity(instance.text().len() + 64),
        max_bytes,
        steps: 0,
        has_added: false,
        expanding: Vec::new(),
    };
    writer.write_value(&mut JsonCursor::new(instance.text()), &[schema], 1)?;
    match writer.has_added {
        true => Ok(Json::from_stored(&writer.text).ok()),
        false => Ok(None),
    }
}

/// Copies an instance and adds the defaults on the way.
struct DefaultsWriter<'s> {
    root: &'s Value,
    /// Draft-07 ignores all keywords next to `$ref`.
    ignores_ref_siblings: bool,
    text: String,
    max_bytes: usize,
    steps: usize,
    has_added: bool,
    /// Schemas whose defaults are being added, from the outermost. A schema that refers to itself
    /// would otherwise add its default without end.
    expanding: Vec<*const Value>,
}

impl<'s> DefaultsWriter<'s> {
    /// Copies the next value, which these schemas describe.
    fn write_value(
        &mut self,
        cursor: &mut JsonCursor<'_>,
        schemas: &[&'s Value],
        level: usize,
    ) -> Result<(), DefaultsTooLarge> {
        let kind = cursor.kind();
        let is_container = matches!(kind, JsonKind::Object | JsonKind::Array);
        if schemas.is_empty() || !is_container || level > MAX_LEVELS {
            self.text.push_str(cursor.read_value());
            return self.check_size();
        }
        let schemas = self.applicable_schemas(schemas, kind)?;
        match kind {
            JsonKind::Object => self.write_object(cursor, &schemas, level),
            _ => self.write_array(cursor, &schemas, level),
        }
    }

    fn write_object(
        &mut self,
        cursor: &mut JsonCursor<'_>,
        schemas: &[&'s Value],
        level: usize,
    ) -> Result<(), DefaultsTooLarge> {
        let mut names: Vec<Cow<'_, str>> = Vec::new();
        self.text.push('{');
        cursor.enter();
        while cursor.advance() {
            let key = cursor.read_key();
            let name = decode_string(key);
            if !names.is_empty() {
                self.text.push(',');
            }
            self.text.push_str(key);
            self.text.push(':');
            let described: Vec<&Value> =
                schemas.iter().filter_map(|schema| member_schema(schema, &name)).collect();
            self.write_value(cursor, &described, level + 1)?;
            names.push(name);
        }
        for schema in schemas {
            let Some(properties) = schema.get("properties").and_then(Value::as_object) else {
                continue;
            };
            for (name, property) in properties {
                if names.iter().any(|given| given == name) {
                    continue;
                }
                if self.write_default(name, property, !names.is_empty(), level)? {
                    names.push(Cow::Borrowed(name));
                }
            }
        }
        self.text.push('}');
        self.check_size()
    }

    /// Adds a member with the default of its schema, if that has one.
    fn write_default(
        &mut self,
        name: &'s str,
        property: &'s Value,
        is_next: bool,
        level: usize,
    ) -> Result<bool, DefaultsTooLarge> {
        let Some(default) = self.find_default(property)? else { return Ok(false) };
        if is_next {
            self.text.push(',');
        }
        self.text.push_str(&Value::from(name).to_string());
        self.text.push(':');
        self.has_added = true;
        let (text, address) = (default.to_string(), std::ptr::from_ref(property));
        if self.expanding.contains(&address) {
            self.text.push_str(&text);
        } else {
            self.expanding.push(address);
            self.write_value(&mut JsonCursor::new(&text), &[property], level + 1)?;
            self.expanding.pop();
        }
        self.check_size()?;
        Ok(true)
    }

    fn write_array(
        &mut self,
        cursor: &mut JsonCursor<'_>,
        schemas: &[&'s Value],
        level: usize,
    ) -> Result<(), DefaultsTooLarge> {
        let mut index = 0;
        self.text.push('[');
        cursor.enter();
        while cursor.advance() {
            if index > 0 {
                self.text.push(',');
            }
            let described: Vec<&Value> =
                schemas.iter().filter_map(|schema| item_schema(schema, index)).collect();
            self.write_value(cursor, &described, level + 1)?;
            index += 1;
        }
        self.text.push(']');
        self.check_size()
    }

    /// Returns the default of a property, if it fits the property's own type and listed values.
    fn find_default(&mut self, property: &'s Value) -> Result<Option<&'s Value>, DefaultsTooLarge> {
        let mut schemas = Vec::new();
        self.collect_unconditional(property, &mut schemas)?;
        let default = schemas.iter().find_map(|schema| schema.get("default"));
        Ok(default.filter(|default| schemas.iter().all(|schema| accepts(schema, default))))
    }

    /// Returns the schemas that certainly apply to a value of this type.
    fn applicable_schemas(
        &mut self,
        schemas: &[&'s Value],
        kind: JsonKind,
    ) -> Result<Vec<&'s Value>, DefaultsTooLarge> {
        let mut all = Vec::new();
        for schema in schemas {
            self.collect_unconditional(schema, &mut all)?;
        }
        let mut next = 0;
        while let Some(schema) = all.get(next).copied() {
            next += 1;
            for keyword in ["anyOf", "oneOf"] {
                let Some(branches) = schema.get(keyword).and_then(Value::as_array) else {
                    continue;
                };
                let mut accepting = Vec::new();
                for branch in branches {
                    let mut within = Vec::new();
                    self.collect_unconditional(branch, &mut within)?;
                    if within.iter().all(|schema| accepts_kind(schema, kind)) {
                        accepting.push(within);
                    }
                }
                if let [only] = accepting.as_mut_slice() {
                    all.append(only);
                }
            }
        }
        Ok(all)
    }

    /// Collects a schema and those that apply whenever it applies: through `allOf` and `$ref`.
    fn collect_unconditional(
        &mut self,
        schema: &'s Value,
        into: &mut Vec<&'s Value>,
    ) -> Result<(), DefaultsTooLarge> {
        let mut waiting = vec![schema];
        while let Some(schema) = waiting.pop() {
            self.steps += 1;
            if self.steps > MAX_STEPS {
                return Err(DefaultsTooLarge);
            }
            let target = schema.get("$ref").and_then(Value::as_str);
            if target.is_none() || !self.ignores_ref_siblings {
                into.push(schema);
                let all = schema.get("allOf").and_then(Value::as_array);
                waiting.extend(all.into_iter().flatten().rev());
            }
            waiting.extend(target.and_then(|target| self.resolve(target)));
        }
        Ok(())
    }

    /// Resolves a reference by JSON pointer. Others, by anchor or by id, add no defaults.
    fn resolve(&self, target: &str) -> Option<&'s Value> {
        let pointer = target.strip_prefix('#')?;
        let pointer = percent_decode(pointer)?;
        self.root.pointer(&pointer)
    }

    fn check_size(&self) -> Result<(), DefaultsTooLarge> {
        // The instance itself was within the limit.
        if self.has_added && self.text.len() > self.max_bytes {
            return Err(DefaultsTooLarge);
        }
        Ok(())
    }
}

/// Decodes the percent-encoding of a fragment.
fn percent_decode(fragment: &str) -> Option<Cow<'_, str>> {
    if !fragment.contains('%') {
        return Some(Cow::Borrowed(fragment));
    }
    let mut bytes = Vec::with_capacity(fragment.len());
    let mut rest = fragment.bytes();
    while let Some(byte) = rest.next() {
        match byte {
            b'%' => {
                let digits = [rest.next()?, rest.next()?];
                let digits = std::str::from_utf8(&digits).ok()?;
                bytes.push(u8::from_str_radix(digits, 16).ok()?);
            }
            byte => bytes.push(byte),
        }
    }
    String::from_utf8(bytes).ok().map(Cow::Owned)
}

/// Returns the schema that an object's schema has for the values of a member.
fn member_schema<'s>(schema: &'s Value, name: &str) -> Option<&'s Value> {
    if let Some(property) = schema.get("properties").and_then(|all| all.get(name)) {
        return Some(property);
    }
    // A pattern may describe the member instead.
    let has_patterns = schema.get("patternProperties").is_some();
    schema.get("additionalProperties").filter(|schema| schema.is_object() && !has_patterns)
}

/// Returns the schema that an array's schema has for the item at an index.
fn item_schema(schema: &Value, index: usize) -> Option<&Value> {
    let by_index = |keyword: &str, rest: &str| {
        let list = schema.get(keyword)?.as_array()?;
        Some(list.get(index).or_else(|| schema.get(rest)))
    };
    // Draft-07 has the list in `items`, 2020-12 in `prefixItems`.
    let listed = by_index("prefixItems", "items").or_else(|| by_index("items", "additionalItems"));
    listed.unwrap_or_else(|| schema.get("items")).filter(|schema| schema.is_object())
}

/// Returns whether a value fits the type and the listed values of a schema.
fn accepts(schema: &Value, value: &Value) -> bool {
    let listed = schema.get("enum").and_then(Value::as_array);
    listed.is_none_or(|listed| listed.contains(value))
        && schema.get("const").is_none_or(|only| only == value)
        && type_names(schema).is_none_or(|mut names| names.any(|name| has_type(value, name)))
}

fn has_type(value: &Value, name: &str) -> bool {
    match name {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        "integer" => {
            let whole = |number: f64| number.fract() == 0.0;
            value.is_i64() || value.is_u64() || value.as_f64().is_some_and(whole)
        }
        _ => value.is_number(),
    }
}

/// Returns whether a schema's type includes values of this kind.
fn accepts_kind(schema: &Value, kind: JsonKind) -> bool {
    if schema == &Value::Bool(false) {
        return false;
    }
    let name = match kind {
        JsonKind::Text => "string",
        other => other.as_str(),
    };
    type_names(schema).is_none_or(|mut names| names.any(|listed| listed == name))
}

/// Returns the types that a schema lists, if it restricts them.
fn type_names(schema: &Value) -> Option<impl Iterator<Item = &str>> {
    let listed = match schema.get("type")? {
        Value::Array(names) => names.as_slice(),
        name => std::slice::from_ref(name),
    };
    Some(listed.iter().filter_map(Value::as_str))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::schema::Schema;

    #[track_caller]
    fn check(schema: Value, given: &str, expected: Option<&str>) {
        let schema = Schema::compile(&schema).unwrap();
        let filled = schema.with_defaults(&Json::parse(given).unwrap(), 10_000).unwrap();
        assert_eq!(filled.as_ref().map(Json::text), expected, "{given}");
    }

    #[test]
    fn missing_properties_get_their_defaults() {
        let schema = json!({ "properties": {
            "unit": { "type": "string", "default": "C" },
            "days": { "type": "integer", "default": 3 },
            "place": { "type": "string" },
        } });
        check(schema.clone(), "{}", Some(r#"{"days":3,"unit":"C"}"#));
        let given = r#"{ "place": "x",  "unit": null }"#;
        check(schema.clone(), given, Some(r#"{"place":"x","unit":null,"days":3}"#));
        check(schema.clone(), r#"{"unit":"F","days":1}"#, None);
        check(schema.clone(), "[]", None);
        check(schema, "7", None);
    }

    #[test]
    fn the_text_of_given_values_stays() {
        let schema = json!({ "properties": { "a": { "default": 1 } } });
        let given = r#"{"z":1.10,"big":123456789012345678901,"\u0062":"\u00e9"}"#;
        let expected = r#"{"z":1.10,"big":123456789012345678901,"\u0062":"\u00e9","a":1}"#;
        check(schema.clone(), given, Some(expected));
        check(schema, r#"{"\u0061":2}"#, None);
    }

    #[test]
    fn nested_objects_and_items_get_their_defaults() {
        let page = json!({ "type": "object", "properties": { "size": { "default": 20 } } });
        let schema = json!({ "properties": {
            "page": page,
            "sort": { "type": "array", "items": { "properties": { "up": { "default": true } } } },
            "pair": { "prefixItems": [{}, { "properties": { "n": { "default": 0 } } }] },
        } });
        check(schema.clone(), "{}", None);
        check(schema.clone(), r#"{"page":{}}"#, Some(r#"{"page":{"size":20}}"#));
        let given = r#"{"sort":[{"by":"a"},{"up":false},7]}"#;
        check(schema.clone(), given, Some(r#"{"sort":[{"by":"a","up":true},{"up":false},7]}"#));
        check(schema, r#"{"pair":[{},{}]}"#, Some(r#"{"pair":[{},{"n":0}]}"#));
        let map = json!({ "additionalProperties": page });
        check(map, r#"{"x":{}}"#, Some(r#"{"x":{"size":20}}"#));
        let old = json!({ "$schema": "http://json-schema.org/draft-07/schema#",
            "properties": { "p": { "items": [page], "additionalItems": page } } });
        check(old, r#"{"p":[{},{}]}"#, Some(r#"{"p":[{"size":20},{"size":20}]}"#));
    }

    #[test]
    fn references_and_all_of_always_apply() {
        let schema = json!({
            "$defs": {
                "unit": { "enum": ["C", "F"], "default": "C" },
                "more": { "properties": { "b": { "default": 2 } } },
            },
            "properties": { "unit": { "$ref": "#/$defs/unit" } },
            "allOf": [{ "$ref": "#/$defs/more" }, { "properties": { "c": { "default": 3 } } }],
        });
        check(schema, "{}", Some(r#"{"unit":"C","b":2,"c":3}"#));
        let old = json!({
            "$schema": "http://json-schema.org/draft-07/schema#",
            "definitions": { "n": { "type": "integer" } },
            "properties": { "n": { "$ref": "#/definitions/n", "default": 1 } },
        });
        check(old, "{}", None);
    }

    #[test]
    fn a_branch_applies_only_if_it_is_the_only_one() {
        let page = json!({ "type": "object", "properties": { "size": { "default": 20 } } });
        let nullable = json!({ "properties": { "page": { "anyOf": [page, { "type": "null" }] } } });
        check(nullable.clone(), r#"{"page":{}}"#, Some(r#"{"page":{"size":20}}"#));
        check(nullable, r#"{"page":null}"#, None);
        let either = json!({ "oneOf": [page, { "properties": { "n": { "default": 1 } } }] });
        check(either, "{}", None);
        let conditional = json!({ "if": true, "then": page, "not": page });
        check(conditional, "{}", None);
    }

    #[test]
    fn a_default_that_contradicts_its_schema_is_ignored() {
        let schema = json!({ "properties": {
            "a": { "type": "string", "default": null },
            "b": { "enum": [1, 2], "default": 3 },
            "c": { "type": ["integer", "null"], "default": null },
        } });
        check(schema, "{}", Some(r#"{"c":null}"#));
    }

    #[test]
    fn defaults_inside_of_defaults_end() {
        let schema = json!({ "properties": { "o": {
            "type": "object", "default": {}, "properties": { "n": { "default": 1 } }
        } } });
        check(schema, "{}", Some(r#"{"o":{"n":1}}"#));
        let tree = json!({ "$defs": { "node": {
            "type": "object", "properties": { "next": { "$ref": "#/$defs/node", "default": {} } }
        } }, "$ref": "#/$defs/node" });
        check(tree, "{}", Some(r#"{"next":{"next":{}}}"#));
    }

    #[test]
    fn defaults_are_limited_in_size() {
        let schema = json!({ "properties": { "list": { "items": {
            "properties": { "text": { "default": "x".repeat(100) } }
        } } } });
        let given = format!("{{\"list\":[{}]}}", vec!["{}"; 200].join(","));
        let schema = Schema::compile(&schema).unwrap();
        let refused = schema.with_defaults(&Json::parse(&given).unwrap(), 10_000);
        assert!(refused.is_err());
    }
}
