//! The tree of a run: the agents that it called, those that they called, and their usage.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::start::root_of;
use crate::domain::access_rules::RuleAction;
use crate::domain::caller::Caller;
use crate::domain::fault::Error;
use crate::domain::run::{Run, RunBudget};
use crate::domain::utp::Turn;
use crate::registry::Registry;
use crate::runs::stream::RunStreams;
use crate::utp::Utp;

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

/// A run, or the turn of an agent that a worker drives.
#[derive(Debug, Clone)]
pub enum TreeMember {
    /// A run, in its stored state.
    Run(Box<Run>),
    /// A turn, in its stored state.
    Turn(Box<Turn>),
}

impl TreeMember {
    fn id(&self) -> &str {
        match self {
            Self::Run(run) => &run.id,
            Self::Turn(turn) => &turn.turn_id,
        }
    }

    fn created_ms(&self) -> u64 {
        match self {
            Self::Run(run) => run.created_ms,
            Self::Turn(turn) => turn.created_ms,
        }
    }

    fn is_open(&self) -> bool {
        match self {
            Self::Run(run) => !run.status.is_terminal(),
            Self::Turn(turn) => !turn.status.is_terminal(),
        }
    }

    fn usage(&self) -> TreeUsage {
        match self {
            Self::Run(run) => {
                let now = run.progress.usage_so_far();
                TreeUsage { steps: now.steps.into(), calls: now.calls.into(), tokens: now.tokens }
            }
            Self::Turn(turn) => {
                turn.delegation.as_ref().map_or_else(TreeUsage::default, |delegation| TreeUsage {
                    steps: 0,
                    calls: delegation.used_calls,
                    tokens: delegation.used_tokens,
                })
            }
        }
    }

    /// Returns the part of its caller's budget that it has reserved.
    fn budget(&self) -> RunBudget {
        match self {
            Self::Run(run) => run.lineage.as_ref().map(|lineage| lineage.budget),
            Self::Turn(turn) => turn.delegation.as_ref().map(|delegation| RunBudget {
                calls: delegation.lineage.calls,
                tokens: delegation.lineage.tokens,
            }),
        }
        .unwrap_or_default()
    }
}

/// One run or turn of a tree, with those below it.
#[derive(Debug, Clone)]
pub struct RunTreeNode {
    /// The run or turn.
    pub member: TreeMember,
    /// Usage of the run or turn itself.
    pub usage: TreeUsage,
    /// Usage of the run or turn and everything below it.
    pub total: TreeUsage,
    /// Parts of its budget that open runs and turns below it have reserved.
    pub reserved: RunBudget,
    /// Runs and turns of the agents that it called, in the order of their start.
    pub children: Vec<RunTreeNode>,
}

impl RunTreeNode {
    /// Returns the run; `None` if the node is a turn.
    pub fn run(&self) -> Option<&Run> {
        match &self.member {
            TreeMember::Run(run) => Some(run),
            TreeMember::Turn(_) => None,
        }
    }

    /// Returns the turn; `None` if the node is a run.
    pub fn turn(&self) -> Option<&Turn> {
        match &self.member {
            TreeMember::Run(_) => None,
            TreeMember::Turn(turn) => Some(turn),
        }
    }
}

/// The tree below a run.
#[derive(Debug, Clone)]
pub struct RunTree {
    /// First run or turn of the whole tree, which may be above `node`.
    pub root_run_id: String,
    /// The requested run.
    pub node: RunTreeNode,
    /// Number of runs at and below it.
    pub run_count: usize,
    /// Number of turns of workers below it.
    pub turn_count: usize,
    /// Number of runs and turns that have not ended.
    pub open_count: usize,
}

/// Shows the trees of runs.
pub struct RunTrees {
    registry: Arc<Registry>,
    streams: Arc<RunStreams>,
    utp: Arc<Utp>,
}

