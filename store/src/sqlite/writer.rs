//! The single writer: takes all queued changes, commits them in one transaction, then replies to
//! every caller.
//!
//! Group commit makes `synchronous=FULL` affordable: one flush serves all waiting callers. The WAL
//! is preallocated once and then overwritten again and again. Checkpoints run between groups, when
//! the writer is idle or the WAL has become long (`checkpoint`).
//!
//! When a group fails (disk full, database locked), the writer rolls all of it back and reports the
//! failure to every caller: none of its changes happened. When a flush fails, the state of the disk
//! is unknown: the writer reports that to the callers in the group, and accepts no more changes
//! until the process restarts.

mod call_inserts;
mod change;
mod checkpoint;
mod connection;
mod queue;
mod wal;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rusqlite::Connection;
use tokio::sync::watch;
use toolcrib::ports::store::{CommitGroup, StoreError};

pub(super) use call_inserts::NewCallRow;
pub(super) use change::{Change, FunctionChange};
use checkpoint::{Checkpointer, IdleCheckpoint};
pub(super) use connection::WriterConnection;
use queue::{PopResult, PushError, WriteQueue};
use wal::WalPreallocator;

use crate::sqlite::open_calls::OpenCalls;

/// Maximum number of changes that share a flush.
const MAX_GROUP: usize = 512;
/// Maximum number of queued changes. More are refused, because they would only wait longer.
const QUEUE_CAPACITY: usize = 65_536;
/// Maximum time a group waits for a call that has been announced.
const GROUP_MEMBER_TIMEOUT: Duration = Duration::from_micros(50);
/// The writer is idle when no change arrived for this long.
const IDLE_AFTER: Duration = Duration::from_millis(100);

type ChangeGroup = Vec<Box<dyn Change>>;
type ChangeQueue = WriteQueue<Box<dyn Change>>;

/// Controls whether the writer preallocates the WAL.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum WalPreallocation {
    Enabled,
    Disabled,
}

/// A handle to the writer thread.
pub(super) struct SqliteWriter {
    queue: Arc<ChangeQueue>,
    flush_failed: watch::Receiver<bool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl SqliteWriter {
    pub(super) fn start(
        mut connection: Connection,
        path: &Path,
        wal: WalPreallocation,
        open_calls: OpenCalls,
    ) -> Result<Self, super::SqliteOpenError> {
        connection.set_prepared_statement_cache_capacity(64);
        let checkpointer = Checkpointer::install(&mut connection, path)?;
        let serves = wal == WalPreallocation::Enabled;
        let queue = Arc::new(WriteQueue::new(QUEUE_CAPACITY));
        let (set_flush_failed, flush_failed) = watch::channel(false);
        let mut writer = WriterThread {
            connection: WriterConnection::new(connection, open_calls, serves)?,
            flush_failed: set_flush_failed,
            checkpointer,
            path: path.to_owned(),
            preallocation: wal,
            wal_preallocator: serves.then(|| WalPreallocator::for_database(path)),
        };
        let thread = std::thread::Builder::new().name("store-writer".to_owned()).spawn({
            let guard = WriteQueueGuard(queue.clone());
            move || writer.run(&guard.0)
        })?;
        Ok(Self { queue, flush_failed, thread: Some(thread) })
    }

    /// Signals that all announced calls have been queued.
    pub(super) fn notify_group_complete(&self) {
        self.queue.notify_group_complete();
    }

    /// Returns the reason once a flush has failed.
    pub(super) async fn wait_for_flush_failure(&self) -> &'static str {
        let mut flush_failed = self.flush_failed.clone();
        if flush_failed.wait_for(|failed| *failed).await.is_err() {
            // The writer has ended without a failure.
            std::future::pending::<()>().await;
        }
        FLUSH_FAILED
    }

    pub(super) fn send(&self, change: Box<dyn Change>) -> Result<(), StoreError> {
        let unavailable = |reason: &str| Err(StoreError::Unavailable(reason.to_owned()));
        if *self.flush_failed.borrow() {
            return unavailable(FLUSH_FAILED);
        }
        match self.queue.push(change) {
            Ok(()) => Ok(()),
            Err(PushError::Full) => unavailable("the write queue is full"),
            Err(PushError::Closed) => unavailable("the writer has stopped"),
        }
    }
}

/// The writer thread's handle to the queue. However the thread ends, dropping the guard closes the
/// queue and drops every queued change, so that no caller waits forever.
struct WriteQueueGuard(Arc<ChangeQueue>);

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
    "a flush to disk failed, so it is unknown what is stored; restart the server";

