//! Approvals in memory.

use std::collections::BTreeMap;

use async_trait::async_trait;

use super::{MemoryState, MemoryStore};
use crate::domain::call::approval::{
    Approval, ApprovalChange, ApprovalStatus, ApprovalWebhook, StandingApproval,
};
use crate::domain::directory::AuditEntry;
use crate::domain::id::CallId;
use crate::ports::store::approvals::{ApprovalCommit, ApprovalFilter, ApprovalStore};
use crate::ports::store::{IdempotencyKey, SaveResult, StoreError};

/// The approvals and standing approvals, by id.
#[derive(Default)]
pub(super) struct MemoryApprovals {
    pub(super) by_id: BTreeMap<String, Approval>,
    standing: BTreeMap<String, StandingApproval>,
}

impl MemoryApprovals {
    /// Deletes standing approvals that expired before this time.
    pub(super) fn purge_standing(&mut self, before_ms: u64) {
        self.standing.retain(|_, standing| standing.expires_ms >= before_ms);
    }

    fn apply(&mut self, change: ApprovalChange) {
        match change {
            ApprovalChange::Request(approval) => {
                self.by_id.insert(approval.id.clone(), *approval);
            }
            ApprovalChange::End { id, status, decision } => {
                let Some(approval) = self.by_id.get_mut(&id) else { return };
                let supersedes = status == ApprovalStatus::Superseded;
                if approval.status != ApprovalStatus::Pending && !supersedes {
                    return;
                }
                approval.status = status;
                approval.decision.get_or_insert(*decision);
            }
        }
    }
}

impl MemoryState {
    fn commit_approval(&mut self, commit: ApprovalCommit) -> SaveResult {
        let ApprovalCommit { call, records, changes, replacement, standing, audit } = commit;
        if self.save_call(call, records) == SaveResult::Conflict {
            return SaveResult::Conflict;
        }
        changes.into_iter().for_each(|change| self.approvals.apply(change));
        if let Some(new) = replacement {
            self.insert_call(new);
        }
        let standing = standing.map(|standing| (standing.id.clone(), standing));
        self.approvals.standing.extend(standing);
        audit.into_iter().for_each(|entry| self.audit.append(entry));
        SaveResult::Saved
    }
}

#[async_trait]
impl ApprovalStore for MemoryStore {
    async fn commit_approvals(
        &self,
        commits: Vec<ApprovalCommit>,
    ) -> Result<Vec<SaveResult>, StoreError> {
        let mut state = self.state.lock();
        Ok(commits.into_iter().map(|commit| state.commit_approval(commit)).collect())
    }

    async fn add_idempotency_key(
        &self,
        project: &str,
        key: IdempotencyKey,
        call_id: &CallId,
    ) -> Result<bool, StoreError> {
        let scoped_key = (project.to_owned(), key.agent, key.key);
        let mut state = self.state.lock();
        if state.keys.contains_key(&scoped_key) {
            return Ok(false);
        }
        state.keys.insert(scoped_key, (call_id.clone(), key.fingerprint));
        Ok(true)
    }

    async fn approval(&self, project: &str, id: &str) -> Result<Option<Approval>, StoreError> {
        let state = self.state.lock();
        let found = state.approvals.by_id.get(id);
        Ok(found.filter(|approval| approval.project == project).cloned())
    }

    async fn approvals_by_id(
        &self,
        project: &str,
        ids: Vec<String>,
    ) -> Result<Vec<Approval>, StoreError> {
        let state = self.state.lock();
        let found = ids.iter().filter_map(|id| state.approvals.by_id.get(id));
        Ok(found.filter(|approval| approval.project == project).cloned().collect())
    }

    async fn list_approvals(&self, filter: ApprovalFilter) -> Result<Vec<Approval>, StoreError> {
        let state = self.state.lock();
        let fits = |approval: &&Approval| {
            let request = &approval.request;
            approval.project == filter.project
                && filter.status.is_none_or(|status| status == approval.status)
                && filter.agent.as_ref().is_none_or(|agent| *agent == request.requester.agent)
                && filter.tool.as_ref().is_none_or(|tool| *tool == request.tool)
                && filter.before.as_ref().is_none_or(|before| approval.id < *before)
        };
        let newest_first = state.approvals.by_id.values().rev();
        Ok(newest_first.filter(fits).take(filter.limit).cloned().collect())
    }

    async fn last_approved(
        &self,
        project: &str,
        tool: &str,
    ) -> Result<Option<Approval>, StoreError> {
        let state = self.state.lock();
        let approved = state.approvals.by_id.values().filter(|approval| {
            approval.status == ApprovalStatus::Approved
                && approval.project == project
                && approval.request.tool == tool
        });
        let decided_ms =
            |approval: &&Approval| approval.decision.as_ref().map(|decision| decision.at_ms);
        Ok(approved.max_by_key(decided_ms).cloned())
    }

    async fn put_standing_approval(
        &self,
        standing: StandingApproval,
        audit: AuditEntry,
    ) -> Result<(), StoreError> {
        let mut state = self.state.lock();
        state.approvals.standing.insert(standing.id.clone(), standing);
        state.audit.append(audit);
        Ok(())
    }

    async fn standing_approvals(&self, after_ms: u64) -> Result<Vec<StandingApproval>, StoreError> {
        let state = self.state.lock();
        let current = state.approvals.standing.values();
        Ok(current.filter(|standing| standing.expires_ms > after_ms).cloned().collect())
    }

    async fn due_approval_webhooks(
        &self,
        now_ms: u64,
        limit: usize,
    ) -> Result<Vec<Approval>, StoreError> {
        let state = self.state.lock();
        let is_due =
            |approval: &&Approval| approval.webhook.due_ms.is_some_and(|due_ms| due_ms <= now_ms);
        let mut due: Vec<Approval> =
            state.approvals.by_id.values().filter(is_due).cloned().collect();
        due.sort_by_key(|approval| approval.webhook.due_ms);
        due.truncate(limit);
        Ok(due)
    }

    async fn set_approval_webhook(
        &self,
        id: &str,
        webhook: ApprovalWebhook,
    ) -> Result<(), StoreError> {
        if let Some(approval) = self.state.lock().approvals.by_id.get_mut(id) {
            approval.webhook = webhook;
        }
        Ok(())
    }
}
