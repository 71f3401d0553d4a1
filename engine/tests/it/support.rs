//! Shared test support: a store that fails on request, seeded random numbers, and a tool.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use parking_lot::Mutex;
use toolcrib::delivery::{Delivery, Try};
use toolcrib::directory::{AuditEntry, Change, Directory};
use toolcrib::event::{Event, Kind, Record};
use toolcrib::id::CallId;
use toolcrib::retry::PolicyPatch;
use toolcrib::store::{
    CallFilter, Created, DeliveryFilter, EventScope, IdempotencyKey, MemoryStore, NewCall, Open,
    Run, Saved, Store, StoreError,
};
use toolcrib::{Call, Definition, Effect, Executor, Json, Risk};

/// A tool that clients execute.
pub fn client_tool(name: &str, effect: Effect) -> Definition {
    Definition {
        project: Some("default".into()),
        name: name.into(),
        description: String::new(),
        executor: Executor::Client,
        input_schema: Json::parse("true").unwrap(),
        output_schema: None,
        timeout_ms: 30_000,
        effect,
        risk: Risk::Low,
        policy: PolicyPatch::default(),
        fallback: Vec::new(),
        background: false,
        metadata: None,
        utp: None,
    }
}

/// Random numbers that depend only on the seed.
#[derive(Clone)]
pub struct Chance(Arc<Mutex<u64>>);

impl Chance {
    pub fn of(seed: u64) -> Self {
        Self(Arc::new(Mutex::new(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)))
    }

    /// Returns a number from 0 up to, but not including, `below`.
    pub fn below(&self, below: u64) -> u64 {
        let mut state = self.0.lock();
        *state ^= *state << 13;
        *state ^= *state >> 7;
        *state ^= *state << 17;
        (*state >> 11) % below
    }

    /// Returns true in this many of a hundred cases.
    pub fn percent(&self, percent: u64) -> bool {
        self.below(100) < percent
    }

    pub fn pick<'a, T>(&self, all: &'a [T]) -> Option<&'a T> {
        if all.is_empty() { None } else { all.get(self.below(all.len() as u64) as usize) }
    }
}

/// A memory store whose writes fail now and then, like those to a full or locked disk: a failed
/// write changes nothing.
pub struct FlakyStore {
    inner: MemoryStore,
    chance: Chance,
    failing_percent: AtomicU64,
    /// While a test holds the write lock, committed writes do not return.
    pub answering: tokio::sync::RwLock<()>,
}

impl FlakyStore {
    pub fn new(chance: Chance) -> Arc<Self> {
        let (inner, failing_percent) = (MemoryStore::default(), AtomicU64::new(0));
        let answering = tokio::sync::RwLock::default();
        Arc::new(Self { inner, chance, failing_percent, answering })
    }

    pub fn fail(&self, percent: u64) {
        self.failing_percent.store(percent, Ordering::Relaxed);
    }

    fn trouble(&self) -> Result<(), StoreError> {
        let percent = self.failing_percent.load(Ordering::Relaxed);
        if percent > 0 && self.chance.percent(percent) {
            return Err(StoreError::Unavailable("disk full".into()));
        }
        Ok(())
    }
}

#[async_trait]
impl Store for FlakyStore {
    async fn create(&self, new: NewCall) -> Result<Created, StoreError> {
        self.trouble()?;
        let created = self.inner.create(new).await;
        drop(self.answering.read().await);
        created
    }

    async fn used(
        &self,
        project: &str,
        key: &IdempotencyKey,
    ) -> Result<Option<Created>, StoreError> {
        self.inner.used(project, key).await
    }

    async fn save(&self, call: Arc<Call>, records: Vec<Record>) -> Result<Saved, StoreError> {
        self.trouble()?;
        let saved = self.inner.save(call, records).await;
        drop(self.answering.read().await);
        saved
    }

    async fn append(
        &self,
        project: &str,
        id: &CallId,
        records: Vec<Record>,
    ) -> Result<(), StoreError> {
        self.trouble()?;
        self.inner.append(project, id, records).await
    }

    async fn call(&self, project: &str, id: &CallId) -> Result<Option<Call>, StoreError> {
        self.inner.call(project, id).await
    }

    async fn calls(&self, filter: CallFilter) -> Result<Vec<Call>, StoreError> {
        self.inner.calls(filter).await
    }

    async fn open_calls(&self, after: u64, limit: usize) -> Result<Vec<Open>, StoreError> {
        self.inner.open_calls(after, limit).await
    }

    async fn events(
        &self,
        scope: EventScope,
        after: u64,
        limit: usize,
    ) -> Result<Vec<Event>, StoreError> {
        self.inner.events(scope, after, limit).await
    }

    async fn newest_event(&self, scope: EventScope) -> Result<u64, StoreError> {
        self.inner.newest_event(scope).await
    }

    async fn run(&self, project: &str, run_id: &str) -> Result<Option<Run>, StoreError> {
        self.inner.run(project, run_id).await
    }

    async fn put_run(&self, run: Run) -> Result<(), StoreError> {
        self.trouble()?;
        self.inner.put_run(run).await
    }

    async fn newest_record(
        &self,
        project: &str,
        id: &CallId,
        kind: Kind,
    ) -> Result<Option<Record>, StoreError> {
        self.inner.newest_record(project, id, kind).await
    }

    async fn pending_deliveries(
        &self,
        after: Option<(u64, CallId)>,
        limit: usize,
    ) -> Result<Vec<Delivery>, StoreError> {
        self.inner.pending_deliveries(after, limit).await
    }

    async fn deliveries(&self, filter: DeliveryFilter) -> Result<Vec<Delivery>, StoreError> {
        self.inner.deliveries(filter).await
    }

    async fn delivery(
        &self,
        project: &str,
        id: &CallId,
    ) -> Result<Option<(Delivery, Vec<Try>)>, StoreError> {
        self.inner.delivery(project, id).await
    }

    async fn save_delivery(
        &self,
        delivery: Delivery,
        tried: Option<Try>,
    ) -> Result<Saved, StoreError> {
        self.trouble()?;
        self.inner.save_delivery(delivery, tried).await
    }

    async fn purge(
        &self,
        ended_before_ms: u64,
        limit: usize,
    ) -> Result<toolcrib::store::Purged, StoreError> {
        self.inner.purge(ended_before_ms, limit).await
    }

    async fn directory_version(&self) -> Result<u64, StoreError> {
        self.inner.directory_version().await
    }

    async fn directory(&self) -> Result<Directory, StoreError> {
        self.inner.directory().await
    }

    async fn change(
        &self,
        change: Change,
        decided_on: u64,
        audit: Option<AuditEntry>,
    ) -> Result<Saved, StoreError> {
        self.inner.change(change, decided_on, audit).await
    }

    async fn audit(&self, entry: AuditEntry) -> Result<(), StoreError> {
        self.inner.audit(entry).await
    }

    async fn audit_log(
        &self,
        project: Option<String>,
        limit: usize,
    ) -> Result<Vec<AuditEntry>, StoreError> {
        self.inner.audit_log(project, limit).await
    }

    async fn check(&self) -> Result<(), StoreError> {
        self.trouble()
    }

    fn utp(&self) -> &dyn toolcrib::store::utp::UtpStore {
        self.inner.utp()
    }

    fn loops(&self) -> &dyn toolcrib::store::loops::LoopStore {
        self.inner.loops()
    }

    fn grants(&self) -> &dyn toolcrib::store::grants::GrantStore {
        self.inner.grants()
    }

    async fn size_bytes(&self) -> Result<u64, StoreError> {
        self.inner.size_bytes().await
    }
}
