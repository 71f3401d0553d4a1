//! Time limits: the deadline of a call, the time of an attempt, the wait for a predecessor. Pure.

use super::approvals::expire_approval;
use super::stops::effect_warning;
use super::{
    Action, IF_TAKEN, MAY_HAVE_HAPPENED, Refusal, Transition, end_call, end_record,
    into_transition, retry_or_fail, stop_actions,
};
use crate::domain::call::{Call, Hold, Status};
use crate::domain::event::EventKind;
use crate::domain::fault::{Code, Fault};
use crate::domain::tool::Effect;

/// Minimum time between two looks at an attempt that no client has received.
const ABSENT_CHECK_MS: u64 = 1_000;

/// Returns the number of attempts on the current target that may follow the last one.
pub(super) fn retries_left(call: &Call) -> u32 {
    call.max_retries.saturating_add(1).saturating_sub(call.target_attempts)
}

/// Returns the end of the attempt that starts now, or `None` if that is the deadline of the call.
///
/// Without a time limit of its own, an attempt gets an equal part of the remaining time: the part
/// of each attempt that may still follow is reserved, on this target and on its fallbacks. No
/// attempt follows one that may have had an irreversible effect, and no fallback follows one that
/// may have had any.
pub(super) fn attempt_deadline(call: &Call, now_ms: u64) -> Option<u64> {
    let at_ms = now_ms.saturating_add(attempt_limit_ms(call, !call.may_have_begun(), now_ms));
    (at_ms < call.deadline_ms).then_some(at_ms)
}

/// Returns the time until which an attempt that starts now waits for an executor that cannot be
/// reached. The attempt has had no effect by then, so a retry or a fallback may follow. This time
/// is before the end of the attempt, so that the source's report comes first.
pub(crate) fn connect_deadline(call: &Call, now_ms: u64) -> u64 {
    let limit_ms = attempt_limit_ms(call, true, now_ms);
    let at_ms = now_ms.saturating_add(limit_ms - limit_ms / 10);
    if at_ms.saturating_add(limit_ms / 10) < call.deadline_ms { at_ms } else { call.deadline_ms }
}

/// Returns the time limit of an attempt that starts now. `harmless` is true if the attempt
/// certainly has no effect when it times out.
fn attempt_limit_ms(call: &Call, harmless: bool, now_ms: u64) -> u64 {
    let remaining_ms = call.deadline_ms.saturating_sub(now_ms);
    let limit_ms = call.attempt_timeout_ms.unwrap_or_else(|| {
        let effect = call.target.effect;
        let per_target = u64::from(call.max_retries).saturating_add(1);
        let fallbacks = match harmless || effect == Effect::Read {
            true => per_target.saturating_mul(call.fallbacks.len() as u64),
            false => 0,
        };
        let retries = match harmless || effect != Effect::Irreversible {
            true => u64::from(retries_left(call)),
            false => 0,
        };
        let share_ms = remaining_ms / (1 + retries + fallbacks);
        let backoff_ms = call.backoff.wait_ms(call.target_attempts, call.id.as_str());
        // A retry that would not start before the deadline gets no part of the time.
        match share_ms.saturating_add(backoff_ms) < remaining_ms {
            true => share_ms,
            false => remaining_ms / (1 + fallbacks),
        }
    });
    limit_ms.max(1)
}

/// Moves the deadline of a call whose predecessor got more time.
pub(super) fn extend_predecessor_wait(
    call: &Call,
    predecessor_ms: u64,
) -> Result<Transition, Refusal> {
    let Some(Hold::Predecessor { timeout_ms }) = call.hold else {
        return Err(Refusal::NotApplicable);
    };
    let deadline_ms = predecessor_ms.saturating_add(timeout_ms);
    if deadline_ms <= call.deadline_ms {
        return Err(Refusal::NotApplicable);
    }
    Ok(into_transition(Call { deadline_ms, ..call.clone() }, vec![], vec![]))
}

/// Ends an attempt whose time is over. It is stopped, and a retry or a fallback follows if the tool
/// permits. An irreversible attempt that may have begun ends the call with an unknown outcome.
pub(super) fn time_out_attempt(
    call: &Call,
    attempt: u32,
    delivered_ms: Option<u64>,
    now_ms: u64,
) -> Result<Transition, Refusal> {
    let is_due = call.attempt_deadline_ms.is_some_and(|at_ms| at_ms <= now_ms);
    if !call.has_attempt_in_flight() || call.attempt != attempt || !is_due {
        return Err(Refusal::NotApplicable);
    }
    let mut next = call.clone();
    let (tool, has_begun) = (&call.target.tool, call.may_have_begun());
    if !has_begun {
        // The time of an attempt begins when a client receives it. Waiting for an absent client is
        // not an attempt: it costs no retry, and only a fallback ends it.
        let (waits_on, end_ms) = match delivered_ms {
            Some(at_ms) => {
                let end_ms = attempt_deadline(call, at_ms);
                (end_ms.is_none_or(|end_ms| end_ms > now_ms), end_ms)
            }
            None => {
                let end_ms = attempt_deadline(call, now_ms);
                let later_ms = now_ms.saturating_add(ABSENT_CHECK_MS);
                next.target_attempts = next.max_retries.saturating_add(1);
                (call.fallbacks.is_empty(), end_ms.map(|end_ms| end_ms.max(later_ms)))
            }
        };
        if waits_on {
            let next = Call { attempt_deadline_ms: end_ms, ..call.clone() };
            return Ok(into_transition(next, vec![], vec![]));
        }
    }
    let since_ms = delivered_ms.or(call.attempt_dispatched_ms).unwrap_or(now_ms);
    let took_ms = now_ms.saturating_sub(since_ms);
    let silent = format!("{tool} did not answer attempt {attempt} within {took_ms} ms");
    let (fault, end_status) = match call.target.effect {
        _ if !has_begun => {
            let question = call.target.executor.availability_question();
            let message = format!("no executor took {tool} within {took_ms} ms: {question}?");
            (Fault::new(Code::Timeout, message).without_side_effect(), Status::Timeout)
        }
        Effect::Irreversible => {
            let message = format!("{silent}; {MAY_HAVE_HAPPENED}");
            (Fault::new(Code::OutcomeUnknown, message), Status::Failed)
        }
        Effect::Idempotent | Effect::Read => {
            let message = format!("{silent}; calling again is safe");
            (Fault::new(Code::Timeout, message), Status::Timeout)
        }
    };
    let fault = fault.retryable(end_status == Status::Timeout);
    let mut step = retry_or_fail(next, vec![], &fault, now_ms, end_status);
    step.actions.insert(0, Action::Stop { attempt });
    Ok(step)
}

