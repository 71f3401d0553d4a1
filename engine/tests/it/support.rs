//! Shared test support: a store that fails on request, seeded random numbers, and a tool.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use parking_lot::Mutex;
use toolcrib::domain::delivery::{Delivery, DeliveryAttempt};
use toolcrib::domain::directory::{AuditEntry, Directory, DirectoryChange};
use toolcrib::domain::event::{CallEvent, EventKind, EventRecord};
use toolcrib::domain::id::CallId;
use toolcrib::domain::retry::ExecutionPolicyPatch;
use toolcrib::ports::store::{
    CallFilter, CreateCallResult, DeliveryFilter, EventScope, IdempotencyKey, MemoryStore, NewCall,
    OpenCallRow, RunToolDefinitions, SaveResult, Store, StoreError,
};
use toolcrib::{Call, Effect, Executor, Json, Risk, ToolDefinition};

/// A tool that clients execute.
pub fn client_tool(name: &str, effect: Effect) -> ToolDefinition {
    ToolDefinition {
        project: Some("default".into()),
        name: name.into(),
        description: String::new(),
        executor: Executor::CLIENT,
        input_schema: Json::parse("true").unwrap(),
        output_schema: None,
        timeout_ms: 30_000,
        effect,
        risk: Risk::Low,
        policy: ExecutionPolicyPatch::default(),
        fallback: Vec::new(),
        background: false,
        metadata: None,
        binding: None,
    }
}

/// Random numbers that depend only on the seed.
#[derive(Clone)]
pub struct SeededRng(Arc<Mutex<u64>>);

impl SeededRng {
    pub fn new(seed: u64) -> Self {
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
    rng: SeededRng,
    failing_percent: AtomicU64,
    /// While a test holds the write lock, committed writes do not return.
    pub reply_gate: tokio::sync::RwLock<()>,
}

impl FlakyStore {
    pub fn new(rng: SeededRng) -> Arc<Self> {
        let (inner, failing_percent) = (MemoryStore::default(), AtomicU64::new(0));
        let reply_gate = tokio::sync::RwLock::default();
        Arc::new(Self { inner, rng, failing_percent, reply_gate })
    }

    pub fn fail(&self, percent: u64) {
        self.failing_percent.store(percent, Ordering::Relaxed);
    }

    fn fail_sometimes(&self) -> Result<(), StoreError> {
        let percent = self.failing_percent.load(Ordering::Relaxed);
        if percent > 0 && self.rng.percent(percent) {
            return Err(StoreError::Unavailable("disk full".into()));
        }
        Ok(())
    }
}

#[async_trait]
impl Store for FlakyStore {
    async fn create_call(&self, new: NewCall) -> Result<CreateCallResult, StoreError> {
        self.fail_sometimes()?;
        let created = self.inner.create_call(new).await;
        drop(self.reply_gate.read().await);
        created
    }

    async fn find_by_idempotency_key(
        &self,
        project: &str,
        key: &IdempotencyKey,
    ) -> Result<Option<CreateCallResult>, StoreError> {
        self.inner.find_by_idempotency_key(project, key).await
    }

    async fn save_call(
        &self,
        call: Arc<Call>,
        records: Vec<EventRecord>,
    ) -> Result<SaveResult, StoreError> {
        self.fail_sometimes()?;
        let saved = self.inner.save_call(call, records).await;
        drop(self.reply_gate.read().await);
        saved
    }

    async fn append_records(
        &self,
        project: &str,
        id: &CallId,
        records: Vec<EventRecord>,
    ) -> Result<(), StoreError> {
        self.fail_sometimes()?;
        self.inner.append_records(project, id, records).await
    }

    async fn call(&self, project: &str, id: &CallId) -> Result<Option<Call>, StoreError> {
        self.inner.call(project, id).await
    }

    async fn calls(&self, filter: CallFilter) -> Result<Vec<Call>, StoreError> {
        self.inner.calls(filter).await
    }

