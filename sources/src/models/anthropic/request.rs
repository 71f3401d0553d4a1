//! Translates a conversation in chat format into a request of Anthropic's messages API.
//!
//! The differences that matter: the system prompt is separate from the messages; tool results are
//! blocks of the next user message, and all results of one step share it; consecutive messages of
//! one role are merged; and a conversation that contains calls must define tools, even if none may
//! be used.

use serde_json::{Map, Value, json};
use toolcrib::ports::model::ModelRequest;

/// Returns the body of a request. With `native_search`, tools that a search of the model found are
/// deferred tools, to which the result of the search refers: the API keeps them out of the prompt's
/// prefix, so that its cache holds.
pub(super) fn build_body(prompt: &ModelRequest, max_tokens: u32, native_search: bool) -> Value {
    let settings = &prompt.settings;
    let (system, messages) = convert_messages(prompt, native_search);
    let limit = ["max_completion_tokens", "max_tokens"].iter().find_map(|k| settings.get(*k));
    let limit = limit.filter(|limit| !limit.is_null());
    let mut body = json!({
        "model": prompt.model,
        "max_tokens": limit.cloned().unwrap_or_else(|| max_tokens.into()),
        "stream": true,
    });
    if !system.is_empty() {
        body["system"] = system.into();
    }
    for name in ["temperature", "top_p", "top_k"] {
        if let Some(value) = settings.get(name).filter(|value| !value.is_null()) {
            body[name] = value.clone();
        }
    }
    match settings.get("stop") {
        Some(Value::String(word)) => body["stop_sequences"] = json!([word]),
        Some(Value::Array(words)) => body["stop_sequences"] = words.clone().into(),
        _ => {}
    }
    if let Some(user) = settings.get("user").and_then(Value::as_str) {
        body["metadata"] = json!({ "user_id": user });
    }
    let mut tools: Vec<Value> =
        prompt.tools.iter().filter_map(|tool| convert_tool(&tool.to_value())).collect();
    for tool in tools.iter_mut().filter(|_| native_search) {
        if prompt.found_tools.iter().any(|found| tool["name"] == found.name.as_str()) {
            tool["defer_loading"] = true.into();
        }
    }
    if tools.is_empty() {
        let used = used_tool_names(&messages);
        if !used.is_empty() {
            let schema = json!({ "type": "object" });
            let tool = |name: &String| json!({ "name": name, "input_schema": schema });
            body["tools"] = used.iter().map(tool).collect();
            body["tool_choice"] = json!({ "type": "none" });
        }
    } else {
        body["tools"] = tools.into();
        if let Some(choice) = convert_tool_choice(settings) {
            body["tool_choice"] = choice;
        }
    }
    body["messages"] = messages.into();
    body
}

fn convert_tool(tool: &Value) -> Option<Value> {
    let function = tool.get("function")?;
    let schema = function.get("parameters").cloned();
    let mut translated = json!({
        "name": function.get("name")?,
        "input_schema": schema.unwrap_or_else(|| json!({ "type": "object" })),
    });
    if let Some(description) = function.get("description") {
        translated["description"] = description.clone();
    }
    Some(translated)
}

fn convert_tool_choice(settings: &Map<String, Value>) -> Option<Value> {
    let mut choice = match settings.get("tool_choice") {
        Some(Value::String(word)) if word == "required" => json!({ "type": "any" }),
        Some(Value::String(word)) if word == "none" => json!({ "type": "none" }),
        Some(Value::Object(one)) => {
            json!({ "type": "tool", "name": one.get("function")?.get("name")? })
        }
        _ => json!({ "type": "auto" }),
    };
    let one_by_one = settings.get("parallel_tool_calls") == Some(&Value::Bool(false));
    if one_by_one && choice["type"] != "none" {
        choice["disable_parallel_tool_use"] = true.into();
    }
    Some(choice)
}

