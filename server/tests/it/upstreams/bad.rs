//! Upstreams that misbehave: a clear state on the source, a clear fault on the call, and nobody
//! else notices.

use std::sync::atomic::Ordering;

use serde_json::{Value, json};
use toolcrib_sources::mcp::McpServerSettings;

use super::{at, call, in_state, server, words};
use crate::support::mcp::Mcp;
use crate::support::upstream::{Http, program};
use crate::support::{Api, Server, process, until};

/// One that misbehaves, beside one that does not.
async fn beside(bad: McpServerSettings) -> (Server, Http) {
    let good = Http::start().await;
    let good_one = McpServerSettings { name: "good".into(), ..at(&good.url()) };
    let server = Server::with(|config| config.mcp = vec![bad, good_one]).await;
    in_state(&server.api(), "good", "ready").await;
    (server, good)
}

async fn others_do_not_notice(api: &Api) {
    let done = call(api, "good.echo", json!({ "text": "fine" })).await;
    assert_eq!(words(&done), "fine");
}

fn problem(shown: &Value) -> &str {
    shown["problem"].as_str().unwrap_or_else(|| panic!("no problem: {shown}"))
}

#[tokio::test]
async fn one_that_never_answers() {
    let settings = McpServerSettings { connect_timeout_ms: 300, ..program("mute") };
    let (server, _good) = beside(settings).await;
    let api = server.api();
    let shown = in_state(&api, "fixture", "waiting").await;
    assert!(problem(&shown).contains("did not answer within 300 ms"), "{shown}");
    assert!(problem(&shown).contains("not a word"), "its last words are told: {shown}");
    others_do_not_notice(&api).await;
}

#[tokio::test]
async fn a_tool_that_never_answers() {
    let (server, _good) = beside(program("good")).await;
    let api = server.api();
    in_state(&api, "fixture", "ready").await;
    let body = json!({ "run_id": "r", "args": {}, "timeout_ms": 300 });
    let id = api.invoke_with("fixture.silent", body).await;
    let ended = api.finished(&id).await;
    assert_eq!(ended["status"], "TIMEOUT", "{ended}");
    assert_eq!(words(&call(&api, "fixture.echo", json!({ "text": "still" })).await), "still");
    others_do_not_notice(&api).await;
}

#[tokio::test]
async fn one_whose_list_of_tools_does_not_come_any_more() {
    let bad = Http::start().await;
    let settings = McpServerSettings { connect_timeout_ms: 1_500, ..at(&bad.url()) };
    let (server, _good) = beside(settings).await;
    let api = server.api();
    in_state(&api, "fixture", "ready").await;
    bad.fixture.shared.deaf.store(true, Ordering::SeqCst);
    bad.fixture.change();
    let shown = in_state(&api, "fixture", "waiting").await;
    assert!(problem(&shown).contains("its list of tools did not come within 1.5s"), "{shown}");
    bad.fixture.shared.deaf.store(false, Ordering::SeqCst);
    in_state(&api, "fixture", "ready").await;
    others_do_not_notice(&api).await;
}

#[tokio::test]
async fn one_that_does_not_start() {
    let (server, _good) = beside(program("broken")).await;
    let api = server.api();
    let shown = in_state(&api, "fixture", "waiting").await;
    assert!(problem(&shown).contains("exit status: 7"), "{shown}");
    assert!(problem(&shown).contains("cannot find my configuration"), "{shown}");
    others_do_not_notice(&api).await;
    let missing = McpServerSettings {
        name: "missing".into(),
        command: Some("/nonexistent/program".into()),
        ..McpServerSettings::default()
    };
    let missing = serde_json::to_value(missing).unwrap();
    api.post("/v1/sources/mcp", missing).await.is(201);
    let shown = in_state(&api, "missing", "waiting").await;
    assert!(problem(&shown).contains("cannot be started"), "{shown}");
}

#[tokio::test]
async fn one_that_writes_nothing_but_noise() {
    let (server, _good) = beside(program("noise")).await;
    let api = server.api();
    let shown = in_state(&api, "fixture", "waiting").await;
    assert!(problem(&shown).contains("no message of MCP"), "{shown}");
    others_do_not_notice(&api).await;
}

