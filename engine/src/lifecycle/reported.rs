//! Reports on attempts, and the transitions that follow: the end, a retry, or a fallback.

use super::said::{matches_outcome, repeats_failed_attempt};
use super::{
    Action, Refusal, Transition, begin_attempt, end_call, end_record, ignored_record,
    into_transition, with_report,
};
use crate::domain::call::{Call, FailedAttempt, Hold, Status};
use crate::domain::event::{EventKind, EventRecord};
use crate::domain::fault::{Fault, SideEffect};
use crate::domain::json::Json;
use crate::domain::tool::Effect;

pub(super) fn check_report(
    call: &Call,
    attempt: Option<u32>,
    by: Option<&str>,
    result: &Result<Json, Fault>,
    now_ms: u64,
) -> Result<(), Refusal> {
    if repeats_failed_attempt(call, attempt, result) {
        return Err(Refusal::Duplicate);
    }
    if call.status.is_terminal() {
        if matches_outcome(call, result) {
            return Err(Refusal::Duplicate);
        }
        let why = format!("reported after the call was {}", call.status.as_str());
        return Err(Refusal::AlreadyEnded(with_report(
            ignored_record(call, now_ms, &why),
            by,
            result,
        )));
    }
    let this_one = attempt.is_none_or(|attempt| attempt == call.attempt);
    if !call.has_attempt_in_flight() || !this_one {
        let why = "reported for an attempt that is not out";
        return Err(Refusal::WrongAttempt(with_report(
            ignored_record(call, now_ms, why),
            by,
            result,
        )));
    }
    Ok(())
}

pub(super) fn apply_report(
    mut next: Call,
    by: Option<&str>,
    result: &Result<Json, Fault>,
    now_ms: u64,
) -> Transition {
    let mut records = Vec::new();
    if next.status == Status::Pending {
        records.push(begin_attempt(&mut next, now_ms));
    }
    if let Some(by) = by {
        next.acknowledged_by = Some(by.to_owned());
    }
    match result {
        Ok(data) => {
            let size = data.text().len();
            let outcome = (true, Some(data.clone()), None);
            let end = end_call(next, Status::Succeeded, outcome, now_ms);
            let record = end_record(&end, EventKind::Finished, now_ms).with("result_bytes", size);
            records.push(record);
            into_transition(end, records, vec![Action::NotifyEnded])
        }
        Err(fault) => retry_or_fail(next, records, fault, now_ms),
    }
}

/// Handles a failed attempt: retries, falls back, or ends the call.
pub(super) fn retry_or_fail(
    mut next: Call,
    mut records: Vec<EventRecord>,
    fault: &Fault,
    now_ms: u64,
) -> Transition {
    let harmless = fault.side_effect == SideEffect::None;
    let may_repeat = harmless || next.target.effect != Effect::Irreversible;
    let backoff_ms = next.backoff.wait_ms(next.target_attempts, next.id.as_str());
    // Do not retry before the delay that the executor requested.
    let wait_ms = backoff_ms.max(fault.retry_after_ms().unwrap_or(0));
    let at_ms = now_ms.saturating_add(wait_ms);
    let tries_left = next.target_attempts <= next.max_retries;
    let duration_ms = now_ms.saturating_sub(next.attempt_dispatched_ms.unwrap_or(now_ms));
    let failed = |kind: EventKind, call: &Call| {
        EventRecord::new(kind, now_ms, call.attempt)
            .with("code", fault.code.as_str())
            .with("message", fault.message.as_str())
            .with("duration_ms", duration_ms)
    };
    if fault.retryable && may_repeat && tries_left && at_ms < next.deadline_ms {
        records.push(
            failed(EventKind::Retrying, &next)
                .with("tool", next.target.tool.as_str())
                .with("next_attempt_at_ms", at_ms),
        );
        schedule_next_attempt(&mut next, fault, at_ms);
        return into_transition(next, records, vec![Action::Enqueue]);
    }
    let may_replace = harmless || next.target.effect == Effect::Read;
    if may_replace && !next.fallbacks.is_empty() && now_ms < next.deadline_ms {
        let alternate = next.fallbacks.remove(0);
        records.push(
            failed(EventKind::Fallback, &next)
                .with("from", next.target.tool.as_str())
                .with("to", alternate.tool.as_str())
                .with("args_bytes", alternate.args.text().len()),
        );
        next.target = alternate;
        next.target_attempts = 0;
        schedule_next_attempt(&mut next, fault, now_ms);
        return into_transition(next, records, vec![Action::Enqueue]);
    }
    let end = end_call(next, Status::Failed, (false, None, Some(fault.clone())), now_ms);
    records.push(end_record(&end, EventKind::Failed, now_ms).with("code", fault.code.as_str()));
    into_transition(end, records, vec![Action::NotifyEnded])
}

fn schedule_next_attempt(next: &mut Call, fault: &Fault, at_ms: u64) {
    next.failed_attempt = Some(Box::new(FailedAttempt::new(next.attempt, fault)));
    next.status = Status::Pending;
    next.hold = Some(Hold::Retry { at_ms });
    next.acknowledged_by = None;
}
