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
//!   PENDING(after) ── its predecessor has ended ──▶ PENDING(queue)
//!   any open state ── deadline ──▶ TIMEOUT      any open state ── cancel ──▶ CANCELED
//! ```

mod after;
mod elsewhere;
mod reported;
mod said;

use serde_json::{Map, Value};

use crate::domain::call::{Call, CallMetrics, Hold, Outcome, Status};
use crate::domain::elicitation::{Elicitation, ElicitationRequest};
use crate::domain::event::{EventKind, EventRecord};
use crate::domain::fault::{Code, Fault};
use crate::domain::json::Json;
use crate::domain::tool::{Effect, Executor};
use after::start_after_predecessor;
use elsewhere::{apply_remote_outcome, detach};
use reported::{apply_report, check_report, retry_or_fail};

/// An input of the state machine.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// A slot is free: the next attempt starts on this node.
    Claim { node: String },
    /// A remote executor acknowledged the attempt. `instead_of` names the client that acknowledged
    /// it before, stayed away, and lost its lease to this one.
    Acknowledged { attempt: u32, by: String, instead_of: Option<String> },
    /// The result of an attempt. Without an attempt number it is about the one in flight.
    Report { attempt: Option<u32>, by: Option<String>, result: Result<Json, Fault> },
    /// An attempt ended with questions.
    InputRequired { attempt: u32, questions: ElicitationRequest },
    /// A caller or client answers some of the questions.
    InputProvided { by: String, answers: Map<String, Value> },
    /// An attempt continues at the executor, which finds it by this handle.
    Detached { attempt: u32, handle: String },
    /// A tool service ended an attempt otherwise than with a plain success or failure.
    RemoteOutcome { attempt: u32, by: String, told: RemoteOutcome },
    /// The predecessor has ended.
    PredecessorEnded,
    /// The clock reached the call's deadline.
    Deadline,
    /// A cancel request.
    Cancel { by: String, reason: Option<String> },
    /// The process that owned the call is gone.
    OwnerLost { node: String },
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
    Stop { attempt: u32 },
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
    pub call: Call,
    pub records: Vec<EventRecord>,
    pub actions: Vec<Action>,
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
        Event::RemoteOutcome { attempt, by, told: how } => {
            apply_remote_outcome(call, *attempt, by, how, now_ms)
        }
        Event::PredecessorEnded => start_after_predecessor(call, now_ms),
        Event::Deadline => time_out(call, now_ms),
        Event::Cancel { by, reason } => cancel(call, by, reason.as_deref(), now_ms),
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

fn claim(mut next: Call, node: &str, now_ms: u64) -> Transition {
    next.attempt += 1;
    next.target_attempts += 1;
    next.attempt_dispatched_ms = Some(now_ms);
    next.node = Some(node.to_owned());
    next.acknowledged_by = None;
    if let Some(dialogue) = &mut next.elicitation {
        dialogue.handle = None;
    }
    // The caller executes its own calls: the attempt needs no acknowledgement.
    if next.target.executor.reports_later() && next.target.executor != Executor::Caller {
        next.hold = Some(Hold::Unacknowledged);
        return into_transition(next, vec![], vec![Action::Start]);
    }
    let record = begin_attempt(&mut next, now_ms);
    into_transition(next, vec![record], vec![Action::Start])
}

fn acknowledge(
    call: &Call,
    attempt: u32,
    by: &str,
    instead_of: Option<&str>,
    now_ms: u64,
) -> Result<Transition, Refusal> {
    if call.status.is_terminal() {
        return Err(Refusal::AlreadyEnded(
            ignored_record(call, now_ms, "taken after the end").with("by", by),
        ));
    }
    let same = call.status == Status::Running
        && call.attempt == attempt
        && call.acknowledged_by.as_deref() == Some(by);
    if same {
        return Err(Refusal::Duplicate);
    }
    let handed_over = call.target.executor.reports_later() && call.status == Status::Running;
    if (call.hold != Some(Hold::Unacknowledged) && !handed_over) || call.attempt != attempt {
        let why = "taken, but this attempt is not out";
        return Err(Refusal::WrongAttempt(ignored_record(call, now_ms, why).with("by", by)));
    }
    // Another client may acknowledge the attempt only after the lease moved to it, which happens
    // only for tools that are safe to repeat.
    let holder = call.acknowledged_by.as_deref().filter(|_| handed_over);
    let given_on = instead_of == holder && call.target.effect != Effect::Irreversible;
    if holder.is_some() && !given_on {
        let why = "taken, but another has taken it before";
        return Err(Refusal::WrongAttempt(ignored_record(call, now_ms, why).with("by", by)));
    }
    let mut next = call.clone();
    next.acknowledged_by = Some(by.to_owned());
    let mut records =
        vec![EventRecord::new(EventKind::Acknowledged, now_ms, attempt).with("by", by)];
    if !handed_over {
        records.insert(0, begin_attempt(&mut next, now_ms));
    }
    Ok(into_transition(next, records, vec![]))
}

