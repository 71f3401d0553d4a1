//! Upstreams and the tools imported from them, in SQLite.

use rusqlite::{Connection, params};
use toolcrib::domain::directory::{DirectoryChange, Upstream};
use toolcrib::ports::store::StoreError;

use super::reader::query_map;
use crate::row::{encode_definition, read_upstream};

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
            delete_upstream_tools(connection, project, name)?;
        }
        DirectoryChange::SetUpstreamTools { project, upstream, tools } => {
            delete_upstream_tools(connection, project, upstream)?;
            let mut insert =
                connection.prepare_cached("INSERT INTO upstream_tools VALUES (?1, ?2, ?3, ?4)")?;
            for tool in tools {
                let text = encode_definition(tool).map_err(|_| rusqlite::Error::InvalidQuery)?;
                insert.execute(params![project, tool.name, upstream, text])?;
            }
        }
        _ => {}
    }
    Ok(())
}

fn delete_upstream_tools(
    connection: &Connection,
    project: &str,
    upstream: &str,
) -> rusqlite::Result<()> {
    connection.execute(
        "DELETE FROM upstream_tools WHERE project = ?1 AND upstream = ?2",
        [project, upstream],
    )?;
    Ok(())
}
