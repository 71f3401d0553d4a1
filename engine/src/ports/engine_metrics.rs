//! Metrics about calls for `/metrics`. Counts and durations only; never an id or an argument, and
//! only a bounded number of tool names.
//!
//! Counters that every call touches are registered once and cached; counters of failures are looked
//! up when a failure occurs.

use std::collections::HashMap;
use std::sync::{LazyLock, OnceLock};

use metrics::{Counter, Histogram, counter, histogram};
use parking_lot::RwLock;

use crate::domain::call::{Call, CallMetrics, Status};
use crate::domain::model_reply::TokenUsage;
use crate::domain::tool::Executor;
use crate::ports::model::UsageLabel;

struct SourceMetrics {
    accepted: Counter,
    succeeded: Counter,
    tools: RwLock<HashMap<String, ToolTimings>>,
    /// Timings of all unnamed tools together. Created on first use.
    unnamed_tools: OnceLock<ToolTimings>,
    /// Attempts by result: ok, failed, parked.
    attempts: [Counter; 3],
}

/// Duration histograms of one tool.
struct ToolTimings {
    latency: Histogram,
    queue: Histogram,
}

impl ToolTimings {
    fn new(source: &'static str, tool: &str) -> Self {
        let name = || tool.to_owned();
        Self {
            latency: histogram!(
                "toolcrib_tool_call_duration_seconds", "source" => source, "tool" => name()
            ),
            queue: histogram!(
                "toolcrib_tool_call_queue_seconds", "source" => source, "tool" => name()
            ),
        }
    }

    fn record(&self, metrics: &CallMetrics) {
        let seconds = |ms: u64| ms as f64 / 1_000.0;
        self.latency.record(seconds(metrics.latency_ms));
        self.queue.record(seconds(metrics.queue_ms));
    }
}

/// Maximum number of tools per source with their own label. Each costs about thirty lines of
/// `/metrics`.
const MAX_NAMED_TOOLS: usize = 100;

const ATTEMPT_OUTCOMES: [&str; 3] = ["ok", "failed", "parked"];

/// Metrics by executor; those of Toolcrib itself first. Entries live as long as the process.
static SOURCE_METRICS: LazyLock<RwLock<Vec<(Executor, &'static SourceMetrics)>>> =
    LazyLock::new(|| {
        let executors = Executor::STANDARD.into_iter().chain([Executor::INTERNAL]);
        RwLock::new(
            executors.map(|executor| (executor, SourceMetrics::register(executor))).collect(),
        )
    });

static ALLOWED_DECISIONS: LazyLock<Counter> =
    LazyLock::new(|| counter!("toolcrib_policy_decisions_total", "decision" => "allow"));

fn source_metrics(executor: Executor) -> &'static SourceMetrics {
    let find = |metrics: &[(Executor, &'static SourceMetrics)]| {
        metrics.iter().find(|(of, _)| *of == executor).map(|(_, metrics)| *metrics)
    };
    if let Some(metrics) = find(&SOURCE_METRICS.read()) {
        return metrics;
    }
    let mut all = SOURCE_METRICS.write();
    find(&all).unwrap_or_else(|| {
        let metrics = SourceMetrics::register(executor);
        all.push((executor, metrics));
        metrics
    })
}

pub(crate) fn count_allowed() {
    ALLOWED_DECISIONS.increment(1);
}

pub(crate) fn count_denied() {
    metrics::counter!("toolcrib_policy_decisions_total", "decision" => "deny").increment(1);
}

pub(crate) fn count_asked() {
    metrics::counter!("toolcrib_policy_decisions_total", "decision" => "ask").increment(1);
}

/// Records a new call, and its outcome if it ended before it was stored. `exports_name` returns
/// whether the tool's name may be exported.
pub(crate) fn record_accepted(call: &Call, exports_name: impl FnOnce() -> bool) {
    source_metrics(call.target.executor).accepted.increment(1);
    record_end(call, exports_name);
}

/// Registers the common counters, so that they are exported before their first increment.
pub(crate) fn register_counters() {
    LazyLock::force(&SOURCE_METRICS);
    LazyLock::force(&ALLOWED_DECISIONS);
}

/// Records a transition of a call. `exports_name` returns whether the tool's name may be exported.
pub(crate) fn record_transition(before: &Call, after: &Call, exports_name: impl FnOnce() -> bool) {
    if !before.status.is_terminal() {
        record_end(after, exports_name);
    }
}

/// Records the outcome of a call, if it has one.
pub(crate) fn record_end(after: &Call, exports_name: impl FnOnce() -> bool) {
    let Some(outcome) = &after.outcome else { return };
    let metrics = source_metrics(after.target.executor);
    match &outcome.error {
        None => metrics.succeeded.increment(1),
        Some(fault) => counter!(
            "toolcrib_tool_calls_total",
            "source" => after.target.executor.as_str(),
            "status" => after.status.as_str(),
            "error_code" => fault.code.as_str()
        )
        .increment(1),
    }
    metrics.record_timings(after, &outcome.metrics, exports_name);
}

impl SourceMetrics {
    fn register(executor: Executor) -> &'static Self {
        let source = executor.as_str();
        let metrics = Self {
            accepted: counter!("toolcrib_tool_calls_accepted_total", "source" => source),
            succeeded: counter!(
                "toolcrib_tool_calls_total",
                "source" => source, "status" => Status::Succeeded.as_str(), "error_code" => ""
            ),
            tools: RwLock::default(),
            unnamed_tools: OnceLock::new(),
            attempts: ATTEMPT_OUTCOMES.map(|outcome| {
                counter!(
                    "toolcrib_dispatch_attempts_total",
                    "source" => source, "outcome" => outcome
                )
            }),
        };
        Box::leak(Box::new(metrics))
    }

    fn record_timings(
        &self,
        call: &Call,
        metrics: &CallMetrics,
        exports_name: impl FnOnce() -> bool,
    ) {
        let source = call.target.executor.as_str();
        let other = || self.unnamed_tools.get_or_init(|| ToolTimings::new(source, "other"));
        if !exports_name() {
            return other().record(metrics);
        }
        if let Some(timing) = self.tools.read().get(&call.tool_name) {
            return timing.record(metrics);
        }
        let mut tools = self.tools.write();
        if tools.len() >= MAX_NAMED_TOOLS && !tools.contains_key(&call.tool_name) {
            return other().record(metrics);
        }
        let register = || ToolTimings::new(source, &call.tool_name);
        tools.entry(call.tool_name.clone()).or_insert_with(register).record(metrics);
    }
}

