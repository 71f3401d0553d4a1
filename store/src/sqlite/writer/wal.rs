//! Preallocation of the write-ahead log (WAL). The file is extended once and then overwritten again
//! and again, because flushing blocks that already exist is much cheaper than a flush that also
//! extends the file.
//!
//! The writer preallocates while it is idle, one chunk at a time, so that neither the start of a
//! server nor a call that arrives in the meantime waits long for it. SQLite ignores the content of
//! a WAL after the last commit, so the file is extended with zeros, under the lock of the only
//! connection that may write to it.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rusqlite::Connection;

/// Target length of the WAL: more than it holds when a checkpoint is due.
pub(super) const WAL_BYTES: u64 = 20 << 20;
/// Number of bytes that one step appends.
const CHUNK_BYTES: usize = 2 << 20;

/// Returns the path of a database's WAL.
pub(super) fn wal_path(database: &Path) -> PathBuf {
    let mut path = database.as_os_str().to_owned();
    path.push("-wal");
    path.into()
}

/// A WAL that does not have its target length yet.
pub(super) struct WalPreallocator {
    path: PathBuf,
}

impl WalPreallocator {
    /// Returns the preallocator for the WAL of this database.
    pub(super) fn for_database(database: &Path) -> Self {
        Self { path: wal_path(database) }
    }

    /// Appends one chunk. Returns `None` when the WAL is long enough or cannot be extended.
    pub(super) fn preallocate_chunk(self, connection: &Connection) -> Option<Self> {
        // While this transaction is open, no other connection writes to the WAL.
        if let Err(error) = connection.execute_batch("BEGIN IMMEDIATE") {
            tracing::debug!(%error, "WAL preallocation is postponed");
            return Some(self);
        }
        let more = self.append_zeros();
        let ended = connection.execute_batch("COMMIT");
        match (more, ended) {
            (Ok(more), Ok(())) => more.then_some(self),
            (Err(error), _) => {
                tracing::debug!(%error, "the WAL is not preallocated");
                None
            }
            (_, Err(error)) => {
                tracing::warn!(%error, "the WAL is not preallocated");
                None
            }
        }
    }

    /// Appends zeros; returns true if more remains to be done.
    fn append_zeros(&self) -> std::io::Result<bool> {
        let file = OpenOptions::new().write(true).open(&self.path)?;
        let length = file.metadata()?.len();
        let remaining = WAL_BYTES.saturating_sub(length);
        let part = CHUNK_BYTES.min(usize::try_from(remaining).unwrap_or(CHUNK_BYTES));
        file.write_all_at(&vec![0; part], length)?;
        file.sync_data()?;
        Ok(remaining > part as u64)
    }
}
