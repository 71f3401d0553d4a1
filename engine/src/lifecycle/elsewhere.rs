//! Transitions reported by remote executors.

use super::{
    Action, Call, Kind, Record, Refusal, Status, Step, Told, begin, committed, end, ending, late,
};

/// Ends the call with a remote outcome. It is final under every policy: no retry follows.
pub(super) fn told(
    call: &Call,
    attempt: u32,
    by: &str,
    told: &Told,
    now_ms: u64,
) -> Result<Step, Refusal> {
    let (status, kind, outcome) = match told {
        Told::Partial(data) => {
            (Status::Succeeded, Kind::Finished, (true, Some(data.clone()), None))
        }
        Told::TimedOut(fault) => {
            (Status::Timeout, Kind::Timeout, (false, None, Some(fault.clone())))
        }
        Told::Canceled(fault) => {
            (Status::Canceled, Kind::Canceled, (false, None, Some(fault.clone())))
        }
    };
    let partial = status == Status::Succeeded;
    if call.status.is_terminal() {
        let known = call.outcome.as_ref();
        let same = known.is_some_and(|known| {
            known.partial == partial && known.data == outcome.1 && known.error == outcome.2
        });
        if same && call.status == status {
            return Err(Refusal::Repeated);
        }
        let why = format!("reported after the call was {}", call.status.as_str());
        let late = late(call, now_ms, &why).with("by", by).with("reported", status.as_str());
        return Err(Refusal::Ended(late));
    }
    if !call.attempt_is_out() || attempt != call.attempt {
        let late = late(call, now_ms, "reported for an attempt that is not out").with("by", by);
        return Err(Refusal::WrongAttempt(late.with("reported", status.as_str())));
    }
    let mut next = call.clone();
    let mut records = Vec::new();
    if next.status == Status::Pending {
        records.push(begin(&mut next, now_ms));
    }
    next.taken_by = Some(by.to_owned());
    let mut end = end(next, status, outcome, now_ms);
    if let Some(outcome) = &mut end.outcome {
        outcome.partial = partial;
    }
    let record = ending(&end, kind, now_ms).with("by", by);
    records.push(if partial { record.with("partial", true) } else { record });
    Ok(committed(end, records, vec![Action::Ended]))
}

/// Stores the handle of an attempt that continues at the executor, to resume it after a crash.
pub(super) fn handed(
    call: &Call,
    attempt: u32,
    handle: &str,
    now_ms: u64,
) -> Result<Step, Refusal> {
    if call.status.is_terminal() {
        return Err(Refusal::Ended(late(call, now_ms, "handed over after the end")));
    }
    if !call.attempt_is_out() || call.attempt != attempt {
        let why = "handed over by an attempt that is not out";
        return Err(Refusal::WrongAttempt(late(call, now_ms, why)));
    }
    let known = call.dialogue.as_ref().and_then(|dialogue| dialogue.handle.as_deref());
    if known == Some(handle) {
        return Err(Refusal::Repeated);
    }
    let mut next = call.clone();
    next.dialogue.get_or_insert_default().handle = Some(handle.to_owned());
    let record = Record::new(Kind::Taken, now_ms, attempt).with("task", handle);
    Ok(committed(next, vec![record], vec![]))
}
