//! The store port: the source of truth. Each method is atomic and has committed when it returns.
//!
//! A store persists what it receives and compares versions; it never decides a status and never
//! accesses policies, wakeups or sources. Every implementation passes the one test suite in the
//! crate `toolcrib-store`.

pub mod agents;
pub mod approvals;
pub mod audit;
pub mod credentials;
mod memory;
pub mod rule_history;
pub mod runs;
pub mod undelivered;
pub mod usage;
pub mod utp;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use async_trait::async_trait;

use crate::domain::call::{Call, Status};
use crate::domain::delivery::{Delivery, DeliveryAttempt, DeliveryStatus};
use crate::domain::directory::{AuditEntry, Directory, DirectoryChange};
use crate::domain::event::{CallEvent, EventKind, EventRecord};
use crate::domain::id::CallId;
use crate::domain::json::Json;

use audit::{AuditFilter, AuditOrder};
pub use memory::MemoryStore;

/// The reason why a store operation failed.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The store cannot read or write now: disk full, locked, unreachable. Nothing was changed.
    #[error("the store is not available: {0}")]
    Unavailable(String),
    /// The write failed in a way that leaves its fate open: it may or may not be stored. The state
    /// of the store is certain again after a restart.
    #[error("it is unknown if the store wrote this: {0}")]
    OutcomeUnknown(String),
    /// This program cannot have written the stored data.
    #[error("the store has unreadable data: {0}")]
    Corrupt(String),
}

/// A new call with everything that belongs in the same commit.
#[derive(Debug)]
pub struct NewCall {
    /// The call in its first version.
    pub call: Arc<Call>,
    /// First records of the call's history.
    pub records: Vec<EventRecord>,
    /// Idempotency key of the request, if it has one.
    pub key: Option<IdempotencyKey>,
    /// The request that made the call, if a repeated request may join the call.
    pub undelivered: Option<undelivered::UndeliveredRequest>,
    /// The approval that the call waits for.
    pub approval: Option<Box<approvals::NewApproval>>,
    /// Set if the call is part of a group; dropped once the call is queued for writing.
    pub group_member: Option<GroupMember>,
}

/// Counts the new calls on their way to the store. A store that commits in groups waits for the
/// pending members.
#[derive(Debug, Clone, Default)]
pub struct CommitGroup(Arc<AtomicUsize>);

impl CommitGroup {
    /// Adds a member; it counts as pending until it arrives or is dropped.
    pub fn add_member(&self) -> GroupMember {
        self.0.fetch_add(1, Ordering::Relaxed);
        GroupMember(self.clone())
    }

    /// Returns true if a member is still pending.
    pub fn has_pending(&self) -> bool {
        self.0.load(Ordering::Acquire) > 0
    }
}

/// A pending member of a group; dropping it removes it from the count.
#[derive(Debug)]
pub struct GroupMember(CommitGroup);

impl GroupMember {
    /// Returns the group.
    pub fn group(&self) -> CommitGroup {
        self.0.clone()
    }
}

impl Drop for GroupMember {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Release);
    }
}

/// A caller's promise that the same key means the same request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdempotencyKey {
    /// The scope of the key: the same key of another agent is independent.
    pub agent: String,
    /// The key itself, unique among the keys of the agent.
    pub key: String,
    /// Digest of every relevant part of the request.
    pub fingerprint: String,
}

/// Result of creating a call.
#[derive(Debug)]
pub enum CreateCallResult {
    /// The call was stored.
    New,
    /// The key was used before for the same request; this is the stored call.
    Replayed(Box<Call>),
    /// The key was used before for another request.
    Mismatch(CallId),
}

/// Result of saving a call.
#[derive(Debug, PartialEq, Eq)]
pub enum SaveResult {
    /// The new version was stored.
    Saved,
    /// Another writer saved a newer version first.
    Conflict,
}

/// Selects the calls to list, newest first.
#[derive(Debug, Clone, Default)]
pub struct CallFilter {
    /// Project that the calls belong to.
    pub project: String,
    /// Run that the calls belong to; `None` selects all runs.
    pub run_id: Option<String>,
    /// Name of the requested tool; `None` selects all tools.
    pub tool_name: Option<String>,
    /// Current status of the calls; `None` selects all statuses.
    pub status: Option<Status>,
    /// If set, lists only background tasks.
    pub background: bool,
    /// Created at or after this time.
    pub since_ms: Option<u64>,
    /// Older than this call (the last of the previous page).
    pub before: Option<CallId>,
    /// Maximum number of calls to return.
    pub limit: usize,
    /// Page size in bytes ([`Call::estimated_bytes`]): calls beyond it need not be read.
    pub max_bytes: Option<usize>,
}

