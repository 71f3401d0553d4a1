//! The work that an agent was called for, and its place in the tree.

use std::sync::Arc;

use crate::domain::agent::{AGENT_TOOL_PREFIX, AgentDefinition, OnParentEnd};
use crate::domain::call::Call;
use crate::domain::fault::{Code, Error, Fault};
use crate::domain::run::RunBudget;
use crate::ports::source::Attempt;
use crate::runs::Runs;
use crate::utp::lineage::CallLineage;
use crate::utp::trees::{ChildReservation, TreeKey};

/// The work that an agent was called for, and its place in the tree.
pub(super) struct AgentTask {
    pub(super) agent: AgentDefinition,
    pub(super) call: Arc<Call>,
    pub(super) above: CallLineage,
    /// Depth of the called agent.
    pub(super) depth: u32,
}

impl AgentTask {
    /// Returns the key of the tree in which this run or turn does the work.
    pub(super) fn tree_key(&self, node_id: &str) -> TreeKey {
        let root = self.above.root_id.as_deref().unwrap_or(node_id);
        (self.call.project.clone(), root.to_owned())
    }
}

pub(super) fn refusal(code: Code, message: String) -> Fault {
    Fault::new(code, message).without_side_effect().retryable(false)
}

impl Runs {
    /// Builds the task of an attempt. Refuses one that has no place in the tree.
    pub(super) async fn build_task(
        &self,
        call: Arc<Call>,
        attempt: &Attempt,
    ) -> Result<AgentTask, Error> {
        let agent_id = attempt.tool.strip_prefix(AGENT_TOOL_PREFIX).unwrap_or(&attempt.tool);
        let found = self.registry.find_agent_definition(&attempt.project, agent_id);
        let agent = found.ok_or_else(|| {
            refusal(Code::NotFound, format!("agent \"{agent_id}\" was removed meanwhile"))
        })?;
        let above = self.utp.find_call_lineage(&call, agent.driver).await?;
        if above.has_parent_ended() && agent.on_parent_end == OnParentEnd::Cancel {
            let parent = above.parent_id().unwrap_or_default();
            let message = format!(
                "\"{parent}\", which called agent \"{agent_id}\", has ended; call the agent \
                 without this run_id"
            );
            return Err(refusal(Code::Canceled, message).into());
        }
        let depth = above.check_agent(agent_id)?;
        Ok(AgentTask { agent, call, above, depth })
    }

    /// Reserves the budget of the run or turn that does the work. It counts as open from now on.
    pub(super) async fn reserve_budget(
        &self,
        task: &AgentTask,
        node_id: &str,
    ) -> Result<RunBudget, Error> {
        let key = task.tree_key(node_id);
        self.utp.trees.load_tree(&key.0, &key.1).await?;
        if let Some(turn) = &task.above.turn {
            self.utp.trees.budgets.add_turn(&key, turn);
        }
        let reservation = ChildReservation {
            node_id,
            parent_id: task.above.parent_id(),
            call_id: &task.call.id,
            limits: &task.agent.profile.limits,
            on_parent_end: task.agent.on_parent_end,
            max_children: self.core.limits.max_child_runs,
        };
        let reserved = self.utp.trees.budgets.reserve(&key, &reservation);
        if reserved.is_err() {
            self.utp.trees.budgets.drop_if_unused(&key);
        }
        Ok(reserved?)
    }

    /// Releases what was reserved for a run or turn that was not created.
    pub(super) fn release_budget(&self, task: &AgentTask, node_id: &str) {
        let key = task.tree_key(node_id);
        self.utp.trees.budgets.discard(&key, node_id);
        self.utp.trees.budgets.drop_if_unused(&key);
    }
}
