//! Loads directory changes of other processes: keys, rules, tools.

use std::sync::Arc;
use std::time::Duration;

use crate::registry::Registry;

/// Half of the second within which a change applies everywhere.
const REFRESH_INTERVAL: Duration = Duration::from_millis(500);

pub(crate) async fn run(registry: Arc<Registry>) {
    loop {
        tokio::select! {
            () = tokio::time::sleep(REFRESH_INTERVAL) => run_once(&registry).await,
            () = registry.core.shutdown.cancelled() => return,
        }
    }
}

/// Runs one pass.
pub async fn run_once(registry: &Arc<Registry>) {
    if let Err(error) = registry.reload_catalog().await {
        tracing::debug!(%error, "the directory could not be read");
    }
}
