//! Dependents: calls that start when their predecessor has ended. Each is stored with the id of its
//! predecessor, so the order survives a restart. The map in memory only records which calls to
//! wake.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use crate::calls::Dispatcher;
use crate::calls::limiter::{ConcurrencyCaps, Slot, SlotScope};
use crate::domain::call::{Call, Hold};
use crate::domain::id::CallId;
use crate::lifecycle::Event;

/// Delay before another read of an unavailable store.
const STORE_RETRY_DELAY: Duration = Duration::from_secs(1);

/// Calls held until their predecessor ends, by the predecessor's id.
#[derive(Default)]
pub(crate) struct Dependents {
    by_predecessor: Mutex<HashMap<CallId, Vec<CallId>>>,
}

/// Makes a call that is not yet stored the dependent of another. Until its predecessor ends, its
/// deadline is the predecessor's plus its own timeout.
pub(crate) fn set_predecessor(call: &mut Call, before: &Call) {
    // A call has one hold: nothing else may hold a call that waits for its predecessor.
    debug_assert_eq!(call.hold, Some(Hold::Queue));
    let timeout_ms = call.deadline_ms.saturating_sub(call.created_ms);
    call.hold = Some(Hold::Predecessor { timeout_ms });
    call.deadline_ms = before.deadline_ms.max(call.created_ms).saturating_add(timeout_ms);
    call.origin.predecessor = Some(before.id.clone());
}

impl Dispatcher {
    /// Acquires a slot for a new call, if the call may start and a slot is free.
    pub(crate) fn try_acquire_slot(
        &self,
        call: &Call,
        scope: &SlotScope,
        caps: &ConcurrencyCaps,
    ) -> Option<Slot> {
        let may_begin = call.hold == Some(Hold::Queue);
        may_begin.then(|| self.limiter.try_acquire(scope, caps)).flatten()
    }

    /// Queues a new call that has no slot, or holds it until its predecessor has ended.
    pub(crate) fn queue_or_hold(
        self: &Arc<Self>,
        call: &Arc<Call>,
        scope: SlotScope,
        caps: ConcurrencyCaps,
    ) {
        match call.hold {
            Some(Hold::Predecessor { .. }) => self.register_dependent(call),
            // A decision queues it.
            Some(Hold::Approval { .. }) => {}
            Some(Hold::Queue | Hold::Retry { .. } | Hold::Unacknowledged | Hold::Input { .. })
            | None => {
                self.limiter.enqueue(call.id.clone(), scope, caps);
            }
        }
    }

    /// Ensures that this call is queued once its predecessor has ended.
    pub(crate) fn register_dependent(self: &Arc<Self>, call: &Arc<Call>) {
        let Some(before) = call.origin.predecessor.clone() else { return };
        // The order matters: register first, then check. The task that ends the predecessor
        // releases its dependents after the end, so no end is missed.
        self.dependents
            .by_predecessor
            .lock()
            .entry(before.clone())
            .or_default()
            .push(call.id.clone());
        let (dispatcher, project) = (self.clone(), call.project.clone());
        self.core.tasks.spawn(async move {
            if dispatcher.has_ended(&project, &before).await {
                dispatcher.release_dependents(&project, &before);
            }
        });
    }

    /// Releases the dependents of a call that has ended.
    pub(crate) fn release_dependents(self: &Arc<Self>, project: &str, ended: &CallId) {
        for id in self.dependents.by_predecessor.lock().remove(ended).unwrap_or_default() {
            let (dispatcher, project) = (self.clone(), project.to_owned());
            self.core.tasks.spawn(async move {
                dispatcher.advance_with_retry(&project, &id, Event::PredecessorEnded).await;
            });
        }
    }

    /// Returns true if a call has ended or no longer exists.
    async fn has_ended(&self, project: &str, id: &CallId) -> bool {
        loop {
            if let Some(entry) = self.open_calls.get(id) {
                return entry.call().status.is_terminal();
            }
            match self.core.store.call(project, id).await {
                Ok(found) => return found.is_none_or(|call| call.status.is_terminal()),
                Err(error) => tracing::warn!(call = %id, %error, "call not read; will retry"),
            }
            tokio::select! {
                () = tokio::time::sleep(STORE_RETRY_DELAY) => {}
                () = self.core.shutdown.cancelled() => return false,
            }
        }
    }
}
