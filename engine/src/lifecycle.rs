//! `step(call, event, now)`: the only place that decides a call's status.
//!
//! Pure: it takes the call, the event and the time, and returns the next call, the records to
//! append, and the actions to take after the commit. It refuses late, repeated and wrong-attempt
//! reports by rule. It never reads a clock, draws a number, logs or performs anything.
//!
//! ```text
//!   PENDING(queue) ── claim ──▶ RUNNING            (executed in this process)
//!        ▲   ▲        claim ──▶ PENDING(parked) ── acknowledged ──▶ RUNNING
//!        │   └── retry is due ── PENDING(retry) ◀── a retryable failure
//!        └ node lost before start                     RUNNING ── report ──▶ SUCCEEDED | FAILED
//!   RUNNING ── input required ──▶ PENDING(input) ── every question answered ──▶ PENDING(queue)
//!   an attempt in flight ── its time is over ──▶ PENDING(retry) | TIMEOUT | FAILED
//!   PENDING(after) ── its predecessor has ended ──▶ PENDING(queue)
//!   PENDING(queue) ── approval required ──▶ PENDING(approval)
//!   PENDING(approval) ── approved, or no longer required ──▶ PENDING(queue)
//!   PENDING(approval) ── approved with other arguments ──▶ PENDING(after), until the new call ends
//!   PENDING(approval) ── rejected, expired ──▶ FAILED
//!   PENDING ── the access rules deny it ──▶ FAILED
//!   any open state ── deadline ──▶ TIMEOUT      any open state ── cancel ──▶ CANCELED
//!   any open state ── abort by Toolcrib, kill switch ──▶ FAILED
//! ```

pub(crate) mod approvals;
mod elicitation;
mod stops;
pub(crate) mod time_limits;
use approvals::{
    ApprovalVerdict, decide_approval, end_replaced, end_undecided_approval, require_approval,
    waive_approval,
};
use elicitation::{provide_input, require_input};
use serde_json::{Map, Value};
use stops::{abort, cancel, deny, switch_off};
use time_limits::{
    attempt_deadline, extend_predecessor_wait, retries_left, time_out, time_out_attempt,
};

use crate::domain::call::approval::{Approval, ApprovalChange, ApprovalDecision};
use crate::domain::call::elicitation::ElicitationRequest;
use crate::domain::call::{Call, CallMetrics, FailedAttempt, Hold, Outcome, Status, Target};
use crate::domain::event::{EventKind, EventRecord};
use crate::domain::fault::{Code, Fault, SideEffect};
use crate::domain::json::Json;
use crate::domain::tool::{Effect, Executor};

/// Last part of the message of a fault after which an irreversible tool may have had its effect.
pub(crate) const MAY_HAVE_HAPPENED: &str = "it may have taken effect, so a retry is not safe";

/// Lead-ins of [`MAY_HAVE_HAPPENED`]: how far the attempt had come.
const IN_FLIGHT: &str = "it was in flight";
const HAD_BEGUN: &str = "it had begun when it requested input";
const NOT_RETRIED: &str = ", and it was not retried:";
const IF_TAKEN: &str = " If one got it,";

