//! Dispatches queued calls to free slots.

use crate::engine::Engine;
use crate::lifecycle::Event;

pub(crate) async fn run(engine: Engine) {
    loop {
        tokio::select! {
            () = engine.core.limiter.wait_for_capacity() => { run_once(&engine).await; }
            () = engine.core.shutdown.cancelled() => return,
        }
    }
}

/// Claims every queued call that has a slot now. Returns the number of claimed calls.
pub async fn run_once(engine: &Engine) -> usize {
    let inner = &engine.core;
    let mut count = 0;
    while let Some((id, slot)) = inner.limiter.pop_ready(|line| inner.resolve_caps(line)) {
        // Canceled or timed out while queued: its slot is released at once.
        let Some(entry) = inner.open_calls.get(&id) else { continue };
        count += 1;
        let (inner, node) = (inner.clone(), inner.node.clone());
        let claim = async move {
            entry.set_slot(slot);
            let project = entry.call().project.clone();
            inner.advance_with_retry(&project, &id, Event::Claim { node }).await;
            if !entry.call().has_attempt_in_flight() {
                entry.release_slot();
            }
        };
        // Concurrent claims share a commit; the tasks start in queue order.
        engine.core.tasks.spawn(claim);
    }
    count
}