/// Returns the system prompt, and the messages of user and assistant in alternation.
fn convert_messages(prompt: &ModelRequest, native_search: bool) -> (String, Vec<Value>) {
    let mut system: Vec<String> = Vec::new();
    let mut turns: Vec<(&str, Vec<Value>)> = Vec::new();
    for message in &prompt.messages {
        let content = message.get("content").unwrap_or(&Value::Null);
        let (role, blocks) = match message.get("role").and_then(Value::as_str) {
            Some("system" | "developer") => {
                system.push(content_text(content));
                continue;
            }
            Some("assistant") => {
                let mut blocks = content_blocks(content);
                let calls = message.get("tool_calls").and_then(Value::as_array);
                blocks.extend(calls.into_iter().flatten().map(tool_use_block));
                ("assistant", blocks)
            }
            Some("tool") => {
                let mut block = tool_result_block(message, content);
                let references = tool_references(prompt, message);
                if native_search && !references.is_empty() {
                    block["content"] = references.into();
                }
                ("user", vec![block])
            }
            _ => ("user", content_blocks(content)),
        };
        match turns.last_mut() {
            Some((last, turn)) if *last == role => turn.extend(blocks),
            _ if blocks.is_empty() => {}
            _ => turns.push((role, blocks)),
        }
    }
    system.extend(prompt.guidance.clone());
    // The state of the calls differs in every request. It comes last, so that the cached prefix of
    // the prompt stays unchanged.
    if let Some(state) = &prompt.pending_state {
        let block = json!({ "type": "text", "text": state });
        match turns.last_mut() {
            Some(("user", turn)) => turn.push(block),
            _ => turns.push(("user", vec![block])),
        }
    }
    let turn = |(role, content)| json!({ "role": role, "content": Value::Array(content) });
    (system.join("\n\n"), turns.into_iter().map(turn).collect())
}

/// Converts text and images into blocks. Empty text yields no block.
fn content_blocks(content: &Value) -> Vec<Value> {
    let text = |text: &str| (!text.is_empty()).then(|| json!({ "type": "text", "text": text }));
    match content {
        Value::String(string) => text(string).into_iter().collect(),
        Value::Array(parts) => {
            let block = |part: &Value| match part.get("type").and_then(Value::as_str) {
                Some("image_url") => image_block(part),
                _ => text(part.get("text").and_then(Value::as_str).unwrap_or_default()),
            };
            parts.iter().filter_map(block).collect()
        }
        _ => Vec::new(),
    }
}

fn image_block(part: &Value) -> Option<Value> {
    let url = part.get("image_url")?.get("url")?.as_str()?;
    let source = match url.strip_prefix("data:").and_then(|data| data.split_once(";base64,")) {
        Some((kind, data)) => json!({ "type": "base64", "media_type": kind, "data": data }),
        None => json!({ "type": "url", "url": url }),
    };
    Some(json!({ "type": "image", "source": source }))
}

fn content_text(content: &Value) -> String {
    let blocks: Vec<Value> = content_blocks(content);
    let texts = blocks.iter().filter_map(|block| block.get("text").and_then(Value::as_str));
    texts.collect::<Vec<_>>().join("\n")
}

fn tool_use_block(call: &Value) -> Value {
    let function = call.get("function").unwrap_or(&Value::Null);
    let arguments = function.get("arguments").and_then(Value::as_str).unwrap_or_default();
    // The API accepts only objects; other text from the model is passed back inside one.
    let input = match serde_json::from_str::<Value>(arguments) {
        Ok(Value::Object(input)) => Value::Object(input),
        _ if arguments.trim().is_empty() => json!({}),
        _ => json!({ "not_json": arguments }),
    };
    let name = function.get("name").unwrap_or(&Value::Null);
    json!({ "type": "tool_use", "id": sanitize_id(call.get("id")), "name": name, "input": input })
}

fn tool_result_block(message: &Value, content: &Value) -> Value {
    let id = sanitize_id(message.get("tool_call_id"));
    json!({ "type": "tool_result", "tool_use_id": id, "content": content_text(content) })
}

/// Returns references to the tools that the search with this result found.
fn tool_references(prompt: &ModelRequest, message: &Value) -> Vec<Value> {
    let id = message.get("tool_call_id").and_then(Value::as_str);
    let found = prompt.found_tools.iter().filter(|found| id == Some(found.call_id.as_str()));
    found.map(|found| json!({ "type": "tool_reference", "tool_name": found.name })).collect()
}

/// Replaces the characters that this API refuses in an id. Other endpoints may have issued it.
fn sanitize_id(id: Option<&Value>) -> String {
    let text = id.and_then(Value::as_str).unwrap_or_default();
    let sanitize =
        |c: char| if c.is_ascii_alphanumeric() || c == '_' || c == '-' { c } else { '_' };
    text.chars().map(sanitize).collect()
}

fn used_tool_names(messages: &[Value]) -> Vec<String> {
    let blocks = messages.iter().filter_map(|message| message["content"].as_array()).flatten();
    let calls = blocks.filter(|block| block["type"] == "tool_use");
    let mut names: Vec<String> =
        calls.filter_map(|block| block["name"].as_str().map(str::to_owned)).collect();
    names.sort();
    names.dedup();
    names
}
