//! Active runs: each with the one lock that guards its changes, and the task that drives it; and
//! the conversations of OpenAI's API in progress.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use parking_lot::Mutex;
use serde_json::Value;
use tokio::sync::{Mutex as Held, Notify, OwnedMutexGuard, watch};

use crate::calls::rejoin::PendingDelivery;
use crate::domain::agent::OnParentEnd;
use crate::domain::directory::kill_switches::{KillSwitch, KillSwitchSet};
use crate::domain::fault::{Error, Fault};
use crate::domain::run::{Run, RunStatus};
use crate::runs::subscribers::{RunDelta, RunSubscription, Subscriber, Subscribers};

/// The runs that this process drives.
#[derive(Default)]
pub(crate) struct ActiveRuns {
    pub(crate) by_id: Mutex<HashMap<(String, String), Arc<ActiveRun>>>,
    /// Number of replays in progress.
    pub(crate) replays: AtomicUsize,
    /// Conversations of OpenAI's API in progress, by project and run id; several requests may have
    /// the same run id.
    pub(crate) conversations: Mutex<ConversationsByRun>,
}

/// Conversations in progress, by project and run id.
type ConversationsByRun = HashMap<(String, String), Vec<Arc<OpenConversation>>>;

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
    /// Id of the agent that the run was handed off to, readable without the state lock, which is
    /// held while the driver commits.
    active_agent: Mutex<Option<String>>,
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
        let active_agent = Mutex::new(run.active_agent_id().map(str::to_owned));
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
            active_agent,
        })
    }

    /// Copies the parts of a committed state that are read without the state lock.
    pub(crate) fn set_committed(&self, run: &Run) {
        *self.status.lock() = run.status;
        *self.active_agent.lock() = run.active_agent_id().map(str::to_owned);
    }

    /// Returns true if the project of the run is switched off, the agent that it acts for, or the
    /// agent that it was handed off to.
    fn is_switched_off(&self, switches: &KillSwitchSet) -> bool {
        let (project, agent) = &self.owner;
        let is_off = |agent: &str| switches.find_for_agent(project, agent).is_some();
        is_off(agent) || self.active_agent.lock().as_deref().is_some_and(is_off)
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

/// A conversation of OpenAI's API in progress. The task of its request runs it, so it is stored as
/// a run when it ends, and until then is known only here.
pub(crate) struct OpenConversation {
    /// The run as it is shown.
    run: Mutex<Run>,
    subscribers: Subscribers,
    /// The reason to stop, once there is one.
    stop: watch::Sender<Option<Fault>>,
}

impl OpenConversation {
    pub(crate) fn new(run: Run) -> Arc<Self> {
        let (run, stop) = (Mutex::new(run), watch::Sender::new(None));
        Arc::new(Self { run, subscribers: Subscribers::default(), stop })
    }

    /// Returns the run as it is shown.
    pub(crate) fn run(&self) -> Run {
        self.run.lock().clone()
    }

    /// Returns the run as it is shown, if it passes this test.
    fn run_if(&self, test: impl Fn(&Run) -> bool) -> Option<Run> {
        let run = self.run.lock();
        test(&run).then(|| run.clone())
    }

    /// Changes the run as it is shown.
    pub(crate) fn update(&self, change: impl FnOnce(&mut Run)) {
        change(&mut self.run.lock());
    }

    /// Adds a subscriber, which receives deltas from now on.
    pub(crate) fn subscribe(&self) -> RunSubscription {
        RunSubscription::of_conversation(&self.subscribers)
    }

    /// Publishes a delta to all subscribers.
    pub(crate) fn publish(&self, delta: RunDelta) {
        self.subscribers.publish(delta);
    }

    /// Stops the conversation. The first reason stays.
    pub(crate) fn stop(&self, reason: Fault) {
        self.stop.send_if_modified(|stop| {
            let is_first = stop.is_none();
            stop.get_or_insert(reason);
            is_first
        });
    }

    /// Waits until the conversation is to stop. Returns the reason.
    pub(crate) async fn wait_for_stop(&self) -> Fault {
        let mut stop = self.stop.subscribe();
        loop {
            if let Some(reason) = stop.borrow_and_update().clone() {
                return reason;
            }
            if stop.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    /// Stops the conversation if its project is switched off, the agent that it acts for, or the
    /// agent that it was handed off to.
    pub(crate) fn stop_if_switched_off(&self, switches: &KillSwitchSet) {
        let fault = {
            let run = self.run.lock();
            let find = |agent: &str| switches.find_for_agent(&run.project, agent);
            let switch = find(&run.owner.agent).or_else(|| find(run.active_agent_id()?));
            switch.map(KillSwitch::to_fault)
        };
        if let Some(fault) = fault {
            self.stop(fault);
        }
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

    /// Returns true if this process drives the run and it has not ended, or if a conversation is in
    /// progress under its id.
    pub(crate) fn is_active(&self, project: &str, run_id: &str) -> bool {
        let active_run = self.get(project, run_id);
        active_run.is_some_and(|active_run| !active_run.status.lock().is_terminal())
            || self.conversation(project, run_id).is_some()
    }

    /// Returns the conversations in progress under a run id, the newest last.
    pub(crate) fn conversations_of(
        &self,
        project: &str,
        run_id: &str,
    ) -> Vec<Arc<OpenConversation>> {
        let key = (project.to_owned(), run_id.to_owned());
        self.conversations.lock().get(&key).cloned().unwrap_or_default()
    }

    /// Returns the newest conversation in progress under a run id.
    pub(crate) fn conversation(
        &self,
        project: &str,
        run_id: &str,
    ) -> Option<Arc<OpenConversation>> {
        self.conversations_of(project, run_id).pop()
    }

    /// Returns the number of run ids with a conversation in progress.
    pub(crate) fn conversation_count(&self) -> usize {
        self.conversations.lock().len()
    }

    /// Returns the runs of the conversations in progress in a project that pass this test, one per
    /// run id. A conversation under the id of a run with a record of its own is part of that run.
    pub(crate) fn conversation_runs(
        &self,
        project: &str,
        is_listed: impl Fn(&Run) -> bool,
    ) -> Vec<Run> {
        let newest: Vec<Arc<OpenConversation>> = {
            let conversations = self.conversations.lock();
            let of_project = conversations.iter().filter(|((owner, _), _)| owner == project);
            of_project.filter_map(|(_, open)| open.last().cloned()).collect()
        };
        let listed = |run: &Run| run.options.is_conversation && is_listed(run);
        newest.iter().filter_map(|open| open.run_if(listed)).collect()
    }

    /// Interrupts the runs and stops the conversations of agents and projects that are switched
    /// off. Their drivers and requests end them.
    pub(crate) fn interrupt_switched_off(&self, switches: &KillSwitchSet) {
        let active: Vec<_> = self.by_id.lock().values().cloned().collect();
        let off = active.iter().filter(|run| run.is_switched_off(switches));
        off.for_each(|run| run.interrupt.notify_one());
        let open: Vec<_> = self.conversations.lock().values().flatten().cloned().collect();
        open.iter().for_each(|conversation| conversation.stop_if_switched_off(switches));
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
    /// Stream of the run's deltas: those of a new run from its beginning, those of an earlier run
    /// from now on. Empty unless the request subscribes.
    pub subscription: RunSubscription,
}

/// Builds the refusal for a run that does not exist.
pub(crate) fn run_not_found(run_id: &str) -> Error {
    let excerpt: String = run_id.chars().take(80).collect();
    Error::not_found(format!("there is no run \"{excerpt}\""), "GET /v1/runs lists the runs")
}
