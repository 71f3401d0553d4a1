//! Administration of access rules. Every change makes a new version of the project's rules.

use crate::domain::access_rules::{AccessRule, RuleSetChange, RuleVerdict};
use crate::domain::caller::Caller;
use crate::domain::directory::DirectoryChange;
use crate::domain::fault::Error;
use crate::registry::Admin;

impl Admin {
    /// Sets one rule; it replaces the rule with the same id.
    pub async fn set_rule(&self, caller: &Caller, rule: AccessRule) -> Result<(), Error> {
        self.registry.require_operator(caller, Some(&rule.project))?;
        let project = rule.project.clone();
        let subject = rule.id.clone();
        let summary = format!("set {} ({})", rule.id, rule.verdict.as_str());
        self.change_rules(caller, &project, ("rule.set", &subject, &summary), |_| {
            Ok((vec![rule.clone()], Vec::new()))
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
        self.change_rules(caller, project, ("rule.removed", pattern, &summary), |rules| {
            let found = rules.iter().map(|rule| &rule.id).filter(|id| ids.contains(id));
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
    pub fn rules(&self, caller: &Caller) -> Result<Vec<AccessRule>, Error> {
        self.registry.require_auditor(caller)?;
        let catalog = self.registry.catalog();
        let rules = catalog.directory().rules.iter();
        Ok(rules.filter(|rule| rule.project == caller.project).cloned().collect())
    }

    /// Decides a change on the present rules of a project and stores it. `decide` returns the rules
    /// to put and the ids to drop.
    async fn change_rules<F>(
        &self,
        caller: &Caller,
        project: &str,
        (action, subject, summary): (&str, &str, &str),
        decide: F,
    ) -> Result<(), Error>
    where
        F: Fn(&[&AccessRule]) -> Result<(Vec<AccessRule>, Vec<String>), Error>,
    {
        let entry = self.registry.audit_entry(caller, project, action, subject, summary);
        self.registry
            .change_directory(|catalog| {
                let rules = catalog.directory().rules.iter();
                let present: Vec<&AccessRule> =
                    rules.filter(|rule| rule.project == project).collect();
                let (put, dropped) = decide(&present)?;
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
