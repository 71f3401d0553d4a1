//! Loads directory changes of other processes (keys, rules, tools), and requeues work items whose
//! lease has expired.

use std::time::Duration;

use crate::engine::Engine;

const EVERY: Duration = Duration::from_secs(1);

pub(crate) async fn run(engine: Engine) {
    loop {
        tokio::select! {
            () = tokio::time::sleep(EVERY) => run_once(&engine).await,
            () = engine.core.shutdown.cancelled() => return,
        }
    }
}

/// Runs one pass.
pub async fn run_once(engine: &Engine) {
    engine.core.client_queue.requeue_expired();
    if let Err(error) = engine.core.reload_catalog().await {
        tracing::debug!(%error, "the directory could not be read");
    }
}
