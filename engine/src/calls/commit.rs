//! The only writer of stored calls: `step` decides an event, the result is committed, and then its
//! actions are performed.
//!
//! Two events on one call are decided one after the other, each on the state that the other left.
//! If another process commits first, the stored state is loaded and the event decided again.

pub(crate) mod approval_index;
pub(crate) mod together;
use std::sync::Arc;
use std::time::Duration;

use crate::calls::Dispatcher;
use crate::calls::observer::AttemptEnd;
use crate::calls::open_calls::OpenCall;
use crate::domain::call::{Call, Hold};
use crate::domain::event::{CallEvent, EventKind, EventRecord};
use crate::domain::fault::{Code, Error};
use crate::domain::id::CallId;
use crate::lifecycle::{self, Action, Event, Refusal};
use crate::ports::bus::Topic;
use crate::ports::core::from_store_error;
use crate::ports::engine_metrics;
use crate::ports::store::{EventScope, SaveResult};

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

/// A committed state of a call.
pub(crate) struct Commit<'a> {
    call: &'a Arc<Call>,
    kind: CommitKind,
    /// The state before; of a new call only if the observer needs it.
    before: Option<&'a Call>,
    attempt_end: Option<AttemptEnd>,
    /// The time of the decision.
    at_ms: u64,
}

/// The reason for a commit.
pub(crate) enum CommitKind {
    /// The call is new.
    Accepted,
    /// An event changed the call.
    Advanced,
}

impl<'a> Commit<'a> {
    pub(crate) fn new(
        call: &'a Arc<Call>,
        kind: CommitKind,
        before: Option<&'a Call>,
        attempt_end: Option<AttemptEnd>,
        at_ms: u64,
    ) -> Self {
        Self { call, kind, before, attempt_end, at_ms }
    }
}

impl Dispatcher {
    /// Decides an event on a call, commits the transition and performs its actions.
    pub(crate) async fn advance(
        self: &Arc<Self>,
        project: &str,
        id: &CallId,
        event: Event,
    ) -> Result<AdvanceOutcome, Error> {
        let found = self.find_open_or_stored(project, id).await?;
        let entry = found.ok_or_else(|| call_not_found(id))?;
        let _decision_guard = entry.decision_lock.lock().await;
        loop {
            let wall_offset_ms = self.core.clock.wall_offset_ms();
            let before = entry.call_by_offset(wall_offset_ms);
            let now_ms = self.core.clock.now_ms().saturating_add_signed(wall_offset_ms);
            let step = match lifecycle::step(&before, &event, now_ms) {
                Ok(step) => step,
                Err(refusal) => return self.handle_refusal(before, refusal).await,
            };
            let after = Arc::new(step.call);
            let attempt = self.telemetry.detect_attempt_end(&before, &after, &step.records);
            let changes = step.approval_changes;
            let saved = match changes.is_empty() {
                true => {
                    let saved = self.core.store.save_call(after.clone(), step.records).await;
                    saved.map_err(from_store_error)?
                }
                false => self.save_with_approvals(&after, step.records, changes.clone()).await?,
            };
            if saved == SaveResult::Conflict {
                let stored = self.core.store.call(project, id).await.map_err(from_store_error)?;
                let stored = Arc::new(stored.ok_or_else(|| call_not_found(id))?);
                entry.set_committed(stored, entry.wall_offset_ms());
                continue;
            }
            entry.set_committed(after.clone(), wall_offset_ms);
            self.open_calls.apply_transition(&before, &after, wall_offset_ms);
            self.release_attempt(&entry, &before, &after, &step.actions);
            self.follow_approval(&before, &after, &changes);
            let commit = Commit::new(&after, CommitKind::Advanced, Some(&before), attempt, now_ms);
            self.after_commit(commit, Some((&entry, &step.actions))).await;
            return Ok(AdvanceOutcome::Committed(after));
        }
    }

