//! The one writer: takes everything that waits, commits it as one transaction, tells everybody.
//!
//! Group commit is what makes `synchronous=FULL` affordable: one flush for all who wait. The log
//! (WAL) is grown once and then written over again and again. It is copied into the database
//! between groups, when nobody waits or when it has become long.
//!
//! When a group fails (disk full, locked), all of it is rolled back and everybody in it is told
//! so: nothing of it happened. When a flush fails, nobody can know what is on the disk: the writer
//! takes nothing more until the process is started again.

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

/// How long another process may hold the database before we give up on a group.
pub(super) const BUSY: Duration = Duration::from_secs(5);
/// Most changes that share a flush.
const MAX_GROUP: usize = 512;
/// What may wait for the writer; more is refused, because it could only wait longer.
const MAX_WAITING: usize = 65_536;
/// How long a group waits for a call that is on its way.
const FOLLOWS_WITHIN: Duration = Duration::from_micros(50);
/// The log is copied into the database when it has this many pages, by SQLite itself, and after
/// this many changes when nobody waits.
const LOG_PAGES: u32 = 4_096;
const CHANGES_IDLE: u32 = 1_000;
/// Nobody waits when nobody came for so long.
const IDLE_AFTER: Duration = Duration::from_millis(100);
/// The mark of the first open call is moved after so many calls have ended.
const MARK_EVERY: usize = 1_000;

/// Whether the log is to be grown.
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

    /// All that were to come together have come.
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

/// The line as its taker has it. Whatever ends the thread, nobody waits in vain afterwards.
struct Taken(Arc<Line<Op>>);

impl Drop for Taken {
    fn drop(&mut self) {
        self.0.close();
        while self.0.next().is_some() {}
    }
}

/// Everything that was sent is committed before the store is gone.
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

/// Event numbers go on where they were, also when the newest events were purged.
fn last_number(connection: &Connection) -> rusqlite::Result<i64> {
    let newest = newest_number(connection)?;
    let counted: Option<i64> = connection
        .query_row("SELECT value FROM counters WHERE name = 'last_event'", [], |row| row.get(0))
        .optional()?;
    Ok(newest.max(counted.unwrap_or(0)))
}

/// The thread's side.
pub(super) struct Desk {
    pub(super) connection: Connection,
    pub(super) last_number: i64,
    broken: Arc<AtomicBool>,
    /// Since the log was last copied.
    changes: u32,
    open: OpenCalls,
    /// What the group under way opened and ended; true once it is committed.
    pub(super) opened: Vec<(i64, CallId)>,
    pub(super) ended: Vec<(i64, CallId)>,
    /// The open calls that this writer wrote first: their project and place.
    pub(super) places: HashMap<CallId, (Box<str>, i64)>,
    /// New calls that the group under way has not written yet.
    pub(super) newcomers: Vec<Newcomer>,
    ended_since_mark: usize,
    /// Only the server's own writer knows what is open.
    keeps_mark: bool,
    /// The log, until it has its length.
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
        // What is in the log is safe there; copying it now makes the next start faster.
        self.checkpoint(1);
    }

    /// Commits a group, or tells everybody in it why not.
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
        // Who came while the lock of another process was waited for must not wait for it all over
        // again. Taken out of the line before anybody is told: who comes after that is not meant.
        if error.sqlite_error_code() == Some(rusqlite::ErrorCode::DatabaseBusy) {
            group.extend(std::iter::from_fn(|| line.next()));
        }
        told.into_iter().for_each(|told| told.refuse(&why));
        group.drain(..).for_each(|op| refuse(op, &why));
    }

    /// Writes what waits, and what comes while it does, and commits it all.
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
            // Ops leave the group one by one; on a failure who is left is still to be told.
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

    /// Moves the mark up to the first open call, now and then. It may lag; it is never ahead.
    fn keep_mark(&mut self) -> rusqlite::Result<()> {
        self.ended_since_mark += self.ended.len();
        if !self.keeps_mark || self.ended_since_mark < MARK_EVERY {
            return Ok(());
        }
        self.ended_since_mark = 0;
        // As of the last commit: what this group ends only makes it lag.
        let opened = self.opened.iter().map(|(place, _)| *place).min();
        let Some(first) = self.open.first().into_iter().chain(opened).min() else {
            return Ok(());
        };
        self.connection
            .prepare_cached("INSERT OR REPLACE INTO counters VALUES ('first_open', ?1)")?
            .execute([first])
            .map(|_| ())
    }

    /// Writes one op; gives it back with the error when the whole group must be given up.
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
            // A check that writes nothing would find a full disk in order.
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

    /// Copies the log into the database when it is long enough to be worth it.
    fn checkpoint(&mut self, at_changes: u32) {
        if self.changes < at_changes {
            return;
        }
        self.changes = 0;
        let copied = self.connection.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |_| Ok(()));
        if let Err(error) = copied {
            tracing::warn!(%error, "the log could not be copied into the database");
        }
    }
}

/// After a failed flush the system may have thrown the pages away: trying again proves nothing.
fn is_flush_failure(error: &rusqlite::Error) -> bool {
    let rusqlite::Error::SqliteFailure(code, _) = error else {
        tracing::debug!(error = %failed(error), "not a flush");
        return false;
    };
    matches!(
        code.extended_code,
        rusqlite::ffi::SQLITE_IOERR_FSYNC | rusqlite::ffi::SQLITE_IOERR_DIR_FSYNC
    )
}