#[tokio::test]
async fn a_tool_that_answers_garbage() {
    let (server, _good) = beside(program("good")).await;
    let api = server.api();
    in_state(&api, "fixture", "ready").await;
    let ended = call(&api, "fixture.garbage", json!({})).await;
    assert_eq!(ended["error"]["code"], "OUTCOME_UNKNOWN", "{ended}");
    assert!(ended["error"]["message"].as_str().unwrap().contains("no message of MCP"), "{ended}");
    // It is begun again by itself.
    until("it to be begun again", || async {
        let shown = api.get("/v1/sources/mcp/fixture").await.is(200);
        (shown["state"] == "ready" && shown["restarts"] == 1).then_some(())
    })
    .await;
    assert_eq!(words(&call(&api, "fixture.echo", json!({ "text": "back" })).await), "back");
    others_do_not_notice(&api).await;
}

#[tokio::test]
async fn a_tool_whose_answer_is_larger_than_a_message_may_be() {
    let (server, _good) = beside(program("good")).await;
    let api = server.api();
    in_state(&api, "fixture", "ready").await;
    let ended = call(&api, "fixture.huge", json!({})).await;
    assert_eq!(ended["error"]["code"], "OUTCOME_UNKNOWN", "{ended}");
    let message = ended["error"]["message"].as_str().unwrap();
    assert!(message.contains("it wrote a message over 16 MiB"), "{message}");
    until("it to be begun again", || async {
        let shown = api.get("/v1/sources/mcp/fixture").await.is(200);
        (shown["state"] == "ready" && shown["restarts"] == 1).then_some(())
    })
    .await;
    others_do_not_notice(&api).await;
}

#[tokio::test]
async fn one_whose_refusals_have_its_secret_in_them() {
    let mut settings = program("good");
    settings.env.insert("TOKEN".into(), "sesame-open-123".into());
    let server = super::server(vec![settings]).await;
    let ended = call(&server.api(), "fixture.leak", json!({})).await;
    assert_eq!(ended["error"]["message"], "fixture: no entry with [TOKEN]", "{ended}");
}

#[tokio::test]
async fn one_with_a_tool_that_cannot_be_read() {
    let about = json!({ "protocolVersion": "2025-11-25", "capabilities": { "tools": {} },
        "serverInfo": { "name": "odd", "version": "1" } });
    let url = answering(move |method| match method {
        "initialize" => about.to_string(),
        _ => json!({ "tools": [
            { "name": "fine", "inputSchema": { "type": "object" } },
            { "name": "odd", "inputSchema": { "type": "object" }, "description": 7 },
        ] })
        .to_string(),
    })
    .await;
    let settings = McpServerSettings { older: true, ..at(&url) };
    let server = super::server(vec![settings]).await;
    let shown = in_state(&server.api(), "fixture", "ready").await;
    assert_eq!(shown["tools"], 1, "{shown}");
    assert_eq!(shown["skipped"][0]["tool"], "odd", "{shown}");
    assert!(shown["skipped"][0]["why"].as_str().unwrap().contains("cannot be read"), "{shown}");
}

#[tokio::test]
async fn one_that_does_not_say_what_lies_beside_its_tools() {
    let url = silent_beside().await;
    let (server, _good) = beside(at(&url)).await;
    let api = server.api();
    in_state(&api, "fixture", "ready").await;
    let client = Mcp::modern(&api);
    // Whoever asks first waits for it; everybody afterwards does not.
    let listed = client.ask("resources/list", json!({})).await.result();
    assert_eq!(listed["resources"][0]["uri"], "fixture://notes", "{listed}");
    let shown = api.get("/v1/sources/mcp/fixture").await.is(200);
    assert_eq!(problem(&shown), "it does not answer resources/list");
    let began = std::time::Instant::now();
    client.ask("resources/list", json!({})).await.result();
    assert!(began.elapsed().as_secs() < 5, "{:?}", began.elapsed());
}

#[tokio::test]
async fn one_that_floods() {
    let (server, _good) = beside(program("good")).await;
    let api = server.api();
    in_state(&api, "fixture", "ready").await;
    let ended = call(&api, "fixture.flood", json!({})).await;
    assert_eq!(ended["error"]["code"], "OUTCOME_UNKNOWN", "{ended}");
    assert!(ended["error"]["message"].as_str().unwrap().contains("floods"), "{ended}");
    others_do_not_notice(&api).await;
}

