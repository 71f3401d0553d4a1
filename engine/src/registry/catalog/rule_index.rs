//! The compiled rules of all projects, indexed by action, tool and agent. Part of a catalog and
//! replaced with it; a rule that did not change is not compiled again.
//!
//! A rule that names a tool exactly is found by that name. A pattern is found by the text before
//! its first `*`: for a tool's name, only the prefixes of the lengths that occur are looked up.

pub(crate) mod compiled_rule;
pub(crate) mod condition;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use compiled_rule::{CompiledRule, RuleCheck, RuleMatch, ToolProperties};

use crate::domain::access_rules::{
    AccessDecision, AccessRule, AskDecision, Denial, RuleAction, RuleVerdict,
};
use crate::domain::caller::Caller;

/// Rules on one tool or prefix. Those about single agents are found by the agent.
#[derive(Debug, Default)]
struct RuleBucket {
    any_agent: Vec<u32>,
    by_agent: HashMap<Box<str>, Vec<u32>>,
}

impl RuleBucket {
    fn add(&mut self, position: u32, rule: &CompiledRule) {
        match rule.exact_agents() {
            None => self.any_agent.push(position),
            Some(agents) => {
                for agent in agents {
                    self.by_agent.entry(agent.clone()).or_default().push(position);
                }
            }
        }
    }

    fn collect(&self, agent: &str, found: &mut Vec<u32>) {
        found.extend_from_slice(&self.any_agent);
        if let Some(positions) = self.by_agent.get(agent) {
            found.extend_from_slice(positions);
        }
    }
}

/// The rules on one action.
#[derive(Debug, Default)]
struct ActionIndex {
    /// Every rule on the action.
    all: Vec<u32>,
    exact: HashMap<Box<str>, RuleBucket>,
    prefixes: HashMap<Box<str>, RuleBucket>,
    prefix_lengths: BTreeSet<usize>,
}

impl ActionIndex {
    fn add(&mut self, position: u32, rule: &CompiledRule) {
        self.all.push(position);
        if rule.rule.tools.is_empty() {
            self.add_prefix("", position, rule);
        }
        for pattern in &rule.rule.tools {
            match pattern.split_once('*') {
                Some((prefix, _)) => self.add_prefix(prefix, position, rule),
                None => self.exact.entry(pattern.as_str().into()).or_default().add(position, rule),
            }
        }
    }

    fn add_prefix(&mut self, prefix: &str, position: u32, rule: &CompiledRule) {
        self.prefix_lengths.insert(prefix.len());
        self.prefixes.entry(prefix.into()).or_default().add(position, rule);
    }

    /// Returns the positions of the rules that may be about a tool, in the order of precedence.
    fn candidates(&self, agent: &str, tool: &str) -> Vec<u32> {
        let mut found = Vec::new();
        if let Some(bucket) = self.exact.get(tool) {
            bucket.collect(agent, &mut found);
        }
        for length in self.prefix_lengths.range(..=tool.len()) {
            let bucket = tool.get(..*length).and_then(|prefix| self.prefixes.get(prefix));
            if let Some(bucket) = bucket {
                bucket.collect(agent, &mut found);
            }
        }
        found.sort_unstable();
        found.dedup();
        found
    }
}

/// The rules of one project, in the order of precedence: deny, ask, allow, each by id.
#[derive(Debug, Default)]
pub(crate) struct ProjectRuleIndex {
    rules: Vec<Arc<CompiledRule>>,
    by_action: [ActionIndex; RuleAction::ALL.len()],
    /// True if a condition uses the arguments of a call.
    uses_args: bool,
    /// True if a condition uses the time.
    uses_now: bool,
}

impl ProjectRuleIndex {
    /// Compiles the rules of a project, and reuses those of `earlier` that have not changed.
    pub(crate) fn new(rules: Vec<AccessRule>, earlier: Option<&Self>) -> Self {
        let earlier: HashMap<&str, &Arc<CompiledRule>> = earlier
            .iter()
            .flat_map(|index| &index.rules)
            .map(|compiled| (compiled.rule.id.as_str(), compiled))
            .collect();
        let mut compiled: Vec<Arc<CompiledRule>> = rules
            .into_iter()
            .map(|rule| match earlier.get(rule.id.as_str()) {
                Some(compiled) if compiled.rule == rule => (*compiled).clone(),
                _ => CompiledRule::new(rule),
            })
            .collect();
        compiled.sort_by(|a, b| (a.rule.verdict, &a.rule.id).cmp(&(b.rule.verdict, &b.rule.id)));
        let conditions = || compiled.iter().filter_map(|compiled| compiled.condition());
        let (uses_args, uses_now) =
            (conditions().any(|c| c.uses_args()), conditions().any(|c| c.uses_now()));
        let mut by_action: [ActionIndex; RuleAction::ALL.len()] = Default::default();
        for (position, rule) in compiled.iter().enumerate() {
            for action in rule.rule.effective_actions() {
                by_action[*action as usize].add(position as u32, rule);
            }
        }
        Self { rules: compiled, by_action, uses_args, uses_now }
    }

    /// Returns the rules in the order of precedence.
    pub(crate) fn rules(&self) -> &[Arc<CompiledRule>] {
        &self.rules
    }

