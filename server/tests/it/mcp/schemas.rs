//! Schemas that common clients can parse: every schema that the server offers is within the subsets
//! of OpenAI's strict mode, Gemini and LlamaIndex.

use serde_json::{Map, Value, json};

use crate::support::Server;
use crate::support::api::{offer, offer_with};
use crate::support::mcp::Mcp;

/// Keywords that OpenAI's strict mode knows.
const OPENAI_KEYWORDS: [&str; 24] = [
    "type",
    "properties",
    "required",
    "additionalProperties",
    "items",
    "enum",
    "const",
    "anyOf",
    "$ref",
    "$defs",
    "description",
    "title",
    "default",
    "format",
    "pattern",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
    "minItems",
    "maxItems",
    "minLength",
    "maxLength",
];

/// Formats that OpenAI's strict mode or Gemini know.
const KNOWN_FORMATS: [&str; 14] = [
    "date-time",
    "date",
    "time",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uuid",
    "int32",
    "int64",
    "float",
    "double",
    "enum",
];

/// Collects the problems that a client has with a schema.
struct SchemaLint<'a> {
    root: &'a Value,
    problems: Vec<String>,
}

impl<'a> SchemaLint<'a> {
    fn problems(root: &'a Value) -> Vec<String> {
        let mut lint = Self { root, problems: Vec::new() };
        if root["type"] != "object" {
            lint.problems.push("the root is not an object".to_owned());
        }
        lint.check(root, "", 1);
        lint.problems
    }

    fn report(&mut self, path: &str, problem: &str) {
        self.problems.push(format!("{path}: {problem}"));
    }

    fn check(&mut self, schema: &Value, path: &str, depth: usize) {
        let Value::Object(schema) = schema else {
            // Python libraries call `.get` on it.
            return self.report(path, "a schema that is not an object");
        };
        if depth > 10 {
            self.report(path, "nested more than ten levels, which OpenAI refuses");
        }
        self.check_keywords(schema, path);
        for (name, property) in
            schema.get("properties").and_then(Value::as_object).into_iter().flatten()
        {
            self.check(property, &format!("{path}/{name}"), depth + 1);
        }
        for keyword in ["items", "not"] {
            if let Some(inner) = schema.get(keyword) {
                self.check(inner, &format!("{path}/{keyword}"), depth + 1);
            }
        }
        if let Some(inner @ Value::Object(_)) = schema.get("additionalProperties") {
            self.check(inner, &format!("{path}/*"), depth + 1);
        }
        for inner in schema.get("anyOf").and_then(Value::as_array).into_iter().flatten() {
            self.check(inner, &format!("{path}/anyOf"), depth);
        }
        for (name, inner) in schema.get("$defs").and_then(Value::as_object).into_iter().flatten() {
            self.check(inner, &format!("#{name}"), depth + 1);
        }
    }

    fn check_keywords(&mut self, schema: &Map<String, Value>, path: &str) {
        for keyword in schema.keys().filter(|keyword| !OPENAI_KEYWORDS.contains(&keyword.as_str()))
        {
            self.report(path, &format!("OpenAI's strict mode does not know {keyword}"));
        }
        if schema.get("type").is_some_and(|kind| !kind.is_string()) {
            // LlamaIndex looks the type up in a table; Gemini has one type per schema.
            self.report(path, "a list of types");
        }
        if let Some(format) = schema.get("format").and_then(Value::as_str)
            && !KNOWN_FORMATS.contains(&format)
        {
            self.report(path, &format!("the format {format}"));
        }
        if schema.get("type").is_some_and(|kind| kind == "array") && !schema.contains_key("items") {
            self.report(path, "an array without items, which Gemini refuses");
        }
        let values = schema.get("enum").and_then(Value::as_array).into_iter().flatten();
        if values.into_iter().any(|value| !value.is_string() && !value.is_number()) {
            self.report(path, "an enum of other values than texts and numbers");
        }
        if let Some(target) = schema.get("$ref").and_then(Value::as_str) {
            let found = target.strip_prefix('#').and_then(|pointer| self.root.pointer(pointer));
            if found.is_none() || !target.starts_with("#/$defs/") {
                self.report(path, &format!("a reference to {target}"));
            }
        }
    }
}

