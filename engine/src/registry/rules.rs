//! Administration of access rules. Every change makes a new version of the project's rules, and a
//! change that is refused leaves the present version in force.

mod document;
mod explain;
mod lint;
mod rehearse;
mod report_documents;
mod starter_sets;
use std::collections::HashMap;

use crate::domain::access_rules::{
    AccessRule, RuleAction, RuleSetChange, RuleSetVersion, RuleVerdict,
};
use crate::domain::caller::Caller;
use crate::domain::directory::DirectoryChange;
use crate::domain::fault::{Code, Error};
use crate::ports::core::from_store_error;
use crate::registry::Admin;
use crate::registry::catalog::Catalog;
use crate::registry::catalog::rule_index::ProjectRuleIndex;
use crate::registry::catalog::rule_index::condition::RuleCondition;

pub use document::{parse_rule, parse_rule_set, render_rule};
pub use explain::{ConsideredRule, ExplainRequest, Explanation};
pub use lint::RuleFinding;
pub use rehearse::{Rehearsal, RehearsedChange};
pub use report_documents::{
    parse_explain_request, parse_lint_request, parse_rehearsal, parse_rollback, render_explanation,
    render_findings, render_rehearsal, render_rule_set, render_versions,
};
pub use starter_sets::{STARTER_SETS, starter_set};

/// Maximum number of rules of a project.
pub const MAX_RULES: usize = 10_000;

/// The rules of a project, and their version.
#[derive(Debug, Clone)]
pub struct RuleSet {
    /// Number of the version; 0 before the first rule.
    pub version: u64,
    /// The rules, by id.
    pub rules: Vec<AccessRule>,
}

/// The words that a change leaves in the audit log and in the version.
struct ChangeWords<'a> {
    action: &'a str,
    subject: &'a str,
    summary: &'a str,
}

impl Admin {
    /// Sets one rule; it replaces the rule with the same id.
    pub async fn set_rule(&self, caller: &Caller, rule: AccessRule) -> Result<(), Error> {
        self.registry.require_operator(caller, Some(&rule.project))?;
        let project = rule.project.clone();
        let id = rule.id.clone();
        let summary = format!("{} {}", rule.verdict.as_str(), describe(&rule));
        let subject = rule.as_short().map_or(id.as_str(), |(_, pattern)| pattern).to_owned();
        let words = ChangeWords { action: "rule.set", subject: &subject, summary: &summary };
        self.change_rules(caller, &project, words, |catalog, present| {
            check_against_tools(catalog, std::slice::from_ref(&rule), "")?;
            let is_new = !present.iter().any(|present| present.id == rule.id);
            check_count(present.len() + usize::from(is_new))?;
            Ok((vec![rule.clone()], Vec::new()))
        })
        .await
    }

    /// Replaces all rules of a project in one change.
    pub async fn replace_rules(
        &self,
        caller: &Caller,
        project: &str,
        rules: Vec<AccessRule>,
        summary: &str,
    ) -> Result<(), Error> {
        self.registry.require_operator(caller, Some(project))?;
        let words = ChangeWords { action: "rules.replaced", subject: project, summary };
        self.replace_in_version(caller, project, words, rules).await
    }

    /// Makes the rules of an earlier version the present ones, as a new version.
    pub async fn roll_back_rules(
        &self,
        caller: &Caller,
        project: &str,
        version: u64,
    ) -> Result<(), Error> {
        self.registry.require_operator(caller, Some(project))?;
        let history = self.core.store.rule_history();
        let versions = history.rule_versions(project).await.map_err(from_store_error)?;
        if !versions.iter().any(|stored| stored.version == version) {
            let message = format!("there is no version {version} of the rules");
            return Err(Error::not_found(message, "toolcrib rules versions lists the versions"));
        }
        let rules = history.rules_at(project, version).await.map_err(from_store_error)?;
        let summary = format!("rolled back to version {version}");
        let subject = version.to_string();
        let words =
            ChangeWords { action: "rules.rolled_back", subject: &subject, summary: &summary };
        self.replace_in_version(caller, project, words, rules).await
    }

