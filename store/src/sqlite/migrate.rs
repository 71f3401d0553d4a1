//! Versioned migrations of the SQLite schema. Each migration runs in one transaction together with
//! the new version number, so an interrupted migration leaves no trace. A database written by a
//! newer version of Toolcrib is not opened.

use rusqlite::{Connection, TransactionBehavior};

use crate::sqlite::SqliteOpenError;
use crate::sqlite::directory::audit::chain_existing_rows;

const MIGRATIONS: [&str; 17] = [
    include_str!("../../migrations/sqlite/0001_init.sql"),
    include_str!("../../migrations/sqlite/0002_callbacks.sql"),
    include_str!("../../migrations/sqlite/0003_runs.sql"),
    include_str!("../../migrations/sqlite/0004_utp.sql"),
    include_str!("../../migrations/sqlite/0005_loops.sql"),
    include_str!("../../migrations/sqlite/0006_upstreams.sql"),
    include_str!("../../migrations/sqlite/0007_tool_versions.sql"),
    include_str!("../../migrations/sqlite/0008_upstream_grants.sql"),
    include_str!("../../migrations/sqlite/0009_not_ok_by_run.sql"),
    include_str!("../../migrations/sqlite/0010_tool_calls.sql"),
    include_str!("../../migrations/sqlite/0011_undelivered_requests.sql"),
    include_str!("../../migrations/sqlite/0012_access_rules.sql"),
    include_str!("../../migrations/sqlite/0013_credentials.sql"),
    include_str!("../../migrations/sqlite/0014_approvals.sql"),
    include_str!("../../migrations/sqlite/0015_limits_and_switches.sql"),
    AUDIT_CHAIN,
    include_str!("../../migrations/sqlite/0017_agents.sql"),
];

/// The program chains the rows of the audit log after this migration: SQL cannot hash.
const AUDIT_CHAIN: &str = include_str!("../../migrations/sqlite/0016_audit_chain.sql");

/// The schema version that this program writes.
pub const SQLITE_SCHEMA_VERSION: i64 = MIGRATIONS.len() as i64;

/// The `application_id` of Toolcrib's database files: "TCRB".
const APPLICATION_ID: i64 = 0x5443_5242;

/// Returns the schema version of a database that belongs to Toolcrib, or 0 for an empty one.
///
/// Fails when the database belongs to another program or to a newer version of Toolcrib.
pub(crate) fn check_schema_version(connection: &Connection) -> Result<i64, SqliteOpenError> {
    // One snapshot: another process may create the tables between two reads.
    let _snapshot =
        connection.is_autocommit().then(|| connection.unchecked_transaction()).transpose()?;
    let version: i64 = connection.pragma_query_value(None, "user_version", |r| r.get(0))?;
    let owner: i64 = connection.pragma_query_value(None, "application_id", |r| r.get(0))?;
    if version > SQLITE_SCHEMA_VERSION && owner == APPLICATION_ID {
        return Err(SqliteOpenError::NewerSchema { found: version, known: SQLITE_SCHEMA_VERSION });
    }
    if owner != APPLICATION_ID {
        let tables: i64 =
            connection.query_row("SELECT count(*) FROM sqlite_schema", [], |r| r.get(0))?;
        if version != 0 || tables != 0 {
            return Err(SqliteOpenError::ForeignDatabase);
        }
    }
    Ok(version)
}

/// Migrates a database to [`SQLITE_SCHEMA_VERSION`].
pub(crate) fn migrate(connection: &mut Connection) -> Result<(), SqliteOpenError> {
    loop {
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let version = check_schema_version(&transaction)?;
        let Some(migration) = MIGRATIONS.get(version as usize) else { return Ok(()) };
        transaction.execute_batch(migration)?;
        if *migration == AUDIT_CHAIN {
            chain_existing_rows(&transaction)?;
        }
        transaction.pragma_update(None, "user_version", version + 1)?;
        transaction.pragma_update(None, "application_id", APPLICATION_ID)?;
        transaction.commit()?;
    }
}
