//! The set of open calls: those that have not ended. Only the one writer opens and ends calls, so
//! it holds their positions in memory, which saves every call the cost of an index. The database
//! stores a low watermark: no call before it is open. At startup the store scans the calls after
//! the watermark once.

use std::collections::BTreeSet;
use std::sync::Arc;

use parking_lot::Mutex;
use rusqlite::{Connection, OptionalExtension};

/// The positions of the open calls. All clones share one set.
#[derive(Clone, Default)]
pub(super) struct OpenCalls {
    positions: Arc<Mutex<BTreeSet<i64>>>,
}

impl OpenCalls {
    /// Finds the open calls of a database.
    pub(super) fn load(connection: &Connection) -> rusqlite::Result<Self> {
        let low_watermark: Option<i64> = connection
            .query_row("SELECT value FROM counters WHERE name = 'first_open'", [], |r| r.get(0))
            .optional()?;
        let positions: BTreeSet<i64> = connection
            .prepare("SELECT place FROM tool_calls WHERE place >= ?1 AND completed_ms IS NULL")?
            .query_map([low_watermark.unwrap_or(0)], |row| row.get(0))?
            .collect::<Result<_, _>>()?;
        Ok(Self { positions: Arc::new(Mutex::new(positions)) })
    }

    pub(super) fn insert(&self, position: i64) {
        self.positions.lock().insert(position);
    }

    pub(super) fn remove(&self, position: i64) {
        self.positions.lock().remove(&position);
    }

    /// Returns the first position that is open.
    pub(super) fn first(&self) -> Option<i64> {
        self.positions.lock().first().copied()
    }

    /// Returns up to `limit` positions after this one, in ascending order.
    pub(super) fn page_after(&self, position: u64, limit: usize) -> Vec<i64> {
        let after = i64::try_from(position).unwrap_or(i64::MAX).saturating_add(1);
        self.positions.lock().range(after..).take(limit).copied().collect()
    }

    /// Returns all positions, newest first.
    pub(super) fn newest_first(&self) -> Vec<i64> {
        self.positions.lock().iter().rev().copied().collect()
    }
}
