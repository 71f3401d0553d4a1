//! Upstreams that misbehave: the source shows the problem, the call gets a clear fault, and other
//! upstreams are not affected.

use std::sync::atomic::Ordering;

use serde_json::{Value, json};
use toolcrib_sources::mcp::McpServerSettings;

use super::{call, http_upstream, result_text, server, wait_for_state};
use crate::support::mcp::Mcp;
use crate::support::upstream::{Http, program};
use crate::support::{Api, Server, process, until};

/// Starts a server with a misbehaving upstream and a healthy one.
async fn start_with_healthy_upstream(bad: McpServerSettings) -> (Server, Http) {
    let good = Http::start().await;
    let good_one = McpServerSettings { name: "good".into(), ..http_upstream(&good.url()) };
    let server = Server::with(|config| config.mcp = vec![bad, good_one]).await;
    wait_for_state(&server.operator(), "good", "ready").await;
    (server, good)
}

async fn assert_healthy_upstream_works(api: &Api) {
    let done = call(api, "good.echo", json!({ "text": "fine" })).await;
    assert_eq!(result_text(&done), "fine");
}

fn problem(source: &Value) -> &str {
    source["problem"].as_str().unwrap_or_else(|| panic!("no problem: {source}"))
}

#[tokio::test]
async fn an_upstream_that_never_answers_is_reported() {
    let settings = McpServerSettings { connect_timeout_ms: 1_500, ..program("mute") };
    let (server, _good) = start_with_healthy_upstream(settings).await;
    let api = server.operator();
    let source = wait_for_state(&api, "fixture", "waiting").await;
    assert!(problem(&source).contains("did not answer within 1500 ms"), "{source}");
    assert!(problem(&source).contains("not a word"), "the problem must quote its stderr: {source}");
    assert_healthy_upstream_works(&api).await;
}

#[tokio::test]
async fn a_tool_that_never_answers_times_out() {
    let (server, _good) = start_with_healthy_upstream(program("good")).await;
    let api = server.operator();
    wait_for_state(&api, "fixture", "ready").await;
    let body = json!({ "run_id": "r", "args": {}, "timeout_ms": 300 });
    let id = api.invoke_with("fixture.silent", body).await;
    let ended = api.finished(&id).await;
    assert_eq!(ended["status"], "TIMEOUT", "{ended}");
    assert_eq!(result_text(&call(&api, "fixture.echo", json!({ "text": "still" })).await), "still");
    assert_healthy_upstream_works(&api).await;
}

#[tokio::test]
async fn an_upstream_that_stops_listing_tools_is_reported() {
    let bad = Http::start().await;
    let settings = McpServerSettings { connect_timeout_ms: 1_500, ..http_upstream(&bad.url()) };
    let (server, _good) = start_with_healthy_upstream(settings).await;
    let api = server.operator();
    wait_for_state(&api, "fixture", "ready").await;
    bad.fixture.shared.deaf.store(true, Ordering::SeqCst);
    bad.fixture.change();
    let source = wait_for_state(&api, "fixture", "waiting").await;
    assert!(problem(&source).contains("it sent no tool list within 1.5s"), "{source}");
    bad.fixture.shared.deaf.store(false, Ordering::SeqCst);
    wait_for_state(&api, "fixture", "ready").await;
    assert_healthy_upstream_works(&api).await;
}

#[tokio::test]
async fn an_upstream_that_does_not_start_is_reported() {
    let (server, _good) = start_with_healthy_upstream(program("broken")).await;
    let api = server.operator();
    let source = wait_for_state(&api, "fixture", "waiting").await;
    assert!(problem(&source).contains("exit status: 7"), "{source}");
    assert!(problem(&source).contains("cannot find my configuration"), "{source}");
    assert_healthy_upstream_works(&api).await;
    let missing = McpServerSettings {
        name: "missing".into(),
        command: Some("/nonexistent/program".into()),
        ..McpServerSettings::default()
    };
    let missing = serde_json::to_value(missing).unwrap();
    api.post("/v1/sources/mcp", missing).await.is(201);
    let source = wait_for_state(&api, "missing", "waiting").await;
    assert!(problem(&source).contains("cannot be started"), "{source}");
}