    async fn open_calls(&self, after: u64, limit: usize) -> Result<Vec<OpenCallRow>, StoreError> {
        self.inner.open_calls(after, limit).await
    }

    async fn events(
        &self,
        scope: EventScope,
        after: u64,
        limit: usize,
    ) -> Result<Vec<CallEvent>, StoreError> {
        self.inner.events(scope, after, limit).await
    }

    async fn last_event_number(&self, scope: EventScope) -> Result<u64, StoreError> {
        self.inner.last_event_number(scope).await
    }

    async fn run_tool_definitions(
        &self,
        project: &str,
        run_id: &str,
    ) -> Result<Option<RunToolDefinitions>, StoreError> {
        self.inner.run_tool_definitions(project, run_id).await
    }

    async fn put_run_tool_definitions(&self, run: RunToolDefinitions) -> Result<(), StoreError> {
        self.fail_sometimes()?;
        self.inner.put_run_tool_definitions(run).await
    }

    async fn last_record(
        &self,
        project: &str,
        id: &CallId,
        kind: EventKind,
    ) -> Result<Option<EventRecord>, StoreError> {
        self.inner.last_record(project, id, kind).await
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
    ) -> Result<Option<(Delivery, Vec<DeliveryAttempt>)>, StoreError> {
        self.inner.delivery(project, id).await
    }

    async fn save_delivery(
        &self,
        delivery: Delivery,
        attempt: Option<DeliveryAttempt>,
    ) -> Result<SaveResult, StoreError> {
        self.fail_sometimes()?;
        self.inner.save_delivery(delivery, attempt).await
    }

    async fn purge(
        &self,
        ended_before_ms: u64,
        limit: usize,
    ) -> Result<toolcrib::ports::store::PurgeResult, StoreError> {
        self.inner.purge(ended_before_ms, limit).await
    }

    async fn directory_version(&self) -> Result<u64, StoreError> {
        self.inner.directory_version().await
    }

    async fn directory(&self) -> Result<Directory, StoreError> {
        self.inner.directory().await
    }

    async fn change_directory(
        &self,
        change: DirectoryChange,
        decided_on: u64,
        audit: Option<AuditEntry>,
    ) -> Result<SaveResult, StoreError> {
        self.inner.change_directory(change, decided_on, audit).await
    }

    async fn record_time(&self, at_ms: u64) -> Result<(), StoreError> {
        self.inner.record_time(at_ms).await
    }

    async fn append_audit_entry(&self, entry: AuditEntry) -> Result<(), StoreError> {
        self.inner.append_audit_entry(entry).await
    }

    fn audit(&self) -> &dyn toolcrib::ports::store::audit::AuditStore {
        self.inner.audit()
    }

    async fn check_health(&self) -> Result<(), StoreError> {
        self.fail_sometimes()
    }

    async fn wait_for_failure(&self) -> String {
        self.inner.wait_for_failure().await
    }

    fn utp(&self) -> &dyn toolcrib::ports::store::utp::UtpStore {
        self.inner.utp()
    }

    fn runs(&self) -> &dyn toolcrib::ports::store::runs::RunStore {
        self.inner.runs()
    }

    fn usage(&self) -> &dyn toolcrib::ports::store::usage::UsageStore {
        self.inner.usage()
    }

    fn undelivered(&self) -> &dyn toolcrib::ports::store::undelivered::UndeliveredRequestStore {
        self.inner.undelivered()
    }

    fn agents(&self) -> &dyn toolcrib::ports::store::agents::AgentStore {
        self.inner.agents()
    }

    fn approvals(&self) -> &dyn toolcrib::ports::store::approvals::ApprovalStore {
        self.inner.approvals()
    }

    fn rule_history(&self) -> &dyn toolcrib::ports::store::rule_history::RuleHistoryStore {
        self.inner.rule_history()
    }

    fn credentials(&self) -> &dyn toolcrib::ports::store::credentials::UpstreamCredentialStore {
        self.inner.credentials()
    }

    async fn size_bytes(&self) -> Result<u64, StoreError> {
        self.inner.size_bytes().await
    }
}
