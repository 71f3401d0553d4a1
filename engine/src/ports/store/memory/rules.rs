//! Access rules and their versions in memory.

use async_trait::async_trait;

use super::MemoryStore;
use crate::domain::access_rules::{AccessRule, RULE_VERSIONS_KEPT, RuleSetChange, RuleSetVersion};
use crate::ports::store::StoreError;
use crate::ports::store::rule_history::RuleHistoryStore;

/// A rule with the version that added it, and the version that removed or replaced it.
struct RuleRow {
    rule: AccessRule,
    since: u64,
    until: Option<u64>,
}

#[derive(Default)]
pub(super) struct MemoryRules {
    rows: Vec<RuleRow>,
    versions: Vec<RuleSetVersion>,
}

impl MemoryRules {
    pub(super) fn apply(&mut self, change: RuleSetChange) {
        let RuleSetChange { project, put, dropped, at_ms, agent, summary } = change;
        let of_project = self.versions.iter().filter(|v| v.project == project);
        let version = of_project.map(|v| v.version).max().unwrap_or(0) + 1;
        let is_ended = |id: &String| dropped.contains(id) || put.iter().any(|rule| rule.id == *id);
        for row in self.rows.iter_mut().filter(|row| row.rule.project == project) {
            if row.until.is_none() && is_ended(&row.rule.id) {
                row.until = Some(version);
            }
        }
        let rows = put.into_iter().map(|rule| RuleRow { rule, since: version, until: None });
        self.rows.extend(rows);
        let oldest = (version + 1).saturating_sub(RULE_VERSIONS_KEPT);
        let is_old = |at: u64| at <= oldest;
        self.rows.retain(|row| row.rule.project != project || !row.until.is_some_and(is_old));
        self.versions.retain(|v| v.project != project || v.version >= oldest);
        self.versions.push(RuleSetVersion { project, version, at_ms, agent, summary });
    }

    pub(super) fn in_force(&self) -> Vec<AccessRule> {
        let rows = self.rows.iter().filter(|row| row.until.is_none());
        let mut rules: Vec<AccessRule> = rows.map(|row| row.rule.clone()).collect();
        rules.sort_by(|a, b| (&a.project, &a.id).cmp(&(&b.project, &b.id)));
        rules
    }

    pub(super) fn present_versions(&self) -> Vec<RuleSetVersion> {
        let is_last = |v: &&RuleSetVersion| {
            !self.versions.iter().any(|o| o.project == v.project && o.version > v.version)
        };
        let mut present: Vec<_> = self.versions.iter().filter(is_last).cloned().collect();
        present.sort_by(|a, b| a.project.cmp(&b.project));
        present
    }
}

#[async_trait]
impl RuleHistoryStore for MemoryStore {
    async fn rule_versions(&self, project: &str) -> Result<Vec<RuleSetVersion>, StoreError> {
        let state = self.state.lock();
        let versions = state.rules.versions.iter().filter(|v| v.project == project);
        let mut versions: Vec<RuleSetVersion> = versions.cloned().collect();
        versions.sort_by_key(|v| std::cmp::Reverse(v.version));
        Ok(versions)
    }

    async fn rules_at(&self, project: &str, version: u64) -> Result<Vec<AccessRule>, StoreError> {
        let state = self.state.lock();
        let is_part = |row: &&RuleRow| {
            row.rule.project == project
                && row.since <= version
                && row.until.is_none_or(|until| until > version)
        };
        let rows = state.rules.rows.iter().filter(is_part);
        let mut rules: Vec<AccessRule> = rows.map(|row| row.rule.clone()).collect();
        rules.sort_by(|a, b| a.id.cmp(&b.id));
        Ok(rules)
    }
}
