//! Exports spans and metrics over OTLP/HTTP from dedicated threads.
//!
//! An endpoint that is down, slow or silent never delays calls: spans wait in a bounded queue,
//! spans that do not fit are dropped and counted, and the log reports it at intervals. When the
//! server stops, everything that is queued is sent within a limit.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use anyhow::Context;
use opentelemetry::KeyValue;
use opentelemetry::metrics::{Histogram, MeterProvider};
use opentelemetry_otlp::{
    MetricExporter, Protocol, SpanExporter, WithExportConfig, WithHttpConfig,
};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::metrics::data::ResourceMetrics;
use opentelemetry_sdk::metrics::exporter::PushMetricExporter;
use opentelemetry_sdk::metrics::{PeriodicReader, SdkMeterProvider, Temporality};
use opentelemetry_sdk::trace::{
    BatchConfigBuilder, BatchSpanProcessor, SpanData, SpanExporter as ExportSpans, SpanProcessor,
};
use parking_lot::Mutex;
use toolcrib::domain::trace::SpanIds;
use toolcrib::ports::observer::{EndedAttempt, EndedCall, Observer};

use super::sampling::TraceSampler;
use super::spans;
use crate::config::{TelemetrySettings, check_endpoint};

/// Maximum time the endpoint takes to respond.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(10);
/// Minimum time between two log lines about a failing endpoint.
const LOG_INTERVAL: Duration = Duration::from_secs(60);
/// Maximum number of spans in one export.
const MAX_BATCH_SPANS: usize = 512;

/// Exports spans and metrics to the configured endpoint.
pub struct OtlpExporter {
    spans: Option<SpanQueue>,
    meters: Option<SdkMeterProvider>,
    duration: Option<Histogram<f64>>,
    sampling: TraceSampler,
    capture_content: bool,
}

/// The bounded queue of spans.
struct SpanQueue {
    processor: BatchSpanProcessor,
    queued: Arc<AtomicUsize>,
    max_queued: usize,
}

/// The URLs and headers of the export.
struct OtlpDestination {
    traces: Option<String>,
    metrics: Option<String>,
    headers: HashMap<String, String>,
}

impl OtlpExporter {
    /// Starts the configured export. Returns `None` if nothing is exported.
    pub async fn start(settings: &TelemetrySettings) -> anyhow::Result<Option<Arc<Self>>> {
        let variable = |name: &str| std::env::var(name).ok().filter(|text| !text.is_empty());
        let Some(to) = OtlpDestination::from_settings(settings, variable)? else { return Ok(None) };
        let sampling = TraceSampler::from_settings(settings.sample_ratio, variable)
            .map_err(anyhow::Error::msg)?;
        let resource = build_resource(settings.service_name.as_deref(), variable);
        let redacted =
            |url: &Option<String>| url.as_deref().map_or_else(|| "-".to_owned(), url_origin);
        tracing::info!(
            traces = redacted(&to.traces),
            metrics = redacted(&to.metrics),
            ratio = sampling.ratio,
            "exporting by OTLP"
        );
        let settings = settings.clone();
        // The blocking client must not be built on a thread of the async runtime.
        let exporter =
            tokio::task::spawn_blocking(move || Self::build(&settings, &to, &resource, sampling));
        Ok(Some(Arc::new(exporter.await??)))
    }

    fn build(
        settings: &TelemetrySettings,
        to: &OtlpDestination,
        resource: &Resource,
        sampling: TraceSampler,
    ) -> anyhow::Result<Self> {
        let spans = match &to.traces {
            Some(url) => Some(SpanQueue::build(settings, url, &to.headers, resource)?),
            None => None,
        };
        let meters = match &to.metrics {
            Some(url) => Some(build_meter_provider(settings, url, &to.headers, resource)?),
            None => None,
        };
        let duration = meters.as_ref().map(|meters| {
            let bounds = (0..14).map(|n| 0.01 * f64::from(1 << n)).collect();
            let meter = meters.meter_with_scope(spans::instrumentation_scope());
            meter
                .f64_histogram("gen_ai.execute_tool.duration")
                .with_description("Duration of tool calls, from acceptance to the outcome")
                .with_unit("s")
                .with_boundaries(bounds)
                .build()
        });
        let capture_content = settings.capture_content;
        Ok(Self { spans, meters, duration, sampling, capture_content })
    }

