//! The only writer of stored calls: `step` decides an event, the result is committed, and then its
//! actions are performed.
//!
//! Two events on one call are decided one after the other, each on the state that the other left.
//! If another process commits first, the stored state is loaded and the event decided again.

use std::sync::Arc;
use std::time::Duration;

use crate::calls::open_calls::OpenCall;
use crate::domain::call::{Call, Hold};
use crate::domain::event::{EventKind, EventRecord};
use crate::domain::fault::{Code, Error};
use crate::domain::id::CallId;
use crate::engine::{Core, from_store_error};
use crate::lifecycle::{self, Action, Event, Refusal};
use crate::ports::bus::Topic;
use crate::ports::store::{EventScope, SaveResult};
use crate::telemetry::engine_metrics;

/// Maximum number of late reports stored for one call.
const MAX_LATE_EVENTS: usize = 200;

/// Result of applying an event to a call.
#[derive(Debug)]
pub(crate) enum AdvanceOutcome {
    /// The event was decided and committed.
    Committed(Arc<Call>),
    /// The event repeats one that was applied before.
    Duplicate(Arc<Call>),
    /// The event changed nothing.
    Refused(Arc<Call>, Refusal),
}

impl Core {
    /// Decides an event on a call, commits the transition and performs its actions.
    pub(crate) async fn advance(
        self: &Arc<Self>,
        project: &str,
        id: &CallId,
        event: Event,
    ) -> Result<AdvanceOutcome, Error> {
        let entry = match self.open_calls.get(id) {
            Some(entry) => entry,
            None => match self.store.call(project, id).await.map_err(from_store_error)? {
                Some(call) => OpenCall::from_store(Arc::new(call), None),
                None => return Err(call_not_found(id)),
            },
        };
        let _one_at_a_time = entry.decision_lock.lock().await;
        loop {
            let before = entry.call();
            let now_ms = self.clock.now_ms();
            let step = match lifecycle::step(&before, &event, now_ms) {
                Ok(step) => step,
                Err(refusal) => return self.handle_refusal(before, refusal).await,
            };
            let after = Arc::new(step.call);
            let attempt = self.detect_attempt_end(&before, &after, &step.records);
            let saved = self.store.save_call(after.clone(), step.records).await;
            if saved.map_err(from_store_error)? == SaveResult::Conflict {
                let stored = self.store.call(project, id).await.map_err(from_store_error)?;
                entry.set_committed(Arc::new(stored.ok_or_else(|| call_not_found(id))?));
                continue;
            }
            entry.set_committed(after.clone());
            self.open_calls.apply_transition(&before, &after);
            self.release_attempt(&entry, &before, &after);
            self.perform_actions(&entry, &after, &step.actions);
            if after.status.is_terminal() {
                self.deliver_outcome(&after).await;
            }
            engine_metrics::record_transition(&before, &after, || self.can_name_tool(&after));
            self.notify_observer(Some(&before), &after, attempt, now_ms);
            self.wake_call_listeners(&after);
            return Ok(AdvanceOutcome::Committed(after));
        }
    }

    /// Calls `advance` until the store accepts the event. For events that happened in this process
    /// and must not be lost while the store is unavailable.
    pub(crate) async fn advance_with_retry(
        self: &Arc<Self>,
        project: &str,
        id: &CallId,
        event: Event,
    ) {
        let mut wait = Duration::from_millis(50);
        loop {
            match self.advance(project, id, event.clone()).await {
                Ok(_) => return,
                Err(Error::Refused { fault, .. }) if fault.code != Code::Overloaded => return,
                Err(error) => tracing::warn!(call = %id, %error, "event not committed; will retry"),
            }
            tokio::select! {
                () = tokio::time::sleep(wait) => wait = (wait * 2).min(Duration::from_secs(2)),
                () = self.shutdown.cancelled() => return,
            }
        }
    }

    async fn handle_refusal(
        &self,
        call: Arc<Call>,
        refusal: Refusal,
    ) -> Result<AdvanceOutcome, Error> {
        match &refusal {
            Refusal::Duplicate => return Ok(AdvanceOutcome::Duplicate(call)),
            Refusal::AlreadyEnded(record) | Refusal::WrongAttempt(record) => {
                self.record_late_report(&call, record.clone()).await?;
            }
            Refusal::NotApplicable => {}
        }
        Ok(AdvanceOutcome::Refused(call, refusal))
    }

