//! Deletes audit entries that are older than their retention, in small steps.

use std::sync::Arc;
use std::time::Duration;

use crate::domain::fault::Error;
use crate::ports::core::{Core, from_store_error};

const MAX_PRUNE_INTERVAL: Duration = Duration::from_secs(60);
const MIN_PRUNE_INTERVAL: Duration = Duration::from_secs(1);
/// Number of entries deleted in one step: small, so that a step never delays the commits of calls.
const ENTRIES_PER_STEP: usize = 500;

pub(crate) async fn run(core: Arc<Core>, retention_ms: u64) {
    // A short retention is checked more often, so that entries never outlive it by much.
    let interval =
        Duration::from_millis(retention_ms).clamp(MIN_PRUNE_INTERVAL, MAX_PRUNE_INTERVAL);
    loop {
        if let Err(error) = run_once(&core, retention_ms).await {
            tracing::warn!(%error, "old audit entries could not be deleted");
        }
        tokio::select! {
            () = tokio::time::sleep(interval) => {}
            () = core.shutdown.cancelled() => return,
        }
    }
}

/// Deletes every entry that is old enough. Returns the number of deleted entries.
pub(crate) async fn run_once(core: &Core, retention_ms: u64) -> Result<usize, Error> {
    // The earlier of the two times: a wrong time of day in the future must not delete anything.
    let (now_ms, wall_ms) = (core.now_ms(), core.wall_ms());
    let before_ms = now_ms.min(wall_ms).saturating_sub(retention_ms);
    // The later one: an entry after both has a wrong time, and must not stop the deletion.
    let latest_ms = now_ms.max(wall_ms);
    let mut count = 0;
    loop {
        let store = core.store.audit();
        let deleted = store.prune_audit_log(before_ms, latest_ms, ENTRIES_PER_STEP).await;
        let deleted = deleted.map_err(from_store_error)?;
        count += deleted;
        if deleted < ENTRIES_PER_STEP || core.shutdown.is_cancelled() {
            return Ok(count);
        }
        tokio::task::yield_now().await;
    }
}