#[tokio::test]
async fn one_that_dies_in_mid_call() {
    let once = tempfile::tempdir().unwrap();
    let mut settings = program("good");
    let file = once.path().join("once").to_str().unwrap().to_owned();
    settings.env.insert("ONCE".into(), file);
    let (server, _good) = beside(settings).await;
    let api = server.api();
    in_state(&api, "fixture", "ready").await;
    // It may have happened: it is not tried again.
    let ended = call(&api, "fixture.die", json!({})).await;
    assert_eq!(ended["error"]["code"], "OUTCOME_UNKNOWN", "{ended}");
    assert_eq!(ended["attempt"], 1);
    let shown = until("it to be begun again", || async {
        let shown = api.get("/v1/sources/mcp/fixture").await.is(200);
        (shown["state"] == "ready" && shown["restarts"] == 1).then_some(shown)
    })
    .await;
    assert!(shown["pid"].is_number());
    // What only reads is tried again.
    let body = json!({ "run_id": "r", "args": {}, "retry": 5, "timeout_ms": 40_000 });
    let id = api.invoke_with("fixture.die_once", body).await;
    let ended = api.finished(&id).await;
    assert_eq!(words(&ended), "alive", "{ended}");
    assert!(ended["attempt"].as_u64().unwrap() > 1, "{ended}");
    others_do_not_notice(&api).await;
}

#[tokio::test]
async fn one_that_offers_five_thousand_tools() {
    let (server, _good) = beside(program("many")).await;
    let api = server.api();
    let shown = in_state(&api, "fixture", "ready").await;
    assert_eq!(shown["tools"], 1_000, "{}", shown["problem"]);
    assert!(problem(&shown).contains("max_tools is 1000"), "{}", shown["problem"]);
    others_do_not_notice(&api).await;
}

#[tokio::test]
async fn one_whose_description_speaks_to_the_model() {
    let upstream = Http::start().await;
    let server = server(vec![at(&upstream.url())]).await;
    let api = server.api();
    let tool = api.get("/v1/tools/fixture.evil").await.is(200);
    assert!(tool["description"].as_str().unwrap().contains("<IMPORTANT>"), "shown as it is");
    let flags = &tool["metadata"]["flags"];
    assert!(flags.to_string().contains("tells_to_ignore"), "{tool}");
    let shown = api.get("/v1/sources/mcp/fixture").await.is(200);
    assert_eq!(shown["flagged"], json!(["fixture.evil"]));
    let client = crate::support::mcp::Mcp::modern(&api);
    let listed = client.ask("tools/list", json!({})).await.result();
    let of = |name: &str| {
        let tools = listed["tools"].as_array().unwrap();
        tools.iter().find(|tool| tool["name"] == name).unwrap().clone()
    };
    assert!(of("fixture.evil")["_meta"]["toolcrib/flags"].is_array(), "{listed}");
    assert!(of("fixture.echo")["_meta"]["toolcrib/flags"].is_null());
    let client = client.at("/mcp?catalogue=search");
    let params = json!({ "name": "tools.describe", "arguments": { "names": ["fixture.evil"] } });
    let described = client.ask("tools/call", params).await.result();
    assert!(described.to_string().contains("tells_to_ignore"), "{described}");
}

/// An MCP server that is one function: what it answers to each method.
async fn answering(answer: impl Fn(&str) -> String + Clone + Send + Sync + 'static) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/mcp", listener.local_addr().unwrap());
    let asked = move |body: String| {
        let body: serde_json::Value = serde_json::from_str(&body).unwrap();
        let result = answer(body["method"].as_str().unwrap_or_default());
        let text = format!("{{\"jsonrpc\":\"2.0\",\"id\":{},\"result\":{result}}}", body["id"]);
        async move { ([("content-type", "application/json")], text) }
    };
    let router = axum::Router::new().route("/mcp", axum::routing::post(asked));
    tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    url
}

/// An MCP server that does not answer when it is asked for its resources.
async fn silent_beside() -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/mcp", listener.local_addr().unwrap());
    let asked = |asked: String| async move {
        let asked: Value = serde_json::from_str(&asked).unwrap();
        let result: Value = match asked["method"].as_str() {
            Some("resources/list") => std::future::pending().await,
            Some("server/discover") => serde_json::from_str(ABOUT).unwrap(),
            _ => json!({ "resultType": "complete", "ttlMs": 0, "cacheScope": "private",
                "tools": [] }),
        };
        axum::Json(json!({ "jsonrpc": "2.0", "id": asked["id"], "result": result }))
    };
    let router = axum::Router::new().route("/mcp", axum::routing::post(asked));
    tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    url
}

/// An MCP server with one tool, each call of which it refuses so.
async fn refusing(status: u16, body: &'static str) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/mcp", listener.local_addr().unwrap());
    let asked = move |asked: String| async move {
        let asked: Value = serde_json::from_str(&asked).unwrap();
        let result = match asked["method"].as_str() {
            Some("tools/call") => None,
            Some("server/discover") => Some(serde_json::from_str(ABOUT).unwrap()),
            _ => Some(json!({ "resultType": "complete", "ttlMs": 0, "cacheScope": "private",
                "tools": [{ "name": "pay", "inputSchema": { "type": "object" } }] })),
        };
        let json = [("content-type", "application/json")];
        let (status, text) = match result {
            None => (status, body.to_owned()),
            Some(result) => {
                (200, json!({ "jsonrpc": "2.0", "id": asked["id"], "result": result }).to_string())
            }
        };
        (axum::http::StatusCode::from_u16(status).unwrap(), json, text)
    };
    let router = axum::Router::new().route("/mcp", axum::routing::post(asked));
    tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    url
}