impl CallFilter {
    /// Returns true if a page of this many bytes is full.
    pub fn is_page_full(&self, bytes: usize) -> bool {
        self.max_bytes.is_some_and(|enough| bytes >= enough)
    }
}

/// Selects the deliveries to list, those of the newest calls first.
#[derive(Debug, Clone, Default)]
pub struct DeliveryFilter {
    /// Project that the deliveries belong to.
    pub project: String,
    /// Current status of the deliveries; `None` selects all statuses.
    pub status: Option<DeliveryStatus>,
    /// Of older calls than this (the last of the previous page).
    pub before: Option<CallId>,
    /// Maximum number of deliveries to return.
    pub limit: usize,
}

/// One open call, with its position in commit order.
#[derive(Debug, Clone)]
pub struct OpenCallRow {
    /// Position in commit order: the cursor of the next page.
    pub position: u64,
    /// The call in its stored version.
    pub call: Call,
}

/// Selects the events to read.
#[derive(Debug, Clone)]
pub enum EventScope {
    /// Events of one call.
    Call {
        /// Project that the call belongs to.
        project: String,
        /// Id of the call.
        id: CallId,
    },
    /// Events of all calls of a run.
    Run {
        /// Project that the run belongs to.
        project: String,
        /// Id of the run, unique within its project.
        run_id: String,
    },
    /// Events of all calls of a project.
    Project(String),
}

/// The tool definitions stored for a run.
#[derive(Debug, Clone, PartialEq)]
pub struct RunToolDefinitions {
    /// Project that the run belongs to.
    pub project: String,
    /// Id of the run, unique within its project.
    pub run_id: String,
    /// The tools set for the run.
    pub tool_definitions: Json,
    /// Time of the last replacement, in Unix milliseconds.
    pub updated_ms: u64,
}

/// Result of a purge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PurgeResult {
    /// Number of deleted calls.
    pub calls: usize,
    /// True if one kind of record reached the limit, so that more may remain.
    pub has_more: bool,
}

