//! Upstreams and the tools imported from them, in SQLite.

use rusqlite::{Connection, params};
use toolcrib::directory::{Change, Upstream};
use toolcrib::store::StoreError;

use super::reader::collect;
use crate::row::{definition_text, read_upstream};

pub(super) fn all(connection: &Connection) -> Result<Vec<Upstream>, StoreError> {
    let sql =
        "SELECT project, name, kind, settings, added_ms FROM upstreams ORDER BY project, name";
    collect(connection, sql, &[], |row| read_upstream(row))
}

pub(super) fn change(connection: &Connection, change: &Change) -> rusqlite::Result<()> {
    match change {
        Change::PutUpstream(upstream) => {
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
        Change::DropUpstream { project, name } => {
            connection.execute(
                "DELETE FROM upstreams WHERE project = ?1 AND name = ?2",
                [project, name],
            )?;
            connection.execute(
                "DELETE FROM upstream_grants WHERE project = ?1 AND upstream = ?2",
                [project, name],
            )?;
            drop_tools(connection, project, name)?;
        }
        Change::SetUpstreamTools { project, upstream, tools } => {
            drop_tools(connection, project, upstream)?;
            let mut insert =
                connection.prepare_cached("INSERT INTO upstream_tools VALUES (?1, ?2, ?3, ?4)")?;
            for tool in tools {
                let text = definition_text(tool).map_err(|_| rusqlite::Error::InvalidQuery)?;
                insert.execute(params![project, tool.name, upstream, text])?;
            }
        }
        _ => {}
    }
    Ok(())
}

fn drop_tools(connection: &Connection, project: &str, upstream: &str) -> rusqlite::Result<()> {
    connection.execute(
        "DELETE FROM upstream_tools WHERE project = ?1 AND upstream = ?2",
        [project, upstream],
    )?;
    Ok(())
}
