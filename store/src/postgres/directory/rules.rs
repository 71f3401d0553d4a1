//! Access rules and their versions in PostgreSQL.

use async_trait::async_trait;
use toolcrib::domain::access_rules::{
    AccessRule, RULE_VERSIONS_KEPT, RuleSetChange, RuleSetVersion,
};
use toolcrib::ports::store::StoreError;
use toolcrib::ports::store::rule_history::RuleHistoryStore;

use crate::postgres::PostgresStore;
use crate::postgres::session::{Session, SessionError, SqlParams};
use crate::row::{RowReader, encode, read_rule, read_rule_version};

const RULES_IN_FORCE: &str =
    "SELECT project, id, rule FROM access_rules WHERE until IS NULL ORDER BY project, id";
const PRESENT_VERSIONS: &str = "SELECT project, version, at_ms, agent, summary \
     FROM access_rule_versions v WHERE version = \
     (SELECT max(version) FROM access_rule_versions WHERE project = v.project) ORDER BY project";

pub(super) async fn rules_in_force(session: &Session) -> Result<Vec<AccessRule>, SessionError> {
    session.query_map(RULES_IN_FORCE, &[], read_rule).await
}

pub(super) async fn present_versions(
    session: &Session,
) -> Result<Vec<RuleSetVersion>, SessionError> {
    session.query_map(PRESENT_VERSIONS, &[], read_rule_version).await
}

/// Makes a new version of a project's rules, and deletes the versions beyond those that are kept.
pub(super) async fn apply(session: &Session, change: &RuleSetChange) -> Result<(), SessionError> {
    let project = &change.project;
    let sql = "SELECT coalesce(max(version), 0) FROM access_rule_versions WHERE project = $1";
    let last = session.query_first(sql, &[project]).await?;
    let version = last.map(|row| row.integer(0)).transpose()?.unwrap_or(0) + 1;
    let put = change.put.iter().map(|rule| rule.id.as_str());
    let ended: Vec<&str> = change.dropped.iter().map(String::as_str).chain(put).collect();
    let sql = "UPDATE access_rules SET until = $3 \
               WHERE project = $1 AND id = ANY($2) AND until IS NULL";
    session.execute(sql, &[project, &ended, &version]).await?;
    let ids: Vec<&str> = change.put.iter().map(|rule| rule.id.as_str()).collect();
    let texts = change.put.iter().map(encode).collect::<Result<Vec<String>, StoreError>>()?;
    let sql = "INSERT INTO access_rules (project, id, since, rule) \
               SELECT $1, id, $2, rule FROM unnest($3::text[], $4::text[]) AS put(id, rule)";
    session.execute(sql, &[project, &version, &ids, &texts]).await?;
    let sql = "INSERT INTO access_rule_versions VALUES ($1, $2, $3, $4, $5)";
    let params: SqlParams<'_> =
        &[project, &version, &(change.at_ms as i64), &change.agent, &change.summary];
    session.execute(sql, params).await?;
    let oldest = version - RULE_VERSIONS_KEPT as i64 + 1;
    for sql in [
        "DELETE FROM access_rules WHERE project = $1 AND until <= $2",
        "DELETE FROM access_rule_versions WHERE project = $1 AND version < $2",
    ] {
        session.execute(sql, &[project, &oldest]).await?;
    }
    Ok(())
}

#[async_trait]
impl RuleHistoryStore for PostgresStore {
    async fn rule_versions(&self, project: &str) -> Result<Vec<RuleSetVersion>, StoreError> {
        let sql = "SELECT project, version, at_ms, agent, summary FROM access_rule_versions \
                   WHERE project = $1 ORDER BY version DESC";
        let session = self.pool.acquire().await?;
        let found = session.query_map(sql, &[&project], read_rule_version).await;
        found.map_err(SessionError::into_store_error)
    }

    async fn rules_at(&self, project: &str, version: u64) -> Result<Vec<AccessRule>, StoreError> {
        let sql = "SELECT project, id, rule FROM access_rules WHERE project = $1 \
                   AND since <= $2 AND (until IS NULL OR until > $2) ORDER BY id";
        let session = self.pool.acquire().await?;
        let found = session.query_map(sql, &[&project, &(version as i64)], read_rule).await;
        found.map_err(SessionError::into_store_error)
    }
}
