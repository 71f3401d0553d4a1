//! The store port: the truth. Each method is atomic, and has committed when it returns.
//!
//! A store keeps what it is given and compares versions; it never decides a status and knows
//! nothing of policies, wakes or sources. Every implementation passes the one suite in the
//! crate `toolcrib-store`.

pub mod grants;
pub mod loops;
mod memory;
pub mod utp;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use async_trait::async_trait;

use crate::call::{Call, Status};
use crate::delivery::{Delivery, DeliveryStatus, Try};
use crate::directory::{AuditEntry, Change, Directory};
use crate::event::{Event, Kind, Record};
use crate::id::CallId;
use crate::json::Json;

pub use memory::MemoryStore;

/// Why the store did not do it.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// It cannot take or give anything now: disk full, locked, gone. Nothing of it was done.
    #[error("the store is not available: {0}")]
    Unavailable(String),
    /// The stored data is not what this program can have written.
    #[error("the store holds something unreadable: {0}")]
    Corrupt(String),
}

/// A new call with what belongs into the same commit.
#[derive(Debug)]
pub struct NewCall {
    pub call: Arc<Call>,
    pub records: Vec<Record>,
    pub key: Option<IdempotencyKey>,
    /// It is one of several that come together; let go of when it is in line to be written.
    pub coming: Option<Coming>,
}

/// How many new calls are on their way to the store: one that commits in groups does well to wait
/// for those that are still to come.
#[derive(Debug, Clone, Default)]
pub struct Together(Arc<AtomicUsize>);

impl Together {
    /// One more is on its way, until it has come or is given up.
    pub fn expect(&self) -> Coming {
        self.0.fetch_add(1, Ordering::Relaxed);
        Coming(self.clone())
    }

    /// Whether any is still to come.
    pub fn more(&self) -> bool {
        self.0.load(Ordering::Acquire) > 0
    }
}

/// One that is on its way.
#[derive(Debug)]
pub struct Coming(Together);

impl Coming {
    /// Those it comes with.
    pub fn together(&self) -> Together {
        self.0.clone()
    }
}

impl Drop for Coming {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Release);
    }
}

/// A caller's promise that the same key means the same request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdempotencyKey {
    /// Keys of different agents do not meet.
    pub agent: String,
    pub key: String,
    /// Of everything in the request that matters.
    pub fingerprint: String,
}

/// What creating a call came to.
#[derive(Debug)]
pub enum Created {
    New,
    /// The key was used before, for the same request: this is the call.
    Replayed(Box<Call>),
    /// The key was used before, for another request.
    Mismatch(CallId),
}

/// What saving a call came to.
#[derive(Debug, PartialEq, Eq)]
pub enum Saved {
    Yes,
    /// Somebody saved another version meanwhile.
    Stale,
}

/// Which calls to list: newest first.
#[derive(Debug, Clone, Default)]
pub struct CallFilter {
    pub project: String,
    pub run_id: Option<String>,
    pub tool_name: Option<String>,
    pub status: Option<Status>,
    /// Only those that are background tasks.
    pub background: bool,
    /// Created at or after this.
    pub since_ms: Option<u64>,
    /// Older than this call (the last of the page before).
    pub before: Option<CallId>,
    pub limit: usize,
    /// Those after the first so many bytes (`Call::bytes`) are not wanted, and need not be read.
    pub enough_bytes: Option<usize>,
}

impl CallFilter {
    /// Whether a page that has so many bytes is enough.
    pub fn is_enough(&self, bytes: usize) -> bool {
        self.enough_bytes.is_some_and(|enough| bytes >= enough)
    }
}

/// Which deliveries to list: of the newest calls first.
#[derive(Debug, Clone, Default)]
pub struct DeliveryFilter {
    pub project: String,
    pub status: Option<DeliveryStatus>,
    /// Of older calls than this (the last of the page before).
    pub before: Option<CallId>,
    pub limit: usize,
}

/// One open call, with its place in the order of the commits.
#[derive(Debug, Clone)]
pub struct Open {
    pub place: u64,
    pub call: Call,
}

/// Whose events to read.
#[derive(Debug, Clone)]
pub enum EventScope {
    Call { project: String, id: CallId },
    Run { project: String, run_id: String },
    Project(String),
}

/// What is kept of a run beside its calls.
#[derive(Debug, Clone, PartialEq)]
pub struct Run {
    pub project: String,
    pub run_id: String,
    /// The tools that were set for it.
    pub tool_definitions: Json,
    pub updated_ms: u64,
}

/// What a purge deleted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Purged {
    /// How many calls.
    pub calls: usize,
    /// Of one kind it deleted as much as it may at once: there may be more.
    pub more: bool,
}

