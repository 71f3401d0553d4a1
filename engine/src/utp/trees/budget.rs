//! The trees of agents in memory: which run or turn called which, and the rest of their budgets.
//!
//! The budget of a run or turn is reserved in its caller's budget until it ends; then only its
//! usage counts. One without a budget draws from the nearest budget above it. Everything here
//! follows from the stored runs and turns, so a restart rebuilds it.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::json;

use crate::domain::agent::{AgentLimits, OnParentEnd};
use crate::domain::fault::{Code, Fault};
use crate::domain::id::CallId;
use crate::domain::run::options::RunLimits;
use crate::domain::run::progress::StopReason;
use crate::domain::run::{Run, RunBudget, RunLineage};
use crate::domain::utp::Turn;

/// A project, and the id of the first run or turn of a tree.
pub(crate) type TreeKey = (String, String);

/// A number of calls and of tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Amounts {
    calls: u64,
    tokens: u64,
}

/// One of the two amounts of a budget.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Resource {
    Calls,
    Tokens,
}

impl Resource {
    const ALL: [Self; 2] = [Self::Calls, Self::Tokens];

    fn name(self) -> &'static str {
        match self {
            Self::Calls => "calls",
            Self::Tokens => "tokens",
        }
    }

    fn stop_reason(self) -> StopReason {
        match self {
            Self::Calls => StopReason::Calls,
            Self::Tokens => StopReason::Tokens,
        }
    }

    fn of(self, amounts: &Amounts) -> u64 {
        match self {
            Self::Calls => amounts.calls,
            Self::Tokens => amounts.tokens,
        }
    }

    fn of_budget(self, budget: &RunBudget) -> Option<u64> {
        match self {
            Self::Calls => budget.calls,
            Self::Tokens => budget.tokens,
        }
    }
}

/// One run, or one turn of a worker, in a tree.
#[derive(Debug)]
struct TreeNode {
    parent: Option<String>,
    children: Vec<String>,
    budget: RunBudget,
    /// Used by the run or turn itself, as stored. The tokens of a turn are those that its worker
    /// reports.
    used: Amounts,
    /// Calls of a turn that are being made and are not stored with it yet.
    unstored_calls: u64,
    /// True for a turn. Its calls count from their start, those of a run from the end of its step.
    is_turn: bool,
    is_open: bool,
    call_id: Option<CallId>,
    on_parent_end: OnParentEnd,
}

#[derive(Debug, Default)]
struct Tree {
    nodes: HashMap<String, TreeNode>,
}

/// An open run or turn that another run or turn called.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OpenChild {
    pub(crate) run_id: String,
    pub(crate) call_id: CallId,
    pub(crate) on_parent_end: OnParentEnd,
}

/// A run or turn that is about to start.
pub(crate) struct ChildReservation<'a> {
    pub(crate) node_id: &'a str,
    /// Run or turn that calls it.
    pub(crate) parent_id: Option<&'a str>,
    pub(crate) call_id: &'a CallId,
    pub(crate) limits: &'a AgentLimits,
    pub(crate) on_parent_end: OnParentEnd,
    /// Maximum number of open runs that one run may have called.
    pub(crate) max_children: usize,
}

/// The budgets of the trees that have open runs or turns.
#[derive(Default)]
pub(crate) struct TreeBudgets {
    state: Mutex<TreesState>,
}

#[derive(Default)]
struct TreesState {
    trees: HashMap<TreeKey, Tree>,
    /// Tree of each run and turn that a call of an agent started.
    by_run: HashMap<String, TreeKey>,
}

impl TreesState {
    fn drop_if_unused(&mut self, key: &TreeKey) {
        let has_open = |tree: &Tree| tree.nodes.values().any(|node| node.is_open);
        if self.trees.get(key).is_some_and(|tree| !has_open(tree))
            && let Some(tree) = self.trees.remove(key)
        {
            for id in tree.nodes.keys() {
                self.by_run.remove(id);
            }
        }
    }
}

