//! Metrics that `/metrics` exposes, with their descriptions. Counters whose labels are known exist
//! from startup, so that a rate does not miss the first event; `docs/telemetry.md` lists the
//! others.

use std::sync::OnceLock;
use std::time::Duration;

use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use toolcrib::utp::DEAD_LETTER_REASONS;

/// Metric names with their descriptions.
type MetricDescriptions = &'static [(&'static str, &'static str)];

const COUNTERS: MetricDescriptions = &[
    ("toolcrib_tool_calls_accepted_total", "Calls accepted"),
    ("toolcrib_tool_calls_total", "Calls ended, by status and error code"),
    ("toolcrib_dispatch_attempts_total", "Attempts started, by outcome"),
    ("toolcrib_late_results_total", "Reports that had no effect, by reason"),
    ("toolcrib_idempotent_replays_total", "Requests answered with the call of an earlier one"),
    ("toolcrib_mcp_resumed_streams_total", "Streams of calls that MCP clients resumed"),
    (
        "toolcrib_rejoined_total",
        "Repeated requests that joined a call or run whose answer was not delivered",
    ),
    ("toolcrib_policy_decisions_total", "Access decisions: allow, deny, ask"),
    ("toolcrib_limit_refusals_total", "Calls over a usage limit, by its kind and value"),
    ("toolcrib_switched_off_calls_total", "Open calls that a kill switch ended, by its kind"),
    ("toolcrib_sign_in_failures_total", "Requests with credentials that are not valid"),
    ("toolcrib_reconciled_calls_total", "Calls recovered after a start"),
    ("toolcrib_runs_total", "Runs ended, by status"),
    ("toolcrib_model_requests_total", "Requests to models, by outcome"),
    ("toolcrib_llm_tokens_total", "Tokens of models, input and output"),
    ("toolcrib_approval_requests_total", "Approvals that calls requested"),
    ("toolcrib_approval_decisions_total", "Approvals that ended, by decision"),
    ("toolcrib_approval_webhooks_total", "Attempts to announce an approval, by result"),
    ("toolcrib_webhook_deliveries_total", "Webhook deliveries, by outcome"),
    ("toolcrib_agent_wakeup_webhooks_total", "Attempts to wake workers of agents, by result"),
    ("toolcrib_mcp_event_deliveries_total", "Attempts to deliver MCP events, by result"),
    ("toolcrib_dead_letters_total", "Messages that could not be processed, by reason"),
    ("toolcrib_bus_reconnects_total", "Reconnections to NATS"),
    ("toolcrib_upstream_calls_total", "Attempts at upstream MCP servers, by outcome"),
    ("toolcrib_upstream_restarts_total", "Reconnections to upstream MCP servers"),
    ("toolcrib_streams_refused_total", "Streams over the limit of the caller or of the server"),
    ("toolcrib_connections_stalled_total", "Connections ended because the client read no data"),
    ("toolcrib_otlp_spans_total", "Spans sent, failed and dropped"),
];

const GAUGES: MetricDescriptions = &[
    ("toolcrib_tool_calls_open", "Open calls, by state"),
    ("toolcrib_tool_calls_waiting", "Calls queued for a free slot"),
    ("toolcrib_approvals_pending", "Calls that wait for an approval"),
    ("toolcrib_oldest_open_call_age_seconds", "Age of the oldest open call"),
    ("toolcrib_runs_open", "Open runs"),
    ("toolcrib_clients_connected", "Open connections of clients"),
    ("toolcrib_upstreams", "Upstream MCP servers, by state"),
    ("toolcrib_switches", "Kill switches that are set, by kind"),
    ("toolcrib_streams_open", "Open event streams and WebSockets"),
    ("toolcrib_schemas_compiled_bytes", "Memory of the compiled schemas"),
    ("toolcrib_store_size_bytes", "Size of the database and its log"),
    ("toolcrib_build_info", "Always 1; the version is a label"),
];

