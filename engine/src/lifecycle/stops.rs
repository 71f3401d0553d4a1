//! Stops of a call that no executor decides: by its caller, by Toolcrib itself, by the access
//! rules, by a kill switch. Pure.

use super::{
    Action, HAD_BEGUN, IN_FLIGHT, MAY_HAVE_HAPPENED, Refusal, Transition, end_call, end_record,
    ignored_record, into_transition, stop_actions,
};
use crate::domain::call::{Call, Status};
use crate::domain::event::EventKind;
use crate::domain::fault::{Code, Fault, SideEffect};
use crate::domain::tool::Effect;

/// Warning of a call whose present attempt has not begun.
const ACTED_EARLIER: &str = "an earlier attempt may have taken effect";

/// Ends a call that Toolcrib itself stops. The status is FAILED and not CANCELED, which is
/// for calls that their callers cancel: the first version of the API knows only SUCCEEDED, FAILED
/// and TIMEOUT, and its callers would wait for an end that never comes.
pub(super) fn abort(call: &Call, fault: &Fault, now_ms: u64) -> Result<Transition, Refusal> {
    if call.status.is_terminal() {
        return Err(Refusal::AlreadyEnded(ignored_record(call, now_ms, "stopped after the end")));
    }
    let mut actions = stop_actions(call);
    actions.push(Action::NotifyEnded);
    let end = end_call(call.clone(), Status::Failed, (false, None, Some(fault.clone())), now_ms);
    let record = end_record(&end, EventKind::Failed, now_ms).with("code", fault.code.as_str());
    Ok(into_transition(end, vec![record], actions))
}

/// Ends a call at its caller's request.
pub(super) fn cancel(
    call: &Call,
    by: &str,
    reason: Option<&str>,
    now_ms: u64,
) -> Result<Transition, Refusal> {
    if call.status == Status::Canceled {
        return Err(Refusal::Duplicate);
    }
    if call.status.is_terminal() {
        return Err(Refusal::AlreadyEnded(
            ignored_record(call, now_ms, "canceled after the end").with("by", by),
        ));
    }
    let because = reason.map(|reason| format!(": {reason}")).unwrap_or_default();
    let may = effect_warning(call);
    let fault = Fault::new(Code::Canceled, format!("canceled by {by}{because}{may}"));
    let mut actions = stop_actions(call);
    actions.push(Action::NotifyEnded);
    let end = end_call(call.clone(), Status::Canceled, (false, None, Some(fault)), now_ms);
    let mut record = end_record(&end, EventKind::Canceled, now_ms).with("by", by);
    if let Some(reason) = reason {
        record = record.with("reason", reason);
    }
    Ok(into_transition(end, vec![record], actions))
}

/// Returns the part of a message that says that an attempt may have taken effect; empty if none
/// can have.
pub(super) fn effect_warning(call: &Call) -> String {
    let effect = call.target.effect;
    let state = match call.has_attempt_in_flight() && call.may_have_begun() {
        _ if effect == Effect::Read => return String::new(),
        true => IN_FLIGHT,
        false if call.has_asked() => HAD_BEGUN,
        false if call.may_have_acted() => return format!("; {ACTED_EARLIER}"),
        false => return String::new(),
    };
    match effect {
        Effect::Irreversible => format!("; {state}: {MAY_HAVE_HAPPENED}"),
        _ => format!("; {state} and may have taken effect"),
    }
}

/// Ends a call that has become forbidden before it started to run. A running attempt finishes: the
/// call was allowed when it started. A tool that stopped to ask does not continue.
pub(super) fn deny(call: &Call, fault: &Fault, now_ms: u64) -> Result<Transition, Refusal> {
    if call.status != Status::Pending {
        return Err(Refusal::NotApplicable);
    }
    abort(call, &add_effect(call, fault), now_ms)
}

/// Adds to the reason of a stop that the call may have taken effect, if it may have. The outcome of
/// an irreversible attempt that may have begun is unknown.
pub(super) fn add_effect(call: &Call, fault: &Fault) -> Fault {
    let mut fault = fault.clone();
    if call.attempt > 0 {
        // An earlier attempt, or one that was delivered and not acknowledged, may have had effects.
        fault.side_effect = SideEffect::Possible;
    }
    let has_begun = call.may_have_begun() || call.has_asked();
    if has_begun && call.target.effect == Effect::Irreversible {
        fault.code = Code::OutcomeUnknown;
    }
    fault.message.push_str(&effect_warning(call));
    fault
}

/// Ends a call because of a kill switch, also while it runs: its attempt is stopped. The outcome of
/// an irreversible attempt that may have begun is unknown.
pub(super) fn switch_off(call: &Call, fault: &Fault, now_ms: u64) -> Result<Transition, Refusal> {
    if call.status.is_terminal() {
        return Err(Refusal::NotApplicable);
    }
    abort(call, &add_effect(call, fault), now_ms)
}
