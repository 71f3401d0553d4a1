//! Tells callers that their calls have ended: finds the deliveries that are due and tries them.
//!
//! What is due stands in the store, written by the commit that ended the call, so a crash between
//! the end and the delivery costs nothing but time. A try that was under way when the process died
//! is made again: a receiver may hear of an end twice, and never not at all. A slow receiver has
//! only so many lanes; what is due to others goes past it.

use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;

use crate::delivery::{Answer, Delivery, DeliveryStatus};
use crate::engine::{Engine, Entered, Inner, Lane, unavailable};
use crate::fault::Error;
use crate::notify::{Notice, Notifier};
use crate::store::{DeliveryFilter, Saved};

/// How long to wait when there is nothing to wait for.
const IDLE_MS: u64 = 60_000;
/// After the store could not be read or written.
const STORE_AWAY: Duration = Duration::from_secs(1);
/// How many are read at a time.
const PAGE: usize = 200;
/// How long an overloaded receiver is left alone where it does not say, and at most.
const QUIET_MS: u64 = 5_000;
const MAX_QUIET_MS: u64 = 60_000;

/// What is due now, and when to look again.
struct Round {
    tries: Vec<BoxFuture<'static, ()>>,
    next_ms: Option<u64>,
}

pub(crate) async fn run(engine: Engine) {
    let inner = &engine.inner;
    loop {
        let now_ms = inner.clock.now_ms();
        let next_ms = match look(&engine).await {
            Ok(round) => {
                for tried in round.tries {
                    inner.tasks.spawn(tried);
                }
                round.next_ms.unwrap_or(u64::MAX).min(now_ms + IDLE_MS)
            }
            Err(error) => {
                tracing::warn!(%error, "due callbacks could not be looked up");
                now_ms + STORE_AWAY.as_millis() as u64
            }
        };
        tokio::select! {
            () = inner.clock.sleep_until(next_ms) => {}
            () = inner.notices.woken() => {}
            () = inner.stopping.cancelled() => return,
        }
    }
}

/// Tries everything that is due, and waits for what comes of it. Answers with how many tries.
pub async fn run_once(engine: &Engine) -> Result<usize, Error> {
    let round = look(engine).await?;
    let count = round.tries.len();
    futures::future::join_all(round.tries).await;
    Ok(count)
}

