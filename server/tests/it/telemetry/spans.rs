//! Spans of calls at an endpoint that speaks OTLP/HTTP.

use opentelemetry_proto::tonic::metrics::v1::metric::Data;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use reqwest::Method;
use serde_json::{Value, json};

use crate::support::Server;
use crate::support::api::{Api, offer, offer_with};
use crate::support::otlp::{Endpoint, Span, attributes};
use crate::support::ws::Ws;

const TRACEPARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

async fn start_exporting_server(endpoint: &Endpoint) -> Server {
    let url = endpoint.url.clone();
    Server::with(|config| {
        config.telemetry.otlp_endpoint = Some(url);
        config.telemetry.export_interval_ms = 20;
        config.telemetry.metrics_interval_ms = 50;
    })
    .await
}

async fn invoke(api: &Api, tool: &str, body: Value, traceparent: Option<&str>) -> String {
    let mut request = api.request(Method::POST, &format!("/v1/tools/{tool}/invoke")).json(&body);
    if let Some(traceparent) = traceparent {
        request = request.header("traceparent", traceparent);
    }
    let ticket = api.send(request).await.is(202);
    ticket["tool_call_id"].as_str().unwrap().to_owned()
}

fn find_spans<'s>(spans: &'s [Span], name: &str) -> Vec<&'s Span> {
    spans.iter().filter(|span| span.name == name).collect()
}

#[tokio::test]
async fn a_call_is_a_span_of_the_callers_trace() {
    let endpoint = Endpoint::start().await;
    let server = start_exporting_server(&endpoint).await;
    let api = server.api();
    let body = json!({ "run_id": "run_7", "call_id": "call_9", "args": { "expression": "6*7" } });
    let id = invoke(&api, "calculation.eval", body, Some(TRACEPARENT)).await;
    let call = api.finished(&id).await;
    let spans = endpoint.spans_of(&id, 2).await;
    let span = find_spans(&spans, "execute_tool calculation.eval")[0];
    assert_eq!(span.trace_id, "0af7651916cd43dd8448eb211c80319c");
    assert_eq!(span.parent_id, "b7ad6b7169203331");
    assert_eq!(span.kind, SpanKind::Internal);
    assert_eq!(span.error, None);
    assert_eq!(
        (span.begin_ms, span.end_ms),
        (call["created_at_ms"].as_u64().unwrap(), call["completed_at_ms"].as_u64().unwrap())
    );
    assert_eq!((span.service.as_str(), span.scope.as_str()), ("toolcrib", "toolcrib"));
    assert!(span.schema.starts_with("https://opentelemetry.io/schemas/gen-ai/"));
    let expected = [
        ("gen_ai.operation.name", "execute_tool"),
        ("gen_ai.tool.name", "calculation.eval"),
        ("gen_ai.tool.call.id", id.as_str()),
        ("gen_ai.tool.type", "extension"),
        ("gen_ai.agent.name", "default"),
        ("gen_ai.agent.id", "default"),
        ("gen_ai.conversation.id", "run_7"),
        ("toolcrib.call.attempt", "1"),
        ("toolcrib.call.asked_as", "call_9"),
        ("toolcrib.call.status", "SUCCEEDED"),
        ("toolcrib.call.args_bytes", "20"),
        ("toolcrib.call.result_bytes", &call["result"].to_string().len().to_string()),
        ("toolcrib.source", "builtin"),
        ("toolcrib.project", "default"),
    ];
    for (name, value) in expected {
        assert_eq!(span.has(name), value, "{name}");
    }
    assert!(span.has("gen_ai.tool.description").starts_with("Calculates"));
    assert_eq!(span.attributes.get("error.type"), None);
    let attempt = find_spans(&spans, "attempt calculation.eval")[0];
    assert_eq!((&attempt.trace_id, &attempt.parent_id), (&span.trace_id, &span.span_id));
    assert_eq!(
        attempt.attributes.get("gen_ai.operation.name"),
        None,
        "an attempt is not a second call"
    );
}