#[tokio::test]
async fn an_upstream_that_writes_no_mcp_messages_is_reported() {
    let (server, _good) = start_with_healthy_upstream(program("noise")).await;
    let api = server.operator();
    let source = wait_for_state(&api, "fixture", "waiting").await;
    assert!(problem(&source).contains("not an MCP message"), "{source}");
    assert_healthy_upstream_works(&api).await;
}

#[tokio::test]
async fn garbage_output_ends_the_call_and_restarts_the_upstream() {
    let (server, _good) = start_with_healthy_upstream(program("good")).await;
    let api = server.operator();
    wait_for_state(&api, "fixture", "ready").await;
    let ended = call(&api, "fixture.garbage", json!({})).await;
    assert_eq!(ended["error"]["code"], "OUTCOME_UNKNOWN", "{ended}");
    assert!(ended["error"]["message"].as_str().unwrap().contains("not an MCP message"), "{ended}");
    // The upstream is restarted automatically.
    until("it to be begun again", || async {
        let source = api.get("/v1/sources/mcp/fixture").await.is(200);
        (source["state"] == "ready" && source["restarts"] == 1).then_some(())
    })
    .await;
    assert_eq!(result_text(&call(&api, "fixture.echo", json!({ "text": "back" })).await), "back");
    assert_healthy_upstream_works(&api).await;
}

#[tokio::test]
async fn an_oversized_message_ends_the_call_and_restarts_the_upstream() {
    let (server, _good) = start_with_healthy_upstream(program("good")).await;
    let api = server.operator();
    wait_for_state(&api, "fixture", "ready").await;
    let ended = call(&api, "fixture.huge", json!({})).await;
    assert_eq!(ended["error"]["code"], "OUTCOME_UNKNOWN", "{ended}");
    let message = ended["error"]["message"].as_str().unwrap();
    assert!(message.contains("it wrote a message over 16 MiB"), "{message}");
    until("it to be begun again", || async {
        let source = api.get("/v1/sources/mcp/fixture").await.is(200);
        (source["state"] == "ready" && source["restarts"] == 1).then_some(())
    })
    .await;
    assert_healthy_upstream_works(&api).await;
}

#[tokio::test]
async fn secrets_are_redacted_from_upstream_errors() {
    let mut settings = program("good");
    settings.env.insert("TOKEN".into(), "sesame-open-123".into());
    let server = super::server(vec![settings]).await;
    let ended = call(&server.operator(), "fixture.leak", json!({})).await;
    let message = ended["error"]["message"].as_str().unwrap();
    assert!(message.starts_with("fixture: no entry with [TOKEN];"), "{ended}");
    assert!(!ended.to_string().contains("sesame"), "{ended}");
}

#[tokio::test]
async fn an_unreadable_tool_is_skipped() {
    let about = json!({ "protocolVersion": "2025-11-25", "capabilities": { "tools": {} },
        "serverInfo": { "name": "odd", "version": "1" } });
    let url = start_server_with_results(move |method| match method {
        "initialize" => about.to_string(),
        _ => json!({ "tools": [
            { "name": "fine", "inputSchema": { "type": "object" } },
            { "name": "odd", "inputSchema": { "type": "object" }, "description": 7 },
        ] })
        .to_string(),
    })
    .await;
    let settings = McpServerSettings { older: true, ..http_upstream(&url) };
    let server = super::server(vec![settings]).await;
    let source = wait_for_state(&server.operator(), "fixture", "ready").await;
    assert_eq!(source["tools"], 1, "{source}");
    assert_eq!(source["skipped"][0]["tool"], "odd", "{source}");
    assert!(source["skipped"][0]["why"].as_str().unwrap().contains("cannot be read"), "{source}");
}