#[test]
fn the_lint_finds_what_clients_cannot_parse() {
    let bad = json!({ "type": "object", "properties": {
        "a": { "type": "array", "items": true },
        "b": { "type": ["integer", "null"] },
        "c": { "type": "integer", "format": "uint" },
        "d": { "oneOf": [] },
        "e": { "$ref": "#/definitions/x" },
        "f": { "type": "array" },
    } });
    assert_eq!(SchemaLint::problems(&bad).len(), 6, "{:?}", SchemaLint::problems(&bad));
    let good = json!({ "type": "object", "properties": { "a": { "type": "string" } } });
    assert!(SchemaLint::problems(&good).is_empty());
}

/// A tool of a client whose schema is valid and that few clients can parse.
fn generated_tool() -> Value {
    offer_with(
        "list.rows",
        json!({ "effect": "read", "schema": {
            "$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object",
            "properties": {
                "values": { "type": "array", "items": true },
                "limit": { "type": ["integer", "null"], "format": "uint32", "minimum": 0 },
                "anything": true,
            },
        } }),
    )
}

#[tokio::test]
async fn every_offered_schema_is_within_the_subsets_of_common_clients() {
    let server = Server::start().await;
    let api = server.api();
    api.register("pc_1", json!([offer("plain.one"), generated_tool()])).await;
    let mut schemas: Vec<(String, Value)> = Vec::new();
    for path in ["/mcp?catalogue=full", "/mcp?catalogue=search"] {
        for tool in Mcp::modern(&api).with_path(path).tools().await {
            schemas.push((format!("{path} {}", tool["name"]), tool["inputSchema"].clone()));
        }
    }
    for (format, schema) in [
        ("openai", "/function/parameters"),
        ("openai_responses", "/parameters"),
        ("anthropic", "/input_schema"),
        ("mcp", "/inputSchema"),
    ] {
        let listed = api.get(&format!("/v1/tools?format={format}")).await.is(200);
        for tool in listed["tools"].as_array().unwrap() {
            let schema = tool.pointer(schema).unwrap_or_else(|| panic!("{format}: {tool}"));
            schemas.push((format!("{format} {tool}"), schema.clone()));
        }
    }
    assert!(schemas.len() > 30, "{}", schemas.len());
    for (tool, schema) in &mut schemas {
        let dialect = schema.as_object_mut().unwrap().remove("$schema");
        // Gemini refuses the keyword, and MCP clients validate with the dialect that it names.
        let is_kept = tool.contains("list__rows\"") && tool.starts_with("/mcp")
            || tool.starts_with("mcp ") && tool.contains("list__rows");
        assert_eq!(dialect.is_some(), is_kept, "{tool}");
    }
    let problems: Vec<String> = schemas
        .iter()
        .map(|(tool, schema)| (tool, SchemaLint::problems(schema)))
        .filter(|(_, problems)| !problems.is_empty())
        .map(|(tool, problems)| format!("{tool}: {problems:?}"))
        .collect();
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

#[tokio::test]
async fn a_rewritten_schema_accepts_the_same_arguments() {
    let server = Server::start().await;
    let api = server.api();
    api.register("pc_1", json!([generated_tool()])).await;
    let client = Mcp::modern(&api).with_path("/mcp?wait_ms=0");
    let tools = client.tools().await;
    let tool = tools.iter().find(|tool| tool["name"] == "list__rows").unwrap();
    let limit = &tool["inputSchema"]["properties"]["limit"];
    assert_eq!(limit["anyOf"][1]["type"], "null", "{tool}");
    let fine = json!({ "values": [1, "a"], "limit": null, "anything": {} });
    let accepted = client.call("list__rows", fine).await.result();
    assert_eq!(accepted["structuredContent"]["status"], "PENDING", "{accepted}");
    let refused = client.call("list__rows", json!({ "limit": -1 })).await.result();
    assert_eq!(refused["isError"], true, "{refused}");
}