const HISTOGRAMS: MetricDescriptions = &[
    ("toolcrib_tool_call_duration_seconds", "Time from acceptance to the outcome"),
    ("toolcrib_tool_call_queue_seconds", "Time from acceptance to the first attempt"),
    ("toolcrib_approval_wait_seconds", "Time that calls waited for an approval"),
    ("toolcrib_store_commit_duration_seconds", "Duration of a group commit, with its flush"),
    ("toolcrib_store_commit_group_size", "Changes that shared a commit"),
];

/// Interval at which recorded samples are added to their histograms.
const UPKEEP_INTERVAL: Duration = Duration::from_millis(if cfg!(test) { 20 } else { 2_000 });

/// Returns the handle of the process-wide recorder, which the first call installs.
pub fn metrics_handle() -> Option<PrometheusHandle> {
    static COLLECTED: OnceLock<Option<PrometheusHandle>> = OnceLock::new();
    COLLECTED.get_or_init(install_recorder).clone()
}

fn install_recorder() -> Option<PrometheusHandle> {
    // Buckets double from 10 ms to 82 s for calls, are finer for commits, longer for people.
    let calls: Vec<f64> = (0..14).map(|n| 0.01 * f64::from(1 << n)).collect();
    let commits: Vec<f64> = (0..14).map(|n| 0.0001 * f64::from(1 << n)).collect();
    let sizes: Vec<f64> = (0..10).map(|n| f64::from(1 << n)).collect();
    let waits: Vec<f64> = (0..19).map(|n| f64::from(1 << n)).collect();
    let full_name = |name: &str| Matcher::Full(name.to_owned());
    let builder = PrometheusBuilder::new()
        .set_buckets_for_metric(full_name("toolcrib_tool_call_duration_seconds"), &calls)
        .and_then(|b| {
            b.set_buckets_for_metric(full_name("toolcrib_tool_call_queue_seconds"), &calls)
        })
        .and_then(|b| b.set_buckets_for_metric(full_name("toolcrib_approval_wait_seconds"), &waits))
        .and_then(|b| {
            b.set_buckets_for_metric(full_name("toolcrib_store_commit_duration_seconds"), &commits)
        })
        .and_then(|b| {
            b.set_buckets_for_metric(full_name("toolcrib_store_commit_group_size"), &sizes)
        });
    let handle = builder.ok()?.install_recorder().ok()?;
    start_upkeep(handle.clone());
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
    register_counters();
    Some(handle)
}

/// Counters with one label whose values are known: name, label, values.
const LABELED_COUNTERS: [(&str, &str, &[&str]); 15] = [
    ("toolcrib_policy_decisions_total", "decision", &["allow", "deny", "ask"]),
    ("toolcrib_switched_off_calls_total", "kind", &["tool", "agent", "source", "project"]),
    ("toolcrib_late_results_total", "reason", &["ended", "wrong_attempt"]),
    ("toolcrib_otlp_spans_total", "outcome", &["sent", "failed", "dropped"]),
    ("toolcrib_runs_total", "status", &["SUCCEEDED", "FAILED", "CANCELED"]),
    ("toolcrib_model_requests_total", "outcome", &["ok", "again", "failed"]),
    ("toolcrib_webhook_deliveries_total", "outcome", &["delivered", "failed", "gone"]),
    ("toolcrib_streams_refused_total", "limit", &["caller", "server"]),
    ("toolcrib_upstream_calls_total", "outcome", &["ok", "failed", "asked", "task"]),
    ("toolcrib_rejoined_total", "kind", &["call", "run", "approval"]),
    (
        "toolcrib_approval_decisions_total",
        "decision",
        &["approved", "rejected", "expired", "superseded", "canceled"],
    ),
    ("toolcrib_approval_webhooks_total", "result", &["ok", "failed"]),
    ("toolcrib_agent_wakeup_webhooks_total", "result", &["ok", "failed"]),
    ("toolcrib_mcp_event_deliveries_total", "result", &["ok", "failed"]),
    ("toolcrib_dead_letters_total", "reason", &DEAD_LETTER_REASONS),
];

