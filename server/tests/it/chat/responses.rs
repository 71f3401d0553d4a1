//! The Responses API: input, tools, `function_call_output`, streaming, and continuation.

use reqwest::Method;
use serde_json::json;
use toolcrib_bench::model::{ScriptedAnswer, ScriptedBehavior, text_reply, tool_call_reply};

use super::*;
use crate::support::sse::Sse;

fn responses_request(input: Value) -> Value {
    json!({ "model": MODEL, "input": input, "instructions": "Be brief.",
        "toolcrib": { "tools": ["calculation.eval"] } })
}

fn caller_function(name: &str) -> Value {
    json!({ "type": "function", "name": name, "description": "The client's own",
        "parameters": { "type": "object", "properties": {} }, "strict": true })
}

/// Returns the type and the text or name of each output item.
fn describe_items(response: &Value) -> Vec<String> {
    let describe = |item: &Value| match item["type"].as_str().unwrap() {
        "message" => format!("message {}", item["content"][0]["text"].as_str().unwrap()),
        kind => format!("{kind} {}", item["name"].as_str().unwrap()),
    };
    response["output"].as_array().unwrap().iter().map(describe).collect()
}

#[tokio::test]
async fn a_response_is_produced_with_server_tools() {
    let first =
        ScriptedAnswer::text("Hm.").with_call("a", "calculation__eval", eval("6 * 7").to_string());
    let (server, scripted) =
        start_with_replies([ScriptedBehavior::Reply(first), text_reply("It is 42.")]).await;
    let body = server.api().post("/v1/responses", responses_request(json!("6 * 7?"))).await.is(200);
    assert_eq!((&body["object"], &body["status"]), (&json!("response"), &json!("completed")));
    assert!(body["id"].as_str().unwrap().starts_with("resp_"), "{body}");
    assert_eq!(describe_items(&body), ["message Hm.", "message It is 42."]);
    assert_eq!(body["usage"]["total_tokens"], 30);
    assert_eq!(body["toolcrib"]["tool_calls"][0]["ok"], true);
    let requests = scripted.requests();
    assert_eq!(message_shape(&requests[1]), ["system", "user", "assistant a", "tool a"]);
    assert_eq!(requests[0].messages()[0]["content"], "Be brief.");
}

