//! Cancels the calls of agents whose join, or whose calling run or turn, has ended: a crash may
//! have come between that end and the cancellation.

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
