//! Open calls, held in memory: polling the ticket of an open call does not touch the store, and two
//! reports on one call are decided one after the other.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::{Mutex, RwLock};
use tokio::sync::{Notify, OnceCell};

use super::counts::Counts;
use super::gate::{Line, Slot};
use crate::call::{Call, Hold};
use crate::id::CallId;

/// A call without an outcome.
pub(crate) struct Entry {
    /// Held while an event is decided and committed.
    pub(crate) deciding: tokio::sync::Mutex<()>,
    /// The last committed state.
    shown: RwLock<Arc<Call>>,
    /// Slot of the attempt in flight.
    slot: Mutex<Option<Slot>>,
    /// Number of progress events. Unset until first needed if the call was loaded from the
    /// store.
    progress_events: OnceCell<AtomicU32>,
}

impl Entry {
    /// Creates the entry of a call that this process accepted.
    pub(crate) fn new(call: Arc<Call>, slot: Option<Slot>) -> Arc<Self> {
        Self::with(call, slot, OnceCell::new_with(Some(AtomicU32::new(0))))
    }

    /// Creates the entry of a call loaded from the store.
    pub(crate) fn found(call: Arc<Call>, slot: Option<Slot>) -> Arc<Self> {
        Self::with(call, slot, OnceCell::new())
    }

    fn with(
        call: Arc<Call>,
        slot: Option<Slot>,
        progress_events: OnceCell<AtomicU32>,
    ) -> Arc<Self> {
        let (shown, slot) = (RwLock::new(call), Mutex::new(slot));
        Arc::new(Self { deciding: tokio::sync::Mutex::new(()), shown, slot, progress_events })
    }

    pub(crate) fn call(&self) -> Arc<Call> {
        self.shown.read().clone()
    }

    pub(crate) fn show(&self, call: Arc<Call>) {
        *self.shown.write() = call;
    }

    pub(crate) fn take_place(&self, slot: Slot) {
        *self.slot.lock() = Some(slot);
    }

    pub(crate) fn free_place(&self) {
        self.slot.lock().take();
    }

    /// Returns the number of the next progress event, from 1. Calls `stored` at most once, to learn
    /// how many events the store has.
    pub(crate) async fn count_progress<F, E>(&self, stored: impl FnOnce() -> F) -> Result<u32, E>
    where
        F: Future<Output = Result<u32, E>>,
    {
        let first = async || stored().await.map(AtomicU32::new);
        let count = self.progress_events.get_or_try_init(first).await?;
        Ok(count.fetch_add(1, Ordering::Relaxed).saturating_add(1))
    }
}

#[derive(Default)]
struct State {
    calls: HashMap<CallId, Arc<Entry>>,
    per_project: Counts<String>,
    /// Timers: the time at which each call is due.
    due: BTreeSet<(u64, CallId)>,
}

/// All open calls and their timers.
#[derive(Default)]
pub(crate) struct Live {
    state: Mutex<State>,
    /// Notified when the earliest timer moves forward.
    sooner: Notify,
}

/// The limit of open calls that was reached.
pub(crate) enum Full {
    Engine,
    Project,
}

/// Capacity for one call. It is released if the call is not committed, or when the call ends.
pub(crate) struct Room<'a> {
    live: &'a Live,
    line: Arc<Line>,
    kept: bool,
}

impl Room<'_> {
    /// Keeps the capacity: the call exists now and releases it when it ends.
    pub(crate) fn keep(mut self) {
        self.kept = true;
    }
}

impl Drop for Room<'_> {
    fn drop(&mut self) {
        if !self.kept {
            self.live.state.lock().per_project.lower(&self.line.project);
        }
    }
}