/// Stores calls, their history and the directory.
#[async_trait]
pub trait Store: Send + Sync + 'static {
    /// Returns the entries of the audit log, newest first.
    async fn audit_log(
        &self,
        project: Option<String>,
        limit: usize,
    ) -> Result<Vec<AuditEntry>, StoreError> {
        let order = AuditOrder::NewestFirst { before: u64::MAX };
        let rows = self.audit().audit_rows(AuditFilter { project, order, limit }).await?;
        Ok(rows.into_iter().map(|row| row.entry).collect())
    }

    /// Stores a new call, unless its idempotency key was used before, together with the delivery
    /// that it requests ([`Delivery::for_call`]).
    async fn create_call(&self, new: NewCall) -> Result<CreateCallResult, StoreError>;

    /// Returns the call or mismatch for a used key, never [`CreateCallResult::New`]; `None` if the
    /// key is unused.
    async fn find_by_idempotency_key(
        &self,
        project: &str,
        key: &IdempotencyKey,
    ) -> Result<Option<CreateCallResult>, StoreError>;

    /// Replaces a call whose stored version is exactly one lower, and appends to its history. If
    /// the call has ended, its delivery becomes due ([`Delivery::after_call_ended`]).
    async fn save_call(
        &self,
        call: Arc<Call>,
        records: Vec<EventRecord>,
    ) -> Result<SaveResult, StoreError>;

    /// Appends to a call's history without changing the call.
    async fn append_records(
        &self,
        project: &str,
        id: &CallId,
        records: Vec<EventRecord>,
    ) -> Result<(), StoreError>;

    /// Returns one call of a project.
    async fn call(&self, project: &str, id: &CallId) -> Result<Option<Call>, StoreError>;

    /// Returns a page of calls, newest first: ordered by id, and ids sort by creation time.
    async fn calls(&self, filter: CallFilter) -> Result<Vec<Call>, StoreError>;

    /// Returns open calls after this position, in the order of their creation.
    async fn open_calls(&self, after: u64, limit: usize) -> Result<Vec<OpenCallRow>, StoreError>;

    /// Returns events with a number above `after`, in order.
    async fn events(
        &self,
        scope: EventScope,
        after: u64,
        limit: usize,
    ) -> Result<Vec<CallEvent>, StoreError>;

    /// Returns a number that no event in scope exceeds: a subscriber that starts there sees every
    /// later event. 0 if there are no events.
    async fn last_event_number(&self, scope: EventScope) -> Result<u64, StoreError>;

    /// Returns the tool definitions set for a run, or `None` if none were set.
    async fn run_tool_definitions(
        &self,
        project: &str,
        run_id: &str,
    ) -> Result<Option<RunToolDefinitions>, StoreError>;

    /// Replaces the tool definitions of a run.
    async fn put_run_tool_definitions(&self, run: RunToolDefinitions) -> Result<(), StoreError>;

    /// Returns the newest record of this kind in a call's history.
    async fn last_record(
        &self,
        project: &str,
        id: &CallId,
        kind: EventKind,
    ) -> Result<Option<EventRecord>, StoreError>;

    /// Returns pending deliveries after this one, ordered by due time.
    async fn pending_deliveries(
        &self,
        after: Option<(u64, CallId)>,
        limit: usize,
    ) -> Result<Vec<Delivery>, StoreError>;

    /// Returns a page of deliveries, those of the newest calls first.
    async fn deliveries(&self, filter: DeliveryFilter) -> Result<Vec<Delivery>, StoreError>;

    /// Returns the delivery of a call, with its stored attempts in order.
    async fn delivery(
        &self,
        project: &str,
        id: &CallId,
    ) -> Result<Option<(Delivery, Vec<DeliveryAttempt>)>, StoreError>;

    /// Replaces a delivery whose stored version is exactly one lower, and stores the attempt that
    /// led to it. At most [`crate::domain::delivery::MAX_STORED_ATTEMPTS`] attempts are kept, the
    /// latest ones.
    async fn save_delivery(
        &self,
        delivery: Delivery,
        tried: Option<DeliveryAttempt>,
    ) -> Result<SaveResult, StoreError>;

    /// Deletes up to `limit` calls that ended before this time, with everything that belongs to
    /// them; and up to as many of each other kind: tool definitions of runs last changed before it
    /// and without calls, runs that ended before it.
    async fn purge(&self, ended_before_ms: u64, limit: usize) -> Result<PurgeResult, StoreError>;

    /// Returns the version of the directory.
    async fn directory_version(&self) -> Result<u64, StoreError>;

    /// Returns the whole directory.
    async fn directory(&self) -> Result<Directory, StoreError>;

    /// Applies a change that was decided on this version of the directory, with its audit entry.
    async fn change_directory(
        &self,
        change: DirectoryChange,
        decided_on: u64,
        audit: Option<AuditEntry>,
    ) -> Result<SaveResult, StoreError>;

    /// Records the time of day, unless a later one is recorded. The directory shows the latest; the
    /// directory's version stays the same.
    async fn record_time(&self, at_ms: u64) -> Result<(), StoreError>;

    /// Appends an entry to the audit log.
    async fn append_audit_entry(&self, entry: AuditEntry) -> Result<(), StoreError>;

    /// Returns the store of the audit log.
    fn audit(&self) -> &dyn audit::AuditStore;

    /// Checks that the store can be read and written now.
    async fn check_health(&self) -> Result<(), StoreError>;

    /// Returns the reason once the store has failed for good: it is unknown what is stored, and
    /// only a restart helps. Never returns if that cannot happen.
    async fn wait_for_failure(&self) -> String;

    /// Returns the store of cards, turns and inboxes.
    fn utp(&self) -> &dyn utp::UtpStore;

    /// Returns the store of runs and their journals.
    fn runs(&self) -> &dyn runs::RunStore;

    /// Returns the store of undelivered requests.
    fn undelivered(&self) -> &dyn undelivered::UndeliveredRequestStore;

    /// Returns the usage that rate limits count.
    fn usage(&self) -> &dyn usage::UsageStore;

    /// Returns the store of agents' versions, trees of runs and boxes.
    fn agents(&self) -> &dyn agents::AgentStore;

    /// Returns the store of approvals.
    fn approvals(&self) -> &dyn approvals::ApprovalStore;

    /// Returns the earlier versions of the access rules.
    fn rule_history(&self) -> &dyn rule_history::RuleHistoryStore;

    /// Returns the store of upstream credentials.
    fn credentials(&self) -> &dyn credentials::UpstreamCredentialStore;

    /// Returns the size of the store.
    async fn size_bytes(&self) -> Result<u64, StoreError>;
}
