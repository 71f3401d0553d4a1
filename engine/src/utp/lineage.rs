//! The place of a call in the tree of agents: the agents above it are driven by the loop, by
//! workers, or both.

use crate::domain::agent::{AgentDefinition, AgentDriver};
use crate::domain::call::Call;
use crate::domain::fault::{Code, Error, Fault};
use crate::domain::run::Run;
use crate::domain::utp::{MAX_DEPTH, Route, Turn};
use crate::ports::core::from_store_error;
use crate::utp::Utp;

/// The place of a call in the tree of agents.
#[derive(Debug, Default)]
pub(crate) struct CallLineage {
    /// Agents that wait for the call, from the first to the caller.
    pub(crate) ancestors: Vec<String>,
    /// Depth of the caller.
    pub(crate) depth: u32,
    /// Largest depth that the called agent may have.
    pub(crate) max_depth: u32,
    /// First run or turn of the tree; `None` if the call begins one.
    pub(crate) root_id: Option<String>,
    /// Run that made the call.
    pub(crate) run: Option<Run>,
    /// Turn that made the call.
    pub(crate) turn: Option<Turn>,
    /// Nearest run at or above the caller.
    pub(crate) run_id: Option<String>,
}

impl CallLineage {
    /// Returns the run or turn that made the call.
    pub(crate) fn parent_id(&self) -> Option<&str> {
        let turn = self.turn.as_ref().map(|turn| turn.turn_id.as_str());
        turn.or_else(|| self.run.as_ref().map(|run| run.id.as_str()))
    }

    /// Returns the box of cards of the run or turn that made the call.
    pub(crate) fn context_box_id(&self) -> Option<&str> {
        let of_turn = self.turn.as_ref().and_then(|turn| turn.context_box_id.as_deref());
        of_turn.or_else(|| self.run.as_ref()?.context_box_id.as_deref())
    }

    /// Returns true if a run or a turn made the call and has ended.
    pub(crate) fn has_parent_ended(&self) -> bool {
        let has_turn_ended = self.turn.as_ref().is_some_and(|turn| turn.status.is_terminal());
        has_turn_ended || self.run.as_ref().is_some_and(|run| run.status.is_terminal())
    }

    /// Returns the depth of the called agent. Refuses an agent that would wait for itself, or that
    /// is too deep.
    pub(crate) fn check_agent(&self, agent_id: &str) -> Result<u32, Fault> {
        if self.ancestors.iter().any(|ancestor| ancestor == agent_id) {
            let chain = self.ancestors.join(" → ");
            let message = format!(
                "agent \"{agent_id}\" would wait for itself ({chain} → {agent_id}); do this part \
                 of the task without it"
            );
            return Err(refusal(message));
        }
        let depth = self.depth + 1;
        if depth > self.max_depth {
            let message = format!(
                "recursion_depth_exceeded: agent \"{agent_id}\" would be at depth {depth}, and the \
                 maximum here is {}; do the task without calling another agent",
                self.max_depth
            );
            return Err(refusal(message));
        }
        Ok(depth)
    }

    /// Returns the largest depth of the agents below the called one.
    pub(crate) fn max_depth_below(&self, agent: &AgentDefinition, depth: u32) -> u32 {
        let own_max = agent.profile.limits.depth.map(|below| depth.saturating_add(below));
        self.max_depth.min(own_max.unwrap_or(u32::MAX))
    }
}

fn refusal(message: String) -> Fault {
    Fault::new(Code::Conflict, message).without_side_effect().retryable(false)
}

impl Utp {
    /// Returns the place of a call of an agent in the tree of agents.
    pub(crate) async fn find_call_lineage(
        &self,
        call: &Call,
        driver: AgentDriver,
    ) -> Result<CallLineage, Error> {
        let route = Route::for_call(call);
        let mut lineage = match self.find_calling_turn(call).await? {
            Some(turn) => lineage_in_turn(turn),
            None => match self.find_calling_run(call).await? {
                Some(run) => lineage_in_run(run),
                None => CallLineage {
                    depth: route.depth,
                    max_depth: MAX_DEPTH - 1,
                    ..CallLineage::default()
                },
            },
        };
        // Outside runs and turns, the caller itself may be the worker of the called agent.
        let is_worker = call.origin.route.is_some() || driver == AgentDriver::Worker;
        if lineage.parent_id().is_none() && is_worker {
            lineage.ancestors.push(route.agent_id);
        }
        // No ancestor waits for a detached call, so the called agent may be one of them.
        if route.is_detached {
            lineage.ancestors.clear();
        }
        Ok(lineage)
    }

    /// Returns the turn that made a call.
    pub(crate) async fn find_calling_turn(&self, call: &Call) -> Result<Option<Turn>, Error> {
        let Some(route) = call.origin.route.as_deref() else { return Ok(None) };
        let turn = self.core.store.utp().turn(&call.project, &route.turn_id).await;
        Ok(turn.map_err(from_store_error)?.filter(|turn| turn.agent_id == route.agent_id))
    }

    /// Returns the run that made a call; `None` if the call's caller does not own the run. The
    /// request chooses the run id, and only the owner of a run may use its rights and its budget.
    pub(crate) async fn find_calling_run(&self, call: &Call) -> Result<Option<Run>, Error> {
        // The id of a call's run may be any text that groups calls.
        if !call.run_id.starts_with(Run::PREFIX) {
            return Ok(None);
        }
        let run = self.core.store.runs().run(&call.project, &call.run_id).await;
        Ok(run.map_err(from_store_error)?.filter(|run| run.owner.matches(&call.caller())))
    }
}

fn lineage_in_turn(turn: Turn) -> CallLineage {
    let above = turn.delegation.as_ref().map(|delegation| delegation.lineage.clone());
    let above = above.unwrap_or_default();
    let mut ancestors = above.ancestors;
    ancestors.push(turn.agent_id.clone());
    CallLineage {
        ancestors,
        depth: turn.depth,
        max_depth: above.max_depth.unwrap_or(MAX_DEPTH - 1),
        root_id: Some(above.root_id.unwrap_or_else(|| turn.turn_id.clone())),
        run: None,
        run_id: above.run_id,
        turn: Some(turn),
    }
}

fn lineage_in_run(run: Run) -> CallLineage {
    let (run_id, own) = (run.id.clone(), run.lineage.as_deref());
    let mut ancestors = own.map(|own| own.ancestors.clone()).unwrap_or_default();
    ancestors.extend(own.map(|own| own.agent_id.clone()));
    CallLineage {
        ancestors,
        depth: own.map_or(0, |own| own.depth),
        max_depth: own.map_or(MAX_DEPTH - 1, |own| own.max_depth.min(MAX_DEPTH - 1)),
        root_id: Some(own.map_or_else(|| run_id.clone(), |own| own.root_run_id.clone())),
        run_id: Some(run_id),
        turn: None,
        run: Some(run),
    }
}
