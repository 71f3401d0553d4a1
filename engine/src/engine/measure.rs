//! What `/metrics` shows about calls. Counts only; never an id or an argument.

use metrics::{counter, histogram};

use crate::call::Call;
use crate::source::Started;
use crate::tool::Executor;

pub(super) fn accepted(call: &Call) {
    counter!("toolcrib_tool_calls_accepted_total", "source" => call.target.executor.as_str())
        .increment(1);
}

pub(super) fn moved(before: &Call, after: &Call) {
    if before.status.is_terminal() || !after.status.is_terminal() {
        return;
    }
    let Some(outcome) = &after.outcome else { return };
    let code = outcome.error.as_ref().map_or("", |fault| fault.code.as_str());
    let source = after.target.executor.as_str();
    counter!(
        "toolcrib_tool_calls_total",
        "source" => source, "status" => after.status.as_str(), "error_code" => code
    )
    .increment(1);
    let seconds = |ms: u64| ms as f64 / 1_000.0;
    histogram!("toolcrib_tool_call_duration_seconds", "source" => source)
        .record(seconds(outcome.metrics.latency_ms));
    histogram!("toolcrib_tool_call_queue_seconds", "source" => source)
        .record(seconds(outcome.metrics.queue_ms));
}

pub(super) fn attempted(executor: Executor, started: &Started) {
    let outcome = match started {
        Started::Done(Ok(_)) => "ok",
        Started::Done(Err(_)) => "failed",
        Started::Parked => "parked",
    };
    counter!(
        "toolcrib_dispatch_attempts_total",
        "source" => executor.as_str(), "outcome" => outcome
    )
    .increment(1);
}
