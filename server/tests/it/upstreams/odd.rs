//! Upstreams that deviate from MCP or are overloaded: Toolcrib uses the valid part and reports the
//! rest.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use toolcrib_sources::mcp::McpServerSettings;

use super::{call, http_upstream, result_text, wait_for_state};
use crate::support::mcp::Mcp;
use crate::support::upstream::program;

const JSON: [(&str, &str); 1] = [("content-type", "application/json")];
const STREAM: [(&str, &str); 1] = [("content-type", "text/event-stream")];

/// Starts an MCP server that answers each request with this function and returns its URL.
async fn start_mcp_server(
    answer: impl Fn(&Value) -> Response + Clone + Send + Sync + 'static,
) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/mcp", listener.local_addr().unwrap());
    let handler = move |body: String| {
        let answer = answer(&serde_json::from_str(&body).unwrap());
        async move { answer }
    };
    let router = axum::Router::new().route("/mcp", axum::routing::post(handler));
    tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    url
}

/// Responds to discovery and listing in both revisions; returns none for a tool call.
fn metadata_response(request: &Value, tools: &Value) -> Option<Value> {
    let result = match request["method"].as_str() {
        Some("server/discover") => json!({ "resultType": "complete", "ttlMs": 0,
            "supportedVersions": ["2026-07-28"], "capabilities": { "tools": {} },
            "cacheScope": "private" }),
        Some("initialize") => json!({ "protocolVersion": "2025-11-25",
            "capabilities": { "tools": {} }, "serverInfo": { "name": "odd", "version": "1" } }),
        Some("tools/list") => json!({ "resultType": "complete", "ttlMs": 0, "tools": tools,
            "cacheScope": "private",
            "_meta": { "io.modelcontextprotocol/serverInfo": { "name": "odd", "version": "1" } } }),
        Some("tools/call") => return None,
        _ => json!({}),
    };
    Some(json!({ "jsonrpc": "2.0", "id": request["id"], "result": result }))
}

fn done_response(request: &Value) -> Value {
    let result =
        json!({ "resultType": "complete", "content": [{ "type": "text", "text": "done" }] });
    json!({ "jsonrpc": "2.0", "id": request["id"], "result": result })
}

/// Two valid tools, two that cannot be read, and one with an invalid header name.
fn tools() -> Value {
    json!([
        { "name": "fine", "inputSchema": { "type": "object" } },
        { "name": "odd", "description": 7, "inputSchema": { "type": "object" } },
        { "inputSchema": { "type": "object" } },
        { "name": "mirrored", "inputSchema": { "type": "object",
            "properties": { "region": { "type": "string", "x-mcp-header": "Region" } } } },
        { "name": "headless", "inputSchema": { "type": "object",
            "properties": { "region": { "type": "string", "x-mcp-header": "" } } } },
    ])
}

async fn assert_skipped(settings: McpServerSettings, names: &[&str]) {
    let server = super::server(vec![settings]).await;
    let api = server.operator();
    let source = wait_for_state(&api, "fixture", "ready").await;
    let skipped = source["skipped"].as_array().unwrap();
    let skipped_names: Vec<&Value> = skipped.iter().map(|skipped| &skipped["tool"]).collect();
    assert_eq!(skipped_names, names, "{source}");
    assert!(skipped[0]["why"].as_str().unwrap().contains("description"), "{source}");
    assert_eq!(result_text(&call(&api, "fixture.fine", json!({})).await), "done");
    assert_eq!(
        result_text(&call(&api, "fixture.mirrored", json!({ "region": "eu" })).await),
        "done"
    );
}

#[tokio::test]
async fn unreadable_tools_are_skipped_by_name_and_the_others_work() {
    let json_server = start_mcp_server(|request| {
        let answer = metadata_response(request, &tools()).unwrap_or_else(|| done_response(request));
        (JSON, answer.to_string()).into_response()
    });
    assert_skipped(http_upstream(&json_server.await), &["odd", "number 3", "headless"]).await;
    let streamed = start_mcp_server(|request| {
        let answer = metadata_response(request, &tools()).unwrap_or_else(|| done_response(request));
        (STREAM, format!("event: message\ndata: {answer}\n\n")).into_response()
    });
    assert_skipped(http_upstream(&streamed.await), &["odd", "number 3", "headless"]).await;
    // Over stdio there are no headers, so the header name does not matter.
    assert_skipped(program("odd"), &["odd", "number 3", "fixture.nonsense"]).await;
}

