//! A rule whose patterns and condition are compiled, and its check against one request.

use std::cell::RefCell;
use std::sync::Arc;

use serde_json::Value;

use super::condition::{ConditionVariables, RuleCondition, VariableSource};
use crate::domain::access_rules::{AccessRule, RuleAction, RuleVerdict, pattern_matches};
use crate::domain::caller::Caller;
use crate::domain::json::Json;
use crate::domain::tool::{Effect, Executor, Risk, ToolDefinition};
use crate::registry::catalog::CatalogEntry;

/// Patterns of names; without any, every name matches.
#[derive(Debug, Default)]
struct PatternList {
    exact: Vec<Box<str>>,
    patterns: Vec<Box<str>>,
}

impl PatternList {
    fn new(list: &[String]) -> Self {
        let (patterns, exact): (Vec<&String>, Vec<&String>) =
            list.iter().partition(|pattern| pattern.contains('*'));
        let boxed = |list: Vec<&String>| list.into_iter().map(|p| p.as_str().into()).collect();
        Self { exact: boxed(exact), patterns: boxed(patterns) }
    }

    fn is_empty(&self) -> bool {
        self.exact.is_empty() && self.patterns.is_empty()
    }

    fn contains(&self, name: &str) -> bool {
        self.exact.iter().any(|exact| **exact == *name)
            || self.patterns.iter().any(|pattern| pattern_matches(pattern, name))
    }

    /// Returns true if the list is absent, or one of the names matches.
    fn admits<'n>(&self, mut names: impl Iterator<Item = &'n str>) -> bool {
        self.is_empty() || names.any(|name| self.contains(name))
    }
}

/// The properties of the tool that a request is about.
#[derive(Clone, Copy)]
pub(crate) enum ToolProperties<'a> {
    /// Those of a tool of the catalog.
    Known(&'a CatalogEntry),
    /// No tool has this name. Rules that deny match, so that the response does not depend on the
    /// existence of a tool.
    Unknown,
    /// The name is no tool that Toolcrib executes, so it has no properties.
    None,
    /// Those of a prompt or the resources of an upstream, which only read.
    Passthrough {
        /// Name of the upstream.
        upstream: &'a str,
        /// Risk that the operator set for the name, else the lowest.
        risk: Risk,
    },
    /// The request is about a whole run, with calls of any tools. Rules that deny or ask match
    /// whatever tools they name, because the run may contain them.
    WholeRun,
}

/// The arguments of a request.
#[derive(Clone, Copy)]
pub(crate) enum RuleArguments<'a> {
    /// The arguments to execute.
    Known(&'a Json),
    /// There will be arguments. Conditions on them count as met for allow and ask, and as not met
    /// for deny; the rules decide again when the arguments are known.
    NotYetKnown,
    /// There are none, so that no condition on them can be evaluated.
    Absent,
}

/// One request that rules decide about.
#[derive(Clone, Copy)]
pub(crate) struct RuleInput<'a> {
    pub(crate) caller: &'a Caller,
    pub(crate) action: RuleAction,
    pub(crate) tool: &'a str,
    pub(crate) properties: ToolProperties<'a>,
    pub(crate) args: RuleArguments<'a>,
    pub(crate) run_id: Option<&'a str>,
    pub(crate) now_ms: u64,
}

/// A request with the CEL variables that its conditions share.
pub(crate) struct RuleCheck<'a> {
    pub(crate) input: RuleInput<'a>,
    /// The variables for rules that deny or ask, and for rules that allow: only the former see the
    /// run as a session.
    restricting: RefCell<Option<ConditionVariables>>,
    allowing: RefCell<Option<ConditionVariables>>,
}

/// The result of checking one rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum RuleMatch {
    /// Every condition is met.
    Yes,
    /// Every condition is met as far as it can be decided without the arguments.
    UnlessArguments,
    /// The named condition is not met.
    No(&'static str),
    /// The expression cannot be evaluated.
    Failed(String),
}

impl<'a> RuleCheck<'a> {
    pub(crate) fn new(input: RuleInput<'a>) -> Self {
        Self { input, restricting: RefCell::default(), allowing: RefCell::default() }
    }

