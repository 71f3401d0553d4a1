//! Refused requests, in the error format of OpenAI's API.

use serde_json::json;
use toolcrib_bench::model::{ScriptedBehavior, text_reply};

use super::*;
use crate::support::api::Reply;

/// Checks the form of a refusal and returns its `error`.
#[track_caller]
fn check_error(reply: Reply, status: u16, kind: &str) -> Value {
    assert_eq!(reply.header("content-type"), Some("application/json"), "{}", reply.text);
    let body = reply.is(status);
    let error = body["error"].as_object().unwrap();
    let fields: Vec<&str> = error.keys().map(String::as_str).collect();
    assert_eq!(fields, ["code", "message", "param", "type"], "{body}");
    assert_eq!(error["type"], kind, "{body}");
    assert!(!error["message"].as_str().unwrap().is_empty(), "{body}");
    body["error"].clone()
}

/// Asserts that each request is refused with its field and that the model gets no request.
async fn assert_refused_fields(path: &str, requests: impl IntoIterator<Item = (Value, &str)>) {
    let (server, scripted) = start_with_replies([]).await;
    let api = server.api();
    for (mut body, param) in requests {
        if body.get("model").is_none() && param != "model" {
            body["model"] = MODEL.into();
        }
        let reply = api.post(path, body.clone()).await;
        let error = check_error(reply, 400, "invalid_request_error");
        assert_eq!(error["param"], param, "{body}: {error}");
    }
    check_error(api.post_raw(path, "{").await, 400, "invalid_request_error");
    assert!(scripted.requests().is_empty(), "the model must get no request");
}

