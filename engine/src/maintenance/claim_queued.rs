//! Claims queued calls when slots are free.

use std::sync::Arc;

use crate::calls::Calls;
use crate::lifecycle::Event;

pub(crate) async fn run(calls: Arc<Calls>) {
    loop {
        tokio::select! {
            () = calls.dispatcher.limiter.wait_for_capacity() => { run_once(&calls).await; }
            () = calls.core.shutdown.cancelled() => return,
        }
    }
}

/// Claims every queued call that has a slot now. Returns the number of claimed calls.
pub async fn run_once(calls: &Arc<Calls>) -> usize {
    let mut count = 0;
    while let Some((id, slot)) =
        calls.dispatcher.limiter.pop_ready(|scope| calls.dispatcher.slot_limits.resolve_caps(scope))
    {
        // Canceled or timed out while queued: its slot is released at once.
        let Some(entry) = calls.dispatcher.open_calls.get(&id) else { continue };
        count += 1;
        let (dispatcher, node) = (calls.dispatcher.clone(), calls.core.node.clone());
        let claim = async move {
            // Between the rule's change and this claim, the reconciler of revocations may not have
            // reached the call.
            if dispatcher.end_if_switched_off(&entry).await
                || dispatcher.stop_if_not_allowed(&entry.call()).await
            {
                return;
            }
            entry.set_slot(slot);
            let project = entry.call().project.clone();
            dispatcher.advance_with_retry(&project, &id, Event::Claim { node }).await;
            if !entry.call().has_attempt_in_flight() {
                entry.release_slot();
            }
        };
        // Concurrent claims share a commit; the tasks start in queue order.
        calls.core.tasks.spawn(claim);
    }
    if calls.dispatcher.limiter.take_blocked_deliveries() {
        calls.dispatcher.client_queue.assign_waiting();
    }
    count
}