/// An input of the state machine.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// A slot is free: the next attempt starts on this node.
    Claim {
        /// Id of the process that starts the attempt.
        node: String,
    },
    /// A remote executor acknowledged the attempt. `instead_of` names the client that acknowledged
    /// it before, stayed away, and lost its lease to this one.
    Acknowledged {
        /// Number of the acknowledged attempt.
        attempt: u32,
        /// Id of the executor that acknowledged it.
        by: String,
        /// Client whose lease moved to `by`, if there is one.
        instead_of: Option<String>,
    },
    /// The result of an attempt. Without an attempt number it is about the one in flight.
    Report {
        /// Number of the reported attempt; `None` means the one in flight.
        attempt: Option<u32>,
        /// Id of the reporting executor, if it identifies itself.
        by: Option<String>,
        /// Result data of a success, or the fault of a failure.
        result: Result<Json, Fault>,
    },
    /// An attempt ended with questions.
    InputRequired {
        /// Number of the attempt that asks.
        attempt: u32,
        /// The questions, and the state that the next attempt continues from.
        questions: ElicitationRequest,
    },
    /// A caller or client answers some of the questions.
    InputProvided {
        /// Agent that answers.
        by: String,
        /// Answers by question key.
        answers: Map<String, Value>,
    },
    /// An attempt continues at the executor, which finds it by this handle.
    Detached {
        /// Number of the attempt that continues.
        attempt: u32,
        /// The executor's own id of the attempt.
        handle: String,
    },
    /// A tool service ended an attempt otherwise than with a plain success or failure.
    RemoteOutcome {
        /// Number of the reported attempt.
        attempt: u32,
        /// Id of the reporting tool service.
        by: String,
        /// Outcome to end the call with; no retry follows.
        outcome: RemoteOutcome,
    },
    /// The predecessor has ended.
    PredecessorEnded,
    /// The predecessor got more time, because it waits for input or for an approval.
    PredecessorExtended {
        /// Present deadline of the predecessor, in Unix milliseconds.
        deadline_ms: u64,
    },
    /// The rules demand a person's approval before the call starts.
    ApprovalRequired {
        /// The approval that is requested.
        approval: Box<Approval>,
        /// Present form of the target, if the tool has changed since the call was accepted.
        target: Option<Box<Target>>,
    },
    /// A person decided about the call.
    ApprovalDecided {
        /// Id of the approval.
        approval_id: String,
        /// Effect on the call.
        verdict: ApprovalVerdict,
        /// The decision to store.
        decision: Box<ApprovalDecision>,
    },
    /// The rules no longer demand the approval that the call waits for.
    ApprovalWaived {
        /// Id of the approval.
        approval_id: String,
    },
    /// The call that replaces this one has ended.
    ReplacementEnded {
        /// Status of that call.
        status: Status,
        /// Outcome of that call.
        outcome: Box<Outcome>,
    },
    /// The clock reached the call's deadline.
    Deadline,
    /// The clock reached the call's deadline, and a report on the call was refused.
    DeadlineAfterReport {
        /// The reason of the refusal.
        refusal: String,
    },
    /// The clock reached the end of the attempt's time.
    AttemptDeadline {
        /// Number of the attempt.
        attempt: u32,
        /// Time at which the executor received the attempt; `None` if none has received it.
        delivered_ms: Option<u64>,
    },
    /// A cancel request.
    Cancel {
        /// Name of the requester, as shown in the outcome.
        by: String,
        /// Reason of the requester, as shown in the outcome.
        reason: Option<String>,
    },
    /// Toolcrib ends the call, and no caller requested that: its UTP step was not dispatched, or
    /// its MCP client cannot answer the tool's questions.
    Abort {
        /// The reason, which becomes the error of the call.
        fault: Fault,
    },
    /// The call may no longer start: the access rules deny it, its key was revoked, or a changed
    /// schema rejects its arguments.
    PermissionRevoked {
        /// The reason, which becomes the error of the call.
        fault: Fault,
    },
    /// A kill switch covers the call.
    SwitchedOff {
        /// Fault that names the switch and its reason.
        fault: Fault,
    },
    /// The process that owned the call is gone.
    OwnerLost {
        /// Id of the process that takes over the call.
        node: String,
    },
}

/// Outcomes that only a tool service can report.
#[derive(Debug, Clone, PartialEq)]
pub enum RemoteOutcome {
    /// The tool succeeded in part.
    Partial(Json),
    /// The tool service's own timeout passed.
    TimedOut(Fault),
    /// The attempt was canceled at the tool service.
    Canceled(Fault),
}

