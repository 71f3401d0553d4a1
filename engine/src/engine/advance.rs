//! The only writer of stored calls: `step` decides an event, the result is committed, and then its
//! actions are performed.
//!
//! Two events on one call are decided one after the other, each on the state that the other left.
//! If another process commits first, the stored state is loaded and the event decided again.

use std::sync::Arc;
use std::time::Duration;

use super::live::Entry;
use super::{Inner, measure, unavailable};
use crate::bus::Topic;
use crate::call::{Call, Hold};
use crate::event::{Kind, Record};
use crate::fault::{Code, Error};
use crate::id::CallId;
use crate::lifecycle::{self, Action, Event, Refusal};
use crate::store::{EventScope, Saved};

/// Maximum number of late reports stored for one call.
const MAX_LATE: usize = 200;

/// Result of applying an event to a call.
#[derive(Debug)]
pub(crate) enum Advanced {
    /// The event was decided and committed.
    Done(Arc<Call>),
    /// The event repeats one that was applied before.
    Repeated(Arc<Call>),
    /// The event changed nothing.
    Refused(Arc<Call>, Refusal),
}

impl Inner {
    /// Decides an event on a call, commits the transition and performs its actions.
    pub(crate) async fn advance(
        self: &Arc<Self>,
        project: &str,
        id: &CallId,
        event: Event,
    ) -> Result<Advanced, Error> {
        let entry = match self.live.get(id) {
            Some(entry) => entry,
            None => match self.store.call(project, id).await.map_err(unavailable)? {
                Some(call) => Entry::found(Arc::new(call), None),
                None => return Err(no_such_call(id)),
            },
        };
        let _one_at_a_time = entry.deciding.lock().await;
        loop {
            let before = entry.call();
            let now_ms = self.clock.now_ms();
            let step = match lifecycle::step(&before, &event, now_ms) {
                Ok(step) => step,
                Err(refusal) => return self.refused(before, refusal).await,
            };
            let after = Arc::new(step.call);
            let attempt = self.attempt_over(&before, &after, &step.records);
            let saved = self.store.save(after.clone(), step.records).await;
            if saved.map_err(unavailable)? == Saved::Stale {
                let stored = self.store.call(project, id).await.map_err(unavailable)?;
                entry.show(Arc::new(stored.ok_or_else(|| no_such_call(id))?));
                continue;
            }
            entry.show(after.clone());
            self.live.moved(&before, &after);
            self.settle(&entry, &before, &after);
            self.perform(&entry, &after, &step.actions);
            if after.status.is_terminal() {
                self.ended(&after).await;
            }
            measure::moved(&before, &after, || self.may_name(&after));
            self.tell_observer(Some(&before), &after, attempt, now_ms);
            self.announce(&after);
            return Ok(Advanced::Done(after));
        }
    }

    /// Calls `advance` until the store accepts the event. For events that happened in this process
    /// and must not be lost while the store is unavailable.
    pub(crate) async fn advance_surely(self: &Arc<Self>, project: &str, id: &CallId, event: Event) {
        let mut wait = Duration::from_millis(50);
        loop {
            match self.advance(project, id, event.clone()).await {
                Ok(_) => return,
                Err(Error::Refused { fault, .. }) if fault.code != Code::Overloaded => return,
                Err(error) => tracing::warn!(call = %id, %error, "event not committed; will retry"),
            }
            tokio::select! {
                () = tokio::time::sleep(wait) => wait = (wait * 2).min(Duration::from_secs(2)),
                () = self.stopping.cancelled() => return,
            }
        }
    }

    async fn refused(&self, call: Arc<Call>, refusal: Refusal) -> Result<Advanced, Error> {
        match &refusal {
            Refusal::Repeated => return Ok(Advanced::Repeated(call)),
            Refusal::Ended(record) | Refusal::WrongAttempt(record) => {
                self.keep_late(&call, record.clone()).await?;
            }
            Refusal::NotNow => {}
        }
        Ok(Advanced::Refused(call, refusal))
    }

