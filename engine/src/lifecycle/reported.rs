//! Reports on attempts, and the transitions that follow: the end, a retry, or a fallback.

use super::said::{said_before, says_the_same};
use super::{Action, Refusal, Step, begin, committed, end, ending, late, with_report};
use crate::call::{Call, FailedAttempt, Hold, Status};
use crate::event::{Kind, Record};
use crate::fault::{Fault, Happened};
use crate::json::Json;
use crate::tool::Effect;

pub(super) fn may_report(
    call: &Call,
    attempt: Option<u32>,
    by: Option<&str>,
    result: &Result<Json, Fault>,
    now_ms: u64,
) -> Result<(), Refusal> {
    if said_before(call, attempt, result) {
        return Err(Refusal::Repeated);
    }
    if call.status.is_terminal() {
        if says_the_same(call, result) {
            return Err(Refusal::Repeated);
        }
        let why = format!("reported after the call was {}", call.status.as_str());
        return Err(Refusal::Ended(with_report(late(call, now_ms, &why), by, result)));
    }
    let this_one = attempt.is_none_or(|attempt| attempt == call.attempt);
    if !call.attempt_is_out() || !this_one {
        let why = "reported for an attempt that is not out";
        return Err(Refusal::WrongAttempt(with_report(late(call, now_ms, why), by, result)));
    }
    Ok(())
}

pub(super) fn report(
    mut next: Call,
    by: Option<&str>,
    result: &Result<Json, Fault>,
    now_ms: u64,
) -> Step {
    let mut records = Vec::new();
    if next.status == Status::Pending {
        records.push(begin(&mut next, now_ms));
    }
    if let Some(by) = by {
        next.taken_by = Some(by.to_owned());
    }
    match result {
        Ok(data) => {
            let size = data.text().len();
            let outcome = (true, Some(data.clone()), None);
            let end = end(next, Status::Succeeded, outcome, now_ms);
            let record = ending(&end, Kind::Finished, now_ms).with("result_bytes", size);
            records.push(record);
            committed(end, records, vec![Action::Ended])
        }
        Err(fault) => failed(next, records, fault, now_ms),
    }
}

/// Handles a failed attempt: retries, falls back, or ends the call.
pub(super) fn failed(mut next: Call, mut records: Vec<Record>, fault: &Fault, now_ms: u64) -> Step {
    let harmless = fault.happened == Happened::No;
    let may_repeat = harmless || next.target.effect != Effect::Irreversible;
    let backoff_ms = next.backoff.wait_ms(next.target_attempts, next.id.as_str());
    // Do not retry before the delay that the executor requested.
    let wait_ms = backoff_ms.max(fault.retry_after_ms().unwrap_or(0));
    let at_ms = now_ms.saturating_add(wait_ms);
    let tries_left = next.target_attempts <= next.max_retries;
    let duration_ms = now_ms.saturating_sub(next.attempt_ms.unwrap_or(now_ms));
    let failed = |kind: Kind, call: &Call| {
        Record::new(kind, now_ms, call.attempt)
            .with("code", fault.code.as_str())
            .with("message", fault.message.as_str())
            .with("duration_ms", duration_ms)
    };
    if fault.retryable && may_repeat && tries_left && at_ms < next.deadline_ms {
        records.push(
            failed(Kind::Retrying, &next)
                .with("tool", next.target.tool.as_str())
                .with("next_attempt_at_ms", at_ms),
        );
        put_back(&mut next, fault, at_ms);
        return committed(next, records, vec![Action::Enqueue]);
    }
    let may_replace = harmless || next.target.effect == Effect::Read;
    if may_replace && !next.alternates.is_empty() && now_ms < next.deadline_ms {
        let alternate = next.alternates.remove(0);
        records.push(
            failed(Kind::Fallback, &next)
                .with("from", next.target.tool.as_str())
                .with("to", alternate.tool.as_str())
                .with("args_bytes", alternate.args.text().len()),
        );
        next.target = alternate;
        next.target_attempts = 0;
        put_back(&mut next, fault, now_ms);
        return committed(next, records, vec![Action::Enqueue]);
    }
    let end = end(next, Status::Failed, (false, None, Some(fault.clone())), now_ms);
    records.push(ending(&end, Kind::Failed, now_ms).with("code", fault.code.as_str()));
    committed(end, records, vec![Action::Ended])
}

fn put_back(next: &mut Call, fault: &Fault, at_ms: u64) {
    next.failed = Some(Box::new(FailedAttempt::new(next.attempt, fault)));
    next.status = Status::Pending;
    next.hold = Some(Hold::Retry { at_ms });
    next.taken_by = None;
}
