//! An answer in the wire format of each API: as one document, and as the events of a stream.

use serde_json::{Value, json};

use super::{RecordedRequest, ScriptedAnswer};

fn is_responses(request: &RecordedRequest) -> bool {
    request.path.ends_with("/responses")
}

fn is_anthropic(request: &RecordedRequest) -> bool {
    request.path.ends_with("/messages")
}

/// Returns the whole answer as one document.
pub(super) fn complete_document(request: &RecordedRequest, answer: &ScriptedAnswer) -> Value {
    if is_anthropic(request) {
        return anthropic_message(request, answer);
    }
    if is_responses(request) {
        return response_document(request, answer);
    }
    let calls: Vec<Value> = answer.calls.iter().map(tool_call_json).collect();
    let content = (!answer.text.is_empty()).then_some(&answer.text);
    let mut message = json!({ "role": "assistant", "content": content, "refusal": null });
    if !calls.is_empty() {
        message["tool_calls"] = calls.into();
    }
    json!({
        "id": "chatcmpl-scripted", "object": "chat.completion", "created": 1_700_000_000,
        "model": request.body["model"],
        "choices": [{ "index": 0, "message": message, "logprobs": null,
            "finish_reason": finish_reason(answer) }],
        "usage": usage(answer),
    })
}

/// Returns the events of a stream, each in its wire format.
pub(super) fn events(request: &RecordedRequest, answer: &ScriptedAnswer) -> Vec<String> {
    if is_anthropic(request) {
        return anthropic_events(request, answer);
    }
    if is_responses(request) {
        return response_events(request, answer);
    }
    let chunk = |choices: Value, usage: Value| {
        let chunk = json!({
            "id": "chatcmpl-scripted", "object": "chat.completion.chunk",
            "created": 1_700_000_000, "model": request.body["model"],
            "choices": choices, "usage": usage,
        });
        format!("data: {chunk}\n\n")
    };
    let delta = |delta: Value, finish: Value| {
        let choice = json!({ "index": 0, "delta": delta, "logprobs": null,
            "finish_reason": finish });
        chunk(json!([choice]), Value::Null)
    };
    let first = json!({ "role": "assistant", "content": "", "refusal": null });
    let mut events = vec![delta(first, Value::Null)];
    for part in split_text(&answer.text, answer.chunk_chars) {
        events.push(delta(json!({ "content": part }), Value::Null));
    }
    for (n, (id, name, arguments)) in answer.calls.iter().enumerate() {
        let head = json!({ "index": n, "id": id, "type": "function",
            "function": { "name": name, "arguments": "" } });
        events.push(delta(json!({ "tool_calls": [head] }), Value::Null));
        for part in split_text(arguments, answer.chunk_chars) {
            let more = json!({ "index": n, "function": { "arguments": part } });
            events.push(delta(json!({ "tool_calls": [more] }), Value::Null));
        }
    }
    events.push(delta(json!({}), finish_reason(answer)));
    if request.body["stream_options"]["include_usage"] == true {
        events.push(chunk(json!([]), usage(answer)));
    }
    events.push("data: [DONE]\n\n".to_owned());
    events
}

fn tool_call_json((id, name, arguments): &(String, String, String)) -> Value {
    json!({ "id": id, "type": "function", "function": { "name": name, "arguments": arguments } })
}

fn finish_reason(answer: &ScriptedAnswer) -> Value {
    let default_reason = if answer.calls.is_empty() { "stop" } else { "tool_calls" };
    answer.finish.unwrap_or(default_reason).into()
}

fn usage(answer: &ScriptedAnswer) -> Value {
    let (prompt, completion) = answer.usage;
    json!({ "prompt_tokens": prompt, "completion_tokens": completion,
        "total_tokens": prompt + completion })
}

/// Splits the text into pieces of this many characters.
fn split_text(text: &str, size: usize) -> Vec<String> {
    let all: Vec<char> = text.chars().collect();
    all.chunks(size.max(1)).map(|chunk| chunk.iter().collect()).collect()
}

fn stop_reason(answer: &ScriptedAnswer) -> Value {
    let default_reason = if answer.calls.is_empty() { "end_turn" } else { "tool_use" };
    answer.finish.unwrap_or(default_reason).into()
}

fn anthropic_message(request: &RecordedRequest, answer: &ScriptedAnswer) -> Value {
    let mut content = Vec::new();
    if !answer.text.is_empty() {
        content.push(json!({ "type": "text", "text": answer.text }));
    }
    for (id, name, arguments) in &answer.calls {
        let input: Value = serde_json::from_str(arguments).unwrap_or_default();
        content.push(json!({ "type": "tool_use", "id": id, "name": name, "input": input }));
    }
    json!({
        "id": "msg_scripted", "type": "message", "role": "assistant",
        "model": request.body["model"], "content": content,
        "stop_reason": stop_reason(answer), "stop_sequence": null,
        "usage": { "input_tokens": answer.usage.0, "output_tokens": answer.usage.1 },
    })
}

