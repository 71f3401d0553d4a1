//! The length of the log (WAL): it is grown once and then written over again and again, because a
//! flush of blocks that are there already is much cheaper than one that also makes the file longer.
//!
//! Growing is work for when nobody waits, and is done in small parts: neither the start of a server
//! nor a call that comes meanwhile waits long for it. What is behind the last commit in a log is
//! nothing to SQLite, so the log is made longer with zeros, by the one who may write into it.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rusqlite::Connection;

/// The log is made this long: more than it has when it is copied into the database.
const LOG_BYTES: u64 = 20 << 20;
/// How much of it in one go.
const PART: usize = 2 << 20;

/// A log that is being grown.
pub(super) struct Growing {
    path: PathBuf,
}

impl Growing {
    /// The log of this database.
    pub(super) fn of(database: &Path) -> Self {
        let mut path = database.as_os_str().to_owned();
        path.push("-wal");
        Self { path: path.into() }
    }

    /// Makes it a part longer. None when it is long enough, or cannot be.
    pub(super) fn grown(self, connection: &Connection) -> Option<Self> {
        // While this is held nobody else writes into the log.
        if let Err(error) = connection.execute_batch("BEGIN IMMEDIATE") {
            tracing::debug!(%error, "the log is grown later");
            return Some(self);
        }
        let more = self.part();
        let ended = connection.execute_batch("COMMIT");
        match (more, ended) {
            (Ok(more), Ok(())) => more.then_some(self),
            (Err(error), _) => {
                tracing::debug!(%error, "the log is not grown beforehand");
                None
            }
            (_, Err(error)) => {
                tracing::warn!(%error, "the log is not grown beforehand");
                None
            }
        }
    }

    /// Whether there is more to do.
    fn part(&self) -> std::io::Result<bool> {
        let file = OpenOptions::new().write(true).open(&self.path)?;
        let length = file.metadata()?.len();
        let left = LOG_BYTES.saturating_sub(length);
        let part = PART.min(usize::try_from(left).unwrap_or(PART));
        file.write_all_at(&vec![0; part], length)?;
        file.sync_data()?;
        Ok(left > part as u64)
    }
}