/// Returns the budget of a run: the part that its lineage reserves, or the limits that its request
/// sets.
fn budget_of(run: &Run) -> RunBudget {
    if let Some(lineage) = &run.lineage {
        return lineage.budget;
    }
    let (limits, default) = (&run.options.limits, RunLimits::default());
    RunBudget {
        calls: (limits.calls != default.calls).then(|| u64::from(limits.calls)),
        tokens: (limits.tokens != default.tokens).then_some(limits.tokens),
    }
}

fn used_by(run: &Run) -> Amounts {
    let (now, since) = (run.progress.usage_so_far(), run.progress.baseline);
    Amounts {
        calls: u64::from(now.calls.saturating_sub(since.calls)),
        tokens: now.tokens.saturating_sub(since.tokens),
    }
}

fn used_by_turn(turn: &Turn) -> Amounts {
    let delegation = turn.delegation.as_deref();
    delegation.map_or_else(Amounts::default, |delegation| Amounts {
        calls: delegation.used_calls,
        tokens: delegation.used_tokens,
    })
}

/// Returns the fault of a call for which the budget does not suffice.
pub(crate) fn too_many_calls_fault(limit: u64, resource: &str) -> Fault {
    let unit = if resource == "calls" { "tool calls" } else { resource };
    let message = format!("not done: the limit of {limit} {unit} is reached");
    let detail = json!({ "limit": limit, "resource": resource });
    Fault::new(Code::RateLimited, message).with_detail(detail).without_side_effect()
}

/// A call of a turn that is charged and not stored with the turn yet. When it is dropped, the call
/// counts only if the turn was stored with it.
pub(crate) struct CallCharge {
    budgets: Arc<TreeBudgets>,
    key: TreeKey,
    turn_id: String,
    /// True once the turn is stored with the call: then the number of its calls has it.
    is_stored: bool,
}

impl Drop for CallCharge {
    fn drop(&mut self) {
        if self.is_stored {
            return;
        }
        let mut state = self.budgets.state.lock();
        let tree = state.trees.get_mut(&self.key);
        if let Some(node) = tree.and_then(|tree| tree.nodes.get_mut(&self.turn_id)) {
            node.unstored_calls = node.unstored_calls.saturating_sub(1);
        }
    }
}

impl TreeNode {
    /// Returns what the run or turn itself has used.
    fn used(&self, resource: Resource) -> u64 {
        let unstored = Amounts { calls: self.unstored_calls, tokens: 0 };
        resource.of(&self.used).saturating_add(resource.of(&unstored))
    }

    fn from_run(run: &Run) -> Self {
        let lineage = run.lineage.as_deref();
        Self {
            parent: lineage.and_then(parent_node),
            children: Vec::new(),
            budget: budget_of(run),
            used: used_by(run),
            unstored_calls: 0,
            is_turn: false,
            is_open: !run.status.is_terminal(),
            call_id: lineage.map(|lineage| lineage.call_id.clone()),
            on_parent_end: lineage.map_or_else(OnParentEnd::default, |l| l.on_parent_end),
        }
    }

    fn from_turn(turn: &Turn) -> Self {
        let delegation = turn.delegation.as_deref();
        let lineage = delegation.map(|delegation| delegation.lineage.clone()).unwrap_or_default();
        let call_id = delegation.and_then(|delegation| delegation.call_id.parse().ok());
        Self {
            parent: lineage.parent_id,
            children: Vec::new(),
            budget: RunBudget { calls: lineage.calls, tokens: lineage.tokens },
            used: used_by_turn(turn),
            unstored_calls: 0,
            is_turn: true,
            is_open: call_id.is_some() && !turn.status.is_terminal(),
            call_id,
            on_parent_end: match lineage.outlives_parent {
                true => OnParentEnd::Detach,
                false => OnParentEnd::Cancel,
            },
        }
    }
}

/// Returns the run or turn that called an agent's run.
fn parent_node(lineage: &RunLineage) -> Option<String> {
    lineage.parent_turn_id.clone().or_else(|| lineage.parent_run_id.clone())
}

impl Tree {
    fn from_parts(runs: &[Run], turns: &[Turn]) -> Self {
        let nodes = runs.iter().map(|run| (run.id.clone(), TreeNode::from_run(run))).collect();
        let mut tree = Self { nodes };
        for turn in turns {
            tree.add_turn(turn);
        }
        for turn in turns {
            tree.link(&turn.turn_id, TreeNode::from_turn(turn).parent);
        }
        for run in runs {
            tree.link(&run.id, run.lineage.as_deref().and_then(parent_node));
        }
        tree
    }

