//! Transitions of calls whose tool asks for input. Pure.

use serde_json::{Map, Value};

use super::{Action, Refusal, Transition, ignored_record, into_transition};
use crate::domain::call::elicitation::{Elicitation, ElicitationRequest};
use crate::domain::call::{Call, Hold, Status};
use crate::domain::event::{EventKind, EventRecord};

/// Ends an attempt with questions: the call waits for answers with no attempt in flight.
pub(super) fn require_input(
    call: &Call,
    attempt: u32,
    questions: &ElicitationRequest,
    now_ms: u64,
) -> Result<Transition, Refusal> {
    if call.status.is_terminal() {
        return Err(Refusal::AlreadyEnded(ignored_record(call, now_ms, "asked after the end")));
    }
    if !call.has_attempt_in_flight() || call.attempt != attempt {
        let reason = "asked by an attempt that is not out";
        return Err(Refusal::WrongAttempt(ignored_record(call, now_ms, reason)));
    }
    let mut next = call.clone();
    next.status = Status::Pending;
    // The time in which a person answers does not count against the deadline: the clock of the call
    // stops here and continues with the last answer.
    let remaining_ms = call.deadline_ms.saturating_sub(now_ms);
    next.hold = Some(Hold::Input { remaining_ms });
    next.deadline_ms = now_ms.saturating_add(call.input_timeout_ms);
    next.attempt_deadline_ms = None;
    next.acknowledged_by = None;
    // An elicitation is not a failure: it costs no retry.
    next.target_attempts = next.target_attempts.saturating_sub(1);
    next.elicitation = Some(Box::new(Elicitation::from_request(questions)));
    let keys: Vec<&str> = questions.questions.keys().map(String::as_str).collect();
    let record =
        EventRecord::new(EventKind::InputRequired, now_ms, attempt).with("questions", keys);
    Ok(into_transition(next, vec![record], vec![]))
}

/// Accepts answers. The last answer queues the call.
pub(super) fn provide_input(
    call: &Call,
    by: &str,
    answers: &Map<String, Value>,
    now_ms: u64,
) -> Result<Transition, Refusal> {
    if call.status.is_terminal() {
        return Err(Refusal::AlreadyEnded(
            ignored_record(call, now_ms, "answered after the end").with("by", by),
        ));
    }
    let Some(Hold::Input { remaining_ms }) = call.hold else {
        return Err(Refusal::NotApplicable);
    };
    let mut next = call.clone();
    let elicitation = next.elicitation.get_or_insert_default();
    let keys = elicitation.accept_answers(answers);
    if keys.is_empty() {
        return Err(Refusal::Duplicate);
    }
    let record = EventRecord::new(EventKind::InputProvided, now_ms, call.attempt).with("by", by);
    let record = record.with("questions", keys);
    let mut actions = Vec::new();
    if elicitation.unanswered.is_empty() {
        next.hold = Some(Hold::Queue);
        next.deadline_ms = now_ms.saturating_add(remaining_ms);
        actions.push(Action::Enqueue);
    }
    Ok(into_transition(next, vec![record], actions))
}