/// Describes the end of a call that no executor acknowledged.
fn describe_unacknowledged(call: &Call, allowed_ms: u64, refused_report: Option<&str>) -> String {
    let unsure = call.may_have_begun() && call.target.effect == Effect::Irreversible;
    let tool = &call.target.tool;
    if let Some(reason) = refused_report {
        let may = if unsure { format!("; {MAY_HAVE_HAPPENED}") } else { String::new() };
        return format!(
            "{tool} did not answer within {allowed_ms} ms: the report on it was refused: {reason}{may}"
        );
    }
    let question = call.target.executor.availability_question();
    // A client always acknowledges a call before it starts. A tool service need not: it may have
    // read the card in the database, or be about to report.
    let observed = match call.target.traits.needs_command {
        true => format!(
            "{tool} did not answer within {allowed_ms} ms, and no tool service announced that it \
             took the call"
        ),
        false => format!("no executor took {tool} within {allowed_ms} ms"),
    };
    let may = match unsure {
        true => format!("{IF_TAKEN} {MAY_HAVE_HAPPENED}"),
        // A client that has not begun to continue may have begun before it asked.
        false => effect_warning(call),
    };
    format!("{observed}: {question}?{may}")
}

/// Ends a call whose deadline has passed. `refused_report` says why the last report on it was
/// refused, if there was one.
pub(super) fn time_out(
    call: &Call,
    refused_report: Option<&str>,
    now_ms: u64,
) -> Result<Transition, Refusal> {
    let approval_ms = match call.hold {
        Some(Hold::Approval { expires_ms, .. }) => Some(expires_ms),
        _ => None,
    };
    let end_ms = call.deadline_ms.min(approval_ms.unwrap_or(u64::MAX));
    if call.status.is_terminal() || now_ms < end_ms {
        return Err(Refusal::NotApplicable);
    }
    if approval_ms.is_some() {
        return Ok(expire_approval(call, now_ms));
    }
    let allowed_ms = call.deadline_ms.saturating_sub(call.created_ms);
    let message = match (call.status, call.hold, call.target.effect) {
        (Status::Running, _, Effect::Read) => format!(
            "{} did not answer within {allowed_ms} ms; it only reads, so calling again is safe",
            call.target.tool
        ),
        (Status::Running, ..) => format!(
            "{} did not answer within {allowed_ms} ms{}",
            call.target.tool,
            effect_warning(call)
        ),
        (_, Some(Hold::Unacknowledged), _) => {
            describe_unacknowledged(call, allowed_ms, refused_report)
        }
        (_, Some(Hold::Input { .. }), _) => format!(
            "{} requested input and got no answer within {} ms; it does not continue{}",
            call.target.tool,
            call.input_timeout_ms,
            effect_warning(call)
        ),
        (_, Some(Hold::Retry { .. }), _) => {
            format!(
                "{} failed and its {allowed_ms} ms ended before the next attempt{}",
                call.target.tool,
                effect_warning(call)
            )
        }
        (_, Some(Hold::Predecessor { .. }), _) => {
            format!("the call before {} had not ended after {allowed_ms} ms", call.target.tool)
        }
        _ => format!(
            "no execution slot was free for {} within {allowed_ms} ms{}",
            call.target.tool,
            effect_warning(call)
        ),
    };
    let mut fault = Fault::new(Code::Timeout, message);
    match (call.status, call.target.effect) {
        (Status::Pending, _) if !call.may_have_acted() => {
            fault = fault.without_side_effect().retryable(true);
        }
        (_, Effect::Read) | (Status::Pending, Effect::Idempotent) => fault = fault.retryable(true),
        _ => {}
    }
    let mut actions = stop_actions(call);
    actions.push(Action::NotifyEnded);
    let end = end_call(call.clone(), Status::Timeout, (false, None, Some(fault)), now_ms);
    let record = end_record(&end, EventKind::Timeout, now_ms);
    Ok(into_transition(end, vec![record], actions))
}
