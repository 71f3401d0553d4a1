//! The set of open calls: those that have not ended. Only the one writer opens and ends calls, so
//! it holds their places in memory, which saves every call the cost of an index. The database
//! stores a low watermark: no call before it is open. At startup the store scans the calls after
//! the watermark once.

use std::collections::BTreeSet;
use std::sync::Arc;

use parking_lot::Mutex;
use rusqlite::{Connection, OptionalExtension};

/// The places of the open calls. All clones share one set.
#[derive(Clone, Default)]
pub(super) struct OpenCalls {
    places: Arc<Mutex<BTreeSet<i64>>>,
}

impl OpenCalls {
    /// Finds the open calls of a database.
    pub(super) fn load(connection: &Connection) -> rusqlite::Result<Self> {
        let mark: Option<i64> = connection
            .query_row("SELECT value FROM counters WHERE name = 'first_open'", [], |r| r.get(0))
            .optional()?;
        let places: BTreeSet<i64> = connection
            .prepare("SELECT place FROM tool_calls WHERE place >= ?1 AND completed_ms IS NULL")?
            .query_map([mark.unwrap_or(0)], |row| row.get(0))?
            .collect::<Result<_, _>>()?;
        Ok(Self { places: Arc::new(Mutex::new(places)) })
    }

    pub(super) fn insert(&self, place: i64) {
        self.places.lock().insert(place);
    }

    pub(super) fn remove(&self, place: i64) {
        self.places.lock().remove(&place);
    }

    /// Returns the first place that is open.
    pub(super) fn first(&self) -> Option<i64> {
        self.places.lock().first().copied()
    }

    /// Returns up to `limit` places after this one, in ascending order.
    pub(super) fn page_after(&self, place: u64, limit: usize) -> Vec<i64> {
        let after = i64::try_from(place).unwrap_or(i64::MAX).saturating_add(1);
        self.places.lock().range(after..).take(limit).copied().collect()
    }

    /// Returns all places, newest first.
    pub(super) fn newest_first(&self) -> Vec<i64> {
        self.places.lock().iter().rev().copied().collect()
    }
}
