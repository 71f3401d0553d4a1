//! Checkpoints: copy the WAL into the database and let the WAL start again at its beginning.
//!
//! SQLite's automatic checkpoint never waits for a reader, and a WAL that any reader uses cannot
//! start again. Where reads overlap without a pause, as with a few followed event streams, it would
//! grow without bound. The writer therefore runs its own checkpoints between groups: it waits
//! briefly for the reads in progress, while new reads find everything in the database itself and
//! do not use the WAL.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rusqlite::Connection;

use super::wal::{WAL_BYTES, wal_path};
use crate::sqlite::reader::BUSY_TIMEOUT;

/// Number of pages in the WAL at which the writer starts it again.
const RESTART_PAGES: u32 = 4_096;
/// Number of further pages after which the writer tries again, if a long read prevented it.
const RETRY_PAGES: u32 = 2_048;
/// Maximum time that a checkpoint waits for reads in progress. Calls wait as long for their commit.
const READ_TIMEOUT: Duration = Duration::from_millis(100);
/// The idle writer runs a checkpoint after this many changes.
const IDLE_CHANGES: u32 = 1_000;

/// SQLite's checkpoint modes that the writer uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CheckpointMode {
    /// Copies what no reader needs any more, and waits for nothing.
    Passive,
    /// Waits for readers, so that the next commit is written at the beginning of the WAL.
    Restart,
    /// Does the same and empties the file.
    Truncate,
}

impl CheckpointMode {
    fn as_sql(self) -> &'static str {
        match self {
            Self::Passive => "PRAGMA wal_checkpoint(PASSIVE)",
            Self::Restart => "PRAGMA wal_checkpoint(RESTART)",
            Self::Truncate => "PRAGMA wal_checkpoint(TRUNCATE)",
        }
    }
}

/// Decides when the writer runs a checkpoint, and runs it.
pub(super) struct Checkpointer {
    wal: PathBuf,
    /// Number of pages in the WAL after the last commit, counted by SQLite.
    pages: Arc<AtomicU32>,
    /// Number of pages at which the next checkpoint is due.
    due_at: u32,
    /// Number of changes since the last checkpoint.
    changes: u32,
}

/// The result of a checkpoint of the idle writer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum IdleCheckpoint {
    /// Nothing remains to be done.
    Done,
    /// The WAL was too long and is empty now.
    Truncated,
    /// A read prevents the truncation of the WAL; the writer tries again.
    Blocked,
}

impl Checkpointer {
    /// Takes over the checkpoints of this connection from SQLite.
    pub(super) fn install(connection: &mut Connection, path: &Path) -> rusqlite::Result<Self> {
        let pages = Arc::new(AtomicU32::new(0));
        // The first commit after the WAL starts again truncates a file that has become longer.
        connection.pragma_update(None, "journal_size_limit", WAL_BYTES as i64)?;
        // Replaces SQLite's own hook, which runs the automatic checkpoints.
        let counted = pages.clone();
        connection.wal_hook(Some(move |_: &mut rusqlite::hooks::Wal, count| {
            counted.store(u32::try_from(count).unwrap_or(0), Ordering::Relaxed);
            Ok(())
        }))?;
        Ok(Self { wal: wal_path(path), pages, due_at: RESTART_PAGES, changes: 0 })
    }

    /// Counts the changes of a commit, and starts the WAL again if it has become long.
    pub(super) fn after_commit(&mut self, connection: &Connection, changes: usize) {
        let changes = u32::try_from(changes).unwrap_or(u32::MAX);
        self.changes = self.changes.saturating_add(changes);
        let pages = self.pages.load(Ordering::Relaxed);
        // The WAL is short. It may have started again after a checkpoint of another process and not
        // of this writer.
        if pages < RESTART_PAGES {
            self.due_at = RESTART_PAGES;
        } else if pages >= self.due_at && !self.run(connection, CheckpointMode::Restart) {
            self.due_at = pages.saturating_add(RETRY_PAGES);
        }
    }

    /// Copies everything into the database when enough has changed, and empties a WAL that a long
    /// read or a large commit has extended beyond its usual length.
    pub(super) fn when_idle(&mut self, connection: &Connection) -> IdleCheckpoint {
        if self.changes >= IDLE_CHANGES {
            self.run(connection, CheckpointMode::Passive);
        }
        let length = std::fs::metadata(&self.wal).map_or(0, |file| file.len());
        if length <= WAL_BYTES {
            return IdleCheckpoint::Done;
        }
        match self.run(connection, CheckpointMode::Truncate) {
            true => IdleCheckpoint::Truncated,
            false => IdleCheckpoint::Blocked,
        }
    }

    /// Copies everything into the database before the writer ends, so that the next start is
    /// faster. Everything in the WAL is already durable.
    pub(super) fn before_close(&mut self, connection: &Connection) {
        if self.changes > 0 {
            self.run(connection, CheckpointMode::Passive);
        }
    }

    /// Runs a checkpoint. Returns false if a read or another process prevented its completion.
    fn run(&mut self, connection: &Connection, mode: CheckpointMode) -> bool {
        self.changes = 0;
        let checkpoint = || {
            connection.busy_timeout(READ_TIMEOUT)?;
            let busy = connection.query_row(mode.as_sql(), [], |row| row.get::<_, i64>(0));
            connection.busy_timeout(BUSY_TIMEOUT)?;
            busy.map(|busy| busy != 0)
        };
        match checkpoint() {
            Ok(true) => {
                tracing::debug!(?mode, "a read delays the checkpoint of the WAL");
                false
            }
            Ok(false) => {
                if mode != CheckpointMode::Passive {
                    self.pages.store(0, Ordering::Relaxed);
                    self.due_at = RESTART_PAGES;
                }
                true
            }
            Err(error) => {
                tracing::warn!(%error, ?mode, "a WAL checkpoint failed");
                false
            }
        }
    }
}
