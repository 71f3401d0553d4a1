//! Describes tools in the formats of model APIs, ready for a request. Schemas are written with the
//! keywords that common clients can parse.

use std::borrow::Cow;
use std::str::FromStr;

use serde::Serialize;
use serde_json::Value;

use super::to_json;
use crate::domain::json::Json;
use crate::domain::tool::{Effect, Executor, ToolDefinition};
use crate::schema::{to_model_schema, to_portable_schema};

/// The format of a tool description.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ToolFormat {
    /// OpenAI chat completions: `tools` of a request.
    OpenAi,
    /// OpenAI Responses: `tools` of a request.
    OpenAiResponses,
    /// Anthropic messages: `tools` of a request.
    Anthropic,
    /// Model Context Protocol: `tools` in the result of `tools/list`.
    Mcp,
}

impl ToolFormat {
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

impl FromStr for ToolFormat {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        Self::ALL.into_iter().find(|format| format.as_str() == text).ok_or(())
    }
}

#[derive(Serialize)]
struct FunctionDefinition<'a> {
    name: &'a str,
    description: &'a str,
    parameters: Json,
}

#[derive(Serialize)]
struct OpenAiTool<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    function: FunctionDefinition<'a>,
}

#[derive(Serialize)]
struct ResponsesTool<'a> {
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
struct AnthropicTool<'a> {
    name: &'a str,
    description: &'a str,
    input_schema: Json,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct McpTool<'a> {
    name: &'a str,
    /// The tool's name for people.
    title: &'a str,
    description: &'a str,
    input_schema: Json,
    #[serde(skip_serializing_if = "Option::is_none")]
    output_schema: Option<&'a Json>,
    annotations: ToolAnnotations,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ToolAnnotations {
    read_only_hint: bool,
    destructive_hint: bool,
    idempotent_hint: bool,
}

/// Describes a tool in a format, under a given name.
///
/// In the formats of model APIs, the description of an asynchronous tool says so. MCP has a field
/// of its own for that.
pub fn describe_tool(format: ToolFormat, name: &str, tool: &ToolDefinition) -> Json {
    let parameters = match format {
        ToolFormat::Mcp => mcp_schema(tool, &tool.input_schema),
        _ => to_model_schema(&tool.input_schema),
    };
    let parameters = with_object_type(&parameters);
    let description = match format {
        ToolFormat::Mcp => Cow::Borrowed(tool.description.as_str()),
        _ => describe_for_model(tool),
    };
    let description = &*description;
    match format {
        ToolFormat::OpenAi => {
            let function = FunctionDefinition { name, description, parameters };
            to_json(&OpenAiTool { kind: "function", function })
        }
        ToolFormat::OpenAiResponses => {
            let (kind, strict) = ("function", false);
            to_json(&ResponsesTool { kind, name, description, parameters, strict })
        }
        ToolFormat::Anthropic => {
            to_json(&AnthropicTool { name, description, input_schema: parameters })
        }
        ToolFormat::Mcp => to_json(&McpTool {
            name,
            title: &tool.name,
            description,
            input_schema: parameters,
            output_schema: tool.output_schema.as_ref().filter(|schema| describes_object(schema)),
            annotations: ToolAnnotations {
                read_only_hint: tool.effect == Effect::Read,
                destructive_hint: tool.effect != Effect::Read,
                idempotent_hint: tool.effect != Effect::Irreversible,
            },
        }),
    }
}

/// Returns a schema of a tool for MCP clients. The schema of another party keeps the dialect that
/// it names. Toolcrib's own schemas have the default one, which needs no mention.
pub fn mcp_schema(tool: &ToolDefinition, schema: &Json) -> Json {
    match tool.executor == Executor::BUILTIN {
        true => to_model_schema(schema),
        false => to_portable_schema(schema),
    }
}

/// Marks a tool that runs in the background, at the end of its description.
const ASYNC_MARK: &str = "(async: accepted at once, the result comes later)";

fn describe_for_model(tool: &ToolDefinition) -> Cow<'_, str> {
    match (tool.background, tool.description.trim_end()) {
        (false, _) => Cow::Borrowed(tool.description.as_str()),
        (true, "") => Cow::Borrowed(ASYNC_MARK),
        (true, description) => Cow::Owned(format!("{description} {ASYNC_MARK}")),
    }
}

/// Returns whether a model can call the tool, because models always pass an object as arguments.
pub fn accepts_object(tool: &ToolDefinition) -> bool {
    match tool.input_schema.to_value().get("type") {
        Some(Value::String(kind)) => kind == "object",
        Some(Value::Array(kinds)) => kinds.iter().any(|kind| kind == "object"),
        _ => true,
    }
}

/// Returns the schema with `"type": "object"`. Adds or narrows the type if needed, because the APIs
/// require it and arguments from a model are always an object.
fn with_object_type(schema: &Json) -> Json {
    match schema.to_value() {
        Value::Object(map) if map.get("type").is_some_and(|kind| kind == "object") => {
            schema.clone()
        }
        Value::Object(mut map) => {
            map.insert("type".into(), "object".into());
            Json::from_value(&Value::Object(map))
        }
        _ => Json::from_value(&serde_json::json!({ "type": "object" })),
    }
}

/// Returns whether a schema describes an object. MCP allows structured results only for objects.
fn describes_object(schema: &Json) -> bool {
    schema.to_value().get("type").is_some_and(|kind| kind == "object")
}
