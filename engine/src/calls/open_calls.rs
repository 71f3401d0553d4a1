//! Open calls, held in memory: polling the ticket of an open call does not touch the store, and two
//! reports on one call are decided one after the other.

mod rates;
mod usage;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU32, Ordering};

use parking_lot::{Mutex, RwLock};
use tokio::sync::{Notify, OnceCell};

use crate::calls::limiter::key_counts::KeyCounts;
use crate::calls::limiter::{QueueKey, Slot, SlotMembers};
use crate::domain::call::{Call, Hold};
use crate::domain::directory::usage_limits::{CallMembers, LimitKind, UsageLimitSet};
use crate::domain::id::CallId;
use crate::ports::core::EngineLimits;
pub(crate) use rates::limit_error;
pub use usage::LimitStatus;
use usage::{CountedUsage, UsageCounts, counts};
pub(crate) use usage::{LimitExceeded, LimitQuota};

/// A call without an outcome.
pub(crate) struct OpenCall {
    /// Held while an event is decided and committed.
    pub(crate) decision_lock: tokio::sync::Mutex<()>,
    /// The last committed state.
    committed: RwLock<Arc<Call>>,
    /// The clock's `wall_offset_ms` that the deadline and the retry time of `committed` are based
    /// on. If the time of day has changed since, they are off by the difference.
    wall_offset_ms: AtomicI64,
    /// Slot of the attempt in flight.
    slot: Mutex<Option<Slot>>,
    /// Number of progress events. Unset until first needed if the call was loaded from the
    /// store.
    progress_events: OnceCell<AtomicU32>,
}

impl OpenCall {
    /// Creates the entry of a call that this process accepted.
    pub(crate) fn new(call: Arc<Call>, slot: Option<Slot>, wall_offset_ms: i64) -> Arc<Self> {
        let none = OnceCell::new_with(Some(AtomicU32::new(0)));
        Self::with_progress_count(call, slot, wall_offset_ms, none)
    }

    /// Creates the entry of a call loaded from the store.
    pub(crate) fn from_store(
        call: Arc<Call>,
        slot: Option<Slot>,
        wall_offset_ms: i64,
    ) -> Arc<Self> {
        Self::with_progress_count(call, slot, wall_offset_ms, OnceCell::new())
    }

    fn with_progress_count(
        call: Arc<Call>,
        slot: Option<Slot>,
        wall_offset_ms: i64,
        progress_events: OnceCell<AtomicU32>,
    ) -> Arc<Self> {
        let (committed, slot) = (RwLock::new(call), Mutex::new(slot));
        Arc::new(Self {
            decision_lock: tokio::sync::Mutex::new(()),
            committed,
            wall_offset_ms: AtomicI64::new(wall_offset_ms),
            slot,
            progress_events,
        })
    }

    pub(crate) fn call(&self) -> Arc<Call> {
        self.committed.read().clone()
    }

    /// Returns the call with its deadline and its retry time shifted to this clock offset.
    pub(crate) fn call_by_offset(&self, wall_offset_ms: i64) -> Arc<Call> {
        let committed = self.committed.read();
        let by_ms = wall_offset_ms.saturating_sub(self.wall_offset_ms());
        if by_ms == 0 {
            return committed.clone();
        }
        let mut call = Call::clone(&committed);
        call.shift_schedule(by_ms);
        Arc::new(call)
    }

    pub(crate) fn wall_offset_ms(&self) -> i64 {
        self.wall_offset_ms.load(Ordering::Acquire)
    }

    /// Replaces the committed state by one whose times are based on this clock offset.
    pub(crate) fn set_committed(&self, call: Arc<Call>, wall_offset_ms: i64) {
        let mut committed = self.committed.write();
        self.wall_offset_ms.store(wall_offset_ms, Ordering::Release);
        *committed = call;
    }

    pub(crate) fn set_slot(&self, slot: Slot) {
        *self.slot.lock() = Some(slot);
    }

    /// Counts the slot of the attempt in flight for these members.
    pub(crate) fn set_slot_members(&self, members: Option<Arc<SlotMembers>>) {
        if let Some(slot) = &mut *self.slot.lock() {
            slot.set_members(members);
        }
    }

    pub(crate) fn release_slot(&self) {
        self.slot.lock().take();
    }

    /// Returns the number of the next progress event, from 1. Calls `stored` at most once, to learn
    /// how many events the store has.
    pub(crate) async fn next_progress_number<F, E>(
        &self,
        stored: impl FnOnce() -> F,
    ) -> Result<u32, E>
    where
        F: Future<Output = Result<u32, E>>,
    {
        let first = async || stored().await.map(AtomicU32::new);
        let count = self.progress_events.get_or_try_init(first).await?;
        Ok(count.fetch_add(1, Ordering::Relaxed).saturating_add(1))
    }
}