const PLAIN_COUNTERS: [&str; 8] = [
    "toolcrib_approval_requests_total",
    "toolcrib_bus_reconnects_total",
    "toolcrib_connections_stalled_total",
    "toolcrib_idempotent_replays_total",
    "toolcrib_mcp_resumed_streams_total",
    "toolcrib_reconciled_calls_total",
    "toolcrib_sign_in_failures_total",
    "toolcrib_upstream_restarts_total",
];

/// Registers the counters whose labels are known, with 0. The engine registers those of calls.
fn register_counters() {
    for (name, label, values) in LABELED_COUNTERS {
        for value in values {
            metrics::counter!(name, label => *value).increment(0);
        }
    }
    metrics::counter!("toolcrib_dead_letters_total", "reason" => "other").increment(0);
    for name in PLAIN_COUNTERS {
        metrics::counter!(name).increment(0);
    }
    for kind in ["agent", "user", "tool", "project"] {
        for limit in ["per_minute", "max_open"] {
            let labels = [("kind", kind), ("limit", limit)];
            metrics::counter!("toolcrib_limit_refusals_total", &labels).increment(0);
        }
    }
    metrics::gauge!("toolcrib_streams_open").set(0.0);
}

/// Adds recorded samples to their histograms at an interval. The recorder stores each sample until
/// it is added or `/metrics` is read: without this, a server whose metrics no program reads would
/// need more memory with every call. The recorder belongs to the process and outlives any runtime,
/// so this is a thread.
fn start_upkeep(handle: PrometheusHandle) {
    let upkeep = move || {
        loop {
            std::thread::sleep(UPKEEP_INTERVAL);
            handle.run_upkeep();
        }
    };
    let thread = std::thread::Builder::new().name("metrics-upkeep".to_owned());
    if let Err(error) = thread.stack_size(256 << 10).spawn(upkeep) {
        tracing::warn!(%error, "samples stay in memory until /metrics is read");
    }
}

#[cfg(test)]
#[cfg(target_os = "linux")]
mod tests {
    use std::process::Command;

    const CHILD: &str = "TOOLCRIB_TEST_UPKEEP_CHILD";
    /// Samples of one round: 8 MB, until they are added to their histogram.
    const SAMPLES: usize = 1_000_000;
    const WARM_UP: usize = 4;
    const ROUNDS: usize = 16;

    fn resident_bytes() -> usize {
        let text = std::fs::read_to_string("/proc/self/statm").unwrap();
        let pages: usize = text.split_whitespace().nth(1).unwrap().parse().unwrap();
        pages * 4_096
    }

    /// Measures a process of its own, because other tests in this one use memory too.
    #[test]
    fn samples_use_no_memory_although_metrics_are_never_read() {
        if std::env::var_os(CHILD).is_some() {
            return record_many_samples();
        }
        let name = "samples_use_no_memory_although_metrics_are_never_read";
        let child = Command::new(std::env::current_exe().unwrap())
            .args([&format!("telemetry::prometheus::tests::{name}"), "--exact", "--nocapture"])
            .env(CHILD, "1")
            .output()
            .unwrap();
        let output = String::from_utf8_lossy(&child.stdout);
        assert!(child.status.success() && output.contains("1 passed"), "{child:?}");
    }

    fn record_many_samples() {
        let handle = super::metrics_handle().unwrap();
        let samples = metrics::histogram!("toolcrib_store_commit_group_size");
        let mut before = 0;
        for round in 0..ROUNDS {
            if round == WARM_UP {
                before = resident_bytes();
            }
            (0..SAMPLES).for_each(|n| samples.record((n % 512) as f64));
            std::thread::sleep(super::UPKEEP_INTERVAL * 5);
        }
        let grown = resident_bytes().saturating_sub(before);
        assert!(grown < (ROUNDS - WARM_UP) * SAMPLES * 8 / 4, "{grown} more bytes");
        assert!(handle.render().contains("toolcrib_store_commit_group_size_count "));
    }
}
