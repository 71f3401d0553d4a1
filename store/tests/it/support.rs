//! Stores, calls and event records for the tests.

pub mod database;
pub mod population;

use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tempfile::TempDir;
use toolcrib::domain::call::{Call, CallMetrics, Hold, Origin, Outcome, Status, Target};
use toolcrib::domain::event::{CallEvent, EventKind, EventRecord};
use toolcrib::domain::fault::Fault;
use toolcrib::domain::id::CallId;
use toolcrib::domain::json::Json;
use toolcrib::domain::retry::Backoff;
use toolcrib::domain::tool::{Effect, Executor};
use toolcrib::ports::store::{
    CallFilter, CreateCallResult, EventScope, IdempotencyKey, MemoryStore, NewCall, SaveResult,
    Store, StoreError,
};
use toolcrib_store::SqliteStore;

/// The current time in the tests.
pub const NOW: u64 = 1_790_000_000_000;

/// A store, with its temporary directory or database.
pub struct Opened {
    pub store: Box<dyn Store>,
    _directory: Option<TempDir>,
    database: Option<database::Database>,
}

impl Opened {
    pub async fn close(self) {
        drop(self.store);
        if let Some(database) = self.database {
            database.drop().await;
        }
    }
}

pub fn memory() -> Opened {
    Opened { store: Box::new(MemoryStore::default()), _directory: None, database: None }
}

pub fn sqlite() -> Opened {
    let directory = tempfile::tempdir().unwrap();
    let store = SqliteStore::open_for_admin(&database_in(&directory)).unwrap();
    Opened { store: Box::new(store), _directory: Some(directory), database: None }
}

pub fn database_in(directory: &TempDir) -> PathBuf {
    directory.path().join("toolcrib.db")
}

/// Returns the path of the database's file with this suffix: `-wal`, `-shm`.
pub fn file_with_suffix(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(ending);
    name.into()
}

/// Returns a new id that sorts by this time, like the engine's ids.
pub fn id_at(at_ms: u64) -> CallId {
    static LAST: AtomicU64 = AtomicU64::new(0);
    let next = LAST.fetch_add(1, Ordering::Relaxed);
    let time = &CallId::min_at(at_ms).as_str()[..CallId::PREFIX.len() + 10].to_owned();
    format!("{time}{next:016}").parse().unwrap()
}

pub fn json(text: &str) -> Json {
    Json::parse(text).unwrap()
}

/// A pending call of project `p` in the queue.
pub fn call() -> Call {
    call_at(NOW)
}

