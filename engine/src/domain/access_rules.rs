//! Access control: allow and deny rules over tool names. Pure.
//!
//! A rule names an agent (or `*`), a pattern and a verdict. Deny takes precedence over allow, and a
//! tool that no rule allows is denied. The check uses names only and runs before the tool lookup,
//! so that a caller without permission does not learn whether a tool exists.

use serde::{Deserialize, Serialize};

/// The verdict of a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RuleVerdict {
    /// Permission to call the matching tools, unless another rule denies them.
    Allow,
    /// Refusal of the matching tools; takes precedence over every rule that allows them.
    Deny,
}

impl RuleVerdict {
    /// Returns the verdict's name on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Allow => "allow",
            Self::Deny => "deny",
        }
    }
}

/// One rule of a project's access list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AccessRule {
    /// Id of the project that the rule belongs to; the rule has no effect in other projects.
    pub project: String,
    /// An agent's name, or `*` for every agent of the project.
    pub agent: String,
    /// `weather.query`, `weather.*` or `*`.
    pub pattern: String,
    /// Verdict on the tools that match the pattern.
    pub verdict: RuleVerdict,
}

/// The result of an access check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AccessDecision {
    /// Allowed: a rule allows the tool, and no rule denies it.
    Allowed,
    /// Denied, with the reason in words.
    Denied(String),
}

impl AccessDecision {
    /// Returns true if the caller may use the tool.
    pub fn is_allowed(&self) -> bool {
        match self {
            Self::Allowed => true,
            Self::Denied(_) => false,
        }
    }
}

/// Checks a pattern: a tool name in which `*` stands for any characters.
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
    let tail: Vec<&str> = parts.collect();
    let Some((last, middle)) = tail.split_last() else { return rest.is_empty() };
    for part in middle {
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    rest.ends_with(last)
}

/// Returns a description of the rule that denies this name. A call that an agent executes itself
/// needs no rule that allows it, but a rule that denies the name still applies.
pub fn find_denial<'a>(
    rules: impl Iterator<Item = &'a AccessRule>,
    project: &str,
    agent: &str,
    tool: &str,
) -> Option<String> {
    let about = |rule: &&AccessRule| {
        rule.project == project
            && (rule.agent == "*" || rule.agent == agent)
            && rule.verdict == RuleVerdict::Deny
            && pattern_matches(&rule.pattern, tool)
    };
    let mut rules = rules;
    rules.find(about).map(|rule| describe_rule(rule, project))
}

fn describe_rule(rule: &AccessRule, project: &str) -> String {
    format!("rule \"deny {} for agent {}\" of project \"{project}\"", rule.pattern, rule.agent)
}

/// Evaluates a project's rules.
pub fn decide<'a>(
    rules: impl Iterator<Item = &'a AccessRule>,
    project: &str,
    agent: &str,
    tool: &str,
) -> AccessDecision {
    let mut allowed = false;
    for rule in rules {
        let about = rule.project == project && (rule.agent == "*" || rule.agent == agent);
        if !about || !pattern_matches(&rule.pattern, tool) {
            continue;
        }
        match rule.verdict {
            RuleVerdict::Allow => allowed = true,
            RuleVerdict::Deny => return AccessDecision::Denied(describe_rule(rule, project)),
        }
    }
    if allowed {
        return AccessDecision::Allowed;
    }
    AccessDecision::Denied(format!(
        "no rule of project \"{project}\" allows it to agent \"{agent}\""
    ))
}

/// Evaluates a project's rules for a companion tool, which comes with all others: an agent that may
/// call any tool may call it, unless a rule denies it.
pub fn decide_companion<'a>(
    rules: impl Iterator<Item = &'a AccessRule> + Clone,
    project: &str,
    agent: &str,
    tool: &str,
) -> AccessDecision {
    let decision = decide(rules.clone(), project, agent, tool);
    let about =
        |rule: &&AccessRule| rule.project == project && (rule.agent == "*" || rule.agent == agent);
    let mut applicable = rules.filter(about);
    let denied = applicable
        .clone()
        .any(|r| r.verdict == RuleVerdict::Deny && pattern_matches(&r.pattern, tool));
    if !denied && applicable.any(|rule| rule.verdict == RuleVerdict::Allow) {
        return AccessDecision::Allowed;
    }
    decision
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(agent: &str, pattern: &str, verdict: RuleVerdict) -> AccessRule {
        AccessRule { project: "p".into(), agent: agent.into(), pattern: pattern.into(), verdict }
    }

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
    fn a_companion_tool_is_allowed_with_any_allowed_tool() {
        let ask = |rules: &[AccessRule]| decide_companion(rules.iter(), "p", "ada", "result.read");
        let weather = rule("ada", "weather.*", RuleVerdict::Allow);
        assert_eq!(ask(std::slice::from_ref(&weather)), AccessDecision::Allowed);
        assert!(matches!(ask(&[]), AccessDecision::Denied(_)));
        assert!(matches!(ask(&[rule("bob", "*", RuleVerdict::Allow)]), AccessDecision::Denied(_)));
        let denied = [weather, rule("*", "result.*", RuleVerdict::Deny)];
        assert!(
            matches!(ask(&denied), AccessDecision::Denied(reason) if reason.contains("result.*"))
        );
    }

    #[test]
    fn deny_wins_and_without_a_rule_access_is_denied() {
        let rules = [
            rule("*", "weather.*", RuleVerdict::Allow),
            rule("ada", "*", RuleVerdict::Allow),
            rule("*", "file.*", RuleVerdict::Deny),
        ];
        let ask = |agent, tool| decide(rules.iter(), "p", agent, tool);
        assert_eq!(ask("bob", "weather.query"), AccessDecision::Allowed);
        assert_eq!(ask("ada", "calc.add"), AccessDecision::Allowed);
        assert!(
            matches!(ask("bob", "calc.add"), AccessDecision::Denied(r) if r.contains("no rule"))
        );
        assert!(
            matches!(ask("ada", "file.read"), AccessDecision::Denied(r) if r.contains("file.*"))
        );
        let find = |tool| find_denial(rules.iter(), "p", "ada", tool);
        assert_eq!(find("calc.add"), None, "a caller tool needs no allowing rule");
        assert!(find("file.read").is_some_and(|reason| reason.contains("file.*")));
        assert_eq!(find_denial(rules.iter(), "other", "ada", "file.read"), None);
        assert!(matches!(
            decide(rules.iter(), "other", "ada", "weather.query"),
            AccessDecision::Denied(_)
        ));
    }
}
