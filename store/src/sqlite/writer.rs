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
use toolcrib::id::CallId;
use toolcrib::store::{StoreError, Together};

use super::history::newest_number;
use super::line::{Came, Line, Refused};
use super::log::Growing;
use super::newcomers::Newcomer;
use super::op::{Op, Told, refuse};
use super::open::OpenCalls;
use super::reader::failed;
use super::{directory, runs};

/// Maximum time a group waits for another process to release the database.
pub(super) const BUSY: Duration = Duration::from_secs(5);
/// Maximum number of changes that share a flush.
const MAX_GROUP: usize = 512;
/// Maximum number of queued changes. More are refused, because they would only wait longer.
const MAX_WAITING: usize = 65_536;
/// Maximum time a group waits for a call that has been announced.
const FOLLOWS_WITHIN: Duration = Duration::from_micros(50);
/// SQLite runs a checkpoint when the WAL has this many pages; the idle writer runs one after this
/// many changes.
const LOG_PAGES: u32 = 4_096;
const CHANGES_IDLE: u32 = 1_000;
/// The writer is idle when no change arrived for this long.
const IDLE_AFTER: Duration = Duration::from_millis(100);
/// Number of ended calls after which the writer advances the low watermark.
const MARK_EVERY: usize = 1_000;

/// Controls whether the writer preallocates the WAL.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Log {
    Grown,
    AsItIs,
}