pub fn call_at(created_ms: u64) -> Call {
    Call {
        id: id_at(created_ms),
        project: "p".into(),
        run_id: "run".into(),
        tool_name: "weather.query".into(),
        origin: Origin { agent: "ada".into(), ..Origin::default() },
        args: json(r#"{"city":"Oslo"}"#),
        target: target("weather.query", r#"{"city":"Oslo"}"#),
        fallbacks: vec![],
        max_retries: 2,
        backoff: Backoff::default(),
        attempt_timeout_ms: None,
        input_timeout_ms: 3_600_000,
        status: Status::Pending,
        hold: Some(Hold::Queue),
        attempt: 0,
        target_attempts: 0,
        acknowledged_by: None,
        elicitation: None,
        approval: None,
        failed_attempt: None,
        lost_attempts: 0,
        node: None,
        created_ms,
        deadline_ms: created_ms + 30_000,
        attempt_deadline_ms: None,
        started_ms: None,
        attempt_dispatched_ms: None,
        completed_ms: None,
        outcome: None,
        version: 1,
    }
}

pub fn target(tool: &str, args: &str) -> Target {
    Target {
        tool: tool.into(),
        version: "v1".into(),
        executor: Executor::BUILTIN,
        traits: Executor::BUILTIN.traits(),
        effect: Effect::Read,
        after_execution: None,
        args: json(args),
    }
}

/// A call of this project, run and tool.
pub fn call_of(project: &str, run_id: &str, tool: &str) -> Call {
    let (project, run_id) = (project.to_owned(), run_id.to_owned());
    let target = target(tool, "{}");
    let (tool_name, args) = (tool.to_owned(), target.args.clone());
    Call { project, run_id, tool_name, args, target, ..call() }
}

/// The next version of a call: running.
pub fn running(call: &Call) -> Call {
    Call {
        status: Status::Running,
        hold: None,
        attempt: call.attempt + 1,
        target_attempts: call.target_attempts + 1,
        node: Some("node-1".into()),
        started_ms: Some(call.created_ms + 5),
        attempt_dispatched_ms: Some(call.created_ms + 5),
        version: call.version + 1,
        ..call.clone()
    }
}

/// The next version of a call: ended with this status at this time.
pub fn ended(call: &Call, status: Status, completed_ms: u64) -> Call {
    let ok = status == Status::Succeeded;
    let (created_ms, started_ms) = (call.created_ms, call.started_ms);
    let metrics = CallMetrics::from_timestamps(created_ms, started_ms, completed_ms, call.attempt);
    let (data, error) = if ok {
        (Some(json(r#"{"sky":"clear"}"#)), None)
    } else {
        (None, Some(Fault::runtime("it broke")))
    };
    Call {
        status,
        hold: None,
        completed_ms: Some(completed_ms),
        outcome: Some(Outcome { ok, partial: false, data, error, metrics }),
        version: call.version + 1,
        ..call.clone()
    }
}

/// Stores a call and brings it to this status in as few versions as possible.
pub async fn put_with_status(store: &dyn Store, call: &Call, status: Status) -> Call {
    put(store, call).await;
    let next = match status {
        Status::Pending => return call.clone(),
        Status::Running => running(call),
        _ => ended(call, status, call.created_ms + 12),
    };
    save(store, &next).await;
    next
}

pub fn requested() -> EventRecord {
    record(EventKind::Requested)
}

pub fn record(kind: EventKind) -> EventRecord {
    EventRecord::new(kind, NOW, 1)
}

pub fn key(agent: &str, key: &str, fingerprint: &str) -> IdempotencyKey {
    IdempotencyKey { agent: agent.into(), key: key.into(), fingerprint: fingerprint.into() }
}

/// A pending reply of the store.
pub type Answer<'a, T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send + 'a>>;

/// Starts to store a new call.
pub fn creating<'a>(
    store: &'a dyn Store,
    call: &Call,
    records: Vec<EventRecord>,
    key: Option<IdempotencyKey>,
) -> Answer<'a, CreateCallResult> {
    store.create_call(NewCall {
        call: Arc::new(call.clone()),
        records,
        key,
        undelivered: None,
        approval: None,
        group_member: None,
    })
}

/// Starts to store the next version of a call.
pub fn saving<'a>(
    store: &'a dyn Store,
    call: &Call,
    records: Vec<EventRecord>,
) -> Answer<'a, SaveResult> {
    store.save_call(Arc::new(call.clone()), records)
}

/// Stores a new call with one event and no idempotency key.
pub async fn put(store: &dyn Store, call: &Call) {
    let created = creating(store, call, vec![requested()], None).await.unwrap();
    assert!(matches!(created, CreateCallResult::New));
}

/// Stores a new call with one event and this idempotency key, and returns the result.
pub async fn put_keyed(store: &dyn Store, call: &Call, key: &IdempotencyKey) -> CreateCallResult {
    creating(store, call, vec![requested()], Some(key.clone())).await.unwrap()
}

/// Saves the next version of a call, without an event.
pub async fn save(store: &dyn Store, call: &Call) {
    assert_eq!(saving(store, call, vec![]).await.unwrap(), SaveResult::Saved);
}

/// Reads the stored call with this one's id.
pub async fn read(store: &dyn Store, call: &Call) -> Call {
    found(store, call).await.expect("the call is stored")
}

pub async fn found(store: &dyn Store, call: &Call) -> Option<Call> {
    store.call(&call.project, &call.id).await.unwrap()
}

/// Appends one event to a call.
pub async fn append(store: &dyn Store, call: &Call, record: EventRecord) {
    store.append_records(&call.project, &call.id, vec![record]).await.unwrap();
}

/// Returns the ids of all calls of a project, newest first.
pub async fn ids_of(store: &dyn Store, project: &str) -> Vec<CallId> {
    ids(store, CallFilter { project: project.into(), limit: 10_000, ..CallFilter::default() }).await
}

pub async fn ids(store: &dyn Store, filter: CallFilter) -> Vec<CallId> {
    store.calls(filter).await.unwrap().into_iter().map(|call| call.id).collect()
}

/// Returns every event in scope.
pub async fn history(store: &dyn Store, scope: EventScope) -> Vec<CallEvent> {
    store.events(scope, 0, 10_000).await.unwrap()
}

pub fn of_call(call: &Call) -> EventScope {
    EventScope::Call { project: call.project.clone(), id: call.id.clone() }
}

pub fn of_project(project: &str) -> EventScope {
    EventScope::Project(project.to_owned())
}

pub fn of_run(project: &str, run_id: &str) -> EventScope {
    EventScope::Run { project: project.to_owned(), run_id: run_id.to_owned() }
}

/// Runs the same work on several threads at once and returns the result of each.
pub fn on_threads<T: Send>(threads: usize, work: impl AsyncFn(usize) -> T + Sync) -> Vec<T> {
    let work = &work;
    let one = |n| tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(work(n));
    std::thread::scope(|scope| {
        let all: Vec<_> = (0..threads).map(|n| scope.spawn(move || one(n))).collect();
        all.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}
