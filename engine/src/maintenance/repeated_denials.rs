//! Writes the summaries of repeated denials to the audit log, when their minute is over and at the
//! end of the process.

use std::sync::Arc;
use std::time::Duration;

use crate::registry::Registry;

const CHECK_INTERVAL: Duration = Duration::from_secs(5);

pub(crate) async fn run(registry: Arc<Registry>) {
    loop {
        tokio::select! {
            () = tokio::time::sleep(CHECK_INTERVAL) => run_once(&registry).await,
            () = registry.core.shutdown.cancelled() => break,
        }
    }
    flush(&registry, true).await;
}

/// Runs one pass.
pub async fn run_once(registry: &Arc<Registry>) {
    flush(registry, false).await;
}

async fn flush(registry: &Registry, is_last: bool) {
    if let Err(error) = registry.write_repeated_denials(is_last).await {
        tracing::warn!(%error, "numbers of denials were not audited");
    }
}
