//! Versioned migrations. Each runs in one transaction together with the new version number, so
//! one that was killed half-way has not happened; a database from a newer program is not opened.

use rusqlite::{Connection, TransactionBehavior};

use crate::sqlite::OpenError;

const MIGRATIONS: [&str; 9] = [
    include_str!("../migrations/sqlite/0001_init.sql"),
    include_str!("../migrations/sqlite/0002_callbacks.sql"),
    include_str!("../migrations/sqlite/0003_runs.sql"),
    include_str!("../migrations/sqlite/0004_utp.sql"),
    include_str!("../migrations/sqlite/0005_loops.sql"),
    include_str!("../migrations/sqlite/0006_upstreams.sql"),
    include_str!("../migrations/sqlite/0007_tool_versions.sql"),
    include_str!("../migrations/sqlite/0008_upstream_grants.sql"),
    include_str!("../migrations/sqlite/0009_not_ok_by_run.sql"),
];

/// The version this program writes.
pub const SCHEMA_VERSION: i64 = MIGRATIONS.len() as i64;

/// `application_id` of our files: "TCRB".
const APPLICATION_ID: i64 = 0x5443_5242;

/// The version of a database that is ours, or that is empty and becomes ours.
pub(crate) fn check(connection: &Connection) -> Result<i64, OpenError> {
    let version: i64 = connection.pragma_query_value(None, "user_version", |r| r.get(0))?;
    let owner: i64 = connection.pragma_query_value(None, "application_id", |r| r.get(0))?;
    if version > SCHEMA_VERSION && owner == APPLICATION_ID {
        return Err(OpenError::Newer { found: version, known: SCHEMA_VERSION });
    }
    if owner != APPLICATION_ID {
        let tables: i64 =
            connection.query_row("SELECT count(*) FROM sqlite_schema", [], |r| r.get(0))?;
        if version != 0 || tables != 0 {
            return Err(OpenError::NotOurs);
        }
    }
    Ok(version)
}

/// Brings a database to [`SCHEMA_VERSION`].
pub(crate) fn migrate(connection: &mut Connection) -> Result<(), OpenError> {
    loop {
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let version = check(&transaction)?;
        let Some(migration) = MIGRATIONS.get(version as usize) else { return Ok(()) };
        transaction.execute_batch(migration)?;
        transaction.pragma_update(None, "user_version", version + 1)?;
        transaction.pragma_update(None, "application_id", APPLICATION_ID)?;
        transaction.commit()?;
    }
}