#[tokio::test]
async fn invalid_chat_requests_are_refused_with_their_field() {
    let chat_with = |more: Value| {
        let mut body = json!({ "messages": [{ "role": "user", "content": "x" }] });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let tool = caller_tool("a");
    let requests = [
        (json!({}), "model"),
        (json!({ "model": 7 }), "model"),
        (json!({}), "messages"),
        (json!({ "messages": [] }), "messages"),
        (json!({ "messages": [{ "role": "x" }] }), "messages.0.role"),
        (chat_with(json!({ "n": 2 })), "n"),
        (chat_with(json!({ "stream": "yes" })), "stream"),
        (chat_with(json!({ "tools": [tool, tool] })), "tools.1.function.name"),
        (chat_with(json!({ "tools": [{ "type": "web_search" }] })), "tools.0.type"),
        (chat_with(json!({ "toolcrib": 7 })), "toolcrib"),
        (chat_with(json!({ "toolcrib": { "tool": [] } })), "toolcrib.tool"),
        (chat_with(json!({ "toolcrib": { "limits": { "calls": -1 } } })), "toolcrib.limits.calls"),
        (chat_with(json!({ "toolcrib": { "limits": { "steps": 0 } } })), "toolcrib.limits.steps"),
        (
            chat_with(json!({ "toolcrib": { "policy": { "timeout_ms": 0 } } })),
            "toolcrib.policy.timeout_ms",
        ),
        (chat_with(json!({ "functions": [] })), "functions"),
    ];
    assert_refused_fields("/v1/chat/completions", requests).await;
}

#[tokio::test]
async fn invalid_responses_requests_are_refused_with_their_field() {
    let requests = [
        (json!({}), "input"),
        (json!({ "input": [] }), "input"),
        (json!({ "input": [{ "type": "computer_call" }] }), "input.0.type"),
        (json!({ "input": [{ "role": "alien", "content": "x" }] }), "input.0.role"),
        (
            json!({ "input": [{ "type": "reasoning" }, { "role": "tool", "content": "x" }] }),
            "input.1.role",
        ),
        (json!({ "input": [{ "role": "user", "content": 7 }] }), "input.0.content"),
        (
            json!({ "input": [{ "type": "function_call_output", "output": "x" }] }),
            "input.0.call_id",
        ),
        (json!({ "input": "x", "background": true }), "background"),
        (json!({ "input": "x", "tools": [{ "type": "mcp" }] }), "tools.0.type"),
    ];
    assert_refused_fields("/v1/responses", requests).await;
}

#[tokio::test]
async fn an_unknown_model_or_previous_response_is_not_found() {
    let server = Server::start().await;
    let api = server.api();
    let mut body = question("x");
    body["model"] = "gpt-9".into();
    let refused =
        check_error(api.post("/v1/chat/completions", body).await, 404, "invalid_request_error");
    assert_eq!(refused["code"], "model_not_found");
    assert!(refused["message"].as_str().unwrap().contains("there are: demo"), "{refused}");
    let body = json!({ "model": "demo", "input": "x", "previous_response_id": "resp_none" });
    let refused = check_error(api.post("/v1/responses", body).await, 404, "invalid_request_error");
    assert_eq!(refused["param"], "previous_response_id");
}

#[tokio::test]
async fn missing_and_insufficient_keys_are_openai_errors() {
    let (server, _) = start_with_replies([]).await;
    let provider = server.keyed("p", "tools", "provider", &[]).await;
    for path in ["/v1/chat/completions", "/v1/responses"] {
        let body = match path {
            "/v1/responses" => json!({ "model": MODEL, "input": "x" }),
            _ => question("x"),
        };
        let reply = server.api().post(path, body.clone()).await;
        let refused = check_error(reply, 401, "authentication_error");
        assert_eq!(refused["code"], "invalid_api_key");
        check_error(provider.post(path, body).await, 403, "permission_error");
    }
    check_error(server.api().get("/v1/models").await, 401, "authentication_error");
}

#[tokio::test]
async fn endpoint_errors_are_forwarded_if_the_client_can_fix_them() {
    let upstream = |code: &str| json!({ "error": { "message": "No.", "code": code } });
    let (server, _) = start_with_replies([
        ScriptedBehavior::Refuse(400, None, upstream("context_length_exceeded")),
        ScriptedBehavior::Refuse(404, None, upstream("model_not_found")),
        ScriptedBehavior::Refuse(401, None, upstream("invalid_api_key")),
        text_reply("x"),
    ])
    .await;
    let api = server.api();
    let ask = async || api.post("/v1/chat/completions", question("x")).await;
    let refused = check_error(ask().await, 400, "invalid_request_error");
    assert_eq!(refused["code"], "context_length_exceeded");
    assert!(refused["message"].as_str().unwrap().contains("No."), "{refused}");
    assert_eq!(check_error(ask().await, 404, "invalid_request_error")["code"], "model_not_found");
    // The client cannot fix an invalid key of the server.
    let refused = check_error(ask().await, 503, "server_error");
    assert!(!refused["message"].as_str().unwrap().contains("No."), "{refused}");
}

#[tokio::test]
async fn an_unreachable_endpoint_is_upstream_unavailable() {
    let server = Server::with(|config| {
        config.llm.base_url = Some("http://127.0.0.1:1/v1".into());
    })
    .await;
    let mut body = question("x");
    body["model"] = "any".into();
    body["toolcrib"]["limits"] = json!({ "time_ms": 1 });
    let refused =
        check_error(server.api().post("/v1/chat/completions", body).await, 503, "server_error");
    assert_eq!(refused["code"], "UPSTREAM_UNAVAILABLE");
}

#[tokio::test]
async fn the_retry_delay_of_the_endpoint_is_forwarded() {
    let busy =
        ScriptedBehavior::Refuse(429, Some("3600"), json!({ "error": { "message": "slow down" } }));
    let (server, scripted) = start_with_replies([busy]).await;
    let reply = server.api().post("/v1/chat/completions", question("x")).await;
    assert_eq!(reply.header("retry-after"), Some("3600"));
    check_error(reply, 429, "rate_limit_error");
    assert_eq!(scripted.requests().len(), 1, "a delay of an hour must not be awaited");
}

#[tokio::test]
async fn an_error_after_executed_calls_forbids_retries() {
    let busy = || {
        ScriptedBehavior::Refuse(429, Some("3600"), json!({ "error": { "message": "slow down" } }))
    };
    let first = toolcrib_bench::model::tool_call_reply("a", "calculation__eval", &eval("6 * 7"));
    let (server, _) = start_with_replies([first.clone(), busy(), first, busy()]).await;
    for stream in [false, true] {
        let mut body = question("6 * 7?");
        body["stream"] = stream.into();
        let reply = server.api().post("/v1/chat/completions", body).await;
        if stream {
            // The stream has started, so the error is its last event.
            assert!(reply.text.contains("slow down"), "{}", reply.text);
            continue;
        }
        assert_eq!(reply.header("x-should-retry"), Some("false"));
        assert_eq!(reply.header("retry-after"), None);
        let run_id = reply.header("toolcrib-run-id").unwrap().to_owned();
        check_error(reply, 429, "rate_limit_error");
        let path = format!("/v1/tool_calls?run_id={run_id}");
        let run = server.api().get(&path).await.is(200);
        assert_eq!(
            run["tool_calls"].as_array().unwrap().len(),
            1,
            "the executed call must be listed"
        );
    }
}

#[tokio::test]
async fn the_run_id_of_another_agent_is_refused() {
    let (server, scripted) =
        start_with_replies([text_reply("Hello."), text_reply("Hello."), text_reply("Hello.")])
            .await;
    let ada = server.keyed("default", "ada", "agent", &["*"]).await;
    let bob = server.keyed("default", "bob", "agent", &["*"]).await;
    let run = ada.post("/v1/runs?wait_ms=30000", run_question("Hi")).await.is(200);
    let mut body = question("Hi");
    body["toolcrib"] = json!({ "run_id": run["run_id"] });
    let path = "/v1/chat/completions";
    let refused = check_error(bob.post(path, body.clone()).await, 403, "permission_error");
    assert_eq!(refused["param"], "toolcrib.run_id", "{refused}");
    assert_eq!(scripted.requests().len(), 1, "the model must get no request");
    // The owner may use it, and an id without a stored run is free.
    ada.post(path, body.clone()).await.is(200);
    body["toolcrib"] = json!({ "run_id": "run_of_bob" });
    bob.post(path, body).await.is(200);
}