/// An action to take after the commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Start the attempt in flight at its source.
    Start,
    /// Deliver the attempt in flight to its source again: it may have been delivered before.
    Redeliver,
    /// Tell the source to stop this attempt.
    Stop {
        /// Number of the attempt to stop.
        attempt: u32,
    },
    /// Queue the call for a free slot (now, or when its retry is due).
    Enqueue,
    /// Watch the predecessor and apply [`Event::PredecessorEnded`] when it has ended.
    AwaitPredecessor,
    /// The call ended.
    NotifyEnded,
}

/// The next state of a call, with its records and actions.
#[derive(Debug, Clone, PartialEq)]
pub struct Transition {
    /// The call in its next state, with its version increased by one.
    pub call: Call,
    /// Records to append to the call's history in the same commit.
    pub records: Vec<EventRecord>,
    /// Actions to take after the commit, in order.
    pub actions: Vec<Action>,
    /// Changes of the call's approvals, in the same commit.
    pub approval_changes: Vec<ApprovalChange>,
}

/// The reason why an event changes nothing.
#[derive(Debug, Clone, PartialEq)]
pub enum Refusal {
    /// The event repeats what is already recorded; it gets the same reply as the first.
    Duplicate,
    /// The call has already ended otherwise; recorded as an event.
    AlreadyEnded(EventRecord),
    /// The event is about an attempt that is not in flight; recorded as an event.
    WrongAttempt(EventRecord),
    /// The event is too early, or does not apply to this state.
    NotApplicable,
}

/// Decides the effect of an event on a call.
pub fn step(call: &Call, event: &Event, now_ms: u64) -> Result<Transition, Refusal> {
    let transition = decide(call, event, now_ms)?;
    Ok(end_undecided_approval(call, event, transition, now_ms))
}

fn decide(call: &Call, event: &Event, now_ms: u64) -> Result<Transition, Refusal> {
    match event {
        Event::Claim { node } => {
            check_claim(call, now_ms)?;
            Ok(claim(call.clone(), node, now_ms))
        }
        Event::Acknowledged { attempt, by, instead_of } => {
            acknowledge(call, *attempt, by, instead_of.as_deref(), now_ms)
        }
        Event::Report { attempt, by, result } => {
            check_report(call, *attempt, by.as_deref(), result, now_ms)?;
            Ok(apply_report(call.clone(), by.as_deref(), result, now_ms))
        }
        Event::InputRequired { attempt, questions } => {
            require_input(call, *attempt, questions, now_ms)
        }
        Event::InputProvided { by, answers } => provide_input(call, by, answers, now_ms),
        Event::Detached { attempt, handle } => detach(call, *attempt, handle, now_ms),
        Event::RemoteOutcome { attempt, by, outcome } => {
            apply_remote_outcome(call, *attempt, by, outcome, now_ms)
        }
        Event::PredecessorEnded => start_after_predecessor(call, now_ms),
        Event::PredecessorExtended { deadline_ms } => extend_predecessor_wait(call, *deadline_ms),
        Event::ApprovalRequired { approval, target } => {
            require_approval(call, approval, target.as_deref(), now_ms)
        }
        Event::ApprovalDecided { approval_id, verdict, decision } => {
            decide_approval(call, approval_id, *verdict, decision, now_ms)
        }
        Event::ApprovalWaived { approval_id } => waive_approval(call, approval_id, now_ms),
        Event::ReplacementEnded { status, outcome } => end_replaced(call, *status, outcome, now_ms),
        Event::Deadline => time_out(call, None, now_ms),
        Event::DeadlineAfterReport { refusal } => time_out(call, Some(refusal), now_ms),
        Event::AttemptDeadline { attempt, delivered_ms } => {
            time_out_attempt(call, *attempt, *delivered_ms, now_ms)
        }
        Event::Cancel { by, reason } => cancel(call, by, reason.as_deref(), now_ms),
        Event::Abort { fault } => abort(call, fault, now_ms),
        Event::PermissionRevoked { fault } => deny(call, fault, now_ms),
        Event::SwitchedOff { fault } => switch_off(call, fault, now_ms),
        Event::OwnerLost { node } => recover_from_owner_loss(call, node, now_ms),
    }
}

