//! The single writer: takes all queued changes, commits them in one transaction, then replies to
//! every caller.
//!
//! Group commit makes `synchronous=FULL` affordable: one flush serves all waiting callers. The WAL
//! is preallocated once and then overwritten again and again. Checkpoints run between groups, when
//! the writer is idle or the WAL has become long.
//!
//! When a group fails (disk full, database locked), the writer rolls all of it back and reports the
//! failure to every caller: none of its changes happened. When a flush fails, the state of the disk
//! is unknown: the writer accepts no more changes until the process restarts.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rusqlite::{Connection, OptionalExtension};
use toolcrib::domain::id::CallId;
use toolcrib::ports::store::{CommitGroup, StoreError};

use super::directory;
use super::reader::to_store_error;
use crate::sqlite::calls::inserts::PendingInsert;
use crate::sqlite::change::{PendingReply, SqliteChange, fail_change};
use crate::sqlite::events::newest_event_number;
use crate::sqlite::open_calls::OpenCalls;
use crate::sqlite::run_tools;
use crate::sqlite::wal::WalPreallocator;
use crate::sqlite::write_queue::{PopResult, PushError, WriteQueue};

/// Maximum time a group waits for another process to release the database.
pub(super) const BUSY_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of changes that share a flush.
const MAX_GROUP: usize = 512;
/// Maximum number of queued changes. More are refused, because they would only wait longer.
const QUEUE_CAPACITY: usize = 65_536;
/// Maximum time a group waits for a call that has been announced.
const GROUP_MEMBER_TIMEOUT: Duration = Duration::from_micros(50);
/// SQLite runs a checkpoint when the WAL has this many pages; the idle writer runs one after this
/// many changes.
const CHECKPOINT_PAGES: u32 = 4_096;
const IDLE_CHECKPOINT_CHANGES: u32 = 1_000;
/// The writer is idle when no change arrived for this long.
const IDLE_AFTER: Duration = Duration::from_millis(100);
/// Number of ended calls after which the writer advances the low watermark.
const WATERMARK_INTERVAL: usize = 1_000;

/// Controls whether the writer preallocates the WAL.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum WalPreallocation {
    Enabled,
    Disabled,
}