    async fn record_late_report(&self, call: &Call, record: EventRecord) -> Result<(), Error> {
        let reason = if call.status.is_terminal() { "ended" } else { "wrong_attempt" };
        metrics::counter!("toolcrib_late_results_total", "reason" => reason).increment(1);
        self.append_late_event(call, record).await
    }

    /// Appends a late or inapplicable report to the call's history, up to a limit: an executor that
    /// never stops reporting would fill the disk.
    pub(crate) async fn append_late_event(
        &self,
        call: &Call,
        record: EventRecord,
    ) -> Result<(), Error> {
        if self.count_stored_events(call, EventKind::ReportIgnored).await? >= MAX_LATE_EVENTS {
            return Ok(());
        }
        self.store
            .append_records(&call.project, &call.id, vec![record])
            .await
            .map_err(from_store_error)?;
        self.wake_call_listeners(call);
        Ok(())
    }

    /// Returns the number of stored events of this kind that a call has.
    pub(crate) async fn count_stored_events(
        &self,
        call: &Call,
        kind: EventKind,
    ) -> Result<usize, Error> {
        let scope = EventScope::Call { project: call.project.clone(), id: call.id.clone() };
        let others = self.limits.max_progress_events as usize + 1_000;
        let events = self
            .store
            .events(scope, 0, MAX_LATE_EVENTS + others)
            .await
            .map_err(from_store_error)?;
        Ok(events.iter().filter(|event| event.record.kind == kind).count())
    }

    /// Releases the slot of an attempt that is no longer in flight, and lets its source forget it.
    fn release_attempt(&self, entry: &OpenCall, before: &Call, after: &Call) {
        let over = before.has_attempt_in_flight() && !after.has_attempt_in_flight();
        if !over {
            if after.status.is_terminal() {
                self.limiter.dequeue(&after.id);
            }
            return;
        }
        if after.status.is_terminal() {
            // The source must receive `Stop` before it forgets the attempt; `perform_actions` does
            // both in that order.
            entry.release_slot();
            return;
        }
        if let Some(source) = self.sources.get(&before.target.executor) {
            source.release_attempt(&before.id, before.attempt);
        }
        entry.release_slot();
    }

    /// Performs the actions of a committed transition.
    pub(crate) fn perform_actions(
        self: &Arc<Self>,
        entry: &OpenCall,
        call: &Arc<Call>,
        actions: &[Action],
    ) {
        for action in actions {
            match action {
                Action::Start => self.start_attempt(call, false),
                Action::Redeliver => self.start_attempt(call, true),
                Action::Stop { attempt } => {
                    if let Some(source) = self.sources.get(&call.target.executor) {
                        source.cancel(&call.id, *attempt);
                    }
                }
                Action::Enqueue => self.enqueue_call(call),
                Action::AwaitPredecessor => self.register_dependent(call),
                Action::NotifyEnded => {
                    if let Some(source) = self.sources.get(&call.target.executor) {
                        source.release_attempt(&call.id, call.attempt);
                    }
                    entry.release_slot();
                    if call.origin.callback_url.is_some() {
                        self.webhook_queue.wake();
                    }
                    self.release_dependents(&call.project, &call.id);
                }
            }
        }
    }

    /// Queues the call now, or leaves it to the timers until its retry is due.
    pub(crate) fn enqueue_call(self: &Arc<Self>, call: &Arc<Call>) {
        if let Some(Hold::Retry { at_ms }) = call.hold
            && at_ms > self.clock.now_ms()
        {
            return;
        }
        if let Some(Hold::Retry { at_ms }) = call.hold {
            self.open_calls.reschedule(&call.id, at_ms.min(call.deadline_ms), call.deadline_ms);
        }
        let (place, caps) = self.resolve_slot_scope(call);
        self.limiter.enqueue(call.id.clone(), place, caps);
    }

    /// Wakes everything that waits for a change of this call.
    pub(crate) fn wake_call_listeners(&self, call: &Call) {
        self.bus.wake(&Topic::Call(call.id.clone()));
        self.wake_run_and_project(call);
    }

    /// Wakes everything that follows the call's run or project.
    pub(crate) fn wake_run_and_project(&self, call: &Call) {
        if !self.bus.has_broad_listeners() {
            return;
        }
        let (project, run_id) = (call.project.clone(), call.run_id.clone());
        self.bus.wake(&Topic::Run { project, run_id });
        self.bus.wake(&Topic::Project(call.project.clone()));
    }
}

pub(crate) fn call_not_found(id: &CallId) -> Error {
    Error::refused(Code::NotFound, format!("there is no call \"{id}\""))
}
