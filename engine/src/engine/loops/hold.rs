//! Active runs: each with the one lock that guards its changes, and the task that drives it.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::{Mutex as Held, Notify, OwnedMutexGuard};

use super::ears::{Ear, Ears};
use super::{LiveNote, RunNews, StartedRun, conduct, no_run};
use crate::bus::Topic;
use crate::engine::{Engine, Inner, measure, unavailable};
use crate::fault::{Code, Error, Fault};
use crate::run::{Entry, Run, RunStatus};
use crate::store::loops::RunCreated;
use crate::store::{IdempotencyKey, Saved};

/// The runs that this process drives.
#[derive(Default)]
pub(crate) struct Loops {
    pub(super) live: Mutex<HashMap<(String, String), Arc<LiveRun>>>,
    /// Number of replays in progress.
    pub(super) replays: AtomicUsize,
}

/// A run that this process drives.
pub(super) struct LiveRun {
    /// The last committed state.
    pub(super) state: Arc<Held<State>>,
    /// Interrupts the driver, which then re-reads the state.
    pub(super) stop: Notify,
    /// Held while the run is driven.
    pub(super) driving: Held<()>,
    /// Signals that the user added a message.
    pub(super) said: Notify,
    ears: Ears,
    /// The run's status, readable without the state lock.
    pub(super) shown: Mutex<RunStatus>,
}

pub(super) struct State {
    pub(super) run: Run,
    /// Initial messages of a new run, which saves a read of the journal.
    pub(super) beginning: Option<Vec<Value>>,
    /// True once no task drives this entry. A later change must load the run again.
    pub(super) gone: bool,
}

impl LiveRun {
    pub(super) fn new(run: Run) -> Arc<Self> {
        let shown = Mutex::new(run.status);
        Arc::new(Self {
            state: Arc::new(Held::new(State { run, beginning: None, gone: false })),
            stop: Notify::new(),
            driving: Held::new(()),
            said: Notify::new(),
            ears: Ears::default(),
            shown,
        })
    }

    /// Adds a subscriber, which receives deltas from now on.
    pub(super) fn listen(&self) -> Arc<Ear> {
        self.ears.listen()
    }

    /// Publishes a delta to all subscribers.
    pub(super) fn tell(&self, note: LiveNote) {
        self.ears.tell(note);
    }
}

/// The exclusive right to change a run.
pub(super) struct InHand {
    pub(super) live: Arc<LiveRun>,
    pub(super) state: OwnedMutexGuard<State>,
}

impl Loops {
    pub(crate) fn len(&self) -> usize {
        self.live.lock().len()
    }

    pub(super) fn get(&self, project: &str, run_id: &str) -> Option<Arc<LiveRun>> {
        self.live.lock().get(&(project.to_owned(), run_id.to_owned())).cloned()
    }
}

impl Inner {
    pub(super) async fn take_run(
        self: Arc<Self>,
        run: Run,
        key: Option<IdempotencyKey>,
        entry: Entry,
        listens: bool,
    ) -> Result<StartedRun, Error> {
        // Registered before it is stored: the search for orphaned runs must not find it.
        let live = LiveRun::new(run.clone());
        let mut state = live.state.clone().lock_owned().await;
        state.beginning = Some(entry.messages.clone());
        let place = (run.project.clone(), run.id.clone());
        self.loops.live.lock().insert(place.clone(), live.clone());
        let created = self.store.loops().create_loop(run.clone(), key, vec![entry]).await;
        if !matches!(created, Ok(RunCreated::New)) {
            state.gone = true;
            self.loops.live.lock().remove(&place);
        }
        match created.map_err(unavailable)? {
            RunCreated::New => {
                let news = RunNews::of(Some(&live).filter(|_| listens));
                let engine = Engine { inner: self.clone() };
                self.tasks.spawn(conduct::conduct(engine, live));
                Ok(StartedRun { run, replayed: false, news })
            }
            RunCreated::Replayed(run) => {
                let live = self.loops.get(&run.project, &run.id);
                Ok(StartedRun {
                    run: *run,
                    replayed: true,
                    news: RunNews::of(live.as_ref().filter(|_| listens)),
                })
            }
            RunCreated::Mismatch(run_id) => {
                let message = "this idempotency key was used for another request";
                let fault = Fault::new(Code::IdempotencyMismatch, message).not_happened();
                Err(fault.with_detail(json!({ "run_id": run_id })).into())
            }
        }
    }

    /// Locks a run for a change. If this process does not drive it yet, loads it and starts a
    /// driver.
    pub(super) async fn in_hand(
        self: &Arc<Self>,
        project: &str,
        run_id: &str,
    ) -> Result<InHand, Error> {
        let place = (project.to_owned(), run_id.to_owned());
        loop {
            if let Some(live) = self.loops.get(project, run_id) {
                let state = live.state.clone().lock_owned().await;
                if !state.gone {
                    return Ok(InHand { live, state });
                }
                continue;
            }
            let look = || self.store.loops().loop_run(project, run_id);
            let found = look().await.map_err(unavailable)?;
            let live = LiveRun::new(found.ok_or_else(|| no_run(run_id))?);
            // Locked before it is registered, so that the driver starts only after the change.
            let mut state = live.state.clone().lock_owned().await;
            {
                let mut all = self.loops.live.lock();
                if all.contains_key(&place) {
                    continue;
                }
                all.insert(place.clone(), live.clone());
            }
            let engine = Engine { inner: self.clone() };
            self.tasks.spawn(conduct::conduct(engine, live.clone()));
            // Another task may have changed the run since it was loaded.
            match look().await {
                Ok(Some(run)) => (state.run, *live.shown.lock()) = (run.clone(), run.status),
                other => {
                    state.gone = true;
                    self.loops.live.lock().remove(&place);
                    return Err(other.map_or_else(unavailable, |_| no_run(run_id)));
                }
            }
            return Ok(InHand { live, state });
        }
    }

    /// Commits a change of a run with its journal records, and wakes its listeners.
    pub(super) async fn commit(
        self: Arc<Self>,
        live: Arc<LiveRun>,
        mut state: OwnedMutexGuard<State>,
        change: impl FnOnce(&mut Run, u64) -> Vec<Entry> + Send,
    ) -> Result<Run, Error> {
        let now_ms = self.clock.now_ms();
        let mut next = state.run.clone();
        let entries = change(&mut next, now_ms);
        (next.version, next.updated_ms) = (next.version + 1, now_ms);
        let saved = self.store.loops().save_loop(next.clone(), entries).await;
        if saved.map_err(unavailable)? == Saved::Stale {
            // Another process drives the run, so the state in memory is stale.
            state.gone = true;
            let place = (next.project.clone(), next.id.clone());
            self.loops.live.lock().remove(&place);
            let message = "the run was changed by another process meanwhile; try again";
            return Err(Error::refused(Code::Conflict, message));
        }
        if next.status.is_over() && !state.run.status.is_over() {
            measure::run_over(next.status.as_str());
        }
        *live.shown.lock() = next.status;
        state.run = next.clone();
        drop(state);
        let (project, run_id) = (next.project.clone(), next.id.clone());
        self.bus.wake(&Topic::Run { project, run_id });
        Ok(next)
    }
}
