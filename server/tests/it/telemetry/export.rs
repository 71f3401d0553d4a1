//! Export to the endpoint: sampling, headers, restarts, and endpoints that do not answer.

use std::time::Duration;

use serde_json::json;
use tokio::net::TcpListener;

use crate::support::otlp::Endpoint;
use crate::support::process::{self, PATIENCE};
use crate::support::until;

const SAMPLED: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
const UNSAMPLED: &str = "00-1bf7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00";

fn exporting_server(endpoint: &str) -> process::Server {
    process::Server::new()
        .with("TELEMETRY__OTLP_ENDPOINT", endpoint)
        .with("TELEMETRY__EXPORT_INTERVAL_MS", 20)
}

#[tokio::test]
async fn a_call_that_spans_a_crash_is_one_trace() {
    let endpoint = Endpoint::start().await;
    let mut server = exporting_server(&endpoint.url);
    server.start().await;
    server.register("c1", "a.read", "read").await;
    let id = server.ticket("a.read", json!({ "run_id": "r", "args": {} })).await;
    let request = server.poll_requests("c1", 1).await.remove(0);
    server.kill();
    server.start().await;
    server.submit(&id, json!({ "status": "SUCCEEDED", "result": 1 })).await;
    let spans = endpoint.spans_of(&id, 2).await;
    let call = spans.iter().find(|span| span.name == "execute_tool a.read").unwrap();
    let attempt = spans.iter().find(|span| span.name == "attempt a.read").unwrap();
    // The new process exports the span ids that the killed process sent to the client.
    let traceparent = request["traceparent"].as_str().unwrap();
    assert_eq!(traceparent, format!("00-{}-{}-01", call.trace_id, attempt.span_id));
    assert_eq!(attempt.parent_id, call.span_id);
    let stored = server.call(&id, 0).await;
    assert_eq!(call.begin_ms, stored["created_at_ms"].as_u64().unwrap(), "before the crash");
    assert_eq!(attempt.begin_ms, stored["created_at_ms"].as_u64().unwrap());
}

#[tokio::test]
async fn queued_spans_are_exported_at_shutdown() {
    let endpoint = Endpoint::start().await;
    let mut server = process::Server::new()
        .with("TELEMETRY__OTLP_ENDPOINT", &endpoint.url)
        .with("TELEMETRY__EXPORT_INTERVAL_MS", 3_600_000)
        .with("TELEMETRY__METRICS_INTERVAL_MS", 3_600_000);
    server.start().await;
    let call = server.evaluated("6*7").await;
    assert!(endpoint.spans().is_empty(), "the export interval is an hour");
    assert!(server.stop().await.success());
    assert_eq!(endpoint.spans().len(), 2);
    assert_eq!(endpoint.spans()[0].has("gen_ai.tool.call.id"), call["tool_call_id"]);
    endpoint.metric("gen_ai.execute_tool.duration").await;
}

#[tokio::test]
async fn sampling_follows_the_caller_and_otherwise_the_ratio() {
    let endpoint = Endpoint::start().await;
    let mut server = exporting_server(&endpoint.url).with("TELEMETRY__SAMPLE_RATIO", 0.0);
    server.start().await;
    let body = json!({ "run_id": "r", "args": { "expression": "1" }, "wait_ms": 10_000 });
    let ask = async |traceparent: Option<&str>| {
        let mut request = server.invoking("calculation.eval", &body);
        if let Some(traceparent) = traceparent {
            request = request.header("traceparent", traceparent);
        }
        let answer = request.send().await.unwrap();
        let returned = answer
            .headers()
            .get("traceparent")
            .map(|returned| returned.to_str().unwrap().to_owned());
        (returned, answer.json::<serde_json::Value>().await.unwrap())
    };
    assert_eq!(ask(None).await.0, None, "no span is recorded");
    assert_eq!(ask(Some(UNSAMPLED)).await.0.as_deref(), Some(UNSAMPLED));
    let (returned, call) = ask(Some(SAMPLED)).await;
    assert!(
        returned.is_some_and(|returned| returned != SAMPLED && returned[..36] == SAMPLED[..36])
    );
    // The executor gets the flag too, so that it does not record a part of the trace.
    server.register("c1", "a.read", "read").await;
    server.ticket("a.read", json!({ "run_id": "r", "args": {} })).await;
    let sent = process::text(&server.poll_requests("c1", 1).await[0], "traceparent");
    assert!(sent.ends_with("-00"), "{sent}");
    endpoint.spans_of(call["tool_call_id"].as_str().unwrap(), 2).await;
    assert!(server.stop().await.success());
    let traces: Vec<String> = endpoint.spans().into_iter().map(|span| span.trace_id).collect();
    assert_eq!(traces, ["0af7651916cd43dd8448eb211c80319c"; 2], "only the sampled trace");
}

#[tokio::test]
async fn the_sample_ratio_applies_to_whole_traces() {
    let endpoint = Endpoint::start().await;
    let mut server = exporting_server(&endpoint.url).with("TELEMETRY__SAMPLE_RATIO", 0.5);
    server.start().await;
    for _ in 0..200 {
        server.evaluated("1").await;
    }
    assert!(server.stop().await.success());
    let spans = endpoint.spans();
    let calls = spans.iter().filter(|span| span.name.starts_with("execute_tool")).count();
    assert_eq!(spans.len(), 2 * calls, "a call and its attempt, or neither");
    // Six standard deviations: a failure by chance occurs once in 500 million runs.
    assert!((58..=142).contains(&calls), "{calls} of 200 at a ratio of one half");
}

