//! Upstreams that are not quite as MCP has it, or have too much to do: what can be used of them is,
//! and the rest is said.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use toolcrib_sources::mcp::McpServerSettings;

use super::{at, call, in_state, words};
use crate::support::upstream::program;

const JSON: [(&str, &str); 1] = [("content-type", "application/json")];
const STREAM: [(&str, &str); 1] = [("content-type", "text/event-stream")];

/// An MCP server that is one function: what it answers to a request; none where it is its own.
async fn serving(answer: impl Fn(&Value) -> Response + Clone + Send + Sync + 'static) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/mcp", listener.local_addr().unwrap());
    let asked = move |body: String| {
        let answer = answer(&serde_json::from_str(&body).unwrap());
        async move { answer }
    };
    let router = axum::Router::new().route("/mcp", axum::routing::post(asked));
    tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    url
}

/// What a server of either revision says when it is asked who it is, and what its tools are.
fn about(asked: &Value, tools: &Value) -> Option<Value> {
    let result = match asked["method"].as_str() {
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
    Some(json!({ "jsonrpc": "2.0", "id": asked["id"], "result": result }))
}

fn done(asked: &Value) -> Value {
    let result =
        json!({ "resultType": "complete", "content": [{ "type": "text", "text": "done" }] });
    json!({ "jsonrpc": "2.0", "id": asked["id"], "result": result })
}

/// A tool that is fine, two that are not, and one whose headers nobody can send.
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

async fn leaves_out(settings: McpServerSettings, names: &[&str]) {
    let server = super::server(vec![settings]).await;
    let api = server.api();
    let shown = in_state(&api, "fixture", "ready").await;
    let skipped = shown["skipped"].as_array().unwrap();
    let left_out: Vec<&Value> = skipped.iter().map(|skipped| &skipped["tool"]).collect();
    assert_eq!(left_out, names, "{shown}");
    assert!(skipped[0]["why"].as_str().unwrap().contains("description"), "{shown}");
    assert_eq!(words(&call(&api, "fixture.fine", json!({})).await), "done");
    assert_eq!(words(&call(&api, "fixture.mirrored", json!({ "region": "eu" })).await), "done");
}

#[tokio::test]
async fn a_tool_that_cannot_be_read_is_left_out_by_name_and_the_others_work() {
    let in_one = serving(|asked| {
        let answer = about(asked, &tools()).unwrap_or_else(|| done(asked));
        (JSON, answer.to_string()).into_response()
    });
    leaves_out(at(&in_one.await), &["odd", "number 3", "headless"]).await;
    let streamed = serving(|asked| {
        let answer = about(asked, &tools()).unwrap_or_else(|| done(asked));
        (STREAM, format!("event: message\ndata: {answer}\n\n")).into_response()
    });
    leaves_out(at(&streamed.await), &["odd", "number 3", "headless"]).await;
    // Over pipes no headers are sent, and so none can be wrong.
    leaves_out(program("odd"), &["odd", "number 3", "fixture.nonsense"]).await;
}

/// The program: what it is over HTTP, on its standard input and output; with one more tool that
/// cannot be used, and with another description whenever it is asked. After each call it says so.
pub fn on_pipes() {
    let mut looks = 0;
    for line in std::io::stdin().lines() {
        let asked: Value = serde_json::from_str(&line.unwrap()).unwrap();
        if asked["id"].is_null() {
            continue;
        }
        let mut tools = tools();
        looks += u32::from(asked["method"] == "tools/list");
        tools[0]["description"] = format!("look {looks}").into();
        let schema = json!({ "type": "object", "properties": { "a": { "type": "nonsense" } } });
        tools.as_array_mut().unwrap().push(json!({ "name": "nonsense", "inputSchema": schema }));
        match about(&asked, &tools) {
            Some(answer) => println!("{answer}"),
            None => {
                println!("{}", done(&asked));
                let news = "notifications/tools/list_changed";
                println!("{}", json!({ "jsonrpc": "2.0", "method": news }));
            }
        }
    }
}

#[tokio::test]
async fn what_was_left_out_is_said_after_every_look() {
    let server = super::server(vec![McpServerSettings { older: true, ..program("odd") }]).await;
    let api = server.api();
    call(&api, "fixture.fine", json!({})).await;
    let shown = crate::support::until("another look", || async {
        let shown = api.get("/v1/sources/mcp/fixture").await.is(200);
        (shown["changes"] != json!([])).then_some(shown)
    })
    .await;
    let left_out = shown["skipped"].as_array().unwrap().iter().map(|skipped| &skipped["tool"]);
    assert_eq!(left_out.collect::<Vec<_>>(), ["odd", "number 3", "fixture.nonsense"], "{shown}");
}

/// One with a tool that cannot be undone, which is answered so before it is done.
async fn busy(
    older: bool,
    times: u32,
    refusal: fn() -> Response,
) -> (McpServerSettings, Arc<AtomicU32>) {
    let calls: Arc<AtomicU32> = Arc::default();
    let counted = calls.clone();
    let tools = json!([{ "name": "pay", "inputSchema": { "type": "object" } }]);
    let url = serving(move |asked| match about(asked, &tools) {
        Some(answer) => (JSON, answer.to_string()).into_response(),
        None if counted.fetch_add(1, Ordering::SeqCst) < times => refusal(),
        None => (JSON, done(asked).to_string()).into_response(),
    });
    (McpServerSettings { older, ..at(&url.await) }, calls)
}

#[tokio::test]
async fn one_that_says_when_to_come_again_is_asked_then() {
    let in_words = || {
        let body = r#"{"jsonrpc":"2.0","id":null,"error":{"code":-32000,"message":"slow down"}}"#;
        (StatusCode::TOO_MANY_REQUESTS, JSON, [("retry-after", "1")], body).into_response()
    };
    let bare = || (StatusCode::TOO_MANY_REQUESTS, [("retry-after", "1")], "").into_response();
    for (older, refusal) in [(false, in_words as fn() -> Response), (false, bare), (true, bare)] {
        let (settings, calls) = busy(older, 1, refusal).await;
        let server = super::server(vec![settings]).await;
        let began = Instant::now();
        let paid = call(&server.api(), "fixture.pay", json!({})).await;
        assert_eq!(words(&paid), "done", "it was turned away, and so has not happened: {paid}");
        assert_eq!((paid["attempt"].as_u64(), calls.load(Ordering::SeqCst)), (Some(2), 2));
        assert!(began.elapsed() >= Duration::from_secs(1), "older: {older}, {:?}", began.elapsed());
    }
}

#[tokio::test]
async fn one_that_wants_to_be_asked_after_the_deadline_is_not_waited_for() {
    let much_later =
        || (StatusCode::TOO_MANY_REQUESTS, [("retry-after", "86400")], "").into_response();
    for older in [false, true] {
        let (settings, calls) = busy(older, u32::MAX, much_later).await;
        let server = super::server(vec![settings]).await;
        let began = Instant::now();
        let refused = call(&server.api(), "fixture.pay", json!({})).await;
        assert_eq!(refused["error"]["code"], "RATE_LIMITED", "{refused}");
        assert_eq!(refused["error"]["detail"]["retry_after_ms"], 86_400_000, "{refused}");
        assert!(refused.to_string().contains("HTTP 429, to come again after 86400 s"), "{refused}");
        assert_eq!(calls.load(Ordering::SeqCst), 1);
        assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    }
}

#[tokio::test]
async fn what_a_busy_server_may_have_begun_is_not_begun_again() {
    let busy_now = || (StatusCode::SERVICE_UNAVAILABLE, [("retry-after", "0")], "").into_response();
    for older in [false, true] {
        let (settings, calls) = busy(older, 1, busy_now).await;
        let server = super::server(vec![settings]).await;
        let ended = call(&server.api(), "fixture.pay", json!({})).await;
        assert_eq!(ended["error"]["code"], "OUTCOME_UNKNOWN", "{ended}");
        assert_eq!(calls.load(Ordering::SeqCst), 1);
    }
}

#[tokio::test]
async fn a_call_that_did_not_reach_one_of_before_is_known_not_to_have_happened() {
    let upstream = crate::support::upstream::Http::start().await;
    let server =
        super::server(vec![McpServerSettings { older: true, ..at(&upstream.url()) }]).await;
    let api = server.api();
    drop(upstream.stop());
    let body = json!({ "run_id": "r", "args": {}, "retry": 0 });
    let id = api.invoke_with("fixture.fail", body).await;
    let ended = api.finished(&id).await;
    assert_eq!(ended["error"]["code"], "UPSTREAM_UNAVAILABLE", "{ended}");
}

#[tokio::test]
async fn a_tool_that_cannot_be_used_is_shown_as_long_as_it_is_offered_so() {
    let mended: Arc<AtomicU32> = Arc::default();
    let now = mended.clone();
    let url = serving(move |asked| {
        let kind = if now.load(Ordering::SeqCst) > 0 { "string" } else { "nonsense" };
        let odd = json!({ "type": "object", "properties": { "a": { "type": kind } } });
        let tools = json!([{ "name": "fine", "inputSchema": { "type": "object" } },
            { "name": "odd", "inputSchema": odd }]);
        (JSON, about(asked, &tools).unwrap_or_else(|| done(asked)).to_string()).into_response()
    });
    let server = super::server(vec![at(&url.await)]).await;
    let api = server.api();
    for _ in 0..2 {
        let shown = in_state(&api, "fixture", "ready").await;
        assert_eq!(
            (&shown["tools"], &shown["skipped"][0]["tool"]),
            (&json!(1), &json!("fixture.odd"))
        );
        api.post("/v1/sources/mcp/fixture/refresh", json!({})).await.is(200);
    }
    mended.store(1, Ordering::SeqCst);
    api.post("/v1/sources/mcp/fixture/refresh", json!({})).await.is(200);
    crate::support::until("the tool to be taken", || async {
        let shown = api.get("/v1/sources/mcp/fixture").await.is(200);
        (shown["tools"] == 2 && shown["skipped"] == json!([])).then_some(())
    })
    .await;
}

#[tokio::test]
async fn one_of_before_that_wants_an_address_to_be_opened_first_waits_for_that() {
    let first = |asked: &Value| {
        let address = json!({ "mode": "url", "elicitationId": "e1", "message": "Sign in first",
            "url": "https://login.example.com/e1" });
        let error =
            json!({ "code": -32042, "message": "first", "data": { "elicitations": [address] } });
        json!({ "jsonrpc": "2.0", "id": asked["id"], "error": error })
    };
    for (action, status, times) in [("accept", "SUCCEEDED", 2), ("decline", "FAILED", 1)] {
        let calls: Arc<AtomicU32> = Arc::default();
        let counted = calls.clone();
        let tools = json!([{ "name": "pay", "inputSchema": { "type": "object" } }]);
        let url = serving(move |asked| match about(asked, &tools) {
            Some(answer) => (JSON, answer.to_string()).into_response(),
            None if counted.fetch_add(1, Ordering::SeqCst) == 0 => {
                (JSON, first(asked).to_string()).into_response()
            }
            None => (JSON, done(asked).to_string()).into_response(),
        });
        let server = super::server(vec![McpServerSettings { older: true, ..at(&url.await) }]).await;
        let api = server.api();
        let id = api.invoke("fixture.pay", json!({})).await;
        let asked = crate::support::until("the question", || async {
            let call = api.call(&id).await;
            (call["hold"]["reason"] == "input").then_some(call)
        })
        .await;
        let question = &asked["hold"]["questions"]["e1"]["params"];
        assert_eq!(question["url"], "https://login.example.com/e1", "{asked}");
        let path = format!("/v1/tool_calls/{id}/answer");
        api.post(&path, json!({ "answers": { "e1": { "action": action } } })).await.is(200);
        assert_eq!(api.finished(&id).await["status"], status);
        assert_eq!(calls.load(Ordering::SeqCst), times);
    }
}

#[tokio::test]
async fn one_of_before_that_floods_over_http_is_begun_again() {
    let tools = json!([{ "name": "flood", "inputSchema": { "type": "object" } },
        { "name": "fine", "inputSchema": { "type": "object" } }]);
    let url = serving(move |asked| match about(asked, &tools) {
        Some(answer) => (JSON, answer.to_string()).into_response(),
        None if asked["params"]["name"] == "flood" => {
            let news = json!({ "jsonrpc": "2.0", "method": "notifications/message",
                "params": { "level": "info", "data": "water" } });
            (STREAM, format!("data: {news}\n\n").repeat(20_000)).into_response()
        }
        None => (JSON, done(asked).to_string()).into_response(),
    });
    let server = super::server(vec![McpServerSettings { older: true, ..at(&url.await) }]).await;
    let api = server.api();
    let ended = call(&api, "fixture.flood", json!({})).await;
    assert_eq!(ended["error"]["code"], "OUTCOME_UNKNOWN", "{ended}");
    assert!(ended["error"]["message"].as_str().unwrap().contains("floods"), "{ended}");
    crate::support::until("it to be begun again", || async {
        let shown = api.get("/v1/sources/mcp/fixture").await.is(200);
        (shown["state"] == "ready" && shown["restarts"] == 1).then_some(())
    })
    .await;
    assert_eq!(words(&call(&api, "fixture.fine", json!({})).await), "done");
}

#[tokio::test]
async fn one_of_before_that_answers_something_else_is_not_waited_for() {
    let tools = json!([{ "name": "pay", "inputSchema": { "type": "object" } }]);
    let url = serving(move |asked| {
        let other = || done(&json!({ "id": 99_999 }));
        (JSON, about(asked, &tools).unwrap_or_else(other).to_string()).into_response()
    });
    let server = super::server(vec![McpServerSettings { older: true, ..at(&url.await) }]).await;
    let ended = call(&server.api(), "fixture.pay", json!({})).await;
    assert_eq!(ended["error"]["code"], "OUTCOME_UNKNOWN", "{ended}");
    assert!(ended.to_string().contains("another request"), "{ended}");
}
