//! Transitions of calls that wait for a person's approval. Pure.

use serde_json::json;

use super::stops::add_effect;
use super::{
    Action, Event, Refusal, Transition, end_call, end_record, ignored_record, into_transition,
};
use crate::domain::call::approval::{
    Approval, ApprovalChange, ApprovalDecision, ApprovalStatus, CallApproval,
};
use crate::domain::call::{Call, Hold, Outcome, Status, Target};
use crate::domain::event::{EventKind, EventRecord};
use crate::domain::fault::{Code, Fault};

/// Time that a replaced call has, after its replacement must have ended, to take over its outcome.
const REPLACEMENT_GRACE_MS: u64 = 60_000;

/// A decision's effect on the call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ApprovalVerdict {
    /// The call is queued.
    Approve,
    /// The call ends.
    Reject,
    /// Another call with other arguments takes its place.
    Replace {
        /// Deadline of the other call, in Unix milliseconds.
        deadline_ms: u64,
    },
}

/// Holds a call until a person has decided. The clock of the call stops: the person's time does not
/// count against its deadline.
pub(super) fn require_approval(
    call: &Call,
    approval: &Approval,
    target: Option<&Target>,
    now_ms: u64,
) -> Result<Transition, Refusal> {
    let remaining_ms = match call.hold {
        Some(Hold::Queue | Hold::Retry { .. }) => call.deadline_ms.saturating_sub(now_ms),
        Some(Hold::Approval { remaining_ms, .. }) => remaining_ms,
        _ => return Err(Refusal::NotApplicable),
    };
    if call.pending_approval() == Some(approval.id.as_str()) {
        return Err(Refusal::Duplicate);
    }
    let mut next = call.clone();
    if let Some(target) = target {
        next.target = target.clone();
    }
    let (mut records, mut changes) = (Vec::new(), Vec::new());
    if let Some((change, record)) = supersede(call, now_ms) {
        changes.push(change);
        records.push(record);
    }
    changes.push(ApprovalChange::Request(Box::new(approval.clone())));
    records.push(hold_for_approval(&mut next, approval, remaining_ms, now_ms));
    let transition = into_transition(next, records, vec![]);
    Ok(Transition { approval_changes: changes, ..transition })
}

/// Puts a call into the state of waiting for this approval, and returns the record of it.
pub(crate) fn hold_for_approval(
    call: &mut Call,
    approval: &Approval,
    remaining_ms: u64,
    now_ms: u64,
) -> EventRecord {
    call.hold = Some(Hold::Approval { remaining_ms, expires_ms: approval.expires_ms });
    call.deadline_ms = approval.expires_ms;
    call.attempt_deadline_ms = None;
    call.approval = Some(Box::new(CallApproval::pending(approval)));
    let request = &approval.request;
    let attributes = &request.requester.attributes;
    let requester = json!({
        "agent": request.requester.agent,
        "user": attributes.user,
        "session": attributes.session,
    });
    EventRecord::new(EventKind::ApprovalRequested, now_ms, call.attempt)
        .with("approval_id", approval.id.as_str())
        .with("tool", request.tool.as_str())
        .with("requested_by", requester)
        .with("rule_id", request.rule_id.as_str())
        .with("reason", request.reason.as_str())
        .with("args", request.args.to_value())
        .with("difference", json!(request.previous.as_ref().map(|previous| &previous.changes)))
        .with("expires_at_ms", approval.expires_ms)
        .with("link", format!("/v1/approvals/{}", approval.id))
}

/// Ends the approval that a call has, if it has released no attempt.
fn supersede(call: &Call, now_ms: u64) -> Option<(ApprovalChange, EventRecord)> {
    let approval = call.approval.as_ref()?;
    if approval.is_used || approval.standing_id.is_some() {
        return None;
    }
    let decision = ApprovalDecision {
        at_ms: now_ms,
        reason: Some("the tool, its arguments or the rule changed".to_owned()),
        ..ApprovalDecision::default()
    };
    let (id, status) = (approval.id.clone(), ApprovalStatus::Superseded);
    let record = decision_record(call, &id, status, &decision, now_ms);
    Some((ApprovalChange::End { id, status, decision: Box::new(decision) }, record))
}