    async fn replace_in_version(
        &self,
        caller: &Caller,
        project: &str,
        words: ChangeWords<'_>,
        rules: Vec<AccessRule>,
    ) -> Result<(), Error> {
        check_count(rules.len())?;
        self.change_rules(caller, project, words, |catalog, present| {
            check_against_tools(catalog, &rules, "/rules")?;
            let before: HashMap<&str, &AccessRule> =
                present.iter().map(|rule| (rule.id.as_str(), *rule)).collect();
            let is_changed = |rule: &&AccessRule| before.get(rule.id.as_str()) != Some(rule);
            let put = rules.iter().filter(is_changed).cloned().collect();
            let after: std::collections::HashSet<&str> =
                rules.iter().map(|rule| rule.id.as_str()).collect();
            let gone = present.iter().filter(|rule| !after.contains(rule.id.as_str()));
            Ok((put, gone.map(|rule| rule.id.clone()).collect()))
        })
        .await
    }

    /// Removes the rule with this id.
    pub async fn remove_rule_by_id(
        &self,
        caller: &Caller,
        project: &str,
        id: &str,
    ) -> Result<(), Error> {
        self.registry.require_operator(caller, Some(project))?;
        let summary = format!("removed {id}");
        let words = ChangeWords { action: "rule.removed", subject: id, summary: &summary };
        self.change_rules(caller, project, words, |_, present| {
            match present.iter().any(|rule| rule.id == id) {
                true => Ok((Vec::new(), vec![id.to_owned()])),
                false => Err(rule_not_found(id)),
            }
        })
        .await
    }

    /// Removes the rules of the short form on this agent and pattern.
    pub async fn remove_rule(
        &self,
        caller: &Caller,
        project: &str,
        agent: &str,
        pattern: &str,
    ) -> Result<(), Error> {
        self.registry.require_operator(caller, Some(project))?;
        let ids = RuleVerdict::ALL.map(|verdict| AccessRule::short_id(agent, pattern, verdict));
        let summary = format!("removed the rules on {pattern} for {agent}");
        let words = ChangeWords { action: "rule.removed", subject: pattern, summary: &summary };
        self.change_rules(caller, project, words, |_, present| {
            let found = present.iter().map(|rule| &rule.id).filter(|id| ids.contains(id));
            let found: Vec<String> = found.cloned().collect();
            if found.is_empty() {
                let message = format!("agent \"{agent}\" has no rule on \"{pattern}\"");
                return Err(Error::not_found(message, "toolcrib rules lists the rules"));
            }
            Ok((Vec::new(), found))
        })
        .await
    }

    /// Returns the rules of the caller's project.
    pub fn rules(&self, caller: &Caller) -> Result<RuleSet, Error> {
        self.registry.require_auditor(caller)?;
        let catalog = self.registry.catalog();
        let directory = catalog.directory();
        let rules = directory.rules.iter().filter(|rule| rule.project == caller.project);
        let versions = directory.rule_versions.iter();
        let version = versions.filter(|v| v.project == caller.project).map(|v| v.version).max();
        Ok(RuleSet { version: version.unwrap_or(0), rules: rules.cloned().collect() })
    }

    /// Returns one rule of the caller's project.
    pub fn rule(&self, caller: &Caller, id: &str) -> Result<AccessRule, Error> {
        let rules = self.rules(caller)?.rules;
        rules.into_iter().find(|rule| rule.id == id).ok_or_else(|| rule_not_found(id))
    }

    /// Returns the stored versions of the project's rules, newest first.
    pub async fn rule_versions(&self, caller: &Caller) -> Result<Vec<RuleSetVersion>, Error> {
        self.registry.require_auditor(caller)?;
        let versions = self.core.store.rule_history().rule_versions(&caller.project).await;
        versions.map_err(from_store_error)
    }

