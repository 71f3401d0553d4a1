//! Reconcilers: loops that take no input, compare the current state with the desired one, and act.
//!
//! Each runs on a timer, a signal or both, and most have a `run_once` that tests call directly.
//! Restart, failover and normal operation use the same path. Webhooks have their own:
//! `webhooks/dispatcher.rs`, and `approvals/webhook.rs`.

pub(crate) mod audit_retention;
pub mod claim_queued;
pub mod client_leases;
pub mod credential_expiry;
pub mod deadlines;
pub mod directory_refresh;
pub(crate) mod orphaned_tasks;
pub mod purge;
pub mod repeated_denials;
pub mod revocations;
pub mod standing_approvals;
pub mod switches;
pub mod turn_watchdog;
pub(crate) mod wakeup_webhooks;
use std::sync::Arc;

use crate::calls::Calls;
use crate::runs::Runs;

/// Recovers open calls and runs. The store may be unavailable at the start, so this retries until
/// it responds.
pub(crate) async fn recover_until_done(calls: &Arc<Calls>, runs: &Arc<Runs>) {
    while let Err(error) = calls.recover().await {
        tracing::warn!(%error, "cannot recover open calls yet; retrying");
        tokio::select! {
            () = tokio::time::sleep(std::time::Duration::from_secs(1)) => {}
            () = calls.core.shutdown.cancelled() => return,
        }
    }
    // After the calls, so that a run finds the calls it waits for already recovered.
    while let Err(error) = runs.adopt_orphaned_runs().await {
        tracing::warn!(%error, "cannot resume runs yet; retrying");
        tokio::select! {
            () = tokio::time::sleep(std::time::Duration::from_secs(1)) => {}
            () = calls.core.shutdown.cancelled() => return,
        }
    }
}
