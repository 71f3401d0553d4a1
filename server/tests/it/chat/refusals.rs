//! What is refused, and how: in the form that OpenAI's clients read.

use serde_json::json;
use toolcrib_bench::model::{ScriptedBehavior, text_reply};

use super::*;
use crate::support::api::Reply;

/// The `error` of a refusal, after checking its form.
#[track_caller]
fn error(reply: Reply, status: u16, kind: &str) -> Value {
    assert_eq!(reply.header("content-type"), Some("application/json"), "{}", reply.text);
    let body = reply.is(status);
    let error = body["error"].as_object().unwrap();
    let fields: Vec<&str> = error.keys().map(String::as_str).collect();
    assert_eq!(fields, ["code", "message", "param", "type"], "{body}");
    assert_eq!(error["type"], kind, "{body}");
    assert!(!error["message"].as_str().unwrap().is_empty(), "{body}");
    body["error"].clone()
}

/// Each of these requests is refused with the name of its field, and nobody is asked.
async fn refuses(path: &str, requests: impl IntoIterator<Item = (Value, &str)>) {
    let (server, scripted) = serving([]).await;
    let api = server.api();
    for (mut body, param) in requests {
        if body.get("model").is_none() && param != "model" {
            body["model"] = MODEL.into();
        }
        let reply = api.post(path, body.clone()).await;
        let error = error(reply, 400, "invalid_request_error");
        assert_eq!(error["param"], param, "{body}: {error}");
    }
    error(api.post_raw(path, "{").await, 400, "invalid_request_error");
    assert!(scripted.requests().is_empty(), "nobody was asked");
}