    fn session(&self, verdict: RuleVerdict) -> Option<&'a str> {
        let asserted = self.input.caller.attributes.session.as_deref();
        asserted.or(self.input.run_id.filter(|_| verdict != RuleVerdict::Allow))
    }

    fn evaluate(&self, verdict: RuleVerdict, condition: &RuleCondition) -> Result<bool, String> {
        let cell = match verdict {
            RuleVerdict::Allow => &self.allowing,
            RuleVerdict::Deny | RuleVerdict::Ask => &self.restricting,
        };
        let mut variables = cell.borrow_mut();
        let variables = variables.get_or_insert_default();
        variables.set(condition, &CheckVariables { check: self, verdict });
        condition.evaluate(variables)
    }
}

/// The variables of a request, for rules of one verdict.
struct CheckVariables<'c, 'a> {
    check: &'c RuleCheck<'a>,
    verdict: RuleVerdict,
}

impl VariableSource for CheckVariables<'_, '_> {
    fn args(&self) -> Option<&Json> {
        match self.check.input.args {
            RuleArguments::Known(args) => Some(args),
            RuleArguments::NotYetKnown | RuleArguments::Absent => None,
        }
    }

    fn now_ms(&self) -> u64 {
        self.check.input.now_ms
    }

    fn field(&self, variable: &str, field: &str) -> Value {
        let input = &self.check.input;
        if variable == "tool" {
            return describe_tool(input.tool, input.properties, field);
        }
        let (caller, attributes) = (input.caller, &input.caller.attributes);
        match field {
            "project" => caller.project.clone().into(),
            "agent" => caller.agent.clone().into(),
            "groups" => attributes.groups.clone().into(),
            "user" => attributes.user.clone().into(),
            "session" => self.check.session(self.verdict).into(),
            "environment" => attributes.environment.clone().into(),
            "roles" => caller.roles.iter().map(|role| role.as_str()).collect(),
            _ => Value::Null,
        }
    }
}

/// Returns a field of the tool for a condition. A name that is no tool has its name and an empty
/// list of tags; its other fields are null.
fn describe_tool(name: &str, properties: ToolProperties<'_>, field: &str) -> Value {
    let ToolProperties::Known(entry) = properties else {
        if let ToolProperties::Passthrough { upstream, risk } = properties {
            match field {
                "source" => return upstream.into(),
                "effect" => return Effect::Read.as_str().into(),
                "risk" => return risk.as_str().into(),
                _ => {}
            }
        }
        return match field {
            "name" => name.into(),
            "tags" => Value::Array(Vec::new()),
            _ => Value::Null,
        };
    };
    let definition = &entry.definition;
    match field {
        "name" => definition.name.clone().into(),
        "source" => sources_of(definition).last().into(),
        "effect" => definition.effect.as_str().into(),
        "risk" => entry.risk.as_str().into(),
        _ => {
            let metadata = definition.metadata.as_ref();
            let tagged = metadata.filter(|data| data.text().contains("\"tags\""));
            let tags = tagged.and_then(|data| data.to_value().get("tags").cloned());
            tags.filter(Value::is_array).unwrap_or_else(|| Value::Array(Vec::new()))
        }
    }
}

/// Returns the names by which rules can match a tool's source: `server` or `client`, the executor,
/// and the name of the upstream.
pub(crate) fn sources_of(definition: &ToolDefinition) -> impl Iterator<Item = &str> {
    let upstream = (definition.executor == Executor::MCP)
        .then(|| definition.name.split_once('.').map(|(upstream, _)| upstream))
        .flatten();
    let executor = definition.executor;
    [Some(executor.source()), Some(executor.as_str()), upstream].into_iter().flatten()
}

/// A rule with its compiled parts.
#[derive(Debug)]
pub(crate) struct CompiledRule {
    pub(crate) rule: AccessRule,
    agents: PatternList,
    groups: PatternList,
    users: PatternList,
    sessions: PatternList,
    environments: PatternList,
    tools: PatternList,
    sources: PatternList,
    /// The condition, or the reason why it does not compile: a later release may accept what this
    /// one does not.
    condition: Option<Result<RuleCondition, String>>,
}

impl CompiledRule {
    pub(crate) fn new(rule: AccessRule) -> Arc<Self> {
        let condition = rule
            .when
            .as_ref()
            .map(|source| RuleCondition::compile(source).map_err(|error| error.to_string()));
        Arc::new(Self {
            agents: PatternList::new(&rule.agents),
            groups: PatternList::new(&rule.groups),
            users: PatternList::new(&rule.users),
            sessions: PatternList::new(&rule.sessions),
            environments: PatternList::new(&rule.environments),
            tools: PatternList::new(&rule.tools),
            sources: PatternList::new(&rule.sources),
            condition,
            rule,
        })
    }

