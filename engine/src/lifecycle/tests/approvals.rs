//! Approvals: the clock of a held call, what supersedes an approval, and replaced calls.

use super::*;
use crate::domain::call::approval::{
    ApprovalRequest, ApprovalRequester, ApprovalScope, ApprovalStatus, ApprovalWebhook,
};

const EXPIRES: u64 = NOW + 86_400_000;

fn approval(id: &str) -> Approval {
    Approval {
        id: id.into(),
        project: "p".into(),
        call_id: "tc_01ARZ3NDEKTSV4RRFFQ69G5FAV".parse().unwrap(),
        request: ApprovalRequest {
            run_id: "r".into(),
            tool: "t".into(),
            version: "v".into(),
            args: Json::empty_object(),
            digest: format!("digest of {id}"),
            rule_id: "rule".into(),
            reason: "it writes".into(),
            requester: ApprovalRequester::default(),
            approvers: Vec::new(),
            previous: None,
            supersedes: None,
        },
        created_ms: NOW,
        // `Case::DeadlineDue` is later.
        expires_ms: DEADLINE + INPUT_TIMEOUT,
        status: ApprovalStatus::Pending,
        decision: None,
        webhook: ApprovalWebhook::default(),
    }
}

pub(super) fn required(id: &str) -> Event {
    Event::ApprovalRequired { approval: Box::new(approval(id)), target: None }
}

pub(super) fn decided(id: &str, verdict: ApprovalVerdict) -> Event {
    let replaces = matches!(verdict, ApprovalVerdict::Replace { .. });
    let other: CallId = "tc_01ARZ3NDEKTSV4RRFFQ69G5FAW".parse().unwrap();
    let decision = ApprovalDecision {
        at_ms: NOW,
        by: Some("bob".into()),
        reason: Some("too much".into()),
        scope: ApprovalScope::Once,
        replaced_by: replaces.then_some(other),
        ..ApprovalDecision::default()
    };
    Event::ApprovalDecided { approval_id: id.into(), verdict, decision: Box::new(decision) }
}

pub(super) fn replacement_ended() -> Event {
    let metrics = CallMetrics::default();
    let outcome = Outcome { ok: true, partial: false, data: Some(result()), error: None, metrics };
    Event::ReplacementEnded { status: Status::Succeeded, outcome: Box::new(outcome) }
}

pub(super) fn waiting_call(queued: Call) -> Call {
    step(&queued, &required("apr_1"), NOW).unwrap().call
}

pub(super) fn replaced_call(queued: Call) -> Call {
    let event = decided("apr_1", ApprovalVerdict::Replace { deadline_ms: DEADLINE });
    step(&waiting_call(queued), &event, NOW).unwrap().call
}

fn waiting() -> Call {
    waiting_call(queued_call(Executor::BUILTIN, Effect::Irreversible))
}

fn ends(transition: &Transition) -> Vec<(&str, ApprovalStatus)> {
    let ends = transition.approval_changes.iter().filter_map(|change| match change {
        ApprovalChange::End { id, status, .. } => Some((id.as_str(), *status)),
        ApprovalChange::Request(_) => None,
    });
    ends.collect()
}

#[test]
fn a_persons_time_does_not_count_against_the_deadline() {
    let call = waiting();
    assert!(call.deadline_ms > DEADLINE, "the wait may last longer than the call");
    let later = NOW + 1_000_000;
    let event = decided("apr_1", ApprovalVerdict::Approve);
    let released = step(&call, &event, later).unwrap();
    assert_eq!(released.call.deadline_ms - later, DEADLINE - NOW, "it has the time it had");
    assert_eq!(released.actions, [Action::Enqueue]);
    assert_eq!(ends(&released), [("apr_1", ApprovalStatus::Approved)]);
    assert!(released.call.approval.unwrap().is_granted);
}

