//! The SQLite store: opens the database and implements the `Store` port with one writer and a few
//! concurrent readers.

mod changes;
mod deliveries;
mod directory;
mod grants;
mod history;
mod line;
mod log;
mod loops;
mod newcomers;
mod op;
mod open;
mod reader;
mod runs;
mod upstreams;
mod utp;
mod writer;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use rusqlite::{Connection, OpenFlags};
use tokio::sync::{Semaphore, oneshot};
use toolcrib::call::Call;
use toolcrib::delivery::{Delivery, Try};
use toolcrib::directory::{AuditEntry, Change, Directory};
use toolcrib::event::{Event, Kind, Record};
use toolcrib::id::CallId;
use toolcrib::store::{
    CallFilter, Coming, Created, DeliveryFilter, EventScope, IdempotencyKey, NewCall, Open, Purged,
    Run, Saved, Store, StoreError,
};

use crate::migrate::{check, migrate};
use crate::private;
use crate::row::{CallRow, first_records, record_rows};
use op::Op;
use open::OpenCalls;
use reader::Readers;
use writer::Writer;

/// Maximum number of concurrent reads. Each has a thread, a connection and a page cache; more would
/// only compete for the same disk and cores.
const MAX_READING: usize = 16;

/// The reason why a SQLite database was not opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The database was written by a newer version of Toolcrib.
    #[error(
        "the database has schema version {found}, and this program knows up to {known}: it was \
         used by a newer toolcrib; start that one, or restore an older copy"
    )]
    Newer { found: i64, known: i64 },
    /// The file is a database of another program.
    #[error("the file is a database of another program; choose another data directory")]
    NotOurs,
    /// SQLite returned an error.
    #[error("the database cannot be opened")]
    Sqlite(#[from] rusqlite::Error),
    /// The directory, the file or the writer thread could not be created.
    #[error("the database cannot be opened")]
    Io(#[from] std::io::Error),
}

/// A store in one SQLite file.
pub struct SqliteStore {
    writer: Writer,
    readers: Arc<Readers>,
    turns: Arc<Semaphore>,
    open: OpenCalls,
    path: PathBuf,
}

impl SqliteStore {
    /// Opens a database, creates it if it does not exist, and migrates it to the current schema
    /// version.
    pub fn open(path: &Path) -> Result<Self, OpenError> {
        Self::open_with(path, writer::Log::Grown)
    }

    /// Opens a database like [`open`](Self::open), but without the preparation for many commits:
    /// for a command that reads the store or makes a single change.
    pub fn open_briefly(path: &Path) -> Result<Self, OpenError> {
        Self::open_with(path, writer::Log::AsItIs)
    }

    fn open_with(path: &Path, log: writer::Log) -> Result<Self, OpenError> {
        private::make(path)?;
        // Only one thread uses this connection, so SQLite need not lock it.
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE
            | OpenFlags::SQLITE_OPEN_CREATE
            | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let mut connection = Connection::open_with_flags(path, flags)?;
        connection.busy_timeout(writer::BUSY)?;
        // Check before any change: the switch to WAL mode is written into the file.
        check(&connection)?;
        connection.execute_batch(
            "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA foreign_keys = ON;",
        )?;
        migrate(&mut connection)?;
        let open = OpenCalls::load(&connection)?;
        let writer = Writer::start(connection, path, log, open.clone())?;
        let readers = Arc::new(Readers::new(path.to_owned()));
        let turns = Arc::new(Semaphore::new(MAX_READING));
        Ok(Self { writer, readers, turns, open, path: path.to_owned() })
    }

    /// Runs SQLite's quick integrity check and returns its report: `ok`, or the first problem.
    pub async fn integrity(&self) -> Result<String, StoreError> {
        self.read(|connection| {
            connection
                .query_row("PRAGMA quick_check(1)", [], |row| row.get(0))
                .map_err(|error| reader::failed(&error))
        })
        .await
    }

    async fn write<T: Send + 'static>(
        &self,
        op: impl FnOnce(oneshot::Sender<Result<T, StoreError>>) -> Op,
    ) -> Result<T, StoreError> {
        let (reply, answer) = oneshot::channel();
        self.writer.send(op(reply))?;
        answered(answer).await
    }

    /// Runs a closure in the writer's next commit. The closure must not fail because of the data it
    /// handles: an error fails every change that shares the commit.
    async fn work<T: Send + 'static>(
        &self,
        mut work: impl FnMut(&Connection) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, StoreError> {
        let made = Arc::new(parking_lot::Mutex::new(None));
        let slot = made.clone();
        let work = Box::new(move |connection: &Connection| {
            *slot.lock() = Some(work(connection)?);
            Ok(())
        });
        self.write(|reply| Op::Work { work, reply }).await?;
        let gone = || StoreError::Unavailable("the writer has stopped".to_owned());
        made.lock().take().ok_or_else(gone)
    }

    async fn read<T: Send + 'static>(
        &self,
        look: impl FnOnce(&Connection) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        let gone = |_| StoreError::Unavailable("the store is closed".to_owned());
        let turn = self.turns.clone().acquire_owned().await.map_err(gone)?;
        let readers = self.readers.clone();
        // The permit is released when the read ends, even if its caller no longer waits.
        let read = tokio::task::spawn_blocking(move || (readers.with(look), turn).0).await;
        read.map_err(|error| StoreError::Unavailable(error.to_string()))?
    }
}