#[tokio::test]
async fn an_unanswered_resource_list_delays_only_one_request() {
    let url = start_server_without_resources().await;
    let (server, _good) = start_with_healthy_upstream(http_upstream(&url)).await;
    let api = server.operator();
    wait_for_state(&api, "fixture", "ready").await;
    let client = Mcp::modern(&api);
    // Only the first request waits for the timeout.
    let listed = client.ask("resources/list", json!({})).await.result();
    assert_eq!(listed["resources"][0]["uri"], "fixture://notes", "{listed}");
    let source = api.get("/v1/sources/mcp/fixture").await.is(200);
    assert_eq!(problem(&source), "it does not answer resources/list");
    let began = std::time::Instant::now();
    client.ask("resources/list", json!({})).await.result();
    assert!(began.elapsed().as_secs() < 5, "{:?}", began.elapsed());
}

#[tokio::test]
async fn an_upstream_that_floods_fails_the_call() {
    let (server, _good) = start_with_healthy_upstream(program("good")).await;
    let api = server.operator();
    wait_for_state(&api, "fixture", "ready").await;
    let ended = call(&api, "fixture.flood", json!({})).await;
    assert_eq!(ended["error"]["code"], "OUTCOME_UNKNOWN", "{ended}");
    assert!(
        ended["error"]["message"].as_str().unwrap().contains("unsolicited messages per second"),
        "{ended}"
    );
    assert_healthy_upstream_works(&api).await;
}

#[tokio::test]
async fn only_reads_are_retried_when_an_upstream_dies() {
    let once = tempfile::tempdir().unwrap();
    let mut settings = program("good");
    let file = once.path().join("once").to_str().unwrap().to_owned();
    settings.env.insert("ONCE".into(), file);
    let (server, _good) = start_with_healthy_upstream(settings).await;
    let api = server.operator();
    wait_for_state(&api, "fixture", "ready").await;
    // The call may have had an effect, so it is not retried.
    let ended = call(&api, "fixture.die", json!({})).await;
    assert_eq!(ended["error"]["code"], "OUTCOME_UNKNOWN", "{ended}");
    assert_eq!(ended["attempt"], 1);
    let source = until("it to be begun again", || async {
        let source = api.get("/v1/sources/mcp/fixture").await.is(200);
        (source["state"] == "ready" && source["restarts"] == 1).then_some(source)
    })
    .await;
    assert!(source["pid"].is_number());
    // A read is retried.
    let body = json!({ "run_id": "r", "args": {}, "retry": 5, "timeout_ms": 40_000 });
    let id = api.invoke_with("fixture.die_once", body).await;
    let ended = api.finished(&id).await;
    assert_eq!(result_text(&ended), "alive", "{ended}");
    assert!(ended["attempt"].as_u64().unwrap() > 1, "{ended}");
    assert_healthy_upstream_works(&api).await;
}

#[tokio::test]
async fn tools_beyond_max_tools_are_dropped() {
    let (server, _good) = start_with_healthy_upstream(program("many")).await;
    let api = server.operator();
    let source = wait_for_state(&api, "fixture", "ready").await;
    assert_eq!(source["tools"], 1_000, "{}", source["problem"]);
    assert!(problem(&source).contains("max_tools is 1000"), "{}", source["problem"]);
    assert_healthy_upstream_works(&api).await;
}

#[tokio::test]
async fn a_description_with_instructions_is_flagged() {
    let upstream = Http::start().await;
    let server = server(vec![http_upstream(&upstream.url())]).await;
    let api = server.operator();
    let tool = api.get("/v1/tools/fixture.evil").await.is(200);
    assert!(
        tool["description"].as_str().unwrap().contains("<IMPORTANT>"),
        "the description must be unchanged"
    );
    let flags = &tool["metadata"]["flags"];
    assert!(flags.to_string().contains("tells_to_ignore"), "{tool}");
    let source = api.get("/v1/sources/mcp/fixture").await.is(200);
    assert_eq!(source["flagged"], json!(["fixture.evil"]));
    let client = crate::support::mcp::Mcp::modern(&api);
    let listed = client.ask("tools/list", json!({})).await.result();
    let find_tool = |name: &str| {
        let tools = listed["tools"].as_array().unwrap();
        tools.iter().find(|tool| tool["name"] == name).unwrap().clone()
    };
    assert!(find_tool("fixture__evil")["_meta"]["toolcrib/flags"].is_array(), "{listed}");
    assert!(find_tool("fixture__echo")["_meta"]["toolcrib/flags"].is_null());
    let client = client.with_path("/mcp?catalogue=search");
    let params = json!({ "name": "tools.describe", "arguments": { "names": ["fixture.evil"] } });
    let described = client.ask("tools/call", params).await.result();
    assert!(described.to_string().contains("tells_to_ignore"), "{described}");
}