#[test]
fn every_end_of_a_waiting_call_ends_its_approval() {
    let call = waiting();
    let cancel = Event::Cancel { by: "a".into(), reason: None };
    let fault = Fault::new(Code::PermissionDenied, "no");
    for (event, at_ms, status) in [
        (Event::Deadline, EXPIRES, ApprovalStatus::Expired),
        (cancel, NOW, ApprovalStatus::Canceled),
        (Event::Abort { fault: fault.clone() }, NOW, ApprovalStatus::Canceled),
        (Event::PermissionRevoked { fault }, NOW, ApprovalStatus::Canceled),
        (decided("apr_1", ApprovalVerdict::Reject), NOW, ApprovalStatus::Rejected),
        (required("apr_2"), NOW, ApprovalStatus::Superseded),
    ] {
        let transition = step(&call, &event, at_ms).unwrap();
        assert_eq!(ends(&transition), [("apr_1", status)], "{event:?}");
        let decisions = transition.records.iter();
        let decisions = decisions.filter(|record| record.kind == EventKind::ApprovalDecided);
        assert_eq!(decisions.count(), 1, "{event:?}");
    }
}

#[test]
fn an_expired_approval_fails_the_call_and_passes_nothing() {
    let call = waiting();
    let expired = step(&call, &Event::Deadline, EXPIRES).unwrap().call;
    let fault = expired.outcome.unwrap().error.unwrap();
    assert_eq!((expired.status, fault.code), (Status::Failed, Code::PermissionDenied));
    assert!(fault.message.starts_with("approval expired"), "{}", fault.message);
    // A decision that comes too late releases nothing, even if the clock was set back since: the
    // deadline of the call follows the clock, the time of expiry does not.
    let mut stepped = call;
    stepped.shift_schedule(7_200_000);
    let late = decided("apr_1", ApprovalVerdict::Approve);
    assert_eq!(step(&stepped, &late, EXPIRES), Err(Refusal::NotApplicable));
    assert_eq!(step(&stepped, &Event::Deadline, EXPIRES).unwrap().call.status, Status::Failed);
}

#[test]
fn a_rejection_carries_its_reason() {
    let event = decided("apr_1", ApprovalVerdict::Reject);
    let call = step(&waiting(), &event, NOW).unwrap().call;
    let fault = call.outcome.unwrap().error.unwrap();
    assert_eq!(fault.message, "bob rejected this call of t: too much");
    assert_eq!((fault.code, fault.retryable), (Code::PermissionDenied, false));
}

#[test]
fn an_approval_is_superseded_only_until_an_attempt_has_used_it() {
    let granted = step(&waiting(), &decided("apr_1", ApprovalVerdict::Approve), NOW).unwrap().call;
    let again = step(&granted, &required("apr_2"), NOW).unwrap();
    assert_eq!(ends(&again), [("apr_1", ApprovalStatus::Superseded)]);
    assert_eq!(again.call.pending_approval(), Some("apr_2"));
    let running = step(&granted, &claim_by("n1"), NOW).unwrap().call;
    let harmless = failure_report(None, Fault::unreachable("refused"));
    let retried = step(&running, &harmless, NOW).unwrap().call;
    let fallback = step(&retried, &required("apr_2"), NOW).unwrap();
    assert_eq!(ends(&fallback), [], "the first attempt used it");
}

#[test]
fn a_replaced_call_never_runs_and_takes_over_the_outcome() {
    let call = replaced_call(queued_call(Executor::BUILTIN, Effect::Irreversible));
    assert_eq!(call.awaited_call().unwrap().as_str(), "tc_01ARZ3NDEKTSV4RRFFQ69G5FAW");
    assert_eq!(step(&call, &Event::PredecessorEnded, NOW), Err(Refusal::NotApplicable));
    assert_eq!(step(&call, &claim_by("n1"), NOW), Err(Refusal::NotApplicable));
    let recovered = step(&call, &Event::OwnerLost { node: "n2".into() }, NOW).unwrap();
    assert_eq!(recovered.actions, [Action::AwaitPredecessor]);
    let ended = step(&call, &replacement_ended(), NOW).unwrap();
    assert_eq!(ended.call.outcome.unwrap().data, Some(result()));
    assert_eq!(ended.actions, [Action::NotifyEnded]);
}