    /// Returns findings about rules that have no effect or whose condition fails: about the
    /// `proposed` rules if given, otherwise about the present rules of the project.
    pub async fn lint_rules(
        &self,
        caller: &Caller,
        proposed: Option<Vec<AccessRule>>,
    ) -> Result<Vec<RuleFinding>, Error> {
        let present = self.rules(caller)?.rules;
        let (catalog, project) = (self.registry.catalog(), caller.project.clone());
        let linting = tokio::task::spawn_blocking(move || {
            let index = ProjectRuleIndex::new(proposed.unwrap_or(present), None);
            lint::lint(&catalog, &project, &index)
        });
        linting.await.map_err(|error| Error::Internal(Box::new(error)))
    }

    /// Decides a change on the present rules of a project and stores it. `decide` returns the rules
    /// to put and the ids to drop.
    async fn change_rules<F>(
        &self,
        caller: &Caller,
        project: &str,
        words: ChangeWords<'_>,
        decide: F,
    ) -> Result<(), Error>
    where
        F: Fn(&Catalog, &[&AccessRule]) -> Result<(Vec<AccessRule>, Vec<String>), Error>,
    {
        let ChangeWords { action, subject, summary } = words;
        let entry = self.registry.audit_entry(caller, project, action, subject, summary);
        self.registry
            .change_directory(|catalog| {
                let rules = catalog.directory().rules.iter();
                let present: Vec<&AccessRule> =
                    rules.filter(|rule| rule.project == project).collect();
                let (put, dropped) = decide(catalog, &present)?;
                let change = RuleSetChange {
                    project: project.to_owned(),
                    put,
                    dropped,
                    at_ms: entry.at_ms,
                    agent: caller.agent.clone(),
                    summary: summary.to_owned(),
                };
                Ok((DirectoryChange::ChangeRules(Box::new(change)), Some(entry.clone())))
            })
            .await
    }
}

/// Checks each condition against the tools that its rule names without a pattern: it may use only
/// arguments that these tools have. A tool that does not exist yet is not checked; lint finds the
/// difference later.
fn check_against_tools(
    catalog: &Catalog,
    rules: &[AccessRule],
    pointer: &str,
) -> Result<(), Error> {
    for (n, rule) in rules.iter().enumerate() {
        let Some(source) = &rule.when else { continue };
        let pointer = if pointer.is_empty() { String::new() } else { format!("{pointer}/{n}") };
        let compiled = RuleCondition::compile(source);
        let compiled = compiled.map_err(|error| document::invalid_condition(&pointer, &error))?;
        for name in rule.tools.iter().filter(|name| !name.contains('*')) {
            let Some(entry) = catalog.find(&rule.project, name) else { continue };
            let (_, executed) = entry.definition.argument_rules();
            if let Some(error) = compiled.check_arguments(name, &executed.to_value()) {
                return Err(document::invalid_condition(&pointer, &error));
            }
        }
    }
    Ok(())
}

fn check_count(count: usize) -> Result<(), Error> {
    if count <= MAX_RULES {
        return Ok(());
    }
    let message = format!(
        "a project has at most {MAX_RULES} rules, and this would make {count}; join rules with \
         patterns and lists"
    );
    Err(Error::refused(Code::PayloadTooLarge, message))
}

fn rule_not_found(id: &str) -> Error {
    let excerpt: String = id.chars().take(128).collect();
    let message = format!("there is no rule \"{excerpt}\"");
    Error::not_found(message, "toolcrib rules lists the rules")
}

/// Describes a rule in a few words.
fn describe(rule: &AccessRule) -> String {
    let list = |list: &[String]| if list.is_empty() { "*".to_owned() } else { list.join(",") };
    let actions = rule.effective_actions();
    let default = actions == RuleAction::DEFAULT;
    let actions = actions.iter().map(|action| action.as_str()).collect::<Vec<_>>().join(",");
    let actions = if default { String::new() } else { format!(" ({actions})") };
    format!("{}: {} for {}{actions}", rule.id, list(&rule.tools), list(&rule.agents))
}