/// Starts an MCP server that answers each method with the result of this function.
async fn start_server_with_results(
    answer: impl Fn(&str) -> String + Clone + Send + Sync + 'static,
) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/mcp", listener.local_addr().unwrap());
    let handler = move |body: String| {
        let body: serde_json::Value = serde_json::from_str(&body).unwrap();
        let result = answer(body["method"].as_str().unwrap_or_default());
        let text = format!("{{\"jsonrpc\":\"2.0\",\"id\":{},\"result\":{result}}}", body["id"]);
        async move { ([("content-type", "application/json")], text) }
    };
    let router = axum::Router::new().route("/mcp", axum::routing::post(handler));
    tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    url
}

/// Starts an MCP server that does not answer `resources/list`.
async fn start_server_without_resources() -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/mcp", listener.local_addr().unwrap());
    let handler = |text: String| async move {
        let request: Value = serde_json::from_str(&text).unwrap();
        let result: Value = match request["method"].as_str() {
            Some("resources/list") => std::future::pending().await,
            Some("server/discover") => serde_json::from_str(DISCOVER_RESULT).unwrap(),
            _ => json!({ "resultType": "complete", "ttlMs": 0, "cacheScope": "private",
                "tools": [] }),
        };
        axum::Json(json!({ "jsonrpc": "2.0", "id": request["id"], "result": result }))
    };
    let router = axum::Router::new().route("/mcp", axum::routing::post(handler));
    tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    url
}

/// Starts an MCP server with one tool that refuses each call with this status and body.
async fn start_refusing_server(status: u16, body: &'static str) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/mcp", listener.local_addr().unwrap());
    let handler = move |message: String| async move {
        let request: Value = serde_json::from_str(&message).unwrap();
        let result = match request["method"].as_str() {
            Some("tools/call") => None,
            Some("server/discover") => Some(serde_json::from_str(DISCOVER_RESULT).unwrap()),
            _ => Some(json!({ "resultType": "complete", "ttlMs": 0, "cacheScope": "private",
                "tools": [{ "name": "pay", "inputSchema": { "type": "object" } }] })),
        };
        let json = [("content-type", "application/json")];
        let (status, text) = match result {
            None => (status, body.to_owned()),
            Some(result) => (
                200,
                json!({ "jsonrpc": "2.0", "id": request["id"], "result": result }).to_string(),
            ),
        };
        (axum::http::StatusCode::from_u16(status).unwrap(), json, text)
    };
    let router = axum::Router::new().route("/mcp", axum::routing::post(handler));
    tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    url
}

