//! Responses: input, tools, `function_call_output`, streaming, and going on.

use reqwest::Method;
use serde_json::json;
use toolcrib_bench::model::{ScriptedAnswer, ScriptedBehavior, text_reply, tool_call_reply};

use super::*;
use crate::support::sse::Sse;

fn asking(input: Value) -> Value {
    json!({ "model": MODEL, "input": input, "instructions": "Be brief.",
        "toolcrib": { "tools": ["calculation.eval"] } })
}

fn flat_tool(name: &str) -> Value {
    json!({ "type": "function", "name": name, "description": "The client's own",
        "parameters": { "type": "object", "properties": {} }, "strict": true })
}

/// The types of the items, and their texts.
fn items(response: &Value) -> Vec<String> {
    let describe = |item: &Value| match item["type"].as_str().unwrap() {
        "message" => format!("message {}", item["content"][0]["text"].as_str().unwrap()),
        kind => format!("{kind} {}", item["name"].as_str().unwrap()),
    };
    response["output"].as_array().unwrap().iter().map(describe).collect()
}

#[tokio::test]
async fn a_question_is_answered_with_the_cribs_tools() {
    let first =
        ScriptedAnswer::text("Hm.").with_call("a", "calculation__eval", eval("6 * 7").to_string());
    let (server, scripted) =
        serving([ScriptedBehavior::Reply(first), text_reply("It is 42.")]).await;
    let body = server.api().post("/v1/responses", asking(json!("6 * 7?"))).await.is(200);
    assert_eq!((&body["object"], &body["status"]), (&json!("response"), &json!("completed")));
    assert!(body["id"].as_str().unwrap().starts_with("resp_"), "{body}");
    assert_eq!(items(&body), ["message Hm.", "message It is 42."]);
    assert_eq!(body["usage"]["total_tokens"], 30);
    assert_eq!(body["toolcrib"]["tool_calls"][0]["ok"], true);
    let asked = scripted.requests();
    assert_eq!(shape(&asked[1]), ["system", "user", "assistant a", "tool a"]);
    assert_eq!(asked[0].messages()[0]["content"], "Be brief.");
}

#[tokio::test]
async fn outputs_of_the_clients_functions_go_on_in_both_ways() {
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
        let (server, scripted) = serving([both(), text_reply("Open."), text_reply("Yes.")]).await;
        let mut api = server.api();
        let mut body = asking(json!([{ "role": "user",
            "content": [{ "type": "input_text", "text": "Open it" }] }]));
        body["tools"] = json!([flat_tool("open_door")]);
        let first = api.post("/v1/responses", body.clone()).await.is(200);
        assert_eq!(items(&first), ["function_call open_door"]);
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
        assert_eq!(items(&second), ["message Open."]);
        let asked = scripted.requests();
        let shape = shape(&asked[1]);
        let handed = call["call_id"].as_str().unwrap();
        let step = format!("assistant {handed} crib");
        let answers = ["tool crib".to_owned(), format!("tool {handed}")];
        let begin = ["system".to_owned(), "user".to_owned(), step];
        assert_eq!(shape, [&begin[..], &answers[..]].concat(), "by its id: {by_id}");
        let strict = &asked[0].body["tools"][0]["function"]["strict"];
        assert_eq!(strict, true, "the client's tool as the client described it");
        // The user goes on from there, under other instructions.
        let body = json!({ "model": MODEL, "input": "Sure?", "instructions": "Be long.",
            "previous_response_id": second["id"] });
        let third = api.post("/v1/responses", body).await.is(200);
        assert_eq!(items(&third), ["message Yes."]);
        let asked = scripted.requests();
        let messages = asked[2].messages();
        assert_eq!(messages[0]["content"], "Be long.");
        let system = messages.iter().filter(|m| m["role"] == "system").count();
        assert_eq!((system, messages.len()), (1, 7), "{messages:?}");
    }
}

#[tokio::test]
async fn what_was_said_before_the_cribs_calls_is_told_to_the_model_once() {
    for last in ["And now the door.", ""] {
        let eval = |id: &str, text: &str| {
            ScriptedBehavior::Reply(ScriptedAnswer::text(text).with_call(
                id,
                "calculation__eval",
                eval("6 * 7").to_string(),
            ))
        };
        let door = ScriptedAnswer::text(last).with_call("own", "open_door", "{}");
        let turns = [
            eval("c1", "Hm."),
            eval("c2", "Well."),
            ScriptedBehavior::Reply(door),
            text_reply("Open."),
        ];
        let (server, scripted) = serving(turns).await;
        let api = server.api();
        let user = json!({ "role": "user", "content": "Open it" });
        // The same words from another time stay.
        let before = json!({ "role": "assistant", "content": "Hm." });
        let mut body = asking(json!([user, before, user]));
        body["tools"] = json!([flat_tool("open_door")]);
        let first = api.post("/v1/responses", body.clone()).await.is(200);
        let items = first["output"].as_array().unwrap().clone();
        let output = json!({ "type": "function_call_output", "output": "opened",
            "call_id": items.last().unwrap()["call_id"] });
        let input = body["input"].as_array_mut().unwrap();
        input.extend(items);
        input.push(output);
        api.post("/v1/responses", body).await.is(200);
        let asked = scripted.requests();
        let messages = asked[3].messages();
        let said = messages.iter().filter(|message| message["role"] == "assistant");
        let said: Vec<&str> = said.map(|m| m["content"].as_str().unwrap_or_default()).collect();
        assert_eq!(said, ["Hm.", "Hm.", "Well.", last], "{messages:?}");
    }
}