#[tokio::test]
async fn function_outputs_continue_by_input_or_by_response_id() {
    let both = || {
        ScriptedBehavior::Reply(
            ScriptedAnswer::text("").with_call("own", "open_door", r#"{"n": 1}"#).with_call(
                "crib",
                "calculation__eval",
                eval("2 ^ 10").to_string(),
            ),
        )
    };
    for by_id in [false, true] {
        let (server, scripted) =
            start_with_replies([both(), text_reply("Open."), text_reply("Yes.")]).await;
        let mut api = server.api();
        let mut body = responses_request(json!([{ "role": "user",
            "content": [{ "type": "input_text", "text": "Open it" }] }]));
        body["tools"] = json!([caller_function("open_door")]);
        let first = api.post("/v1/responses", body.clone()).await.is(200);
        assert_eq!(describe_items(&first), ["function_call open_door"]);
        let call = &first["output"][0];
        assert_eq!(call["arguments"], r#"{"n": 1}"#);
        let output = json!({ "type": "function_call_output", "call_id": call["call_id"],
            "output": "opened" });
        let server = match by_id {
            true => server.restart().await,
            false => server,
        };
        api.address = server.address.clone();
        if by_id {
            body["input"] = json!([output]);
            body["previous_response_id"] = first["id"].clone();
        } else {
            let input = body["input"].as_array_mut().unwrap();
            input.extend([call.clone(), output]);
        }
        let second = api.post("/v1/responses", body).await.is(200);
        assert_eq!(describe_items(&second), ["message Open."]);
        let requests = scripted.requests();
        let shape = message_shape(&requests[1]);
        let call_id = call["call_id"].as_str().unwrap();
        let step = format!("assistant {call_id} crib");
        let answers = ["tool crib".to_owned(), format!("tool {call_id}")];
        let start = ["system".to_owned(), "user".to_owned(), step];
        assert_eq!(shape, [&start[..], &answers[..]].concat(), "by its id: {by_id}");
        let strict = &requests[0].body["tools"][0]["function"]["strict"];
        assert_eq!(strict, true, "the caller tool must be unchanged");
        // The user continues from there with other instructions.
        let body = json!({ "model": MODEL, "input": "Sure?", "instructions": "Be long.",
            "previous_response_id": second["id"] });
        let third = api.post("/v1/responses", body).await.is(200);
        assert_eq!(describe_items(&third), ["message Yes."]);
        let requests = scripted.requests();
        let messages = requests[2].messages();
        assert_eq!(messages[0]["content"], "Be long.");
        let system = messages.iter().filter(|m| m["role"] == "system").count();
        assert_eq!((system, messages.len()), (1, 7), "{messages:?}");
    }
}

#[tokio::test]
async fn text_before_server_tool_calls_is_sent_to_the_model_once() {
    for last in ["And now the door.", ""] {
        let eval = |id: &str, text: &str| {
            ScriptedBehavior::Reply(ScriptedAnswer::text(text).with_call(
                id,
                "calculation__eval",
                eval("6 * 7").to_string(),
            ))
        };
        let open_door_answer = ScriptedAnswer::text(last).with_call("own", "open_door", "{}");
        let replies = [
            eval("c1", "Hm."),
            eval("c2", "Well."),
            ScriptedBehavior::Reply(open_door_answer),
            text_reply("Open."),
        ];
        let (server, scripted) = start_with_replies(replies).await;
        let api = server.api();
        let user = json!({ "role": "user", "content": "Open it" });
        // An earlier message with the same text stays.
        let before = json!({ "role": "assistant", "content": "Hm." });
        let mut body = responses_request(json!([user, before, user]));
        body["tools"] = json!([caller_function("open_door")]);
        let first = api.post("/v1/responses", body.clone()).await.is(200);
        let items = first["output"].as_array().unwrap().clone();
        let output = json!({ "type": "function_call_output", "output": "opened",
            "call_id": items.last().unwrap()["call_id"] });
        let input = body["input"].as_array_mut().unwrap();
        input.extend(items);
        input.push(output);
        api.post("/v1/responses", body).await.is(200);
        let requests = scripted.requests();
        let messages = requests[3].messages();
        let texts = messages.iter().filter(|message| message["role"] == "assistant");
        let texts: Vec<&str> = texts.map(|m| m["content"].as_str().unwrap_or_default()).collect();
        assert_eq!(texts, ["Hm.", "Hm.", "Well.", last], "{messages:?}");
    }
}

#[tokio::test]
async fn every_response_names_its_run() {
    let (server, _) = start_with_replies([text_reply("One."), text_reply("Two.")]).await;
    let api = server.api();
    for stream in [false, true] {
        let mut body = responses_request(json!("x"));
        (body["stream"], body["toolcrib"]["run_id"]) = (stream.into(), "mine".into());
        let answer = api.post("/v1/responses", body).await;
        assert_eq!(answer.header("toolcrib-run-id"), Some("mine"), "{stream}: {}", answer.text);
    }
}

#[tokio::test]
async fn a_response_with_store_false_is_not_stored() {
    let (server, _) = start_with_replies([text_reply("One."), text_reply("Two.")]).await;
    let api = server.api();
    let mut body = responses_request(json!("x"));
    body["store"] = false.into();
    let first = api.post("/v1/responses", body).await.is(200);
    let next = json!({ "model": MODEL, "input": "y", "previous_response_id": first["id"] });
    api.post("/v1/responses", next).await.is(404);
}

#[tokio::test]
async fn settings_are_translated_to_chat_completions() {
    let (server, scripted) = start_with_replies([text_reply("{}")]).await;
    let mut body = responses_request(json!("x"));
    let schema = json!({ "type": "object" });
    body["text"] = json!({ "format": { "type": "json_schema", "name": "n", "schema": schema,
        "strict": true } });
    body["max_output_tokens"] = 99.into();
    body["reasoning"] = json!({ "effort": "low" });
    body["tool_choice"] = json!({ "type": "function", "name": "calculation.eval" });
    body["metadata"] = json!({ "a": "b" });
    server.api().post("/v1/responses", body).await.is(200);
    let sent = &scripted.requests()[0].body;
    assert_eq!(
        sent["response_format"],
        json!({ "type": "json_schema",
        "json_schema": { "name": "n", "schema": schema, "strict": true } })
    );
    assert_eq!(sent["max_completion_tokens"], 99);
    assert_eq!(sent["reasoning_effort"], "low");
    let choice = json!({ "type": "function", "function": { "name": "calculation__eval" } });
    assert_eq!(sent["tool_choice"], choice);
    for field in ["text", "metadata", "input", "instructions", "reasoning", "toolcrib"] {
        assert!(sent.get(field).is_none(), "{field}: {sent}");
    }
}

#[tokio::test]
async fn a_stream_has_all_events_in_order() {
    let first =
        ScriptedAnswer::text("Hm.").with_call("a", "calculation__eval", eval("6 * 7").to_string());
    let second = ScriptedAnswer::text("42.").with_call("own", "open_door", r#"{"n": 1}"#);
    let (server, _) =
        start_with_replies([ScriptedBehavior::Reply(first), ScriptedBehavior::Reply(second)]).await;
    let mut body = responses_request(json!("6 * 7?"));
    body["tools"] = json!([caller_function("open_door")]);
    body["stream"] = true.into();
    let api = server.api();
    let mut events = Sse::open(api.request(Method::POST, "/v1/responses").json(&body)).await;
    let all = events.rest().await;
    for (n, event) in all.iter().enumerate() {
        assert_eq!(event.name, event.data["type"], "{event:?}");
        assert_eq!(event.data["sequence_number"], n);
    }
    let mut kinds: Vec<&str> =
        all.iter().map(|event| event.name.strip_prefix("response.").unwrap()).collect();
    kinds.dedup();
    let message = [
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
    ];
    let call = [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ];
    let expected = [&["created", "in_progress"][..], &message, &message, &call, &["completed"]];
    assert_eq!(kinds, expected.concat());
    let whole = &all.last().unwrap().data["response"];
    assert_eq!(describe_items(whole), ["message Hm.", "message 42.", "function_call open_door"]);
    let done: Vec<&Value> = all
        .iter()
        .filter(|event| event.name == "response.output_item.done")
        .map(|event| &event.data["item"])
        .collect();
    let output: Vec<&Value> = whole["output"].as_array().unwrap().iter().collect();
    assert_eq!(done, output, "the items of the events and of the response must match");
    let text: String = all
        .iter()
        .filter(|event| event.name == "response.output_text.delta")
        .map(|event| event.data["delta"].as_str().unwrap())
        .collect();
    assert_eq!(text, "Hm.42.");
}

#[tokio::test]
async fn a_failed_stream_ends_with_response_failed() {
    let refuse = ScriptedBehavior::Refuse(400, None, json!({ "error": { "message": "too long" } }));
    let first =
        ScriptedAnswer::text("Hm.").with_call("a", "calculation__eval", eval("6 * 7").to_string());
    let (server, _) =
        start_with_replies([ScriptedBehavior::Reply(first), refuse.clone(), refuse]).await;
    let mut body = responses_request(json!("6 * 7?"));
    body["stream"] = true.into();
    let api = server.api();
    let request = || api.request(Method::POST, "/v1/responses").json(&body);
    let all = Sse::open(request()).await.rest().await;
    let failed = &all.last().unwrap().data;
    assert_eq!(failed["type"], "response.failed");
    assert!(failed["response"]["error"]["message"].as_str().unwrap().contains("too long"));
    assert_eq!(all[all.len() - 2].name, "error");
    assert_eq!(
        request().send().await.unwrap().status(),
        400,
        "before the first event: an HTTP error"
    );
}

#[tokio::test]
async fn a_token_limit_makes_the_response_incomplete() {
    let truncated = ScriptedAnswer { finish: Some("length"), ..ScriptedAnswer::text("It is") };
    let (server, _) = start_with_replies([
        ScriptedBehavior::Reply(truncated),
        tool_call_reply("x", "y", &json!({})),
    ])
    .await;
    let body = server.api().post("/v1/responses", responses_request(json!("?"))).await.is(200);
    assert_eq!(body["status"], "incomplete");
    assert_eq!(body["incomplete_details"]["reason"], "max_output_tokens");
}