impl Live {
    /// Reserves capacity for one more call of this project.
    pub(crate) fn room(&self, line: &Arc<Line>, all: usize, each: usize) -> Result<Room<'_>, Full> {
        let mut state = self.state.lock();
        if state.calls.len() >= all {
            return Err(Full::Engine);
        }
        if state.per_project.raise(&line.project) as usize > each {
            state.per_project.lower(&line.project);
            return Err(Full::Project);
        }
        Ok(Room { live: self, line: line.clone(), kept: false })
    }

    /// Adopts a call loaded from the store, regardless of the limits. Returns false if it is
    /// already present: it may have been accepted during the scan of the store.
    pub(crate) fn take_in(&self, entry: Arc<Entry>) -> bool {
        let call = entry.call();
        {
            let mut state = self.state.lock();
            if state.calls.contains_key(&call.id) {
                return false;
            }
            state.per_project.raise(&call.project);
        }
        self.insert(entry);
        true
    }

    pub(crate) fn get(&self, id: &CallId) -> Option<Arc<Entry>> {
        self.state.lock().calls.get(id).cloned()
    }

    pub(crate) fn insert(&self, entry: Arc<Entry>) {
        let call = entry.call();
        let mut state = self.state.lock();
        if let Some(due_ms) = call.due_ms() {
            self.note_due(&mut state, due_ms, call.id.clone());
        }
        state.calls.insert(call.id.clone(), entry);
    }

    /// Updates the timer of a call after a transition, and removes the call if it has ended.
    pub(crate) fn moved(&self, before: &Call, after: &Call) {
        let mut state = self.state.lock();
        if let Some(due_ms) = before.due_ms() {
            state.due.remove(&(due_ms, before.id.clone()));
            // A queued retry has its timer at the deadline; see `reschedule`.
            state.due.remove(&(before.deadline_ms, before.id.clone()));
        }
        if after.status.is_terminal() {
            if state.calls.remove(&after.id).is_some() {
                state.per_project.lower(&after.project);
            }
        } else if let Some(due_ms) = after.due_ms() {
            self.note_due(&mut state, due_ms, after.id.clone());
        }
    }

    fn note_due(&self, state: &mut State, due_ms: u64, id: CallId) {
        let first = state.due.first().is_none_or(|(first_ms, _)| due_ms < *first_ms);
        state.due.insert((due_ms, id));
        if first {
            self.sooner.notify_one();
        }
    }

    /// Returns the calls that are due.
    pub(crate) fn due(&self, now_ms: u64, limit: usize) -> Vec<CallId> {
        let state = self.state.lock();
        let due = state.due.iter().take_while(|(due_ms, _)| *due_ms <= now_ms);
        due.take(limit).map(|(_, id)| id.clone()).collect()
    }

    /// Moves the timer of a call whose retry is now queued: only its deadline remains.
    pub(crate) fn due_later(&self, id: &CallId, was_ms: u64, deadline_ms: u64) {
        let mut state = self.state.lock();
        if state.due.remove(&(was_ms, id.clone())) {
            state.due.insert((deadline_ms, id.clone()));
        }
    }

    /// Returns the time of the earliest timer.
    pub(crate) fn next_due_ms(&self) -> Option<u64> {
        self.state.lock().due.first().map(|(due_ms, _)| *due_ms)
    }

    /// Waits until `next_due_ms` has become earlier.
    pub(crate) async fn sooner(&self) {
        self.sooner.notified().await;
    }

    pub(crate) fn len(&self) -> usize {
        self.state.lock().calls.len()
    }

    /// Returns the number of open calls by state.
    pub(crate) fn states(&self) -> [(&'static str, usize); 6] {
        let mut counts = ["running", "queue", "parked", "retry", "input", "after"].map(|s| (s, 0));
        let state = self.state.lock();
        for entry in state.calls.values() {
            let doing = entry.call().hold.map_or("running", Hold::as_str);
            for (_, count) in counts.iter_mut().filter(|(name, _)| *name == doing) {
                *count += 1;
            }
        }
        counts
    }

    /// Returns the creation time of the oldest open call.
    pub(crate) fn oldest_ms(&self) -> Option<u64> {
        let state = self.state.lock();
        state.calls.values().map(|entry| entry.call().created_ms).min()
    }
}