/// The state of the writer thread.
struct WriterThread {
    connection: WriterConnection,
    flush_failed: watch::Sender<bool>,
    checkpointer: Checkpointer,
    path: PathBuf,
    preallocation: WalPreallocation,
    /// Set until the WAL has its target length.
    wal_preallocator: Option<WalPreallocator>,
}

impl WriterThread {
    fn run(&mut self, queue: &ChangeQueue) {
        let mut group = Vec::with_capacity(MAX_GROUP);
        loop {
            let mut popped = queue.pop(Some(IDLE_AFTER));
            if let PopResult::TimedOut = popped {
                if self.work_while_idle() {
                    continue;
                }
                popped = queue.pop(None);
            }
            let PopResult::Item(change) = popped else { break };
            group.push(change);
            self.commit_group(&mut group, queue);
        }
        if let Ok(connection) = self.connection.connection() {
            self.checkpointer.before_close(connection);
        }
    }

    /// Commits a group, or reports to every caller in it why it failed.
    fn commit_group(&mut self, group: &mut ChangeGroup, queue: &ChangeQueue) {
        if *self.flush_failed.borrow() {
            return fail_group(group, FLUSH_FAILED);
        }
        let began = Instant::now();
        let Err(error) = self.write_group(group, queue) else {
            metrics::histogram!("toolcrib_store_commit_duration_seconds").record(began.elapsed());
            metrics::histogram!("toolcrib_store_commit_group_size").record(group.len() as f64);
            let changes = group.len();
            // No caller waits for the checkpoint that its own commit makes due.
            group.drain(..).for_each(|change| change.reply(Ok(())));
            if let Ok(connection) = self.connection.connection() {
                self.checkpointer.after_commit(connection, changes);
            }
            return;
        };
        self.connection.roll_back();
        tracing::error!(%error, changes = group.len(), "a group of changes could not be committed");
        if is_flush_failure(&error) {
            // The pages may be on the disk all the same, and the next start reads them.
            for change in group.drain(..) {
                change.reply(Err(StoreError::OutcomeUnknown(FLUSH_FAILED.to_owned())));
            }
            self.flush_failed.send_replace(true);
            return;
        }
        // Changes that were queued while this group waited for another process's lock must not wait
        // for that lock again. They leave the queue before any caller gets its reply, so changes
        // sent after a reply are not affected.
        if error.sqlite_error_code() == Some(rusqlite::ErrorCode::DatabaseBusy) {
            group.extend(std::iter::from_fn(|| queue.try_pop()));
        }
        fail_group(group, &error.to_string());
    }

    /// Applies the changes of the group, and those that arrive meanwhile, and commits them all.
    /// Changes that arrive join the group before they are applied, so that each gets a reply.
    fn write_group(
        &mut self,
        group: &mut ChangeGroup,
        queue: &ChangeQueue,
    ) -> rusqlite::Result<()> {
        self.connection.begin()?;
        let mut announced: Option<CommitGroup> = None;
        for n in 0..MAX_GROUP {
            if n == group.len() {
                let more = || announced.as_ref().is_some_and(CommitGroup::has_pending);
                let arrived =
                    queue.try_pop().or_else(|| queue.pop_expected(GROUP_MEMBER_TIMEOUT, more));
                let Some(change) = arrived else { break };
                group.push(change);
            }
            let change = &mut group[n];
            if let Some(with) = change.commit_group() {
                announced = Some(with.clone());
            }
            change.apply(&mut self.connection)?;
        }
        self.connection.commit()
    }

    /// Runs a checkpoint and extends the WAL, as far as either is due. Returns true if more remains
    /// to be done.
    fn work_while_idle(&mut self) -> bool {
        let Ok(connection) = self.connection.connection() else { return false };
        let checkpoint = self.checkpointer.when_idle(connection);
        let serves = self.preallocation == WalPreallocation::Enabled;
        if checkpoint == IdleCheckpoint::Truncated && serves {
            self.wal_preallocator = Some(WalPreallocator::for_database(&self.path));
        }
        self.wal_preallocator =
            self.wal_preallocator.take().and_then(|wal| wal.preallocate_chunk(connection));
        self.wal_preallocator.is_some() || checkpoint == IdleCheckpoint::Blocked
    }
}

fn fail_group(group: &mut ChangeGroup, reason: &str) {
    for change in group.drain(..) {
        change.reply(Err(StoreError::Unavailable(reason.to_owned())));
    }
}

/// Returns true if a flush failed. The operating system may have discarded the pages, so a later
/// flush that succeeds proves nothing.
fn is_flush_failure(error: &rusqlite::Error) -> bool {
    let rusqlite::Error::SqliteFailure(code, _) = error else { return false };
    matches!(
        code.extended_code,
        rusqlite::ffi::SQLITE_IOERR_FSYNC | rusqlite::ffi::SQLITE_IOERR_DIR_FSYNC
    )
}
