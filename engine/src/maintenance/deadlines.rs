//! Acts where the clock alone must: deadlines, and retries that are due.

use crate::domain::call::Hold;
use crate::engine::Engine;
use crate::lifecycle::Event;

/// Maximum sleep when no call is due.
const IDLE_MS: u64 = 60_000;
const BATCH: usize = 1_000;

pub(crate) async fn run(engine: Engine) {
    let inner = &engine.core;
    loop {
        let now_ms = inner.clock.now_ms();
        let next_ms = inner.open_calls.next_due_ms().unwrap_or(now_ms + IDLE_MS);
        tokio::select! {
            () = inner.clock.sleep_until(next_ms) => { run_once(&engine).await; }
            () = inner.open_calls.wait_earlier_due() => {}
            () = inner.shutdown.cancelled() => return,
        }
    }
}

/// Acts on every call that is due. Returns the number of calls.
pub async fn run_once(engine: &Engine) -> usize {
    let inner = &engine.core;
    let mut count = 0;
    loop {
        let now_ms = inner.clock.now_ms();
        let due = inner.open_calls.due_calls(now_ms, BATCH);
        if due.is_empty() {
            return count;
        }
        count += due.len();
        let acts = due.into_iter().map(|id| async move {
            let Some(entry) = inner.open_calls.get(&id) else { return };
            let call = entry.call();
            match call.hold {
                Some(Hold::Retry { .. }) if now_ms < call.deadline_ms => inner.enqueue_call(&call),
                _ => inner.advance_with_retry(&call.project, &id, Event::Deadline).await,
            }
        });
        // A thousand simultaneous deadlines share a few commits.
        futures::future::join_all(acts).await;
        // Calls that could not be stored are still due; the next start handles them.
        if inner.shutdown.is_cancelled() {
            return count;
        }
    }
}
