//! Dependents: calls that start when their predecessor has ended. Each is stored with the id of its
//! predecessor, so the order survives a restart. The map in memory only records which calls to
//! wake.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use crate::calls::Dispatcher;
use crate::calls::limiter::{ConcurrencyCaps, Slot, SlotScope};
use crate::domain::call::{Call, CallMetrics, Hold, Outcome, Status};
use crate::domain::fault::{Code, Fault};
use crate::domain::id::CallId;
use crate::lifecycle::Event;
use crate::ports::engine_metrics;

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
            // The decision about the approval queues the call.
            Some(Hold::Approval { .. }) => {
                self.approval_index.update_waiting(call);
                engine_metrics::count_approval_request();
                self.approval_requested.notify_waiters();
            }
            Some(Hold::Queue | Hold::Retry { .. } | Hold::Unacknowledged | Hold::Input { .. })
            | None => {
                self.limiter.enqueue(call.id.clone(), scope, caps);
            }
        }
    }

    /// Ensures that this call is queued once its predecessor has ended.
    pub(crate) fn register_dependent(self: &Arc<Self>, call: &Arc<Call>) {
        let Some(before) = call.awaited_call().cloned() else { return };
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
            let ended = ended.clone();
            self.core.tasks.spawn(async move {
                dispatcher.continue_dependent(&project, &id, &ended).await;
            });
        }
    }

    /// Continues a call whose predecessor has ended or waits for an approval. A replaced call ends
    /// with the outcome of its replacement.
    async fn continue_dependent(self: &Arc<Self>, project: &str, id: &CallId, before: &CallId) {
        let Some(entry) = self.open_calls.get(id) else { return };
        if entry.call().replaced_by() != Some(before) {
            self.advance_with_retry(project, id, Event::PredecessorEnded).await;
            return;
        }
        let event = match self.find_replacement(project, before).await {
            Some(call) if !call.status.is_terminal() => {
                // The replacement waits for an approval of its fallback: wait until it has ended.
                let mut dependents = self.dependents.by_predecessor.lock();
                return dependents.entry(before.clone()).or_default().push(id.clone());
            }
            found => replacement_event(found.as_deref()),
        };
        self.advance_with_retry(project, id, event).await;
    }

    /// Returns a call, or `None` if it no longer exists. Waits for an unavailable store.
    async fn find_replacement(&self, project: &str, id: &CallId) -> Option<Arc<Call>> {
        loop {
            match self.find_open_or_stored(project, id).await {
                Ok(found) => return found.map(|entry| entry.call()),
                Err(error) => tracing::warn!(call = %id, %error, "call not read; will retry"),
            }
            tokio::select! {
                () = tokio::time::sleep(STORE_RETRY_DELAY) => {}
                () = self.core.shutdown.cancelled() => return None,
            }
        }
    }

    /// Returns true if a call has ended, waits for an approval, or no longer exists.
    async fn has_ended(&self, project: &str, id: &CallId) -> bool {
        let is_over = |call: &Call| call.status.is_terminal() || call.waits_for_approval();
        loop {
            if let Some(entry) = self.open_calls.get(id) {
                return is_over(&entry.call());
            }
            match self.core.store.call(project, id).await {
                Ok(found) => return found.is_none_or(|call| is_over(&call)),
                Err(error) => tracing::warn!(call = %id, %error, "call not read; will retry"),
            }
            tokio::select! {
                () = tokio::time::sleep(STORE_RETRY_DELAY) => {}
                () = self.core.shutdown.cancelled() => return false,
            }
        }
    }
}

/// Returns the event that ends a replaced call with the outcome of its replacement.
fn replacement_event(replacement: Option<&Call>) -> Event {
    let outcome = replacement.and_then(|call| Some((call.status, call.outcome.clone()?)));
    let (status, outcome) = outcome.unwrap_or_else(|| {
        let message = "the call that replaced this one is no longer stored";
        let fault = Fault::new(Code::OutcomeUnknown, message);
        let (ok, partial, data, metrics) = (false, false, None, CallMetrics::default());
        (Status::Failed, Outcome { ok, partial, data, error: Some(fault), metrics })
    });
    Event::ReplacementEnded { status, outcome: Box::new(outcome) }
}