    /// Returns the compiled condition, if the rule has one that compiles.
    pub(crate) fn condition(&self) -> Option<&RuleCondition> {
        self.condition.as_ref()?.as_ref().ok()
    }

    /// Returns the exact agent names if the rule is about these agents only.
    pub(super) fn exact_agents(&self) -> Option<&[Box<str>]> {
        let is_exact = self.agents.patterns.is_empty() && !self.agents.exact.is_empty();
        is_exact.then_some(self.agents.exact.as_slice())
    }

    /// Checks whether the rule is about this caller, apart from its session and condition.
    pub(crate) fn concerns(&self, caller: &Caller) -> Result<(), &'static str> {
        let attributes = &caller.attributes;
        if !self.agents.admits([caller.agent.as_str()].into_iter()) {
            return Err("agents");
        }
        if !self.groups.admits(attributes.groups.iter().map(String::as_str)) {
            return Err("groups");
        }
        if !self.users.admits(attributes.user.as_deref().into_iter()) {
            return Err("users");
        }
        if !self.environments.admits(attributes.environment.as_deref().into_iter()) {
            return Err("environments");
        }
        Ok(())
    }

    /// Checks the rule against a request whose action and tool name it is indexed for.
    pub(crate) fn check(&self, check: &RuleCheck<'_>) -> RuleMatch {
        let input = &check.input;
        let covers_run = matches!(input.properties, ToolProperties::WholeRun) && self.restricts();
        if !covers_run && !self.tools.admits([input.tool].into_iter()) {
            return RuleMatch::No("tools");
        }
        if let Err(field) = self.concerns(input.caller) {
            return RuleMatch::No(field);
        }
        if !self.sessions.admits(check.session(self.rule.verdict).into_iter()) {
            return RuleMatch::No("sessions");
        }
        if let Err(field) = self.check_properties(input.properties) {
            return RuleMatch::No(field);
        }
        let condition = match &self.condition {
            None => return RuleMatch::Yes,
            Some(Err(reason)) => return RuleMatch::Failed(reason.clone()),
            Some(Ok(condition)) => condition,
        };
        match input.args {
            RuleArguments::NotYetKnown if condition.uses_args() => {
                return RuleMatch::UnlessArguments;
            }
            RuleArguments::Absent if condition.uses_args() => {
                return RuleMatch::Failed("there are no arguments to evaluate".to_owned());
            }
            _ if covers_run && condition.uses_tool() => {
                return RuleMatch::Failed("a run has more than one tool".to_owned());
            }
            _ => {}
        }
        match check.evaluate(self.rule.verdict, condition) {
            Ok(true) => RuleMatch::Yes,
            Ok(false) => RuleMatch::No("when"),
            Err(reason) => RuleMatch::Failed(reason),
        }
    }

    fn check_properties(&self, properties: ToolProperties<'_>) -> Result<(), &'static str> {
        let entry = match properties {
            ToolProperties::Known(entry) => entry,
            ToolProperties::Unknown if self.rule.verdict == RuleVerdict::Deny => return Ok(()),
            ToolProperties::WholeRun if self.restricts() => return Ok(()),
            ToolProperties::Passthrough { upstream, risk } => {
                let sources = [Executor::MCP.source(), Executor::MCP.as_str(), upstream];
                return self.check_values(sources.into_iter(), Effect::Read, risk);
            }
            ToolProperties::Unknown | ToolProperties::None | ToolProperties::WholeRun => {
                let has_conditions = !self.sources.is_empty()
                    || !self.rule.effects.is_empty()
                    || self.rule.risk_min.is_some();
                return if has_conditions { Err("the tool's properties") } else { Ok(()) };
            }
        };
        let definition = &entry.definition;
        self.check_values(sources_of(definition), definition.effect, entry.risk)
    }

    fn check_values<'n>(
        &self,
        sources: impl Iterator<Item = &'n str>,
        effect: Effect,
        risk: Risk,
    ) -> Result<(), &'static str> {
        if !self.sources.admits(sources) {
            return Err("sources");
        }
        if !self.rule.effects.is_empty() && !self.rule.effects.contains(&effect) {
            return Err("effects");
        }
        if self.rule.risk_min.is_some_and(|min| risk < min) {
            return Err("risk_min");
        }
        Ok(())
    }

    /// Returns true if the rule denies or asks.
    fn restricts(&self) -> bool {
        self.rule.verdict != RuleVerdict::Allow
    }
}