#[tokio::test]
async fn a_refusal_with_other_json_is_a_known_failure() {
    for (status, body) in [(403, r#"{"error":"insufficient_scope"}"#), (429, r#"{"error":"slow"}"#)]
    {
        let server =
            super::server(vec![http_upstream(&start_refusing_server(status, body).await)]).await;
        let api = server.operator();
        let id = api.invoke("fixture.pay", json!({})).await;
        let ended = api.finished(&id).await;
        assert_eq!(ended["status"], "FAILED", "{ended}");
        let error = ended.to_string();
        assert!(error.contains(&format!("HTTP {status}")), "{ended}");
        assert!(!error.contains("OUTCOME_UNKNOWN"), "a refused call has a known outcome: {ended}");
    }
}

/// The result of `server/discover`.
const DISCOVER_RESULT: &str = r#"{"resultType":"complete","supportedVersions":["2026-07-28"],
    "capabilities":{"tools":{},"resources":{},"prompts":{}},"ttlMs":0,"cacheScope":"private",
    "serverInfo":{"name":"endless","version":"1"}}"#;

#[tokio::test]
async fn an_oversized_http_response_is_rejected() {
    let url = start_server_with_results(|method| match method {
        "server/discover" => DISCOVER_RESULT.to_owned(),
        _ => format!("{{\"tools\":[],\"filling\":\"{}\"}}", "x".repeat(17 << 20)),
    })
    .await;
    let server = Server::with(|config| config.mcp = vec![http_upstream(&url)]).await;
    let source = wait_for_state(&server.operator(), "fixture", "waiting").await;
    let problem = source["problem"].as_str().unwrap();
    assert!(problem.contains("over 16777216 bytes"), "{problem}");
}

#[tokio::test]
async fn endless_resource_and_prompt_lists_are_ignored() {
    let more = r#""nextCursor":"more","resultType":"complete","ttlMs":0,"cacheScope":"private"}"#;
    let url = start_server_with_results(move |method| match method {
        "server/discover" => DISCOVER_RESULT.to_owned(),
        "tools/list" => {
            r#"{"tools":[],"resultType":"complete","ttlMs":0,"cacheScope":"private"}"#.to_owned()
        }
        "resources/list" => format!("{{\"resources\":[],{more}"),
        "prompts/list" => format!("{{\"prompts\":[],{more}"),
        _ => format!("{{\"tools\":[],{more}"),
    })
    .await;
    let server = super::server(vec![http_upstream(&url)]).await;
    // Its entries are omitted and the lists are still answered.
    let client = Mcp::modern(&server.operator());
    let listed = client.ask("resources/list", json!({})).await.result();
    assert_eq!(listed["resources"], json!([]), "{listed}");
    let listed = client.ask("prompts/list", json!({})).await.result();
    assert_eq!(listed["prompts"], json!([]), "{listed}");
}

#[tokio::test]
async fn upstream_states_restarts_and_calls_are_counted() {
    let upstream = Http::start().await;
    let mut server = process::Server::new();
    server.start().await;
    let api = Api::new(&format!("127.0.0.1:{}", server.port))
        .key(&process::operator_token(&server.data_dir()));
    let added = json!({ "name": "fixture", "url": upstream.url() });
    api.post("/v1/sources/mcp?wait_ms=20000", added).await.is(201);
    let unreachable = json!({ "name": "gone", "url": "http://127.0.0.1:9/mcp" });
    api.post("/v1/sources/mcp?wait_ms=20000", unreachable).await.is(201);
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
    server.stop().await;
}

#[tokio::test]
async fn a_token_that_an_upstream_returns_with_401_is_neither_logged_nor_shown() {
    const TOKEN: &str = "sesame-open-0123456789-0123456789";
    // The response is cut within the token, with and without a challenge.
    let echo = |headers: axum::http::HeaderMap, uri: axum::http::Uri| async move {
        let received = headers["authorization"].to_str().unwrap().to_owned();
        let body = format!("{}{received}", "x".repeat(275));
        let mut answer = axum::http::Response::builder().status(401);
        if uri.path() == "/challenge" {
            answer = answer.header("www-authenticate", format!("Bearer error=\"{received}\""));
        }
        answer.body(body).unwrap()
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        axum::serve(listener, axum::Router::new().fallback(echo)).await.unwrap();
    });
    let mut server = process::Server::new().with("LOG__LEVEL", "debug,rmcp=trace");
    server.start().await;
    let api = Api::new(&format!("127.0.0.1:{}", server.port))
        .key(&process::operator_token(&server.data_dir()));
    let mut seen = String::new();
    for (name, path) in [("plain", "/plain"), ("challenge", "/challenge")] {
        let added = json!({ "name": name, "url": format!("{url}{path}"),
            "headers": { "Authorization": format!("Bearer {TOKEN}") }, "oauth": null });
        api.post("/v1/sources/mcp?wait_ms=20000", added).await.is(201);
        let shown = until("a problem", || async {
            let source = api.get(&format!("/v1/sources/mcp/{name}")).await.is(200);
            (!source["problem"].is_null()).then_some(source)
        })
        .await;
        seen.push_str(&shown.to_string());
    }
    server.stop().await;
    seen.push_str(&std::fs::read_to_string(server.directory.path().join("server.log")).unwrap());
    // Twelve characters of it are too many.
    assert!(!seen.contains(&TOKEN[..12]), "{seen}");
}
