//! The webhook dispatcher: finds due deliveries and attempts them.
//!
//! The commit that ends a call also makes its delivery due in the store, so a crash before the
//! first attempt costs only time. An attempt that was in flight when the process died is repeated:
//! a receiver may be notified twice, but misses no notification. Each receiver has a limited number
//! of concurrent attempts, so deliveries to others do not wait for a slow one.

use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;

use crate::domain::delivery::{Delivery, DeliveryResponse, DeliveryStatus};
use crate::domain::fault::Error;
use crate::ports::core::from_store_error;
use crate::ports::store::{DeliveryFilter, SaveResult};
use crate::ports::webhook_sender::{WebhookMessage, WebhookSender};
use crate::webhooks::Webhooks;
use crate::webhooks::queue::{DeliveryAdmission, DeliverySlot};

/// Maximum sleep when no delivery is due.
const IDLE_MS: u64 = 60_000;
/// Delay after a failed read or write of the store.
const STORE_RETRY_DELAY: Duration = Duration::from_secs(1);
/// Page size of the due deliveries.
const PAGE_SIZE: usize = 200;
/// Pause for an overloaded receiver that requests no delay; `MAX_RECEIVER_PAUSE_MS` caps any
/// request.
const DEFAULT_RECEIVER_PAUSE_MS: u64 = 5_000;
const MAX_RECEIVER_PAUSE_MS: u64 = 60_000;

/// The attempts that are due now, and the time of the next check.
struct DueDeliveries {
    attempts: Vec<BoxFuture<'static, ()>>,
    next_ms: Option<u64>,
}

pub(crate) async fn run(webhooks: Arc<Webhooks>) {
    loop {
        let now_ms = webhooks.core.clock.now_ms();
        let next_ms = match find_due(&webhooks).await {
            Ok(round) => {
                for tried in round.attempts {
                    webhooks.core.tasks.spawn(tried);
                }
                round.next_ms.unwrap_or(u64::MAX).min(now_ms + IDLE_MS)
            }
            Err(error) => {
                tracing::warn!(%error, "cannot read due webhook deliveries");
                now_ms + STORE_RETRY_DELAY.as_millis() as u64
            }
        };
        tokio::select! {
            () = webhooks.core.clock.sleep_until(next_ms) => {}
            () = webhooks.webhook_queue.wait_woken() => {}
            () = webhooks.core.shutdown.cancelled() => return,
        }
    }
}

/// Attempts every due delivery and waits for the results. Returns the number of attempts.
pub async fn run_once(webhooks: &Arc<Webhooks>) -> Result<usize, Error> {
    let round = find_due(webhooks).await?;
    let count = round.attempts.len();
    futures::future::join_all(round.attempts).await;
    Ok(count)
}

async fn find_due(webhooks: &Arc<Webhooks>) -> Result<DueDeliveries, Error> {
    let mut round = DueDeliveries { attempts: Vec::new(), next_ms: None };
    let Some(notifier) = &webhooks.webhook_queue.sender else { return Ok(round) };
    let mut after = None;
    loop {
        let page = webhooks
            .core
            .store
            .pending_deliveries(after, PAGE_SIZE)
            .await
            .map_err(from_store_error)?;
        let clock = &webhooks.core.clock;
        let (now_ms, wall_ms) = (clock.now_ms(), clock.wall_ms());
        let last = page.last().map(|last| (last.due_ms.unwrap_or(0), last.call_id.clone()));
        let is_last = page.len() < PAGE_SIZE;
        for delivery in page {
            let due_ms = delivery.due_ms.unwrap_or(u64::MAX);
            let sooner = |ms: u64| Some(round.next_ms.map_or(ms, |next_ms| next_ms.min(ms)));
            if due_ms > wall_ms {
                round.next_ms = sooner(clock.to_monotonic_ms(due_ms));
                return Ok(round);
            }
            match webhooks.webhook_queue.try_admit(&delivery, now_ms) {
                DeliveryAdmission::Admitted(lane) => {
                    let (webhooks, notifier) = (webhooks.clone(), notifier.clone());
                    round
                        .attempts
                        .push(Box::pin(attempt_delivery(webhooks, notifier, delivery, lane)));
                }
                DeliveryAdmission::AtCapacity => return Ok(round),
                DeliveryAdmission::Deferred(until_ms) => {
                    round.next_ms = until_ms.map_or(round.next_ms, sooner);
                }
            }
        }
        if is_last {
            return Ok(round);
        }
        after = last;
    }
}