    /// Adds a node to the children of the node above it.
    fn link(&mut self, id: &str, parent: Option<String>) {
        if let Some(node) = parent.and_then(|parent| self.nodes.get_mut(&parent))
            && !node.children.iter().any(|child| child == id)
        {
            node.children.push(id.to_owned());
        }
    }

    /// Adds the turn of a worker. A turn that its worker began itself has no budget, and no tree
    /// stays in memory for it alone.
    fn add_turn(&mut self, turn: &Turn) {
        let node = TreeNode::from_turn(turn);
        let parent = node.parent.clone();
        if let Entry::Vacant(vacant) = self.nodes.entry(turn.turn_id.clone()) {
            vacant.insert(node);
        }
        self.link(&turn.turn_id, parent);
    }

    /// Returns the amount that a run and the nodes below it have used or reserved.
    fn charged(&self, run_id: &str, resource: Resource) -> u64 {
        let (mut total, mut rest) = (0_u64, vec![run_id]);
        while let Some(id) = rest.pop() {
            let Some(node) = self.nodes.get(id) else { continue };
            let reserved = resource.of_budget(&node.budget).filter(|_| node.is_open);
            match reserved {
                Some(reserved) if id != run_id => total = total.saturating_add(reserved),
                _ => {
                    total = total.saturating_add(node.used(resource));
                    rest.extend(node.children.iter().map(String::as_str));
                }
            }
        }
        total
    }

    /// Returns the nearest budget at or above a run or turn: the amount that is left, and its
    /// limit. `None` if there is no budget.
    fn remaining(&self, run_id: &str, resource: Resource) -> Option<(u64, u64)> {
        let (charged, limit) = self.find_budget(run_id, resource)?;
        Some((limit.saturating_sub(charged), limit))
    }

    /// Returns the nearest budget at or above a run or turn: the amount that is charged to it, and
    /// its limit.
    fn find_budget(&self, run_id: &str, resource: Resource) -> Option<(u64, u64)> {
        let mut at = Some(run_id);
        while let Some(id) = at {
            let node = self.nodes.get(id)?;
            if let Some(limit) = resource.of_budget(&node.budget) {
                return Some((self.charged(id, resource), limit));
            }
            at = node.parent.as_deref();
        }
        None
    }

    /// Decides the budget of a child.
    ///
    /// A child that requests less than the rest gets the amount that it requests. One that requests
    /// the whole rest, or more, gets half of the rest, so that its caller and the next child can
    /// work too.
    fn grant(
        &self,
        parent: &str,
        wanted: Option<u64>,
        resource: Resource,
    ) -> Result<Option<u64>, Fault> {
        let Some((charged, limit)) = self.find_budget(parent, resource) else {
            return Ok(wanted);
        };
        // The call that starts the child must not use up the budget that the child starts from.
        let is_turn = self.nodes.get(parent).is_some_and(|node| node.is_turn);
        let own = u64::from(is_turn && resource == Resource::Calls);
        let left = limit.saturating_sub(charged.saturating_sub(own));
        if left == 0 {
            let name = resource.name();
            let message = format!(
                "the budget of {limit} {name} is used up or reserved by agents that still work; \
                 finish with what you have, or wait for one of them"
            );
            let detail = json!({ "limit": limit, "resource": name });
            let fault = Fault::new(Code::RateLimited, message).with_detail(detail);
            return Err(fault.without_side_effect().retryable(false));
        }
        Ok(wanted.map(|wanted| if wanted < left { wanted } else { (left / 2).max(1) }))
    }

    fn open_children(&self, run_id: &str) -> Vec<OpenChild> {
        let Some(node) = self.nodes.get(run_id) else { return Vec::new() };
        let children = node.children.iter().filter_map(|id| {
            let child = self.nodes.get(id).filter(|child| child.is_open)?;
            Some(OpenChild {
                run_id: id.clone(),
                call_id: child.call_id.clone()?,
                on_parent_end: child.on_parent_end,
            })
        });
        children.collect()
    }
}