    /// The one path after every commit: performs the actions, notifies the listeners of ended
    /// calls, counts, notifies the observer, and wakes waiters. `open` is `None` for a call that
    /// ended before it was stored: it has no actions left, and no waiter knows its id.
    pub(crate) async fn after_commit(
        self: &Arc<Self>,
        commit: Commit<'_>,
        open: Option<(&Arc<OpenCall>, &[Action])>,
    ) {
        let Commit { call, kind, before, attempt_end, at_ms } = commit;
        let is_open = open.is_some();
        if let Some((entry, actions)) = open {
            self.perform_actions(entry, call, actions);
        }
        if call.status.is_terminal() {
            self.notify_ended(call).await;
        }
        let can_name = || self.telemetry.can_name_tool(call);
        match (kind, before) {
            (CommitKind::Accepted, _) => engine_metrics::record_accepted(call, can_name),
            (CommitKind::Advanced, Some(before)) => {
                engine_metrics::record_transition(before, call, can_name);
            }
            (CommitKind::Advanced, None) => {}
        }
        self.telemetry.notify_observer(before, call, attempt_end, at_ms);
        if is_open {
            self.wake_call_listeners(call);
        } else {
            self.wake_run_and_project(call);
        }
    }

    /// Notifies the parts that follow ended calls.
    async fn notify_ended(&self, call: &Arc<Call>) {
        for listener in self.ended_listeners() {
            if let Some(work) = listener.call_ended(call) {
                work.await;
            }
        }
    }