#[tokio::test]
async fn a_call_without_a_traceparent_starts_a_trace() {
    let endpoint = Endpoint::start().await;
    let server = start_exporting_server(&endpoint).await;
    let api = server.api();
    let body = json!({ "run_id": "r", "args": { "expression": "1" } });
    let ids = [
        invoke(&api, "calculation.eval", body.clone(), None).await,
        invoke(&api, "calculation.eval", body, Some("nonsense")).await,
    ];
    let mut traces = Vec::new();
    for id in &ids {
        let spans = endpoint.spans_of(id, 2).await;
        let span = find_spans(&spans, "execute_tool calculation.eval")[0];
        assert_eq!(span.parent_id, "", "the span must be the root of its trace");
        assert_eq!(api.finished(id).await["trace_id"], span.trace_id.as_str());
        traces.push(span.trace_id.clone());
    }
    assert_ne!(traces[0], traces[1]);
}

#[tokio::test]
async fn attempts_are_children_of_the_call_and_parents_of_client_spans() {
    let endpoint = Endpoint::start().await;
    let server = start_exporting_server(&endpoint).await;
    let api = server.api();
    let backoff = json!({ "initial_ms": 1, "factor": 1.0, "max_ms": 1, "jitter": 0.0 });
    let more = json!({ "effect": "read", "policy": { "max_retries": 2, "backoff": backoff } });
    let tools = json!([offer_with("a.tool", more)]);
    let mut client = Ws::offering(&api, "c1", tools).await;
    let id = invoke(&api, "a.tool", json!({ "run_id": "r", "args": {} }), Some(TRACEPARENT)).await;
    let mut traceparents = Vec::new();
    let first = client.take().await;
    traceparents.push(first["traceparent"].clone());
    let error = json!({ "message": "asleep", "code": "UPSTREAM_UNAVAILABLE" });
    client.fail(&first, error).await;
    let second = client.take().await;
    traceparents.push(second["traceparent"].clone());
    client.succeed(&second, json!("done")).await;
    let spans = endpoint.spans_of(&id, 3).await;
    let call = find_spans(&spans, "execute_tool a.tool")[0];
    let mut attempts = find_spans(&spans, "attempt a.tool");
    attempts.sort_by_key(|span| span.has("toolcrib.call.attempt").to_owned());
    assert_eq!(call.error, None, "the call succeeded on retry");
    assert_eq!(call.has("toolcrib.call.attempt"), "2");
    assert_eq!((call.has("gen_ai.tool.type"), call.has("toolcrib.source")), ("function", "client"));
    assert_eq!(attempts.len(), 2);
    for (attempt, traceparent) in attempts.iter().zip(&traceparents) {
        assert_eq!(attempt.parent_id, call.span_id);
        assert_eq!(attempt.kind, SpanKind::Client);
        assert_eq!(attempt.has("toolcrib.client.id"), "c1");
        let expected = format!("00-{}-{}-01", call.trace_id, attempt.span_id);
        assert_eq!(*traceparent, expected, "the client continues this attempt");
    }
    assert!(attempts[0].error.is_some() && attempts[1].error.is_none());
    assert_eq!(attempts[0].has("error.type"), "UPSTREAM_UNAVAILABLE");
    assert!(attempts[0].end_ms <= attempts[1].begin_ms, "one after the other");
    assert!(call.begin_ms <= attempts[0].begin_ms && attempts[1].end_ms <= call.end_ms);
}

