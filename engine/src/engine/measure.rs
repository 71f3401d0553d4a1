//! What `/metrics` shows about calls. Counts only; never an id or an argument.
//!
//! The counters that every call touches are looked up once and kept; those of failures are looked
//! up when one happens.

use std::sync::LazyLock;

use metrics::{Counter, Histogram, counter, histogram};

use crate::call::{Call, Status};
use crate::tool::Executor;

struct Usual {
    accepted: Counter,
    succeeded: Counter,
    latency: Histogram,
    queue: Histogram,
    /// Attempts that were ok, failed or parked.
    attempts: [Counter; 3],
}

const ATTEMPTS: [&str; 3] = ["ok", "failed", "parked"];

/// By executor, in the order of [`Executor::ALL`].
static USUAL: LazyLock<Vec<Usual>> = LazyLock::new(|| {
    let of = |executor: &Executor| {
        let source = executor.as_str();
        Usual {
            accepted: counter!("toolcrib_tool_calls_accepted_total", "source" => source),
            succeeded: counter!(
                "toolcrib_tool_calls_total",
                "source" => source, "status" => Status::Succeeded.as_str(), "error_code" => ""
            ),
            latency: histogram!("toolcrib_tool_call_duration_seconds", "source" => source),
            queue: histogram!("toolcrib_tool_call_queue_seconds", "source" => source),
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

pub(super) fn moved(before: &Call, after: &Call) {
    if !before.status.is_terminal() {
        ended(after);
    }
}

/// The call has ended, if it has.
pub(super) fn ended(after: &Call) {
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
    let seconds = |ms: u64| ms as f64 / 1_000.0;
    usual.latency.record(seconds(outcome.metrics.latency_ms));
    usual.queue.record(seconds(outcome.metrics.queue_ms));
}

pub(super) fn attempted(executor: Executor, ok: bool) {
    usual(executor).attempts[usize::from(!ok)].increment(1);
}

pub(super) fn parked(executor: Executor) {
    usual(executor).attempts[2].increment(1);
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
