//! Agents in SQLite: the roster, their versions, the trees of their runs, and boxes.

use async_trait::async_trait;
use rusqlite::{Connection, params};
use toolcrib::domain::agent::{AgentEntry, AgentVersion, CardBox};
use toolcrib::domain::json::Json;
use toolcrib::domain::run::Run;
use toolcrib::ports::store::StoreError;
use toolcrib::ports::store::agents::AgentStore;

use super::query_rows;
use crate::row::{RowReader, decode, encode, read_agent_version, read_run};
use crate::sqlite::SqliteStore;
use crate::sqlite::reader::query_map;

pub(super) fn list_roster(connection: &Connection) -> Result<Vec<AgentEntry>, StoreError> {
    let sql = "SELECT project, agent_id, worker_target, profile, allowed_tools, updated_ms, \
               definition FROM roster ORDER BY project, agent_id";
    query_rows(connection, sql, |row| {
        let (profile, allowed) = (row.optional_text(3)?, row.optional_text(4)?);
        Ok(AgentEntry {
            project: row.text(0)?,
            agent_id: row.text(1)?,
            worker_target: row.text(2)?,
            profile: profile.map(|text| Json::parse(&text)).transpose().unwrap_or_default(),
            allowed_tools: allowed.map(|text| decode(&text)).transpose()?,
            updated_ms: row.unsigned(5)?,
            definition: row.optional_text(6)?.map(|text| decode(&text)).transpose()?,
        })
    })
}

/// Replaces an agent's entry, and stores its version.
pub(super) fn put_agent_entry(connection: &Connection, entry: &AgentEntry) -> rusqlite::Result<()> {
    let allowed = entry.allowed_tools.as_ref().map(serde_json::to_string).transpose();
    let definition = entry.definition.as_ref().map(encode).transpose();
    let definition = definition.map_err(|_| rusqlite::Error::InvalidQuery)?;
    connection.execute(
        "INSERT OR REPLACE INTO roster (project, agent_id, worker_target, profile, allowed_tools, \
         updated_ms, definition) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
        params![
            entry.project,
            entry.agent_id,
            entry.worker_target,
            entry.profile.as_ref().map(Json::text),
            allowed.map_err(|_| rusqlite::Error::InvalidQuery)?,
            entry.updated_ms as i64,
            definition,
        ],
    )?;
    if let Some(agent) = &entry.definition {
        connection.execute(
            "INSERT OR IGNORE INTO agent_versions VALUES (?1, ?2, ?3, ?4, ?5)",
            params![
                entry.project,
                entry.agent_id,
                agent.version as i64,
                definition,
                entry.updated_ms as i64
            ],
        )?;
    }
    Ok(())
}

#[async_trait]
impl AgentStore for SqliteStore {
    async fn agent_versions(
        &self,
        project: &str,
        agent_id: &str,
        limit: usize,
    ) -> Result<Vec<AgentVersion>, StoreError> {
        let (project, agent_id) = (project.to_owned(), agent_id.to_owned());
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        self.read(move |connection| {
            let sql = "SELECT definition, created_ms FROM agent_versions \
                       WHERE project = ?1 AND agent_id = ?2 ORDER BY version DESC LIMIT ?3";
            query_map(connection, sql, params![project, agent_id, limit], |row| {
                read_agent_version(row)
            })
        })
        .await
    }

    async fn tree_runs(
        &self,
        project: &str,
        root_run_id: &str,
        after: Option<String>,
        limit: usize,
    ) -> Result<Vec<Run>, StoreError> {
        let (project, root) = (project.to_owned(), root_run_id.to_owned());
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        self.read(move |connection| {
            let sql = "SELECT l.body FROM run_tree t JOIN loops l \
                       ON l.project = t.project AND l.run_id = t.run_id \
                       WHERE t.project = ?1 AND t.root_run_id = ?2 AND t.run_id > ?3 \
                       ORDER BY t.run_id LIMIT ?4";
            let after = after.unwrap_or_default();
            query_map(connection, sql, params![project, root, after, limit], |row| read_run(row))
        })
        .await
    }

    async fn put_box(&self, new: CardBox) -> Result<(), StoreError> {
        let body = encode(&new)?;
        self.write(move |writer| {
            writer
                .connection()?
                .prepare_cached("INSERT OR IGNORE INTO card_boxes VALUES (?1, ?2, ?3, ?4)")?
                .execute(params![new.project, new.box_id, body, new.created_ms as i64])
                .map(drop)
        })
        .await
    }

    async fn count_boxes(&self, project: &str) -> Result<usize, StoreError> {
        let project = project.to_owned();
        self.read(move |connection| {
            // The index is far smaller than the table, which contains the bodies.
            let sql = "SELECT count(*) FROM card_boxes INDEXED BY card_boxes_by_time \
                       WHERE project = ?1";
            let count = query_map(connection, sql, params![project], |row| row.unsigned(0));
            Ok(count?.pop().unwrap_or_default() as usize)
        })
        .await
    }

    async fn card_box(&self, project: &str, box_id: &str) -> Result<Option<CardBox>, StoreError> {
        let (project, box_id) = (project.to_owned(), box_id.to_owned());
        self.read(move |connection| {
            let sql = "SELECT body FROM card_boxes WHERE project = ?1 AND box_id = ?2";
            let found =
                query_map(connection, sql, params![project, box_id], |row| decode(&row.text(0)?));
            Ok(found?.pop())
        })
        .await
    }
}