#[tokio::test]
async fn one_that_turns_calls_away_with_json_of_its_own() {
    for (status, body) in [(403, r#"{"error":"insufficient_scope"}"#), (429, r#"{"error":"slow"}"#)]
    {
        let server = super::server(vec![at(&refusing(status, body).await)]).await;
        let api = server.api();
        let id = api.invoke("fixture.pay", json!({})).await;
        let ended = api.finished(&id).await;
        assert_eq!(ended["status"], "FAILED", "{ended}");
        let error = ended.to_string();
        assert!(error.contains(&format!("HTTP {status}")), "{ended}");
        assert!(!error.contains("OUTCOME_UNKNOWN"), "it is known not to have happened: {ended}");
    }
}

/// What every server says about itself.
const ABOUT: &str = r#"{"resultType":"complete","supportedVersions":["2026-07-28"],
    "capabilities":{"tools":{},"resources":{},"prompts":{}},"ttlMs":0,"cacheScope":"private",
    "serverInfo":{"name":"endless","version":"1"}}"#;

#[tokio::test]
async fn one_whose_answer_is_larger_than_memory_should_be() {
    let url = answering(|method| match method {
        "server/discover" => ABOUT.to_owned(),
        _ => format!("{{\"tools\":[],\"filling\":\"{}\"}}", "x".repeat(17 << 20)),
    })
    .await;
    let server = Server::with(|config| config.mcp = vec![at(&url)]).await;
    let shown = in_state(&server.api(), "fixture", "waiting").await;
    let problem = shown["problem"].as_str().unwrap();
    assert!(problem.contains("over 16777216 bytes"), "{problem}");
}

#[tokio::test]
async fn one_whose_lists_do_not_end() {
    let more = r#""nextCursor":"more","resultType":"complete","ttlMs":0,"cacheScope":"private"}"#;
    let url = answering(move |method| match method {
        "server/discover" => ABOUT.to_owned(),
        "tools/list" => {
            r#"{"tools":[],"resultType":"complete","ttlMs":0,"cacheScope":"private"}"#.to_owned()
        }
        "resources/list" => format!("{{\"resources\":[],{more}"),
        "prompts/list" => format!("{{\"prompts\":[],{more}"),
        _ => format!("{{\"tools\":[],{more}"),
    })
    .await;
    let server = super::server(vec![at(&url)]).await;
    // What it has is left out, and everybody else is answered.
    let client = Mcp::modern(&server.api());
    let listed = client.ask("resources/list", json!({})).await.result();
    assert_eq!(listed["resources"], json!([]), "{listed}");
    let listed = client.ask("prompts/list", json!({})).await.result();
    assert_eq!(listed["prompts"], json!([]), "{listed}");
}

#[tokio::test]
async fn states_restarts_and_calls_are_counted() {
    let upstream = Http::start().await;
    let mut crib = process::Server::new();
    crib.start().await;
    let api = Api::new(&format!("127.0.0.1:{}", crib.port));
    let added = json!({ "name": "fixture", "url": upstream.url() });
    api.post("/v1/sources/mcp?wait_ms=20000", added).await.is(201);
    let gone = json!({ "name": "gone", "url": "http://127.0.0.1:9/mcp" });
    api.post("/v1/sources/mcp?wait_ms=20000", gone).await.is(201);
    call(&api, "fixture.echo", json!({ "text": "x" })).await;
    call(&api, "fixture.fail", json!({})).await;
    let counted = api.get("/metrics").await.text;
    for line in [
        "toolcrib_upstreams{state=\"ready\"} 1",
        "toolcrib_upstreams{state=\"off\"} 0",
        "toolcrib_upstreams{state=\"needs_sign_in\"} 0",
        "toolcrib_upstream_calls_total{outcome=\"ok\"} 1",
        "toolcrib_upstream_calls_total{outcome=\"failed\"} 1",
    ] {
        assert!(counted.contains(line), "{line} in {counted}");
    }
    let restarts =
        counted.lines().find_map(|l| l.strip_prefix("toolcrib_upstream_restarts_total "));
    assert!(restarts.unwrap().parse::<u64>().unwrap() >= 1, "{counted}");
    crib.stop().await;
}