#[derive(Default)]
struct OpenCallsState {
    calls: HashMap<CallId, Arc<OpenCall>>,
    count_by_project: KeyCounts<String>,
    usage: UsageCounts,
    /// Timers: the time at which each call is due, by the clock's `now_ms`.
    due: BTreeSet<(u64, CallId)>,
}

/// All open calls and their timers.
#[derive(Default)]
pub(crate) struct OpenCalls {
    state: Mutex<OpenCallsState>,
    /// Notified when the time of the earliest timer becomes earlier.
    earlier_due: Notify,
}

/// The limit of open calls that was reached.
pub(crate) enum CapacityExceeded {
    Engine,
    Project,
    Limit(Box<LimitExceeded>),
}

/// Capacity for one call. It is released if the call is not committed, or when the call ends.
pub(crate) struct Reservation<'a> {
    open_calls: &'a OpenCalls,
    queue: Arc<QueueKey>,
    /// Set if usage limits apply to the call.
    usage: Option<Box<CountedUsage>>,
    is_committed: bool,
}

impl Reservation<'_> {
    /// Counts the call against rate limits for good: it is stored.
    pub(crate) fn keep_rate(&mut self) {
        if let Some(usage) = &mut self.usage {
            usage.keep_rate();
        }
    }

    /// Makes the call an open call. It releases the capacity when it ends.
    pub(crate) fn commit(mut self, entry: Arc<OpenCall>) {
        self.is_committed = true;
        self.open_calls.insert_counted(entry, self.usage.as_deref());
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        if !self.is_committed {
            let mut state = self.open_calls.state.lock();
            state.count_by_project.decrement(&self.queue.project);
            if let Some(usage) = &self.usage {
                state.usage.return_usage(usage);
            }
        }
    }
}

