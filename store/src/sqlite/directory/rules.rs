//! Access rules and their versions in SQLite.

use async_trait::async_trait;
use rusqlite::{Connection, params};
use toolcrib::domain::access_rules::{
    AccessRule, RULE_VERSIONS_KEPT, RuleSetChange, RuleSetVersion,
};
use toolcrib::ports::store::StoreError;
use toolcrib::ports::store::rule_history::RuleHistoryStore;

use crate::row::{encode, read_rule, read_rule_version};
use crate::sqlite::SqliteStore;
use crate::sqlite::reader::query_map;

const RULES_IN_FORCE: &str =
    "SELECT project, id, rule FROM access_rules WHERE until IS NULL ORDER BY project, id";
const PRESENT_VERSIONS: &str = "SELECT project, version, at_ms, agent, summary \
     FROM access_rule_versions AS v WHERE version = \
     (SELECT max(version) FROM access_rule_versions WHERE project = v.project) ORDER BY project";

pub(super) fn rules_in_force(connection: &Connection) -> Result<Vec<AccessRule>, StoreError> {
    query_map(connection, RULES_IN_FORCE, &[], |row| read_rule(row))
}

pub(super) fn present_versions(connection: &Connection) -> Result<Vec<RuleSetVersion>, StoreError> {
    query_map(connection, PRESENT_VERSIONS, &[], |row| read_rule_version(row))
}

/// Makes a new version of a project's rules, and deletes the versions beyond those that are kept.
pub(super) fn apply(connection: &Connection, change: &RuleSetChange) -> rusqlite::Result<()> {
    let project = &change.project;
    let last: i64 = connection.query_row(
        "SELECT coalesce(max(version), 0) FROM access_rule_versions WHERE project = ?1",
        [project],
        |row| row.get(0),
    )?;
    let version = last + 1;
    let put = change.put.iter().map(|rule| &rule.id);
    for id in change.dropped.iter().chain(put) {
        connection
            .prepare_cached(
                "UPDATE access_rules SET until = ?3 \
                 WHERE project = ?1 AND id = ?2 AND until IS NULL",
            )?
            .execute(params![project, id, version])?;
    }
    for rule in &change.put {
        let text = encode(rule).map_err(|_| rusqlite::Error::InvalidQuery)?;
        connection
            .prepare_cached("INSERT INTO access_rules VALUES (?1, ?2, ?3, NULL, ?4)")?
            .execute(params![project, rule.id, version, text])?;
    }
    connection.execute(
        "INSERT INTO access_rule_versions VALUES (?1, ?2, ?3, ?4, ?5)",
        params![project, version, change.at_ms as i64, change.agent, change.summary],
    )?;
    let oldest = version - RULE_VERSIONS_KEPT as i64 + 1;
    for sql in [
        "DELETE FROM access_rules WHERE project = ?1 AND until <= ?2",
        "DELETE FROM access_rule_versions WHERE project = ?1 AND version < ?2",
    ] {
        connection.execute(sql, params![project, oldest])?;
    }
    Ok(())
}

#[async_trait]
impl RuleHistoryStore for SqliteStore {
    async fn rule_versions(&self, project: &str) -> Result<Vec<RuleSetVersion>, StoreError> {
        let project = project.to_owned();
        self.read(move |connection| {
            let sql = "SELECT project, version, at_ms, agent, summary FROM access_rule_versions \
                       WHERE project = ?1 ORDER BY version DESC";
            query_map(connection, sql, params![project], |row| read_rule_version(row))
        })
        .await
    }

    async fn rules_at(&self, project: &str, version: u64) -> Result<Vec<AccessRule>, StoreError> {
        let project = project.to_owned();
        self.read(move |connection| {
            let sql = "SELECT project, id, rule FROM access_rules WHERE project = ?1 \
                       AND since <= ?2 AND (until IS NULL OR until > ?2) ORDER BY id";
            query_map(connection, sql, params![project, version as i64], |row| read_rule(row))
        })
        .await
    }
}
