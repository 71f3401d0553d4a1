//! The trees of agents: which run or turn called which. The store has them; while one of their runs
//! or turns is open, they are in memory too, with their budgets.

mod budget;

use std::collections::HashSet;
use std::sync::Arc;

use crate::domain::fault::{Error, Fault};
use crate::domain::run::Run;
use crate::domain::utp::{Turn, TurnStatus};
use crate::ports::core::{Core, from_store_error};

pub(crate) use budget::{
    CallCharge, ChildReservation, OpenChild, TreeBudgets, TreeKey, too_many_calls_fault,
};

/// Number of runs or turns of a tree read at a time.
const TREE_PAGE: usize = 500;

/// The trees of agents.
pub(crate) struct AgentTrees {
    core: Arc<Core>,
    pub(crate) budgets: Arc<TreeBudgets>,
}

/// Returns the key of the tree that a turn belongs to.
fn tree_key_of(turn: &Turn) -> TreeKey {
    let root = turn.tree_root_id().unwrap_or(&turn.turn_id);
    (turn.project.clone(), root.to_owned())
}

impl AgentTrees {
    pub(crate) fn new(core: &Arc<Core>) -> Self {
        Self { core: core.clone(), budgets: Arc::default() }
    }

    /// Returns the last committed state of a run.
    pub(crate) async fn load_run(&self, project: &str, run_id: &str) -> Result<Option<Run>, Error> {
        // The id of a call's run may be any text that groups calls.
        if !run_id.starts_with(Run::PREFIX) {
            return Ok(None);
        }
        self.core.store.runs().run(project, run_id).await.map_err(from_store_error)
    }

    /// Loads a tree into memory, if it is not there.
    pub(crate) async fn load_tree(&self, project: &str, root: &str) -> Result<(), Error> {
        self.load_tree_if(project, root, |_, _| true).await
    }

    /// Loads the tree of an adopted run into memory, if agents belong to it.
    pub(crate) async fn restore_tree(&self, project: &str, root: &str) -> Result<(), Error> {
        let has_agents = |runs: &[Run], turns: &[Turn]| {
            !turns.is_empty() || runs.iter().any(|run| run.lineage.is_some())
        };
        self.load_tree_if(project, root, has_agents).await
    }

    async fn load_tree_if(
        &self,
        project: &str,
        root: &str,
        is_needed: impl Fn(&[Run], &[Turn]) -> bool,
    ) -> Result<(), Error> {
        let key = (project.to_owned(), root.to_owned());
        if self.budgets.is_loaded(&key) {
            return Ok(());
        }
        let runs = self.read_runs(project, root).await?;
        let turns = self.read_turns(project, root, &runs).await?;
        if is_needed(&runs, &turns) {
            self.budgets.add_tree(key, &runs, &turns);
        }
        Ok(())
    }

    /// Loads a turn and its tree into memory, if they are not there.
    pub(crate) async fn load_turn(&self, turn: &Turn) -> Result<(), Error> {
        let key = tree_key_of(turn);
        self.load_tree(&key.0, &key.1).await?;
        self.budgets.add_turn(&key, turn);
        Ok(())
    }

    /// Charges one call of a delegated turn, or returns the fault if the budget that the turn draws
    /// from is used up. A call that has started is charged in any case.
    pub(crate) async fn charge_call(
        &self,
        turn: &Turn,
        has_started: bool,
    ) -> Result<Result<CallCharge, Fault>, Error> {
        self.load_turn(turn).await?;
        Ok(TreeBudgets::charge_call(&self.budgets, &tree_key_of(turn), turn, has_started))
    }

    /// Reads the turns of a tree. A turn whose call has ended counts as stopped: its next lease
    /// stops it, and it holds no budget until then.
    pub(crate) async fn read_turns(
        &self,
        project: &str,
        root: &str,
        runs: &[Run],
    ) -> Result<Vec<Turn>, Error> {
        let mut turns = self.read_stored_turns(project, root, runs).await?;
        for turn in turns.iter_mut().filter(|turn| !turn.status.is_terminal()) {
            let call_id = turn.delegation.as_ref().map(|delegation| delegation.call_id.parse());
            let Some(Ok(call_id)) = call_id else { continue };
            let call = self.core.store.call(project, &call_id).await.map_err(from_store_error)?;
            if call.is_none_or(|call| call.status.is_terminal()) {
                turn.status = TurnStatus::Stopped;
            }
        }
        Ok(turns)
    }

    /// Reads all stored runs of a tree, the first one included.
    pub(crate) async fn read_runs(&self, project: &str, root: &str) -> Result<Vec<Run>, Error> {
        let mut runs: Vec<Run> = Vec::new();
        loop {
            let after = runs.last().map(|run| run.id.clone());
            let page = self.core.store.agents().tree_runs(project, root, after, TREE_PAGE).await;
            let page = page.map_err(from_store_error)?;
            let is_last = page.len() < TREE_PAGE;
            runs.extend(page);
            if is_last {
                break;
            }
        }
        if !runs.iter().any(|run| run.id == root) {
            runs.extend(self.load_run(project, root).await?);
        }
        Ok(runs)
    }

    /// Reads the turns of workers in a tree: those that calls handed over, those that called the
    /// runs, and those above them.
    async fn read_stored_turns(
        &self,
        project: &str,
        root: &str,
        runs: &[Run],
    ) -> Result<Vec<Turn>, Error> {
        let utp = self.core.store.utp();
        let mut turns: Vec<Turn> = Vec::new();
        loop {
            let after = turns.last().map(|turn| turn.turn_id.clone());
            let page = utp.tree_turns(project, root, after, TREE_PAGE).await;
            let page = page.map_err(from_store_error)?;
            let is_last = page.len() < TREE_PAGE;
            turns.extend(page);
            if is_last {
                break;
            }
        }
        let mut seen: HashSet<String> = turns.iter().map(|turn| turn.turn_id.clone()).collect();
        let parent_of = |turn: &Turn| turn.delegation.as_ref()?.lineage.parent_id.clone();
        let lineages = runs.iter().filter_map(|run| run.lineage.as_deref());
        let mut rest: Vec<String> =
            lineages.filter_map(|lineage| lineage.parent_turn_id.clone()).collect();
        rest.extend(turns.iter().filter_map(parent_of));
        while let Some(id) = rest.pop() {
            // The id above a turn is that of a run or a turn.
            if id.starts_with(Run::PREFIX) || !seen.insert(id.clone()) {
                continue;
            }
            let found = utp.turn(project, &id).await.map_err(from_store_error)?;
            let Some(turn) = found else { continue };
            rest.extend(parent_of(&turn));
            turns.push(turn);
        }
        Ok(turns)
    }
}