#[tokio::test]
async fn chats_that_make_no_sense_name_the_field() {
    let asking = |more: Value| {
        let mut body = json!({ "messages": [{ "role": "user", "content": "x" }] });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let own = own_tool("a");
    let requests = [
        (json!({}), "model"),
        (json!({ "model": 7 }), "model"),
        (json!({}), "messages"),
        (json!({ "messages": [] }), "messages"),
        (json!({ "messages": [{ "role": "x" }] }), "messages.0.role"),
        (asking(json!({ "n": 2 })), "n"),
        (asking(json!({ "stream": "yes" })), "stream"),
        (asking(json!({ "tools": [own, own] })), "tools.1.function.name"),
        (asking(json!({ "tools": [{ "type": "web_search" }] })), "tools.0.type"),
        (asking(json!({ "toolcrib": 7 })), "toolcrib"),
        (asking(json!({ "toolcrib": { "tool": [] } })), "toolcrib.tool"),
        (asking(json!({ "toolcrib": { "limits": { "calls": -1 } } })), "toolcrib.limits.calls"),
        (asking(json!({ "toolcrib": { "limits": { "steps": 0 } } })), "toolcrib.limits.steps"),
        (
            asking(json!({ "toolcrib": { "policy": { "timeout_ms": 0 } } })),
            "toolcrib.policy.timeout_ms",
        ),
        (asking(json!({ "functions": [] })), "functions"),
    ];
    refuses("/v1/chat/completions", requests).await;
}

#[tokio::test]
async fn responses_that_make_no_sense_name_the_field() {
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
    refuses("/v1/responses", requests).await;
}

#[tokio::test]
async fn a_model_that_is_not_there() {
    let server = Server::start().await;
    let api = server.api();
    let mut body = question("x");
    body["model"] = "gpt-9".into();
    let refused = error(api.post("/v1/chat/completions", body).await, 404, "invalid_request_error");
    assert_eq!(refused["code"], "model_not_found");
    assert!(refused["message"].as_str().unwrap().contains("there are: demo"), "{refused}");
    let body = json!({ "model": "demo", "input": "x", "previous_response_id": "resp_none" });
    let refused = error(api.post("/v1/responses", body).await, 404, "invalid_request_error");
    assert_eq!(refused["param"], "previous_response_id");
}

#[tokio::test]
async fn who_may_not_is_told_so_in_the_clients_words() {
    let (server, _) = serving([]).await;
    let provider = server.keyed("p", "tools", "provider", &[]).await;
    for path in ["/v1/chat/completions", "/v1/responses"] {
        let body = match path {
            "/v1/responses" => json!({ "model": MODEL, "input": "x" }),
            _ => question("x"),
        };
        let reply = server.api().post(path, body.clone()).await;
        let refused = error(reply, 401, "authentication_error");
        assert_eq!(refused["code"], "invalid_api_key");
        error(provider.post(path, body).await, 403, "permission_error");
    }
    error(server.api().get("/v1/models").await, 401, "authentication_error");
}

#[tokio::test]
async fn what_the_endpoint_refuses_is_passed_on_where_it_is_the_clients_to_correct() {
    let upstream = |code: &str| json!({ "error": { "message": "No.", "code": code } });
    let (server, _) = serving([
        ScriptedBehavior::Refuse(400, None, upstream("context_length_exceeded")),
        ScriptedBehavior::Refuse(404, None, upstream("model_not_found")),
        ScriptedBehavior::Refuse(401, None, upstream("invalid_api_key")),
        text_reply("x"),
    ])
    .await;
    let api = server.api();
    let ask = async || api.post("/v1/chat/completions", question("x")).await;
    let refused = error(ask().await, 400, "invalid_request_error");
    assert_eq!(refused["code"], "context_length_exceeded");
    assert!(refused["message"].as_str().unwrap().contains("No."), "{refused}");
    assert_eq!(error(ask().await, 404, "invalid_request_error")["code"], "model_not_found");
    // That the crib's own key is wrong is not for the client to correct.
    let refused = error(ask().await, 503, "server_error");
    assert!(!refused["message"].as_str().unwrap().contains("No."), "{refused}");
}

#[tokio::test]
async fn an_endpoint_that_is_down_is_unavailable() {
    let server = Server::with(|config| {
        config.llm.base_url = Some("http://127.0.0.1:1/v1".into());
    })
    .await;
    let mut body = question("x");
    body["model"] = "any".into();
    body["toolcrib"]["limits"] = json!({ "time_ms": 1 });
    let refused = error(server.api().post("/v1/chat/completions", body).await, 503, "server_error");
    assert_eq!(refused["code"], "UPSTREAM_UNAVAILABLE");
}

#[tokio::test]
async fn when_to_come_again_is_passed_on() {
    let busy =
        ScriptedBehavior::Refuse(429, Some("3600"), json!({ "error": { "message": "slow down" } }));
    let (server, scripted) = serving([busy]).await;
    let reply = server.api().post("/v1/chat/completions", question("x")).await;
    assert_eq!(reply.header("retry-after"), Some("3600"));
    error(reply, 429, "rate_limit_error");
    assert_eq!(scripted.requests().len(), 1, "an hour is not waited for");
}

#[tokio::test]
async fn a_fault_after_calls_were_made_does_not_invite_to_make_them_again() {
    let busy = || {
        ScriptedBehavior::Refuse(429, Some("3600"), json!({ "error": { "message": "slow down" } }))
    };
    let first = toolcrib_bench::model::tool_call_reply("a", "calculation__eval", &eval("6 * 7"));
    let (server, _) = serving([first.clone(), busy(), first, busy()]).await;
    for stream in [false, true] {
        let mut body = question("6 * 7?");
        body["stream"] = stream.into();
        let reply = server.api().post("/v1/chat/completions", body).await;
        if stream {
            // It had begun: the fault is the last word of the stream.
            assert!(reply.text.contains("slow down"), "{}", reply.text);
            continue;
        }
        assert_eq!(reply.header("x-should-retry"), Some("false"));
        assert_eq!(reply.header("retry-after"), None);
        let run_id = reply.header("toolcrib-run-id").unwrap().to_owned();
        error(reply, 429, "rate_limit_error");
        let path = format!("/v1/tool_calls?run_id={run_id}");
        let made = server.api().get(&path).await.is(200);
        assert_eq!(made["tool_calls"].as_array().unwrap().len(), 1, "what was done is found");
    }
}

#[tokio::test]
async fn the_name_of_a_run_of_another_agent_is_refused() {
    let (server, scripted) =
        serving([text_reply("Hello."), text_reply("Hello."), text_reply("Hello.")]).await;
    let ada = server.keyed("default", "ada", "agent", &["*"]).await;
    let bob = server.keyed("default", "bob", "agent", &["*"]).await;
    let run = ada.post("/v1/runs?wait_ms=30000", question("Hi")).await.is(200);
    let mut body = question("Hi");
    body["toolcrib"] = json!({ "run_id": run["run_id"] });
    let path = "/v1/chat/completions";
    let refused = error(bob.post(path, body.clone()).await, 403, "permission_error");
    assert_eq!(refused["param"], "toolcrib.run_id", "{refused}");
    assert_eq!(scripted.requests().len(), 1, "nobody was asked");
    // Whose run it is may, and a name that is no stored run is free.
    ada.post(path, body.clone()).await.is(200);
    body["toolcrib"] = json!({ "run_id": "run_of_bob" });
    bob.post(path, body).await.is(200);
}