/// Like [`step`], for the only owner of the call: moves the call into the transition where it can,
/// instead of cloning it. A refusal returns the call.
pub fn step_owned(
    call: Call,
    event: &Event,
    now_ms: u64,
) -> Result<Transition, Box<(Call, Refusal)>> {
    let refusal = match event {
        Event::Claim { node } => match check_claim(&call, now_ms) {
            Ok(()) => return Ok(claim(call, node, now_ms)),
            Err(refusal) => refusal,
        },
        Event::Report { attempt, by, result } => {
            match check_report(&call, *attempt, by.as_deref(), result, now_ms) {
                Ok(()) => return Ok(apply_report(call, by.as_deref(), result, now_ms)),
                Err(refusal) => refusal,
            }
        }
        _ => match step(&call, event, now_ms) {
            Ok(step) => return Ok(step),
            Err(refusal) => refusal,
        },
    };
    Err(Box::new((call, refusal)))
}

/// Checks that the call is due for an attempt.
fn check_claim(call: &Call, now_ms: u64) -> Result<(), Refusal> {
    let due = match (call.status, call.hold) {
        (Status::Pending, Some(Hold::Queue)) => true,
        (Status::Pending, Some(Hold::Retry { at_ms })) => at_ms <= now_ms,
        _ => false,
    };
    if !due || now_ms >= call.deadline_ms {
        return Err(Refusal::NotApplicable);
    }
    Ok(())
}

/// Gives the next attempt to its executor.
fn claim(mut next: Call, node: &str, now_ms: u64) -> Transition {
    next.attempt += 1;
    next.target_attempts += 1;
    next.attempt_dispatched_ms = Some(now_ms);
    next.node = Some(node.to_owned());
    next.acknowledged_by = None;
    if let Some(approval) = &mut next.approval {
        approval.is_used = true;
    }
    if let Some(elicitation) = &mut next.elicitation {
        elicitation.handle = None;
    }
    if next.target.traits.needs_acknowledgement {
        next.hold = Some(Hold::Unacknowledged);
        next.attempt_deadline_ms = attempt_deadline(&next, now_ms);
        return into_transition(next, vec![], vec![Action::Start]);
    }
    let record = begin_attempt(&mut next, now_ms);
    into_transition(next, vec![record], vec![Action::Start])
}

/// Starts the attempt that an executor acknowledged, or moves it to another client.
fn acknowledge(
    call: &Call,
    attempt: u32,
    by: &str,
    instead_of: Option<&str>,
    now_ms: u64,
) -> Result<Transition, Refusal> {
    if call.status.is_terminal() {
        return Err(Refusal::AlreadyEnded(
            ignored_record(call, now_ms, "acknowledged after the end").with("by", by),
        ));
    }
    let is_same = call.status == Status::Running
        && call.attempt == attempt
        && call.acknowledged_by.as_deref() == Some(by);
    if is_same {
        return Err(Refusal::Duplicate);
    }
    let acknowledged = call.target.traits.reports_later && call.status == Status::Running;
    if (call.hold != Some(Hold::Unacknowledged) && !acknowledged) || call.attempt != attempt {
        let reason = "acknowledged, but this attempt is not in flight";
        return Err(Refusal::WrongAttempt(ignored_record(call, now_ms, reason).with("by", by)));
    }
    // Another client may acknowledge the attempt only after the lease moved to it, which happens
    // only for tools that are safe to repeat.
    let holder = call.acknowledged_by.as_deref().filter(|_| acknowledged);
    let lease_moved = instead_of == holder && call.target.effect != Effect::Irreversible;
    if holder.is_some() && !lease_moved {
        let reason = "acknowledged, but another executor acknowledged it before";
        return Err(Refusal::WrongAttempt(ignored_record(call, now_ms, reason).with("by", by)));
    }
    let mut next = call.clone();
    next.acknowledged_by = Some(by.to_owned());
    let mut records =
        vec![EventRecord::new(EventKind::Acknowledged, now_ms, attempt).with("by", by)];
    if !acknowledged {
        records.insert(0, begin_attempt(&mut next, now_ms));
    } else {
        // The client that takes over gets the whole time of an attempt.
        next.attempt_deadline_ms = attempt_deadline(&next, now_ms);
    }
    Ok(into_transition(next, records, vec![]))
}