impl TreeBudgets {
    /// Returns true if the tree is in memory.
    pub(crate) fn is_loaded(&self, key: &TreeKey) -> bool {
        self.state.lock().trees.contains_key(key)
    }

    /// Adds a tree, unless it is in memory already.
    pub(crate) fn add_tree(&self, key: TreeKey, runs: &[Run], turns: &[Turn]) {
        let mut state = self.state.lock();
        if state.trees.contains_key(&key) {
            return;
        }
        let in_tree = runs.iter().filter(|run| run.lineage.is_some());
        let runs_in_tree = in_tree.map(|run| run.id.clone());
        let ids: Vec<String> =
            runs_in_tree.chain(turns.iter().map(|turn| turn.turn_id.clone())).collect();
        state.by_run.extend(ids.into_iter().map(|id| (id, key.clone())));
        state.trees.insert(key, Tree::from_parts(runs, turns));
    }

    /// Adds the turn of a worker to its tree, unless it is there already.
    pub(crate) fn add_turn(&self, key: &TreeKey, turn: &Turn) {
        let mut state = self.state.lock();
        state.trees.entry(key.clone()).or_default().add_turn(turn);
        state.by_run.insert(turn.turn_id.clone(), key.clone());
    }

    /// Records that the call of a turn has ended: the turn's budget is free again.
    pub(crate) fn end_turn(&self, turn_id: &str) {
        let mut state = self.state.lock();
        let Some(key) = state.by_run.get(turn_id).cloned() else { return };
        let tree = state.trees.get_mut(&key);
        if let Some(node) = tree.and_then(|tree| tree.nodes.get_mut(turn_id)) {
            node.is_open = false;
        }
        state.drop_if_unused(&key);
    }

    /// Records the committed state of a turn. The budget of a turn that has ended is free again.
    /// `charges` are those of the calls that were stored with the turn: at no moment do these calls
    /// count twice, or not at all, because the agents that they called may start at any time.
    pub(crate) fn update_turn(&self, turn: &Turn, charges: &mut [CallCharge]) {
        let mut state = self.state.lock();
        for charge in charges.iter_mut() {
            charge.is_stored = true;
        }
        let Some(key) = state.by_run.get(&turn.turn_id).cloned() else { return };
        let tree = state.trees.get_mut(&key);
        if let Some(node) = tree.and_then(|tree| tree.nodes.get_mut(&turn.turn_id)) {
            let used = used_by_turn(turn);
            // The numbers only grow: a commit that is recorded late changes nothing.
            node.used = Amounts {
                calls: node.used.calls.max(used.calls),
                tokens: node.used.tokens.max(used.tokens),
            };
            node.unstored_calls = node.unstored_calls.saturating_sub(charges.len() as u64);
            node.is_open &= !turn.status.is_terminal();
        }
        if turn.status.is_terminal() {
            state.drop_if_unused(&key);
        }
    }

    /// Charges one call of a turn, together with the tokens that its worker reports. A call that
    /// has started (`has_started`) counts whatever is left.
    pub(crate) fn charge_call(
        budgets: &Arc<Self>,
        key: &TreeKey,
        turn: &Turn,
        has_started: bool,
    ) -> Result<CallCharge, Fault> {
        let mut state = budgets.state.lock();
        if let Some(tree) = state.trees.get_mut(key) {
            if let Some(node) = tree.nodes.get_mut(&turn.turn_id) {
                node.used.tokens = node.used.tokens.max(used_by_turn(turn).tokens);
            }
            for resource in Resource::ALL {
                if let Some((0, limit)) = tree.remaining(&turn.turn_id, resource)
                    && !has_started
                {
                    return Err(too_many_calls_fault(limit, resource.name()));
                }
            }
            if let Some(node) = tree.nodes.get_mut(&turn.turn_id) {
                node.unstored_calls += 1;
            }
        }
        let (budgets, key) = (budgets.clone(), key.clone());
        Ok(CallCharge { budgets, key, turn_id: turn.turn_id.clone(), is_stored: false })
    }

    /// Drops a tree without open runs and turns.
    pub(crate) fn drop_if_unused(&self, key: &TreeKey) {
        self.state.lock().drop_if_unused(key);
    }