/// A handle to the writer thread.
pub(super) struct Writer {
    line: Arc<Line<Op>>,
    broken: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Writer {
    pub(super) fn start(
        connection: Connection,
        path: &Path,
        log: Log,
        open: OpenCalls,
    ) -> Result<Self, super::OpenError> {
        connection.set_prepared_statement_cache_capacity(64);
        connection.pragma_update(None, "wal_autocheckpoint", LOG_PAGES)?;
        let line = Arc::new(Line::new(MAX_WAITING));
        let broken = Arc::new(AtomicBool::new(false));
        let (flag, last_number) = (broken.clone(), last_number(&connection)?);
        let mut desk = Desk {
            connection,
            last_number,
            broken: flag,
            changes: 0,
            open,
            opened: Vec::new(),
            ended: Vec::new(),
            places: HashMap::new(),
            newcomers: Vec::new(),
            ended_since_mark: 0,
            keeps_mark: log == Log::Grown,
            growing: (log == Log::Grown).then(|| Growing::of(path)),
        };
        let thread = std::thread::Builder::new().name("store-writer".to_owned()).spawn({
            let taken = Taken(line.clone());
            move || desk.run(&taken.0)
        })?;
        Ok(Self { line, broken, thread: Some(thread) })
    }

    /// Signals that all announced calls have been queued.
    pub(super) fn all_came(&self) {
        self.line.all_came();
    }

    pub(super) fn send(&self, op: Op) -> Result<(), StoreError> {
        let unavailable = |why: &str| Err(StoreError::Unavailable(why.to_owned()));
        if self.broken.load(Ordering::Acquire) {
            return unavailable(BROKEN);
        }
        match self.line.join(op) {
            Ok(()) => Ok(()),
            Err(Refused::Full) => unavailable("too much waits to be written"),
            Err(Refused::Closed) => unavailable("the writer has stopped"),
        }
    }
}

/// The writer thread's handle to the queue. However the thread ends, dropping the guard closes the
/// queue and drops every queued change, so that no caller waits forever.
struct Taken(Arc<Line<Op>>);

impl Drop for Taken {
    fn drop(&mut self) {
        self.0.close();
        while self.0.next().is_some() {}
    }
}

/// Commits everything that was sent before the store is gone.
impl Drop for Writer {
    fn drop(&mut self) {
        self.line.close();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

const BROKEN: &str =
    "a flush to disk failed, so nobody can know what is stored; restart the server";

/// Returns the last event number in use. Numbering continues after it even if the newest events
/// were purged.
fn last_number(connection: &Connection) -> rusqlite::Result<i64> {
    let newest = newest_number(connection)?;
    let counted: Option<i64> = connection
        .query_row("SELECT value FROM counters WHERE name = 'last_event'", [], |row| row.get(0))
        .optional()?;
    Ok(newest.max(counted.unwrap_or(0)))
}

/// The state of the writer thread.
pub(super) struct Desk {
    pub(super) connection: Connection,
    pub(super) last_number: i64,
    broken: Arc<AtomicBool>,
    /// Number of changes since the last checkpoint.
    changes: u32,
    open: OpenCalls,
    /// Calls that the current group opened and ended; applied to `open_calls` after the commit.
    pub(super) opened: Vec<(i64, CallId)>,
    pub(super) ended: Vec<(i64, CallId)>,
    /// Project and place of each open call that this writer inserted.
    pub(super) places: HashMap<CallId, (Box<str>, i64)>,
    /// New calls that the current group has not written yet.
    pub(super) newcomers: Vec<Newcomer>,
    ended_since_mark: usize,
    /// Only the writer of a server knows all open calls.
    keeps_mark: bool,
    /// Set until the WAL has its target length.
    growing: Option<Growing>,
}

impl Desk {
    fn run(&mut self, line: &Line<Op>) {
        let mut group = Vec::with_capacity(MAX_GROUP);
        loop {
            let mut came = line.wait(Some(IDLE_AFTER));
            if let Came::Nobody = came {
                self.checkpoint(CHANGES_IDLE);
                self.growing = self.growing.take().and_then(|log| log.grown(&self.connection));
                if self.growing.is_some() {
                    continue;
                }
                came = line.wait(None);
            }
            let Came::Somebody(op) = came else { break };
            group.push(op);
            self.commit(&mut group, line);
        }
        // Everything in the WAL is already durable; a checkpoint now makes the next start faster.
        self.checkpoint(1);
    }

    /// Commits a group, or reports to every caller in it why it failed.
    fn commit(&mut self, group: &mut Vec<Op>, line: &Line<Op>) {
        let began = Instant::now();
        let mut told = Vec::with_capacity(MAX_GROUP);
        let number_before = self.last_number;
        let written = self.write_group(group, line, &mut told);
        group.extend(self.newcomers.drain(..).map(Op::from));
        let size = told.len() + group.len();
        let Err(error) = written else {
            metrics::histogram!("toolcrib_store_commit_duration_seconds").record(began.elapsed());
            metrics::histogram!("toolcrib_store_commit_group_size").record(size as f64);
            self.opened.drain(..).for_each(|(place, _)| self.open.insert(place));
            for (place, id) in self.ended.drain(..) {
                self.open.remove(place);
                self.places.remove(&id);
            }
            return told.into_iter().for_each(Told::tell);
        };
        self.last_number = number_before;
        for (_, id) in self.opened.drain(..) {
            self.places.remove(&id);
        }
        self.ended.clear();
        if !self.connection.is_autocommit() {
            let _ = self.connection.execute_batch("ROLLBACK");
        }
        tracing::error!(%error, changes = size, "a group of changes could not be committed");
        let mut why = error.to_string();
        if is_flush_failure(&error) {
            self.broken.store(true, Ordering::Release);
            why = BROKEN.to_owned();
        }
        // Changes that were queued while this group waited for another process's lock must not wait
        // for that lock again. They leave the queue before any caller gets its reply, so changes
        // sent after a reply are not affected.
        if error.sqlite_error_code() == Some(rusqlite::ErrorCode::DatabaseBusy) {
            group.extend(std::iter::from_fn(|| line.next()));
        }
        told.into_iter().for_each(|told| told.refuse(&why));
        group.drain(..).for_each(|op| refuse(op, &why));
    }

    /// Writes the queued changes, and those that arrive meanwhile, and commits them all.
    fn write_group(
        &mut self,
        group: &mut Vec<Op>,
        line: &Line<Op>,
        told: &mut Vec<Told>,
    ) -> rusqlite::Result<()> {
        if self.broken.load(Ordering::Acquire) {
            return Err(rusqlite::Error::InvalidQuery);
        }
        self.connection.prepare_cached("BEGIN IMMEDIATE")?.execute([])?;
        let mut together: Option<Together> = None;
        while told.len() + self.newcomers.len() < MAX_GROUP {
            // Changes leave the group one by one; after a failure the rest still need a reply.
            let waits = group.pop().or_else(|| line.next());
            let more = || together.as_ref().is_some_and(Together::more);
            let Some(op) = waits.or_else(|| line.soon(FOLLOWS_WITHIN, more)) else { break };
            if let Op::Create { together: with @ Some(_), .. } = &op {
                together.clone_from(with);
            }
            if let Op::Create { row, records, key: None, reply, .. } = op {
                self.collect(Newcomer { row, records, reply }, told)?;
                continue;
            }
            if let Err(error) = self.write_newcomers(told) {
                group.push(op);
                return Err(error);
            }
            match self.write(op) {
                Ok(outcome) => told.push(outcome),
                Err(failed) => {
                    let (op, error) = *failed;
                    group.push(op);
                    return Err(error);
                }
            }
        }
        self.write_newcomers(told)?;
        self.keep_mark()?;
        self.connection.prepare_cached("COMMIT")?.execute([])?;
        self.changes = self.changes.saturating_add(told.len() as u32);
        Ok(())
    }

    /// Advances the low watermark to the first open call, at intervals. It may lag behind; it is
    /// never ahead.
    fn keep_mark(&mut self) -> rusqlite::Result<()> {
        self.ended_since_mark += self.ended.len();
        if !self.keeps_mark || self.ended_since_mark < MARK_EVERY {
            return Ok(());
        }
        self.ended_since_mark = 0;
        // The set is as of the last commit: calls that this group ends only make the watermark lag.
        let opened = self.opened.iter().map(|(place, _)| *place).min();
        let Some(first) = self.open.first().into_iter().chain(opened).min() else {
            return Ok(());
        };
        self.connection
            .prepare_cached("INSERT OR REPLACE INTO counters VALUES ('first_open', ?1)")?
            .execute([first])
            .map(|_| ())
    }

    /// Applies one change. Returns it with the error when the whole group must be rolled back.
    fn write(&mut self, op: Op) -> Result<Told, Box<(Op, rusqlite::Error)>> {
        match op {
            Op::Create { row, records, key, together, reply } => {
                match self.create(&row, &records, key.as_ref()) {
                    Ok(created) => Ok(Told::Created(reply, created)),
                    Err(error) => {
                        Err(Box::new((Op::Create { row, records, key, together, reply }, error)))
                    }
                }
            }
            Op::Save { row, records, reply } => match self.save(&row, &records) {
                Ok(saved) => Ok(Told::Saved(reply, saved)),
                Err(error) => Err(Box::new((Op::Save { row, records, reply }, error))),
            },
            Op::Append { project, id, records, reply } => {
                match self.append(&project, &id, &records) {
                    Ok(()) => Ok(Told::Done(reply)),
                    Err(error) => {
                        Err(Box::new((Op::Append { project, id, records, reply }, error)))
                    }
                }
            }
            Op::Purge { ended_before_ms, limit, reply } => {
                match self.purge(ended_before_ms, limit) {
                    Ok(purged) => Ok(Told::Purged(reply, purged)),
                    Err(error) => {
                        Err(Box::new((Op::Purge { ended_before_ms, limit, reply }, error)))
                    }
                }
            }
            Op::Change { change, decided_on, audit, reply } => {
                match directory::change(&self.connection, &change, decided_on, audit.as_ref()) {
                    Ok(saved) => Ok(Told::Saved(reply, saved)),
                    Err(error) => {
                        Err(Box::new((Op::Change { change, decided_on, audit, reply }, error)))
                    }
                }
            }
            Op::Audit { entry, reply } => match directory::audit(&self.connection, &entry) {
                Ok(()) => Ok(Told::Done(reply)),
                Err(error) => Err(Box::new((Op::Audit { entry, reply }, error))),
            },
            Op::PutRun { run, reply } => match runs::put(&self.connection, &run) {
                Ok(()) => Ok(Told::Done(reply)),
                Err(error) => Err(Box::new((Op::PutRun { run, reply }, error))),
            },
            Op::Deliver { delivery, tried, reply } => {
                match self.save_delivery(&delivery, tried.as_ref()) {
                    Ok(saved) => Ok(Told::Saved(reply, saved)),
                    Err(error) => Err(Box::new((Op::Deliver { delivery, tried, reply }, error))),
                }
            }
            // A probe that writes nothing would not detect a full disk.
            Op::Check { reply } => match self.check() {
                Ok(()) => Ok(Told::Done(reply)),
                Err(error) => Err(Box::new((Op::Check { reply }, error))),
            },
            Op::CreateLoop { row, reply } => match self.create_loop(&row) {
                Ok(known) => Ok(Told::Looped(reply, known)),
                Err(error) => Err(Box::new((Op::CreateLoop { row, reply }, error))),
            },
            Op::SaveLoop { row, reply } => match self.save_loop(&row) {
                Ok(saved) => Ok(Told::Saved(reply, saved)),
                Err(error) => Err(Box::new((Op::SaveLoop { row, reply }, error))),
            },
            Op::Work { mut work, reply } => match work(&self.connection) {
                Ok(()) => Ok(Told::Done(reply)),
                Err(error) => Err(Box::new((Op::Work { work, reply }, error))),
            },
        }
    }

    /// Runs a checkpoint if enough changes were written since the last one.
    fn checkpoint(&mut self, at_changes: u32) {
        if self.changes < at_changes {
            return;
        }
        self.changes = 0;
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
        tracing::debug!(error = %failed(error), "the error is not a flush failure");
        return false;
    };
    matches!(
        code.extended_code,
        rusqlite::ffi::SQLITE_IOERR_FSYNC | rusqlite::ffi::SQLITE_IOERR_DIR_FSYNC
    )
}
