//! Reconcilers: loops that take no input, compare the current state with the desired one, and act.
//!
//! Each has a `run_once` that tests call directly, and runs on a timer and a signal. Restart,
//! failover and normal operation use the same path.

pub mod dispatch;

pub mod deadlines;
pub mod directory_refresh;
pub mod purge;
pub mod turn_watchdog;

use crate::engine::Engine;

/// Starts all reconcilers; they end when the engine shuts down.
pub(crate) fn spawn_all(engine: &Engine, retention_ms: Option<u64>) {
    let tasks = &engine.core.tasks;
    tasks.spawn(dispatch::run(engine.clone()));
    tasks.spawn(deadlines::run(engine.clone()));
    tasks.spawn(directory_refresh::run(engine.clone()));
    tasks.spawn(turn_watchdog::run(engine.clone()));
    if engine.core.webhook_queue.sender.is_some() {
        tasks.spawn(crate::webhooks::dispatcher::run(engine.clone()));
    }
    if let Some(retention_ms) = retention_ms {
        tasks.spawn(purge::run(engine.clone(), retention_ms));
    }
    let engine = engine.clone();
    tasks.spawn({
        let tasks_engine = engine.clone();
        async move { recover_until_done(&tasks_engine).await }
    });
}

/// Recovers open calls and runs. The store may be unavailable at the start, so this retries until
/// it responds.
async fn recover_until_done(engine: &Engine) {
    while let Err(error) = engine.recover().await {
        tracing::warn!(%error, "cannot recover open calls yet; retrying");
        tokio::select! {
            () = tokio::time::sleep(std::time::Duration::from_secs(1)) => {}
            () = engine.core.shutdown.cancelled() => return,
        }
    }
    // After the calls, so that a run finds the calls it waits for already recovered.
    while let Err(error) = engine.adopt_orphaned_runs().await {
        tracing::warn!(%error, "cannot resume runs yet; retrying");
        tokio::select! {
            () = tokio::time::sleep(std::time::Duration::from_secs(1)) => {}
            () = engine.core.shutdown.cancelled() => return,
        }
    }
}
