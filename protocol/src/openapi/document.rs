//! A document and the references within it.

use std::collections::HashSet;

use percent_encoding::percent_decode_str;
use serde_json::{Map, Value};

/// Maximum length of a chain of references.
const MAX_HOPS: usize = 16;
/// Maximum number of parts of a composed schema that are visited.
const MAX_PARTS: usize = 200;

/// One operation and its position in the document.
pub(super) struct DocumentOperation<'a> {
    pub(super) path: &'a str,
    pub(super) method: &'a str,
    pub(super) item: &'a Value,
    pub(super) operation: &'a Value,
}

/// A document that declares itself as OpenAPI 3.
pub(super) struct OpenApiDocument<'a> {
    pub(super) root: &'a Value,
    pub(super) title: &'a str,
    /// True for version 3.0, whose schemas differ from JSON Schema.
    pub(super) is_version_3_0: bool,
}

impl<'a> OpenApiDocument<'a> {
    pub(super) fn new(root: &'a Value) -> Result<Self, String> {
        if !root.is_object() {
            return Err("the document must be a mapping".to_owned());
        }
        let version = match &root["openapi"] {
            Value::String(version) => version.clone(),
            other => other.to_string(),
        };
        let old = version.starts_with("3.0");
        if !old && !version.starts_with("3.1") {
            let excerpt: String = version.chars().take(20).collect();
            return Err(match root.get("swagger") {
                Some(_) => "Swagger 2 is not supported; convert it to OpenAPI 3 first".to_owned(),
                None => format!("openapi must be 3.0 or 3.1, not {excerpt}"),
            });
        }
        let title = root["info"]["title"].as_str().unwrap_or("api");
        Ok(Self { root, title, is_version_3_0: old })
    }

    /// Returns the target of a reference within the document.
    pub(super) fn resolve_pointer(&self, reference: &str) -> Result<&'a Value, String> {
        let excerpt: String = reference.chars().take(120).collect();
        let Some(pointer) = reference.strip_prefix('#') else {
            return Err(format!("$ref \"{excerpt}\" points outside the document"));
        };
        // A pointer in a fragment is percent-encoded.
        let decoded = percent_decode_str(pointer).decode_utf8();
        let found = self.root.pointer(decoded.as_deref().unwrap_or(pointer));
        found.ok_or_else(|| format!("$ref \"{excerpt}\" leads nowhere"))
    }

    /// Follows references and returns the final target, or the value itself.
    pub(super) fn resolve<'b>(&self, node: &'b Value) -> Result<&'b Value, String>
    where
        'a: 'b,
    {
        let mut value = node;
        for _ in 0..MAX_HOPS {
            match value.get("$ref").and_then(Value::as_str) {
                Some(reference) => value = self.resolve_pointer(reference)?,
                None => return Ok(value),
            }
        }
        Err(format!("a chain of $ref is circular or longer than {MAX_HOPS}"))
    }

    /// Returns whether a schema has constraints besides its `$ref`. They count since 3.1.
    pub(super) fn has_ref_siblings(&self, schema: &Value) -> bool {
        const WORDS: [&str; 6] =
            ["$ref", "description", "title", "example", "examples", "deprecated"];
        let more = |fields: &Map<String, Value>| {
            fields.contains_key("$ref")
                && fields
                    .keys()
                    .any(|name| !WORDS.contains(&name.as_str()) && !name.starts_with("x-"))
        };
        !self.is_version_3_0 && schema.as_object().is_some_and(more)
    }

    /// Returns whether a property is read-only: it is not sent, even if it is listed as required.
    pub(super) fn is_read_only(&self, property: &Value) -> bool {
        let is_marked = |schema: &Value| schema["readOnly"] == Value::Bool(true);
        is_marked(property) || self.resolve(property).is_ok_and(is_marked)
    }

    /// Returns the names of an object's read-only properties, including those of its `allOf` parts.
    pub(super) fn read_only_names<'b>(&self, schema: &'b Value) -> Vec<String>
    where
        'a: 'b,
    {
        let (mut names, mut seen, mut pending) = (Vec::new(), HashSet::new(), vec![schema]);
        while let Some(schema) = pending.pop() {
            // Ends cycles, and limits very large schemas.
            if seen.len() >= MAX_PARTS || !seen.insert(std::ptr::from_ref(schema)) {
                continue;
            }
            let properties = schema["properties"].as_object().into_iter().flatten();
            let read_only = properties.filter(|(_, property)| self.is_read_only(property));
            names.extend(read_only.map(|(name, _)| name.clone()));
            pending.extend(
                schema["$ref"].as_str().and_then(|reference| self.resolve_pointer(reference).ok()),
            );
            pending.extend(schema["allOf"].as_array().into_iter().flatten());
        }
        names
    }
}
