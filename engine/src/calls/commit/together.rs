//! Decides events on several calls and commits them in one transaction: the decisions about
//! approvals.

use std::sync::Arc;

use crate::calls::Dispatcher;
use crate::calls::commit::{AdvanceOutcome, Commit, CommitKind, call_not_found};
use crate::calls::open_calls::OpenCall;
use crate::domain::call::Call;
use crate::domain::call::approval::{Approval, ApprovalChange, StandingApproval};
use crate::domain::caller::{AuthMethod, Caller, Role};
use crate::domain::directory::AuditEntry;
use crate::domain::event::{EventKind, EventRecord};
use crate::domain::fault::{Code, Error};
use crate::domain::id::CallId;
use crate::lifecycle::{self, Action, Event, Refusal};
use crate::ports::core::from_store_error;
use crate::ports::engine_metrics;
use crate::ports::store::approvals::ApprovalCommit;
use crate::ports::store::{NewCall, SaveResult};
use crate::registry::Registry;

/// An event on a call, with what belongs in the same commit.
pub(crate) struct JointEvent {
    pub(crate) call_id: CallId,
    pub(crate) event: Event,
    /// The call that replaces this one.
    pub(crate) replacement: Option<Call>,
    pub(crate) standing: Option<StandingApproval>,
    pub(crate) audit: Vec<AuditEntry>,
}

/// A decided event, before and after its commit.
struct DecidedEvent {
    index: usize,
    entry: Arc<OpenCall>,
    before: Arc<Call>,
    after: Arc<Call>,
    actions: Vec<Action>,
    changes: Vec<ApprovalChange>,
    replacement: Option<Arc<Call>>,
    standing: Option<StandingApproval>,
}

impl Dispatcher {
    /// Decides the events and commits all of them in one transaction. Each event is on another call
    /// of this project. The results are in the order of the events.
    pub(crate) async fn advance_together(
        self: &Arc<Self>,
        project: &str,
        events: Vec<JointEvent>,
    ) -> Result<Vec<Result<AdvanceOutcome, Error>>, Error> {
        let mut results: Vec<Option<Result<AdvanceOutcome, Error>>> = Vec::new();
        results.resize_with(events.len(), || None);
        let mut entries = Vec::with_capacity(events.len());
        for (index, event) in events.into_iter().enumerate() {
            match self.find_open_or_stored(project, &event.call_id).await? {
                Some(entry) => entries.push((index, entry, event)),
                None => results[index] = Some(Err(call_not_found(&event.call_id))),
            }
        }
        // Lock in the order of the ids, so that two requests with the same calls cannot deadlock.
        entries.sort_by(|(_, _, a), (_, _, b)| a.call_id.cmp(&b.call_id));
        let locked: Vec<Arc<OpenCall>> =
            entries.iter().map(|(_, entry, _)| entry.clone()).collect();
        let mut locks = Vec::with_capacity(locked.len());
        for entry in &locked {
            locks.push(entry.decision_lock.lock().await);
        }
        let wall_offset_ms = self.core.clock.wall_offset_ms();
        let now_ms = self.core.clock.now_ms().saturating_add_signed(wall_offset_ms);
        let (mut decided, mut commits) = (Vec::new(), Vec::new());
        for (index, entry, joint) in entries {
            let before = entry.call_by_offset(wall_offset_ms);
            match lifecycle::step(&before, &joint.event, now_ms) {
                Err(Refusal::Duplicate) => {
                    results[index] = Some(Ok(AdvanceOutcome::Duplicate(before)));
                }
                Err(refusal) => results[index] = Some(Ok(AdvanceOutcome::Refused(before, refusal))),
                Ok(step) => {
                    let after = Arc::new(step.call);
                    let changes = step.approval_changes.clone();
                    let replacement = joint.replacement.map(Arc::new);
                    commits.push(ApprovalCommit {
                        replacement: replacement.clone().map(new_replacement),
                        standing: joint.standing.clone(),
                        audit: joint.audit,
                        ..ApprovalCommit::new(after.clone(), step.records, step.approval_changes)
                    });
                    let (actions, standing) = (step.actions, joint.standing);
                    decided.push(DecidedEvent {
                        index,
                        entry,
                        before,
                        after,
                        actions,
                        changes,
                        replacement,
                        standing,
                    });
                }
            }
        }
        let saved = match commits.is_empty() {
            true => Vec::new(),
            false => {
                let saved = self.core.store.approvals().commit_approvals(commits).await;
                saved.map_err(from_store_error)?
            }
        };
        for (one, saved) in decided.into_iter().zip(saved) {
            let index = one.index;
            results[index] = Some(match saved {
                SaveResult::Saved => {
                    let after = one.after.clone();
                    self.publish_decided(one, wall_offset_ms, now_ms).await;
                    Ok(AdvanceOutcome::Committed(after))
                }
                SaveResult::Conflict => Err(changed_meanwhile(&one.after.id)),
            });
        }
        drop(locks);
        Ok(results.into_iter().flatten().collect())
    }

