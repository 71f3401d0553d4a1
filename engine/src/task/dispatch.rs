//! Dispatches queued calls to free slots.

use crate::engine::Engine;
use crate::lifecycle::Event;

pub(crate) async fn run(engine: Engine) {
    loop {
        tokio::select! {
            () = engine.inner.gate.freed() => { run_once(&engine).await; }
            () = engine.inner.stopping.cancelled() => return,
        }
    }
}

/// Claims every queued call that has a slot now. Returns the number of claimed calls.
pub async fn run_once(engine: &Engine) -> usize {
    let inner = &engine.inner;
    let mut count = 0;
    while let Some((id, slot)) = inner.gate.next(|line| inner.caps(line)) {
        // Canceled or timed out while queued: its slot is released at once.
        let Some(entry) = inner.live.get(&id) else { continue };
        count += 1;
        let (inner, node) = (inner.clone(), inner.node.clone());
        let claim = async move {
            entry.take_place(slot);
            let project = entry.call().project.clone();
            inner.advance_surely(&project, &id, Event::Claim { node }).await;
            if !entry.call().attempt_is_out() {
                entry.free_place();
            }
        };
        // Concurrent claims share a commit; the tasks start in queue order.
        engine.inner.tasks.spawn(claim);
    }
    count
}