pub(crate) fn count_attempt(executor: Executor, ok: bool) {
    source_metrics(executor).attempts[usize::from(!ok)].increment(1);
}

pub(crate) fn count_parked(executor: Executor) {
    source_metrics(executor).attempts[2].increment(1);
}

/// Counts a run that has ended.
pub(crate) fn count_run_end(status: &'static str) {
    counter!("toolcrib_runs_total", "status" => status).increment(1);
}

/// Counts a model request by outcome: `ok`, `again` (a transient error that is retried) or
/// `failed`.
pub(crate) fn count_model_request(outcome: &'static str) {
    counter!("toolcrib_model_requests_total", "outcome" => outcome).increment(1);
}

/// Counts the tokens of a model's reply.
pub(crate) fn count_model_tokens(model: UsageLabel<'_>, usage: &TokenUsage) {
    for (kind, tokens) in [("input", usage.prompt_tokens), ("output", usage.completion_tokens)] {
        let name = model.model.to_owned();
        let labels = [("provider", model.provider.into()), ("model", name), ("type", kind.into())];
        counter!("toolcrib_llm_tokens_total", &labels).increment(tokens);
    }
}

/// Counts a requested approval.
pub(crate) fn count_approval_request() {
    counter!("toolcrib_approval_requests_total").increment(1);
}

/// Counts the end of an approval, by its status, and records how long the call waited.
pub(crate) fn record_approval_end(status: &'static str, waited_ms: u64) {
    counter!("toolcrib_approval_decisions_total", "decision" => status).increment(1);
    histogram!("toolcrib_approval_wait_seconds").record(waited_ms as f64 / 1_000.0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_executor_has_its_own_counter() {
        let executors = Executor::STANDARD.into_iter().chain([Executor::new("grpc")]);
        let counters: Vec<_> = executors.map(|e| std::ptr::from_ref(source_metrics(e))).collect();
        let distinct: std::collections::HashSet<_> = counters.iter().collect();
        assert_eq!(distinct.len(), Executor::STANDARD.len() + 1);
        assert_eq!(
            std::ptr::from_ref(source_metrics(Executor::new("grpc"))),
            *counters.last().unwrap()
        );
    }
}