#[tokio::test]
async fn opentelemetry_environment_variables_are_supported() {
    let endpoint = Endpoint::start().await;
    let mut server = process::Server::new()
        .variable("OTEL_EXPORTER_OTLP_ENDPOINT", &endpoint.url)
        .variable("OTEL_EXPORTER_OTLP_HEADERS", "x-team=tools%20and%20more")
        .variable("OTEL_SERVICE_NAME", "crib-7")
        .variable("OTEL_TRACES_SAMPLER", "always_on")
        .with("TELEMETRY__EXPORT_INTERVAL_MS", 20);
    server.start().await;
    let call = server.evaluated("6*7").await;
    let spans = endpoint.spans_of(call["tool_call_id"].as_str().unwrap(), 2).await;
    assert_eq!(spans[0].service, "crib-7");
    assert_eq!(endpoint.headers()[0]["x-team"], "tools and more");
}

#[tokio::test]
async fn otlp_headers_are_read_from_the_named_variable() {
    let endpoint = Endpoint::start().await;
    let mut server = exporting_server(&endpoint.url)
        .with("TELEMETRY__OTLP_HEADERS_ENV", "MY_TRACING_KEY")
        .variable("MY_TRACING_KEY", "Authorization=Bearer%20canary-51ac, x-scope=a");
    server.start().await;
    let call = server.evaluated("6*7").await;
    endpoint.spans_of(call["tool_call_id"].as_str().unwrap(), 2).await;
    assert_eq!(endpoint.headers()[0]["authorization"], "Bearer canary-51ac");
    assert_eq!(endpoint.headers()[0]["x-scope"], "a");
    assert!(server.stop().await.success());
    assert!(!server.log().contains("canary-51ac"), "{}", server.log());
    let mut without = self::exporting_server(&endpoint.url)
        .with("TELEMETRY__OTLP_HEADERS_ENV", "NO_SUCH_VARIABLE");
    without.spawn();
    assert!(!without.ended(PATIENCE).await.success());
    assert!(without.log().contains("there is no variable NO_SUCH_VARIABLE"), "{}", without.log());
}

#[tokio::test]
async fn an_unreachable_endpoint_only_writes_a_log_line() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let mut server = exporting_server(&format!("http://{address}"));
    server.start().await;
    for n in 0..20 {
        server.evaluated(&n.to_string()).await;
    }
    until("a log line", || async {
        server.log().contains("the OTLP endpoint does not accept the data").then_some(())
    })
    .await;
    // The endpoint is available again: new spans arrive.
    let endpoint = Endpoint::on(TcpListener::bind(address).await.unwrap());
    let call = until("a span to arrive", || async {
        let call = server.evaluated("6*7").await;
        (!endpoint.spans().is_empty()).then_some(call)
    })
    .await;
    endpoint.spans_of(call["tool_call_id"].as_str().unwrap(), 2).await;
    assert!(server.stop().await.success());
    let warnings = server.log().matches("the OTLP endpoint does not accept the data").count();
    assert!(warnings <= 2, "at most one warning for spans and one for metrics:\n{}", server.log());
}

#[tokio::test]
async fn a_hanging_endpoint_delays_neither_calls_nor_shutdown() {
    // The endpoint accepts connections and never answers.
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", silent.local_addr().unwrap());
    let hanging = tokio::spawn(async move {
        let mut streams = Vec::new();
        while let Ok((stream, _)) = silent.accept().await {
            streams.push(stream);
        }
    });
    let mut server = exporting_server(&url).with("TELEMETRY__MAX_QUEUED_SPANS", 10);
    server.start().await;
    for n in 0..50 {
        server.evaluated(&n.to_string()).await;
    }
    let metrics = server.http.get(server.url("/metrics")).send().await.unwrap();
    let metrics = metrics.text().await.unwrap();
    let dropped = metrics
        .lines()
        .find_map(|line| line.strip_prefix("toolcrib_otlp_spans_total{outcome=\"dropped\"} "))
        .unwrap_or_else(|| panic!("{metrics}"));
    assert!(dropped.parse::<u64>().unwrap() > 0, "100 spans, of which 10 may wait: {dropped}");
    server.signal("TERM");
    // The shutdown waits for one export timeout with some margin, not for two of ten seconds.
    assert!(server.ended(Duration::from_secs(20)).await.success());
    hanging.abort();
}

#[tokio::test]
async fn without_an_endpoint_no_trace_and_bad_settings_are_refused() {
    let mut server = process::Server::new();
    server.start().await;
    let answer = server.invoking(
        "calculation.eval",
        &json!({
            "run_id": "r", "args": { "expression": "1" }
        }),
    );
    let answer = answer.send().await.unwrap();
    assert!(answer.headers().get("traceparent").is_none());
    let bad = [
        ("TELEMETRY__OTLP_ENDPOINT", "localhost:4318", "such as http://localhost:4318"),
        ("TELEMETRY__OTLP_ENDPOINT", "http://me:canary@host", "must not hold a password"),
        ("TELEMETRY__SAMPLE_RATIO", "2", "must be from 0 to 1"),
        ("TELEMETRY__OTLP_HEADERS_ENV", "authorization=canary", "not the headers themselves"),
    ];
    for (setting, value, reason) in bad {
        let mut server = process::Server::new().with(setting, value);
        server.spawn();
        assert!(!server.ended(PATIENCE).await.success());
        assert!(server.log().contains(reason), "{}", server.log());
        assert!(!server.log().contains("canary"), "{}", server.log());
    }
}
