//! Deletes ended calls that are older than the retention, in small steps.

use std::time::Duration;

use crate::engine::{Engine, unavailable};
use crate::fault::Error;

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
            () = engine.inner.stopping.cancelled() => return,
        }
    }
}

/// Purges everything that is old enough. Returns the number of deleted calls.
pub async fn run_once(engine: &Engine, retention_ms: u64) -> Result<usize, Error> {
    let inner = &engine.inner;
    let before_ms = inner.clock.now_ms().saturating_sub(retention_ms);
    let mut count = 0;
    loop {
        let purged = inner.store.purge(before_ms, STEP).await.map_err(unavailable)?;
        count += purged.calls;
        let utp = inner.store.utp().purge_utp(before_ms, STEP).await.map_err(unavailable)?;
        let more = purged.more || utp >= STEP;
        if !more || inner.stopping.is_cancelled() {
            return Ok(count);
        }
        tokio::task::yield_now().await;
    }
}
