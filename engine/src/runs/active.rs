//! Active runs: each with the one lock that guards its changes, and the task that drives it.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use parking_lot::Mutex;
use serde_json::Value;
use tokio::sync::{Mutex as Held, Notify, OwnedMutexGuard};

use crate::calls::rejoin::PendingDelivery;
use crate::domain::agent::OnParentEnd;
use crate::domain::directory::kill_switches::KillSwitchSet;
use crate::domain::fault::Error;
use crate::domain::run::{Run, RunStatus};
use crate::runs::subscribers::{RunDelta, RunSubscription, Subscriber, Subscribers};

/// The runs that this process drives.
#[derive(Default)]
pub(crate) struct ActiveRuns {
    pub(crate) by_id: Mutex<HashMap<(String, String), Arc<ActiveRun>>>,
    /// Number of replays in progress.
    pub(crate) replays: AtomicUsize,
    /// Number of conversations of OpenAI's API in progress, by project and run id.
    pub(crate) conversations: Mutex<HashMap<(String, String), usize>>,
}

/// A run that this process drives.
pub(crate) struct ActiveRun {
    /// Project and agent that the run acts for.
    pub(crate) owner: (String, String),
    /// The last committed state.
    pub(crate) state: Arc<Held<ActiveRunState>>,
    /// Interrupts the driver, which then re-reads the state.
    pub(crate) interrupt: Notify,
    /// Held while the run is driven.
    pub(crate) driver_lock: Held<()>,
    /// Signals that the user added a message.
    pub(crate) message_added: Notify,
    subscribers: Subscribers,
    /// Fate of the run when the run that called it ends; `None` if no agent's call started it.
    pub(crate) on_parent_end: Option<OnParentEnd>,
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
        let status = Mutex::new(run.status);
        let owner = (run.project.clone(), run.owner.agent.clone());
        let on_parent_end = run.lineage.as_ref().map(|lineage| lineage.on_parent_end);
        Arc::new(Self {
            owner,
            state: Arc::new(Held::new(ActiveRunState {
                run,
                initial_messages: None,
                is_released: false,
            })),
            interrupt: Notify::new(),
            driver_lock: Held::new(()),
            message_added: Notify::new(),
            subscribers: Subscribers::default(),
            on_parent_end,
            status,
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

    /// Returns true if this process drives the run and it has not ended.
    pub(crate) fn is_active(&self, project: &str, run_id: &str) -> bool {
        let active_run = self.get(project, run_id);
        active_run.is_some_and(|active_run| !active_run.status.lock().is_terminal())
    }

    /// Interrupts the runs of agents and projects that are switched off. Their drivers end them.
    pub(crate) fn interrupt_switched_off(&self, switches: &KillSwitchSet) {
        let active: Vec<_> = self.by_id.lock().values().cloned().collect();
        let is_off = |run: &ActiveRun| {
            let (project, agent) = &run.owner;
            switches.find_for_agent(project, agent).is_some()
        };
        active.iter().filter(|run| is_off(run)).for_each(|run| run.interrupt.notify_one());
    }
}

/// An accepted run.
pub struct StartedRun {
    /// The run, in its state when the request was answered.
    pub run: Run,
    /// True if the idempotency key was used before. `run` is the run it created then.
    pub replayed: bool,
    /// True if the request joined an earlier run whose answer was not delivered.
    pub joined: bool,
    /// The delivery of the answer, if a repeated request may join the run. The requester marks it
    /// when it has the answer.
    pub delivery: Option<PendingDelivery>,
    /// Stream of the run's deltas from its beginning. Empty unless the request subscribes.
    pub subscription: RunSubscription,
}

/// Builds the refusal for a run that does not exist.
pub(crate) fn run_not_found(run_id: &str) -> Error {
    let excerpt: String = run_id.chars().take(80).collect();
    Error::not_found(format!("there is no run \"{excerpt}\""), "GET /v1/runs lists the runs")
}