#[tokio::test]
async fn every_answer_says_which_run_it_came_from() {
    let (server, _) = serving([text_reply("One."), text_reply("Two.")]).await;
    let api = server.api();
    for stream in [false, true] {
        let mut body = asking(json!("x"));
        (body["stream"], body["toolcrib"]["run_id"]) = (stream.into(), "mine".into());
        let answer = api.post("/v1/responses", body).await;
        assert_eq!(answer.header("toolcrib-run-id"), Some("mine"), "{stream}: {}", answer.text);
    }
}

#[tokio::test]
async fn what_is_not_to_be_kept_is_not() {
    let (server, _) = serving([text_reply("One."), text_reply("Two.")]).await;
    let api = server.api();
    let mut body = asking(json!("x"));
    body["store"] = false.into();
    let first = api.post("/v1/responses", body).await.is(200);
    let next = json!({ "model": MODEL, "input": "y", "previous_response_id": first["id"] });
    api.post("/v1/responses", next).await.is(404);
}

#[tokio::test]
async fn settings_are_those_of_chat_completions_upstream() {
    let (server, scripted) = serving([text_reply("{}")]).await;
    let mut body = asking(json!("x"));
    let schema = json!({ "type": "object" });
    body["text"] = json!({ "format": { "type": "json_schema", "name": "n", "schema": schema,
        "strict": true } });
    body["max_output_tokens"] = 99.into();
    body["reasoning"] = json!({ "effort": "low" });
    body["tool_choice"] = json!({ "type": "function", "name": "calculation.eval" });
    body["metadata"] = json!({ "a": "b" });
    server.api().post("/v1/responses", body).await.is(200);
    let asked = &scripted.requests()[0].body;
    assert_eq!(
        asked["response_format"],
        json!({ "type": "json_schema",
        "json_schema": { "name": "n", "schema": schema, "strict": true } })
    );
    assert_eq!(asked["max_completion_tokens"], 99);
    assert_eq!(asked["reasoning_effort"], "low");
    let choice = json!({ "type": "function", "function": { "name": "calculation__eval" } });
    assert_eq!(asked["tool_choice"], choice);
    for ours in ["text", "metadata", "input", "instructions", "reasoning", "toolcrib"] {
        assert!(asked.get(ours).is_none(), "{ours}: {asked}");
    }
}

#[tokio::test]
async fn the_events_of_a_stream_tell_the_whole_story() {
    let first =
        ScriptedAnswer::text("Hm.").with_call("a", "calculation__eval", eval("6 * 7").to_string());
    let second = ScriptedAnswer::text("42.").with_call("own", "open_door", r#"{"n": 1}"#);
    let (server, _) =
        serving([ScriptedBehavior::Reply(first), ScriptedBehavior::Reply(second)]).await;
    let mut body = asking(json!("6 * 7?"));
    body["tools"] = json!([flat_tool("open_door")]);
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
    let wanted = [&["created", "in_progress"][..], &message, &message, &call, &["completed"]];
    assert_eq!(kinds, wanted.concat());
    let whole = &all.last().unwrap().data["response"];
    assert_eq!(items(whole), ["message Hm.", "message 42.", "function_call open_door"]);
    let done: Vec<&Value> = all
        .iter()
        .filter(|event| event.name == "response.output_item.done")
        .map(|event| &event.data["item"])
        .collect();
    let output: Vec<&Value> = whole["output"].as_array().unwrap().iter().collect();
    assert_eq!(done, output, "each item as it was told");
    let said: String = all
        .iter()
        .filter(|event| event.name == "response.output_text.delta")
        .map(|event| event.data["delta"].as_str().unwrap())
        .collect();
    assert_eq!(said, "Hm.42.");
}

#[tokio::test]
async fn a_stream_that_fails_says_so() {
    let refuse = ScriptedBehavior::Refuse(400, None, json!({ "error": { "message": "too long" } }));
    let first =
        ScriptedAnswer::text("Hm.").with_call("a", "calculation__eval", eval("6 * 7").to_string());
    let (server, _) = serving([ScriptedBehavior::Reply(first), refuse.clone(), refuse]).await;
    let mut body = asking(json!("6 * 7?"));
    body["stream"] = true.into();
    let api = server.api();
    let request = || api.request(Method::POST, "/v1/responses").json(&body);
    let all = Sse::open(request()).await.rest().await;
    let failed = &all.last().unwrap().data;
    assert_eq!(failed["type"], "response.failed");
    assert!(failed["response"]["error"]["message"].as_str().unwrap().contains("too long"));
    assert_eq!(all[all.len() - 2].name, "error");
    assert_eq!(request().send().await.unwrap().status(), 400, "at the very beginning: a refusal");
}

#[tokio::test]
async fn a_limit_of_tokens_leaves_it_incomplete() {
    let cut = ScriptedAnswer { finish: Some("length"), ..ScriptedAnswer::text("It is") };
    let (server, _) =
        serving([ScriptedBehavior::Reply(cut), tool_call_reply("x", "y", &json!({}))]).await;
    let body = server.api().post("/v1/responses", asking(json!("?"))).await.is(200);
    assert_eq!(body["status"], "incomplete");
    assert_eq!(body["incomplete_details"]["reason"], "max_output_tokens");
}
