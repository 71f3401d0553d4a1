//! Logs and metrics of the process.

use std::io::IsTerminal;
use std::sync::OnceLock;

use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use tracing_subscriber::EnvFilter;

use crate::config::LogFormat;

/// Starts logging to standard error. `TOOLCRIB_LOG` wins over the configured level.
pub fn start_logging(level: &str, format: LogFormat) {
    let wanted = std::env::var("TOOLCRIB_LOG").unwrap_or_else(|_| level.to_owned());
    let filter = EnvFilter::try_new(quietly(&wanted)).unwrap_or_else(|_| EnvFilter::new("info"));
    let json = match format {
        LogFormat::Auto => !std::io::stderr().is_terminal(),
        LogFormat::Text => false,
        LogFormat::Json => true,
    };
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    // A second start in one process (tests) keeps the first.
    let _ = if json { builder.json().try_init() } else { builder.try_init() };
}

/// The MCP library writes several lines about every request. Who wants them names it: `rmcp=info`.
fn quietly(wanted: &str) -> String {
    if wanted.contains("rmcp") { wanted.to_owned() } else { format!("{wanted},rmcp=error") }
}

/// What collects the metrics of this process, started with the first who asks for it.
pub fn metrics() -> Option<PrometheusHandle> {
    static COLLECTED: OnceLock<Option<PrometheusHandle>> = OnceLock::new();
    COLLECTED.get_or_init(start_metrics).clone()
}

fn start_metrics() -> Option<PrometheusHandle> {
    // Doubling from 10 ms to 82 s for calls, finer for commits.
    let calls: Vec<f64> = (0..14).map(|n| 0.01 * f64::from(1 << n)).collect();
    let commits: Vec<f64> = (0..14).map(|n| 0.0001 * f64::from(1 << n)).collect();
    let sizes: Vec<f64> = (0..10).map(|n| f64::from(1 << n)).collect();
    let named = |name: &str| Matcher::Full(name.to_owned());
    let builder = PrometheusBuilder::new()
        .set_buckets_for_metric(named("toolcrib_tool_call_duration_seconds"), &calls)
        .and_then(|b| b.set_buckets_for_metric(named("toolcrib_tool_call_queue_seconds"), &calls))
        .and_then(|b| {
            b.set_buckets_for_metric(named("toolcrib_store_commit_duration_seconds"), &commits)
        })
        .and_then(|b| b.set_buckets_for_metric(named("toolcrib_store_commit_group_size"), &sizes));
    let handle = builder.ok()?.install_recorder().ok()?;
    metrics::gauge!("toolcrib_build_info", "version" => env!("CARGO_PKG_VERSION")).set(1.0);
    for decision in ["allow", "deny"] {
        metrics::counter!("toolcrib_policy_decisions_total", "decision" => decision).increment(0);
    }
    for reason in ["ended", "wrong_attempt"] {
        metrics::counter!("toolcrib_late_results_total", "reason" => reason).increment(0);
    }
    metrics::counter!("toolcrib_idempotent_replays_total").increment(0);
    metrics::counter!("toolcrib_reconciled_calls_total").increment(0);
    Some(handle)
}
