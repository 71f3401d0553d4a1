//! A document and the references within it.

use percent_encoding::percent_decode_str;
use serde_json::Value;

/// How often a reference may lead to another.
const MAX_HOPS: usize = 16;

/// A document that says it is OpenAPI 3.
pub(super) struct Document<'a> {
    pub(super) root: &'a Value,
    pub(super) title: &'a str,
    /// Whether its schemas are those of 3.0, which are not quite JSON Schema.
    pub(super) old: bool,
}

impl<'a> Document<'a> {
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
            let shown: String = version.chars().take(20).collect();
            return Err(match root.get("swagger") {
                Some(_) => "Swagger 2 is not read; convert it to OpenAPI 3 first".to_owned(),
                None => format!("openapi must be 3.0 or 3.1, not {shown}"),
            });
        }
        let title = root["info"]["title"].as_str().unwrap_or("api");
        Ok(Self { root, title, old })
    }

    /// What a reference within the document leads to.
    pub(super) fn find(&self, reference: &str) -> Result<&'a Value, String> {
        let shown: String = reference.chars().take(120).collect();
        let Some(pointer) = reference.strip_prefix('#') else {
            return Err(format!("$ref \"{shown}\" leads out of the document"));
        };
        // A pointer in a fragment is percent-encoded.
        let decoded = percent_decode_str(pointer).decode_utf8();
        let found = self.root.pointer(decoded.as_deref().unwrap_or(pointer));
        found.ok_or_else(|| format!("$ref \"{shown}\" leads nowhere"))
    }

    /// The same, or what it refers to.
    pub(super) fn resolved(&self, given: &'a Value) -> Result<&'a Value, String> {
        let mut value = given;
        for _ in 0..MAX_HOPS {
            match value.get("$ref").and_then(Value::as_str) {
                Some(reference) => value = self.find(reference)?,
                None => return Ok(value),
            }
        }
        Err(format!("a $ref leads on more than {MAX_HOPS} times, or in a circle"))
    }
}