    /// Calls `advance` until the store accepts the event. For events that happened in this process
    /// and must not be lost while the store is unavailable. Returns true if the event was applied.
    pub(crate) async fn advance_with_retry(
        self: &Arc<Self>,
        project: &str,
        id: &CallId,
        event: Event,
    ) -> bool {
        let mut wait = Duration::from_millis(50);
        loop {
            match self.advance(project, id, event.clone()).await {
                Ok(outcome) => return matches!(outcome, AdvanceOutcome::Committed(_)),
                Err(Error::Refused { fault, .. })
                    if !matches!(fault.code, Code::Overloaded | Code::OutcomeUnknown) =>
                {
                    return false;
                }
                Err(error) => tracing::warn!(call = %id, %error, "event not committed; will retry"),
            }
            tokio::select! {
                () = tokio::time::sleep(wait) => wait = (wait * 2).min(Duration::from_secs(2)),
                () = self.core.shutdown.cancelled() => return false,
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
        self.core
            .store
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
        let events = self.stored_events(call).await?;
        Ok(events.iter().filter(|event| event.record.kind == kind).count())
    }

    /// Returns the reason why the last report on an open call was refused, if there was one.
    pub(crate) async fn find_refused_report(&self, call: &Call) -> Result<Option<String>, Error> {
        let events = self.stored_events(call).await?;
        let ignored = |event: &&CallEvent| event.record.kind == EventKind::ReportIgnored;
        let reason =
            events.iter().rev().find(ignored).and_then(|event| event.record.data.get("why"));
        Ok(reason.and_then(|reason| reason.as_str()).map(str::to_owned))
    }

    async fn stored_events(&self, call: &Call) -> Result<Vec<CallEvent>, Error> {
        let scope = EventScope::Call { project: call.project.clone(), id: call.id.clone() };
        let other_events = self.core.limits.max_progress_events as usize + 1_000;
        let events = self.core.store.events(scope, 0, MAX_LATE_EVENTS + other_events).await;
        events.map_err(from_store_error)
    }

    /// Releases the slot of an attempt that is no longer in flight, and tells its source to release
    /// the attempt's state.
    fn release_attempt(&self, entry: &OpenCall, before: &Call, after: &Call, actions: &[Action]) {
        let has_ended = before.has_attempt_in_flight() && !after.has_attempt_in_flight();
        if !has_ended {
            if after.status.is_terminal() {
                self.limiter.dequeue(&after.id);
            }
            return;
        }
        if after.status.is_terminal() {
            // The source must receive `Stop` before it releases the attempt; `perform_actions` does
            // both in that order.
            entry.release_slot();
            return;
        }
        if let Some(source) = self.sources.get(&before.target.executor) {
            // The attempt is stopped here, because a fallback may have another source.
            if actions.contains(&Action::Stop { attempt: before.attempt }) {
                source.cancel(&before.id, before.attempt);
            }
            source.release_attempt(&before.id, before.attempt);
        }
        entry.release_slot();
    }

    /// Performs the actions of a committed transition.
    fn perform_actions(self: &Arc<Self>, entry: &OpenCall, call: &Arc<Call>, actions: &[Action]) {
        for action in actions {
            match action {
                Action::Start => self.start_attempt(call, false),
                Action::Redeliver => self.start_attempt(call, true),
                Action::Stop { attempt } => {
                    // `release_attempt` has stopped an attempt that another one follows.
                    let source = self.sources.get(&call.target.executor);
                    if let Some(source) = source.filter(|_| call.status.is_terminal()) {
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
                    self.release_dependents(&call.project, &call.id);
                }
            }
        }
    }

    /// Queues the call now, or leaves it to the timers until its retry is due.
    pub(crate) fn enqueue_call(self: &Arc<Self>, call: &Arc<Call>) {
        if let Some(Hold::Retry { at_ms }) = call.hold
            && at_ms > self.core.clock.wall_ms()
        {
            return;
        }
        if let Some(Hold::Retry { at_ms }) = call.hold {
            let wall_offset_ms = self.core.clock.wall_offset_ms();
            let (was_ms, deadline_ms) = (at_ms.min(call.deadline_ms), call.deadline_ms);
            self.open_calls.reschedule(&call.id, was_ms, deadline_ms, wall_offset_ms);
        }
        let (scope, caps) = self.slot_limits.resolve_slot_scope(call);
        self.limiter.enqueue(call.id.clone(), scope, caps);
    }

    /// Stores new deadlines and retry times of the open calls after a change of the time of day, so
    /// that each call keeps the time that it has left, also after a restart. Until the new times of
    /// a call are stored, [`advance`](Self::advance) shifts them before it decides an event.
    pub(crate) async fn follow_wall_clock(&self) {
        let wall_offset_ms = self.core.clock.wall_offset_ms();
        let others = self.open_calls.with_other_offset(wall_offset_ms);
        if others.is_empty() {
            return;
        }
        tracing::warn!(
            calls = others.len(),
            "the system time was changed; the deadlines of open calls are adjusted"
        );
        let saving = others.iter().map(async |entry| {
            let _decision_guard = entry.decision_lock.lock().await;
            let mut next = Call::clone(&entry.call_by_offset(wall_offset_ms));
            if next.status.is_terminal() || entry.wall_offset_ms() == wall_offset_ms {
                return;
            }
            next.version += 1;
            let next = Arc::new(next);
            match self.core.store.save_call(next.clone(), Vec::new()).await {
                Ok(SaveResult::Saved) => entry.set_committed(next, wall_offset_ms),
                Ok(SaveResult::Conflict) => {}
                Err(error) => {
                    tracing::warn!(call = %next.id, %error, "cannot store a new deadline");
                }
            }
        });
        futures::future::join_all(saving).await;
    }

    /// Wakes everything that waits for a change of this call.
    pub(crate) fn wake_call_listeners(&self, call: &Call) {
        self.core.bus.wake(&Topic::Call(call.id.clone()));
        self.wake_run_and_project(call);
    }

    /// Wakes everything that follows the call's run or project.
    fn wake_run_and_project(&self, call: &Call) {
        if !self.core.bus.has_broad_listeners() {
            return;
        }
        let (project, run_id) = (call.project.clone(), call.run_id.clone());
        self.core.bus.wake(&Topic::Run { project, run_id });
        self.core.bus.wake(&Topic::Project(call.project.clone()));
    }
}

pub(crate) fn call_not_found(id: &CallId) -> Error {
    let hint = "check the id: toolcrib calls lists calls, and calls that ended are removed after \
                the configured retention";
    Error::not_found(format!("there is no call \"{id}\""), hint)
}
