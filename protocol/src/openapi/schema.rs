//! Translates the schemas of an OpenAPI document to JSON Schema: references into the document
//! become references to `$defs`, and the dialect of OpenAPI 3.0 is converted.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::document::OpenApiDocument;

/// Maximum number of schemas that one tool may refer to.
const MAX_DEFS: usize = 400;
/// Maximum nesting depth of a schema.
const MAX_DEPTH: usize = 64;

/// Translates the schemas of one operation, which share their definitions.
pub(super) struct SchemaTranslator<'a> {
    document: &'a OpenApiDocument<'a>,
    /// For each reference: the name in `$defs`, and the schema once it is translated.
    defs: BTreeMap<String, (String, Option<Value>)>,
}

impl<'a> SchemaTranslator<'a> {
    pub(super) fn new(document: &'a OpenApiDocument<'a>) -> Self {
        Self { document, defs: BTreeMap::new() }
    }

    /// Translates one schema.
    pub(super) fn translate(&mut self, schema: &Value) -> Result<Value, String> {
        self.translate_at(schema, 0, &[])
    }

    /// Returns the definitions that the translated schemas refer to.
    pub(super) fn into_defs(self) -> Map<String, Value> {
        self.defs.into_values().filter_map(|(name, schema)| Some((name, schema?))).collect()
    }

    /// Translates a schema at this depth. `read_only` has the names of the read-only properties of
    /// the composed schema that it is a part of: no request contains them, so none is required.
    fn translate_at(
        &mut self,
        schema: &Value,
        depth: usize,
        read_only: &[String],
    ) -> Result<Value, String> {
        if depth > MAX_DEPTH {
            return Err(format!("a schema is deeper than {MAX_DEPTH}"));
        }
        let Value::Object(fields) = schema else { return Ok(schema.clone()) };
        let mut output = Map::new();
        if let Some(reference) = fields.get("$ref").and_then(Value::as_str) {
            let name = self.define_reference(reference, depth)?;
            output.insert("$ref".into(), format!("#/$defs/{name}").into());
            // OpenAPI 3.0 ignores the siblings of `$ref`; 3.1 does not.
            if self.document.is_version_3_0 {
                return Ok(Value::Object(output));
            }
        }
        let mut read_only = read_only.to_vec();
        read_only.extend(self.document.read_only_names(schema));
        for (name, value) in fields {
            let value = match name.as_str() {
                "$ref" if output.contains_key("$ref") => continue,
                "required" => match required_without(value, &read_only) {
                    Some(value) => value,
                    None => continue,
                },
                // Models do not need these: they are for people and other programs.
                "example" | "xml" | "externalDocs" | "discriminator" | "$schema" | "$id" => {
                    continue;
                }
                "properties" | "patternProperties" | "$defs" | "definitions"
                | "dependentSchemas" => self.translate_map(value, depth)?,
                "items"
                | "additionalProperties"
                | "not"
                | "if"
                | "then"
                | "else"
                | "contains"
                | "propertyNames"
                | "unevaluatedProperties"
                | "unevaluatedItems" => self.translate_at(value, depth + 1, &[])?,
                "allOf" | "anyOf" | "oneOf" => self.translate_list(value, depth, &read_only)?,
                "prefixItems" => self.translate_list(value, depth, &[])?,
                name if name.starts_with("x-") => continue,
                _ => value.clone(),
            };
            output.insert(name.clone(), value);
        }
        if self.document.is_version_3_0 {
            upgrade_from_3_0(&mut output);
        }
        // Models send an empty array if the schema has no `items`, so the schema says that any item
        // is allowed.
        if output.get("type") == Some(&json!("array")) && !output.contains_key("items") {
            output.insert("items".into(), json!({ "description": "anything" }));
        }
        Ok(Value::Object(output))
    }

    fn translate_list(
        &mut self,
        schemas: &Value,
        depth: usize,
        read_only: &[String],
    ) -> Result<Value, String> {
        let Value::Array(schemas) = schemas else { return Ok(schemas.clone()) };
        let translated =
            schemas.iter().map(|schema| self.translate_at(schema, depth + 1, read_only));
        translated.collect::<Result<_, _>>().map(Value::Array)
    }

    fn translate_map(&mut self, schemas: &Value, depth: usize) -> Result<Value, String> {
        let Value::Object(schemas) = schemas else { return Ok(schemas.clone()) };
        let translated = schemas
            .iter()
            .map(|(name, schema)| Ok((name.clone(), self.translate_at(schema, depth + 1, &[])?)));
        translated.collect::<Result<Map<_, _>, String>>().map(Value::Object)
    }

    /// Returns the name in `$defs` for a reference, and translates its schema on the first use. The
    /// name is recorded before the schema is translated, so that a schema can refer to itself.
    fn define_reference(&mut self, reference: &str, depth: usize) -> Result<String, String> {
        if let Some((name, _)) = self.defs.get(reference) {
            return Ok(name.clone());
        }
        let target = self.document.resolve_pointer(reference)?;
        if self.defs.len() >= MAX_DEFS {
            return Err(format!("its schemas refer to more than {MAX_DEFS} others"));
        }
        let last = reference.rsplit('/').next().unwrap_or("schema");
        let sanitize = |c: char| if c.is_ascii_alphanumeric() { c } else { '_' };
        let base: String = last.chars().map(sanitize).collect();
        let is_used = |name: &str| self.defs.values().any(|(existing, _)| existing == name);
        let mut name = base.clone();
        let mut suffix = 2;
        while is_used(&name) {
            name = format!("{base}_{suffix}");
            suffix += 1;
        }
        self.defs.insert(reference.to_owned(), (name.clone(), None));
        let output = self.translate_at(target, depth + 1, &[])?;
        self.defs.insert(reference.to_owned(), (name.clone(), Some(output)));
        Ok(name)
    }
}

/// Returns the required names without read-only ones, or `None` if no name is left.
fn required_without(required: &Value, read_only: &[String]) -> Option<Value> {
    let Value::Array(names) = required else { return Some(required.clone()) };
    let is_read_only =
        |name: &Value| name.as_str().is_some_and(|n| read_only.iter().any(|r| r == n));
    let remaining: Vec<Value> = names.iter().filter(|name| !is_read_only(name)).cloned().collect();
    (!remaining.is_empty() || names.is_empty()).then_some(Value::Array(remaining))
}

/// Converts OpenAPI 3.0's `nullable`, and its boolean `exclusiveMinimum` and `exclusiveMaximum`, to
/// JSON Schema.
fn upgrade_from_3_0(schema: &mut Map<String, Value>) {
    for (exclusive, limit) in [("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")] {
        match schema.get(exclusive) {
            Some(Value::Bool(true)) => match schema.remove(limit) {
                Some(value) => schema.insert(exclusive.into(), value),
                None => schema.remove(exclusive),
            },
            Some(Value::Bool(false)) => schema.remove(exclusive),
            _ => None,
        };
    }
    if schema.remove("nullable") != Some(Value::Bool(true)) {
        return;
    }
    if let Some(Value::String(kind)) = schema.get("type").cloned() {
        schema.insert("type".into(), json!([kind, "null"]));
    }
    if let Some(Value::Array(values)) = schema.get_mut("enum")
        && !values.contains(&Value::Null)
    {
        values.push(Value::Null);
    }
}