/// Waits for the writer's reply.
async fn answered<T>(answer: oneshot::Receiver<Result<T, StoreError>>) -> Result<T, StoreError> {
    let gone = |_| StoreError::Unavailable("the writer has stopped".to_owned());
    answer.await.map_err(gone)?
}

#[async_trait]
impl Store for SqliteStore {
    async fn create(&self, new: NewCall) -> Result<Created, StoreError> {
        let records = first_records(&new.call, new.records)?;
        let row = Box::new(CallRow::first(new.call)?);
        let (key, together) = (new.key, new.coming.as_ref().map(Coming::together));
        let (reply, answer) = oneshot::channel();
        self.writer.send(Op::Create { row, records, key, together: together.clone(), reply })?;
        drop(new.coming);
        if together.is_some_and(|together| !together.more()) {
            self.writer.all_came();
        }
        answered(answer).await
    }

    async fn used(
        &self,
        project: &str,
        key: &IdempotencyKey,
    ) -> Result<Option<Created>, StoreError> {
        let (project, key) = (project.to_owned(), key.clone());
        self.read(move |connection| {
            changes::used(connection, &project, &key).map_err(|error| reader::failed(&error))
        })
        .await
    }

    async fn save(&self, call: Arc<Call>, records: Vec<Record>) -> Result<Saved, StoreError> {
        let row = Box::new(CallRow::next(call)?);
        let records = record_rows(records)?;
        self.write(|reply| Op::Save { row, records, reply }).await
    }

    async fn append(
        &self,
        project: &str,
        id: &CallId,
        records: Vec<Record>,
    ) -> Result<(), StoreError> {
        let (project, id, records) = (project.to_owned(), id.clone(), record_rows(records)?);
        self.write(|reply| Op::Append { project, id, records, reply }).await
    }

    async fn call(&self, project: &str, id: &CallId) -> Result<Option<Call>, StoreError> {
        let (project, id) = (project.to_owned(), id.clone());
        self.read(move |connection| reader::call(connection, &project, &id)).await
    }

    async fn calls(&self, filter: CallFilter) -> Result<Vec<Call>, StoreError> {
        let open = self.open.clone();
        self.read(move |connection| reader::calls(connection, &filter, &open)).await
    }

