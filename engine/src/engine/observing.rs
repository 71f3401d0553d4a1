//! Telling the observer, if there is one, and handing on the trace.

use super::{Engine, Inner};
use crate::call::Call;
use crate::event::{Kind, Record};
use crate::fault::Code;
use crate::observe::{Attempted, Ended};
use crate::tool::Executor;
use crate::trace::{Ids, TraceParent};

/// How an attempt that is over went.
pub(super) struct Over {
    failed: Option<Code>,
}

impl Engine {
    /// The call's span in its trace, if it is recorded. Otherwise the one it was asked in, if any.
    pub fn trace_of(&self, call: &Call) -> Option<TraceParent> {
        let Some(observer) = &self.inner.observer else { return asked_in(call) };
        let ids = Ids::of(call);
        if observer.samples(&ids) { Some(ids.call(true)) } else { ids.parent }
    }
}

impl Inner {
    /// The trace that whoever executes the attempt goes on with: below the attempt's own span, or,
    /// where nothing is recorded, as it came.
    pub(super) fn handed_on(&self, call: &Call) -> Option<TraceParent> {
        let Some(observer) = &self.observer else { return asked_in(call) };
        let ids = Ids::of(call);
        Some(ids.attempt(call.attempt, observer.samples(&ids)))
    }

    /// Whether an observer records the call's spans.
    pub(super) fn is_recorded(&self, call: &Call) -> bool {
        self.observer.as_ref().is_some_and(|observer| observer.samples(&Ids::of(call)))
    }

    /// Whether `/metrics`, which needs no key, may name the call's tool. What comes with the server
    /// is everybody's; a project's own tools are not others' to know.
    pub(super) fn may_name(&self, call: &Call) -> bool {
        let shared = call.target.executor == Executor::Builtin;
        shared || self.tool_names.unwrap_or_else(|| !self.catalog().has_keys())
    }

    /// Whether a step ended the attempt that was out, looked at while its records are there.
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

    /// What it was before is needed only for an attempt.
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