    /// Returns the entry of an open call, or one made from the stored call.
    pub(crate) async fn find_open_or_stored(
        &self,
        project: &str,
        id: &CallId,
    ) -> Result<Option<Arc<OpenCall>>, Error> {
        if let Some(entry) = self.open_calls.get(id) {
            return Ok(Some(entry));
        }
        let stored = self.core.store.call(project, id).await.map_err(from_store_error)?;
        let wall_offset_ms = self.core.clock.wall_offset_ms();
        Ok(stored.map(|call| OpenCall::from_store(Arc::new(call), None, wall_offset_ms)))
    }

    /// Makes a committed event visible and performs its actions.
    async fn publish_decided(
        self: &Arc<Self>,
        decided: DecidedEvent,
        wall_offset_ms: i64,
        now_ms: u64,
    ) {
        let DecidedEvent { entry, before, after, actions, changes, .. } = &decided;
        // Open the replacement first: the replaced call looks for it below.
        if let Some(new) = &decided.replacement {
            let open = OpenCall::new(new.clone(), None, wall_offset_ms);
            self.open_calls.adopt(open.clone());
            let accepted = Commit::new(new, CommitKind::Accepted, None, None, now_ms);
            self.after_commit(accepted, Some((&open, &[Action::Enqueue]))).await;
        }
        if let Some(standing) = decided.standing.clone() {
            self.approval_index.put_standing(standing);
        }
        entry.set_committed(after.clone(), wall_offset_ms);
        self.open_calls.apply_transition(before, after, wall_offset_ms);
        self.release_attempt(entry, before, after, actions);
        self.follow_approval(before, after, changes);
        let commit = Commit::new(after, CommitKind::Advanced, Some(before), None, now_ms);
        self.after_commit(commit, Some((entry, actions))).await;
    }

    /// Commits the changes of approvals that a decided event has, together with its call.
    pub(super) async fn save_with_approvals(
        &self,
        after: &Arc<Call>,
        records: Vec<EventRecord>,
        changes: Vec<ApprovalChange>,
    ) -> Result<SaveResult, Error> {
        let caller = after.caller();
        // No person decided: the clock, a rule or the caller's cancellation ended the approval.
        let server = Caller::new(&after.project, "toolcrib", Role::Admin, AuthMethod::Local);
        let audit = changes.iter().map(|change| match change {
            ApprovalChange::Request(approval) => {
                request_audit_entry(&self.registry, &caller, approval)
            }
            ApprovalChange::End { id, status, decision } => {
                let reason = decision.reason.as_deref().unwrap_or_default();
                let reason = format!("{}: {reason}", status.as_str());
                let action = "approval.decided";
                self.registry.audit_entry(&server, &after.project, action, id, &reason)
            }
        });
        let audit = audit.collect();
        let commit =
            ApprovalCommit { audit, ..ApprovalCommit::new(after.clone(), records, changes) };
        let saved = self.core.store.approvals().commit_approvals(vec![commit]).await;
        Ok(saved.map_err(from_store_error)?.pop().unwrap_or(SaveResult::Conflict))
    }

    /// Updates what depends on the approvals of a call, after their commit.
    pub(super) fn follow_approval(
        self: &Arc<Self>,
        before: &Call,
        after: &Call,
        changes: &[ApprovalChange],
    ) {
        if before.waits_for_approval() || after.waits_for_approval() {
            self.approval_index.update_waiting(after);
        }
        for change in changes {
            match change {
                ApprovalChange::Request(_) => engine_metrics::count_approval_request(),
                ApprovalChange::End { status, decision, .. } => {
                    let since_ms = waiting_since(before, after);
                    let waited_ms = decision.at_ms.saturating_sub(since_ms);
                    engine_metrics::record_approval_end(status.as_str(), waited_ms);
                }
            }
        }
        if after.waits_for_approval() && !before.waits_for_approval() {
            // The dependents of this call must not wait for a person.
            self.release_dependents(&after.project, &after.id);
            self.approval_requested.notify_waiters();
        }
    }
}

/// Returns the entry of the audit log for a requested approval.
pub(crate) fn request_audit_entry(
    registry: &Registry,
    caller: &Caller,
    approval: &Approval,
) -> AuditEntry {
    let request = &approval.request;
    let reason = format!(
        "{} of call {} by rule \"{}\": {}",
        request.tool, approval.call_id, request.rule_id, request.reason
    );
    let action = "approval.requested";
    registry.audit_entry(caller, &approval.project, action, &approval.id, &reason)
}

/// Returns the time at which the call began to wait: its creation, unless an attempt came before.
fn waiting_since(before: &Call, after: &Call) -> u64 {
    before.attempt_dispatched_ms.unwrap_or(after.created_ms)
}

fn new_replacement(call: Arc<Call>) -> NewCall {
    let requested = EventRecord::new(EventKind::Requested, call.created_ms, 0)
        .with("tool", call.tool_name.as_str())
        .with("args_bytes", call.target.args.text().len())
        .with_task_ids(&call);
    let replaces = call.origin.replaces.as_ref().map(|id| id.to_string());
    let records = vec![requested.with("replaces", replaces)];
    NewCall { call, records, key: None, undelivered: None, approval: None, group_member: None }
}

fn changed_meanwhile(id: &CallId) -> Error {
    let message = format!("call \"{id}\" was changed by another process meanwhile; try again");
    Error::refused(Code::Conflict, message)
}
