//! Definitions of the fixture tools, and the values they use.

use std::sync::Arc;

use rmcp::model::{Tool, ToolAnnotations};
use serde_json::{Map, Value, json};
use toolcrib::{Effect, Executor, Json, Risk, ToolDefinition};

/// Name of the upstream; the suite sees only its tools.
pub const SUITE: &str = "suite";

/// An image of one red pixel.
pub const IMAGE: &str = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8DwHwAFBQIAX8jx0gAAAABJRU5ErkJggg==";

/// A sound of zero length.
pub const SOUND: &str = "UklGRiQAAABXQVZFZm10IBAAAAABAAEAQB8AAEAfAAABAAgAZGF0YQAAAAA=";

fn object_of(properties: Value, required: &[&str]) -> Value {
    json!({ "type": "object", "properties": properties, "required": required })
}

/// Returns the tools of the upstream.
pub fn offered() -> Vec<Tool> {
    let nothing = || object_of(json!({}), &[]);
    let text = |name: &str| object_of(json!({ name: { "type": "string" } }), &[name]);
    let mut tools: Vec<(&str, Value)> = [
        "test_simple_text",
        "test_image_content",
        "test_audio_content",
        "test_embedded_resource",
        "test_multiple_content_types",
        "test_tool_with_progress",
        "test_error_handling",
        "test_streaming_elicitation",
        "test_elicitation_sep1034_defaults",
        "test_elicitation_sep1330_enums",
        "test_input_required_result_elicitation",
        "test_input_required_result_sampling",
        "test_input_required_result_list_roots",
        "test_input_required_result_request_state",
        "test_input_required_result_multiple_inputs",
        "test_input_required_result_multi_round",
        "test_input_required_result_tampered_state",
        "test_input_required_result_capabilities",
        "test_trigger_tool_change",
        "test_trigger_prompt_change",
    ]
    .map(|name| (name, nothing()))
    .into();
    tools.push(("test_sampling", text("prompt")));
    tools.push(("test_elicitation", text("message")));
    tools.push(("greet", text("name")));
    tools.push(("json_schema_2020_12_tool", keywords()));
    tools.push(("test_custom_headers", mirrored()));
    tools.into_iter().map(|(name, schema)| described(name, schema)).collect()
}

/// Returns a tool as an MCP server describes it.
pub fn described(name: &str, schema: Value) -> Tool {
    let words = format!("{name}: for the conformance suite");
    Tool::new(name.to_owned(), words, Arc::new(object(schema)))
        .with_annotations(ToolAnnotations::new().idempotent(true))
}

/// Returns a tool of the local source, under the upstream's name.
fn tool(name: &str, schema: Value) -> ToolDefinition {
    ToolDefinition {
        project: None,
        name: format!("{SUITE}.{name}"),
        description: format!("{name}: for the conformance suite"),
        executor: Executor::MCP,
        input_schema: Json::from_value(&schema),
        output_schema: None,
        timeout_ms: 120_000,
        background: false,
        effect: Effect::Idempotent,
        risk: Risk::Low,
        policy: Default::default(),
        fallback: Vec::new(),
        binding: None,
        metadata: None,
    }
}

fn plain(name: &str) -> ToolDefinition {
    tool(name, object_of(json!({}), &[]))
}

fn background(mut definition: ToolDefinition) -> ToolDefinition {
    definition.background = true;
    definition
}

fn saying(mut definition: ToolDefinition, metadata: Value) -> ToolDefinition {
    definition.metadata = Some(Json::from_value(&metadata));
    definition
}

/// Returns the tools of the local source, with behavior that MCP cannot express for an upstream's
/// tools: they are always tasks, require a capability of the MCP client, fail as Toolcrib itself
/// does, or log.
pub fn own_tools() -> Vec<ToolDefinition> {
    let mut tools: Vec<ToolDefinition> =
        ["test_tool_with_logging", "test_logging_tool", "test_tool_with_task"].map(plain).into();
    let sampling = json!({ "client_capabilities": { "sampling": {} } });
    tools.push(saying(plain("test_missing_capability"), sampling));
    let slow = json!({ "seconds": { "type": "number" }, "label": { "type": "string" } });
    tools.push(background(tool("slow_compute", object_of(slow, &[]))));
    let only = json!({ "task_support": "required" });
    tools.push(saying(background(plain("failing_job")), only));
    tools.push(background(plain("protocol_error_job")));
    let file = json!({ "filename": { "type": "string" } });
    tools.push(background(tool("confirm_delete", object_of(file, &[]))));
    tools.push(background(plain("multi_input")));
    tools
}

fn keywords() -> Value {
    json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "$defs": { "address": { "$anchor": "addressDef", "type": "object", "properties": {
            "street": { "type": "string" }, "city": { "type": "string" } } } },
        "properties": {
            "name": { "type": "string" },
            "address": { "$ref": "#/$defs/address" },
            "contactMethod": { "type": "string", "enum": ["phone", "email"] },
            "phone": { "type": "string" },
            "email": { "type": "string" }
        },
        "allOf": [{ "anyOf": [{ "required": ["phone"] }, { "required": ["email"] }] }],
        "if": { "properties": { "contactMethod": { "const": "phone" } },
            "required": ["contactMethod"] },
        "then": { "required": ["phone"] },
        "else": { "required": ["email"] },
        "additionalProperties": false
    })
}