async fn look(engine: &Engine) -> Result<Round, Error> {
    let inner = &engine.inner;
    let mut round = Round { tries: Vec::new(), next_ms: None };
    let Some(notifier) = &inner.notices.notifier else { return Ok(round) };
    let mut after = None;
    loop {
        let page = inner.store.pending_deliveries(after, PAGE).await.map_err(unavailable)?;
        let now_ms = inner.clock.now_ms();
        let last = page.last().map(|last| (last.due_ms.unwrap_or(0), last.call_id.clone()));
        let is_last = page.len() < PAGE;
        for delivery in page {
            let due_ms = delivery.due_ms.unwrap_or(u64::MAX);
            let sooner = |ms: u64| Some(round.next_ms.map_or(ms, |next_ms| next_ms.min(ms)));
            if due_ms > now_ms {
                round.next_ms = sooner(due_ms);
                return Ok(round);
            }
            match inner.notices.enter(&delivery, now_ms) {
                Entered::Yes(lane) => {
                    let (inner, notifier) = (inner.clone(), notifier.clone());
                    round.tries.push(Box::pin(tell(inner, notifier, delivery, lane)));
                }
                Entered::Full => return Ok(round),
                Entered::NotNow(until_ms) => {
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

/// One try, and keeping what came of it.
async fn tell(inner: Arc<Inner>, notifier: Arc<dyn Notifier>, delivery: Delivery, lane: Lane) {
    let (project, id) = (&delivery.project, &delivery.call_id);
    let read = async {
        let stored = inner.store.delivery(project, id).await?;
        Ok::<_, crate::store::StoreError>((stored, inner.store.call(project, id).await?))
    };
    let (stored, call) = match read.await {
        // Tried meanwhile, or purged with its call.
        Ok((Some((stored, _)), Some(call))) if stored.version == delivery.version => {
            (stored, Arc::new(call))
        }
        Ok(_) => return,
        Err(error) => {
            tracing::warn!(call = %id, %error, "a callback could not be prepared");
            return pause(&inner).await;
        }
    };
    // The receiver may look at the call as soon as it is told.
    inner.until_shown(id, |call| call.status.is_terminal()).await;
    let began_ms = inner.clock.now_ms();
    let notice = Notice { delivery: stored, call };
    let answer = tokio::select! {
        answer = notifier.deliver(notice) => answer,
        // Nothing is kept of it, so the next start tries again.
        () = inner.stopping.cancelled() => return,
    };
    let now_ms = inner.clock.now_ms();
    if answer.asks_for_quiet() {
        let quiet_ms = answer.retry_after_ms.unwrap_or(QUIET_MS).min(MAX_QUIET_MS);
        lane.quiet_until(now_ms + quiet_ms);
    }
    keep(&inner, &delivery, &answer, (began_ms, now_ms)).await;
    if answer.result == Ok(410)
        && let Err(error) = end_others(&inner, &delivery).await
    {
        // Each of them will be answered the same.
        tracing::warn!(%error, "callbacks that are not wanted any more could not be ended");
    }
}

/// A receiver that wants no more is sent nothing more: what was asked for its URL until now, and is
/// still to come, is ended. Who names the URL again later asks for it anew.
async fn end_others(inner: &Inner, gone: &Delivery) -> Result<(), Error> {
    for status in [DeliveryStatus::Waiting, DeliveryStatus::Pending] {
        let (project, status) = (gone.project.clone(), Some(status));
        let mut filter = DeliveryFilter { project, status, before: None, limit: PAGE };
        loop {
            let page = inner.store.deliveries(filter.clone()).await.map_err(unavailable)?;
            filter.before = page.last().map(|last| last.call_id.clone());
            let is_last = page.len() < PAGE;
            for other in page.into_iter().filter(|other| other.url == gone.url) {
                // One that is on its way has its own answer.
                if let Some(next) = other.unwanted()
                    && !inner.notices.is_under_way(&next.call_id)
                {
                    inner.store.save_delivery(next, None).await.map_err(unavailable)?;
                }
            }
            if is_last || inner.stopping.is_cancelled() {
                break;
            }
        }
    }
    Ok(())
}

/// Keeps what came of a try, as soon as the store takes it.
async fn keep(inner: &Inner, delivery: &Delivery, answer: &Answer, times: (u64, u64)) {
    let (mut next, mut tried) = delivery.tried(answer, times, &inner.notices.settings.schedule);
    loop {
        match inner.store.save_delivery(next.clone(), Some(tried.clone())).await {
            Ok(Saved::Yes) => return report(&next, answer),
            // Asked for again meanwhile: this try is written down, and there will be another.
            Ok(Saved::Stale) => {
                match inner.store.delivery(&delivery.project, &delivery.call_id).await {
                    Ok(Some((stored, _))) => (next, tried) = stored.noted(answer, times),
                    Ok(None) => return,
                    Err(error) => {
                        tracing::warn!(call = %delivery.call_id, %error, "will be kept later");
                        pause(inner).await;
                    }
                }
            }
            Err(error) => {
                tracing::warn!(call = %delivery.call_id, %error, "will be kept later");
                pause(inner).await;
            }
        }
        if inner.stopping.is_cancelled() {
            return;
        }
    }
}

fn report(next: &Delivery, answer: &Answer) {
    let outcome = match (next.status, &answer.result) {
        (DeliveryStatus::Gone, _) => "gone",
        (_, Ok(200..=299)) => "delivered",
        _ => "failed",
    };
    metrics::counter!("toolcrib_webhook_deliveries_total", "outcome" => outcome).increment(1);
    let why = next.last_error.as_deref().unwrap_or_default();
    match next.status {
        DeliveryStatus::Exhausted | DeliveryStatus::Gone => {
            let (status, tries) = (next.status.as_str(), next.tries);
            tracing::warn!(call = %next.call_id, status, tries, why, "a callback was given up");
        }
        DeliveryStatus::Pending => {
            tracing::debug!(call = %next.call_id, tries = next.tries, why, "a callback failed");
        }
        _ => {}
    }
}

async fn pause(inner: &Inner) {
    tokio::select! {
        () = tokio::time::sleep(STORE_AWAY) => {}
        () = inner.stopping.cancelled() => {}
    }
}
