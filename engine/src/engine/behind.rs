//! Dependents: calls that start when their predecessor has ended. Each is stored with the id of its
//! predecessor, so the order survives a restart. The map in memory only records which calls to
//! wake.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::Inner;
use super::gate::{Caps, Place, Slot};
use crate::call::{Call, Hold};
use crate::id::CallId;
use crate::lifecycle::Event;

/// Delay before another read of an unavailable store.
const STORE_AWAY: Duration = Duration::from_secs(1);

/// Calls held until their predecessor ends, by the predecessor's id.
#[derive(Default)]
pub(crate) struct Behind {
    waiting: Mutex<HashMap<CallId, Vec<CallId>>>,
}

/// Makes a call that is not yet stored the dependent of another. Until its predecessor ends, its
/// deadline is the predecessor's plus its own timeout.
pub(super) fn put_behind(call: &mut Call, before: &Call) {
    let timeout_ms = call.deadline_ms.saturating_sub(call.created_ms);
    call.hold = Some(Hold::After { timeout_ms });
    call.deadline_ms = before.deadline_ms.max(call.created_ms).saturating_add(timeout_ms);
    call.asked.after = Some(before.id.clone());
}

impl Inner {
    /// Acquires a slot for a new call, if the call may start and a slot is free.
    pub(super) fn place_at_once(&self, call: &Call, place: &Place, caps: &Caps) -> Option<Slot> {
        let may_begin = call.hold == Some(Hold::Queue);
        may_begin.then(|| self.gate.try_enter(place, caps)).flatten()
    }

    /// Queues a new call that has no slot, or holds it until its predecessor has ended.
    pub(super) fn stand_by(self: &Arc<Self>, call: &Arc<Call>, place: Place, caps: Caps) {
        match call.hold {
            Some(Hold::After { .. }) => self.follow(call),
            _ => self.gate.wait(call.id.clone(), place, caps),
        }
    }

    /// Ensures that this call is queued once its predecessor has ended.
    pub(crate) fn follow(self: &Arc<Self>, call: &Arc<Call>) {
        let Some(before) = call.asked.after.clone() else { return };
        // The order matters: register first, then check. The task that ends the predecessor
        // releases its dependents after the end, so no end is missed.
        self.behind.waiting.lock().entry(before.clone()).or_default().push(call.id.clone());
        let (inner, project) = (self.clone(), call.project.clone());
        self.tasks.spawn(async move {
            if inner.has_ended(&project, &before).await {
                inner.let_follow(&project, &before);
            }
        });
    }

    /// Releases the dependents of a call that has ended.
    pub(crate) fn let_follow(self: &Arc<Self>, project: &str, ended: &CallId) {
        for id in self.behind.waiting.lock().remove(ended).unwrap_or_default() {
            let (inner, project) = (self.clone(), project.to_owned());
            self.tasks.spawn(async move {
                inner.advance_surely(&project, &id, Event::ItsTurn).await;
            });
        }
    }

    /// Returns true if a call has ended or no longer exists.
    async fn has_ended(&self, project: &str, id: &CallId) -> bool {
        loop {
            if let Some(entry) = self.live.get(id) {
                return entry.call().status.is_terminal();
            }
            match self.store.call(project, id).await {
                Ok(found) => return found.is_none_or(|call| call.status.is_terminal()),
                Err(error) => tracing::warn!(call = %id, %error, "call not read; will retry"),
            }
            tokio::select! {
                () = tokio::time::sleep(STORE_AWAY) => {}
                () = self.stopping.cancelled() => return false,
            }
        }
    }
}