/// Checks that a report is about the attempt in flight.
fn check_report(
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
        let reason = format!("reported after the call was {}", call.status.as_str());
        return Err(Refusal::AlreadyEnded(with_report(
            ignored_record(call, now_ms, &reason),
            by,
            result,
        )));
    }
    let this_one = attempt.is_none_or(|attempt| attempt == call.attempt);
    if !call.has_attempt_in_flight() || !this_one {
        let reason = "reported for an attempt that is not in flight";
        return Err(Refusal::WrongAttempt(with_report(
            ignored_record(call, now_ms, reason),
            by,
            result,
        )));
    }
    Ok(())
}

/// Applies the result of the attempt in flight.
fn apply_report(
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
        Err(fault) => retry_or_fail(next, records, fault, now_ms, Status::Failed),
    }
}

/// Handles a failed attempt: retries, falls back, or ends the call with this status.
fn retry_or_fail(
    mut next: Call,
    mut records: Vec<EventRecord>,
    fault: &Fault,
    now_ms: u64,
    end_status: Status,
) -> Transition {
    let harmless = fault.side_effect == SideEffect::None;
    let is_read = next.target.effect == Effect::Read;
    let has_not_acted = (harmless || is_read) && !next.may_have_acted_before();
    let may_repeat = harmless || next.target.effect != Effect::Irreversible;
    let backoff_ms = next.backoff.wait_ms(next.target_attempts, next.id.as_str());
    // Do not retry before the delay that the executor requested.
    let wait_ms = backoff_ms.max(fault.retry_after_ms().unwrap_or(0));
    let at_ms = now_ms.saturating_add(wait_ms);
    let tries_left = retries_left(&next) > 0;
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
        schedule_next_attempt(&mut next, fault, has_not_acted, at_ms);
        return into_transition(next, records, vec![Action::Enqueue]);
    }
    if has_not_acted && !next.fallbacks.is_empty() && now_ms < next.deadline_ms {
        let fallback = next.fallbacks.remove(0);
        records.push(
            failed(EventKind::Fallback, &next)
                .with("from", next.target.tool.as_str())
                .with("to", fallback.tool.as_str())
                .with("args_bytes", fallback.args.text().len()),
        );
        next.target = fallback;
        next.target_attempts = 0;
        // The answers are for the tool that asked.
        next.elicitation = None;
        schedule_next_attempt(&mut next, fault, has_not_acted, now_ms);
        return into_transition(next, records, vec![Action::Enqueue]);
    }
    let final_fault = warn_of_side_effect(&next, fault.clone());
    let end = end_call(next, end_status, (false, None, Some(final_fault)), now_ms);
    let kind = match end_status {
        Status::Timeout => EventKind::Timeout,
        _ => EventKind::Failed,
    };
    records.push(end_record(&end, kind, now_ms).with("code", fault.code.as_str()));
    into_transition(end, records, vec![Action::NotifyEnded])
}

/// Returns the final fault of a call. If an irreversible tool may have had its effect, the fault
/// says so, and it is not retryable: the same request could have the effect twice.
fn warn_of_side_effect(call: &Call, mut fault: Fault) -> Fault {
    if call.may_have_acted_before() {
        fault.side_effect = SideEffect::Possible;
    }
    let is_harmless = fault.side_effect == SideEffect::None;
    if is_harmless || call.target.effect != Effect::Irreversible {
        return fault;
    }
    let message = match fault.code {
        // The message of this code already contains the warning, and a caller that executes its own
        // calls needs none.
        Code::OutcomeUnknown => fault.message,
        _ if call.target.executor == Executor::CALLER => fault.message,
        _ => format!("{}; {MAY_HAVE_HAPPENED}", fault.message),
    };
    Fault { message, retryable: false, ..fault }
}

