//! Metrics that `/metrics` exposes: every name with its description. Counters exist from startup,
//! so that a rate does not miss the first event.

use std::sync::OnceLock;

use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};

/// Metric names with their descriptions.
type MetricDescriptions = &'static [(&'static str, &'static str)];

const COUNTERS: MetricDescriptions = &[
    ("toolcrib_tool_calls_accepted_total", "Calls accepted"),
    ("toolcrib_tool_calls_total", "Calls ended, by status and error code"),
    ("toolcrib_dispatch_attempts_total", "Attempts started, by outcome: ok, failed, parked"),
    ("toolcrib_late_results_total", "Reports that came too late or for another attempt"),
    ("toolcrib_idempotent_replays_total", "Requests answered with the call of an earlier one"),
    ("toolcrib_policy_decisions_total", "Decisions on whether an agent may call a tool"),
    ("toolcrib_reconciled_calls_total", "Calls found open and taken up after a start"),
    ("toolcrib_runs_total", "Runs that came to an end, by status"),
    ("toolcrib_model_requests_total", "Requests to language models, by outcome"),
    ("toolcrib_llm_tokens_total", "Tokens of language models, of input and of output"),
    ("toolcrib_webhook_deliveries_total", "Tries to deliver a callback, by outcome"),
    ("toolcrib_bus_reconnects_total", "How often the connection to NATS had to be made again"),
    ("toolcrib_upstream_calls_total", "Attempts at MCP servers behind Toolcrib, by outcome"),
    ("toolcrib_upstream_restarts_total", "How often MCP servers had to be connected to again"),
    ("toolcrib_streams_refused_total", "Event streams and WebSockets over a limit"),
    ("toolcrib_connections_stalled_total", "Connections ended because the client took no data"),
    ("toolcrib_otlp_spans_total", "Spans sent by OTLP, not taken by the endpoint, or dropped"),
];

const GAUGES: MetricDescriptions = &[
    ("toolcrib_tool_calls_open", "Calls that have not ended, by what they are doing"),
    ("toolcrib_tool_calls_waiting", "Calls that wait for a free place"),
    ("toolcrib_oldest_open_call_age_seconds", "How long the oldest open call has been open"),
    ("toolcrib_runs_open", "Runs that are not over"),
    ("toolcrib_clients_connected", "Open connections of clients that execute tools"),
    ("toolcrib_upstreams", "MCP servers behind Toolcrib, by state"),
    ("toolcrib_streams_open", "Open event streams and WebSockets"),
    ("toolcrib_schemas_compiled_bytes", "Memory of the compiled schemas"),
    ("toolcrib_store_size_bytes", "Size of the database and its log"),
    ("toolcrib_build_info", "Always 1; the version is a label"),
];

const HISTOGRAMS: MetricDescriptions = &[
    ("toolcrib_tool_call_duration_seconds", "From being accepted to the outcome, by tool"),
    ("toolcrib_tool_call_queue_seconds", "From being accepted to the first attempt, by tool"),
    ("toolcrib_store_commit_duration_seconds", "A group commit with its flush"),
    ("toolcrib_store_commit_group_size", "Changes that shared a commit"),
];

/// Returns the handle of the process-wide recorder, which the first call installs.
pub fn metrics_handle() -> Option<PrometheusHandle> {
    static COLLECTED: OnceLock<Option<PrometheusHandle>> = OnceLock::new();
    COLLECTED.get_or_init(install_recorder).clone()
}

fn install_recorder() -> Option<PrometheusHandle> {
    // Buckets double from 10 ms to 82 s for calls and are finer for commits.
    let calls: Vec<f64> = (0..14).map(|n| 0.01 * f64::from(1 << n)).collect();
    let commits: Vec<f64> = (0..14).map(|n| 0.0001 * f64::from(1 << n)).collect();
    let sizes: Vec<f64> = (0..10).map(|n| f64::from(1 << n)).collect();
    let full_name = |name: &str| Matcher::Full(name.to_owned());
    let builder = PrometheusBuilder::new()
        .set_buckets_for_metric(full_name("toolcrib_tool_call_duration_seconds"), &calls)
        .and_then(|b| {
            b.set_buckets_for_metric(full_name("toolcrib_tool_call_queue_seconds"), &calls)
        })
        .and_then(|b| {
            b.set_buckets_for_metric(full_name("toolcrib_store_commit_duration_seconds"), &commits)
        })
        .and_then(|b| {
            b.set_buckets_for_metric(full_name("toolcrib_store_commit_group_size"), &sizes)
        });
    let handle = builder.ok()?.install_recorder().ok()?;
    for (name, text) in COUNTERS {
        metrics::describe_counter!(*name, *text);
    }
    for (name, text) in GAUGES {
        metrics::describe_gauge!(*name, *text);
    }
    for (name, text) in HISTOGRAMS {
        metrics::describe_histogram!(*name, *text);
    }
    metrics::gauge!("toolcrib_build_info", "version" => env!("CARGO_PKG_VERSION")).set(1.0);
    for decision in ["allow", "deny"] {
        metrics::counter!("toolcrib_policy_decisions_total", "decision" => decision).increment(0);
    }
    for reason in ["ended", "wrong_attempt"] {
        metrics::counter!("toolcrib_late_results_total", "reason" => reason).increment(0);
    }
    for outcome in ["sent", "failed", "dropped"] {
        metrics::counter!("toolcrib_otlp_spans_total", "outcome" => outcome).increment(0);
    }
    for status in ["SUCCEEDED", "FAILED", "CANCELED"] {
        metrics::counter!("toolcrib_runs_total", "status" => status).increment(0);
    }
    for outcome in ["ok", "again", "failed"] {
        metrics::counter!("toolcrib_model_requests_total", "outcome" => outcome).increment(0);
    }
    for outcome in ["delivered", "failed", "gone"] {
        metrics::counter!("toolcrib_webhook_deliveries_total", "outcome" => outcome).increment(0);
    }
    for limit in ["caller", "server"] {
        metrics::counter!("toolcrib_streams_refused_total", "limit" => limit).increment(0);
    }
    metrics::counter!("toolcrib_connections_stalled_total").increment(0);
    metrics::gauge!("toolcrib_streams_open").set(0.0);
    metrics::counter!("toolcrib_bus_reconnects_total").increment(0);
    for outcome in ["ok", "failed", "asked", "task"] {
        metrics::counter!("toolcrib_upstream_calls_total", "outcome" => outcome).increment(0);
    }
    metrics::counter!("toolcrib_upstream_restarts_total").increment(0);
    metrics::counter!("toolcrib_idempotent_replays_total").increment(0);
    metrics::counter!("toolcrib_reconciled_calls_total").increment(0);
    Some(handle)
}
