//! Access rules: the one object that decides who may do what with which tools. Pure.
//!
//! A rule has conditions and a verdict. A list that is absent matches everything; every list that
//! is present must match. Deny takes precedence over ask, ask over allow. The registry compiles the
//! rules of a project into an index and evaluates them (`registry/catalog/rule_index`);
//! `registry/rules` administers them.

use serde::{Deserialize, Serialize};

use crate::domain::tool::{Effect, Risk};

/// The verdict of a rule. The order is the order of precedence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RuleVerdict {
    /// Refusal; takes precedence over every other verdict.
    Deny,
    /// Permission once an approver agrees, unless another rule denies.
    Ask,
    /// Permission, unless another rule denies or asks.
    Allow,
}

impl RuleVerdict {
    /// Every verdict, in the order of precedence.
    pub const ALL: [Self; 3] = [Self::Deny, Self::Ask, Self::Allow];

    /// Returns the verdict's name on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Allow => "allow",
            Self::Deny => "deny",
            Self::Ask => "ask",
        }
    }

    /// Returns the verdict with this name on the wire.
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|verdict| verdict.as_str() == text)
    }
}

/// An operation that rules decide about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RuleAction {
    /// See a tool in lists and searches.
    List,
    /// Call a tool.
    Invoke,
    /// Read calls of others: their state, result and events.
    Read,
    /// Cancel calls of others.
    Cancel,
    /// Decide about a call that waits for an approval.
    Approve,
    /// Provide a tool.
    Register,
    /// Administer the project: keys, rules, tools and upstreams.
    Administer,
}

impl RuleAction {
    /// Every action.
    pub const ALL: [Self; 7] = [
        Self::List,
        Self::Invoke,
        Self::Read,
        Self::Cancel,
        Self::Approve,
        Self::Register,
        Self::Administer,
    ];

    /// The actions of a rule that lists none.
    pub const DEFAULT: [Self; 2] = [Self::List, Self::Invoke];

    /// Returns the name used on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::List => "list",
            Self::Invoke => "invoke",
            Self::Read => "read",
            Self::Cancel => "cancel",
            Self::Approve => "approve",
            Self::Register => "register",
            Self::Administer => "administer",
        }
    }

    /// Returns the action with this name on the wire.
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|action| action.as_str() == text)
    }
}

/// One rule of a project. An empty list matches everything.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AccessRule {
    /// Name of the rule, unique in its project; stored beside the rule.
    #[serde(skip)]
    pub id: String,
    /// Id of the project that the rule belongs to; the rule has no effect in other projects.
    #[serde(skip)]
    pub project: String,
    /// Verdict on the requests that match.
    pub verdict: RuleVerdict,
    /// Patterns of agent names.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub agents: Vec<String>,
    /// Patterns of groups; one group of the caller must match.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<String>,
    /// Patterns of users; a caller without a user matches none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub users: Vec<String>,
    /// Patterns of sessions. Without an asserted session the run is the session, which rules that
    /// allow never match.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sessions: Vec<String>,
    /// Patterns of environments; a caller without an environment matches none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub environments: Vec<String>,
    /// Patterns of tool names.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tools: Vec<String>,
    /// Patterns of the tool's executor (`builtin`, `mcp` …) or of its upstream's name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sources: Vec<String>,
    /// Side effects of the tool.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub effects: Vec<Effect>,
    /// The lowest risk that matches.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub risk_min: Option<Risk>,
    /// Operations that the rule decides about; empty: `list` and `invoke`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub actions: Vec<RuleAction>,
    /// CEL expression over `args`, `caller`, `tool` and `now` that must be true.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub when: Option<String>,
    /// Patterns of the agents, groups and users who may approve; empty: every approver.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub approvers: Vec<String>,
    /// Time until a call that waits for an approval fails; `None`: the configured time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_in_ms: Option<u64>,
    /// Text for people.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub note: String,
}

impl AccessRule {
    /// Returns a rule without conditions.
    pub fn new(project: impl Into<String>, id: impl Into<String>, verdict: RuleVerdict) -> Self {
        Self {
            id: id.into(),
            project: project.into(),
            verdict,
            agents: Vec::new(),
            groups: Vec::new(),
            users: Vec::new(),
            sessions: Vec::new(),
            environments: Vec::new(),
            tools: Vec::new(),
            sources: Vec::new(),
            effects: Vec::new(),
            risk_min: None,
            actions: Vec::new(),
            when: None,
            approvers: Vec::new(),
            expires_in_ms: None,
            note: String::new(),
        }
    }

    /// Returns the rule of the short form: an agent (or `*`), a pattern and a verdict. Its id says
    /// all of it, so a repeated short form replaces itself.
    pub fn short(
        project: impl Into<String>,
        agent: &str,
        pattern: &str,
        verdict: RuleVerdict,
    ) -> Self {
        let mut rule = Self::new(project, Self::short_id(agent, pattern, verdict), verdict);
        if agent != "*" {
            rule.agents.push(agent.to_owned());
        }
        rule.tools.push(pattern.to_owned());
        rule
    }

    /// Returns the id of a rule of the short form, such as `allow:ada:weather.*`.
    pub fn short_id(agent: &str, pattern: &str, verdict: RuleVerdict) -> String {
        format!("{}:{agent}:{pattern}", verdict.as_str())
    }

    /// Returns the agent and the pattern if this is a rule of the short form.
    pub fn as_short(&self) -> Option<(&str, &str)> {
        let [pattern] = self.tools.as_slice() else { return None };
        let agent = match self.agents.as_slice() {
            [] => "*",
            [agent] => agent,
            _ => return None,
        };
        let is_short = Self::short(self.project.as_str(), agent, pattern, self.verdict) == *self;
        is_short.then_some((agent, pattern))
    }

