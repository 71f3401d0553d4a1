//! Deletes ended calls that are older than the retention, in small steps.

use std::sync::Arc;
use std::time::Duration;

use crate::calls::Calls;
use crate::domain::fault::Error;
use crate::ports::core::from_store_error;

const PURGE_INTERVAL: Duration = Duration::from_secs(60);
/// Number of calls deleted in one step: small, so that a step never delays the commits of calls.
const CALLS_PER_STEP: usize = 200;

pub(crate) async fn run(calls: Arc<Calls>, retention_ms: u64) {
    loop {
        if let Err(error) = run_once(&calls, retention_ms).await {
            tracing::warn!(%error, "old calls could not be purged");
        }
        tokio::select! {
            () = tokio::time::sleep(PURGE_INTERVAL) => {}
            () = calls.core.shutdown.cancelled() => return,
        }
    }
}

/// Purges everything that is old enough. Returns the number of deleted calls.
pub async fn run_once(calls: &Arc<Calls>, retention_ms: u64) -> Result<usize, Error> {
    // The earlier of the two times: a wrong time of day in the future must not delete anything.
    let now_ms = calls.core.now_ms().min(calls.core.wall_ms());
    let before_ms = now_ms.saturating_sub(retention_ms);
    let mut count = 0;
    loop {
        let purged =
            calls.core.store.purge(before_ms, CALLS_PER_STEP).await.map_err(from_store_error)?;
        count += purged.calls;
        let utp = calls
            .core
            .store
            .utp()
            .purge_utp(before_ms, CALLS_PER_STEP)
            .await
            .map_err(from_store_error)?;
        let more = purged.has_more || utp >= CALLS_PER_STEP;
        if !more || calls.core.shutdown.is_cancelled() {
            return Ok(count);
        }
        tokio::task::yield_now().await;
    }
}