    /// Reserves the budget of a child, which counts as open from now on.
    pub(crate) fn reserve(
        &self,
        key: &TreeKey,
        child: &ChildReservation<'_>,
    ) -> Result<RunBudget, Fault> {
        let mut state = self.state.lock();
        let tree = state.trees.entry(key.clone()).or_default();
        let wanted_calls = child.limits.calls.map(u64::from);
        let mut budget = RunBudget { calls: wanted_calls, tokens: child.limits.tokens };
        if let Some(parent) = child.parent_id {
            let open = tree.open_children(parent).len();
            if open >= child.max_children {
                let message = format!(
                    "this run has called {open} agents that still work, the maximum; wait for one \
                     of them to end, or do the task yourself"
                );
                let detail = json!({ "limit": child.max_children, "resource": "fan_out" });
                let fault = Fault::new(Code::RateLimited, message).with_detail(detail);
                return Err(fault.without_side_effect().retryable(false));
            }
            budget = RunBudget {
                calls: tree.grant(parent, budget.calls, Resource::Calls)?,
                tokens: tree.grant(parent, budget.tokens, Resource::Tokens)?,
            };
            if let Some(node) = tree.nodes.get_mut(parent) {
                node.children.push(child.node_id.to_owned());
            }
        }
        let node = TreeNode {
            parent: child.parent_id.map(str::to_owned),
            children: Vec::new(),
            budget,
            used: Amounts::default(),
            unstored_calls: 0,
            is_turn: !child.node_id.starts_with(Run::PREFIX),
            is_open: true,
            call_id: Some(child.call_id.clone()),
            on_parent_end: child.on_parent_end,
        };
        tree.nodes.insert(child.node_id.to_owned(), node);
        state.by_run.insert(child.node_id.to_owned(), key.clone());
        Ok(budget)
    }

    /// Removes a child that was not created.
    pub(crate) fn discard(&self, key: &TreeKey, run_id: &str) {
        let mut state = self.state.lock();
        state.by_run.remove(run_id);
        let Some(tree) = state.trees.get_mut(key) else { return };
        let parent = tree.nodes.remove(run_id).and_then(|node| node.parent);
        if let Some(node) = parent.and_then(|parent| tree.nodes.get_mut(&parent)) {
            node.children.retain(|child| child != run_id);
        }
    }

    /// Records the committed state of a run: its usage, and if it is open.
    pub(crate) fn update(&self, run: &Run) {
        let mut state = self.state.lock();
        if state.trees.is_empty() {
            return;
        }
        let root = run.lineage.as_ref().map_or(&run.id, |lineage| &lineage.root_run_id);
        let key = (run.project.clone(), root.clone());
        let Some(tree) = state.trees.get_mut(&key) else { return };
        let Some(node) = tree.nodes.get_mut(&run.id) else { return };
        (node.used, node.is_open) = (used_by(run), !run.status.is_terminal());
    }

    /// Returns the open runs and turns that a run called.
    pub(crate) fn open_children(&self, run: &Run) -> Vec<OpenChild> {
        let root = run.lineage.as_ref().map_or(&run.id, |lineage| &lineage.root_run_id);
        let state = self.state.lock();
        let tree = state.trees.get(&(run.project.clone(), root.clone()));
        tree.map_or_else(Vec::new, |tree| tree.open_children(&run.id))
    }

    /// Drops the tree of a run if none of its runs and turns is open.
    pub(crate) fn drop_if_ended(&self, run: &Run) {
        let root = run.lineage.as_ref().map_or(&run.id, |lineage| &lineage.root_run_id);
        self.drop_if_unused(&(run.project.clone(), root.clone()));
    }

    /// Returns the project of a run that a call of an agent started.
    pub(crate) fn project_of(&self, run_id: &str) -> Option<String> {
        self.state.lock().by_run.get(run_id).map(|(project, _)| project.clone())
    }

