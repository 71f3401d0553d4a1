//! Ends keys and session tokens that have expired, durably, and records the time of day: after a
//! restart with a clock that was set back, neither is valid again.

use std::sync::Arc;
use std::time::Duration;

use crate::registry::Admin;

const CHECK_INTERVAL: Duration = Duration::from_secs(1);

pub(crate) async fn run(admin: Arc<Admin>) {
    loop {
        tokio::select! {
            () = tokio::time::sleep(CHECK_INTERVAL) => run_once(&admin).await,
            () = admin.core.shutdown.cancelled() => return,
        }
    }
}

/// Runs one pass.
pub async fn run_once(admin: &Arc<Admin>) {
    if let Err(error) = admin.expire_credentials().await {
        tracing::debug!(%error, "expired credentials could not be ended");
    }
}
