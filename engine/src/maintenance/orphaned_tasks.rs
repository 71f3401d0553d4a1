//! Cancels tasks of agents whose join has ended: a crash may have come between the end of the join
//! and the cancellation of its tasks.

use std::sync::Arc;
use std::time::Duration;

use crate::utp::delegation::Delegation;

const PASS_INTERVAL: Duration = Duration::from_secs(5);

pub(crate) async fn run(delegation: Arc<Delegation>) {
    loop {
        if let Err(error) = delegation.cancel_orphaned_tasks().await {
            tracing::warn!(%error, "orphaned tasks were not canceled");
        }
        tokio::select! {
            () = tokio::time::sleep(PASS_INTERVAL) => {}
            () = delegation.core.shutdown.cancelled() => return,
        }
    }
}
