//! The tool definitions of runs (table `runs`), in SQLite.

use rusqlite::{Connection, params};
use toolcrib::ports::store::{RunToolDefinitions, StoreError};

use super::reader::query_map;
use crate::row::decode;

pub(super) fn find_run_tools(
    connection: &Connection,
    project: &str,
    run_id: &str,
) -> Result<Option<RunToolDefinitions>, StoreError> {
    let sql = "SELECT tool_definitions, updated_ms FROM runs WHERE project = ?1 AND run_id = ?2";
    let found = query_map(connection, sql, params![project, run_id], |row| {
        let unreadable = |error: rusqlite::Error| StoreError::Corrupt(error.to_string());
        let text: String = row.get(0).map_err(unreadable)?;
        Ok(RunToolDefinitions {
            project: project.to_owned(),
            run_id: run_id.to_owned(),
            tool_definitions: decode(&text)?,
            updated_ms: row.get::<_, i64>(1).map_err(unreadable)? as u64,
        })
    })?;
    Ok(found.into_iter().next())
}

pub(super) fn put_run_tools(
    connection: &Connection,
    run: &RunToolDefinitions,
) -> rusqlite::Result<()> {
    connection
        .prepare_cached("INSERT OR REPLACE INTO runs VALUES (?1, ?2, ?3, ?4)")?
        .execute(params![
            run.project,
            run.run_id,
            run.tool_definitions.text(),
            run.updated_ms as i64
        ])
        .map(|_| ())
}

/// Deletes the tool definitions of runs that were last changed before this time and have no calls
/// left, oldest first.
pub(super) fn purge_run_tools(
    connection: &Connection,
    before_ms: i64,
    limit: usize,
) -> rusqlite::Result<usize> {
    connection
        .prepare_cached(
            "DELETE FROM runs WHERE (project, run_id) IN (SELECT project, run_id FROM runs r \
             WHERE updated_ms < ?1 AND NOT EXISTS (SELECT 1 FROM tool_calls c \
             WHERE c.project = r.project AND c.run_id = r.run_id) \
             ORDER BY updated_ms LIMIT ?2)",
        )?
        .execute(params![before_ms, limit as i64])
}