/// Returns a message without the warning that the call may have taken effect, and true if it had
/// one. A message that becomes part of another one loses it: the outer call has its own.
pub(crate) fn split_warning(message: &str) -> (&str, bool) {
    let mut rest = message;
    while let Some(before) = rest.strip_suffix(MAY_HAVE_HAPPENED) {
        rest = before.trim_end();
        // The lead-in belongs to the warning.
        if let Some(state) = rest.strip_suffix(':') {
            let lead = [IN_FLIGHT, HAD_BEGUN].iter().find_map(|lead| state.strip_suffix(lead));
            rest = lead.unwrap_or(rest).trim_end();
        }
        for lead in [NOT_RETRIED, IF_TAKEN, ";"] {
            rest = rest.strip_suffix(lead).unwrap_or(rest).trim_end();
        }
    }
    (rest, rest.len() < message.len())
}

fn schedule_next_attempt(next: &mut Call, fault: &Fault, is_harmless: bool, at_ms: u64) {
    let failed = FailedAttempt { is_harmless, ..FailedAttempt::new(next.attempt, fault) };
    next.failed_attempt = Some(Box::new(failed));
    next.status = Status::Pending;
    next.hold = Some(Hold::Retry { at_ms });
    next.acknowledged_by = None;
    next.attempt_deadline_ms = None;
}

/// Returns true if a report repeats the failure that led to another attempt. A report without an
/// attempt number refers to the failed attempt only while no other is in flight.
fn repeats_failed_attempt(call: &Call, attempt: Option<u32>, result: &Result<Json, Fault>) -> bool {
    let (Some(failed), Err(fault)) = (&call.failed_attempt, result) else { return false };
    let named = attempt.or((!call.has_attempt_in_flight()).then_some(failed.attempt));
    let has_ended = failed.attempt < call.attempt || !call.has_attempt_in_flight();
    has_ended && named.is_some_and(|attempt| failed.matches_report(attempt, fault))
}

/// Returns true if the fault of an ended call has the message of this reported fault. Earlier
/// versions stored the message as reported.
pub(crate) fn is_final_message(call: &Call, stored: &Fault, reported: &Fault) -> bool {
    stored.message == reported.message
        || stored.message == warn_of_side_effect(call, reported.clone()).message
}

/// Returns true if a report matches the call's outcome.
fn matches_outcome(call: &Call, result: &Result<Json, Fault>) -> bool {
    let Some(outcome) = &call.outcome else { return false };
    match (call.status, result) {
        (Status::Succeeded, Ok(data)) => outcome.data.as_ref() == Some(data),
        (Status::Failed, Err(fault)) => outcome
            .error
            .as_ref()
            .is_some_and(|error| error.code == fault.code && is_final_message(call, error, fault)),
        _ => false,
    }
}

fn with_report(record: EventRecord, by: Option<&str>, result: &Result<Json, Fault>) -> EventRecord {
    let record = by.into_iter().fold(record, |record, by| record.with("by", by));
    match result {
        Ok(data) => record.with("reported", "SUCCEEDED").with("result_bytes", data.text().len()),
        Err(fault) => record.with("reported", "FAILED").with("code", fault.code.as_str()),
    }
}