/// Where tickets, their history and the directory are kept.
#[async_trait]
pub trait Store: Send + Sync + 'static {
    /// Stores a new call, unless its idempotency key was used before; with the delivery that it
    /// asks for ([`Delivery::of`]).
    async fn create(&self, new: NewCall) -> Result<Created, StoreError>;

    /// What this key was used for before: never [`Created::New`]; none when it was not used.
    async fn used(
        &self,
        project: &str,
        key: &IdempotencyKey,
    ) -> Result<Option<Created>, StoreError>;

    /// Replaces a call whose stored version is exactly one below, and appends to its history. When
    /// the call has ended with it, its delivery becomes due ([`Delivery::made_due`]).
    async fn save(&self, call: Arc<Call>, records: Vec<Record>) -> Result<Saved, StoreError>;

    /// Appends to a call's history without changing the call.
    async fn append(
        &self,
        project: &str,
        id: &CallId,
        records: Vec<Record>,
    ) -> Result<(), StoreError>;

    /// One call of a project.
    async fn call(&self, project: &str, id: &CallId) -> Result<Option<Call>, StoreError>;

    /// A page of calls, newest first: by their ids, which sort by when they were made.
    async fn calls(&self, filter: CallFilter) -> Result<Vec<Call>, StoreError>;

    /// Calls that have not ended, in the order they came, after this place.
    async fn open_calls(&self, after: u64, limit: usize) -> Result<Vec<Open>, StoreError>;

    /// Events with a number above `after`, in order.
    async fn events(
        &self,
        scope: EventScope,
        after: u64,
        limit: usize,
    ) -> Result<Vec<Event>, StoreError>;

    /// A number that no event in scope is above: whoever follows from there sees what comes from
    /// now on. 0 when there is no event at all.
    async fn newest_event(&self, scope: EventScope) -> Result<u64, StoreError>;

    /// What is kept of a run; none where nothing was ever set for it.
    async fn run(&self, project: &str, run_id: &str) -> Result<Option<Run>, StoreError>;

    /// Keeps this of a run, instead of what was kept before.
    async fn put_run(&self, run: Run) -> Result<(), StoreError>;

    /// The newest record of this kind in a call's history.
    async fn newest_record(
        &self,
        project: &str,
        id: &CallId,
        kind: Kind,
    ) -> Result<Option<Record>, StoreError>;

    /// Deliveries that are pending, in the order they are due, after this one.
    async fn pending_deliveries(
        &self,
        after: Option<(u64, CallId)>,
        limit: usize,
    ) -> Result<Vec<Delivery>, StoreError>;

    /// A page of deliveries, those of the newest calls first.
    async fn deliveries(&self, filter: DeliveryFilter) -> Result<Vec<Delivery>, StoreError>;

    /// The delivery of a call, with its last tries in their order.
    async fn delivery(
        &self,
        project: &str,
        id: &CallId,
    ) -> Result<Option<(Delivery, Vec<Try>)>, StoreError>;

    /// Replaces a delivery whose stored version is exactly one below, and keeps the try that led
    /// to it; of many tries, the last [`crate::delivery::KEPT_TRIES`].
    async fn save_delivery(
        &self,
        delivery: Delivery,
        tried: Option<Try>,
    ) -> Result<Saved, StoreError>;

    /// Deletes up to `limit` calls that ended before this, with all that belongs to them; and as
    /// many of each other kind: runs that were last changed before this and have no calls left,
    /// loops that ended before this, entries of the audit log.
    async fn purge(&self, ended_before_ms: u64, limit: usize) -> Result<Purged, StoreError>;

    /// The version of the directory.
    async fn directory_version(&self) -> Result<u64, StoreError>;

    /// The whole directory.
    async fn directory(&self) -> Result<Directory, StoreError>;

    /// Makes a change that was decided on this version of the directory, and writes it down.
    async fn change(
        &self,
        change: Change,
        decided_on: u64,
        audit: Option<AuditEntry>,
    ) -> Result<Saved, StoreError>;

    /// Writes something down for the operator.
    async fn audit(&self, entry: AuditEntry) -> Result<(), StoreError>;

    /// What was written down, newest first.
    async fn audit_log(
        &self,
        project: Option<String>,
        limit: usize,
    ) -> Result<Vec<AuditEntry>, StoreError>;

    /// Whether the store can be read and written now.
    async fn check(&self) -> Result<(), StoreError>;

    /// Cards, turns and inboxes.
    fn utp(&self) -> &dyn utp::UtpStore;

    /// Runs: conversations with models.
    fn loops(&self) -> &dyn loops::LoopStore;

    /// Tokens of upstreams.
    fn grants(&self) -> &dyn grants::GrantStore;

    /// How much room it takes.
    async fn size_bytes(&self) -> Result<u64, StoreError>;
}
