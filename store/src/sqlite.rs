//! The SQLite store: opens the database and implements the `Store` port with one writer and a few
//! concurrent readers.

mod call_queries;
mod calls;
mod credentials;
mod deliveries;
mod directory;
mod event_numbers;
mod events;
pub(crate) mod migrate;
mod open_calls;
mod purge;
mod reader;
mod run_tools;
mod runs;
mod upstreams;
mod utp;
mod writer;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use calls::CallInsert;
use migrate::{check_schema_version, migrate};
use open_calls::OpenCalls;
use reader::ReadConnectionPool;
use rusqlite::{Connection, OpenFlags};
use tokio::sync::{Semaphore, oneshot};
use toolcrib::domain::call::Call;
use toolcrib::domain::delivery::{Delivery, DeliveryAttempt};
use toolcrib::domain::directory::{AuditEntry, Directory, DirectoryChange};
use toolcrib::domain::event::{CallEvent, EventKind, EventRecord};
use toolcrib::domain::id::CallId;
use toolcrib::ports::store::{
    CallFilter, CreateCallResult, DeliveryFilter, EventScope, GroupMember, IdempotencyKey, NewCall,
    OpenCallRow, PurgeResult, RunToolDefinitions, SaveResult, Store, StoreError,
};
use writer::{FunctionChange, NewCallRow, SqliteWriter, WalPreallocation, WriterConnection};

use crate::file_permissions;
use crate::row::{ApprovalRow, CallRow, encode_events, encode_new_call_events};

/// Maximum number of concurrent reads. Each has a thread, a connection and a page cache; more would
/// only compete for the same disk and cores.
const MAX_CONCURRENT_READS: usize = 16;

/// The reason why a SQLite database was not opened.
#[derive(Debug, thiserror::Error)]
pub enum SqliteOpenError {
    /// The database was written by a newer version of Toolcrib.
    #[error(
        "the database has schema version {found}, and this program knows up to {known}: it was \
         used by a newer toolcrib; start that one, or restore an older copy"
    )]
    NewerSchema { found: i64, known: i64 },
    /// The file is a database of another program.
    #[error("the file is a database of another program; choose another data directory")]
    ForeignDatabase,
    /// SQLite returned an error.
    #[error("the database cannot be opened")]
    Sqlite(#[from] rusqlite::Error),
    /// The directory, the file or the writer thread could not be created.
    #[error("the database cannot be opened")]
    Io(#[from] std::io::Error),
}

/// A store in one SQLite file.
pub struct SqliteStore {
    writer: SqliteWriter,
    readers: Arc<ReadConnectionPool>,
    read_permits: Arc<Semaphore>,
    open_calls: OpenCalls,
    path: PathBuf,
}

impl SqliteStore {
    /// Opens a database, creates it if it does not exist, and migrates it to the current schema
    /// version.
    pub fn open(path: &Path) -> Result<Self, SqliteOpenError> {
        Self::open_with(path, WalPreallocation::Enabled)
    }

    /// Opens a database like [`open`](Self::open), but without the preparation for many commits:
    /// for a command that reads the store or makes a single change.
    pub fn open_for_admin(path: &Path) -> Result<Self, SqliteOpenError> {
        Self::open_with(path, WalPreallocation::Disabled)
    }

    fn open_with(path: &Path, wal: WalPreallocation) -> Result<Self, SqliteOpenError> {
        file_permissions::create_owner_only(path)?;
        // Only one thread uses this connection, so SQLite need not lock it.
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE
            | OpenFlags::SQLITE_OPEN_CREATE
            | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let mut connection = Connection::open_with_flags(path, flags)?;
        connection.busy_timeout(reader::BUSY_TIMEOUT)?;
        // Check before any change: the switch to WAL mode is written into the file.
        check_schema_version(&connection)?;
        connection.execute_batch(
            "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA foreign_keys = ON;",
        )?;
        migrate(&mut connection)?;
        let open_calls = OpenCalls::load(&connection)?;
        let writer = SqliteWriter::start(connection, path, wal, open_calls.clone())?;
        let readers = Arc::new(ReadConnectionPool::new(path.to_owned()));
        let read_permits = Arc::new(Semaphore::new(MAX_CONCURRENT_READS));
        Ok(Self { writer, readers, read_permits, open_calls, path: path.to_owned() })
    }

    /// Runs SQLite's quick integrity check and returns its report: `ok`, or the first problem.
    pub async fn check_integrity(&self) -> Result<String, StoreError> {
        self.read(|connection| {
            connection
                .query_row("PRAGMA quick_check(1)", [], |row| row.get(0))
                .map_err(|error| reader::to_store_error(&error))
        })
        .await
    }

    /// Makes a change in the writer's next commit.
    async fn write<T: Send + 'static>(
        &self,
        function: impl FnMut(&mut WriterConnection) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, StoreError> {
        let (reply, answer) = oneshot::channel();
        self.writer.send(Box::new(FunctionChange::new(function, reply)))?;
        await_reply(answer).await
    }

    async fn read<T: Send + 'static>(
        &self,
        query: impl FnOnce(&Connection) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        let to_unavailable = |_| StoreError::Unavailable("the store is closed".to_owned());
        let permit = self.read_permits.clone().acquire_owned().await.map_err(to_unavailable)?;
        let readers = self.readers.clone();
        // The permit is released when the read ends, even if its caller no longer waits.
        let read =
            tokio::task::spawn_blocking(move || (readers.with_connection(query), permit).0).await;
        read.map_err(|error| StoreError::Unavailable(error.to_string()))?
    }
}

