//! Acts where the clock alone must: deadlines, and retries whose time has come.

use crate::call::Hold;
use crate::engine::Engine;
use crate::lifecycle::Event;

/// How long to wait when there is nothing to wait for.
const IDLE_MS: u64 = 60_000;
const BATCH: usize = 1_000;

pub(crate) async fn run(engine: Engine) {
    let inner = &engine.inner;
    loop {
        let now_ms = inner.clock.now_ms();
        let next_ms = inner.live.next_due_ms().unwrap_or(now_ms + IDLE_MS);
        tokio::select! {
            () = inner.clock.sleep_until(next_ms) => { run_once(&engine).await; }
            () = inner.live.sooner() => {}
            () = inner.stopping.cancelled() => return,
        }
    }
}

/// Acts on every call whose time has come. Answers with how many.
pub async fn run_once(engine: &Engine) -> usize {
    let inner = &engine.inner;
    let mut count = 0;
    loop {
        let now_ms = inner.clock.now_ms();
        let due = inner.live.due(now_ms, BATCH);
        if due.is_empty() {
            return count;
        }
        count += due.len();
        let acts = due.into_iter().map(|id| async move {
            let Some(entry) = inner.live.get(&id) else { return };
            let call = entry.call();
            match call.hold {
                Some(Hold::Retry { .. }) if now_ms < call.deadline_ms => inner.enqueue(&call),
                _ => inner.advance_surely(&call.project, &id, Event::Deadline).await,
            }
        });
        // A thousand deadlines at one instant share a few commits.
        futures::future::join_all(acts).await;
        // What could not be stored is still due; the next start settles it.
        if inner.stopping.is_cancelled() {
            return count;
        }
    }
}
