//! Maintains turns: delivers outcomes that are in no inbox yet, expires leases, and repeats wakeups
//! for agents with unread items.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use crate::domain::fault::Error;
use crate::domain::utp::{DEFAULT_CHANNEL, InboxItem, OutboxMessage};
use crate::ports::core::from_store_error;
use crate::utp::Utp;
use crate::utp::wakeups::WakeReason;

const PASS_INTERVAL: Duration = Duration::from_secs(5);
const PAGE_SIZE: usize = 200;
/// Agents checked per pass; finding them scans every unread item in the store.
const AGENTS_PER_PASS: usize = 2_000;
/// Age of an unread item after which the agent is woken again, every `WAKEUP_INTERVAL_MS`.
const UNREAD_GRACE_MS: u64 = 5_000;
const WAKEUP_INTERVAL_MS: u64 = 30_000;

pub(crate) async fn run(utp: Arc<Utp>) {
    let throttle = WakeupThrottle::default();
    loop {
        if let Err(error) = run_once(&utp, &throttle).await {
            tracing::warn!(%error, "turn maintenance failed");
        }
        tokio::select! {
            () = tokio::time::sleep(PASS_INTERVAL) => {}
            () = utp.core.shutdown.cancelled() => return,
        }
    }
}

/// The agents that were woken within `WAKEUP_INTERVAL_MS`, and the cursor for the next pass.
#[derive(Default)]
pub struct WakeupThrottle {
    /// Time of the last wakeup, by project and agent. Each pass removes those that are too old.
    last_sent_ms: Mutex<HashMap<(String, String), u64>>,
    cursor: AtomicU64,
}

/// Runs one pass.
pub async fn run_once(utp: &Arc<Utp>, throttle: &WakeupThrottle) -> Result<(), Error> {
    deliver_missed_outcomes(utp).await?;
    expire_turns(utp).await?;
    resend_wakeups(utp, throttle).await
}

async fn deliver_missed_outcomes(utp: &Arc<Utp>) -> Result<(), Error> {
    let mut after = 0;
    loop {
        let page = utp
            .core
            .store
            .utp()
            .undelivered_step_calls(after, PAGE_SIZE)
            .await
            .map_err(from_store_error)?;
        let Some((last, _)) = page.last() else { return Ok(()) };
        after = *last;
        for (_, step_call) in page {
            let Some(id) = step_call.call_id.as_deref().and_then(|id| id.parse().ok()) else {
                continue;
            };
            let call = utp.cards.find_call(&step_call.project, &id).await?;
            if let Some(call) = call.filter(|call| call.status.is_terminal()) {
                utp.deliver_to_inbox(&call).await?;
            }
        }
    }
}

async fn expire_turns(utp: &Arc<Utp>) -> Result<(), Error> {
    let now_ms = utp.core.clock.now_ms();
    for turn in
        utp.core.store.utp().expired_turns(now_ms, PAGE_SIZE).await.map_err(from_store_error)?
    {
        tracing::info!(turn = turn.turn_id, agent = turn.agent_id, "turn lease expired");
        utp.expire_turn(turn).await?;
    }
    Ok(())
}

async fn resend_wakeups(utp: &Arc<Utp>, throttle: &WakeupThrottle) -> Result<(), Error> {
    if !utp.publishes_outbox && !utp.wakeups.has_urls() {
        return Ok(());
    }
    let now_ms = utp.core.clock.now_ms();
    throttle.last_sent_ms.lock().retain(|_, at_ms| *at_ms + WAKEUP_INTERVAL_MS > now_ms);
    let before_ms = utp.core.clock.wall_ms().saturating_sub(UNREAD_GRACE_MS);
    let after = throttle.cursor.load(Ordering::Relaxed);
    let page =
        utp.core.store.utp().agents_with_unread_items(before_ms, after, AGENTS_PER_PASS).await;
    let page = page.map_err(from_store_error)?;
    // A full page continues in the next pass; after the last page the scan starts over.
    let last =
        page.last().filter(|_| page.len() == AGENTS_PER_PASS).map_or(0, |(number, _)| *number);
    throttle.cursor.store(last, Ordering::Relaxed);
    send_due_wakeups(utp, throttle, page.into_iter().map(|(_, item)| item).collect(), now_ms).await
}

/// Sends wakeups to agents that were not woken recently.
async fn send_due_wakeups(
    utp: &Arc<Utp>,
    throttle: &WakeupThrottle,
    unread: Vec<InboxItem>,
    now_ms: u64,
) -> Result<(), Error> {
    let due: Vec<InboxItem> = {
        let mut last_sent_ms = throttle.last_sent_ms.lock();
        let mut record_if_due = |item: &InboxItem| {
            let agent = (item.project.clone(), item.agent_id.clone());
            match last_sent_ms.entry(agent) {
                Entry::Occupied(_) => false,
                Entry::Vacant(vacant) => {
                    vacant.insert(now_ms);
                    true
                }
            }
        };
        unread.into_iter().filter(|item| record_if_due(item)).collect()
    };
    let mut messages = Vec::new();
    for item in due {
        utp.wakeups.queue(&item.project, &item.agent_id, WakeReason::StillUnread);
        let turn = utp.core.store.utp().turn(&item.project, &item.turn_id).await;
        let turn = turn.map_err(from_store_error)?;
        let channel = turn.as_ref().map_or(DEFAULT_CHANNEL, |turn| turn.channel.as_str());
        // A new id: the outbox ignores a message whose id it already has.
        messages.extend(
            utp.build_wakeup(&item, channel)
                .map(|wakeup| OutboxMessage { id: format!("{}-{now_ms}", wakeup.id), ..wakeup }),
        );
    }
    if messages.is_empty() {
        return Ok(());
    }
    utp.core.store.utp().append_to_outbox(messages).await.map_err(from_store_error)?;
    utp.core.bus.wake(&crate::ports::bus::Topic::Outbox);
    Ok(())
}
