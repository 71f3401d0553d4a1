//! Upstreams and the tools imported from them, in SQLite.

use rusqlite::{Connection, params};
use toolcrib::domain::directory::{DirectoryChange, Upstream};
use toolcrib::ports::store::StoreError;

use super::reader::query_map;
use crate::row::{encode, encode_definition, read_upstream};

pub(super) fn list_upstreams(connection: &Connection) -> Result<Vec<Upstream>, StoreError> {
    let sql =
        "SELECT project, name, kind, settings, added_ms FROM upstreams ORDER BY project, name";
    query_map(connection, sql, &[], |row| read_upstream(row))
}

pub(super) fn apply_upstream_change(
    connection: &Connection,
    change: &DirectoryChange,
) -> rusqlite::Result<()> {
    match change {
        DirectoryChange::PutUpstream(upstream) => {
            connection.execute(
                "INSERT OR REPLACE INTO upstreams VALUES (?1, ?2, ?3, ?4, ?5)",
                params![
                    upstream.project,
                    upstream.name,
                    upstream.kind,
                    upstream.settings.text(),
                    upstream.added_ms as i64
                ],
            )?;
        }
        DirectoryChange::DropUpstream { project, name } => {
            connection.execute(
                "DELETE FROM upstreams WHERE project = ?1 AND name = ?2",
                [project, name],
            )?;
            connection.execute(
                "DELETE FROM upstream_grants WHERE project = ?1 AND upstream = ?2",
                [project, name],
            )?;
            delete_upstream_tools(connection, project, name, &[])?;
        }
        DirectoryChange::SetUpstreamTools { project, upstream, tools } => {
            let names: Vec<&str> = tools.iter().map(|tool| tool.name.as_str()).collect();
            delete_upstream_tools(connection, project, upstream, &names)?;
            let mut insert = connection.prepare_cached(
                "INSERT INTO upstream_tools VALUES (?1, ?2, ?3, ?4, CURRENT_TIMESTAMP) \
                 ON CONFLICT (project, name) \
                 DO UPDATE SET upstream = excluded.upstream, definition = excluded.definition",
            )?;
            for tool in tools {
                let text = encode_definition(tool).map_err(|_| rusqlite::Error::InvalidQuery)?;
                insert.execute(params![project, tool.name, upstream, text])?;
            }
        }
        _ => {}
    }
    Ok(())
}

/// Deletes the tools of an upstream, except those with these names.
fn delete_upstream_tools(
    connection: &Connection,
    project: &str,
    upstream: &str,
    kept_names: &[&str],
) -> rusqlite::Result<()> {
    let kept_names = encode(&kept_names).map_err(|_| rusqlite::Error::InvalidQuery)?;
    connection.execute(
        "DELETE FROM upstream_tools WHERE project = ?1 AND upstream = ?2 \
         AND name NOT IN (SELECT value FROM json_each(?3))",
        [project, upstream, &kept_names],
    )?;
    Ok(())
}
