//! Finds rules that have no effect: shadowed by others, or matching nothing that exists.

use std::sync::Arc;

use crate::domain::access_rules::{AccessRule, RuleVerdict, pattern_matches};
use crate::registry::catalog::rule_index::ProjectRuleIndex;
use crate::registry::catalog::rule_index::compiled_rule::{CompiledRule, sources_of};
use crate::registry::catalog::{Catalog, CatalogEntry};

/// A finding about one rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuleFinding {
    /// Id of the rule.
    pub rule_id: String,
    /// `shadowed`, `never_matches` or `fails`.
    pub kind: &'static str,
    /// The finding in words.
    pub message: String,
    /// Id of the rule that shadows it.
    pub shadowed_by: Option<String>,
}

/// Returns the findings about a project's rules, in the order of precedence.
pub(crate) fn lint(catalog: &Catalog, project: &str, index: &ProjectRuleIndex) -> Vec<RuleFinding> {
    let (rules, tools) = (index.rules(), catalog.tools(project));
    let mut findings = Vec::new();
    for (position, compiled) in rules.iter().enumerate() {
        let rule = &compiled.rule;
        let mut add = |kind, message: String, shadowed_by: Option<String>| {
            findings.push(RuleFinding { rule_id: rule.id.clone(), kind, message, shadowed_by });
        };
        if let Some(other) = find_shadowing(rules, position) {
            let effect = match other.verdict == rule.verdict {
                true => "does the same for everything that it matches",
                false => "takes precedence for everything that it matches",
            };
            let message = format!("rule \"{}\" {effect}", other.id);
            add("shadowed", message, Some(other.id.clone()));
        }
        if let Some(reason) = find_emptiness(catalog, project, &tools, rule) {
            add("never_matches", reason, None);
        }
        if let Some(reason) = find_failure(catalog, project, compiled) {
            add("fails", reason, None);
        }
    }
    findings
}

/// Returns the rule that decides everything that the rule at this position could decide.
fn find_shadowing(rules: &[Arc<CompiledRule>], position: usize) -> Option<&AccessRule> {
    let rule = &rules.get(position)?.rule;
    let others = rules.iter().enumerate().map(|(other, compiled)| (other, &compiled.rule));
    let decides = |(other, candidate): &(usize, &AccessRule)| {
        let comes_first = candidate.verdict < rule.verdict
            // Of two equal rules, the later one is superfluous.
            || candidate.verdict == rule.verdict
                && (*other < position || !covers(rule, candidate));
        *other != position && comes_first && covers(candidate, rule)
    };
    let mut others =
        others.filter(|(other, candidate)| *other != position && candidate.verdict <= rule.verdict);
    others.find(decides).map(|(_, candidate)| candidate)
}

/// Returns true if the first rule matches everything that the second matches.
fn covers(general: &AccessRule, special: &AccessRule) -> bool {
    // Two rules that ask are equal only if they have the same approvers and the same time.
    let same_approval = general.verdict != RuleVerdict::Ask
        || special.verdict != RuleVerdict::Ask
        || (&general.approvers, general.expires_in_ms)
            == (&special.approvers, special.expires_in_ms);
    // `sessions` of a rule that allows matches asserted sessions only; of other rules, runs too.
    (general.when.is_none() || general.when == special.when)
        && same_approval
        && covers_list(&general.agents, &special.agents)
        && covers_list(&general.groups, &special.groups)
        && covers_list(&general.users, &special.users)
        && covers_list(&general.sessions, &special.sessions)
        && covers_list(&general.environments, &special.environments)
        && covers_list(&general.tools, &special.tools)
        && covers_list(&general.sources, &special.sources)
        && (general.effects.is_empty()
            || !special.effects.is_empty()
                && special.effects.iter().all(|effect| general.effects.contains(effect)))
        && (general.risk_min.is_none() || special.risk_min >= general.risk_min)
        && special.effective_actions().iter().all(|a| general.effective_actions().contains(a))
}

/// Returns true if every name that matches a special pattern matches a general one. A `*` of the
/// special pattern can only be matched by one of the general pattern.
fn covers_list(general: &[String], special: &[String]) -> bool {
    if general.is_empty() {
        return true;
    }
    let is_covered =
        |special: &String| general.iter().any(|general| pattern_matches(general, special));
    !special.is_empty() && special.iter().all(is_covered)
}

/// Returns the reason why no tool or agent that exists can match the rule.
fn find_emptiness(
    catalog: &Catalog,
    project: &str,
    tools: &[Arc<CatalogEntry>],
    rule: &AccessRule,
) -> Option<String> {
    let matches = |list: &[String], name: &str| {
        list.is_empty() || list.iter().any(|pattern| pattern_matches(pattern, name))
    };
    let by_name: Vec<_> =
        tools.iter().filter(|entry| matches(&rule.tools, &entry.definition.name)).collect();
    if by_name.is_empty() && !rule.tools.is_empty() {
        return Some(format!("no tool is named {}", rule.tools.join(" or ")));
    }
    let has_properties = by_name.iter().any(|entry| {
        let mut sources = sources_of(&entry.definition);
        (rule.sources.is_empty() || sources.any(|source| matches(&rule.sources, source)))
            && (rule.effects.is_empty() || rule.effects.contains(&entry.definition.effect))
            && rule.risk_min.is_none_or(|min| entry.risk >= min)
    });
    if !has_properties && !tools.is_empty() {
        return Some("no tool has these sources, effects and this risk".to_owned());
    }
    let keys: Vec<_> = catalog
        .directory()
        .keys
        .iter()
        .filter(|key| key.project == project && key.revoked_ms.is_none())
        .collect();
    let has_agent = keys.iter().any(|key| matches(&rule.agents, &key.agent));
    if !keys.is_empty() && !has_agent && !rule.agents.is_empty() {
        return Some(format!("no key is for an agent named {}", rule.agents.join(" or ")));
    }
    None
}

/// Returns the reason why a condition fails for a tool that the rule names.
fn find_failure(catalog: &Catalog, project: &str, compiled: &CompiledRule) -> Option<String> {
    let condition = compiled.condition()?;
    compiled.rule.tools.iter().find_map(|name| {
        let entry = catalog.find(project, name)?;
        let (_, executed) = entry.definition.argument_rules();
        let error = condition.check_arguments(name, &executed.to_value())?;
        Some(format!("the condition fails: {error}"))
    })
}
