//! Translates a conversation in chat format into a request of OpenAI's Responses API.
//!
//! With the API's own tool search, executed by the client, the search of the loop becomes a
//! `tool_search` tool, and its results carry the definitions of the tools that were found. The list
//! of tools then stays the same in every request, and the prompt cache holds.

use std::collections::HashSet;

use serde_json::{Map, Value, json};
use toolcrib::ports::model::ModelRequest;

/// Returns the body of a request.
pub(super) fn build_body(
    prompt: &ModelRequest,
    max_tokens: Option<u32>,
    native_search: bool,
) -> Value {
    let search = prompt.tool_search.as_deref().filter(|_| native_search);
    let mut body = convert_settings(&prompt.settings);
    if let (Some(max_tokens), false) = (max_tokens, body.contains_key("max_output_tokens")) {
        body.insert("max_output_tokens".into(), max_tokens.into());
    }
    let tools = prompt.tools.iter().map(toolcrib::Json::to_value).filter(|tool| {
        search.is_none() || !prompt.found_tools.iter().any(|found| is_named(tool, &found.name))
    });
    let tools: Vec<Value> = tools.filter_map(|tool| convert_tool(&tool, search)).collect();
    if tools.is_empty() {
        body.remove("tool_choice");
        body.remove("parallel_tool_calls");
    } else {
        body.insert("tools".into(), tools.into());
    }
    body.insert("model".into(), prompt.model.clone().into());
    body.insert("input".into(), convert_messages(prompt, search).into());
    body.insert("stream".into(), true.into());
    // Toolcrib stores the conversation itself.
    body.insert("store".into(), false.into());
    Value::Object(body)
}

/// Translates the settings of chat completions.
fn convert_settings(settings: &Map<String, Value>) -> Map<String, Value> {
    let mut body = settings.clone();
    body.retain(|_, value| !value.is_null());
    for name in ["n", "stop", "stream_options", "seed", "frequency_penalty", "presence_penalty"] {
        body.remove(name);
    }
    let limits = ["max_tokens", "max_completion_tokens"].map(|name| body.remove(name));
    if let Some(limit) = limits.into_iter().flatten().next() {
        body.insert("max_output_tokens".into(), limit);
    }
    if let Some(effort) = body.remove("reasoning_effort") {
        body.insert("reasoning".into(), json!({ "effort": effort }));
    }
    let mut text = Map::new();
    if let Some(verbosity) = body.remove("verbosity") {
        text.insert("verbosity".into(), verbosity);
    }
    if let Some(Value::Object(mut format)) = body.remove("response_format") {
        if let Some(Value::Object(schema)) = format.remove("json_schema") {
            format.extend(schema);
        }
        text.insert("format".into(), Value::Object(format));
    }
    if !text.is_empty() {
        body.insert("text".into(), Value::Object(text));
    }
    if let Some(name) = body.get("tool_choice").and_then(|choice| choice["function"].get("name")) {
        let choice = json!({ "type": "function", "name": name });
        body.insert("tool_choice".into(), choice);
    }
    body
}

fn is_named(tool: &Value, name: &str) -> bool {
    tool["function"]["name"] == name
}

fn convert_tool(tool: &Value, search: Option<&str>) -> Option<Value> {
    let function = tool.get("function")?;
    let empty = || json!({ "type": "object", "properties": {} });
    let parameters = function.get("parameters").cloned().unwrap_or_else(empty);
    let description = function.get("description").cloned().unwrap_or_default();
    let name = function.get("name")?;
    if search.is_some_and(|search| name == search) {
        return Some(json!({ "type": "tool_search", "execution": "client",
            "description": description, "parameters": parameters }));
    }
    let strict = function.get("strict").cloned().unwrap_or(Value::Bool(false));
    Some(json!({ "type": "function", "name": name, "description": description,
        "parameters": parameters, "strict": strict }))
}

fn convert_messages(prompt: &ModelRequest, search: Option<&str>) -> Vec<Value> {
    let (mut items, mut searches) = (Vec::new(), HashSet::new());
    for message in &prompt.chat_messages() {
        let content = message.get("content").unwrap_or(&Value::Null);
        match message.get("role").and_then(Value::as_str) {
            Some("tool") => {
                let id = message["tool_call_id"].as_str().unwrap_or_default();
                items.push(match searches.contains(id) {
                    true => search_output(prompt, id),
                    false => json!({ "type": "function_call_output", "call_id": id,
                        "output": content_text(content) }),
                });
            }
            Some("assistant") => {
                let text = content_text(content);
                if !text.is_empty() {
                    let parts = json!([{ "type": "output_text", "text": text }]);
                    items.push(json!({ "role": "assistant", "content": parts }));
                }
                for call in message["tool_calls"].as_array().into_iter().flatten() {
                    let (id, function) =
                        (call["id"].as_str().unwrap_or_default(), &call["function"]);
                    if search.is_some_and(|search| function["name"] == search) {
                        searches.insert(id.to_owned());
                        items.push(search_call(id, &function["arguments"]));
                    } else {
                        items.push(json!({ "type": "function_call", "call_id": id,
                            "name": function["name"], "arguments": function["arguments"] }));
                    }
                }
            }
            role => {
                let role = role.unwrap_or("user");
                items.push(json!({ "role": role, "content": content_parts(content) }));
            }
        }
    }
    items
}

fn search_call(id: &str, arguments: &Value) -> Value {
    let arguments = arguments.as_str().and_then(|text| serde_json::from_str(text).ok());
    json!({ "type": "tool_search_call", "call_id": id, "execution": "client",
        "status": "completed", "arguments": arguments.unwrap_or_else(|| json!({})) })
}

/// Returns the result of a search: the definitions of the tools that it found.
fn search_output(prompt: &ModelRequest, id: &str) -> Value {
    let found = prompt.found_tools.iter().filter(|found| found.call_id == id);
    let definitions = found.filter_map(|found| {
        let mut tools = prompt.tools.iter().map(toolcrib::Json::to_value);
        let tool = tools.find(|tool| is_named(tool, &found.name))?;
        let mut tool = convert_tool(&tool, None)?;
        tool["defer_loading"] = true.into();
        Some(tool)
    });
    json!({ "type": "tool_search_output", "call_id": id, "execution": "client",
        "status": "completed", "tools": definitions.collect::<Vec<_>>() })
}

fn content_parts(content: &Value) -> Vec<Value> {
    let text = |text: &str| json!({ "type": "input_text", "text": text });
    match content {
        Value::Array(parts) => {
            let part = |part: &Value| match part.get("type").and_then(Value::as_str) {
                Some("image_url") => {
                    json!({ "type": "input_image", "image_url": part["image_url"]["url"] })
                }
                _ => text(part.get("text").and_then(Value::as_str).unwrap_or_default()),
            };
            parts.iter().map(part).collect()
        }
        other => vec![text(other.as_str().unwrap_or_default())],
    }
}

fn content_text(content: &Value) -> String {
    match content {
        Value::Array(parts) => {
            let texts = parts.iter().filter_map(|part| part.get("text").and_then(Value::as_str));
            texts.collect::<Vec<_>>().join("\n")
        }
        other => other.as_str().unwrap_or_default().to_owned(),
    }
}