    /// Returns the stop reason if the budget that a run draws from, alone or with others, is used
    /// up.
    pub(crate) fn exhausted(&self, project: &str, root: &str, run_id: &str) -> Option<StopReason> {
        let state = self.state.lock();
        if state.trees.is_empty() {
            return None;
        }
        let tree = state.trees.get(&(project.to_owned(), root.to_owned()))?;
        let is_exhausted = |resource: &Resource| {
            tree.remaining(run_id, *resource).is_some_and(|(left, _)| left == 0)
        };
        Resource::ALL.into_iter().find(is_exhausted).map(Resource::stop_reason)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn reserve(budgets: &TreeBudgets, key: &TreeKey, max_children: usize) -> Result<(), Fault> {
        let limits = AgentLimits::default();
        let call_id = "tc_01M7H641R6DXZKTSNG6276X36C".parse().unwrap();
        let child = ChildReservation {
            node_id: "run_2",
            parent_id: Some("run_1"),
            call_id: &call_id,
            limits: &limits,
            on_parent_end: OnParentEnd::Cancel,
            max_children,
        };
        budgets.reserve(key, &child).map(drop)
    }

    #[test]
    fn a_tree_without_open_runs_leaves_the_memory() {
        let (budgets, key) = (TreeBudgets::default(), ("p".to_owned(), "run_1".to_owned()));
        assert!(reserve(&budgets, &key, 0).is_err());
        budgets.drop_if_unused(&key);
        assert!(!budgets.is_loaded(&key), "a refused child leaves no tree");

        reserve(&budgets, &key, 1).unwrap();
        budgets.drop_if_unused(&key);
        assert!(budgets.is_loaded(&key), "an open child keeps its tree");
        budgets.discard(&key, "run_2");
        budgets.drop_if_unused(&key);
        assert!(!budgets.is_loaded(&key), "a child that was not created leaves no tree");

        reserve(&budgets, &key, 1).unwrap();
        budgets.end_turn("run_2");
        assert!(!budgets.is_loaded(&key), "the end of the last turn drops its tree");
        assert_eq!(budgets.project_of("run_2"), None);
    }

    fn turn_with_budget(calls: u64, used_calls: u64) -> Turn {
        let turn = json!({
            "project": "p", "agent_id": "w", "turn_id": "turn_1", "epoch": 1, "status": "running",
            "channel": "c", "depth": 1, "lease_until_ms": 1, "lease_ms": 1, "created_ms": 1,
            "updated_ms": 1, "version": 1,
            "delegation": {
                "call_id": "tc_01M7H641R6DXZKTSNG6276X36B", "attempt": 1, "parent_agent_id": "a",
                "parent_turn_id": "run_1", "instruction_card_id": "task_1", "deadline_ms": 1,
                "used_calls": used_calls, "lineage": { "calls": calls },
            },
        });
        serde_json::from_value(turn).unwrap()
    }

    fn calls_of(budgets: &TreeBudgets, key: &TreeKey) -> u64 {
        budgets.state.lock().trees[key].charged("turn_1", Resource::Calls)
    }

    #[test]
    fn a_call_counts_once_before_and_after_its_turn_is_stored() {
        let (budgets, key) = (Arc::<TreeBudgets>::default(), ("p".to_owned(), "run_1".to_owned()));
        let turn = turn_with_budget(1, 0);
        budgets.add_turn(&key, &turn);
        let charge = |has_started| TreeBudgets::charge_call(&budgets, &key, &turn, has_started);
        let mut charges = [charge(false).unwrap()];
        assert_eq!(calls_of(&budgets, &key), 1);
        assert!(charge(false).is_err(), "the budget is used up");
        let started = charge(true).unwrap();
        assert_eq!(calls_of(&budgets, &key), 2, "a call that has started counts in any case");
        drop(started);
        assert_eq!(calls_of(&budgets, &key), 1, "a call that is not stored counts no longer");

        // The agent that the call starts finds the budget of its caller while the charge is held.
        budgets.update_turn(&turn_with_budget(1, 1), &mut charges);
        assert_eq!(calls_of(&budgets, &key), 1);
        let granted = |budgets: &TreeBudgets| {
            budgets.state.lock().trees[&key].grant("turn_1", Some(1), Resource::Calls).unwrap()
        };
        assert_eq!(granted(&budgets), Some(1));
        drop(charges);
        assert_eq!(calls_of(&budgets, &key), 1);
        budgets.update_turn(&turn, &mut []);
        assert_eq!(calls_of(&budgets, &key), 1, "an older state that is recorded late");
    }
}