fn anthropic_events(request: &RecordedRequest, answer: &ScriptedAnswer) -> Vec<String> {
    let event = |event: Value| {
        let kind = event["type"].as_str().unwrap_or_default().to_owned();
        format!("event: {kind}\ndata: {event}\n\n")
    };
    let message = json!({
        "id": "msg_scripted", "type": "message", "role": "assistant", "content": [],
        "model": request.body["model"], "stop_reason": null, "stop_sequence": null,
        "usage": { "input_tokens": answer.usage.0, "output_tokens": 1 },
    });
    let mut events = vec![
        event(json!({ "type": "message_start", "message": message })),
        event(json!({ "type": "ping" })),
    ];
    let mut index = 0;
    let mut block = |begin: Value, deltas: Vec<Value>| {
        let start = json!({ "type": "content_block_start", "index": index,
            "content_block": begin });
        events.push(event(start));
        for delta in deltas {
            let delta = json!({ "type": "content_block_delta", "index": index, "delta": delta });
            events.push(event(delta));
        }
        events.push(event(json!({ "type": "content_block_stop", "index": index })));
        index += 1;
    };
    if !answer.text.is_empty() {
        let delta = |text: String| json!({ "type": "text_delta", "text": text });
        let deltas = split_text(&answer.text, answer.chunk_chars).into_iter().map(delta);
        block(json!({ "type": "text", "text": "" }), deltas.collect());
    }
    for (id, name, arguments) in &answer.calls {
        let delta = |json: String| json!({ "type": "input_json_delta", "partial_json": json });
        let deltas = split_text(arguments, answer.chunk_chars).into_iter().map(delta);
        let begin = json!({ "type": "tool_use", "id": id, "name": name, "input": {} });
        block(begin, deltas.collect());
    }
    events.push(event(json!({ "type": "message_delta",
        "delta": { "stop_reason": stop_reason(answer), "stop_sequence": null },
        "usage": { "output_tokens": answer.usage.1 } })));
    events.push(event(json!({ "type": "message_stop" })));
    events
}

/// Returns the output items of a response. A call of the tool search has an item type of its own.
fn response_items(request: &RecordedRequest, answer: &ScriptedAnswer) -> Vec<Value> {
    let mut items = Vec::new();
    if !answer.text.is_empty() {
        items.push(json!({ "type": "message", "id": "msg_0", "role": "assistant",
            "status": "completed", "content": [{ "type": "output_text", "text": answer.text,
                "annotations": [] }] }));
    }
    let tools = request.body["tools"].as_array().map_or(&[][..], Vec::as_slice);
    let has_search = tools.iter().any(|tool| tool["type"] == "tool_search");
    for (id, name, arguments) in &answer.calls {
        items.push(match has_search && name == "tools__search" {
            true => {
                let arguments: Value = serde_json::from_str(arguments).unwrap_or_default();
                json!({ "type": "tool_search_call", "id": format!("tsc_{id}"), "call_id": id,
                    "execution": "client", "status": "completed", "arguments": arguments })
            }
            false => json!({ "type": "function_call", "id": format!("fc_{id}"), "call_id": id,
                "name": name, "arguments": arguments, "status": "completed" }),
        });
    }
    items
}

fn response_document(request: &RecordedRequest, answer: &ScriptedAnswer) -> Value {
    let (input, output) = answer.usage;
    let incomplete = answer.finish.map(|_| json!({ "reason": "max_output_tokens" }));
    json!({ "id": "resp_scripted", "object": "response", "model": request.body["model"],
        "status": if incomplete.is_some() { "incomplete" } else { "completed" },
        "error": null, "incomplete_details": incomplete, "output": response_items(request, answer),
        "usage": { "input_tokens": input, "output_tokens": output,
            "total_tokens": input + output } })
}

fn response_events(request: &RecordedRequest, answer: &ScriptedAnswer) -> Vec<String> {
    let event = |kind: &str, mut body: Value| {
        body["type"] = kind.into();
        format!("event: {kind}\ndata: {body}\n\n")
    };
    let document = response_document(request, answer);
    let mut events = vec![event("response.created", json!({ "response": { "id": "resp" } }))];
    for (n, item) in response_items(request, answer).into_iter().enumerate() {
        let mut begun = item.clone();
        for field in ["arguments", "content"] {
            if begun[field].is_string() {
                begun[field] = "".into();
            }
        }
        let added = json!({ "output_index": n, "item": begun });
        events.push(event("response.output_item.added", added));
        let (kind, text) = match item["type"].as_str() {
            Some("message") => ("response.output_text.delta", answer.text.as_str()),
            Some("function_call") => (
                "response.function_call_arguments.delta",
                item["arguments"].as_str().unwrap_or_default(),
            ),
            _ => ("", ""),
        };
        for part in split_text(text, answer.chunk_chars) {
            events.push(event(kind, json!({ "output_index": n, "delta": part })));
        }
        events.push(event("response.output_item.done", json!({ "output_index": n, "item": item })));
    }
    let kind = match answer.finish {
        Some(_) => "response.incomplete",
        None => "response.completed",
    };
    events.push(event(kind, json!({ "response": document })));
    events
}