    async fn keep_late(&self, call: &Call, record: Record) -> Result<(), Error> {
        let reason = if call.status.is_terminal() { "ended" } else { "wrong_attempt" };
        metrics::counter!("toolcrib_late_results_total", "reason" => reason).increment(1);
        self.append_late(call, record).await
    }

    /// Appends a late or inapplicable report to the call's history, up to a limit: an executor that
    /// never stops reporting would fill the disk.
    pub(super) async fn append_late(&self, call: &Call, record: Record) -> Result<(), Error> {
        if self.stored_events(call, Kind::Late).await? >= MAX_LATE {
            return Ok(());
        }
        self.store.append(&call.project, &call.id, vec![record]).await.map_err(unavailable)?;
        self.announce(call);
        Ok(())
    }

    /// Returns the number of stored events of this kind that a call has.
    pub(super) async fn stored_events(&self, call: &Call, kind: Kind) -> Result<usize, Error> {
        let scope = EventScope::Call { project: call.project.clone(), id: call.id.clone() };
        let others = self.limits.max_progress_events as usize + 1_000;
        let events = self.store.events(scope, 0, MAX_LATE + others).await.map_err(unavailable)?;
        Ok(events.iter().filter(|event| event.record.kind == kind).count())
    }

    /// Releases the slot of an attempt that is no longer in flight, and lets its source forget it.
    fn settle(&self, entry: &Entry, before: &Call, after: &Call) {
        let over = before.attempt_is_out() && !after.attempt_is_out();
        if !over {
            if after.status.is_terminal() {
                self.gate.give_up(&after.id);
            }
            return;
        }
        if after.status.is_terminal() {
            // The source must receive `Stop` before it forgets the attempt; `perform_actions` does
            // both in that order.
            entry.free_place();
            return;
        }
        if let Some(source) = self.sources.get(&before.target.executor) {
            source.settled(&before.id, before.attempt);
        }
        entry.free_place();
    }

    /// Performs the actions of a committed transition.
    pub(crate) fn perform(self: &Arc<Self>, entry: &Entry, call: &Arc<Call>, actions: &[Action]) {
        for action in actions {
            match action {
                Action::Start => self.start_attempt(call, false),
                Action::StartAgain => self.start_attempt(call, true),
                Action::Stop { attempt } => {
                    if let Some(source) = self.sources.get(&call.target.executor) {
                        source.cancel(&call.id, *attempt);
                    }
                }
                Action::Enqueue => self.enqueue(call),
                Action::Follow => self.follow(call),
                Action::Ended => {
                    if let Some(source) = self.sources.get(&call.target.executor) {
                        source.settled(&call.id, call.attempt);
                    }
                    entry.free_place();
                    if call.asked.callback_url.is_some() {
                        self.notices.wake();
                    }
                    self.let_follow(&call.project, &call.id);
                }
            }
        }
    }

    /// Queues the call now, or leaves it to the timers until its retry is due.
    pub(crate) fn enqueue(self: &Arc<Self>, call: &Arc<Call>) {
        if let Some(Hold::Retry { at_ms }) = call.hold
            && at_ms > self.clock.now_ms()
        {
            return;
        }
        if let Some(Hold::Retry { at_ms }) = call.hold {
            self.live.due_later(&call.id, at_ms.min(call.deadline_ms), call.deadline_ms);
        }
        let (place, caps) = self.place(call);
        self.gate.wait(call.id.clone(), place, caps);
    }

    /// Wakes everything that waits for a change of this call.
    pub(crate) fn announce(&self, call: &Call) {
        self.bus.wake(&Topic::Call(call.id.clone()));
        self.announce_around(call);
    }

    /// Wakes everything that follows the call's run or project.
    pub(crate) fn announce_around(&self, call: &Call) {
        if !self.bus.is_followed() {
            return;
        }
        let (project, run_id) = (call.project.clone(), call.run_id.clone());
        self.bus.wake(&Topic::Run { project, run_id });
        self.bus.wake(&Topic::Project(call.project.clone()));
    }
}

pub(super) fn no_such_call(id: &CallId) -> Error {
    Error::refused(Code::NotFound, format!("there is no call \"{id}\""))
}
