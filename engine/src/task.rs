//! Reconcilers: small loops that take no input, look at what is, and act.
//!
//! Each has a `run_once` that tests call directly, and is driven by a timer and a signal. Restart,
//! failover and the normal path are the same path.

pub mod dispatch;
pub mod notify;
pub mod purge;
pub mod refresh;
pub mod sweep;
pub mod watchdog;

use crate::engine::Engine;

/// Starts all of them; they end when the engine is shut down.
pub(crate) fn spawn_all(engine: &Engine, retention_ms: Option<u64>) {
    let tasks = &engine.inner.tasks;
    tasks.spawn(dispatch::run(engine.clone()));
    tasks.spawn(sweep::run(engine.clone()));
    tasks.spawn(refresh::run(engine.clone()));
    tasks.spawn(watchdog::run(engine.clone()));
    if engine.inner.notices.notifier.is_some() {
        tasks.spawn(notify::run(engine.clone()));
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

/// The store may be away at the start; what is open is taken up as soon as it answers.
async fn recover_until_done(engine: &Engine) {
    while let Err(error) = engine.recover().await {
        tracing::warn!(%error, "open calls could not be taken up yet");
        tokio::select! {
            () = tokio::time::sleep(std::time::Duration::from_secs(1)) => {}
            () = engine.inner.stopping.cancelled() => return,
        }
    }
    // After the calls, so that a run finds those that it waits for in hand.
    while let Err(error) = engine.take_up_runs().await {
        tracing::warn!(%error, "runs could not be taken up yet");
        tokio::select! {
            () = tokio::time::sleep(std::time::Duration::from_secs(1)) => {}
            () = engine.inner.stopping.cancelled() => return,
        }
    }
}
