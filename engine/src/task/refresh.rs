//! Notices what another process changed in the directory (keys, rules, tools), and puts back in
//! line what clients took and never acknowledged.

use std::time::Duration;

use crate::engine::Engine;

const EVERY: Duration = Duration::from_secs(1);

pub(crate) async fn run(engine: Engine) {
    loop {
        tokio::select! {
            () = tokio::time::sleep(EVERY) => run_once(&engine).await,
            () = engine.inner.stopping.cancelled() => return,
        }
    }
}

/// Looks once.
pub async fn run_once(engine: &Engine) {
    engine.inner.desk.run_once();
    if let Err(error) = engine.inner.renew_catalog().await {
        tracing::debug!(%error, "the directory could not be read");
    }
}
