//! Converts input items of the Responses API to messages in the chat format.

use serde_json::{Value, json};

use crate::http::openai::error::{OpenAiError, invalid_field};

/// Valid roles of a message.
const ROLES: [&str; 4] = ["system", "developer", "user", "assistant"];

/// Converts the input to messages.
pub(super) fn to_messages(input: Value) -> Result<Vec<Value>, OpenAiError> {
    let items = match input {
        Value::String(text) => return Ok(vec![json!({ "role": "user", "content": text })]),
        Value::Array(items) => items,
        _ => return Err(invalid_field("input", "must be a text or a list of items")),
    };
    let mut messages = Vec::new();
    for (n, item) in items.iter().enumerate() {
        let field_path = |field: &str| format!("input.{n}{field}");
        let text = |field: &str| item.get(field).and_then(Value::as_str);
        let needed = |field: &str| {
            text(field)
                .ok_or_else(|| invalid_field(&field_path(&format!(".{field}")), "is missing"))
        };
        match text("type") {
            None | Some("message") => {
                let content = item.get("content").unwrap_or(&Value::Null);
                let content = to_content(content).ok_or_else(|| {
                    invalid_field(
                        &field_path(".content"),
                        "must be a text or a list of texts and pictures",
                    )
                })?;
                let role = needed("role")?;
                if !ROLES.contains(&role) {
                    let expected = "must be system, developer, user or assistant";
                    return Err(invalid_field(&field_path(".role"), expected));
                }
                messages.push(json!({ "role": role, "content": content }));
            }
            Some("function_call") => {
                let function = json!({ "name": needed("name")?,
                    "arguments": text("arguments").unwrap_or("{}") });
                let call =
                    json!({ "id": needed("call_id")?, "type": "function", "function": function });
                add_call(&mut messages, call);
            }
            Some("function_call_output") => {
                let output = item.get("output").unwrap_or(&Value::Null);
                let output = to_content(output).ok_or_else(|| {
                    invalid_field(&field_path(".output"), "must be a text or a list of texts")
                })?;
                messages.push(json!({ "role": "tool", "tool_call_id": needed("call_id")?,
                    "content": output }));
            }
            // One model's reasoning is not passed to another.
            Some("reasoning") => {}
            Some(other) => {
                let excerpt: String = other.chars().take(40).collect();
                let expected = "known are message, function_call and function_call_output";
                return Err(invalid_field(
                    &field_path(".type"),
                    format!("cannot be \"{excerpt}\": {expected}"),
                ));
            }
        }
    }
    if messages.is_empty() {
        return Err(invalid_field("input", "must have at least one message or output"));
    }
    Ok(messages)
}

/// Adds a call. The calls of one model response form one message, together with the text before
/// them.
fn add_call(messages: &mut Vec<Value>, call: Value) {
    match messages.last_mut() {
        Some(last) if last["role"] == "assistant" => match last["tool_calls"].as_array_mut() {
            Some(calls) => calls.push(call),
            None => last["tool_calls"] = json!([call]),
        },
        _ => messages.push(json!({ "role": "assistant", "content": null, "tool_calls": [call] })),
    }
}

/// Converts content to the chat format; a single text becomes a plain string.
fn to_content(content: &Value) -> Option<Value> {
    let parts = match content {
        Value::String(_) => return Some(content.clone()),
        Value::Array(parts) => parts,
        _ => return None,
    };
    let mut contents = Vec::new();
    for part in parts {
        contents.push(match part.get("type")?.as_str()? {
            "input_text" | "output_text" | "text" => {
                json!({ "type": "text", "text": part.get("text")?.as_str()? })
            }
            "refusal" => json!({ "type": "text", "text": part.get("refusal")?.as_str()? }),
            "input_image" => {
                let url = part.get("image_url")?.as_str()?;
                json!({ "type": "image_url", "image_url": { "url": url } })
            }
            _ => return None,
        });
    }
    match contents.as_slice() {
        [only] if only["type"] == "text" => Some(only["text"].clone()),
        _ => Some(contents.into()),
    }
}

/// Converts the caller's functions to the chat format.
pub(super) fn to_chat_tools(tools: Vec<Value>) -> Result<Vec<Value>, OpenAiError> {
    let mut functions = Vec::new();
    for (n, tool) in tools.into_iter().enumerate() {
        if tool.get("type").and_then(Value::as_str) != Some("function") {
            let reason = "must be \"function\"; Toolcrib offers its own tools without being sent \
                          them";
            return Err(invalid_field(&format!("tools.{n}.type"), reason));
        }
        let Value::Object(mut function) = tool else { continue };
        function.remove("type");
        function.retain(|_, value| !value.is_null());
        if !function.get("name").is_some_and(Value::is_string) {
            return Err(invalid_field(&format!("tools.{n}.name"), "is missing"));
        }
        functions.push(json!({ "type": "function", "function": function }));
    }
    Ok(functions)
}