impl RunTrees {
    pub(crate) fn new(registry: &Arc<Registry>, streams: &Arc<RunStreams>, utp: &Arc<Utp>) -> Self {
        Self { registry: registry.clone(), streams: streams.clone(), utp: utp.clone() }
    }

    /// Returns a run with all runs below it that the caller may read, and the turns of workers that
    /// these runs called.
    pub async fn find_tree(&self, caller: &Caller, run_id: &str) -> Result<RunTree, Error> {
        let run = self.streams.find_run(caller, run_id).await?;
        let root_run_id = root_of(&run).to_owned();
        let catalog = self.registry.catalog();
        let project = &caller.project;
        let mut runs = self.utp.trees.read_runs(project, &root_run_id).await?;
        let turns = self.utp.trees.read_turns(project, &root_run_id, &runs).await?;
        runs.retain(|run| catalog.may_access_run(caller, RuleAction::Read, run));
        let node = build_node(TreeMember::Run(Box::new(run)), &mut group_by_parent(runs, turns));
        let (mut run_count, mut turn_count, mut open_count) = (0, 0, 0);
        let mut rest = vec![&node];
        while let Some(node) = rest.pop() {
            match node.member {
                TreeMember::Run(_) => run_count += 1,
                TreeMember::Turn(_) => turn_count += 1,
            }
            open_count += usize::from(node.member.is_open());
            rest.extend(&node.children);
        }
        Ok(RunTree { root_run_id, run_count, turn_count, open_count, node })
    }
}

/// Groups the runs and turns of a tree by the run or turn that called them.
fn group_by_parent(runs: Vec<Run>, turns: Vec<Turn>) -> HashMap<String, Vec<TreeMember>> {
    let turn_ids: HashSet<String> = turns.iter().map(|turn| turn.turn_id.clone()).collect();
    let mut by_parent: HashMap<String, Vec<TreeMember>> = HashMap::new();
    for run in runs {
        let lineage = run.lineage.as_deref();
        let parent_turn = lineage.and_then(|lineage| lineage.parent_turn_id.clone());
        // A turn that was deleted leaves its runs to the nearest run above it.
        let parent = parent_turn.filter(|id| turn_ids.contains(id));
        let parent = parent.or_else(|| lineage?.parent_run_id.clone());
        if let Some(parent) = parent {
            by_parent.entry(parent).or_default().push(TreeMember::Run(Box::new(run)));
        }
    }
    for turn in turns {
        let lineage = turn.delegation.as_ref().map(|delegation| &delegation.lineage);
        if let Some(parent) = lineage.and_then(|lineage| lineage.parent_id.clone()) {
            by_parent.entry(parent).or_default().push(TreeMember::Turn(Box::new(turn)));
        }
    }
    for members in by_parent.values_mut() {
        members.sort_by(|a, b| (a.created_ms(), a.id()).cmp(&(b.created_ms(), b.id())));
    }
    by_parent
}

/// Builds the node of a run or turn. The depth of the tree is bounded, so recursion is too.
fn build_node(member: TreeMember, by_parent: &mut HashMap<String, Vec<TreeMember>>) -> RunTreeNode {
    let children = by_parent.remove(member.id()).unwrap_or_default();
    let children: Vec<RunTreeNode> =
        children.into_iter().map(|child| build_node(child, by_parent)).collect();
    let usage = member.usage();
    let (mut total, mut reserved) = (usage, RunBudget::default());
    for child in &children {
        total += child.total;
        if child.member.is_open() {
            let budget = child.member.budget();
            reserved.calls = add_reserved(reserved.calls, budget.calls);
            reserved.tokens = add_reserved(reserved.tokens, budget.tokens);
        }
    }
    RunTreeNode { member, usage, total, reserved, children }
}

fn add_reserved(sum: Option<u64>, more: Option<u64>) -> Option<u64> {
    match (sum, more) {
        (Some(sum), Some(more)) => Some(sum.saturating_add(more)),
        (sum, more) => sum.or(more),
    }
}