    fn candidates<'a>(
        &'a self,
        check: &RuleCheck<'_>,
    ) -> impl Iterator<Item = &'a Arc<CompiledRule>> {
        let input = &check.input;
        let index = &self.by_action[input.action as usize];
        let positions = match input.properties {
            ToolProperties::WholeRun => index.all.clone(),
            _ => index.candidates(&input.caller.agent, input.tool),
        };
        positions.into_iter().filter_map(|position| self.rules.get(position as usize))
    }

    /// Decides a request. `None` if no rule decides it.
    pub(crate) fn decide(&self, check: &RuleCheck<'_>) -> Option<(AccessDecision, &CompiledRule)> {
        self.candidates(check).find_map(|compiled| {
            let decision = apply_verdict(&compiled.rule, &compiled.check(check))?;
            Some((decision, compiled.as_ref()))
        })
    }

    /// Returns every rule that is about the action and the tool's name, with the result of its
    /// check.
    pub(crate) fn consider(&self, check: &RuleCheck<'_>) -> Vec<(Arc<CompiledRule>, RuleMatch)> {
        let index = &self.by_action[check.input.action as usize];
        let all = index.prefixes.values().chain(index.exact.values());
        let agents: BTreeSet<&str> =
            all.flat_map(|bucket| bucket.by_agent.keys().map(AsRef::as_ref)).collect();
        let agents = agents.into_iter().chain([check.input.caller.agent.as_str()]);
        let mut positions: Vec<u32> =
            agents.flat_map(|agent| index.candidates(agent, check.input.tool)).collect();
        positions.sort_unstable();
        positions.dedup();
        let rules = positions.into_iter().filter_map(|at| self.rules.get(at as usize));
        rules.map(|compiled| (compiled.clone(), compiled.check(check))).collect()
    }

    /// Returns true if a rule decides about this action.
    pub(crate) fn has_rules_on(&self, action: RuleAction) -> bool {
        !self.by_action[action as usize].all.is_empty()
    }

    /// Returns true if some rule lets this caller call some tool, with or without an approval.
    pub(crate) fn allows_any(&self, caller: &Caller) -> bool {
        let allows = |rule: &AccessRule| {
            rule.verdict != RuleVerdict::Deny
                && rule.sessions.is_empty()
                && rule.effective_actions().contains(&RuleAction::Invoke)
        };
        let mut rules = self.rules.iter();
        rules.any(|rule| allows(&rule.rule) && rule.concerns(caller).is_ok())
    }
}

/// Returns the decision of one rule, or `None` if it does not decide.
fn apply_verdict(rule: &AccessRule, result: &RuleMatch) -> Option<AccessDecision> {
    let failure = match result {
        RuleMatch::No(_) => return None,
        RuleMatch::Yes | RuleMatch::UnlessArguments => None,
        RuleMatch::Failed(reason) => Some(reason),
    };
    let describe = |what: &str| {
        let (id, project) = (&rule.id, &rule.project);
        let mut text = match rule.as_short() {
            Some((agent, pattern)) => {
                let verdict = rule.verdict.as_str();
                format!("rule \"{verdict} {pattern} for agent {agent}\" of project \"{project}\"")
            }
            None => format!("rule \"{id}\" of project \"{project}\" {what}"),
        };
        if !rule.note.is_empty() {
            text = format!("{text} ({})", rule.note);
        }
        match failure {
            None => text,
            Some(reason) => format!("{text}, because its condition failed: {reason}"),
        }
    };
    match rule.verdict {
        // Without the arguments it is not known that the rule denies.
        RuleVerdict::Deny if *result == RuleMatch::UnlessArguments => None,
        RuleVerdict::Deny => Some(AccessDecision::Denied(Denial {
            rule_id: Some(rule.id.clone()),
            reason: describe("denies it"),
        })),
        RuleVerdict::Ask => Some(AccessDecision::Ask(Box::new(AskDecision {
            rule_id: rule.id.clone(),
            reason: describe("requires an approval"),
            approvers: rule.approvers.clone(),
            expires_in_ms: rule.expires_in_ms,
        }))),
        RuleVerdict::Allow if failure.is_some() => None,
        RuleVerdict::Allow => Some(AccessDecision::Allowed),
    }
}

/// The compiled rules of all projects.
#[derive(Debug, Default)]
pub(crate) struct RuleIndex {
    projects: HashMap<String, Arc<ProjectRuleIndex>>,
}

impl RuleIndex {
    /// Builds the index of a directory's rules and reuses the projects that have not changed.
    pub(crate) fn rebuild(&self, rules: &[AccessRule]) -> Self {
        let mut by_project: HashMap<&str, Vec<&AccessRule>> = HashMap::new();
        for rule in rules {
            by_project.entry(rule.project.as_str()).or_default().push(rule);
        }
        let projects = by_project.into_iter().map(|(project, rules)| {
            let earlier = self.projects.get(project);
            let is_same = |index: &&Arc<ProjectRuleIndex>| {
                let mut before: Vec<&AccessRule> = index.rules.iter().map(|c| &c.rule).collect();
                before.sort_by(|a, b| a.id.cmp(&b.id));
                let mut now = rules.clone();
                now.sort_by(|a, b| a.id.cmp(&b.id));
                before == now
            };
            let index = match earlier.filter(is_same) {
                Some(index) => index.clone(),
                None => {
                    let rules = rules.into_iter().cloned().collect();
                    Arc::new(ProjectRuleIndex::new(rules, earlier.map(AsRef::as_ref)))
                }
            };
            (project.to_owned(), index)
        });
        Self { projects: projects.collect() }
    }

    /// Returns the rules of a project; `None` if it has none.
    pub(crate) fn project(&self, project: &str) -> Option<&Arc<ProjectRuleIndex>> {
        self.projects.get(project)
    }

    /// Returns true if a decision in this project can depend on the arguments of a call.
    pub(crate) fn uses_args(&self, project: &str) -> bool {
        self.project(project).is_some_and(|index| index.uses_args)
    }

    /// Returns true if a decision in this project can change with the time.
    pub(crate) fn uses_now(&self, project: &str) -> bool {
        self.project(project).is_some_and(|index| index.uses_now)
    }
}
