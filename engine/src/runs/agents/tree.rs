//! The tree of a run: the agents that it called, those that they called, and their usage.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::budget::TreeBudgets;
use super::start::root_of;
use crate::domain::access_rules::RuleAction;
use crate::domain::caller::Caller;
use crate::domain::fault::Error;
use crate::domain::run::{Run, RunBudget, RunLineage};
use crate::domain::utp::Turn;
use crate::ports::core::{Core, from_store_error};
use crate::registry::Registry;
use crate::runs::stream::RunStreams;

/// Number of runs of a tree read at a time.
const TREE_PAGE: usize = 500;

/// Usage of a run, or of a whole tree.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TreeUsage {
    /// Number of requests to models.
    pub steps: u64,
    /// Number of tool calls.
    pub calls: u64,
    /// Number of tokens of all requests and replies.
    pub tokens: u64,
}

impl std::ops::AddAssign for TreeUsage {
    fn add_assign(&mut self, other: Self) {
        self.steps = self.steps.saturating_add(other.steps);
        self.calls = self.calls.saturating_add(other.calls);
        self.tokens = self.tokens.saturating_add(other.tokens);
    }
}

/// One run of a tree, with the runs below it.
#[derive(Debug, Clone)]
pub struct RunTreeNode {
    /// The run in its stored state.
    pub run: Run,
    /// Usage of the run itself.
    pub usage: TreeUsage,
    /// Usage of the run and everything below it.
    pub total: TreeUsage,
    /// Parts of its budget that open runs below it have reserved.
    pub reserved: RunBudget,
    /// Runs of the agents that it called, in the order of their start.
    pub children: Vec<RunTreeNode>,
}

/// The tree below a run.
#[derive(Debug, Clone)]
pub struct RunTree {
    /// First run of the whole tree, which may be above `node`.
    pub root_run_id: String,
    /// The requested run.
    pub node: RunTreeNode,
    /// Number of runs at and below it.
    pub run_count: usize,
    /// Number of those that have not ended.
    pub open_count: usize,
}

/// The trees of runs: stored as the runs of agents, in memory with their budgets.
pub struct RunTrees {
    core: Arc<Core>,
    registry: Arc<Registry>,
    streams: Arc<RunStreams>,
    pub(crate) budgets: TreeBudgets,
}

impl RunTrees {
    pub(crate) fn new(registry: &Arc<Registry>, streams: &Arc<RunStreams>) -> Self {
        Self {
            core: registry.core.clone(),
            registry: registry.clone(),
            streams: streams.clone(),
            budgets: TreeBudgets::default(),
        }
    }

    /// Returns a run with all runs below it that the caller may read.
    pub async fn find_tree(&self, caller: &Caller, run_id: &str) -> Result<RunTree, Error> {
        let run = self.streams.find_run(caller, run_id).await?;
        let root_run_id = root_of(&run).to_owned();
        let catalog = self.registry.catalog();
        let mut runs = self.read_tree(&caller.project, &root_run_id).await?;
        runs.retain(|run| catalog.may_access_run(caller, RuleAction::Read, run));
        let mut by_parent: HashMap<String, Vec<Run>> = HashMap::new();
        for run in runs {
            let parent = run.lineage.as_deref().and_then(parent_of);
            if let Some(parent) = parent {
                by_parent.entry(parent).or_default().push(run);
            }
        }
        let node = build_node(run, &mut by_parent);
        let (mut run_count, mut open_count) = (0, 0);
        let mut rest = vec![&node];
        while let Some(node) = rest.pop() {
            run_count += 1;
            open_count += usize::from(!node.run.status.is_terminal());
            rest.extend(&node.children);
        }
        Ok(RunTree { root_run_id, run_count, open_count, node })
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
        let key = (project.to_owned(), root.to_owned());
        if self.budgets.is_loaded(&key) {
            return Ok(());
        }
        let runs = self.read_tree(project, root).await?;
        let turns = self.read_turns(project, &runs).await?;
        self.budgets.add_tree(key, &runs, &turns);
        Ok(())
    }

    /// Loads the tree of an adopted run into memory, if agents belong to it.
    pub(crate) async fn restore_tree(&self, project: &str, root: &str) -> Result<(), Error> {
        let key = (project.to_owned(), root.to_owned());
        if self.budgets.is_loaded(&key) {
            return Ok(());
        }
        let runs = self.read_tree(project, root).await?;
        if runs.iter().any(|run| run.lineage.is_some()) {
            let turns = self.read_turns(project, &runs).await?;
            self.budgets.add_tree(key, &runs, &turns);
        }
        Ok(())
    }

    /// Reads all stored runs of a tree, the first one included.
    async fn read_tree(&self, project: &str, root: &str) -> Result<Vec<Run>, Error> {
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
}

impl RunTrees {
    /// Reads the turns of workers that called these runs, and those above them.
    async fn read_turns(&self, project: &str, runs: &[Run]) -> Result<Vec<Turn>, Error> {
        let lineages = runs.iter().filter_map(|run| run.lineage.as_deref());
        let mut rest: Vec<String> =
            lineages.filter_map(|lineage| lineage.parent_turn_id.clone()).collect();
        let (mut turns, mut seen): (Vec<Turn>, HashSet<String>) = Default::default();
        while let Some(id) = rest.pop() {
            if !seen.insert(id.clone()) {
                continue;
            }
            let found = self.core.store.utp().turn(project, &id).await.map_err(from_store_error)?;
            let Some(turn) = found else { continue };
            // The id above is that of a run or a turn; there is no turn with the id of a run.
            let above = turn.delegation.as_ref();
            rest.extend(above.and_then(|delegation| delegation.lineage.parent_id.clone()));
            turns.push(turn);
        }
        Ok(turns)
    }
}

fn parent_of(lineage: &RunLineage) -> Option<String> {
    lineage.parent_run_id.clone()
}

/// Builds the node of a run. The depth of the tree is bounded, so recursion is too.
fn build_node(run: Run, by_parent: &mut HashMap<String, Vec<Run>>) -> RunTreeNode {
    let children = by_parent.remove(&run.id).unwrap_or_default();
    let children: Vec<RunTreeNode> =
        children.into_iter().map(|child| build_node(child, by_parent)).collect();
    let now = run.progress.usage_so_far();
    let usage = TreeUsage { steps: now.steps.into(), calls: now.calls.into(), tokens: now.tokens };
    let (mut total, mut reserved) = (usage, RunBudget::default());
    for child in &children {
        total += child.total;
        let budget = child.run.lineage.as_ref().map(|lineage| lineage.budget);
        let budget = budget.filter(|_| !child.run.status.is_terminal()).unwrap_or_default();
        reserved.calls = add_reserved(reserved.calls, budget.calls);
        reserved.tokens = add_reserved(reserved.tokens, budget.tokens);
    }
    RunTreeNode { run, usage, total, reserved, children }
}

fn add_reserved(sum: Option<u64>, more: Option<u64>) -> Option<u64> {
    match (sum, more) {
        (Some(sum), Some(more)) => Some(sum.saturating_add(more)),
        (sum, more) => sum.or(more),
    }
}
