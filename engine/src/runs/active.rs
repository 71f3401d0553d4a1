//! Active runs: each with the one lock that guards its changes, and the task that drives it.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::{Mutex as Held, Notify, OwnedMutexGuard};

use crate::domain::fault::{Code, Error, Fault};
use crate::domain::run::{JournalRecord, Run, RunStatus};
use crate::engine::{Core, Engine, from_store_error};
use crate::ports::bus::Topic;
use crate::ports::store::runs::CreateRunResult;
use crate::ports::store::{IdempotencyKey, SaveResult};
use crate::runs::driver;
use crate::runs::lifecycle::{RunDelta, RunSubscription, StartedRun, run_not_found};
use crate::runs::subscribers::{Subscriber, Subscribers};
use crate::telemetry::engine_metrics;

/// The runs that this process drives.
#[derive(Default)]
pub(crate) struct ActiveRuns {
    pub(crate) by_id: Mutex<HashMap<(String, String), Arc<ActiveRun>>>,
    /// Number of replays in progress.
    pub(crate) replays: AtomicUsize,
}

/// A run that this process drives.
pub(crate) struct ActiveRun {
    /// The last committed state.
    pub(crate) state: Arc<Held<ActiveRunState>>,
    /// Interrupts the driver, which then re-reads the state.
    pub(crate) interrupt: Notify,
    /// Held while the run is driven.
    pub(crate) driver_lock: Held<()>,
    /// Signals that the user added a message.
    pub(crate) message_added: Notify,
    subscribers: Subscribers,
    /// The run's status, readable without the state lock.
    pub(crate) status: Mutex<RunStatus>,
}

pub(crate) struct ActiveRunState {
    pub(crate) run: Run,
    /// Initial messages of a new run, which saves a read of the journal.
    pub(crate) initial_messages: Option<Vec<Value>>,
    /// True once no task drives this entry. A later change must load the run again.
    pub(crate) is_released: bool,
}

impl ActiveRun {
    pub(crate) fn new(run: Run) -> Arc<Self> {
        let shown = Mutex::new(run.status);
        Arc::new(Self {
            state: Arc::new(Held::new(ActiveRunState {
                run,
                initial_messages: None,
                is_released: false,
            })),
            interrupt: Notify::new(),
            driver_lock: Held::new(()),
            message_added: Notify::new(),
            subscribers: Subscribers::default(),
            status: shown,
        })
    }

    /// Adds a subscriber, which receives deltas from now on.
    pub(crate) fn subscribe(&self) -> Arc<Subscriber> {
        self.subscribers.subscribe()
    }

    /// Publishes a delta to all subscribers.
    pub(crate) fn publish(&self, note: RunDelta) {
        self.subscribers.publish(note);
    }
}

/// The exclusive right to change a run.
pub(crate) struct RunGuard {
    pub(crate) active_run: Arc<ActiveRun>,
    pub(crate) state: OwnedMutexGuard<ActiveRunState>,
}

impl ActiveRuns {
    pub(crate) fn len(&self) -> usize {
        self.by_id.lock().len()
    }

    pub(crate) fn get(&self, project: &str, run_id: &str) -> Option<Arc<ActiveRun>> {
        self.by_id.lock().get(&(project.to_owned(), run_id.to_owned())).cloned()
    }
}

