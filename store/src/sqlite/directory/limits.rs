//! Usage limits and kill switches in SQLite.

use rusqlite::{Connection, params};
use toolcrib::domain::directory::DirectoryChange;
use toolcrib::domain::directory::kill_switches::KillSwitch;
use toolcrib::domain::directory::usage_limits::UsageLimit;
use toolcrib::ports::store::StoreError;

use crate::row::{read_limit, read_switch};
use crate::sqlite::reader::query_map;

pub(super) fn list_limits(connection: &Connection) -> Result<Vec<UsageLimit>, StoreError> {
    let sql = "SELECT project, kind, name, per_minute, max_open, max_parallel, updated_ms \
               FROM usage_limits ORDER BY project, kind, name";
    query_map(connection, sql, &[], |row| read_limit(row))
}

pub(super) fn list_switches(connection: &Connection) -> Result<Vec<KillSwitch>, StoreError> {
    let sql = "SELECT project, kind, name, reason, set_by, set_ms \
               FROM kill_switches ORDER BY project, kind, name";
    query_map(connection, sql, &[], |row| read_switch(row))
}

/// Applies a change of a limit or a switch.
pub(super) fn apply_change(
    connection: &Connection,
    change: &DirectoryChange,
) -> rusqlite::Result<()> {
    match change {
        DirectoryChange::PutLimit(limit) => connection.execute(
            "INSERT OR REPLACE INTO usage_limits VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
            params![
                limit.project,
                limit.kind.as_str(),
                limit.name,
                limit.values.per_minute,
                limit.values.max_open,
                limit.values.max_parallel,
                limit.updated_ms as i64,
            ],
        )?,
        DirectoryChange::DropLimit { project, kind, name } => connection.execute(
            "DELETE FROM usage_limits WHERE project = ?1 AND kind = ?2 AND name = ?3",
            params![project, kind.as_str(), name],
        )?,
        DirectoryChange::PutSwitch(switch) => connection.execute(
            "INSERT OR REPLACE INTO kill_switches VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
            params![
                switch.project,
                switch.kind.as_str(),
                switch.name,
                switch.reason,
                switch.set_by,
                switch.set_ms as i64,
            ],
        )?,
        DirectoryChange::DropSwitch { project, kind, name } => connection.execute(
            "DELETE FROM kill_switches WHERE project = ?1 AND kind = ?2 AND name = ?3",
            params![project, kind.as_str(), name],
        )?,
        _ => 0,
    };
    Ok(())
}