/// Ends the call with a remote outcome. It is final under every policy: no retry follows.
fn apply_remote_outcome(
    call: &Call,
    attempt: u32,
    by: &str,
    reported: &RemoteOutcome,
    now_ms: u64,
) -> Result<Transition, Refusal> {
    let (status, kind, outcome) = match reported {
        RemoteOutcome::Partial(data) => {
            (Status::Succeeded, EventKind::Finished, (true, Some(data.clone()), None))
        }
        RemoteOutcome::TimedOut(fault) => {
            let fault = warn_of_side_effect(call, fault.clone());
            (Status::Timeout, EventKind::Timeout, (false, None, Some(fault)))
        }
        // No caller canceled it, so the call has failed.
        RemoteOutcome::Canceled(fault) => {
            let fault = warn_of_side_effect(call, fault.clone());
            (Status::Failed, EventKind::Failed, (false, None, Some(fault)))
        }
    };
    let partial = status == Status::Succeeded;
    if call.status.is_terminal() {
        let stored = call.outcome.as_ref();
        let is_same = stored.is_some_and(|stored| {
            stored.partial == partial && stored.data == outcome.1 && stored.error == outcome.2
        });
        // Calls that a tool service canceled were once stored as CANCELED.
        let was_canceled =
            matches!(reported, RemoteOutcome::Canceled(_)) && call.status == Status::Canceled;
        if is_same && (call.status == status || was_canceled) {
            return Err(Refusal::Duplicate);
        }
        let reason = format!("reported after the call was {}", call.status.as_str());
        let late =
            ignored_record(call, now_ms, &reason).with("by", by).with("reported", status.as_str());
        return Err(Refusal::AlreadyEnded(late));
    }
    if !call.has_attempt_in_flight() || attempt != call.attempt {
        let late = ignored_record(call, now_ms, "reported for an attempt that is not in flight")
            .with("by", by);
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
fn detach(call: &Call, attempt: u32, handle: &str, now_ms: u64) -> Result<Transition, Refusal> {
    if call.status.is_terminal() {
        return Err(Refusal::AlreadyEnded(ignored_record(call, now_ms, "detached after the end")));
    }
    if !call.has_attempt_in_flight() || call.attempt != attempt {
        let reason = "detached by an attempt that is not in flight";
        return Err(Refusal::WrongAttempt(ignored_record(call, now_ms, reason)));
    }
    let current = call.elicitation.as_ref().and_then(|elicitation| elicitation.handle.as_deref());
    if current == Some(handle) {
        return Err(Refusal::Duplicate);
    }
    let mut next = call.clone();
    next.elicitation.get_or_insert_default().handle = Some(handle.to_owned());
    let record = EventRecord::new(EventKind::Acknowledged, now_ms, attempt).with("task", handle);
    Ok(into_transition(next, vec![record], vec![]))
}

/// Queues a call whose predecessor has ended; its timeout starts now.
fn start_after_predecessor(call: &Call, now_ms: u64) -> Result<Transition, Refusal> {
    // A replaced call is never executed: it takes over the outcome of its replacement.
    let is_replaced = call.replaced_by().is_some();
    let Some(Hold::Predecessor { timeout_ms }) = call.hold.filter(|_| !is_replaced) else {
        return Err(Refusal::NotApplicable);
    };
    let mut next = call.clone();
    next.hold = Some(Hold::Queue);
    next.deadline_ms = call.deadline_ms.min(now_ms.saturating_add(timeout_ms));
    Ok(into_transition(next, vec![], vec![Action::Enqueue]))
}

/// Number of lost attempts after which a call is not tried again: it may be what ends the process.
const MAX_LOST_ATTEMPTS: u32 = 3;

/// Recovers a call whose owner process is gone. An attempt that survives the process is delivered
/// again; one that ran inside it is retried only if the tool is safe to repeat.
fn recover_from_owner_loss(call: &Call, node: &str, now_ms: u64) -> Result<Transition, Refusal> {
    if call.status.is_terminal() {
        return Err(Refusal::NotApplicable);
    }
    let mut next = call.clone();
    next.node = Some(node.to_owned());
    let recovered = EventRecord::new(EventKind::Recovered, now_ms, call.attempt);
    if !call.has_attempt_in_flight() {
        // A call that waits for a person keeps waiting; a call that waits for a slot is queued.
        let actions = match call.hold {
            Some(Hold::Input { .. } | Hold::Approval { .. }) => vec![],
            Some(Hold::Predecessor { .. }) => vec![Action::AwaitPredecessor],
            Some(Hold::Queue | Hold::Retry { .. } | Hold::Unacknowledged) | None => {
                vec![Action::Enqueue]
            }
        };
        return Ok(into_transition(next, vec![recovered], actions));
    }
    if call.survives_node_loss() {
        // The executor could not report while the server was stopped.
        next.attempt_deadline_ms = attempt_deadline(&next, now_ms);
        return Ok(into_transition(next, vec![recovered], vec![Action::Redeliver]));
    }
    next.lost_attempts += 1;
    let may_repeat = next.target.effect != Effect::Irreversible;
    let retryable = may_repeat && next.lost_attempts < MAX_LOST_ATTEMPTS;
    let (tool, attempt) = (&call.target.tool, call.attempt);
    let then = match (may_repeat, retryable) {
        (false, _) => format!("{NOT_RETRIED} {MAY_HAVE_HAPPENED}"),
        (true, true) => format!(" in attempt {attempt}: it may have taken effect"),
        (true, false) => format!(
            " in attempt {attempt}, as in {} attempts before: it may have taken effect, and is not \
             retried, because it may be the cause of the stop",
            next.lost_attempts - 1
        ),
    };
    let message = format!("the server stopped while {tool} was in flight{then}");
    let fault = Fault::new(Code::OutcomeUnknown, message);
    // A crash is not the tool's failure, but it costs an attempt: a call that brings the process
    // down each time must end, and after few crashes, whatever its number of retries is.
    let fault = fault.retryable(retryable);
    Ok(retry_or_fail(next, vec![recovered], &fault, now_ms, Status::Failed))
}

/// Marks the attempt as running.
fn begin_attempt(next: &mut Call, now_ms: u64) -> EventRecord {
    next.status = Status::Running;
    next.hold = None;
    next.attempt_deadline_ms = attempt_deadline(next, now_ms);
    next.started_ms.get_or_insert(now_ms);
    EventRecord::new(EventKind::Started, now_ms, next.attempt)
        .with("tool", next.target.tool.as_str())
}

type OutcomeParts = (bool, Option<Json>, Option<Fault>);

fn end_call(mut call: Call, status: Status, (ok, data, error): OutcomeParts, now_ms: u64) -> Call {
    let completed_ms = now_ms.max(call.created_ms);
    let metrics =
        CallMetrics::from_timestamps(call.created_ms, call.started_ms, completed_ms, call.attempt);
    call.status = status;
    call.hold = None;
    call.attempt_deadline_ms = None;
    call.completed_ms = Some(completed_ms);
    call.outcome = Some(Outcome { ok, partial: false, data, error, metrics });
    call
}

fn end_record(end: &Call, kind: EventKind, now_ms: u64) -> EventRecord {
    let metrics = end.outcome.as_ref().map(|outcome| outcome.metrics).unwrap_or_default();
    EventRecord::new(kind, now_ms, end.attempt)
        .with("latency_ms", metrics.latency_ms)
        .with("queue_ms", metrics.queue_ms)
        .with("tool", end.target.tool.as_str())
        .with_task_ids(end)
}

fn stop_actions(call: &Call) -> Vec<Action> {
    if call.has_attempt_in_flight() { vec![Action::Stop { attempt: call.attempt }] } else { vec![] }
}

fn into_transition(mut call: Call, records: Vec<EventRecord>, actions: Vec<Action>) -> Transition {
    call.version += 1;
    Transition { call, records, actions, approval_changes: Vec::new() }
}

fn ignored_record(call: &Call, now_ms: u64, reason: &str) -> EventRecord {
    EventRecord::new(EventKind::ReportIgnored, now_ms, call.attempt).with("why", reason)
}

#[cfg(test)]
mod tests;