impl Core {
    pub(crate) async fn create_run(
        self: Arc<Self>,
        run: Run,
        key: Option<IdempotencyKey>,
        entry: JournalRecord,
        listens: bool,
    ) -> Result<StartedRun, Error> {
        // Registered before it is stored: the search for orphaned runs must not find it.
        let live = ActiveRun::new(run.clone());
        let mut state = live.state.clone().lock_owned().await;
        state.initial_messages = Some(entry.messages.clone());
        let place = (run.project.clone(), run.id.clone());
        self.active_runs.by_id.lock().insert(place.clone(), live.clone());
        let created = self.store.runs().create_run(run.clone(), key, vec![entry]).await;
        if !matches!(created, Ok(CreateRunResult::New)) {
            state.is_released = true;
            self.active_runs.by_id.lock().remove(&place);
        }
        match created.map_err(from_store_error)? {
            CreateRunResult::New => {
                let news = RunSubscription::new(Some(&live).filter(|_| listens));
                let engine = Engine { core: self.clone() };
                self.tasks.spawn(driver::drive_run(engine, live));
                Ok(StartedRun { run, replayed: false, subscription: news })
            }
            CreateRunResult::Replayed(run) => {
                let live = self.active_runs.get(&run.project, &run.id);
                Ok(StartedRun {
                    run: *run,
                    replayed: true,
                    subscription: RunSubscription::new(live.as_ref().filter(|_| listens)),
                })
            }
            CreateRunResult::Mismatch(run_id) => {
                let message = "this idempotency key was used for another request";
                let fault = Fault::new(Code::IdempotencyMismatch, message).without_side_effect();
                Err(fault.with_detail(json!({ "run_id": run_id })).into())
            }
        }
    }

    /// Locks a run for a change. If this process does not drive it yet, loads it and starts a
    /// driver.
    pub(crate) async fn lock_run(
        self: &Arc<Self>,
        project: &str,
        run_id: &str,
    ) -> Result<RunGuard, Error> {
        let place = (project.to_owned(), run_id.to_owned());
        loop {
            if let Some(live) = self.active_runs.get(project, run_id) {
                let state = live.state.clone().lock_owned().await;
                if !state.is_released {
                    return Ok(RunGuard { active_run: live, state });
                }
                continue;
            }
            let look = || self.store.runs().run(project, run_id);
            let found = look().await.map_err(from_store_error)?;
            let live = ActiveRun::new(found.ok_or_else(|| run_not_found(run_id))?);
            // Locked before it is registered, so that the driver starts only after the change.
            let mut state = live.state.clone().lock_owned().await;
            {
                let mut all = self.active_runs.by_id.lock();
                if all.contains_key(&place) {
                    continue;
                }
                all.insert(place.clone(), live.clone());
            }
            let engine = Engine { core: self.clone() };
            self.tasks.spawn(driver::drive_run(engine, live.clone()));
            // Another task may have changed the run since it was loaded.
            match look().await {
                Ok(Some(run)) => (state.run, *live.status.lock()) = (run.clone(), run.status),
                other => {
                    state.is_released = true;
                    self.active_runs.by_id.lock().remove(&place);
                    return Err(other.map_or_else(from_store_error, |_| run_not_found(run_id)));
                }
            }
            return Ok(RunGuard { active_run: live, state });
        }
    }

    /// Commits a change of a run with its journal records, and wakes its listeners.
    pub(crate) async fn commit_run(
        self: Arc<Self>,
        live: Arc<ActiveRun>,
        mut state: OwnedMutexGuard<ActiveRunState>,
        change: impl FnOnce(&mut Run, u64) -> Vec<JournalRecord> + Send,
    ) -> Result<Run, Error> {
        let now_ms = self.clock.now_ms();
        let mut next = state.run.clone();
        let entries = change(&mut next, now_ms);
        (next.version, next.updated_ms) = (next.version + 1, now_ms);
        let saved = self.store.runs().save_run(next.clone(), entries).await;
        if saved.map_err(from_store_error)? == SaveResult::Conflict {
            // Another process drives the run, so the state in memory is stale.
            state.is_released = true;
            let place = (next.project.clone(), next.id.clone());
            self.active_runs.by_id.lock().remove(&place);
            let message = "the run was changed by another process meanwhile; try again";
            return Err(Error::refused(Code::Conflict, message));
        }
        if next.status.is_terminal() && !state.run.status.is_terminal() {
            engine_metrics::count_run_end(next.status.as_str());
        }
        *live.status.lock() = next.status;
        state.run = next.clone();
        drop(state);
        let (project, run_id) = (next.project.clone(), next.id.clone());
        self.bus.wake(&Topic::Run { project, run_id });
        Ok(next)
    }
}