    /// Queues a span for export. Drops and counts it if the queue is full.
    fn enqueue_span(&self, span: SpanData) {
        let Some(spans) = &self.spans else { return };
        if spans.queued.fetch_add(1, Ordering::Relaxed) >= spans.max_queued {
            spans.queued.fetch_sub(1, Ordering::Relaxed);
            count_spans("dropped", 1);
            return;
        }
        spans.processor.on_end(span);
    }

    /// Sends everything that is queued, for at most `limit`, and stops. Blocks.
    pub fn stop(self: &Arc<Self>, limit: Duration) {
        let until = Instant::now() + limit;
        let (done, finished) = mpsc::channel();
        // Threads, because the meter provider's shutdown has its own timeout, which may be longer
        // than `limit`.
        for stop in [Self::stop_spans, Self::stop_metrics] {
            let (this, done) = (self.clone(), done.clone());
            std::thread::spawn(move || {
                stop(&this, limit);
                let _ = done.send(());
            });
        }
        drop(done);
        // Spans and metrics that could not be sent in time are lost with the process.
        while finished.recv_timeout(until.saturating_duration_since(Instant::now())).is_ok() {}
    }

    fn stop_spans(&self, limit: Duration) {
        if let Some(spans) = &self.spans {
            let _ = spans.processor.shutdown_with_timeout(limit);
        }
    }

    fn stop_metrics(&self, limit: Duration) {
        if let Some(meters) = &self.meters {
            let _ = meters.shutdown_with_timeout(limit);
        }
    }
}

impl Observer for OtlpExporter {
    fn is_sampled(&self, ids: &SpanIds) -> bool {
        self.spans.is_some() && self.sampling.is_sampled(ids)
    }

    fn attempt_ended(&self, attempted: &EndedAttempt<'_>) {
        self.enqueue_span(spans::attempt_span(attempted));
    }

    fn call_ended(&self, ended: &EndedCall<'_>) {
        let call = ended.call;
        if let (Some(duration), Some(outcome)) = (&self.duration, &call.outcome) {
            let error = outcome.error.as_ref().map(|fault| fault.code);
            let seconds = outcome.metrics.latency_ms as f64 / 1_000.0;
            spans::record_with_attributes(call, error, |attributes| {
                duration.record(seconds, attributes)
            });
        }
        if !self.is_sampled(&ended.ids) {
            return;
        }
        let mut span = spans::call_span(ended);
        if self.capture_content {
            let result = call.outcome.as_ref().and_then(|outcome| outcome.data.as_ref());
            let content = [
                ("gen_ai.tool.call.arguments", Some(&call.args)),
                ("gen_ai.tool.call.result", result),
            ];
            for (name, json) in content {
                span.attributes
                    .extend(json.map(|json| KeyValue::new(name, spans::truncate_content(json))));
            }
        }
        self.enqueue_span(span);
    }
}

fn count_spans(outcome: &'static str, count: usize) {
    metrics::counter!("toolcrib_otlp_spans_total", "outcome" => outcome).increment(count as u64);
}

impl SpanQueue {
    fn build(
        settings: &TelemetrySettings,
        url: &str,
        headers: &HashMap<String, String>,
        resource: &Resource,
    ) -> anyhow::Result<Self> {
        let exporter = SpanExporter::builder()
            .with_http()
            .with_http_client(build_http_client(url)?)
            .with_protocol(Protocol::HttpBinary)
            .with_endpoint(url)
            .with_timeout(EXPORT_TIMEOUT)
            .with_headers(headers.clone())
            .build()
            .context("spans cannot be exported")?;
        let queued = Arc::new(AtomicUsize::new(0));
        let monitored = MonitoredExporter {
            exporter,
            queued: queued.clone(),
            failure_log: ExportFailureLog::new("spans", url),
        };
        let batches = BatchConfigBuilder::default()
            .with_max_queue_size(settings.max_queued_spans)
            .with_max_export_batch_size(MAX_BATCH_SPANS.min(settings.max_queued_spans))
            .with_scheduled_delay(Duration::from_millis(settings.export_interval_ms))
            .build();
        let mut processor = BatchSpanProcessor::new(monitored, batches);
        processor.set_resource(resource);
        Ok(Self { processor, queued, max_queued: settings.max_queued_spans })
    }
}