/// Makes one attempt and stores the result.
async fn attempt_delivery(
    webhooks: Arc<Webhooks>,
    notifier: Arc<dyn WebhookSender>,
    delivery: Delivery,
    lane: DeliverySlot,
) {
    let (project, id) = (&delivery.project, &delivery.call_id);
    let read = async {
        let stored = webhooks.core.store.delivery(project, id).await?;
        Ok::<_, crate::ports::store::StoreError>((
            stored,
            webhooks.core.store.call(project, id).await?,
        ))
    };
    let (stored, call) = match read.await {
        // Any other version was attempted meanwhile; a missing delivery was purged with its call.
        Ok((Some((stored, _)), Some(call))) if stored.version == delivery.version => {
            (stored, Arc::new(call))
        }
        Ok(_) => return,
        Err(error) => {
            tracing::warn!(call = %id, %error, "cannot read a webhook delivery");
            return pause_after_store_error(&webhooks).await;
        }
    };
    // The receiver may read the call as soon as it is notified, so the end must be visible first.
    webhooks.calls.wait_until_visible(id, |call| call.status.is_terminal()).await;
    let began_ms = webhooks.core.clock.wall_ms();
    let message = WebhookMessage { delivery: stored, call };
    let answer = tokio::select! {
        answer = notifier.send(message) => answer,
        // No result is stored, so the next start repeats the attempt.
        () = webhooks.core.shutdown.cancelled() => return,
    };
    let now_ms = webhooks.core.clock.wall_ms();
    if answer.is_receiver_overloaded() {
        let quiet_ms =
            answer.retry_after_ms.unwrap_or(DEFAULT_RECEIVER_PAUSE_MS).min(MAX_RECEIVER_PAUSE_MS);
        lane.pause_receiver_until(webhooks.core.clock.now_ms() + quiet_ms);
    }
    save_attempt(&webhooks, &delivery, &answer, (began_ms, now_ms)).await;
    if answer.result == Ok(410)
        && let Err(error) = end_deliveries_to_url(&webhooks, &delivery).await
    {
        // Each of them will receive the same response when it is attempted.
        tracing::warn!(%error, "cannot end other webhook deliveries to a URL that is gone");
    }
}

/// Ends every outstanding delivery to a URL that responded with 410. A later call that names the
/// URL again starts anew.
async fn end_deliveries_to_url(webhooks: &Arc<Webhooks>, delivery: &Delivery) -> Result<(), Error> {
    for status in [DeliveryStatus::AwaitingOutcome, DeliveryStatus::Pending] {
        let (project, status) = (delivery.project.clone(), Some(status));
        let mut filter = DeliveryFilter { project, status, before: None, limit: PAGE_SIZE };
        loop {
            let page =
                webhooks.core.store.deliveries(filter.clone()).await.map_err(from_store_error)?;
            filter.before = page.last().map(|last| last.call_id.clone());
            let is_last = page.len() < PAGE_SIZE;
            for other in page.into_iter().filter(|other| other.url == delivery.url) {
                // A delivery with an attempt in flight gets its own response.
                if let Some(next) = other.after_url_gone()
                    && !webhooks.webhook_queue.is_in_flight(&next.call_id)
                {
                    webhooks
                        .core
                        .store
                        .save_delivery(next, None)
                        .await
                        .map_err(from_store_error)?;
                }
            }
            if is_last || webhooks.core.shutdown.is_cancelled() {
                break;
            }
        }
    }
    Ok(())
}

/// Stores the result of an attempt; retries until the store accepts it.
async fn save_attempt(
    webhooks: &Arc<Webhooks>,
    delivery: &Delivery,
    answer: &DeliveryResponse,
    times: (u64, u64),
) {
    let (mut next, mut tried) =
        delivery.after_attempt(answer, times, &webhooks.webhook_queue.settings.schedule);
    loop {
        match webhooks.core.store.save_delivery(next.clone(), Some(tried.clone())).await {
            Ok(SaveResult::Saved) => return log_attempt(&next, answer),
            // A redelivery was requested meanwhile: record this attempt, another one follows.
            Ok(SaveResult::Conflict) => {
                match webhooks.core.store.delivery(&delivery.project, &delivery.call_id).await {
                    Ok(Some((stored, _))) => {
                        (next, tried) = stored.with_attempt_recorded(answer, times)
                    }
                    Ok(None) => return,
                    Err(error) => {
                        tracing::warn!(call = %delivery.call_id, %error, "attempt not stored yet");
                        pause_after_store_error(webhooks).await;
                    }
                }
            }
            Err(error) => {
                tracing::warn!(call = %delivery.call_id, %error, "attempt not stored yet");
                pause_after_store_error(webhooks).await;
            }
        }
        if webhooks.core.shutdown.is_cancelled() {
            return;
        }
    }
}

fn log_attempt(next: &Delivery, answer: &DeliveryResponse) {
    let outcome = match (next.status, &answer.result) {
        (DeliveryStatus::Gone, _) => "gone",
        (_, Ok(200..=299)) => "delivered",
        _ => "failed",
    };
    metrics::counter!("toolcrib_webhook_deliveries_total", "outcome" => outcome).increment(1);
    let reason = next.last_error.as_deref().unwrap_or_default();
    match next.status {
        DeliveryStatus::Exhausted | DeliveryStatus::Gone => {
            let (status, tries) = (next.status.as_str(), next.attempts);
            tracing::warn!(
                call = %next.call_id, status, tries, why = reason, "webhook delivery abandoned"
            );
        }
        DeliveryStatus::Pending => {
            let tries = next.attempts;
            tracing::debug!(call = %next.call_id, tries, why = reason, "webhook not delivered");
        }
        _ => {}
    }
}

async fn pause_after_store_error(webhooks: &Arc<Webhooks>) {
    tokio::select! {
        () = tokio::time::sleep(STORE_RETRY_DELAY) => {}
        () = webhooks.core.shutdown.cancelled() => {}
    }
}
