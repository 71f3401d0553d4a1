//! Acts where the clock alone must: deadlines, and retries that are due.

use std::sync::Arc;

use crate::calls::Calls;
use crate::domain::call::{Call, Hold};
use crate::lifecycle::Event;

/// Maximum sleep when no call is due.
const IDLE_MS: u64 = 60_000;
const MAX_DUE_PER_PASS: usize = 1_000;

pub(crate) async fn run(calls: Arc<Calls>) {
    loop {
        let now_ms = calls.core.clock.now_ms();
        let next_ms = calls.dispatcher.open_calls.next_due_ms().unwrap_or(now_ms + IDLE_MS);
        tokio::select! {
            () = calls.core.clock.sleep_until(next_ms) => { run_once(&calls).await; }
            () = calls.dispatcher.open_calls.wait_earlier_due() => {}
            () = calls.core.shutdown.cancelled() => return,
        }
    }
}

/// Returns the event that is due.
fn due_event(calls: &Arc<Calls>, call: &Call, now_ms: u64) -> Event {
    if now_ms < call.deadline_ms {
        let delivered_ms = calls.dispatcher.client_queue.delivered_ms(&call.id);
        return Event::AttemptDeadline { attempt: call.attempt, delivered_ms };
    }
    // A predecessor that waits for input has more time than it had when this call was accepted.
    let before = call.origin.predecessor.as_ref().filter(|_| call.hold.is_some());
    let before = before.and_then(|id| calls.dispatcher.open_calls.get(id));
    match (call.hold, before.map(|entry| entry.call().deadline_ms)) {
        (Some(Hold::Predecessor { timeout_ms }), Some(deadline_ms))
            if deadline_ms.saturating_add(timeout_ms) > call.deadline_ms =>
        {
            Event::PredecessorExtended { deadline_ms }
        }
        _ => Event::Deadline,
    }
}

/// Acts on every call that is due. Returns the number of calls.
pub async fn run_once(calls: &Arc<Calls>) -> usize {
    let mut count = 0;
    loop {
        let now_ms = calls.core.clock.now_ms();
        let due = calls.dispatcher.open_calls.due_calls(now_ms, MAX_DUE_PER_PASS);
        if due.is_empty() {
            return count;
        }
        count += due.len();
        let acts = due.into_iter().map(|id| async move {
            let Some(entry) = calls.dispatcher.open_calls.get(&id) else { return };
            let call = entry.call();
            match call.hold {
                Some(Hold::Retry { .. }) if now_ms < call.deadline_ms => {
                    calls.dispatcher.enqueue_call(&call)
                }
                _ => {
                    let event = due_event(calls, &call, now_ms);
                    calls.dispatcher.advance_with_retry(&call.project, &id, event).await
                }
            }
        });
        // A thousand simultaneous deadlines share a few commits.
        futures::future::join_all(acts).await;
        // Calls that could not be stored are still due; the next start handles them.
        if calls.core.shutdown.is_cancelled() {
            return count;
        }
    }
}
