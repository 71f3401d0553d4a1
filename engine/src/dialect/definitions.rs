//! Describes tools in the formats of model APIs, ready for a request.

use std::str::FromStr;

use serde::Serialize;
use serde_json::Value;

use super::written;
use crate::json::Json;
use crate::tool::{Definition, Effect};

/// The format of a tool description.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// OpenAI chat completions: `tools` of a request.
    OpenAi,
    /// OpenAI Responses: `tools` of a request.
    OpenAiResponses,
    /// Anthropic messages: `tools` of a request.
    Anthropic,
    /// Model Context Protocol: `tools` in the result of `tools/list`.
    Mcp,
}

impl Format {
    /// All formats.
    pub const ALL: [Self; 4] = [Self::OpenAi, Self::OpenAiResponses, Self::Anthropic, Self::Mcp];

    /// Returns the format's name on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::OpenAi => "openai",
            Self::OpenAiResponses => "openai_responses",
            Self::Anthropic => "anthropic",
            Self::Mcp => "mcp",
        }
    }
}

impl FromStr for Format {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        Self::ALL.into_iter().find(|format| format.as_str() == text).ok_or(())
    }
}

#[derive(Serialize)]
struct Function<'a> {
    name: &'a str,
    description: &'a str,
    parameters: Json,
}

#[derive(Serialize)]
struct OpenAi<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    function: Function<'a>,
}

#[derive(Serialize)]
struct Responses<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    name: &'a str,
    description: &'a str,
    parameters: Json,
    /// Always serialized: the API treats a missing field as strict, and most schemas are not
    /// written for strict mode.
    strict: bool,
}

#[derive(Serialize)]
struct Anthropic<'a> {
    name: &'a str,
    description: &'a str,
    input_schema: Json,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Mcp<'a> {
    name: &'a str,
    /// The tool's name for people.
    title: &'a str,
    description: &'a str,
    input_schema: Json,
    #[serde(skip_serializing_if = "Option::is_none")]
    output_schema: Option<&'a Json>,
    annotations: Annotations,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Annotations {
    read_only_hint: bool,
    destructive_hint: bool,
    idempotent_hint: bool,
}

/// Describes a tool in a format, under a given name.
pub fn definition(format: Format, name: &str, tool: &Definition) -> Json {
    let (description, parameters) = (tool.description.as_str(), object_schema(&tool.input_schema));
    match format {
        Format::OpenAi => {
            let function = Function { name, description, parameters };
            written(&OpenAi { kind: "function", function })
        }
        Format::OpenAiResponses => {
            let (kind, strict) = ("function", false);
            written(&Responses { kind, name, description, parameters, strict })
        }
        Format::Anthropic => written(&Anthropic { name, description, input_schema: parameters }),
        Format::Mcp => written(&Mcp {
            name,
            title: &tool.name,
            description,
            input_schema: parameters,
            output_schema: tool.output_schema.as_ref().filter(|schema| is_of_object(schema)),
            annotations: Annotations {
                read_only_hint: tool.effect == Effect::Read,
                destructive_hint: tool.effect != Effect::Read,
                idempotent_hint: tool.effect != Effect::Irreversible,
            },
        }),
    }
}

/// Returns whether a model can call the tool, because models always pass an object as arguments.
pub fn takes_object(tool: &Definition) -> bool {
    match tool.input_schema.value().get("type") {
        Some(Value::String(kind)) => kind == "object",
        Some(Value::Array(kinds)) => kinds.iter().any(|kind| kind == "object"),
        _ => true,
    }
}

/// Returns the schema with `"type": "object"`. Adds or narrows the type if needed, because the APIs
/// require it and arguments from a model are always an object.
fn object_schema(schema: &Json) -> Json {
    match schema.value() {
        Value::Object(map) if map.get("type").is_some_and(|kind| kind == "object") => {
            schema.clone()
        }
        Value::Object(mut map) => {
            map.insert("type".into(), "object".into());
            Json::of_value(&Value::Object(map))
        }
        _ => Json::of_value(&serde_json::json!({ "type": "object" })),
    }
}

/// Returns whether a schema describes an object. MCP allows structured results only for objects.
fn is_of_object(schema: &Json) -> bool {
    schema.value().get("type").is_some_and(|kind| kind == "object")
}