/// A handle to the writer thread.
pub(super) struct SqliteWriter {
    queue: Arc<WriteQueue<SqliteChange>>,
    flush_failed: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl SqliteWriter {
    pub(super) fn start(
        connection: Connection,
        path: &Path,
        log: WalPreallocation,
        open: OpenCalls,
    ) -> Result<Self, super::SqliteOpenError> {
        connection.set_prepared_statement_cache_capacity(64);
        connection.pragma_update(None, "wal_autocheckpoint", CHECKPOINT_PAGES)?;
        let line = Arc::new(WriteQueue::new(QUEUE_CAPACITY));
        let broken = Arc::new(AtomicBool::new(false));
        let (flag, last_number) = (broken.clone(), load_last_event_number(&connection)?);
        let mut desk = WriterThread {
            connection,
            last_event_number: last_number,
            flush_failed: flag,
            changes_since_checkpoint: 0,
            open_calls: open,
            opened_in_group: Vec::new(),
            ended_in_group: Vec::new(),
            open_call_places: HashMap::new(),
            pending_inserts: Vec::new(),
            ended_since_watermark: 0,
            maintains_low_watermark: log == WalPreallocation::Enabled,
            wal_preallocator: (log == WalPreallocation::Enabled)
                .then(|| WalPreallocator::for_database(path)),
        };
        let thread = std::thread::Builder::new().name("store-writer".to_owned()).spawn({
            let taken = WriteQueueGuard(line.clone());
            move || desk.run(&taken.0)
        })?;
        Ok(Self { queue: line, flush_failed: broken, thread: Some(thread) })
    }

    /// Signals that all announced calls have been queued.
    pub(super) fn notify_group_complete(&self) {
        self.queue.notify_group_complete();
    }

    pub(super) fn send(&self, op: SqliteChange) -> Result<(), StoreError> {
        let unavailable = |why: &str| Err(StoreError::Unavailable(why.to_owned()));
        if self.flush_failed.load(Ordering::Acquire) {
            return unavailable(FLUSH_FAILED);
        }
        match self.queue.push(op) {
            Ok(()) => Ok(()),
            Err(PushError::Full) => unavailable("too much waits to be written"),
            Err(PushError::Closed) => unavailable("the writer has stopped"),
        }
    }
}

/// The writer thread's handle to the queue. However the thread ends, dropping the guard closes the
/// queue and drops every queued change, so that no caller waits forever.
struct WriteQueueGuard(Arc<WriteQueue<SqliteChange>>);

impl Drop for WriteQueueGuard {
    fn drop(&mut self) {
        self.0.close();
        while self.0.try_pop().is_some() {}
    }
}

/// Commits everything that was sent before the store is gone.
impl Drop for SqliteWriter {
    fn drop(&mut self) {
        self.queue.close();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

const FLUSH_FAILED: &str =
    "a flush to disk failed, so nobody can know what is stored; restart the server";

/// Returns the last event number in use. Numbering continues after it even if the newest events
/// were purged.
fn load_last_event_number(connection: &Connection) -> rusqlite::Result<i64> {
    let newest = newest_event_number(connection)?;
    let counted: Option<i64> = connection
        .query_row("SELECT value FROM counters WHERE name = 'last_event'", [], |row| row.get(0))
        .optional()?;
    Ok(newest.max(counted.unwrap_or(0)))
}

/// The state of the writer thread.
pub(super) struct WriterThread {
    pub(super) connection: Connection,
    pub(super) last_event_number: i64,
    flush_failed: Arc<AtomicBool>,
    /// Number of changes since the last checkpoint.
    changes_since_checkpoint: u32,
    open_calls: OpenCalls,
    /// Calls that the current group opened and ended; applied to `open_calls` after the commit.
    pub(super) opened_in_group: Vec<(i64, CallId)>,
    pub(super) ended_in_group: Vec<(i64, CallId)>,
    /// Project and place of each open call that this writer inserted.
    pub(super) open_call_places: HashMap<CallId, (Box<str>, i64)>,
    /// New calls that the current group has not written yet.
    pub(super) pending_inserts: Vec<PendingInsert>,
    ended_since_watermark: usize,
    /// Only the writer of a server knows all open calls.
    maintains_low_watermark: bool,
    /// Set until the WAL has its target length.
    wal_preallocator: Option<WalPreallocator>,
}

impl WriterThread {
    fn run(&mut self, line: &WriteQueue<SqliteChange>) {
        let mut group = Vec::with_capacity(MAX_GROUP);
        loop {
            let mut came = line.pop(Some(IDLE_AFTER));
            if let PopResult::TimedOut = came {
                self.checkpoint(IDLE_CHECKPOINT_CHANGES);
                self.wal_preallocator = self
                    .wal_preallocator
                    .take()
                    .and_then(|log| log.preallocate_chunk(&self.connection));
                if self.wal_preallocator.is_some() {
                    continue;
                }
                came = line.pop(None);
            }
            let PopResult::Item(op) = came else { break };
            group.push(op);
            self.commit_group(&mut group, line);
        }
        // Everything in the WAL is already durable; a checkpoint now makes the next start faster.
        self.checkpoint(1);
    }

    /// Commits a group, or reports to every caller in it why it failed.
    fn commit_group(&mut self, group: &mut Vec<SqliteChange>, line: &WriteQueue<SqliteChange>) {
        let began = Instant::now();
        let mut told = Vec::with_capacity(MAX_GROUP);
        let number_before = self.last_event_number;
        let written = self.write_group(group, line, &mut told);
        group.extend(self.pending_inserts.drain(..).map(SqliteChange::from));
        let size = told.len() + group.len();
        let Err(error) = written else {
            metrics::histogram!("toolcrib_store_commit_duration_seconds").record(began.elapsed());
            metrics::histogram!("toolcrib_store_commit_group_size").record(size as f64);
            self.opened_in_group.drain(..).for_each(|(place, _)| self.open_calls.insert(place));
            for (place, id) in self.ended_in_group.drain(..) {
                self.open_calls.remove(place);
                self.open_call_places.remove(&id);
            }
            return told.into_iter().for_each(PendingReply::send);
        };
        self.last_event_number = number_before;
        for (_, id) in self.opened_in_group.drain(..) {
            self.open_call_places.remove(&id);
        }
        self.ended_in_group.clear();
        if !self.connection.is_autocommit() {
            let _ = self.connection.execute_batch("ROLLBACK");
        }
        tracing::error!(%error, changes = size, "a group of changes could not be committed");
        let mut why = error.to_string();
        if is_flush_failure(&error) {
            self.flush_failed.store(true, Ordering::Release);
            why = FLUSH_FAILED.to_owned();
        }
        // Changes that were queued while this group waited for another process's lock must not wait
        // for that lock again. They leave the queue before any caller gets its reply, so changes
        // sent after a reply are not affected.
        if error.sqlite_error_code() == Some(rusqlite::ErrorCode::DatabaseBusy) {
            group.extend(std::iter::from_fn(|| line.try_pop()));
        }
        told.into_iter().for_each(|told| told.send_error(&why));
        group.drain(..).for_each(|op| fail_change(op, &why));
    }

    /// Writes the queued changes, and those that arrive meanwhile, and commits them all.
    fn write_group(
        &mut self,
        group: &mut Vec<SqliteChange>,
        line: &WriteQueue<SqliteChange>,
        told: &mut Vec<PendingReply>,
    ) -> rusqlite::Result<()> {
        if self.flush_failed.load(Ordering::Acquire) {
            return Err(rusqlite::Error::InvalidQuery);
        }
        self.connection.prepare_cached("BEGIN IMMEDIATE")?.execute([])?;
        let mut together: Option<CommitGroup> = None;
        while told.len() + self.pending_inserts.len() < MAX_GROUP {
            // Changes leave the group one by one; after a failure the rest still need a reply.
            let waits = group.pop().or_else(|| line.try_pop());
            let more = || together.as_ref().is_some_and(CommitGroup::has_pending);
            let Some(op) = waits.or_else(|| line.pop_expected(GROUP_MEMBER_TIMEOUT, more)) else {
                break;
            };
            if let SqliteChange::CreateCall { group: with @ Some(_), .. } = &op {
                together.clone_from(with);
            }
            if let SqliteChange::CreateCall { row, records, key: None, reply, .. } = op {
                self.buffer_insert(PendingInsert { row, records, reply }, told)?;
                continue;
            }
            if let Err(error) = self.flush_inserts(told) {
                group.push(op);
                return Err(error);
            }
            match self.apply(op) {
                Ok(outcome) => told.push(outcome),
                Err(failed) => {
                    let (op, error) = *failed;
                    group.push(op);
                    return Err(error);
                }
            }
        }
        self.flush_inserts(told)?;
        self.advance_low_watermark()?;
        self.connection.prepare_cached("COMMIT")?.execute([])?;
        self.changes_since_checkpoint =
            self.changes_since_checkpoint.saturating_add(told.len() as u32);
        Ok(())
    }

    /// Advances the low watermark to the first open call, at intervals. It may lag behind; it is
    /// never ahead.
    fn advance_low_watermark(&mut self) -> rusqlite::Result<()> {
        self.ended_since_watermark += self.ended_in_group.len();
        if !self.maintains_low_watermark || self.ended_since_watermark < WATERMARK_INTERVAL {
            return Ok(());
        }
        self.ended_since_watermark = 0;
        // The set is as of the last commit: calls that this group ends only make the watermark lag.
        let opened = self.opened_in_group.iter().map(|(place, _)| *place).min();
        let Some(first) = self.open_calls.first().into_iter().chain(opened).min() else {
            return Ok(());
        };
        self.connection
            .prepare_cached("INSERT OR REPLACE INTO counters VALUES ('first_open', ?1)")?
            .execute([first])
            .map(|_| ())
    }

    /// Applies one change. Returns it with the error when the whole group must be rolled back.
    fn apply(
        &mut self,
        op: SqliteChange,
    ) -> Result<PendingReply, Box<(SqliteChange, rusqlite::Error)>> {
        match op {
            SqliteChange::CreateCall { row, records, key, group: together, reply } => {
                match self.create(&row, &records, key.as_ref()) {
                    Ok(created) => Ok(PendingReply::Created(reply, created)),
                    Err(error) => Err(Box::new((
                        SqliteChange::CreateCall { row, records, key, group: together, reply },
                        error,
                    ))),
                }
            }
            SqliteChange::SaveCall { row, records, reply } => match self.save(&row, &records) {
                Ok(saved) => Ok(PendingReply::Saved(reply, saved)),
                Err(error) => {
                    Err(Box::new((SqliteChange::SaveCall { row, records, reply }, error)))
                }
            },
            SqliteChange::AppendEvents { project, id, records, reply } => {
                match self.append(&project, &id, &records) {
                    Ok(()) => Ok(PendingReply::Done(reply)),
                    Err(error) => Err(Box::new((
                        SqliteChange::AppendEvents { project, id, records, reply },
                        error,
                    ))),
                }
            }
            SqliteChange::Purge { ended_before_ms, limit, reply } => {
                match self.purge(ended_before_ms, limit) {
                    Ok(purged) => Ok(PendingReply::Purged(reply, purged)),
                    Err(error) => Err(Box::new((
                        SqliteChange::Purge { ended_before_ms, limit, reply },
                        error,
                    ))),
                }
            }
            SqliteChange::ChangeDirectory {
                change,
                expected_version: decided_on,
                audit,
                reply,
            } => {
                match directory::apply_change(&self.connection, &change, decided_on, audit.as_ref())
                {
                    Ok(saved) => Ok(PendingReply::Saved(reply, saved)),
                    Err(error) => Err(Box::new((
                        SqliteChange::ChangeDirectory {
                            change,
                            expected_version: decided_on,
                            audit,
                            reply,
                        },
                        error,
                    ))),
                }
            }
            SqliteChange::AppendAudit { entry, reply } => {
                match directory::insert_audit_entry(&self.connection, &entry) {
                    Ok(()) => Ok(PendingReply::Done(reply)),
                    Err(error) => {
                        Err(Box::new((SqliteChange::AppendAudit { entry, reply }, error)))
                    }
                }
            }
            SqliteChange::PutRunTools { run, reply } => {
                match run_tools::put_run_tools(&self.connection, &run) {
                    Ok(()) => Ok(PendingReply::Done(reply)),
                    Err(error) => Err(Box::new((SqliteChange::PutRunTools { run, reply }, error))),
                }
            }
            SqliteChange::SaveDelivery { delivery, tried, reply } => {
                match self.save_delivery(&delivery, tried.as_ref()) {
                    Ok(saved) => Ok(PendingReply::Saved(reply, saved)),
                    Err(error) => Err(Box::new((
                        SqliteChange::SaveDelivery { delivery, tried, reply },
                        error,
                    ))),
                }
            }
            // A probe that writes nothing would not detect a full disk.
            SqliteChange::WriteProbe { reply } => match self.write_probe() {
                Ok(()) => Ok(PendingReply::Done(reply)),
                Err(error) => Err(Box::new((SqliteChange::WriteProbe { reply }, error))),
            },
            SqliteChange::CreateRun { row, reply } => match self.create_run(&row) {
                Ok(known) => Ok(PendingReply::RunCreated(reply, known)),
                Err(error) => Err(Box::new((SqliteChange::CreateRun { row, reply }, error))),
            },
            SqliteChange::SaveRun { row, reply } => match self.save_run(&row) {
                Ok(saved) => Ok(PendingReply::Saved(reply, saved)),
                Err(error) => Err(Box::new((SqliteChange::SaveRun { row, reply }, error))),
            },
            SqliteChange::Closure { closure: mut work, reply } => match work(&self.connection) {
                Ok(()) => Ok(PendingReply::Done(reply)),
                Err(error) => {
                    Err(Box::new((SqliteChange::Closure { closure: work, reply }, error)))
                }
            },
        }
    }

    /// Runs a checkpoint if enough changes were written since the last one.
    fn checkpoint(&mut self, at_changes: u32) {
        if self.changes_since_checkpoint < at_changes {
            return;
        }
        self.changes_since_checkpoint = 0;
        let copied = self.connection.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |_| Ok(()));
        if let Err(error) = copied {
            tracing::warn!(%error, "a WAL checkpoint failed");
        }
    }
}

/// Returns true if a flush failed. The operating system may have discarded the pages, so a later
/// flush that succeeds proves nothing.
fn is_flush_failure(error: &rusqlite::Error) -> bool {
    let rusqlite::Error::SqliteFailure(code, _) = error else {
        tracing::debug!(error = %to_store_error(error), "the error is not a flush failure");
        return false;
    };
    matches!(
        code.extended_code,
        rusqlite::ffi::SQLITE_IOERR_FSYNC | rusqlite::ffi::SQLITE_IOERR_DIR_FSYNC
    )
}
