//! W3C `traceparent`: accepted with a call, sent to its executor, and returned in responses.

use std::sync::{Arc, Mutex};

use axum::http::HeaderMap;
use reqwest::Method;
use serde_json::{Value, json};
use toolcrib::{Engine, FnTool, ToolContext};

use crate::support::api::{Api, Reply, offer};
use crate::support::otlp::Endpoint;
use crate::support::weather;
use crate::support::ws::Ws;
use crate::support::{Server, soon};

const TRACE_ID: &str = "0af7651916cd43dd8448eb211c80319c";
const TRACEPARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

async fn invoke(api: &Api, tool: &str, args: Value, traceparent: &[&str]) -> Reply {
    let path = format!("/v1/tools/{tool}/invoke");
    let mut request =
        api.request(Method::POST, &path).json(&json!({ "run_id": "r", "args": args }));
    for header in traceparent {
        request = request.header("traceparent", *header);
    }
    api.send(request).await
}

fn id(ticket: &Value) -> String {
    ticket["tool_call_id"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn without_export_a_client_gets_the_callers_traceparent() {
    let server = Server::start().await;
    let api = server.api();
    let mut client = Ws::offering(&api, "c1", json!([offer("a.tool")])).await;
    let reply = invoke(&api, "a.tool", json!({}), &[TRACEPARENT]).await;
    assert_eq!(reply.header("traceparent"), Some(TRACEPARENT));
    let id = id(&reply.is(202));
    assert_eq!(client.take().await["traceparent"], TRACEPARENT);
    assert_eq!(api.call(&id).await["trace_id"], TRACE_ID);
    // Without a `traceparent` none is created.
    let reply = invoke(&api, "a.tool", json!({}), &[]).await;
    assert_eq!(reply.header("traceparent"), None);
    assert_eq!(client.take().await.get("traceparent"), None);
    assert_eq!(api.call(&self::id(&reply.body)).await.get("trace_id"), None);
}

#[tokio::test]
async fn an_invalid_traceparent_is_ignored() {
    let server = Server::start().await;
    let api = server.api();
    api.register("c1", json!([offer("a.tool")])).await;
    let upper = TRACEPARENT.to_uppercase();
    let bad: [&[&str]; 5] = [
        &["nonsense"],
        &[&upper],
        &["00-00000000000000000000000000000000-b7ad6b7169203331-01"],
        &["ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"],
        &[TRACEPARENT, TRACEPARENT],
    ];
    for headers in bad {
        let ticket = invoke(&api, "a.tool", json!({}), headers).await.is(202);
        assert_eq!(api.call(&id(&ticket)).await.get("trace_id"), None, "{headers:?}");
    }
    let later = "01-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more";
    let ticket = invoke(&api, "a.tool", json!({}), &[later]).await.is(202);
    assert_eq!(
        api.call(&id(&ticket)).await["trace_id"],
        TRACE_ID,
        "a later version must be accepted"
    );
}

#[tokio::test]
async fn long_poll_and_sse_requests_carry_the_traceparent() {
    let server = Server::start().await;
    let api = server.api();
    api.register("c1", json!([offer("a.tool")])).await;
    invoke(&api, "a.tool", json!({}), &[TRACEPARENT]).await.is(202);
    assert_eq!(api.poll("c1").await["traceparent"], TRACEPARENT);
    let path = "/internal/ingress/sse?client_id=c1";
    let mut events = api.follow(path, None).await;
    invoke(&api, "a.tool", json!({}), &[TRACEPARENT]).await.is(202);
    assert_eq!(events.wait_for("tool_request").await.data["traceparent"], TRACEPARENT);
}

#[tokio::test]
async fn the_traceparent_survives_a_restart() {
    let server = Server::start().await;
    let api = server.api();
    api.register("c1", json!([offer("a.tool")])).await;
    let ticket = invoke(&api, "a.tool", json!({}), &[TRACEPARENT]).await.is(202);
    let server = server.restart().await;
    let api = server.api();
    assert_eq!(api.poll("c1").await["traceparent"], TRACEPARENT);
    assert_eq!(api.call(&id(&ticket)).await["trace_id"], TRACE_ID);
}

#[tokio::test]
async fn a_rust_tool_can_read_the_traceparent() {
    #[derive(serde::Deserialize, schemars::JsonSchema)]
    struct Nothing {}
    let handler = |_: Nothing, context: ToolContext| async move {
        Ok::<_, String>(
            json!({ "traceparent": context.traceparent.map(|trace| trace.to_string()) }),
        )
    };
    let tool = FnTool::with_context("a.tool", "Tells", handler);
    let server = Server::with_engine(Engine::builder().tool(tool).start().await.unwrap()).await;
    let api = server.api();
    let ticket = invoke(&api, "a.tool", json!({}), &[TRACEPARENT]).await.is(202);
    assert_eq!(api.finished(&id(&ticket)).await["result"]["traceparent"], TRACEPARENT);
}

#[tokio::test]
async fn outbound_requests_carry_the_span_of_the_attempt() {
    let received = Arc::new(Mutex::new(Vec::<String>::new()));
    let recorder = received.clone();
    let layer = axum::middleware::map_request(move |headers: HeaderMap, request| {
        let header = headers.get("traceparent").map(|value| value.to_str().unwrap().to_owned());
        recorder.lock().unwrap().extend(header);
        async move { axum::extract::Request::<axum::body::Body>::from(request) }
    });
    let stand_in = weather::stand_in_with(|app| app.layer(layer)).await;
    let endpoint = Endpoint::start().await;
    let server = Server::with(|config| {
        config.builtin.weather.geocoding_url.clone_from(&stand_in);
        config.builtin.weather.forecast_url.clone_from(&stand_in);
        config.telemetry.otlp_endpoint = Some(endpoint.url.clone());
        config.telemetry.export_interval_ms = 20;
    })
    .await;
    let api = server.api();
    let reply = invoke(&api, "weather.query", json!({ "query": "Beijing" }), &[TRACEPARENT]).await;
    let answered = reply.header("traceparent").unwrap().to_owned();
    let id = id(&reply.is(202));
    assert_eq!(api.finished(&id).await["status"], "SUCCEEDED");
    let spans = endpoint.spans_of(&id, 2).await;
    let attempt = spans.iter().find(|span| span.name == "attempt weather.query").unwrap();
    let call = spans.iter().find(|span| span.name == "execute_tool weather.query").unwrap();
    let expected = format!("00-{TRACE_ID}-{}-01", attempt.span_id);
    assert_eq!(
        *received.lock().unwrap(),
        [expected.clone(), expected],
        "both requests must carry the span"
    );
    assert_eq!(answered, format!("00-{TRACE_ID}-{}-01", call.span_id), "the span of the call");
    assert_eq!(
        (attempt.parent_id.as_str(), call.parent_id.as_str()),
        (call.span_id.as_str(), "b7ad6b7169203331")
    );
}

#[tokio::test]
async fn an_error_response_has_the_trace_id_of_its_request() {
    let server = Server::start().await;
    let api = server.api();
    let reply = invoke(&api, "no.such", json!({}), &[TRACEPARENT]).await;
    let length = reply.header("content-length").map(|length| length.parse::<usize>().unwrap());
    assert!(length.is_none_or(|length| length == reply.text.len()));
    assert_eq!(reply.body["trace_id"], TRACE_ID);
    reply.refused(404, "TOOL_NOT_FOUND");
    let reply = invoke(&api, "no.such", json!({}), &[]).await;
    assert_eq!(reply.body.get("trace_id"), None);
    let missing = api.request(Method::GET, "/nowhere").header("traceparent", TRACEPARENT);
    assert_eq!(soon("an answer", api.send(missing)).await.body["trace_id"], TRACE_ID);
}
