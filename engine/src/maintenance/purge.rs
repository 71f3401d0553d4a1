//! Deletes ended calls that are older than the retention, in small steps.

use std::time::Duration;

use crate::domain::fault::Error;
use crate::engine::{Engine, from_store_error};

const EVERY: Duration = Duration::from_secs(60);
/// Small, so that a step never delays the commits of live calls.
const STEP: usize = 200;

pub(crate) async fn run(engine: Engine, retention_ms: u64) {
    loop {
        if let Err(error) = run_once(&engine, retention_ms).await {
            tracing::warn!(%error, "old calls could not be purged");
        }
        tokio::select! {
            () = tokio::time::sleep(EVERY) => {}
            () = engine.core.shutdown.cancelled() => return,
        }
    }
}

/// Purges everything that is old enough. Returns the number of deleted calls.
pub async fn run_once(engine: &Engine, retention_ms: u64) -> Result<usize, Error> {
    let inner = &engine.core;
    let before_ms = inner.clock.now_ms().saturating_sub(retention_ms);
    let mut count = 0;
    loop {
        let purged = inner.store.purge(before_ms, STEP).await.map_err(from_store_error)?;
        count += purged.calls;
        let utp = inner.store.utp().purge_utp(before_ms, STEP).await.map_err(from_store_error)?;
        let more = purged.has_more || utp >= STEP;
        if !more || inner.shutdown.is_cancelled() {
            return Ok(count);
        }
        tokio::task::yield_now().await;
    }
}
