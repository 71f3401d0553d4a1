//! Metrics about calls for `/metrics`. Counts and durations only; never an id or an argument, and
//! only a bounded number of tool names.
//!
//! Counters that every call touches are registered once and cached; counters of failures are looked
//! up when a failure occurs.

use std::collections::HashMap;
use std::sync::{LazyLock, OnceLock};

use metrics::{Counter, Histogram, counter, histogram};
use parking_lot::RwLock;

use crate::call::{Call, Metrics, Status};
use crate::model::{CountedAs, Usage};
use crate::tool::Executor;

struct Usual {
    accepted: Counter,
    succeeded: Counter,
    tools: RwLock<HashMap<String, Timing>>,
    /// Timings of all unnamed tools together. Created on first use.
    other: OnceLock<Timing>,
    /// Attempts by result: ok, failed, parked.
    attempts: [Counter; 3],
}

/// Duration histograms of one tool.
struct Timing {
    latency: Histogram,
    queue: Histogram,
}

impl Timing {
    fn of(source: &'static str, tool: &str) -> Self {
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

    fn record(&self, metrics: &Metrics) {
        let seconds = |ms: u64| ms as f64 / 1_000.0;
        self.latency.record(seconds(metrics.latency_ms));
        self.queue.record(seconds(metrics.queue_ms));
    }
}

/// Maximum number of tools per source with their own label. Each costs about thirty lines of
/// `/metrics`.
const MAX_NAMED: usize = 100;

const ATTEMPTS: [&str; 3] = ["ok", "failed", "parked"];

/// Metrics by executor, in the order of [`Executor::ALL`].
static USUAL: LazyLock<Vec<Usual>> = LazyLock::new(|| {
    let of = |executor: &Executor| {
        let source = executor.as_str();
        Usual {
            accepted: counter!("toolcrib_tool_calls_accepted_total", "source" => source),
            succeeded: counter!(
                "toolcrib_tool_calls_total",
                "source" => source, "status" => Status::Succeeded.as_str(), "error_code" => ""
            ),
            tools: RwLock::default(),
            other: OnceLock::new(),
            attempts: ATTEMPTS.map(|outcome| {
                counter!(
                    "toolcrib_dispatch_attempts_total",
                    "source" => source, "outcome" => outcome
                )
            }),
        }
    };
    Executor::ALL.iter().map(of).collect()
});

static ALLOWED: LazyLock<Counter> =
    LazyLock::new(|| counter!("toolcrib_policy_decisions_total", "decision" => "allow"));

fn usual(executor: Executor) -> &'static Usual {
    &USUAL[executor as usize]
}

pub(super) fn allowed() {
    ALLOWED.increment(1);
}

pub(super) fn accepted(call: &Call) {
    usual(call.target.executor).accepted.increment(1);
}

/// Registers the common counters, so that they are exported before their first increment.
pub(super) fn ready() {
    LazyLock::force(&USUAL);
    LazyLock::force(&ALLOWED);
}

/// Records a transition of a call. `named` returns whether the tool's name may be exported.
pub(super) fn moved(before: &Call, after: &Call, named: impl FnOnce() -> bool) {
    if !before.status.is_terminal() {
        ended(after, named);
    }
}

/// Records the outcome of a call, if it has one.
pub(super) fn ended(after: &Call, named: impl FnOnce() -> bool) {
    let Some(outcome) = &after.outcome else { return };
    let usual = usual(after.target.executor);
    match &outcome.error {
        None => usual.succeeded.increment(1),
        Some(fault) => counter!(
            "toolcrib_tool_calls_total",
            "source" => after.target.executor.as_str(),
            "status" => after.status.as_str(),
            "error_code" => fault.code.as_str()
        )
        .increment(1),
    }
    usual.time(after, &outcome.metrics, named);
}

impl Usual {
    fn time(&self, call: &Call, metrics: &Metrics, named: impl FnOnce() -> bool) {
        let source = call.target.executor.as_str();
        let other = || self.other.get_or_init(|| Timing::of(source, "other"));
        if !named() {
            return other().record(metrics);
        }
        if let Some(timing) = self.tools.read().get(&call.tool_name) {
            return timing.record(metrics);
        }
        let mut tools = self.tools.write();
        if tools.len() >= MAX_NAMED && !tools.contains_key(&call.tool_name) {
            return other().record(metrics);
        }
        let made = || Timing::of(source, &call.tool_name);
        tools.entry(call.tool_name.clone()).or_insert_with(made).record(metrics);
    }
}

pub(super) fn attempted(executor: Executor, ok: bool) {
    usual(executor).attempts[usize::from(!ok)].increment(1);
}

pub(super) fn parked(executor: Executor) {
    usual(executor).attempts[2].increment(1);
}

/// Counts a run that has ended.
pub(crate) fn run_over(status: &'static str) {
    counter!("toolcrib_runs_total", "status" => status).increment(1);
}

/// Counts a model request by outcome: `ok`, `again` (a transient error that is retried) or
/// `failed`.
pub(crate) fn asked(outcome: &'static str) {
    counter!("toolcrib_model_requests_total", "outcome" => outcome).increment(1);
}

/// Counts the tokens of a model's reply.
pub(crate) fn answered(model: CountedAs<'_>, usage: &Usage) {
    for (kind, tokens) in [("input", usage.prompt_tokens), ("output", usage.completion_tokens)] {
        let name = model.model.to_owned();
        let labels = [("provider", model.provider.into()), ("model", name), ("type", kind.into())];
        counter!("toolcrib_llm_tokens_total", &labels).increment(tokens);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn executors_are_counted_apart() {
        for (n, executor) in Executor::ALL.into_iter().enumerate() {
            assert_eq!(executor as usize, n);
        }
    }
}
