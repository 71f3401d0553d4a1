//! Transitions reported by remote executors.

use super::{
    Action, Call, EventKind, EventRecord, Refusal, RemoteOutcome, Status, Transition,
    begin_attempt, end_call, end_record, ignored_record, into_transition,
};

/// Ends the call with a remote outcome. It is final under every policy: no retry follows.
pub(super) fn apply_remote_outcome(
    call: &Call,
    attempt: u32,
    by: &str,
    told: &RemoteOutcome,
    now_ms: u64,
) -> Result<Transition, Refusal> {
    let (status, kind, outcome) = match told {
        RemoteOutcome::Partial(data) => {
            (Status::Succeeded, EventKind::Finished, (true, Some(data.clone()), None))
        }
        RemoteOutcome::TimedOut(fault) => {
            (Status::Timeout, EventKind::Timeout, (false, None, Some(fault.clone())))
        }
        RemoteOutcome::Canceled(fault) => {
            (Status::Canceled, EventKind::Canceled, (false, None, Some(fault.clone())))
        }
    };
    let partial = status == Status::Succeeded;
    if call.status.is_terminal() {
        let known = call.outcome.as_ref();
        let same = known.is_some_and(|known| {
            known.partial == partial && known.data == outcome.1 && known.error == outcome.2
        });
        if same && call.status == status {
            return Err(Refusal::Duplicate);
        }
        let why = format!("reported after the call was {}", call.status.as_str());
        let late =
            ignored_record(call, now_ms, &why).with("by", by).with("reported", status.as_str());
        return Err(Refusal::AlreadyEnded(late));
    }
    if !call.has_attempt_in_flight() || attempt != call.attempt {
        let late =
            ignored_record(call, now_ms, "reported for an attempt that is not out").with("by", by);
        return Err(Refusal::WrongAttempt(late.with("reported", status.as_str())));
    }
    let mut next = call.clone();
    let mut records = Vec::new();
    if next.status == Status::Pending {
        records.push(begin_attempt(&mut next, now_ms));
    }
    next.acknowledged_by = Some(by.to_owned());
    let mut end = end_call(next, status, outcome, now_ms);
    if let Some(outcome) = &mut end.outcome {
        outcome.partial = partial;
    }
    let record = end_record(&end, kind, now_ms).with("by", by);
    records.push(if partial { record.with("partial", true) } else { record });
    Ok(into_transition(end, records, vec![Action::NotifyEnded]))
}

/// Stores the handle of an attempt that continues at the executor, to resume it after a crash.
pub(super) fn detach(
    call: &Call,
    attempt: u32,
    handle: &str,
    now_ms: u64,
) -> Result<Transition, Refusal> {
    if call.status.is_terminal() {
        return Err(Refusal::AlreadyEnded(ignored_record(
            call,
            now_ms,
            "handed over after the end",
        )));
    }
    if !call.has_attempt_in_flight() || call.attempt != attempt {
        let why = "handed over by an attempt that is not out";
        return Err(Refusal::WrongAttempt(ignored_record(call, now_ms, why)));
    }
    let known = call.elicitation.as_ref().and_then(|dialogue| dialogue.handle.as_deref());
    if known == Some(handle) {
        return Err(Refusal::Duplicate);
    }
    let mut next = call.clone();
    next.elicitation.get_or_insert_default().handle = Some(handle.to_owned());
    let record = EventRecord::new(EventKind::Acknowledged, now_ms, attempt).with("task", handle);
    Ok(into_transition(next, vec![record], vec![]))
}