fn build_meter_provider(
    settings: &TelemetrySettings,
    url: &str,
    headers: &HashMap<String, String>,
    resource: &Resource,
) -> anyhow::Result<SdkMeterProvider> {
    let exporter = MetricExporter::builder()
        .with_http()
        .with_http_client(build_http_client(url)?)
        .with_protocol(Protocol::HttpBinary)
        .with_endpoint(url)
        .with_timeout(EXPORT_TIMEOUT)
        .with_headers(headers.clone())
        .build()
        .context("metrics cannot be exported")?;
    let queued = Arc::new(AtomicUsize::new(0));
    let monitored =
        MonitoredExporter { exporter, queued, failure_log: ExportFailureLog::new("metrics", url) };
    let interval = Duration::from_millis(settings.metrics_interval_ms);
    let reader = PeriodicReader::builder(monitored).with_interval(interval).build();
    Ok(SdkMeterProvider::builder().with_reader(reader).with_resource(resource.clone()).build())
}

fn build_http_client(url: &str) -> anyhow::Result<reqwest::blocking::Client> {
    let mut builder = reqwest::blocking::Client::builder()
        .timeout(EXPORT_TIMEOUT)
        .redirect(reqwest::redirect::Policy::none())
        .user_agent(concat!("toolcrib/", env!("CARGO_PKG_VERSION")));
    // A collector on this machine is never behind a proxy, even if the environment sets one.
    let local = |url: &reqwest::Url| {
        let ip = url.host_str().and_then(|host| host.trim_matches(['[', ']']).parse().ok());
        url.host_str() == Some("localhost")
            || ip.is_some_and(|ip: std::net::IpAddr| ip.is_loopback())
    };
    if reqwest::Url::parse(url).is_ok_and(|url| local(&url)) {
        builder = builder.no_proxy();
    }
    builder.build().context("no HTTP client for OTLP")
}

/// Describes this process in traces and metrics.
fn build_resource(name: Option<&str>, variable: impl Fn(&str) -> Option<String>) -> Resource {
    let has_name = variable("OTEL_SERVICE_NAME").is_some()
        || variable("OTEL_RESOURCE_ATTRIBUTES").is_some_and(|text| text.contains("service.name="));
    let builder = Resource::builder().with_attributes([
        KeyValue::new("service.version", env!("CARGO_PKG_VERSION")),
        KeyValue::new("service.instance.id", ulid::Ulid::generate().to_string()),
    ]);
    match name.or((!has_name).then_some("toolcrib")) {
        Some(name) => builder.with_service_name(name.to_owned()).build(),
        None => builder.build(),
    }
}

impl OtlpDestination {
    /// Reads the settings, or else OpenTelemetry's variables.
    fn from_settings(
        settings: &TelemetrySettings,
        variable: impl Fn(&str) -> Option<String>,
    ) -> anyhow::Result<Option<Self>> {
        let is = |name: &str, value: &str| {
            variable(name).is_some_and(|setting| setting.trim().eq_ignore_ascii_case(value))
        };
        let resolve = |signal: &str, path: &str| {
            let configured = settings.otlp_endpoint.clone();
            let signal_endpoint = variable(&format!("OTEL_EXPORTER_OTLP_{signal}_ENDPOINT"));
            let base = configured.clone().or_else(|| variable("OTEL_EXPORTER_OTLP_ENDPOINT"));
            let url = match (configured, signal_endpoint) {
                (None, Some(signal_endpoint)) => signal_endpoint,
                _ => format!("{}{path}", base?.trim_end_matches('/')),
            };
            Some(url).filter(|_| !is(&format!("OTEL_{signal}_EXPORTER"), "none"))
        };
        let (traces, metrics) =
            (resolve("TRACES", "/v1/traces"), resolve("METRICS", "/v1/metrics"));
        if is("OTEL_SDK_DISABLED", "true") || (traces.is_none() && metrics.is_none()) {
            return Ok(None);
        }
        for url in [&traces, &metrics].into_iter().flatten() {
            check_endpoint(url).map_err(|reason| anyhow::anyhow!("the OTLP endpoint {reason}"))?;
        }
        if is("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc") {
            tracing::warn!("OTLP is sent as http/protobuf; gRPC is not supported");
        }
        let headers = match &settings.otlp_headers_env {
            Some(name) => {
                let text = variable(name).with_context(|| {
                    format!("telemetry.otlp_headers_env: there is no variable {name}")
                })?;
                // The value is a secret, so the message does not repeat it.
                parse_headers(&text).with_context(|| {
                    format!("the variable {name} must be written as name=value,name=value")
                })?
            }
            None => HashMap::new(),
        };
        Ok(Some(Self { traces, metrics, headers }))
    }
}

