//! An OTLP/HTTP endpoint that decodes and stores the requests.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::routing::post;
use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
use opentelemetry_proto::tonic::metrics::v1::Metric;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode as SpanStatus;
use prost::Message;

use super::until;

/// A span in a readable form.
#[derive(Debug, Clone)]
pub struct Span {
    pub name: String,
    pub trace_id: String,
    pub span_id: String,
    /// Empty for the root span of a trace.
    pub parent_id: String,
    pub kind: SpanKind,
    pub begin_ms: u64,
    pub end_ms: u64,
    pub attributes: BTreeMap<String, String>,
    /// The message of an error status.
    pub error: Option<String>,
    pub service: String,
    pub scope: String,
    pub schema: String,
}

impl Span {
    /// Returns an attribute; panics if it is missing.
    #[track_caller]
    pub fn has(&self, name: &str) -> &str {
        match self.attributes.get(name) {
            Some(value) => value,
            None => panic!("{} has no {name}: {:?}", self.name, self.attributes),
        }
    }
}

#[derive(Default)]
struct Received {
    traces: Vec<ExportTraceServiceRequest>,
    metrics: Vec<ExportMetricsServiceRequest>,
    headers: Vec<HeaderMap>,
    bytes: Vec<u8>,
}

/// The running endpoint.
#[derive(Clone)]
pub struct Endpoint {
    pub url: String,
    received: Arc<Mutex<Received>>,
}

impl Endpoint {
    /// Starts the endpoint on a free port.
    pub async fn start() -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        Self::on(listener)
    }

    /// Starts the endpoint on this listener.
    pub fn on(listener: tokio::net::TcpListener) -> Self {
        let url = format!("http://{}", listener.local_addr().unwrap());
        let received = Arc::new(Mutex::new(Received::default()));
        let app = Router::new()
            .route("/v1/traces", post(traces))
            .route("/v1/metrics", post(metrics))
            .with_state(received.clone());
        tokio::spawn(async move { axum::serve(listener, app).await });
        Self { url, received }
    }

    /// Returns all spans, in the order of arrival.
    pub fn spans(&self) -> Vec<Span> {
        let received = self.received.lock().unwrap();
        let resources = received.traces.iter().flat_map(|request| &request.resource_spans);
        let mut spans = Vec::new();
        for resource in resources {
            let resource_attributes = attributes(&resource.resource.as_ref().unwrap().attributes);
            for scope in &resource.scope_spans {
                for span in &scope.spans {
                    spans.push(Span {
                        name: span.name.clone(),
                        trace_id: hex(&span.trace_id),
                        span_id: hex(&span.span_id),
                        parent_id: hex(&span.parent_span_id),
                        kind: span.kind(),
                        begin_ms: span.start_time_unix_nano / 1_000_000,
                        end_ms: span.end_time_unix_nano / 1_000_000,
                        attributes: attributes(&span.attributes),
                        error: span
                            .status
                            .as_ref()
                            .filter(|status| status.code() == SpanStatus::Error)
                            .map(|status| status.message.clone()),
                        service: resource_attributes["service.name"].clone(),
                        scope: scope.scope.as_ref().unwrap().name.clone(),
                        schema: scope.schema_url.clone(),
                    });
                }
            }
        }
        spans
    }

    /// Waits until this many spans of a call have arrived.
    pub async fn spans_of(&self, call_id: &str, count: usize) -> Vec<Span> {
        until(&format!("{count} spans of {call_id}"), || async {
            let spans = self.spans().into_iter();
            let matching: Vec<Span> =
                spans.filter(|span| span.has("gen_ai.tool.call.id") == call_id).collect();
            (matching.len() >= count).then_some(matching)
        })
        .await
    }

    /// Waits for a metric. Returns its latest value.
    pub async fn metric(&self, name: &str) -> Metric {
        until(&format!("the metric {name}"), || async {
            let received = self.received.lock().unwrap();
            let requests = received.metrics.iter().rev();
            let resources = requests.flat_map(|request| &request.resource_metrics);
            let mut metrics = resources.flat_map(|r| &r.scope_metrics).flat_map(|s| &s.metrics);
            metrics.find(|metric| metric.name == name).cloned()
        })
        .await
    }

    /// Returns the headers of every request.
    pub fn headers(&self) -> Vec<HeaderMap> {
        self.received.lock().unwrap().headers.clone()
    }

    /// Returns true if any request contains this text.
    pub fn heard(&self, text: &str) -> bool {
        let received = self.received.lock().unwrap();
        received.bytes.windows(text.len()).any(|part| part == text.as_bytes())
    }
}

type Shared = State<Arc<Mutex<Received>>>;

async fn traces(state: Shared, headers: HeaderMap, body: Bytes) -> (StatusCode, Vec<u8>) {
    assert_eq!(headers[header::CONTENT_TYPE], "application/x-protobuf");
    let request = ExportTraceServiceRequest::decode(body.as_ref()).unwrap();
    let mut received = state.0.lock().unwrap();
    received.traces.push(request);
    received.headers.push(headers);
    received.bytes.extend_from_slice(&body);
    (StatusCode::OK, ExportTraceServiceResponse::default().encode_to_vec())
}

async fn metrics(state: Shared, headers: HeaderMap, body: Bytes) -> StatusCode {
    let request = ExportMetricsServiceRequest::decode(body.as_ref()).unwrap();
    let mut received = state.0.lock().unwrap();
    received.metrics.push(request);
    received.headers.push(headers);
    received.bytes.extend_from_slice(&body);
    StatusCode::OK
}

/// Returns attributes as text.
pub fn attributes(pairs: &[KeyValue]) -> BTreeMap<String, String> {
    let text = |value: &Option<AnyValue>| match value.as_ref().and_then(|v| v.value.as_ref()) {
        Some(Value::StringValue(text)) => text.clone(),
        Some(Value::IntValue(number)) => number.to_string(),
        Some(Value::BoolValue(yes)) => yes.to_string(),
        Some(Value::DoubleValue(number)) => number.to_string(),
        other => format!("{other:?}"),
    };
    pairs.iter().map(|pair| (pair.key.clone(), text(&pair.value))).collect()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
