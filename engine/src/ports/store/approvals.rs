//! The part of the store port for approvals. A decision and the change of its call are one commit.

use std::sync::Arc;

use async_trait::async_trait;

use super::{IdempotencyKey, NewCall, SaveResult, StoreError};
use crate::domain::call::Call;
use crate::domain::call::approval::{
    Approval, ApprovalChange, ApprovalStatus, ApprovalWebhook, StandingApproval,
};
use crate::domain::directory::AuditEntry;
use crate::domain::event::EventRecord;
use crate::domain::id::CallId;

/// The next version of a call, with the changes of its approvals and everything else that belongs
/// in the same commit.
#[derive(Debug)]
pub struct ApprovalCommit {
    /// The call in its next version.
    pub call: Arc<Call>,
    /// Records to append to the call's history.
    pub records: Vec<EventRecord>,
    /// Changes of the call's approvals.
    pub changes: Vec<ApprovalChange>,
    /// The call that replaces this one. It has no idempotency key.
    pub replacement: Option<NewCall>,
    /// The standing approval that the decision creates.
    pub standing: Option<StandingApproval>,
    /// Entries of the audit log.
    pub audit: Vec<AuditEntry>,
}

impl ApprovalCommit {
    /// Creates a commit of a call and its approvals alone.
    pub fn new(call: Arc<Call>, records: Vec<EventRecord>, changes: Vec<ApprovalChange>) -> Self {
        Self { call, records, changes, replacement: None, standing: None, audit: Vec::new() }
    }
}

/// A new approval, with its entry of the audit log.
#[derive(Debug)]
pub struct NewApproval {
    /// The pending approval.
    pub approval: Approval,
    /// Entry of the audit log.
    pub audit: AuditEntry,
}

/// Selects the approvals to list, newest first.
#[derive(Debug, Clone, Default)]
pub struct ApprovalFilter {
    /// Project that the approvals belong to.
    pub project: String,
    /// Current status; `None` selects all statuses.
    pub status: Option<ApprovalStatus>,
    /// Agent whose calls need the approvals; `None` selects all agents.
    pub agent: Option<String>,
    /// Name of the tool; `None` selects all tools.
    pub tool: Option<String>,
    /// Older than this approval (the last of the previous page).
    pub before: Option<String>,
    /// Maximum number of approvals to return.
    pub limit: usize,
}

/// Stores approvals.
#[async_trait]
pub trait ApprovalStore: Send + Sync {
    /// Applies all commits in one transaction. A commit whose call has another stored version than
    /// the one before it is left out, with everything that it contains, and returns
    /// [`SaveResult::Conflict`]; the others are stored all the same.
    async fn commit_approvals(
        &self,
        commits: Vec<ApprovalCommit>,
    ) -> Result<Vec<SaveResult>, StoreError>;

    /// Stores another idempotency key of a call, for a request that joined it. Returns false if the
    /// key was used before.
    async fn add_idempotency_key(
        &self,
        project: &str,
        key: IdempotencyKey,
        call_id: &CallId,
    ) -> Result<bool, StoreError>;

    /// Returns one approval of a project.
    async fn approval(&self, project: &str, id: &str) -> Result<Option<Approval>, StoreError>;

    /// Returns these approvals of a project, in any order; unknown ids are left out.
    async fn approvals_by_id(
        &self,
        project: &str,
        ids: Vec<String>,
    ) -> Result<Vec<Approval>, StoreError>;

    /// Returns a page of approvals, newest first.
    async fn list_approvals(&self, filter: ApprovalFilter) -> Result<Vec<Approval>, StoreError>;

    /// Returns the approval of this tool that was approved last.
    async fn last_approved(
        &self,
        project: &str,
        tool: &str,
    ) -> Result<Option<Approval>, StoreError>;

    /// Stores a standing approval, or replaces the one with its id, with an entry of the audit log.
    async fn put_standing_approval(
        &self,
        standing: StandingApproval,
        audit: AuditEntry,
    ) -> Result<(), StoreError>;

    /// Returns the standing approvals of all projects that expire after this time, oldest first.
    async fn standing_approvals(&self, after_ms: u64) -> Result<Vec<StandingApproval>, StoreError>;

    /// Returns approvals whose webhook is due at this time, in the order of their due times.
    async fn due_approval_webhooks(
        &self,
        now_ms: u64,
        limit: usize,
    ) -> Result<Vec<Approval>, StoreError>;

    /// Replaces the progress of an approval's webhook.
    async fn set_approval_webhook(
        &self,
        id: &str,
        webhook: ApprovalWebhook,
    ) -> Result<(), StoreError>;
}
