//! Calls whose turn comes when another has ended: each is stored with the one before it, so that
//! the order holds also over a restart. What is in memory here only says who is to be woken.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::Inner;
use super::gate::{Caps, Place, Slot};
use crate::call::{Call, Hold};
use crate::id::CallId;
use crate::lifecycle::Event;

/// After the store could not be read.
const STORE_AWAY: Duration = Duration::from_secs(1);

/// Who waits for the end of whom.
#[derive(Default)]
pub(crate) struct Behind {
    waiting: Mutex<HashMap<CallId, Vec<CallId>>>,
}

/// Makes a call that has not been stored yet come after another. Until its turn it has what the
/// other has of time, and its own besides.
pub(super) fn put_behind(call: &mut Call, before: &Call) {
    let timeout_ms = call.deadline_ms.saturating_sub(call.created_ms);
    call.hold = Some(Hold::After { timeout_ms });
    call.deadline_ms = before.deadline_ms.max(call.created_ms).saturating_add(timeout_ms);
    call.asked.after = Some(before.id.clone());
}

impl Inner {
    /// A place for a new call, if one is free and it may begin.
    pub(super) fn place_at_once(&self, call: &Call, place: &Place, caps: &Caps) -> Option<Slot> {
        let may_begin = call.hold == Some(Hold::Queue);
        may_begin.then(|| self.gate.try_enter(place, caps)).flatten()
    }

    /// A new call that has no place stands in line, or waits for its turn to do so.
    pub(super) fn stand_by(self: &Arc<Self>, call: &Arc<Call>, place: Place, caps: Caps) {
        match call.hold {
            Some(Hold::After { .. }) => self.follow(call),
            _ => self.gate.wait(call.id.clone(), place, caps),
        }
    }

    /// Sees to it that this call gets in line when the one before it has ended.
    pub(crate) fn follow(self: &Arc<Self>, call: &Arc<Call>) {
        let Some(before) = call.asked.after.clone() else { return };
        // Noted first and looked at then: whoever ends the other looks after it has ended.
        self.behind.waiting.lock().entry(before.clone()).or_default().push(call.id.clone());
        let (inner, project) = (self.clone(), call.project.clone());
        self.tasks.spawn(async move {
            if inner.has_ended(&project, &before).await {
                inner.let_follow(&project, &before);
            }
        });
    }

    /// A call has ended: it is the turn of those behind it.
    pub(crate) fn let_follow(self: &Arc<Self>, project: &str, ended: &CallId) {
        for id in self.behind.waiting.lock().remove(ended).unwrap_or_default() {
            let (inner, project) = (self.clone(), project.to_owned());
            self.tasks.spawn(async move {
                inner.advance_surely(&project, &id, Event::ItsTurn).await;
            });
        }
    }

    /// Whether a call is over, or gone.
    async fn has_ended(&self, project: &str, id: &CallId) -> bool {
        loop {
            if let Some(entry) = self.live.get(id) {
                return entry.call().status.is_terminal();
            }
            match self.store.call(project, id).await {
                Ok(found) => return found.is_none_or(|call| call.status.is_terminal()),
                Err(error) => tracing::warn!(call = %id, %error, "will be looked up again"),
            }
            tokio::select! {
                () = tokio::time::sleep(STORE_AWAY) => {}
                () = self.stopping.cancelled() => return false,
            }
        }
    }
}
