//! Agents in PostgreSQL: the roster in `resource.project_agents`, their versions, the trees of
//! their runs, and boxes.

use async_trait::async_trait;
use toolcrib::domain::agent::{AgentEntry, AgentVersion, CardBox};
use toolcrib::domain::json::Json;
use toolcrib::domain::run::Run;
use toolcrib::ports::store::StoreError;
use toolcrib::ports::store::agents::AgentStore;

use crate::postgres::session::{Session, SessionError, SqlParams};
use crate::postgres::{PostgresStore, limit_param};
use crate::row::{RowReader, decode, encode, read_agent_version, read_run};

pub(super) const ROSTER: &str = "SELECT project_id, agent_id, worker_target, toolcrib_profile, \
     toolcrib_allowed_tools, (extract(epoch FROM updated_at) * 1000)::bigint, toolcrib_definition \
     FROM resource.project_agents WHERE NOT toolcrib_automatic \
     ORDER BY project_id COLLATE \"C\", agent_id COLLATE \"C\"";

/// Reads a row of [`ROSTER`].
pub(super) fn read_agent_entry(row: &tokio_postgres::Row) -> Result<AgentEntry, StoreError> {
    let (profile, allowed) = (row.optional_text(3)?, row.optional_text(4)?);
    Ok(AgentEntry {
        project: row.text(0)?,
        agent_id: row.text(1)?,
        worker_target: row.text(2)?,
        profile: profile.map(|text| decode(&text)).transpose()?,
        allowed_tools: allowed.map(|text| decode(&text)).transpose()?,
        updated_ms: row.unsigned(5)?,
        definition: row.optional_text(6)?.map(|text| decode(&text)).transpose()?,
    })
}

/// Replaces an agent's entry, and stores the version of its definition, if it has one.
pub(super) async fn put_agent_entry(
    session: &Session,
    entry: &AgentEntry,
) -> Result<(), SessionError> {
    let allowed = entry.allowed_tools.as_ref().map(encode).transpose()?;
    let definition = entry.definition.as_ref().map(encode).transpose()?;
    let sql = "INSERT INTO resource.project_agents (project_id, agent_id, worker_target, \
               toolcrib_profile, toolcrib_allowed_tools, updated_at, toolcrib_definition) \
               VALUES ($1, $2, $3, $4, $5, to_timestamp($6::bigint / 1000.0), $7) \
               ON CONFLICT (project_id, agent_id) DO UPDATE SET \
               worker_target = excluded.worker_target, \
               toolcrib_profile = excluded.toolcrib_profile, \
               toolcrib_allowed_tools = excluded.toolcrib_allowed_tools, \
               toolcrib_automatic = false, updated_at = excluded.updated_at, \
               toolcrib_definition = excluded.toolcrib_definition";
    let params: SqlParams<'_> = &[
        &entry.project,
        &entry.agent_id,
        &entry.worker_target,
        &entry.profile.as_ref().map(Json::text),
        &allowed,
        &(entry.updated_ms as i64),
        &definition,
    ];
    session.execute(sql, params).await?;
    if let Some(agent) = &entry.definition {
        let sql = "INSERT INTO agent_versions VALUES ($1, $2, $3, $4, $5) ON CONFLICT DO NOTHING";
        let (version, at_ms) = (agent.version as i64, entry.updated_ms as i64);
        let params: SqlParams<'_> =
            &[&entry.project, &entry.agent_id, &version, &definition, &at_ms];
        session.execute(sql, params).await?;
    }
    Ok(())
}

#[async_trait]
impl AgentStore for PostgresStore {
    async fn agent_versions(
        &self,
        project: &str,
        agent_id: &str,
        limit: usize,
    ) -> Result<Vec<AgentVersion>, StoreError> {
        let sql = "SELECT definition, created_ms FROM agent_versions \
                   WHERE project = $1 AND agent_id = $2 ORDER BY version DESC LIMIT $3";
        let session = self.pool.acquire().await?;
        let params: SqlParams<'_> = &[&project, &agent_id, &limit_param(limit)];
        let listed = session.query_map(sql, params, read_agent_version).await;
        listed.map_err(SessionError::into_store_error)
    }

    async fn tree_runs(
        &self,
        project: &str,
        root_run_id: &str,
        after: Option<String>,
        limit: usize,
    ) -> Result<Vec<Run>, StoreError> {
        let sql = "SELECT l.body FROM run_tree t JOIN loops l \
                   ON l.project = t.project AND l.run_id = t.run_id \
                   WHERE t.project = $1 AND t.root_run_id = $2 AND t.run_id > $3 \
                   ORDER BY t.run_id LIMIT $4";
        let session = self.pool.acquire().await?;
        let after = after.unwrap_or_default();
        let params: SqlParams<'_> = &[&project, &root_run_id, &after, &limit_param(limit)];
        session.query_map(sql, params, read_run).await.map_err(SessionError::into_store_error)
    }

    async fn put_box(&self, new: CardBox) -> Result<(), StoreError> {
        let body = encode(&new)?;
        self.write((new, body), |writer, (new, body)| {
            Box::pin(async move {
                let sql = "INSERT INTO card_boxes VALUES ($1, $2, $3, $4) ON CONFLICT DO NOTHING";
                let at_ms = new.created_ms as i64;
                let params: SqlParams<'_> = &[&new.project, &new.box_id, body, &at_ms];
                writer.session.execute(sql, params).await.map(|_| ())
            })
        })
        .await
    }

    async fn count_boxes(&self, project: &str) -> Result<usize, StoreError> {
        let sql = "SELECT count(*) FROM card_boxes WHERE project = $1";
        let session = self.pool.acquire().await?;
        let read = |row: &tokio_postgres::Row| row.unsigned(0);
        let count = session.query_map(sql, &[&project], read).await;
        let count = count.map_err(SessionError::into_store_error)?.pop();
        Ok(count.unwrap_or_default() as usize)
    }

    async fn card_box(&self, project: &str, box_id: &str) -> Result<Option<CardBox>, StoreError> {
        let sql = "SELECT body FROM card_boxes WHERE project = $1 AND box_id = $2";
        let session = self.pool.acquire().await?;
        let read = |row: &tokio_postgres::Row| decode(&row.text(0)?);
        let found = session.query_map(sql, &[&project, &box_id], read).await;
        Ok(found.map_err(SessionError::into_store_error)?.pop())
    }
}
