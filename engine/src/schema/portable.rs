//! Rewrites schemas with the keywords that common clients can parse. The rewritten schema accepts
//! the same values. Pure.
//!
//! Libraries that build types from a schema (LlamaIndex, Google ADK, the OpenAI SDKs) fail on parts
//! of JSON Schema that are valid: `true` in place of a schema, a list of types, and formats that
//! only some generators write. Calls are validated with the schema as it was registered.

use serde_json::{Map, Value, json};

use crate::domain::json::Json;

/// Keywords whose value is one schema.
const SCHEMA_KEYWORDS: [&str; 10] = [
    "items",
    "contains",
    "propertyNames",
    "not",
    "if",
    "then",
    "else",
    "additionalItems",
    "unevaluatedItems",
    "contentSchema",
];

/// Keywords whose value is one schema or, with a meaning that clients know, true or false.
const OPEN_KEYWORDS: [&str; 2] = ["additionalProperties", "unevaluatedProperties"];

/// Keywords whose value is a list of schemas.
const LIST_KEYWORDS: [&str; 4] = ["anyOf", "oneOf", "allOf", "prefixItems"];

/// Keywords whose value has a schema per name.
const MAP_KEYWORDS: [&str; 5] =
    ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas"];

/// Keywords that describe a schema and restrict nothing.
const ANNOTATIONS: [&str; 8] = [
    "title",
    "description",
    "default",
    "examples",
    "deprecated",
    "readOnly",
    "writeOnly",
    "$comment",
];

/// Returns a schema that accepts the same values, with keywords that common clients can parse:
///
/// - an empty schema in place of `true`, and `{"not": {}}` in place of `false`;
/// - alternatives (`anyOf`) in place of a list of types;
/// - no `format` of an integer's width, such as `uint64`, which restricts nothing.
///
/// A `$schema` stays: MCP clients validate with the dialect that it names.
///
/// ```
/// use serde_json::json;
/// use toolcrib::Json;
/// use toolcrib::schema::to_portable_schema;
/// let list = Json::from_value(&json!({ "type": "array", "items": true }));
/// assert_eq!(to_portable_schema(&list).to_value(), json!({ "type": "array", "items": {} }));
/// ```
pub fn to_portable_schema(schema: &Json) -> Json {
    let original = schema.to_value();
    let mut portable = original.clone();
    if let Value::Object(root) = &mut portable {
        // The root describes arguments or a result as a whole; its type is not an alternative.
        rewrite_subschemas(root);
    }
    match portable == original {
        true => schema.clone(),
        false => Json::from_value(&portable),
    }
}

/// Returns a portable schema for the API of a language model: without `$schema`, which says nothing
/// to a model, and which Gemini refuses.
pub fn to_model_schema(schema: &Json) -> Json {
    let portable = to_portable_schema(schema);
    let mut value = portable.to_value();
    match value.as_object_mut().and_then(|root| root.remove("$schema")) {
        Some(_) => Json::from_value(&value),
        None => portable,
    }
}

fn rewrite(schema: &mut Value) {
    match schema {
        Value::Bool(true) => *schema = json!({}),
        Value::Bool(false) => *schema = json!({ "not": {} }),
        Value::Object(map) => {
            rewrite_subschemas(map);
            if let Some(alternatives) = split_types(map) {
                *schema = Value::Object(alternatives);
            }
        }
        _ => {}
    }
}

/// Rewrites the schemas inside of this one, and removes its format if that only names the width of
/// an integer.
fn rewrite_subschemas(map: &mut Map<String, Value>) {
    if map.get("format").and_then(Value::as_str).is_some_and(is_integer_width) {
        map.remove("format");
    }
    for (keyword, value) in map.iter_mut() {
        let keyword = keyword.as_str();
        match value {
            // A list of schemas in `items` is the form of older dialects.
            Value::Array(list) if LIST_KEYWORDS.contains(&keyword) || keyword == "items" => {
                list.iter_mut().for_each(rewrite);
            }
            Value::Object(schemas) if MAP_KEYWORDS.contains(&keyword) => {
                schemas.values_mut().for_each(rewrite);
            }
            value if SCHEMA_KEYWORDS.contains(&keyword) => rewrite(value),
            Value::Object(_) if OPEN_KEYWORDS.contains(&keyword) => rewrite(value),
            _ => {}
        }
    }
}

