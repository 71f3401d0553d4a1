//! Streamed chat completions.

use std::sync::atomic::Ordering;

use reqwest::Method;
use serde_json::json;
use toolcrib_bench::model::{ScriptedAnswer, ScriptedBehavior, text_reply};

use super::*;
use crate::support::sse::Sse;
use crate::support::{Api, until};

/// A completion assembled from a stream in the way of a client.
#[derive(Debug, Default)]
struct StreamedCompletion {
    text: String,
    calls: Vec<(String, String, String)>,
    finish: Option<String>,
    usage: Value,
    error: Value,
    done: bool,
}

async fn stream_completion(api: &Api, mut body: Value) -> StreamedCompletion {
    body["stream"] = true.into();
    body["stream_options"] = json!({ "include_usage": true });
    let request = api.request(Method::POST, "/v1/chat/completions").json(&body);
    let text = read_event_stream(request).await;
    let mut all = StreamedCompletion::default();
    for line in text.lines().filter_map(|line| line.strip_prefix("data: ")) {
        if line == "[DONE]" {
            all.done = true;
            continue;
        }
        assert!(!all.done, "nothing follows the end");
        let chunk: Value = serde_json::from_str(line).unwrap();
        if chunk.get("error").is_some() {
            all.error = chunk["error"].clone();
            continue;
        }
        assert_eq!(chunk["object"], "chat.completion.chunk");
        if let Some(usage) = chunk.get("usage") {
            all.usage = usage.clone();
        }
        let Some(choice) = chunk["choices"].get(0) else { continue };
        all.text.push_str(choice["delta"]["content"].as_str().unwrap_or_default());
        for call in choice["delta"]["tool_calls"].as_array().into_iter().flatten() {
            assert_eq!(call["index"], all.calls.len(), "{call}");
            let text = |value: &Value| value.as_str().unwrap().to_owned();
            let (function, id) = (&call["function"], text(&call["id"]));
            all.calls.push((id, text(&function["name"]), text(&function["arguments"])));
        }
        if let Some(reason) = choice["finish_reason"].as_str() {
            all.finish = Some(reason.to_owned());
        }
    }
    all
}

async fn read_event_stream(request: reqwest::RequestBuilder) -> String {
    let response = request.send().await.unwrap();
    assert_eq!(response.status(), 200, "{}", response.text().await.unwrap());
    let kind = response.headers()["content-type"].to_str().unwrap().to_owned();
    assert!(kind.starts_with("text/event-stream"), "{kind}");
    response.text().await.unwrap()
}

#[tokio::test]
async fn the_text_of_every_step_is_streamed() {
    let first = ScriptedAnswer::text("I will see.").with_call(
        "a",
        "calculation__eval",
        eval("6 * 7").to_string(),
    );
    let (server, _) =
        start_with_replies([ScriptedBehavior::Reply(first), text_reply("It is 42: ä€😀.")]).await;
    let all = stream_completion(&server.api(), question("6 * 7?")).await;
    assert_eq!(all.text, "I will see.\n\nIt is 42: ä€😀.");
    assert_eq!((all.finish.as_deref(), all.done), (Some("stop"), true));
    assert_eq!(all.usage["total_tokens"], 30);
    assert!(all.calls.is_empty(), "{all:?}");
}

#[tokio::test]
async fn the_first_delta_arrives_before_the_model_finishes() {
    let (server, _) =
        start_with_replies([ScriptedBehavior::Stall(ScriptedAnswer::text("Once upon a time"), 2)])
            .await;
    let mut body = question("Tell me a story");
    body["stream"] = true.into();
    let api = server.api();
    let mut events = Sse::open(api.request(Method::POST, "/v1/chat/completions").json(&body)).await;
    assert_eq!(events.event().await.data["choices"][0]["delta"]["role"], "assistant");
    assert_eq!(events.event().await.data["choices"][0]["delta"]["content"], "Once up");
}

