//! Unknown fields: refused with a suggestion where a misspelt field would change the meaning of a
//! request, and ignored where a protocol requires that.

use reqwest::Method;
use serde_json::{Value, json};

use crate::support::Server;
use crate::support::api::{message, offer, offer_with};
use crate::support::mcp::Mcp;
use crate::support::ws::Ws;

/// Asserts that the request is refused with the position of the field and the suggestion.
async fn assert_refused(
    server: &Server,
    (method, path): (Method, &str),
    body: Value,
    pointer: &str,
    suggestion: Option<&str>,
) {
    let api = server.api();
    let reply = api.send(api.request(method, path).json(&body)).await;
    let field = pointer.rsplit('/').next().unwrap();
    assert_eq!(reply.body["errors"][0]["pointer"], format!("#{pointer}"), "{}", reply.text);
    let error = reply.refused(422, "VALIDATION_ERROR");
    assert!(message(&error).starts_with(&format!("unknown field `{field}`")), "{error}");
    if let Some(name) = suggestion {
        let expected = format!("unknown field `{field}`; did you mean `{name}`?");
        assert_eq!(message(&error), expected, "{error}");
    }
    let problem = &error["detail"]["problems"][0];
    assert_eq!(problem["pointer"], pointer, "{error}");
    assert_eq!(problem["suggestion"], json!(suggestion), "{error}");
}

#[tokio::test]
async fn a_call_with_an_unknown_field_is_refused_and_not_made() {
    let server = Server::start().await;
    server.api().register("pc", json!([offer("x.y")])).await;
    let route = || (Method::POST, "/v1/tools/x.y/invoke");
    let body = |name: &str, value: Value| {
        let mut body = json!({ "run_id": "r", "args": { "anything": { "goes": 1 } } });
        body[name] = value;
        body
    };
    for (name, suggestion) in [
        ("idempotencyKey", Some("idempotency_key")),
        ("timeoutMs", Some("timeout_ms")),
        ("runid", Some("run_id")),
        ("argz", Some("args")),
        ("Idempotency-Key", Some("idempotency_key")),
        ("priority_class", None),
    ] {
        let pointer = format!("/{name}");
        assert_refused(&server, route(), body(name, json!("v")), &pointer, suggestion).await;
    }
    let calls = server.api().get("/v1/tool_calls").await.is(200);
    assert_eq!(calls["tool_calls"], json!([]));
    // All of them are listed at once, also beside a missing required field.
    let error = server.api().post("/v1/tools/x.y/invoke", json!({ "runid": "r", "arg": {} })).await;
    let error = error.refused(422, "VALIDATION_ERROR");
    assert_eq!(error["detail"]["problems"].as_array().unwrap().len(), 2, "{error}");
    assert!(message(&error).ends_with("(1 more in detail.problems)"), "{error}");
}

#[tokio::test]
async fn a_registration_with_an_unknown_field_is_refused_as_a_whole() {
    let server = Server::start().await;
    let route = || (Method::POST, "/internal/tools/register");
    let tools = |more: Value| json!({ "client_id": "pc", "tools": [offer("a.b"), offer_with("x.y", more)] });
    for (more, pointer, suggestion) in [
        (json!({ "descripton": "d" }), "/tools/1/descripton", Some("description")),
        (json!({ "timeoutMs": 5 }), "/tools/1/timeoutMs", Some("timeout_ms")),
        (json!({ "parameters": {} }), "/tools/1/parameters", None),
        (
            json!({ "policy": { "max_retires": 1 } }),
            "/tools/1/policy/max_retires",
            Some("max_retries"),
        ),
        (
            json!({ "fallback": [{ "tool": "a.b", "arguments": {} }] }),
            "/tools/1/fallback/0/arguments",
            None,
        ),
    ] {
        assert_refused(&server, route(), tools(more), pointer, suggestion).await;
    }
    let body = json!({ "client_id": "pc", "tools": [], "replaces": true });
    assert_refused(&server, route(), body, "/replaces", Some("replace")).await;
    server.api().get("/v1/tools/a.b").await.is(404);
    // Names inside schemas and metadata are the client's own.
    let free = json!({
        "schema": { "type": "object", "x-own": 1 }, "metadata": { "any": 1 }, "risk_level": "high",
    });
    server.api().post("/internal/tools/register", tools(free)).await.is(200);
    assert_eq!(server.api().get("/v1/tools/x.y").await.is(200)["risk"], "high");
}

#[tokio::test]
async fn a_batch_with_an_unknown_field_is_refused_and_nothing_runs() {
    let server = Server::start().await;
    let route = || (Method::POST, "/v1/tool_calls");
    let call = json!({ "name": "calculation.eval", "args": { "expression": "1" } });
    let body = json!({ "run_id": "r", "tool_calls": [call], "maxParallel": 2 });
    assert_refused(&server, route(), body, "/maxParallel", Some("max_parallel")).await;
    for (name, suggestion) in [
        ("timeoutMs", Some("timeout_ms")),
        ("idempotencyKey", Some("idempotency_key")),
        ("names", Some("name")),
        ("weight", None),
    ] {
        let mut misspelt = call.clone();
        misspelt[name] = json!(1);
        let body = json!({ "run_id": "r", "tool_calls": [call, misspelt] });
        assert_refused(&server, route(), body, &format!("/tool_calls/1/{name}"), suggestion).await;
    }
    let calls = server.api().get("/v1/tool_calls").await.is(200);
    assert_eq!(calls["tool_calls"], json!([]));
    // Model APIs add fields of their own to the calls in their formats.
    let body = json!({ "run_id": "r", "tool_calls": [
        { "id": "c1", "type": "function", "index": 0, "extra_content": {},
          "function": { "name": "calculation.eval", "arguments": "{\"expression\":\"1+1\"}" } },
        { "type": "tool_use", "id": "t1", "name": "calculation.eval",
          "input": { "expression": "2+2" }, "cache_control": { "type": "ephemeral" } },
        { "type": "function_call", "id": "fc", "call_id": "c2", "status": "completed",
          "name": "calculation.eval", "arguments": "{\"expression\":\"3+3\"}" },
    ] });
    let answer = server.api().post("/v1/tool_calls", body).await.is(200);
    assert!(answer["results"].as_array().unwrap().iter().all(|one| one["ok"] == true), "{answer}");
}