/// Waits for the writer's reply.
async fn await_reply<T>(answer: oneshot::Receiver<Result<T, StoreError>>) -> Result<T, StoreError> {
    let to_unavailable = |_| StoreError::Unavailable("the writer has stopped".to_owned());
    answer.await.map_err(to_unavailable)?
}

/// Writes a value that has no reader: a probe that writes nothing would not detect a full disk.
fn write_probe(connection: &Connection) -> rusqlite::Result<()> {
    connection
        .prepare_cached(
            "INSERT INTO counters VALUES ('checks', 1) \
             ON CONFLICT (name) DO UPDATE SET value = value + 1",
        )?
        .execute([])
        .map(|_| ())
}

#[async_trait]
impl Store for SqliteStore {
    async fn create_call(&self, new: NewCall) -> Result<CreateCallResult, StoreError> {
        let records = encode_new_call_events(&new.call, new.records)?;
        let row = CallRow::for_insert(new.call)?;
        let approval = new.approval.map(|new| ApprovalRow::with_audit(*new)).transpose()?;
        let group = new.group_member.as_ref().map(GroupMember::group);
        let (reply, answer) = oneshot::channel();
        self.writer.send(Box::new(CallInsert {
            new: Some(NewCallRow { row, records }),
            key: new.key,
            undelivered: new.undelivered,
            approval,
            group: group.clone(),
            result: CreateCallResult::New,
            reply,
        }))?;
        drop(new.group_member);
        if group.is_some_and(|group| !group.has_pending()) {
            self.writer.notify_group_complete();
        }
        await_reply(answer).await
    }

    async fn find_by_idempotency_key(
        &self,
        project: &str,
        key: &IdempotencyKey,
    ) -> Result<Option<CreateCallResult>, StoreError> {
        let (project, key) = (project.to_owned(), key.clone());
        self.read(move |connection| {
            call_queries::find_by_idempotency_key(connection, &project, &key)
                .map_err(|error| reader::to_store_error(&error))
        })
        .await
    }

    async fn save_call(
        &self,
        call: Arc<Call>,
        records: Vec<EventRecord>,
    ) -> Result<SaveResult, StoreError> {
        let row = CallRow::for_update(call)?;
        let records = encode_events(records)?;
        self.write(move |writer| calls::save_call(writer, &row, &records)).await
    }

    async fn append_records(
        &self,
        project: &str,
        id: &CallId,
        records: Vec<EventRecord>,
    ) -> Result<(), StoreError> {
        let (project, id, records) = (project.to_owned(), id.clone(), encode_events(records)?);
        self.write(move |writer| calls::append_events(writer, &project, &id, &records)).await
    }

    async fn call(&self, project: &str, id: &CallId) -> Result<Option<Call>, StoreError> {
        let (project, id) = (project.to_owned(), id.clone());
        self.read(move |connection| call_queries::find_call(connection, &project, &id)).await
    }

    async fn calls(&self, filter: CallFilter) -> Result<Vec<Call>, StoreError> {
        let open = self.open_calls.clone();
        self.read(move |connection| call_queries::list_calls(connection, &filter, &open)).await
    }

    async fn open_calls(&self, after: u64, limit: usize) -> Result<Vec<OpenCallRow>, StoreError> {
        let open = self.open_calls.clone();
        self.read(move |connection| call_queries::list_open_calls(connection, &open, after, limit))
            .await
    }

    async fn events(
        &self,
        scope: EventScope,
        after: u64,
        limit: usize,
    ) -> Result<Vec<CallEvent>, StoreError> {
        self.read(move |connection| events::list_events(connection, &scope, after, limit)).await
    }

    async fn last_event_number(&self, scope: EventScope) -> Result<u64, StoreError> {
        self.read(move |connection| events::last_event_number(connection, &scope)).await
    }

    async fn run_tool_definitions(
        &self,
        project: &str,
        run_id: &str,
    ) -> Result<Option<RunToolDefinitions>, StoreError> {
        let (project, run_id) = (project.to_owned(), run_id.to_owned());
        self.read(move |connection| run_tools::find_run_tools(connection, &project, &run_id)).await
    }

