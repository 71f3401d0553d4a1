//! Calls of agents that the loop drives: each call is a run of its own, linked to the call and to
//! the run that made it.
//!
//! A call of an agent is an ordinary call whose source starts a run. The run's id derives from the
//! call's, so a call that is delivered again after a crash finds its run. The end of the run is
//! committed first and then reported as the result of the call; if the process dies in between, the
//! recovered call reads the result from the stored run. So exactly one outcome reaches the caller.
//!
//! Budgets form a tree. The row of a child names the part of the budget that it reserves, so the
//! commit that creates the child reserves that part. Of an ended run only the usage counts, so the
//! commit that ends the child returns the rest. `utp::trees` holds the same tree in memory and
//! rebuilds it from the store.

mod end;
mod messages;
mod start;
mod task;
mod tree;
mod worker;

use std::sync::{Arc, OnceLock, Weak};

use async_trait::async_trait;

use crate::domain::agent::{AGENT_TOOL_PREFIX, AgentDriver};
use crate::domain::id::CallId;
use crate::domain::run::Run;
use crate::domain::tool::{Executor, ToolDefinition};
use crate::ports::source::{Attempt, ProgressSink, Source, StartResult};
use crate::registry::Registry;
use crate::runs::Runs;
use crate::utp::delegation::WorkerSource;

pub(crate) use end::check_finish;
pub(crate) use messages::box_message;
pub(crate) use start::root_of;
pub use tree::{RunTree, RunTreeNode, RunTrees, TreeMember, TreeUsage};

/// Returns the id of the run that answers a call.
pub(crate) fn run_id_for(call_id: &CallId) -> String {
    format!("{}{}", Run::PREFIX, call_id.as_str().trim_start_matches(CallId::PREFIX))
}

/// The source of agents. Its tools come from the roster.
#[derive(Default)]
pub(crate) struct AgentSource {
    runs: OnceLock<Weak<Runs>>,
    /// Executes the calls of agents that workers drive.
    workers: OnceLock<WorkerSource>,
}

impl AgentSource {
    /// Connects the source with the runs. Later calls have no effect.
    pub(crate) fn set_runs(&self, runs: &Arc<Runs>) {
        let _ = self.runs.set(Arc::downgrade(runs));
    }

    /// Sets the part that hands calls to workers. Later calls have no effect.
    pub(crate) fn set_workers(&self, workers: WorkerSource) {
        let _ = self.workers.set(workers);
    }

    fn runs(&self) -> Option<Arc<Runs>> {
        self.runs.get()?.upgrade()
    }
}

/// Returns true if a worker drives the agent of an attempt.
fn is_worker_driven(registry: &Registry, attempt: &Attempt) -> bool {
    let agent_id = attempt.tool.strip_prefix(AGENT_TOOL_PREFIX).unwrap_or(&attempt.tool);
    let found = registry.find_agent_definition(&attempt.project, agent_id);
    found.is_some_and(|agent| agent.driver == AgentDriver::Worker)
}

#[async_trait]
impl Source for AgentSource {
    fn executor(&self) -> Executor {
        Executor::AGENT
    }

    fn list(&self) -> Vec<ToolDefinition> {
        Vec::new()
    }

    async fn start(&self, attempt: Attempt, _progress: ProgressSink) -> StartResult {
        // If the engine is gone, the next process starts the attempt again.
        let Some(runs) = self.runs() else { return StartResult::Accepted };
        match self.workers.get().filter(|_| is_worker_driven(&runs.registry, &attempt)) {
            Some(workers) => Box::pin(runs.start_worker(workers, attempt)).await,
            None => Box::pin(runs.start_agent(attempt)).await,
        }
    }

    fn cancel(&self, call_id: &CallId, attempt: u32) {
        if let Some(workers) = self.workers.get() {
            workers.stop_turn(call_id, attempt);
        }
        if let Some(runs) = self.runs() {
            runs.stop_agent(call_id);
        }
    }

    fn release_attempt(&self, call_id: &CallId, attempt: u32) {
        if let Some(workers) = self.workers.get() {
            workers.release_attempt(call_id, attempt);
        }
        if let Some(runs) = self.runs() {
            runs.release_turn(call_id, attempt);
        }
    }
}