    /// Returns the actions that the rule decides about.
    pub fn effective_actions(&self) -> &[RuleAction] {
        if self.actions.is_empty() { &RuleAction::DEFAULT } else { &self.actions }
    }
}

/// One stored version of a project's rules. Every change makes a new one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuleSetVersion {
    /// Id of the project.
    pub project: String,
    /// Number of the version, from 1.
    pub version: u64,
    /// Time of the change, in Unix milliseconds.
    pub at_ms: u64,
    /// Agent name of the caller that made the change.
    pub agent: String,
    /// The change in words.
    pub summary: String,
}

/// A change of a project's rules: some rules are put, others dropped, in one version.
#[derive(Debug, Clone, PartialEq)]
pub struct RuleSetChange {
    /// Id of the project.
    pub project: String,
    /// Rules that are added, or replace the rule with the same id.
    pub put: Vec<AccessRule>,
    /// Ids of rules that are removed.
    pub dropped: Vec<String>,
    /// Time of the change, in Unix milliseconds.
    pub at_ms: u64,
    /// Agent name of the caller that makes the change.
    pub agent: String,
    /// The change in words.
    pub summary: String,
}

/// Number of versions of a project's rules that a store keeps.
pub const RULE_VERSIONS_KEPT: u64 = 200;

/// The result of an access check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AccessDecision {
    /// Allowed: no rule denies or asks, and a rule allows it if the caller needs one.
    Allowed,
    /// Allowed once an approver agrees.
    Ask(Box<AskDecision>),
    /// Denied.
    Denied(Denial),
}

/// The rule that requires an approval, and its conditions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AskDecision {
    /// Id of the rule.
    pub rule_id: String,
    /// The reason in words.
    pub reason: String,
    /// Patterns of the agents, groups and users who may approve; empty: every approver.
    pub approvers: Vec<String>,
    /// Time until the call fails without a decision; `None`: the configured time.
    pub expires_in_ms: Option<u64>,
}

/// The reason of a denial.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Denial {
    /// Id of the rule that denies; `None` if no rule allows.
    pub rule_id: Option<String>,
    /// The reason in words.
    pub reason: String,
}

impl Denial {
    /// Returns a denial that no rule caused.
    pub fn without_rule(reason: impl Into<String>) -> Self {
        Self { rule_id: None, reason: reason.into() }
    }
}

impl AccessDecision {
    /// Returns true if the caller may do it without an approval.
    pub fn is_allowed(&self) -> bool {
        matches!(self, Self::Allowed)
    }

    /// Returns true if the caller may not do it, with or without an approval.
    pub fn is_denied(&self) -> bool {
        matches!(self, Self::Denied(_))
    }

    /// Returns the id of the rule that decided, if one did.
    pub fn rule_id(&self) -> Option<&str> {
        match self {
            Self::Allowed => None,
            Self::Ask(ask) => Some(&ask.rule_id),
            Self::Denied(denial) => denial.rule_id.as_deref(),
        }
    }
}

/// Checks a pattern of tool names, in which `*` stands for any characters.
pub fn check_pattern(pattern: &str) -> Result<(), String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-/.*".contains(c);
    if pattern.is_empty() || pattern.len() > 128 || !pattern.chars().all(plain) {
        return Err(format!(
            "\"{pattern}\" is not a tool pattern such as weather.query or weather.*"
        ));
    }
    Ok(())
}

/// Returns whether a name matches a pattern. `*` matches any run of characters, including none.
pub fn pattern_matches(pattern: &str, name: &str) -> bool {
    let mut parts = pattern.split('*');
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = name.strip_prefix(first) else { return false };
    let Some(mut part) = parts.next() else { return rest.is_empty() };
    for next in parts {
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
        part = next;
    }
    rest.ends_with(part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_whole_names_with_stars() {
        for (pattern, name, fits) in [
            ("weather.query", "weather.query", true),
            ("weather.query", "weather.query2", false),
            ("weather.*", "weather.query", true),
            ("weather.*", "weather", false),
            ("*", "anything.at.all", true),
            ("*.read", "file.read", true),
            ("*.read", "file.reader", false),
            ("a*b*c", "axxbyyc", true),
            ("a*b*c", "axxcyyb", false),
            ("a*a", "a", false),
        ] {
            assert_eq!(pattern_matches(pattern, name), fits, "{pattern} {name}");
        }
    }

    #[test]
    fn a_rule_of_the_short_form_is_recognized_and_no_other() {
        let rule = AccessRule::short("p", "ada", "weather.*", RuleVerdict::Allow);
        assert_eq!(rule.id, "allow:ada:weather.*");
        assert_eq!(rule.as_short(), Some(("ada", "weather.*")));
        let every = AccessRule::short("p", "*", "weather.*", RuleVerdict::Deny);
        assert_eq!((every.agents.len(), every.as_short()), (0, Some(("*", "weather.*"))));
        let longer = AccessRule { when: Some("true".into()), ..rule.clone() };
        assert_eq!(longer.as_short(), None);
        assert_eq!(AccessRule { id: "mine".into(), ..rule }.as_short(), None);
    }

    #[test]
    fn a_stored_rule_reads_back_and_absent_fields_have_defaults() {
        let rule: AccessRule = serde_json::from_str(r#"{"verdict":"ask","later":1}"#).unwrap();
        assert_eq!(rule, AccessRule::new("", "", RuleVerdict::Ask));
        assert_eq!(rule.effective_actions(), RuleAction::DEFAULT);
        let text = serde_json::to_string(&rule).unwrap();
        assert_eq!(text, r#"{"verdict":"ask"}"#);
    }
}
