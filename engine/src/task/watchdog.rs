//! Maintains turns: delivers outcomes that are in no inbox yet, expires leases, and repeats wakeups
//! for agents with unread items.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use crate::engine::{Engine, Inner, unavailable};
use crate::fault::Error;
use crate::utp::{DEFAULT_CHANNEL, InboxItem, Letter};

const EVERY: Duration = Duration::from_secs(5);
const PAGE: usize = 200;
/// Agents checked per pass; finding them scans every unread item in the store.
const AGENTS: usize = 2_000;
/// Age of an unread item after which the agent is woken again, every `WAKEUP_INTERVAL_MS`.
const WAITS_MS: u64 = 5_000;
const RING_AGAIN_MS: u64 = 30_000;

pub(crate) async fn run(engine: Engine) {
    let rung = Rung::default();
    loop {
        if let Err(error) = run_once(&engine, &rung).await {
            tracing::warn!(%error, "turn maintenance failed");
        }
        tokio::select! {
            () = tokio::time::sleep(EVERY) => {}
            () = engine.inner.stopping.cancelled() => return,
        }
    }
}

/// The time of each agent's last wakeup, and the cursor for the next pass.
#[derive(Default)]
pub struct Rung {
    last: Mutex<HashMap<(String, String), u64>>,
    after: AtomicU64,
}

/// Runs one pass.
pub async fn run_once(engine: &Engine, rung: &Rung) -> Result<(), Error> {
    deliver(engine).await?;
    expire(engine).await?;
    ring(engine, rung).await
}

async fn deliver(engine: &Engine) -> Result<(), Error> {
    let inner = &engine.inner;
    let mut after = 0;
    loop {
        let page = inner.store.utp().undelivered(after, PAGE).await.map_err(unavailable)?;
        let Some((last, _)) = page.last() else { return Ok(()) };
        after = *last;
        for (_, waiting) in page {
            let Some(id) = waiting.call_id.as_deref().and_then(|id| id.parse().ok()) else {
                continue;
            };
            let call = inner.call_of(&waiting.project, &id).await?;
            if let Some(call) = call.filter(|call| call.status.is_terminal()) {
                inner.deliver(&call).await?;
            }
        }
    }
}

async fn expire(engine: &Engine) -> Result<(), Error> {
    let inner = &engine.inner;
    let now_ms = inner.clock.now_ms();
    for turn in inner.store.utp().expired_turns(now_ms, PAGE).await.map_err(unavailable)? {
        tracing::info!(turn = turn.turn_id, agent = turn.agent_id, "turn lease expired");
        inner.expire(turn).await?;
    }
    Ok(())
}

async fn ring(engine: &Engine, rung: &Rung) -> Result<(), Error> {
    let inner = &engine.inner;
    if !inner.publishes {
        return Ok(());
    }
    let now_ms = inner.clock.now_ms();
    rung.last.lock().retain(|_, at_ms| *at_ms + RING_AGAIN_MS > now_ms);
    let (before_ms, after) = (now_ms.saturating_sub(WAITS_MS), rung.after.load(Ordering::Relaxed));
    let page = inner.store.utp().waiting_agents(before_ms, after, AGENTS).await;
    let page = page.map_err(unavailable)?;
    // A full page continues in the next pass; after the last page the scan starts over.
    let last = page.last().filter(|_| page.len() == AGENTS).map_or(0, |(number, _)| *number);
    rung.after.store(last, Ordering::Relaxed);
    ring_for(inner, rung, page.into_iter().map(|(_, item)| item).collect(), now_ms).await
}

/// Sends wakeups to agents that were not woken recently.
async fn ring_for(
    inner: &Inner,
    rung: &Rung,
    waiting: Vec<InboxItem>,
    now_ms: u64,
) -> Result<(), Error> {
    let due: Vec<InboxItem> = {
        let mut last = rung.last.lock();
        let mut ring =
            |item: &InboxItem| match last.entry((item.project.clone(), item.agent_id.clone())) {
                Entry::Occupied(_) => false,
                Entry::Vacant(place) => {
                    place.insert(now_ms);
                    true
                }
            };
        waiting.into_iter().filter(|item| ring(item)).collect()
    };
    let mut letters = Vec::new();
    for item in due {
        let turn = inner.store.utp().turn(&item.project, &item.turn_id).await;
        let turn = turn.map_err(unavailable)?;
        let channel = turn.as_ref().map_or(DEFAULT_CHANNEL, |turn| turn.channel.as_str());
        let again = inner.wakeup(&item, channel);
        letters.extend(again.map(|l| Letter { id: format!("{}-{now_ms}", l.id), ..l }));
    }
    if letters.is_empty() {
        return Ok(());
    }
    inner.store.utp().post(letters).await.map_err(unavailable)?;
    inner.bus.wake(&crate::bus::Topic::Outbox);
    Ok(())
}