#[tokio::test]
async fn failed_spans_have_an_error_type_and_no_content() {
    let endpoint = Endpoint::start().await;
    let server = start_exporting_server(&endpoint).await;
    let api = server.api();
    let mut client = Ws::offering(&api, "c1", json!([offer("a.tool")])).await;
    let secret = "canary-7f3a9c";
    let body = json!({ "run_id": "r", "args": { "password": secret } });
    let failed = invoke(&api, "a.tool", body.clone(), None).await;
    let request = client.take().await;
    client.fail(&request, json!(format!("the password {secret} is wrong"))).await;
    let done = invoke(&api, "a.tool", body.clone(), None).await;
    let request = client.take().await;
    client.succeed(&request, json!({ "token": secret })).await;
    let canceled = invoke(&api, "a.tool", body.clone(), None).await;
    client.take().await;
    api.post(&format!("/v1/tool_calls/{canceled}/cancel"), json!({})).await.is(200);
    let mut late = body;
    late["timeout_ms"] = json!(1);
    let late = invoke(&api, "a.tool", late, None).await;
    api.finished(&late).await;
    let expected = [(&failed, "RUNTIME_ERROR"), (&canceled, "CANCELED"), (&late, "TIMEOUT")];
    for (id, code) in expected {
        let spans = endpoint.spans_of(id, 2).await;
        for span in spans {
            assert_eq!(span.has("error.type"), code, "{span:?}");
            assert!(span.error.as_ref().is_some_and(|text| !text.is_empty()), "{span:?}");
        }
    }
    endpoint.spans_of(&done, 2).await;
    endpoint.metric("gen_ai.execute_tool.duration").await;
    assert!(endpoint.heard(&done), "the calls must be exported");
    assert!(!endpoint.heard(secret), "arguments, results and messages must not be exported");
}

#[tokio::test]
async fn arguments_and_results_are_captured_only_if_configured() {
    let endpoint = Endpoint::start().await;
    let server = Server::with(|config| {
        config.telemetry.otlp_endpoint = Some(endpoint.url.clone());
        config.telemetry.export_interval_ms = 20;
        config.telemetry.capture_content = true;
    })
    .await;
    let api = server.api();
    let body = json!({ "run_id": "r", "args": { "expression": "6*7" } });
    let id = invoke(&api, "calculation.eval", body, None).await;
    let spans = endpoint.spans_of(&id, 2).await;
    let span = find_spans(&spans, "execute_tool calculation.eval")[0];
    assert_eq!(span.has("gen_ai.tool.call.arguments"), r#"{"expression":"6*7"}"#);
    assert_eq!(span.has("gen_ai.tool.call.result"), r#"{"result":42,"text":"42"}"#);
}

#[tokio::test]
async fn a_fallback_is_another_attempt_with_another_tool() {
    let endpoint = Endpoint::start().await;
    let server = start_exporting_server(&endpoint).await;
    let api = server.api();
    let more = json!({ "effect": "read", "fallback": [{ "tool": "b.tool" }],
        "policy": { "max_retries": 0 } });
    let tools = json!([offer_with("a.tool", more), offer("b.tool")]);
    let mut client = Ws::offering(&api, "c1", tools).await;
    let id = invoke(&api, "a.tool", json!({ "run_id": "r", "args": {} }), None).await;
    let first = client.take().await;
    client.fail(&first, json!("no")).await;
    let second = client.take().await;
    client.succeed(&second, json!(1)).await;
    let spans = endpoint.spans_of(&id, 3).await;
    assert_eq!(find_spans(&spans, "attempt a.tool")[0].has("error.type"), "RUNTIME_ERROR");
    assert_eq!(find_spans(&spans, "attempt b.tool")[0].error, None);
    let call = find_spans(&spans, "execute_tool a.tool")[0];
    assert_eq!(call.has("toolcrib.ran_tool"), "b.tool");
}

#[tokio::test]
async fn call_durations_are_exported_as_a_metric() {
    let endpoint = Endpoint::start().await;
    let server = start_exporting_server(&endpoint).await;
    let api = server.api();
    let body = json!({ "run_id": "r", "args": { "expression": "1" } });
    let id = invoke(&api, "calculation.eval", body, None).await;
    api.finished(&id).await;
    let metric = endpoint.metric("gen_ai.execute_tool.duration").await;
    assert_eq!(metric.unit, "s");
    let Some(Data::Histogram(histogram)) = metric.data else { panic!("{metric:?}") };
    let point = &histogram.data_points[0];
    assert_eq!(point.count, 1);
    assert_eq!((point.explicit_bounds[0], point.explicit_bounds[13]), (0.01, 81.92));
    let labels = attributes(&point.attributes);
    let labels: Vec<_> =
        labels.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    assert_eq!(
        labels,
        [
            ("gen_ai.agent.name", "default"),
            ("gen_ai.tool.name", "calculation.eval"),
            ("gen_ai.tool.type", "extension"),
        ]
    );
}