#[tokio::test]
async fn a_run_with_an_unknown_field_is_refused() {
    let server = Server::start().await;
    let route = || (Method::POST, "/v1/runs");
    let body = |name: &str, value: Value| {
        let mut body = json!({ "model": "m", "messages": [{ "role": "user", "content": "hi" }] });
        body[name] = value;
        body
    };
    for (name, value, pointer, suggestion) in [
        ("idempotencyKey", json!("k"), "/idempotencyKey", Some("idempotency_key")),
        ("tool", json!(["a.b"]), "/tool", Some("tools")),
        ("temperature", json!(1), "/temperature", None),
        ("limits", json!({ "step": 1 }), "/limits/step", Some("steps")),
        ("policy", json!({ "maxParallel": 1 }), "/policy/maxParallel", Some("max_parallel")),
    ] {
        assert_refused(&server, route(), body(name, value), pointer, suggestion).await;
    }
    for (method, path, body, pointer, suggestion) in [
        (Method::POST, "/v1/runs/r/cancel", json!({ "reasons": "x" }), "/reasons", Some("reason")),
        (
            Method::POST,
            "/v1/runs/r/messages",
            json!({ "message": [] }),
            "/message",
            Some("messages"),
        ),
        (
            Method::PUT,
            "/v1/runs/r/context/tool_definitions",
            json!({ "tool_definition": [] }),
            "/tool_definition",
            Some("tool_definitions"),
        ),
    ] {
        assert_refused(&server, (method, path), body, pointer, suggestion).await;
    }
    // A conversation is in OpenAI's format, whose messages carry further fields.
    let message = json!({ "role": "user", "content": "hi", "refusal": null, "annotations": [] });
    let mut allowed = body("settings", json!({ "any_model_setting": 1 }));
    allowed["messages"] = json!([message]);
    let error = server.api().post("/v1/runs", allowed).await;
    assert!(!error.text.contains("unknown field"), "{}", error.text);
}

#[tokio::test]
async fn protocols_that_ignore_unknown_fields_still_do() {
    let server = Server::start().await;
    let api = server.api();
    // A client's WebSocket messages and reports. Its tools are a registration.
    let misspelt = json!({
        "type": "hello", "client_id": "pc", "tools": [offer_with("x.y", json!({ "timeoutMs": 1 }))],
    });
    let mut client = Ws::open(&api).await.unwrap();
    client.send(misspelt).await;
    let error = client.expect_message("error").await;
    assert_eq!(error["error"]["code"], "VALIDATION_ERROR", "{error}");
    assert_eq!(error["error"]["detail"]["problems"][0]["pointer"], "/tools/0/timeoutMs");
    let more = json!({ "futureField": 1, "tools": [offer("x.y")] });
    let mut client = Ws::hello(&api, "pc", more).await;
    let id = api.invoke("x.y", json!({})).await;
    let request = client.take().await;
    assert_eq!(request["tool_call_id"], id.as_str());
    let report = json!({ "status": "SUCCEEDED", "result": 1, "duration": 5, "futureField": {} });
    api.submit(&id, report).await.is(200);
    assert_eq!(api.finished(&id).await["status"], "SUCCEEDED");
    // MCP.
    let params = json!({
        "name": "calculation.eval", "arguments": { "expression": "2*3" },
        "futureField": 1, "_meta": { "other/thing": 1 },
    });
    let answer = Mcp::modern(&api).ask("tools/call", params).await.result();
    assert_eq!(answer["structuredContent"]["result"], 6, "{answer}");
}

#[tokio::test]
async fn an_entry_of_the_roster_with_an_unknown_field_is_refused() {
    let server = Server::start().await;
    let operator = server.operator();
    for (more, suggestion) in [("x", None), ("allowed_tool", Some("allowed_tools"))] {
        let mut body = json!({ "worker_target": "w" });
        body[more] = json!(["a.*"]);
        let error = operator.put("/v1/agents/ada", body).await.refused(422, "VALIDATION_ERROR");
        assert_eq!(error["detail"]["problems"][0]["suggestion"], json!(suggestion), "{error}");
    }
    operator.get("/v1/agents/ada").await.refused(404, "NOT_FOUND");
    let body = json!({ "worker_target": "w", "allowed_tools": ["a.*"], "profile": { "any": 1 } });
    let entry = operator.put("/v1/agents/ada", body).await.is(200);
    // A response can be sent back.
    assert_eq!(operator.put("/v1/agents/ada", entry.clone()).await.is(200), entry);
}