    async fn open_calls(&self, after: u64, limit: usize) -> Result<Vec<Open>, StoreError> {
        let open = self.open.clone();
        self.read(move |connection| reader::open_calls(connection, &open, after, limit)).await
    }

    async fn events(
        &self,
        scope: EventScope,
        after: u64,
        limit: usize,
    ) -> Result<Vec<Event>, StoreError> {
        self.read(move |connection| history::events(connection, &scope, after, limit)).await
    }

    async fn newest_event(&self, scope: EventScope) -> Result<u64, StoreError> {
        self.read(move |connection| history::newest_event(connection, &scope)).await
    }

    async fn run(&self, project: &str, run_id: &str) -> Result<Option<Run>, StoreError> {
        let (project, run_id) = (project.to_owned(), run_id.to_owned());
        self.read(move |connection| runs::run(connection, &project, &run_id)).await
    }

    async fn put_run(&self, run: Run) -> Result<(), StoreError> {
        let run = Box::new(run);
        self.write(|reply| Op::PutRun { run, reply }).await
    }

    async fn newest_record(
        &self,
        project: &str,
        id: &CallId,
        kind: Kind,
    ) -> Result<Option<Record>, StoreError> {
        let (project, id) = (project.to_owned(), id.clone());
        self.read(move |connection| history::newest_record(connection, &project, &id, kind)).await
    }

    async fn pending_deliveries(
        &self,
        after: Option<(u64, CallId)>,
        limit: usize,
    ) -> Result<Vec<Delivery>, StoreError> {
        self.read(move |connection| deliveries::pending(connection, after.as_ref(), limit)).await
    }

    async fn deliveries(&self, filter: DeliveryFilter) -> Result<Vec<Delivery>, StoreError> {
        self.read(move |connection| deliveries::list(connection, &filter)).await
    }

    async fn delivery(
        &self,
        project: &str,
        id: &CallId,
    ) -> Result<Option<(Delivery, Vec<Try>)>, StoreError> {
        let (project, id) = (project.to_owned(), id.clone());
        self.read(move |connection| deliveries::one(connection, &project, &id)).await
    }

    async fn save_delivery(
        &self,
        delivery: Delivery,
        tried: Option<Try>,
    ) -> Result<Saved, StoreError> {
        let delivery = Box::new(delivery);
        self.write(|reply| Op::Deliver { delivery, tried, reply }).await
    }

    async fn purge(&self, ended_before_ms: u64, limit: usize) -> Result<Purged, StoreError> {
        self.write(|reply| Op::Purge { ended_before_ms, limit, reply }).await
    }

    async fn directory_version(&self) -> Result<u64, StoreError> {
        self.read(directory::version).await
    }

    async fn directory(&self) -> Result<Directory, StoreError> {
        self.read(directory::load).await
    }

    async fn change(
        &self,
        change: Change,
        decided_on: u64,
        audit: Option<AuditEntry>,
    ) -> Result<Saved, StoreError> {
        let change = Box::new(change);
        self.write(|reply| Op::Change { change, decided_on, audit, reply }).await
    }

    async fn audit(&self, entry: AuditEntry) -> Result<(), StoreError> {
        self.write(|reply| Op::Audit { entry, reply }).await
    }

    async fn audit_log(
        &self,
        project: Option<String>,
        limit: usize,
    ) -> Result<Vec<AuditEntry>, StoreError> {
        self.read(move |connection| directory::audit_log(connection, project.as_deref(), limit))
            .await
    }

    async fn check(&self) -> Result<(), StoreError> {
        self.read(|connection| directory::version(connection).map(|_| ())).await?;
        self.write(|reply| Op::Check { reply }).await
    }

    fn utp(&self) -> &dyn toolcrib::store::utp::UtpStore {
        self
    }

    fn loops(&self) -> &dyn toolcrib::store::loops::LoopStore {
        self
    }

    fn grants(&self) -> &dyn toolcrib::store::grants::GrantStore {
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