    async fn put_run_tool_definitions(&self, run: RunToolDefinitions) -> Result<(), StoreError> {
        self.write(move |writer| run_tools::put_run_tools(writer.connection()?, &run)).await
    }

    async fn last_record(
        &self,
        project: &str,
        id: &CallId,
        kind: EventKind,
    ) -> Result<Option<EventRecord>, StoreError> {
        let (project, id) = (project.to_owned(), id.clone());
        self.read(move |connection| events::newest_record(connection, &project, &id, kind)).await
    }

    async fn pending_deliveries(
        &self,
        after: Option<(u64, CallId)>,
        limit: usize,
    ) -> Result<Vec<Delivery>, StoreError> {
        self.read(move |connection| deliveries::list_pending(connection, after.as_ref(), limit))
            .await
    }

    async fn deliveries(&self, filter: DeliveryFilter) -> Result<Vec<Delivery>, StoreError> {
        self.read(move |connection| deliveries::list(connection, &filter)).await
    }

    async fn delivery(
        &self,
        project: &str,
        id: &CallId,
    ) -> Result<Option<(Delivery, Vec<DeliveryAttempt>)>, StoreError> {
        let (project, id) = (project.to_owned(), id.clone());
        self.read(move |connection| deliveries::find_delivery(connection, &project, &id)).await
    }

    async fn save_delivery(
        &self,
        delivery: Delivery,
        tried: Option<DeliveryAttempt>,
    ) -> Result<SaveResult, StoreError> {
        self.write(move |writer| {
            deliveries::save_delivery(writer.connection()?, &delivery, tried.as_ref())
        })
        .await
    }

    async fn purge(&self, ended_before_ms: u64, limit: usize) -> Result<PurgeResult, StoreError> {
        self.write(move |writer| purge::purge(writer, ended_before_ms, limit)).await
    }

    async fn directory_version(&self) -> Result<u64, StoreError> {
        self.read(directory::read_version).await
    }

    async fn directory(&self) -> Result<Directory, StoreError> {
        self.read(directory::load).await
    }

    async fn change_directory(
        &self,
        change: DirectoryChange,
        decided_on: u64,
        audit: Option<AuditEntry>,
    ) -> Result<SaveResult, StoreError> {
        self.write(move |writer| {
            directory::apply_change(writer.connection()?, &change, decided_on, audit.as_ref())
        })
        .await
    }

    async fn record_time(&self, at_ms: u64) -> Result<(), StoreError> {
        self.write(move |writer| directory::record_time(writer.connection()?, at_ms)).await
    }

    async fn append_audit_entry(&self, entry: AuditEntry) -> Result<(), StoreError> {
        self.write(move |writer| directory::audit::insert_audit_entry(writer.connection()?, &entry))
            .await
    }

    fn audit(&self) -> &dyn toolcrib::ports::store::audit::AuditStore {
        self
    }

    async fn check_health(&self) -> Result<(), StoreError> {
        self.read(|connection| directory::read_version(connection).map(|_| ())).await?;
        self.write(|writer| write_probe(writer.connection()?)).await
    }

    async fn wait_for_failure(&self) -> String {
        self.writer.wait_for_flush_failure().await.to_owned()
    }

    fn utp(&self) -> &dyn toolcrib::ports::store::utp::UtpStore {
        self
    }

    fn runs(&self) -> &dyn toolcrib::ports::store::runs::RunStore {
        self
    }

    fn usage(&self) -> &dyn toolcrib::ports::store::usage::UsageStore {
        self
    }

    fn undelivered(&self) -> &dyn toolcrib::ports::store::undelivered::UndeliveredRequestStore {
        self
    }

    fn agents(&self) -> &dyn toolcrib::ports::store::agents::AgentStore {
        self
    }

    fn approvals(&self) -> &dyn toolcrib::ports::store::approvals::ApprovalStore {
        self
    }

    fn rule_history(&self) -> &dyn toolcrib::ports::store::rule_history::RuleHistoryStore {
        self
    }

    fn credentials(&self) -> &dyn toolcrib::ports::store::credentials::UpstreamCredentialStore {
        self
    }

    async fn size_bytes(&self) -> Result<u64, StoreError> {
        let path = self.path.clone();
        let sum = move || {
            let files = ["", "-wal"].map(|end| {
                let mut name = path.clone().into_os_string();
                name.push(end);
                std::fs::metadata(name).map_or(0, |file| file.len())
            });
            files.iter().sum()
        };
        let summed = tokio::task::spawn_blocking(sum).await;
        summed.map_err(|error| StoreError::Unavailable(error.to_string()))
    }
}
