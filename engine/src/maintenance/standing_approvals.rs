//! Ends standing approvals that have expired or whose run has ended, durably: after a restart with
//! a clock that was set back, none is valid again.

use std::sync::Arc;
use std::time::Duration;

use crate::approvals::Approvals;

const CHECK_INTERVAL: Duration = Duration::from_secs(5);

pub(crate) async fn run(approvals: Arc<Approvals>) {
    loop {
        tokio::select! {
            () = tokio::time::sleep(CHECK_INTERVAL) => run_once(&approvals).await,
            () = approvals.core.shutdown.cancelled() => return,
        }
    }
}

/// Runs one pass.
pub async fn run_once(approvals: &Arc<Approvals>) {
    if let Err(error) = approvals.end_standing().await {
        tracing::debug!(%error, "standing approvals could not be ended");
    }
}
