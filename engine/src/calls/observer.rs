//! Notifies the observer, if there is one, and propagates trace context.

use std::sync::Arc;

use crate::calls::Calls;
use crate::domain::call::Call;
use crate::domain::event::{EventKind, EventRecord};
use crate::domain::fault::Code;
use crate::domain::trace::{SpanIds, TraceParent};
use crate::ports::core::Core;
use crate::ports::observer::{EndedAttempt, EndedCall};
use crate::registry::Registry;

/// Telemetry of calls and their attempts.
pub(crate) struct CallTelemetry {
    pub(super) core: Arc<Core>,
    pub(super) registry: Arc<Registry>,
}

/// Result of an attempt that has ended.
pub(crate) struct AttemptEnd {
    /// Code of the failure; `None` if the attempt succeeded.
    fault_code: Option<Code>,
}

impl Calls {
    /// Returns the `traceparent` of a new trace, for a run that was started without one: its calls
    /// and those of the agents below it then belong to one trace.
    pub(crate) fn start_trace(&self, now_ms: u64) -> TraceParent {
        let ids = SpanIds::new(&self.core.id_generator.next_call_id(now_ms), None);
        let observer = self.core.observer.as_ref();
        ids.call(observer.is_none_or(|observer| observer.is_sampled(&ids)))
    }

    /// Returns the call's span if it is sampled, otherwise the span of the caller, if any.
    pub fn call_traceparent(&self, call: &Call) -> Option<TraceParent> {
        let Some(observer) = &self.core.observer else { return caller_traceparent(call) };
        let ids = SpanIds::for_call(call);
        if observer.is_sampled(&ids) { Some(ids.call(true)) } else { ids.parent }
    }
}

impl CallTelemetry {
    /// Returns the trace context for the executor of the attempt: the attempt's span or, without an
    /// observer, the caller's context unchanged.
    pub(crate) fn attempt_traceparent(&self, call: &Call) -> Option<TraceParent> {
        let Some(observer) = &self.core.observer else { return caller_traceparent(call) };
        let ids = SpanIds::for_call(call);
        Some(ids.attempt(call.attempt, observer.is_sampled(&ids)))
    }

    /// Returns true if the observer samples the call.
    pub(crate) fn is_sampled(&self, call: &Call) -> bool {
        self.core
            .observer
            .as_ref()
            .is_some_and(|observer| observer.is_sampled(&SpanIds::for_call(call)))
    }

    /// Returns true if metrics record the name of the call's tool. They always name built-in tools;
    /// `Registry::shows_tool_names` decides which callers see the names of projects' tools.
    pub(crate) fn can_name_tool(&self, call: &Call) -> bool {
        call.target.traits.in_process || self.registry.tool_names_in_metrics.unwrap_or(true)
    }

    /// Returns the end of the attempt in flight if this transition ended it; `None` also without an
    /// observer. Called before the records are consumed.
    pub(crate) fn detect_attempt_end(
        &self,
        before: &Call,
        after: &Call,
        records: &[EventRecord],
    ) -> Option<AttemptEnd> {
        self.core.observer.as_ref()?;
        if !before.has_attempt_in_flight() || after.has_attempt_in_flight() {
            return None;
        }
        if let Some(outcome) = &after.outcome {
            return Some(AttemptEnd { fault_code: outcome.error.as_ref().map(|fault| fault.code) });
        }
        let announces_next = |record: &&EventRecord| {
            matches!(record.kind, EventKind::Retrying | EventKind::Fallback)
        };
        let record = records.iter().rev().find(announces_next);
        let code =
            record.and_then(|record| record.data.get("code")?.as_str()).and_then(Code::parse);
        Some(AttemptEnd { fault_code: Some(code.unwrap_or(Code::RuntimeError)) })
    }

    /// Notifies the observer of an ended attempt and an ended call. `before` is needed only for an
    /// attempt.
    pub(crate) fn notify_observer(
        &self,
        before: Option<&Call>,
        after: &Call,
        attempt: Option<AttemptEnd>,
        now_ms: u64,
    ) {
        let Some(observer) = &self.core.observer else { return };
        let ended = after.status.is_terminal();
        if attempt.is_none() && !ended {
            return;
        }
        let ids = SpanIds::for_call(after);
        let attempt = attempt.filter(|_| observer.is_sampled(&ids));
        if let (Some(attempt_end), Some(before)) = (attempt, before) {
            let taken_by = before.acknowledged_by.as_deref().or(after.acknowledged_by.as_deref());
            let failed = attempt_end.fault_code;
            let (call, ended_ms) = (before, now_ms);
            observer.attempt_ended(&EndedAttempt { ids, call, taken_by, ended_ms, failed });
        }
        if ended {
            let description = || {
                let entry = self.registry.catalog().find(&after.project, &after.tool_name)?;
                Some(entry.definition.description.clone())
            };
            observer.call_ended(&EndedCall { ids, call: after, description: &description });
        }
    }
}

fn caller_traceparent(call: &Call) -> Option<TraceParent> {
    call.origin.traceparent.as_deref()?.parse().ok()
}
