//! Announces requested approvals with a signed webhook, and repeats a failed attempt: a reconciler,
//! like those of `maintenance`. The store has the time of the next attempt, so that a restart loses
//! none.

use std::sync::Arc;
use std::time::Duration;

use super::Approvals;
use crate::domain::call::approval::{Approval, ApprovalStatus, ApprovalWebhook};
use crate::domain::fault::Error;
use crate::ports::core::from_store_error;
use crate::ports::webhook_sender::ApprovalMessage;

/// Interval of passes without a wakeup.
const PASS_INTERVAL: Duration = Duration::from_secs(2);
const MAX_DUE_PER_PASS: usize = 64;
/// Maximum number of attempts for one approval.
const MAX_ATTEMPTS: u32 = 10;
/// Delay after the first failed attempt. Each further failure doubles it.
const RETRY_DELAY_MS: u64 = 2_000;

/// Sends webhooks until the engine shuts down.
pub(crate) async fn run(approvals: Arc<Approvals>) {
    loop {
        if let Err(error) = run_once(&approvals).await {
            tracing::warn!(%error, "webhooks of approvals could not be sent");
        }
        tokio::select! {
            () = approvals.dispatcher.approval_requested.notified() => {}
            () = tokio::time::sleep(PASS_INTERVAL) => {}
            () = approvals.core.shutdown.cancelled() => return,
        }
    }
}

/// Attempts the webhooks that are due, at most 64 in one pass. Returns their number.
pub async fn run_once(approvals: &Arc<Approvals>) -> Result<usize, Error> {
    let now_ms = approvals.core.wall_ms();
    let store = approvals.core.store.approvals();
    let due = store.due_approval_webhooks(now_ms, MAX_DUE_PER_PASS).await;
    let due = due.map_err(from_store_error)?;
    let count = due.len();
    let attempts = due.into_iter().map(|approval| attempt_webhook(approvals, approval));
    futures::future::try_join_all(attempts).await?;
    Ok(count)
}

/// Attempts one webhook, and stores the time of the next attempt if it failed.
async fn attempt_webhook(approvals: &Arc<Approvals>, approval: Approval) -> Result<(), Error> {
    let core = &approvals.core;
    let settings = (&core.webhook_sender, &core.approval_settings.webhook_url);
    let (Some(sender), Some(url)) = settings else { return Ok(()) };
    let (id, tries) = (approval.id.clone(), approval.webhook.tries + 1);
    let mut next = ApprovalWebhook { due_ms: None, tries };
    // A decision makes the announcement pointless.
    if approval.status == ApprovalStatus::Pending {
        let expires_ms = approval.expires_ms;
        let link = core.approval_settings.link(&id);
        let message = ApprovalMessage { url: url.clone(), approval, link };
        let response = sender.send_approval(message).await;
        let is_delivered = matches!(response.result, Ok(code) if (200..300).contains(&code));
        let result = if is_delivered { "ok" } else { "failed" };
        metrics::counter!("toolcrib_approval_webhooks_total", "result" => result).increment(1);
        if !is_delivered {
            let delay_ms = RETRY_DELAY_MS << (tries - 1).min(16);
            let delay_ms = delay_ms.max(response.retry_after_ms.unwrap_or(0));
            let at_ms = core.wall_ms().saturating_add(delay_ms);
            tracing::warn!(approval = id, result = ?response.result, "webhook not delivered");
            next.due_ms = Some(at_ms).filter(|at_ms| tries < MAX_ATTEMPTS && *at_ms < expires_ms);
        }
    }
    core.store.approvals().set_approval_webhook(&id, next).await.map_err(from_store_error)
}
