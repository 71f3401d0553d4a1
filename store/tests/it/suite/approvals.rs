//! Approvals: stored with their calls, decided together, listed, and purged with their calls.

use std::sync::Arc;

use toolcrib::domain::call::approval::{
    Approval, ApprovalChange, ApprovalDecision, ApprovalRequest, ApprovalRequester, ApprovalScope,
    ApprovalStatus, ApprovalWebhook, CallApproval, PreviousApproval, StandingApproval,
    find_changes,
};
use toolcrib::domain::call::{Call, Hold, Origin, Status};
use toolcrib::domain::event::EventKind;
use toolcrib::ports::store::approvals::{ApprovalCommit, ApprovalFilter, NewApproval};
use toolcrib::ports::store::{CreateCallResult, NewCall, SaveResult, Store};

use super::directory::entry;
use crate::support::{NOW, call, ended, history, json, key, of_call, put, read, record, running};

/// An approval of this call, of this tool and agent.
fn approval(id: &str, call: &Call) -> Approval {
    let changes = find_changes(&json(r#"{"city":"Rome","nul":"\u0000"}"#), &call.target.args);
    Approval {
        id: id.into(),
        project: call.project.clone(),
        call_id: call.id.clone(),
        request: ApprovalRequest {
            run_id: call.run_id.clone(),
            tool: call.tool_name.clone(),
            version: "v1".into(),
            args: call.target.args.clone(),
            digest: "d".into(),
            rule_id: "mail".into(),
            reason: "it writes \u{1F980}".into(),
            requester: ApprovalRequester {
                agent: call.origin.agent.clone(),
                ..ApprovalRequester::default()
            },
            approvers: vec!["bob".into()],
            previous: Some(PreviousApproval {
                approval_id: "apr_0".into(),
                call_id: call.id.clone(),
                changes,
            }),
            supersedes: Some("apr_00".into()),
        },
        created_ms: NOW,
        expires_ms: NOW + 500,
        status: ApprovalStatus::Pending,
        decision: None,
        webhook: ApprovalWebhook { due_ms: Some(NOW + 3), tries: 0 },
    }
}

/// A call that waits for an approval with this id.
fn held(id: &str) -> (Call, Approval) {
    let mut held = call();
    let approval = approval(id, &held);
    held.hold = Some(Hold::Approval { remaining_ms: 7, expires_ms: NOW + 500 });
    held.deadline_ms = NOW + 500;
    held.approval = Some(Box::new(CallApproval::pending(&approval)));
    (held, approval)
}

async fn create(store: &dyn Store, call: &Call, approval: &Approval) {
    let audit = entry(&call.project, "approval.requested");
    let new = NewCall {
        call: Arc::new(call.clone()),
        records: vec![record(EventKind::ApprovalRequested)],
        key: None,
        undelivered: None,
        approval: Some(Box::new(NewApproval { approval: approval.clone(), audit })),
        group_member: None,
    };
    assert!(matches!(store.create_call(new).await.unwrap(), CreateCallResult::New));
}

fn decision() -> ApprovalDecision {
    ApprovalDecision {
        at_ms: NOW + 9,
        by: Some("bob".into()),
        reason: Some("fine".into()),
        scope: ApprovalScope::Run,
        standing_id: Some("sap_1".into()),
        ..ApprovalDecision::default()
    }
}

fn end(id: &str, status: ApprovalStatus) -> ApprovalChange {
    ApprovalChange::End { id: id.into(), status, decision: Box::new(decision()) }
}

/// The next version of a held call: in the queue.
fn released(call: &Call) -> Call {
    let mut next = call.clone();
    next.hold = Some(Hold::Queue);
    next.version += 1;
    if let Some(approval) = &mut next.approval {
        approval.is_granted = true;
    }
    next
}

fn commit(call: &Call, changes: Vec<ApprovalChange>) -> ApprovalCommit {
    let records = vec![record(EventKind::ApprovalDecided)];
    ApprovalCommit::new(Arc::new(call.clone()), records, changes)
}

async fn find(store: &dyn Store, id: &str) -> Option<Approval> {
    store.approvals().approval("p", id).await.unwrap()
}

fn standing(id: &str, expires_ms: u64) -> StandingApproval {
    let (call, approval) = held("apr_1");
    StandingApproval {
        id: id.into(),
        project: "p".into(),
        approval_id: approval.id,
        tool: call.tool_name,
        args: call.args,
        digest: "d".into(),
        rule_id: "mail".into(),
        requester: approval.request.requester,
        scope: ApprovalScope::Run,
        run_id: Some("run".into()),
        ends_with_run: true,
        expires_ms,
        granted_by: "bob".into(),
        granted_ms: NOW,
        revoked_ms: None,
        revoked_by: None,
    }
}

pub async fn an_approval_is_stored_with_its_call(store: &dyn Store) {
    let (call, approval) = held("apr_1");
    create(store, &call, &approval).await;
    assert_eq!(read(store, &call).await, call);
    assert_eq!(find(store, "apr_1").await, Some(approval));
    assert_eq!(find(store, "apr_2").await, None);
    assert_eq!(store.approvals().approval("q", "apr_1").await.unwrap(), None);
    let audit = store.audit_log(Some("p".into()), 10).await.unwrap();
    assert_eq!(audit.len(), 1);
    let replaced = Call {
        hold: Some(Hold::Predecessor { timeout_ms: 5 }),
        origin: Origin { replaces: Some(call.id.clone()), ..call.origin.clone() },
        approval: Some(Box::new(CallApproval {
            replaced_by: Some(call.id.clone()),
            standing_id: Some("sap_1".into()),
            is_used: true,
            is_granted: true,
            ..*call.approval.clone().unwrap()
        })),
        ..crate::support::call()
    };
    put(store, &replaced).await;
    assert_eq!(read(store, &replaced).await, replaced);
}

pub async fn decisions_and_their_calls_are_one_commit(store: &dyn Store) {
    let (first, of_first) = held("apr_1");
    let (second, of_second) = held("apr_2");
    create(store, &first, &of_first).await;
    create(store, &second, &of_second).await;
    let replacement = call();
    let new = NewCall {
        call: Arc::new(replacement.clone()),
        records: vec![record(EventKind::Requested)],
        key: None,
        undelivered: None,
        approval: None,
        group_member: None,
    };
    let stale = Call { version: 7, ..released(&second) };
    let commits = vec![
        ApprovalCommit {
            replacement: Some(new),
            standing: Some(standing("sap_1", NOW + 50)),
            audit: vec![entry("p", "approval.decided")],
            ..commit(&released(&first), vec![end("apr_1", ApprovalStatus::Approved)])
        },
        ApprovalCommit {
            audit: vec![entry("p", "not stored")],
            ..commit(&stale, vec![end("apr_2", ApprovalStatus::Approved)])
        },
    ];
    let saved = store.approvals().commit_approvals(commits).await.unwrap();
    assert_eq!(saved, [SaveResult::Saved, SaveResult::Conflict]);
    assert_eq!(read(store, &first).await, released(&first));
    assert_eq!(history(store, of_call(&first)).await.len(), 2);
    let decided = find(store, "apr_1").await.unwrap();
    assert_eq!((decided.status, decided.decision), (ApprovalStatus::Approved, Some(decision())));
    assert_eq!(read(store, &replacement).await, replacement);
    let all = store.approvals().standing_approvals(NOW).await.unwrap();
    assert_eq!(all, [standing("sap_1", NOW + 50)]);
    // The conflict left nothing behind.
    assert_eq!(read(store, &second).await, second);
    assert_eq!(find(store, "apr_2").await, Some(of_second));
    assert_eq!(store.audit_log(Some("p".into()), 10).await.unwrap().len(), 3);
}

pub async fn a_superseded_approval_keeps_its_decision(store: &dyn Store) {
    let (call, approval) = held("apr_1");
    create(store, &call, &approval).await;
    let next = released(&call);
    let approved = vec![commit(&next, vec![end("apr_1", ApprovalStatus::Approved)])];
    store.approvals().commit_approvals(approved).await.unwrap();
    let again = Call { version: next.version + 1, ..next.clone() };
    let reason = ApprovalDecision { at_ms: NOW + 99, ..ApprovalDecision::default() };
    let superseded = ApprovalChange::End {
        id: "apr_1".into(),
        status: ApprovalStatus::Superseded,
        decision: Box::new(reason),
    };
    let rejected = end("apr_1", ApprovalStatus::Rejected);
    let other = ApprovalChange::Request(Box::new(super::approvals::approval("apr_2", &again)));
    let changes = vec![rejected, superseded, other];
    store.approvals().commit_approvals(vec![commit(&again, changes)]).await.unwrap();
    let found = find(store, "apr_1").await.unwrap();
    assert_eq!((found.status, found.decision), (ApprovalStatus::Superseded, Some(decision())));
    assert_eq!(find(store, "apr_2").await.unwrap().status, ApprovalStatus::Pending);
}

pub async fn approvals_are_listed_newest_first_by_status_agent_and_tool(store: &dyn Store) {
    for (n, agent, tool) in [(1, "ada", "a"), (2, "bob", "a"), (3, "ada", "b"), (4, "ada", "a")] {
        let id = format!("apr_{n}");
        let (mut call, mut approval) = held(&id);
        call.origin.agent = agent.into();
        approval.request.requester.agent = agent.into();
        approval.request.tool = tool.into();
        create(store, &call, &approval).await;
        if n == 3 {
            let next = vec![commit(&released(&call), vec![end(&id, ApprovalStatus::Approved)])];
            store.approvals().commit_approvals(next).await.unwrap();
        }
    }
    let all = ApprovalFilter { project: "p".into(), limit: 10, ..ApprovalFilter::default() };
    let text = |word: &str| Some(word.to_owned());
    let filters = [
        (all.clone(), "4 3 2 1"),
        (ApprovalFilter { status: Some(ApprovalStatus::Pending), ..all.clone() }, "4 2 1"),
        (ApprovalFilter { agent: text("ada"), ..all.clone() }, "4 3 1"),
        (ApprovalFilter { tool: text("a"), before: text("apr_4"), ..all.clone() }, "2 1"),
        (ApprovalFilter { limit: 2, ..all.clone() }, "4 3"),
        (ApprovalFilter { project: "q".into(), ..all.clone() }, ""),
    ];
    for (filter, expected) in filters {
        let listed = store.approvals().list_approvals(filter.clone()).await.unwrap();
        let ids: Vec<&str> = listed.iter().map(|one| &one.id["apr_".len()..]).collect();
        assert_eq!(ids.join(" "), expected, "{filter:?}");
    }
    let ids = vec!["apr_2".to_owned(), "apr_9".to_owned()];
    assert_eq!(store.approvals().approvals_by_id("p", ids).await.unwrap().len(), 1);
    let last = store.approvals().last_approved("p", "b").await.unwrap();
    assert_eq!(last.unwrap().id, "apr_3");
    assert_eq!(store.approvals().last_approved("p", "a").await.unwrap(), None);
}

pub async fn standing_approvals_are_replaced_and_expire(store: &dyn Store) {
    let approvals = store.approvals();
    for (id, expires_ms) in [("sap_1", NOW + 10), ("sap_2", NOW + 20)] {
        let audit = entry("p", "standing_approval.granted");
        approvals.put_standing_approval(standing(id, expires_ms), audit).await.unwrap();
    }
    let revoked = StandingApproval { revoked_ms: Some(NOW), ..standing("sap_2", NOW + 20) };
    let audit = entry("p", "standing_approval.revoked");
    approvals.put_standing_approval(revoked.clone(), audit).await.unwrap();
    assert_eq!(approvals.standing_approvals(NOW).await.unwrap().len(), 2);
    assert_eq!(approvals.standing_approvals(NOW + 10).await.unwrap(), [revoked]);
    assert_eq!(store.audit_log(Some("p".into()), 10).await.unwrap().len(), 3);
    store.purge(NOW + 15, 10).await.unwrap();
    assert_eq!(approvals.standing_approvals(0).await.unwrap().len(), 1);
}

pub async fn due_webhooks_of_approvals_are_found(store: &dyn Store) {
    let (call, approval) = held("apr_1");
    create(store, &call, &approval).await;
    let approvals = store.approvals();
    assert_eq!(approvals.due_approval_webhooks(NOW + 2, 10).await.unwrap(), []);
    assert_eq!(approvals.due_approval_webhooks(NOW + 3, 10).await.unwrap(), [approval]);
    let later = ApprovalWebhook { due_ms: Some(NOW + 30), tries: 1 };
    approvals.set_approval_webhook("apr_1", later).await.unwrap();
    assert_eq!(approvals.due_approval_webhooks(NOW + 29, 10).await.unwrap(), []);
    let due = approvals.due_approval_webhooks(NOW + 30, 10).await.unwrap();
    assert_eq!(due[0].webhook, later);
    let done = ApprovalWebhook { due_ms: None, tries: 2 };
    approvals.set_approval_webhook("apr_1", done).await.unwrap();
    assert_eq!(approvals.due_approval_webhooks(u64::MAX >> 1, 10).await.unwrap(), []);
}

pub async fn another_key_of_a_call_leads_to_it(store: &dyn Store) {
    let (call, approval) = held("apr_1");
    create(store, &call, &approval).await;
    let approvals = store.approvals();
    let added = approvals.add_idempotency_key("p", key("ada", "k", "f"), &call.id).await;
    assert!(added.unwrap());
    let again = approvals.add_idempotency_key("p", key("ada", "k", "g"), &call.id).await;
    assert!(!again.unwrap(), "the key was used before");
    let found = store.find_by_idempotency_key("p", &key("ada", "k", "f")).await.unwrap();
    let Some(CreateCallResult::Replayed(found)) = found else { panic!("{found:?}") };
    assert_eq!(found.id, call.id);
}

pub async fn approvals_are_purged_with_their_call(store: &dyn Store) {
    let (call, approval) = held("apr_1");
    create(store, &call, &approval).await;
    let next = released(&call);
    let approved = vec![commit(&next, vec![end("apr_1", ApprovalStatus::Approved)])];
    store.approvals().commit_approvals(approved).await.unwrap();
    let started = running(&next);
    crate::support::save(store, &started).await;
    crate::support::save(store, &ended(&started, Status::Succeeded, NOW + 9)).await;
    let (open, of_open) = held("apr_2");
    create(store, &open, &of_open).await;
    store.purge(NOW + 100, 10).await.unwrap();
    assert_eq!(find(store, "apr_1").await, None);
    assert_eq!(find(store, "apr_2").await, Some(of_open));
}