/// Schema of arguments that the MCP client repeats in headers.
fn mirrored() -> Value {
    json!({ "type": "object", "properties": {
        "region": { "type": "string", "x-mcp-header": "Region" },
        "priority": { "type": "integer", "x-mcp-header": "Priority" },
        "verbose": { "type": "boolean", "x-mcp-header": "Verbose" },
        "query": { "type": "string" }
    } })
}

/// Returns an elicitation for the user.
pub fn form_question(message: &str, properties: Value, required: &[&str]) -> Value {
    json!({ "method": "elicitation/create", "params": {
        "mode": "form",
        "message": message,
        "requestedSchema": { "type": "object", "properties": properties, "required": required },
    } })
}

/// Returns a sampling request for the user's model.
pub fn prompt(text: &str) -> Value {
    let message = json!({ "role": "user", "content": { "type": "text", "text": text } });
    json!({ "method": "sampling/createMessage",
        "params": { "messages": [message], "maxTokens": 100 } })
}

/// Returns a request for the roots of the MCP client.
pub fn roots() -> Value {
    json!({ "method": "roots/list", "params": {} })
}

/// Returns the requests that a tool makes first, or `None` if it makes none.
pub fn questions(tool: &str, args: &Value) -> Option<Map<String, Value>> {
    let name = || json!({ "name": { "type": "string" } });
    let ok = || json!({ "ok": { "type": "boolean" } });
    let argument = |key: &str| args[key].as_str().unwrap_or_default();
    let questions = match tool {
        "test_input_required_result_elicitation" | "test_streaming_elicitation" => {
            json!({ "user_name": form_question("What is your name?", name(), &["name"]) })
        }
        "test_tool_with_task" => {
            json!({ "user_name": form_question("What is your name?", name(), &["name"]) })
        }
        "test_input_required_result_sampling" => {
            json!({ "capital_question": prompt("What is the capital of France?") })
        }
        "test_input_required_result_list_roots" => json!({ "client_roots": roots() }),
        "test_input_required_result_request_state"
        | "test_input_required_result_tampered_state" => {
            json!({ "confirm": form_question("Please confirm", ok(), &["ok"]) })
        }
        "test_input_required_result_multiple_inputs" => json!({
            "user_name": form_question("What is your name?", name(), &["name"]),
            "greeting": prompt("Generate a greeting"),
            "client_roots": roots(),
        }),
        "test_input_required_result_multi_round" => {
            json!({ "step1": form_question("Step 1: What is your name?", name(), &["name"]) })
        }
        "test_input_required_result_capabilities" => json!({
            "user_name": form_question("What is your name?", name(), &["name"]),
            "greeting": prompt("Generate a greeting"),
        }),
        "test_sampling" => json!({ "answer": prompt(argument("prompt")) }),
        "test_elicitation" => {
            let fields = json!({
                "username": { "type": "string", "description": "User's response" },
                "email": { "type": "string", "description": "User's email address" },
            });
            json!({ "user": form_question(argument("message"), fields, &["username", "email"]) })
        }
        "test_elicitation_sep1034_defaults" => {
            json!({ "user": form_question("Defaults", defaults(), &[]) })
        }
        "test_elicitation_sep1330_enums" => {
            json!({ "user": form_question("Choices", choices(), &[]) })
        }
        "confirm_delete" => {
            let fields = json!({ "confirm": { "type": "boolean" } });
            json!({ "confirm": form_question("Delete it?", fields, &["confirm"]) })
        }
        "multi_input" => json!({
            "first": form_question("First?", name(), &[]),
            "second": form_question("Second?", name(), &[]),
        }),
        _ => return None,
    };
    Some(object(questions))
}

fn defaults() -> Value {
    json!({
        "name": { "type": "string", "default": "John Doe" },
        "age": { "type": "integer", "default": 30 },
        "score": { "type": "number", "default": 95.5 },
        "status": { "type": "string", "enum": ["active", "inactive", "pending"],
            "default": "active" },
        "verified": { "type": "boolean", "default": true },
    })
}

fn choices() -> Value {
    let titled = |first: &str| {
        json!([
            { "const": "value1", "title": format!("First {first}") },
            { "const": "value2", "title": format!("Second {first}") },
            { "const": "value3", "title": format!("Third {first}") },
        ])
    };
    let plain = json!(["option1", "option2", "option3"]);
    json!({
        "untitledSingle": { "type": "string", "enum": plain },
        "titledSingle": { "type": "string", "oneOf": titled("Option") },
        "legacyEnum": { "type": "string", "enum": ["opt1", "opt2", "opt3"],
            "enumNames": ["Option One", "Option Two", "Option Three"] },
        "untitledMulti": { "type": "array", "items": { "type": "string", "enum": plain } },
        "titledMulti": { "type": "array", "items": { "anyOf": titled("Choice") } },
    })
}

/// Returns the members of a JSON object.
pub fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(object) => object,
        _ => Map::new(),
    }
}
