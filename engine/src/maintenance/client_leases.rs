//! Requeues the work items of clients whose lease has expired.

use std::sync::Arc;
use std::time::Duration;

use crate::clients::Clients;

const CHECK_INTERVAL: Duration = Duration::from_millis(500);

pub(crate) async fn run(clients: Arc<Clients>) {
    loop {
        tokio::select! {
            () = tokio::time::sleep(CHECK_INTERVAL) => run_once(&clients),
            () = clients.core.shutdown.cancelled() => return,
        }
    }
}

/// Runs one pass.
pub fn run_once(clients: &Arc<Clients>) {
    clients.client_queue.requeue_expired();
}