/// Parses `name=value,name=value`, with percent-encoding in the values.
fn parse_headers(text: &str) -> Option<HashMap<String, String>> {
    let pairs = text.split(',').filter(|pair| !pair.trim().is_empty());
    let read = pairs.map(|pair| {
        let (name, value) = pair.split_once('=')?;
        Some((name.trim().to_ascii_lowercase(), percent_decode(value.trim())?))
    });
    read.collect()
}

fn percent_decode(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let digits = [rest.next()?, rest.next()?];
        bytes.push(u8::from_str_radix(std::str::from_utf8(&digits).ok()?, 16).ok()?);
    }
    String::from_utf8(bytes).ok()
}

/// Returns the origin of a URL for logs: paths and queries of tracing services may contain keys.
fn url_origin(url: &str) -> String {
    let url = reqwest::Url::parse(url).ok();
    url.map(|url| url.origin().ascii_serialization()).unwrap_or_default()
}

/// Logs at intervals that the endpoint fails, and once that it works again.
#[derive(Debug)]
struct ExportFailureLog {
    signal: &'static str,
    host: String,
    last_logged: Mutex<Option<Instant>>,
}

impl ExportFailureLog {
    fn new(signal: &'static str, url: &str) -> Self {
        Self { signal, host: url_origin(url), last_logged: Mutex::new(None) }
    }

    fn record_result(&self, result: &OTelSdkResult) {
        let (signal, endpoint) = (self.signal, &self.host);
        let mut last = self.last_logged.lock();
        match result {
            Ok(()) => {
                if last.take().is_some() {
                    tracing::info!(
                        what = signal,
                        endpoint,
                        "the OTLP endpoint accepts the data again"
                    );
                }
            }
            Err(error) => {
                if last.is_none_or(|last| last.elapsed() >= LOG_INTERVAL) {
                    tracing::warn!(what = signal, endpoint, %error, "the OTLP endpoint does not accept the data");
                    *last = Some(Instant::now());
                }
            }
        }
    }
}

/// An exporter that counts its spans and logs its failures.
#[derive(Debug)]
struct MonitoredExporter<E> {
    exporter: E,
    queued: Arc<AtomicUsize>,
    failure_log: ExportFailureLog,
}

impl ExportSpans for MonitoredExporter<SpanExporter> {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let count = batch.len();
        let result = self.exporter.export(batch).await;
        self.queued.fetch_sub(count, Ordering::Relaxed);
        count_spans(if result.is_ok() { "sent" } else { "failed" }, count);
        self.failure_log.record_result(&result);
        result
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.exporter.shutdown_with_timeout(timeout)
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.exporter.force_flush()
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.exporter.set_resource(resource);
    }
}

impl PushMetricExporter for MonitoredExporter<MetricExporter> {
    async fn export(&self, metrics: &ResourceMetrics) -> OTelSdkResult {
        let result = self.exporter.export(metrics).await;
        self.failure_log.record_result(&result);
        result
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.exporter.force_flush()
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.exporter.shutdown_with_timeout(timeout)
    }

    fn temporality(&self) -> Temporality {
        self.exporter.temporality()
    }
}
