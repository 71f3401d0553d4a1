//! Loads directory changes of other processes (keys, rules, tools), and requeues work items whose
//! lease has expired.

use std::sync::Arc;
use std::time::Duration;

use crate::clients::Clients;

const REFRESH_INTERVAL: Duration = Duration::from_secs(1);

pub(crate) async fn run(clients: Arc<Clients>) {
    loop {
        tokio::select! {
            () = tokio::time::sleep(REFRESH_INTERVAL) => run_once(&clients).await,
            () = clients.core.shutdown.cancelled() => return,
        }
    }
}

/// Runs one pass.
pub async fn run_once(clients: &Arc<Clients>) {
    clients.client_queue.requeue_expired();
    if let Err(error) = clients.registry.reload_catalog().await {
        tracing::debug!(%error, "the directory could not be read");
    }
}
