//! W3C's `traceparent`: in with a call, out to whoever executes it, and in the answers.

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

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const GIVEN: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

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
async fn a_client_gets_the_callers_trace_as_it_came_when_nothing_is_exported() {
    let server = Server::start().await;
    let api = server.api();
    let mut client = Ws::offering(&api, "c1", json!([offer("a.tool")])).await;
    let reply = invoke(&api, "a.tool", json!({}), &[GIVEN]).await;
    assert_eq!(reply.header("traceparent"), Some(GIVEN));
    let id = id(&reply.is(202));
    assert_eq!(client.take().await["traceparent"], GIVEN);
    assert_eq!(api.call(&id).await["trace_id"], TRACE);
    // Without one, none is made up.
    let reply = invoke(&api, "a.tool", json!({}), &[]).await;
    assert_eq!(reply.header("traceparent"), None);
    assert_eq!(client.take().await.get("traceparent"), None);
    assert_eq!(api.call(&self::id(&reply.body)).await.get("trace_id"), None);
}

#[tokio::test]
async fn what_is_no_traceparent_counts_as_none() {
    let server = Server::start().await;
    let api = server.api();
    api.register("c1", json!([offer("a.tool")])).await;
    let upper = GIVEN.to_uppercase();
    let bad: [&[&str]; 5] = [
        &["nonsense"],
        &[&upper],
        &["00-00000000000000000000000000000000-b7ad6b7169203331-01"],
        &["ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"],
        &[GIVEN, GIVEN],
    ];
    for headers in bad {
        let ticket = invoke(&api, "a.tool", json!({}), headers).await.is(202);
        assert_eq!(api.call(&id(&ticket)).await.get("trace_id"), None, "{headers:?}");
    }
    let later = "01-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more";
    let ticket = invoke(&api, "a.tool", json!({}), &[later]).await.is(202);
    assert_eq!(api.call(&id(&ticket)).await["trace_id"], TRACE, "a later version is understood");
}

#[tokio::test]
async fn every_way_to_hear_of_work_carries_it() {
    let server = Server::start().await;
    let api = server.api();
    api.register("c1", json!([offer("a.tool")])).await;
    invoke(&api, "a.tool", json!({}), &[GIVEN]).await.is(202);
    assert_eq!(api.poll("c1").await["traceparent"], GIVEN);
    let path = "/internal/ingress/sse?client_id=c1";
    let mut heard = api.follow(path, None).await;
    invoke(&api, "a.tool", json!({}), &[GIVEN]).await.is(202);
    assert_eq!(heard.named("tool_request").await.data["traceparent"], GIVEN);
}

#[tokio::test]
async fn it_survives_a_restart() {
    let server = Server::start().await;
    let api = server.api();
    api.register("c1", json!([offer("a.tool")])).await;
    let ticket = invoke(&api, "a.tool", json!({}), &[GIVEN]).await.is(202);
    let server = server.restart().await;
    let api = server.api();
    assert_eq!(api.poll("c1").await["traceparent"], GIVEN);
    assert_eq!(api.call(&id(&ticket)).await["trace_id"], TRACE);
}

#[tokio::test]
async fn a_rust_tool_can_go_on_with_it() {
    #[derive(serde::Deserialize, schemars::JsonSchema)]
    struct Nothing {}
    let tell = |_: Nothing, context: ToolContext| async move {
        Ok::<_, String>(
            json!({ "traceparent": context.traceparent.map(|trace| trace.to_string()) }),
        )
    };
    let tool = FnTool::with_context("a.tool", "Tells", tell);
    let server = Server::of(Engine::builder().tool(tool).start().await.unwrap()).await;
    let api = server.api();
    let ticket = invoke(&api, "a.tool", json!({}), &[GIVEN]).await.is(202);
    assert_eq!(api.finished(&id(&ticket)).await["result"]["traceparent"], GIVEN);
}

#[tokio::test]
async fn the_weather_service_is_told_of_the_attempts_own_span() {
    let asked = Arc::new(Mutex::new(Vec::<String>::new()));
    let told = asked.clone();
    let seen = axum::middleware::map_request(move |headers: HeaderMap, request| {
        let header = headers.get("traceparent").map(|value| value.to_str().unwrap().to_owned());
        told.lock().unwrap().extend(header);
        async move { axum::extract::Request::<axum::body::Body>::from(request) }
    });
    let stand_in = weather::stand_in_with(|app| app.layer(seen)).await;
    let endpoint = Endpoint::start().await;
    let server = Server::with(|config| {
        config.builtin.weather.geocoding_url.clone_from(&stand_in);
        config.builtin.weather.forecast_url.clone_from(&stand_in);
        config.telemetry.otlp_endpoint = Some(endpoint.url.clone());
        config.telemetry.export_interval_ms = 20;
    })
    .await;
    let api = server.api();
    let reply = invoke(&api, "weather.query", json!({ "query": "Beijing" }), &[GIVEN]).await;
    let answered = reply.header("traceparent").unwrap().to_owned();
    let id = id(&reply.is(202));
    assert_eq!(api.finished(&id).await["status"], "SUCCEEDED");
    let spans = endpoint.spans_of(&id, 2).await;
    let attempt = spans.iter().find(|span| span.name == "attempt weather.query").unwrap();
    let call = spans.iter().find(|span| span.name == "execute_tool weather.query").unwrap();
    let wanted = format!("00-{TRACE}-{}-01", attempt.span_id);
    assert_eq!(*asked.lock().unwrap(), [wanted.clone(), wanted], "both questions");
    assert_eq!(answered, format!("00-{TRACE}-{}-01", call.span_id), "the call's own span");
    assert_eq!(
        (attempt.parent_id.as_str(), call.parent_id.as_str()),
        (call.span_id.as_str(), "b7ad6b7169203331")
    );
}

#[tokio::test]
async fn a_problem_names_the_trace_of_its_request() {
    let server = Server::start().await;
    let api = server.api();
    let reply = invoke(&api, "no.such", json!({}), &[GIVEN]).await;
    let length = reply.header("content-length").map(|length| length.parse::<usize>().unwrap());
    assert!(length.is_none_or(|length| length == reply.text.len()));
    assert_eq!(reply.body["trace_id"], TRACE);
    reply.refused(404, "TOOL_NOT_FOUND");
    let reply = invoke(&api, "no.such", json!({}), &[]).await;
    assert_eq!(reply.body.get("trace_id"), None);
    let missing = api.request(Method::GET, "/nowhere").header("traceparent", GIVEN);
    assert_eq!(soon("an answer", api.send(missing)).await.body["trace_id"], TRACE);
}
