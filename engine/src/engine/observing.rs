//! Notifies the observer, if there is one, and propagates trace context.

use super::{Engine, Inner};
use crate::call::Call;
use crate::event::{Kind, Record};
use crate::fault::Code;
use crate::observe::{Attempted, Ended};
use crate::tool::Executor;
use crate::trace::{Ids, TraceParent};

/// Result of an attempt that has ended.
pub(super) struct Over {
    failed: Option<Code>,
}

impl Engine {
    /// Returns the call's span if it is sampled, otherwise the span of the caller, if any.
    pub fn trace_of(&self, call: &Call) -> Option<TraceParent> {
        let Some(observer) = &self.inner.observer else { return asked_in(call) };
        let ids = Ids::of(call);
        if observer.samples(&ids) { Some(ids.call(true)) } else { ids.parent }
    }
}

impl Inner {
    /// Returns the trace context for the executor of the attempt: the attempt's span or, without an
    /// observer, the caller's context unchanged.
    pub(super) fn handed_on(&self, call: &Call) -> Option<TraceParent> {
        let Some(observer) = &self.observer else { return asked_in(call) };
        let ids = Ids::of(call);
        Some(ids.attempt(call.attempt, observer.samples(&ids)))
    }

    /// Returns true if the observer samples the call.
    pub(super) fn is_recorded(&self, call: &Call) -> bool {
        self.observer.as_ref().is_some_and(|observer| observer.samples(&Ids::of(call)))
    }

    /// Returns true if `/metrics`, which needs no key, may name the call's tool. Built-in tools are
    /// public; the tools of a project are private to it.
    pub(super) fn may_name(&self, call: &Call) -> bool {
        let shared = call.target.executor == Executor::Builtin;
        shared || self.tool_names.unwrap_or_else(|| !self.catalog().has_keys())
    }

    /// Detects whether a transition ended the attempt in flight. Called before the records are
    /// consumed.
    pub(super) fn attempt_over(
        &self,
        before: &Call,
        after: &Call,
        records: &[Record],
    ) -> Option<Over> {
        self.observer.as_ref()?;
        if !before.attempt_is_out() || after.attempt_is_out() {
            return None;
        }
        if let Some(outcome) = &after.outcome {
            return Some(Over { failed: outcome.error.as_ref().map(|fault| fault.code) });
        }
        let again = |record: &&Record| matches!(record.kind, Kind::Retrying | Kind::Fallback);
        let record = records.iter().rev().find(again);
        let code =
            record.and_then(|record| record.data.get("code")?.as_str()).and_then(Code::parse);
        Some(Over { failed: Some(code.unwrap_or(Code::RuntimeError)) })
    }

    /// Notifies the observer of an ended attempt and an ended call. `before` is needed only for an
    /// attempt.
    pub(super) fn tell_observer(
        &self,
        before: Option<&Call>,
        after: &Call,
        attempt: Option<Over>,
        now_ms: u64,
    ) {
        let Some(observer) = &self.observer else { return };
        let ended = after.status.is_terminal();
        if attempt.is_none() && !ended {
            return;
        }
        let ids = Ids::of(after);
        let attempt = attempt.filter(|_| observer.samples(&ids));
        if let (Some(over), Some(before)) = (attempt, before) {
            let taken_by = before.taken_by.as_deref().or(after.taken_by.as_deref());
            let failed = over.failed;
            let (call, ended_ms) = (before, now_ms);
            observer.attempted(&Attempted { ids, call, taken_by, ended_ms, failed });
        }
        if ended {
            let description = || {
                let entry = self.catalog().find(&after.project, &after.tool_name)?;
                Some(entry.definition.description.clone())
            };
            observer.ended(&Ended { ids, call: after, description: &description });
        }
    }
}

fn asked_in(call: &Call) -> Option<TraceParent> {
    call.asked.traceparent.as_deref()?.parse().ok()
}