/// Ends an attempt with questions: the call waits for answers with no attempt in flight.
fn require_input(
    call: &Call,
    attempt: u32,
    questions: &ElicitationRequest,
    now_ms: u64,
) -> Result<Transition, Refusal> {
    if call.status.is_terminal() {
        return Err(Refusal::AlreadyEnded(ignored_record(call, now_ms, "asked after the end")));
    }
    if !call.has_attempt_in_flight() || call.attempt != attempt {
        let why = "asked by an attempt that is not out";
        return Err(Refusal::WrongAttempt(ignored_record(call, now_ms, why)));
    }
    let mut next = call.clone();
    next.status = Status::Pending;
    next.hold = Some(Hold::Input);
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
fn provide_input(
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
    if call.hold != Some(Hold::Input) {
        return Err(Refusal::NotApplicable);
    }
    let mut next = call.clone();
    let dialogue = next.elicitation.get_or_insert_default();
    let keys = dialogue.accept_answers(answers);
    if keys.is_empty() {
        return Err(Refusal::Duplicate);
    }
    let record = EventRecord::new(EventKind::InputProvided, now_ms, call.attempt).with("by", by);
    let record = record.with("questions", keys);
    let mut actions = Vec::new();
    if dialogue.unanswered.is_empty() {
        next.hold = Some(Hold::Queue);
        actions.push(Action::Enqueue);
    }
    Ok(into_transition(next, vec![record], actions))
}

fn time_out(call: &Call, now_ms: u64) -> Result<Transition, Refusal> {
    if call.status.is_terminal() || now_ms < call.deadline_ms {
        return Err(Refusal::NotApplicable);
    }
    let allowed_ms = call.deadline_ms.saturating_sub(call.created_ms);
    let message = match (call.status, call.hold, call.target.effect) {
        (Status::Running, _, Effect::Read) => format!(
            "{} did not answer within {allowed_ms} ms; it only reads, so calling again is safe",
            call.target.tool
        ),
        (Status::Running, _, _) => format!(
            "{} did not answer within {allowed_ms} ms; it was under way and may have taken effect",
            call.target.tool
        ),
        (_, Some(Hold::Unacknowledged), _) => {
            let who = match call.target.executor {
                Executor::Utp => "is its tool service running, and NATS there",
                _ => "is the client that offers it connected",
            };
            format!("nobody took {} within {allowed_ms} ms: {who}?", call.target.tool)
        }
        (_, Some(Hold::Input), _) => {
            format!("{} asked something and had no answer for {allowed_ms} ms", call.target.tool)
        }
        (_, Some(Hold::Retry { .. }), _) => {
            format!("{} failed and its {allowed_ms} ms ended before the next try", call.target.tool)
        }
        (_, Some(Hold::Predecessor { .. }), _) => {
            format!("the call before {} had not ended after {allowed_ms} ms", call.target.tool)
        }
        _ => format!("no place was free for {} within {allowed_ms} ms", call.target.tool),
    };
    let mut fault = Fault::new(Code::Timeout, message);
    if call.status != Status::Running {
        fault = fault.without_side_effect().retryable(true);
    } else if call.target.effect == Effect::Read {
        fault = fault.retryable(true);
    }
    let mut actions = stop_actions(call);
    actions.push(Action::NotifyEnded);
    let end = end_call(call.clone(), Status::Timeout, (false, None, Some(fault)), now_ms);
    let record = end_record(&end, EventKind::Timeout, now_ms);
    Ok(into_transition(end, vec![record], actions))
}

fn cancel(call: &Call, by: &str, reason: Option<&str>, now_ms: u64) -> Result<Transition, Refusal> {
    if call.status == Status::Canceled {
        return Err(Refusal::Duplicate);
    }
    if call.status.is_terminal() {
        return Err(Refusal::AlreadyEnded(
            ignored_record(call, now_ms, "canceled after the end").with("by", by),
        ));
    }
    let under_way = call.status == Status::Running && call.target.effect != Effect::Read;
    let because = reason.map(|reason| format!(": {reason}")).unwrap_or_default();
    let may = if under_way { "; it was under way and may have taken effect" } else { "" };
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
        // A call that waits for input keeps waiting; a call that waits for a slot is queued.
        let actions = match call.hold {
            Some(Hold::Input) => vec![],
            Some(Hold::Predecessor { .. }) => vec![Action::AwaitPredecessor],
            _ => vec![Action::Enqueue],
        };
        return Ok(into_transition(next, vec![recovered], actions));
    }
    if call.survives_node_loss() {
        return Ok(into_transition(next, vec![recovered], vec![Action::Redeliver]));
    }
    let retryable = next.target.effect != Effect::Irreversible;
    let (tool, attempt) = (&call.target.tool, call.attempt);
    let then = match retryable {
        true => format!(" in attempt {attempt}: it may have happened"),
        false => ": it may have happened, and it was not tried again".to_owned(),
    };
    let message = format!("the server stopped while {tool} was under way{then}");
    let fault = Fault::new(Code::OutcomeUnknown, message);
    // A crash is not the tool's failure, but it costs an attempt: a call that brings the process
    // down each time must end.
    Ok(retry_or_fail(next, vec![recovered], &fault.retryable(retryable), now_ms))
}

/// Marks the attempt as running.
fn begin_attempt(next: &mut Call, now_ms: u64) -> EventRecord {
    next.status = Status::Running;
    next.hold = None;
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
    Transition { call, records, actions }
}

fn ignored_record(call: &Call, now_ms: u64, why: &str) -> EventRecord {
    EventRecord::new(EventKind::ReportIgnored, now_ms, call.attempt).with("why", why)
}

fn with_report(record: EventRecord, by: Option<&str>, result: &Result<Json, Fault>) -> EventRecord {
    let record = by.into_iter().fold(record, |record, by| record.with("by", by));
    match result {
        Ok(data) => record.with("reported", "SUCCEEDED").with("result_bytes", data.text().len()),
        Err(fault) => record.with("reported", "FAILED").with("code", fault.code.as_str()),
    }
}

#[cfg(test)]
mod tests;