impl OpenCalls {
    /// Reserves capacity for one more call of this project, within the usage limits of the call.
    pub(crate) fn reserve(
        &self,
        call: &Call,
        queue: &Arc<QueueKey>,
        limits: &EngineLimits,
        now_ms: u64,
    ) -> Result<Reservation<'_>, CapacityExceeded> {
        let mut state = self.state.lock();
        if state.calls.len() >= limits.max_open_calls {
            return Err(CapacityExceeded::Engine);
        }
        if state.count_by_project.increment(&queue.project) as usize
            > limits.max_open_calls_per_project
        {
            state.count_by_project.decrement(&queue.project);
            return Err(CapacityExceeded::Project);
        }
        let usage = match state.usage.limits().is_empty() || !counts(call) {
            true => None,
            false => state.usage.count_new(&call.into(), now_ms).map_err(|exceeded| {
                state.count_by_project.decrement(&queue.project);
                CapacityExceeded::Limit(exceeded)
            })?,
        };
        Ok(Reservation { open_calls: self, queue: queue.clone(), usage, is_committed: false })
    }

    /// Replaces the usage limits. Returns false if they are the same.
    pub(crate) fn set_limits(&self, limits: &Arc<UsageLimitSet>) -> bool {
        let state = &mut *self.state.lock();
        if state.usage.limits() == limits {
            return false;
        }
        let open_calls = state.calls.values().map(|entry| entry.call());
        state.usage.set_limits(limits.clone(), open_calls);
        true
    }

    /// Returns the state of every usage limit that applies to these kinds of members.
    pub(crate) fn limit_statuses(
        &self,
        members: &CallMembers<'_>,
        kinds: &[LimitKind],
        now_ms: u64,
    ) -> Vec<LimitStatus> {
        self.state.lock().usage.statuses(members, kinds, now_ms)
    }

    /// Counts a call that was accepted before the start against the rate limits.
    pub(crate) fn restore_rate(&self, members: &CallMembers<'_>, at_ms: u64, now_ms: u64) {
        self.state.lock().usage.restore_rate(members, at_ms, now_ms);
    }

    /// Adopts a call loaded from the store, regardless of the limits. Returns false if it is
    /// already present: it may have been accepted during the scan of the store.
    pub(crate) fn adopt(&self, entry: Arc<OpenCall>) -> bool {
        let call = entry.call();
        {
            let mut state = self.state.lock();
            if state.calls.contains_key(&call.id) {
                return false;
            }
            state.count_by_project.increment(&call.project);
        }
        self.insert_counted(entry, None);
        true
    }

    pub(crate) fn get(&self, id: &CallId) -> Option<Arc<OpenCall>> {
        self.state.lock().calls.get(id).cloned()
    }

    /// Returns every open call.
    pub(crate) fn all(&self) -> Vec<Arc<OpenCall>> {
        self.state.lock().calls.values().cloned().collect()
    }

    fn insert_counted(&self, entry: Arc<OpenCall>, usage: Option<&CountedUsage>) {
        let call = entry.call();
        let mut state = self.state.lock();
        state.usage.add_open_call(&call, usage);
        if let Some(due_ms) = call.due_ms() {
            let due_ms = to_timer(due_ms, entry.wall_offset_ms());
            self.schedule(&mut state, due_ms, call.id.clone());
        }
        state.calls.insert(call.id.clone(), entry);
    }

    /// Updates the timer of a call after a transition, and removes the call if it has ended. The
    /// times of both states are based on this clock offset.
    pub(crate) fn apply_transition(&self, before: &Call, after: &Call, wall_offset_ms: i64) {
        let mut state = self.state.lock();
        if let Some(due_ms) = before.due_ms() {
            state.due.remove(&(to_timer(due_ms, wall_offset_ms), before.id.clone()));
            // A queued retry has its timer at the deadline; see `reschedule`.
            let deadline_ms = to_timer(before.deadline_ms, wall_offset_ms);
            state.due.remove(&(deadline_ms, before.id.clone()));
        }
        if after.status.is_terminal() {
            if state.calls.remove(&after.id).is_some() {
                state.count_by_project.decrement(&after.project);
                state.usage.remove_open_call(after);
            }
        } else if let Some(due_ms) = after.due_ms() {
            self.schedule(&mut state, to_timer(due_ms, wall_offset_ms), after.id.clone());
        }
    }

    /// Returns the open calls whose times are based on another clock offset.
    pub(crate) fn with_other_offset(&self, wall_offset_ms: i64) -> Vec<Arc<OpenCall>> {
        let state = self.state.lock();
        let others = state.calls.values().filter(|entry| entry.wall_offset_ms() != wall_offset_ms);
        others.cloned().collect()
    }

    fn schedule(&self, state: &mut OpenCallsState, due_ms: u64, id: CallId) {
        let first = state.due.first().is_none_or(|(first_ms, _)| due_ms < *first_ms);
        state.due.insert((due_ms, id));
        if first {
            self.earlier_due.notify_one();
        }
    }

    /// Returns the calls that are due.
    pub(crate) fn due_calls(&self, now_ms: u64, limit: usize) -> Vec<CallId> {
        let state = self.state.lock();
        let due = state.due.iter().take_while(|(due_ms, _)| *due_ms <= now_ms);
        due.take(limit).map(|(_, id)| id.clone()).collect()
    }

    /// Moves the timer of a call whose retry is now queued: only its deadline remains.
    pub(crate) fn reschedule(
        &self,
        id: &CallId,
        was_ms: u64,
        deadline_ms: u64,
        wall_offset_ms: i64,
    ) {
        let mut state = self.state.lock();
        if state.due.remove(&(to_timer(was_ms, wall_offset_ms), id.clone())) {
            state.due.insert((to_timer(deadline_ms, wall_offset_ms), id.clone()));
        }
    }

    /// Returns the time of the earliest timer.
    pub(crate) fn next_due_ms(&self) -> Option<u64> {
        self.state.lock().due.first().map(|(due_ms, _)| *due_ms)
    }

    /// Waits until `next_due_ms` has become earlier.
    pub(crate) async fn wait_earlier_due(&self) {
        self.earlier_due.notified().await;
    }

    pub(crate) fn len(&self) -> usize {
        self.state.lock().calls.len()
    }

    /// Returns the number of open calls by state.
    pub(crate) fn count_by_state(&self) -> [(&'static str, usize); 7] {
        let states = ["running", "queue", "parked", "retry", "input", "after", "approval"];
        let mut counts = states.map(|state| (state, 0));
        let state = self.state.lock();
        for entry in state.calls.values() {
            let state_name = entry.call().hold.map_or("running", Hold::as_str);
            for (_, count) in counts.iter_mut().filter(|(name, _)| *name == state_name) {
                *count += 1;
            }
        }
        counts
    }

    /// Returns the creation time of the oldest open call.
    pub(crate) fn oldest_created_ms(&self) -> Option<u64> {
        let state = self.state.lock();
        state.calls.values().map(|entry| entry.call().created_ms).min()
    }
}

/// Converts a time of day to the clock's `now_ms`, which timers use. A change of the time of day
/// shifts the times of a call and the offset by the same amount, so timers need no adjustment.
fn to_timer(at_ms: u64, wall_offset_ms: i64) -> u64 {
    at_ms.saturating_add_signed(wall_offset_ms.saturating_neg())
}