/// Runs the server on standard input and output, with one more invalid tool and another description
/// in each listing. After each call it announces that the list has changed.
pub fn on_pipes() {
    let mut listings = 0;
    for line in std::io::stdin().lines() {
        let request: Value = serde_json::from_str(&line.unwrap()).unwrap();
        if request["id"].is_null() {
            continue;
        }
        let mut tools = tools();
        listings += u32::from(request["method"] == "tools/list");
        tools[0]["description"] = format!("look {listings}").into();
        let schema = json!({ "type": "object", "properties": { "a": { "type": "nonsense" } } });
        tools.as_array_mut().unwrap().push(json!({ "name": "nonsense", "inputSchema": schema }));
        match metadata_response(&request, &tools) {
            Some(answer) => println!("{answer}"),
            None => {
                println!("{}", done_response(&request));
                let method = "notifications/tools/list_changed";
                println!("{}", json!({ "jsonrpc": "2.0", "method": method }));
            }
        }
    }
}

#[tokio::test]
async fn skipped_tools_are_reported_after_every_refresh() {
    let server = super::server(vec![McpServerSettings { older: true, ..program("odd") }]).await;
    let api = server.operator();
    call(&api, "fixture.fine", json!({})).await;
    let source = crate::support::until("another look", || async {
        let source = api.get("/v1/sources/mcp/fixture").await.is(200);
        (source["changes"] != json!([])).then_some(source)
    })
    .await;
    let skipped_names =
        source["skipped"].as_array().unwrap().iter().map(|skipped| &skipped["tool"]);
    assert_eq!(
        skipped_names.collect::<Vec<_>>(),
        ["odd", "number 3", "fixture.nonsense"],
        "{source}"
    );
}

/// Starts a server with an irreversible tool that refuses the first `times` calls.
async fn start_busy_server(
    older: bool,
    times: u32,
    refusal: fn() -> Response,
) -> (McpServerSettings, Arc<AtomicU32>) {
    let calls: Arc<AtomicU32> = Arc::default();
    let counted = calls.clone();
    let tools = json!([{ "name": "pay", "inputSchema": { "type": "object" } }]);
    let url = start_mcp_server(move |request| match metadata_response(request, &tools) {
        Some(answer) => (JSON, answer.to_string()).into_response(),
        None if counted.fetch_add(1, Ordering::SeqCst) < times => refusal(),
        None => (JSON, done_response(request).to_string()).into_response(),
    });
    (McpServerSettings { older, ..http_upstream(&url.await) }, calls)
}

#[tokio::test]
async fn a_rate_limited_call_is_retried_after_the_given_delay() {
    let with_body = || {
        let body = r#"{"jsonrpc":"2.0","id":null,"error":{"code":-32000,"message":"slow down"}}"#;
        (StatusCode::TOO_MANY_REQUESTS, JSON, [("retry-after", "1")], body).into_response()
    };
    let without_body =
        || (StatusCode::TOO_MANY_REQUESTS, [("retry-after", "1")], "").into_response();
    for (older, refusal) in
        [(false, with_body as fn() -> Response), (false, without_body), (true, without_body)]
    {
        let (settings, calls) = start_busy_server(older, 1, refusal).await;
        let server = super::server(vec![settings]).await;
        let began = Instant::now();
        let paid = call(&server.operator(), "fixture.pay", json!({})).await;
        assert_eq!(result_text(&paid), "done", "a refused call had no effect: {paid}");
        assert_eq!((paid["attempt"].as_u64(), calls.load(Ordering::SeqCst)), (Some(2), 2));
        assert!(began.elapsed() >= Duration::from_secs(1), "older: {older}, {:?}", began.elapsed());
    }
}

#[tokio::test]
async fn a_retry_delay_beyond_the_deadline_fails_the_call() {
    let much_later =
        || (StatusCode::TOO_MANY_REQUESTS, [("retry-after", "86400")], "").into_response();
    for older in [false, true] {
        let (settings, calls) = start_busy_server(older, u32::MAX, much_later).await;
        let server = super::server(vec![settings]).await;
        let began = Instant::now();
        let refused = call(&server.operator(), "fixture.pay", json!({})).await;
        assert_eq!(refused["error"]["code"], "RATE_LIMITED", "{refused}");
        assert_eq!(refused["error"]["detail"]["retry_after_ms"], 86_400_000, "{refused}");
        assert!(refused.to_string().contains("HTTP 429, retry after 86400 s"), "{refused}");
        assert_eq!(calls.load(Ordering::SeqCst), 1);
        assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    }
}

