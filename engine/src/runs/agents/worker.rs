//! Starts the turn of a called agent that a worker drives. The turn has a place in the tree and a
//! part of the budget like the run of an agent that the loop drives.

use std::sync::Arc;

use super::start::into_result;
use crate::domain::agent::OnParentEnd;
use crate::domain::fault::Error;
use crate::domain::id::CallId;
use crate::domain::utp::TurnLineage;
use crate::ports::source::{Attempt, StartResult};
use crate::runs::Runs;
use crate::utp::delegation::{TurnStart, WorkerSource};
use crate::utp::turns::delegated::turn_id_of;

impl Runs {
    /// Hands the turn of an attempt to the agent's worker, or finds it again after a crash.
    pub(super) async fn start_worker(
        self: &Arc<Self>,
        workers: &WorkerSource,
        attempt: Attempt,
    ) -> StartResult {
        let turn_id = turn_id_of(&attempt.call_id, attempt.number);
        match self.try_start_worker(workers, attempt, &turn_id).await {
            Ok(result) => result,
            Err(error) => into_result(&self.core, error),
        }
    }

    async fn try_start_worker(
        self: &Arc<Self>,
        workers: &WorkerSource,
        attempt: Attempt,
        turn_id: &str,
    ) -> Result<StartResult, Error> {
        if attempt.redelivered
            && let Some(turn) = self.utp.find_turn(&attempt.project, turn_id).await?
        {
            self.utp.trees.load_turn(&turn).await?;
            // The stored turn keeps its place, and its end is reported if it has ended.
            return Ok(workers.start_turn(attempt, TurnStart::default()).await);
        }
        // The call may have ended in the meantime; then there is nothing to do.
        let Some(entry) = self.dispatcher.open_calls.get(&attempt.call_id) else {
            return Ok(StartResult::Accepted);
        };
        let task = self.build_task(entry.call(), &attempt).await?;
        let budget = self.reserve_budget(&task, turn_id).await?;
        let lineage = TurnLineage {
            ancestors: task.above.ancestors.clone(),
            max_depth: Some(task.above.max_depth_below(&task.agent, task.depth)),
            root_id: task.above.root_id.clone(),
            parent_id: task.above.parent_id().map(str::to_owned),
            run_id: task.above.run_id.clone(),
            outlives_parent: task.agent.on_parent_end == OnParentEnd::Detach,
            calls: budget.calls,
            tokens: budget.tokens,
        };
        let context_box_id = task.above.context_box_id().map(str::to_owned);
        let started = workers.start_turn(attempt, TurnStart { lineage, context_box_id }).await;
        let is_handed_over = matches!(started, StartResult::Accepted);
        if !is_handed_over || self.dispatcher.open_calls.get(&task.call.id).is_none() {
            self.release_budget(&task, turn_id);
        }
        Ok(started)
    }

    /// Releases the budget of a turn whose attempt is no longer in flight.
    pub(super) fn release_turn(&self, call_id: &CallId, attempt: u32) {
        self.utp.trees.budgets.end_turn(&turn_id_of(call_id, attempt));
    }
}