fn is_integer_width(format: &str) -> bool {
    let width = format.trim_start_matches('u').strip_prefix("int");
    // Gemini knows int32 and int64.
    !matches!(format, "int32" | "int64")
        && width.is_some_and(|width| width.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Returns the schema with an alternative per type in place of a list of types.
fn split_types(map: &Map<String, Value>) -> Option<Map<String, Value>> {
    let types = map.get("type")?.as_array()?;
    // The value of an argument that a header repeats must have one type at this level.
    let is_fixed = map.contains_key("anyOf") || map.contains_key("x-mcp-header");
    if is_fixed || types.is_empty() {
        return None;
    }
    let is_annotation =
        |keyword: &String| ANNOTATIONS.contains(&keyword.as_str()) || keyword.starts_with("x-");
    let mut outer: Map<String, Value> =
        map.iter().filter(|(key, _)| is_annotation(key)).map(clone_pair).collect();
    let rules: Map<String, Value> =
        map.iter().filter(|(key, _)| !is_annotation(key)).map(clone_pair).collect();
    let mut alternatives: Vec<Value> =
        types.iter().filter_map(|kind| alternative(&rules, kind.as_str()?)).collect();
    match alternatives.len() {
        0 => return None,
        1 => outer.extend(alternatives.remove(0).as_object().cloned().unwrap_or_default()),
        _ => drop(outer.insert("anyOf".to_owned(), alternatives.into())),
    }
    Some(outer)
}

fn clone_pair((key, value): (&String, &Value)) -> (String, Value) {
    (key.clone(), value.clone())
}

/// Returns the alternative of one type, or `None` if the listed values have none of it.
fn alternative(rules: &Map<String, Value>, kind: &str) -> Option<Value> {
    let mut rules = rules.clone();
    rules.insert("type".to_owned(), kind.into());
    if let Some(Value::Array(listed)) = rules.get_mut("enum") {
        listed.retain(|value| value.is_null() == (kind == "null"));
        if listed.is_empty() {
            return None;
        }
    }
    // No other keyword restricts null.
    if kind == "null" && !rules.contains_key("const") {
        return Some(json!({ "type": "null" }));
    }
    Some(Value::Object(rules))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn portable(schema: &Value) -> Value {
        to_portable_schema(&Json::from_value(schema)).to_value()
    }

    #[test]
    fn schemas_are_rewritten_for_common_clients() {
        let schema = json!({
            "type": "object", "additionalProperties": false,
            "properties": {
                "params": { "type": "array", "items": true },
                "limit": { "type": ["integer", "null"], "format": "uint", "minimum": 0,
                    "description": "How many", "default": null },
                "side": { "type": ["string", "null"], "enum": ["a", "b", null] },
                "one": { "type": ["string"], "maxLength": 3 },
                "never": false,
                "free": { "type": "object", "additionalProperties": true },
                "when": { "type": "string", "format": "date-time" },
                "big": { "type": "integer", "format": "int64" },
                "any": { "anyOf": [true, { "type": "integer", "format": "uint8" }] },
                "kept": { "const": true, "default": { "items": true } },
            },
            "$defs": { "x": { "items": true } },
        });
        let expected = json!({
            "type": "object", "additionalProperties": false,
            "properties": {
                "params": { "type": "array", "items": {} },
                "limit": { "description": "How many", "default": null,
                    "anyOf": [{ "type": "integer", "minimum": 0 }, { "type": "null" }] },
                "side": { "anyOf": [
                    { "type": "string", "enum": ["a", "b"] }, { "type": "null" } ] },
                "one": { "type": "string", "maxLength": 3 },
                "never": { "not": {} },
                "free": { "type": "object", "additionalProperties": true },
                "when": { "type": "string", "format": "date-time" },
                "big": { "type": "integer", "format": "int64" },
                "any": { "anyOf": [{}, { "type": "integer" }] },
                "kept": { "const": true, "default": { "items": true } },
            },
            "$defs": { "x": { "items": {} } },
        });
        assert_eq!(portable(&schema), expected);
    }

    #[test]
    fn only_models_get_schemas_without_their_dialect() {
        for dialect in [
            "https://json-schema.org/draft/2020-12/schema",
            "http://json-schema.org/draft-07/schema#",
        ] {
            let schema = json!({ "$schema": dialect, "type": "object" });
            assert_eq!(portable(&schema), schema);
            let for_model = to_model_schema(&Json::from_value(&schema)).to_value();
            assert_eq!(for_model, json!({ "type": "object" }));
        }
    }

    #[test]
    fn a_portable_schema_keeps_its_text() {
        let text = r#"{"type":"object", "properties":{"a":{"type":"string"}}}"#;
        let schema: Json = serde_json::from_str(text).unwrap_or_else(|_| Json::empty_object());
        assert_eq!(to_portable_schema(&schema).text(), schema.text());
        let mirrored = json!({ "properties": {
            "region": { "type": ["string", "null"], "x-mcp-header": "Region" } } });
        assert_eq!(portable(&mirrored), mirrored);
    }
}