#[tokio::test]
async fn an_irreversible_call_is_not_retried_after_a_503() {
    let busy_now = || (StatusCode::SERVICE_UNAVAILABLE, [("retry-after", "0")], "").into_response();
    for older in [false, true] {
        let (settings, calls) = start_busy_server(older, 1, busy_now).await;
        let server = super::server(vec![settings]).await;
        let ended = call(&server.operator(), "fixture.pay", json!({})).await;
        assert_eq!(ended["error"]["code"], "OUTCOME_UNKNOWN", "{ended}");
        assert_eq!(calls.load(Ordering::SeqCst), 1);
    }
}

#[tokio::test]
async fn a_call_that_cannot_reach_a_legacy_upstream_is_unavailable() {
    let upstream = crate::support::upstream::Http::start().await;
    let server =
        super::server(vec![McpServerSettings { older: true, ..http_upstream(&upstream.url()) }])
            .await;
    let api = server.operator();
    drop(upstream.stop());
    let body = json!({ "run_id": "r", "args": {}, "retry": 0 });
    let id = api.invoke_with("fixture.fail", body).await;
    let ended = api.finished(&id).await;
    assert_eq!(ended["error"]["code"], "UPSTREAM_UNAVAILABLE", "{ended}");
}

#[tokio::test]
async fn an_invalid_tool_is_reported_until_its_definition_is_fixed() {
    let fixed: Arc<AtomicU32> = Arc::default();
    let is_fixed = fixed.clone();
    let url = start_mcp_server(move |request| {
        let kind = if is_fixed.load(Ordering::SeqCst) > 0 { "string" } else { "nonsense" };
        let odd = json!({ "type": "object", "properties": { "a": { "type": kind } } });
        let tools = json!([{ "name": "fine", "inputSchema": { "type": "object" } },
            { "name": "odd", "inputSchema": odd }]);
        (
            JSON,
            metadata_response(request, &tools)
                .unwrap_or_else(|| done_response(request))
                .to_string(),
        )
            .into_response()
    });
    let server = super::server(vec![http_upstream(&url.await)]).await;
    let api = server.operator();
    for _ in 0..2 {
        let source = wait_for_state(&api, "fixture", "ready").await;
        assert_eq!(
            (&source["tools"], &source["skipped"][0]["tool"]),
            (&json!(1), &json!("fixture.odd"))
        );
        api.post("/v1/sources/mcp/fixture/refresh", json!({})).await.is(200);
    }
    fixed.store(1, Ordering::SeqCst);
    api.post("/v1/sources/mcp/fixture/refresh", json!({})).await.is(200);
    crate::support::until("the tool to be taken", || async {
        let source = api.get("/v1/sources/mcp/fixture").await.is(200);
        (source["tools"] == 2 && source["skipped"] == json!([])).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_legacy_url_elicitation_error_holds_the_call() {
    let elicitation_error = |request: &Value| {
        let address = json!({ "mode": "url", "elicitationId": "e1", "message": "Sign in first",
            "url": "https://login.example.com/e1" });
        let error =
            json!({ "code": -32042, "message": "first", "data": { "elicitations": [address] } });
        json!({ "jsonrpc": "2.0", "id": request["id"], "error": error })
    };
    for (action, status, times) in [("accept", "SUCCEEDED", 2), ("decline", "FAILED", 1)] {
        let calls: Arc<AtomicU32> = Arc::default();
        let counted = calls.clone();
        let tools = json!([{ "name": "pay", "inputSchema": { "type": "object" } }]);
        let url = start_mcp_server(move |request| match metadata_response(request, &tools) {
            Some(answer) => (JSON, answer.to_string()).into_response(),
            None if counted.fetch_add(1, Ordering::SeqCst) == 0 => {
                (JSON, elicitation_error(request).to_string()).into_response()
            }
            None => (JSON, done_response(request).to_string()).into_response(),
        });
        let server =
            super::server(vec![McpServerSettings { older: true, ..http_upstream(&url.await) }])
                .await;
        let api = server.operator();
        let id = api.invoke("fixture.pay", json!({})).await;
        let paused = crate::support::until("the question", || async {
            let call = api.call(&id).await;
            (call["hold"] == "input").then_some(call)
        })
        .await;
        let question = &paused["hold_details"]["questions"]["e1"]["params"];
        assert_eq!(question["url"], "https://login.example.com/e1", "{paused}");
        let path = format!("/v1/tool_calls/{id}/answer");
        api.post(&path, json!({ "answers": { "e1": { "action": action } } })).await.is(200);
        assert_eq!(api.finished(&id).await["status"], status);
        assert_eq!(calls.load(Ordering::SeqCst), times);
    }
}

#[tokio::test]
async fn a_legacy_upstream_that_floods_over_http_is_restarted() {
    let tools = json!([{ "name": "flood", "inputSchema": { "type": "object" } },
        { "name": "fine", "inputSchema": { "type": "object" } }]);
    let url = start_mcp_server(move |request| match metadata_response(request, &tools) {
        Some(answer) => (JSON, answer.to_string()).into_response(),
        None if request["params"]["name"] == "flood" => {
            let notification = json!({ "jsonrpc": "2.0", "method": "notifications/message",
                "params": { "level": "info", "data": "water" } });
            (STREAM, format!("data: {notification}\n\n").repeat(20_000)).into_response()
        }
        None => (JSON, done_response(request).to_string()).into_response(),
    });
    let server =
        super::server(vec![McpServerSettings { older: true, ..http_upstream(&url.await) }]).await;
    let api = server.operator();
    let ended = call(&api, "fixture.flood", json!({})).await;
    assert_eq!(ended["error"]["code"], "OUTCOME_UNKNOWN", "{ended}");
    assert!(
        ended["error"]["message"].as_str().unwrap().contains("unsolicited messages per second"),
        "{ended}"
    );
    crate::support::until("it to be begun again", || async {
        let source = api.get("/v1/sources/mcp/fixture").await.is(200);
        (source["state"] == "ready" && source["restarts"] == 1).then_some(())
    })
    .await;
    assert_eq!(result_text(&call(&api, "fixture.fine", json!({})).await), "done");
}

#[tokio::test]
async fn a_response_to_another_request_ends_with_outcome_unknown() {
    let tools = json!([{ "name": "pay", "inputSchema": { "type": "object" } }]);
    let url = start_mcp_server(move |request| {
        let other = || done_response(&json!({ "id": 99_999 }));
        (JSON, metadata_response(request, &tools).unwrap_or_else(other).to_string()).into_response()
    });
    let server =
        super::server(vec![McpServerSettings { older: true, ..http_upstream(&url.await) }]).await;
    let ended = call(&server.operator(), "fixture.pay", json!({})).await;
    assert_eq!(ended["error"]["code"], "OUTCOME_UNKNOWN", "{ended}");
    assert!(ended.to_string().contains("another request"), "{ended}");
}

#[tokio::test]
async fn logs_of_a_call_reach_the_request_that_asks_for_them() {
    let url = start_mcp_server(|request| match metadata_response(request, &tools()) {
        Some(response) => (JSON, response.to_string()).into_response(),
        None => {
            let level = &request["params"]["_meta"]["io.modelcontextprotocol/logLevel"];
            let log = json!({ "jsonrpc": "2.0", "method": "notifications/message",
                "params": { "level": "warning", "logger": "disk", "data": { "left": 3 } } });
            let logs = if level.is_string() { format!("data: {log}\n\n") } else { String::new() };
            let done = done_response(request);
            (STREAM, format!("{logs}data: {done}\n\n")).into_response()
        }
    })
    .await;
    let server = super::server(vec![http_upstream(&url)]).await;
    let api = server.operator();
    wait_for_state(&api, "fixture", "ready").await;
    let client = Mcp::modern(&api);
    for (level, count) in [(Some("info"), 1), (Some("error"), 0), (None, 0)] {
        let mut params = json!({ "name": "fixture__fine", "arguments": {} });
        if let Some(level) = level {
            params["_meta"] = json!({ "io.modelcontextprotocol/logLevel": level });
        }
        let response = client.ask("tools/call", params).await;
        assert_eq!(response.result()["content"][0]["text"], "done", "{}", response.text);
        let logs: Vec<&Value> = response
            .messages
            .iter()
            .filter(|message| message["method"] == "notifications/message")
            .map(|message| &message["params"])
            .collect();
        assert_eq!(logs.len(), count, "{level:?}: {}", response.text);
        for log in logs {
            assert_eq!(log["logger"], "fixture.disk");
            assert_eq!(log["data"], json!({ "left": 3 }));
        }
    }
}