/// Applies a person's decision.
pub(super) fn decide_approval(
    call: &Call,
    approval_id: &str,
    verdict: ApprovalVerdict,
    decision: &ApprovalDecision,
    now_ms: u64,
) -> Result<Transition, Refusal> {
    if call.status.is_terminal() {
        return Err(Refusal::AlreadyEnded(ignored_record(call, now_ms, "decided after the end")));
    }
    let Some(Hold::Approval { remaining_ms, expires_ms }) = call.hold else {
        return Err(Refusal::NotApplicable);
    };
    let is_in_time = now_ms < call.deadline_ms && now_ms < expires_ms;
    if call.pending_approval() != Some(approval_id) || !is_in_time {
        return Err(Refusal::NotApplicable);
    }
    let mut next = call.clone();
    let status = match verdict {
        ApprovalVerdict::Reject => ApprovalStatus::Rejected,
        ApprovalVerdict::Approve | ApprovalVerdict::Replace { .. } => ApprovalStatus::Approved,
    };
    let mut records = vec![decision_record(call, approval_id, status, decision, now_ms)];
    let mut actions = Vec::new();
    match verdict {
        ApprovalVerdict::Approve => {
            next.hold = Some(Hold::Queue);
            next.deadline_ms = now_ms.saturating_add(remaining_ms);
            if let Some(approval) = &mut next.approval {
                approval.is_granted = true;
            }
            actions.push(Action::Enqueue);
        }
        ApprovalVerdict::Reject => {
            let fault = rejection_fault(call, approval_id, decision);
            next = end_call(next, Status::Failed, (false, None, Some(fault.clone())), now_ms);
            let record = end_record(&next, EventKind::Failed, now_ms);
            records.push(record.with("code", fault.code.as_str()));
            actions.push(Action::NotifyEnded);
        }
        ApprovalVerdict::Replace { deadline_ms } => {
            next.hold = Some(Hold::Predecessor { timeout_ms: REPLACEMENT_GRACE_MS });
            next.deadline_ms = deadline_ms.saturating_add(REPLACEMENT_GRACE_MS);
            if let Some(approval) = &mut next.approval {
                approval.replaced_by = decision.replaced_by.clone();
            }
            actions.push(Action::AwaitPredecessor);
        }
    }
    let transition = into_transition(next, records, actions);
    let end = ApprovalChange::End {
        id: approval_id.to_owned(),
        status,
        decision: Box::new(decision.clone()),
    };
    Ok(Transition { approval_changes: vec![end], ..transition })
}

fn decision_record(
    call: &Call,
    approval_id: &str,
    status: ApprovalStatus,
    decision: &ApprovalDecision,
    now_ms: u64,
) -> EventRecord {
    let mut record = EventRecord::new(EventKind::ApprovalDecided, now_ms, call.attempt)
        .with("approval_id", approval_id)
        .with("tool", call.target.tool.as_str())
        .with("status", status.as_str());
    let texts = [("by", &decision.by), ("user", &decision.user), ("reason", &decision.reason)];
    for (name, text) in texts {
        if let Some(text) = text {
            record = record.with(name, text.as_str());
        }
    }
    if status == ApprovalStatus::Approved {
        record = record.with("scope", decision.scope.as_str());
    }
    if let Some(other) = &decision.replaced_by {
        record = record.with("replaced_by", other.as_str());
    }
    record
}

/// Returns the fault of a rejected call. The model sees its message, with the person's reason.
fn rejection_fault(call: &Call, approval_id: &str, decision: &ApprovalDecision) -> Fault {
    let by = decision.user.as_deref().or(decision.by.as_deref()).unwrap_or("an approver");
    let tool = &call.target.tool;
    let message = match &decision.reason {
        Some(reason) => format!("{by} rejected this call of {tool}: {reason}"),
        None => format!("{by} rejected this call of {tool} without a reason"),
    };
    let detail = json!({
        "approval_id": approval_id,
        "rejected_by": decision.by,
        "reason": decision.reason,
    });
    let fault = Fault::new(Code::PermissionDenied, message).without_side_effect();
    add_effect(call, &fault.with_detail(detail))
}