#[tokio::test]
async fn caller_tool_calls_are_streamed_whole() {
    let both = ScriptedAnswer::text("")
        .with_call("own", "open_door", r#"{"which": "the one on the left"}"#)
        .with_call("crib", "calculation__eval", eval("1 + 1").to_string());
    let (server, _) = start_with_replies([ScriptedBehavior::Reply(both)]).await;
    let mut body = question("Open the door");
    body["tools"] = json!([caller_tool("open_door")]);
    let all = stream_completion(&server.api(), body).await;
    assert_eq!(all.finish.as_deref(), Some("tool_calls"));
    let [(id, name, arguments)] = all.calls.as_slice() else { panic!("{all:?}") };
    assert!(id.starts_with("call_"), "{id}");
    assert_eq!(
        (name.as_str(), arguments.as_str()),
        ("open_door", r#"{"which": "the one on the left"}"#)
    );
}

#[tokio::test]
async fn a_truncated_answer_is_retried_without_repeated_text() {
    let whole = || ScriptedAnswer::text("The answer is forty-two.");
    let (server, scripted) = start_with_replies([
        ScriptedBehavior::Disconnect(whole(), 3),
        ScriptedBehavior::EndEarly(whole(), 2),
        ScriptedBehavior::Reply(whole()),
    ])
    .await;
    let all = stream_completion(&server.api(), question("What is it?")).await;
    assert_eq!(all.text, "The answer is forty-two.");
    assert_eq!(scripted.requests().len(), 3);
    // A retry with different text is streamed from its start.
    let (server, _) = start_with_replies([
        ScriptedBehavior::Disconnect(whole(), 3),
        text_reply("I do not know."),
    ])
    .await;
    let all = stream_completion(&server.api(), question("What is it?")).await;
    assert_eq!(all.text, "The answer is \n\nI do not know.");
}

#[tokio::test]
async fn a_call_with_truncated_arguments_is_never_executed() {
    let mail =
        || ScriptedAnswer::text("").with_call("a", "calculation__eval", eval("6 * 7").to_string());
    let call_reply =
        || ScriptedAnswer::text("").with_call("b", "open_door", r#"{"which": "left"}"#);
    let (server, _) = start_with_replies([
        ScriptedBehavior::Disconnect(mail(), 3),
        ScriptedBehavior::Reply(mail()),
        ScriptedBehavior::Disconnect(call_reply(), 3),
        ScriptedBehavior::Reply(call_reply()),
    ])
    .await;
    let mut body = question("Open the door");
    body["tools"] = json!([caller_tool("open_door")]);
    let all = stream_completion(&server.api(), body).await;
    assert_eq!(all.calls.len(), 1, "{all:?}");
    assert_eq!(all.calls[0].2, r#"{"which": "left"}"#);
    let listed = server.api().get("/v1/tool_calls").await.is(200);
    assert_eq!(listed["tool_calls"].as_array().unwrap().len(), 1, "{listed}");
}

#[tokio::test]
async fn a_model_failure_ends_the_stream_with_an_error() {
    let refuse =
        || ScriptedBehavior::Refuse(400, None, json!({ "error": { "message": "too long" } }));
    let first =
        ScriptedAnswer::text("Hm.").with_call("a", "calculation__eval", eval("6 * 7").to_string());
    let (server, _) =
        start_with_replies([ScriptedBehavior::Reply(first), refuse(), refuse()]).await;
    let api = server.api();
    let all = stream_completion(&api, question("6 * 7?")).await;
    assert_eq!((all.text.as_str(), all.done), ("Hm.", false));
    assert!(all.error["message"].as_str().unwrap().contains("too long"), "{all:?}");
    // Before the first chunk the failure is an HTTP error.
    let mut body = question("6 * 7?");
    body["stream"] = true.into();
    let refused = api.post("/v1/chat/completions", body).await.is(400);
    assert_eq!(refused["error"]["type"], "invalid_request_error");
}

#[tokio::test]
async fn a_disconnect_aborts_the_model_request() {
    let (server, scripted) =
        start_with_replies([ScriptedBehavior::Stall(ScriptedAnswer::text("Once upon a time"), 2)])
            .await;
    let mut body = question("Tell me a story");
    body["stream"] = true.into();
    let api = server.api();
    let mut events = Sse::open(api.request(Method::POST, "/v1/chat/completions").json(&body)).await;
    events.event().await;
    let request = scripted.requests().remove(0);
    assert!(!request.has_caller_left.load(Ordering::Relaxed));
    drop(events);
    until("the request to the model to be given up", || async {
        request.has_caller_left.load(Ordering::Relaxed).then_some(())
    })
    .await;
}

#[tokio::test]
async fn the_response_starts_while_the_first_call_is_running() {
    let first = ScriptedAnswer::text("").with_call("a", "report__make", "{}");
    let (server, _) =
        start_with_replies([ScriptedBehavior::Reply(first), text_reply("7 pages.")]).await;
    let api = server.api();
    api.register("c1", json!([crate::support::api::offer("report.make")])).await;
    let mut body = question("A report");
    body["stream"] = true.into();
    body["toolcrib"] = json!({ "tools": ["report.make"] });
    let request = api.request(Method::POST, "/v1/chat/completions").json(&body);
    let sent = request.send();
    // The response head arrives before the call is finished.
    let response = crate::support::soon("the head of the answer", sent).await.unwrap();
    assert_eq!(response.status(), 200);
    let work = api.poll("c1").await;
    api.succeed(work["tool_call_id"].as_str().unwrap(), json!({ "pages": 7 })).await;
    let text = crate::support::soon("the rest", response.text()).await.unwrap();
    assert!(text.contains("7 pages") && text.contains("[DONE]"), "{text}");
}