/// Queues a call that the rules no longer hold.
pub(super) fn waive_approval(
    call: &Call,
    approval_id: &str,
    now_ms: u64,
) -> Result<Transition, Refusal> {
    let Some(Hold::Approval { remaining_ms, .. }) = call.hold else {
        return Err(Refusal::NotApplicable);
    };
    if call.pending_approval() != Some(approval_id) {
        return Err(Refusal::NotApplicable);
    }
    let decision = ApprovalDecision {
        at_ms: now_ms,
        reason: Some("the rules no longer ask for it".to_owned()),
        ..ApprovalDecision::default()
    };
    let status = ApprovalStatus::Superseded;
    let record = decision_record(call, approval_id, status, &decision, now_ms);
    let mut next = call.clone();
    next.hold = Some(Hold::Queue);
    next.deadline_ms = now_ms.saturating_add(remaining_ms);
    next.approval = None;
    let transition = into_transition(next, vec![record], vec![Action::Enqueue]);
    let id = approval_id.to_owned();
    let end = ApprovalChange::End { id, status, decision: Box::new(decision) };
    Ok(Transition { approval_changes: vec![end], ..transition })
}

/// Ends a replaced call with the outcome of its replacement, so that everything that waits for the
/// call receives the answer.
pub(super) fn end_replaced(
    call: &Call,
    status: Status,
    outcome: &Outcome,
    now_ms: u64,
) -> Result<Transition, Refusal> {
    let is_replaced = matches!(call.hold, Some(Hold::Predecessor { .. }));
    let other = call.replaced_by().filter(|_| is_replaced && status.is_terminal());
    let Some(other) = other.cloned() else { return Err(Refusal::NotApplicable) };
    let kind = match status {
        Status::Succeeded => EventKind::Finished,
        Status::Timeout => EventKind::Timeout,
        Status::Canceled => EventKind::Canceled,
        Status::Failed | Status::Pending | Status::Running => EventKind::Failed,
    };
    let parts = (outcome.ok, outcome.data.clone(), outcome.error.clone());
    let mut end = end_call(call.clone(), status, parts, now_ms);
    if let Some(own) = &mut end.outcome {
        own.partial = outcome.partial;
    }
    let record = end_record(&end, kind, now_ms).with("replaced_by", other.as_str());
    Ok(into_transition(end, vec![record], vec![Action::NotifyEnded]))
}

/// Ends a call whose approval was not decided in time.
pub(super) fn expire_approval(call: &Call, now_ms: u64) -> Transition {
    let tool = &call.target.tool;
    let message = format!("approval expired: no person decided about this call of {tool} in time");
    let fault = Fault::new(Code::PermissionDenied, message).without_side_effect();
    let detail = json!({ "approval_id": call.pending_approval() });
    let fault = add_effect(call, &fault.with_detail(detail));
    let code = fault.code.as_str();
    let end = end_call(call.clone(), Status::Failed, (false, None, Some(fault)), now_ms);
    let record = end_record(&end, EventKind::Failed, now_ms).with("code", code);
    into_transition(end, vec![record], vec![Action::NotifyEnded])
}

/// Adds the end of the approval that a call waited for, if the event itself did not decide it.
pub(super) fn end_undecided_approval(
    before: &Call,
    event: &Event,
    mut transition: Transition,
    now_ms: u64,
) -> Transition {
    let Some(id) = before.pending_approval() else { return transition };
    let is_decided = !transition.approval_changes.is_empty();
    if is_decided || transition.call.pending_approval() == Some(id) {
        return transition;
    }
    let status = match event {
        Event::Deadline => ApprovalStatus::Expired,
        _ => ApprovalStatus::Canceled,
    };
    let error = transition.call.outcome.as_ref().and_then(|outcome| outcome.error.as_ref());
    let decision = ApprovalDecision {
        at_ms: now_ms,
        reason: error.map(|fault| fault.message.clone()),
        ..ApprovalDecision::default()
    };
    let record = decision_record(before, id, status, &decision, now_ms);
    transition.records.insert(0, record);
    let id = id.to_owned();
    let end = ApprovalChange::End { id, status, decision: Box::new(decision) };
    transition.approval_changes.push(end);
    transition
}
