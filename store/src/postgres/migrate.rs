//! Versioned migrations of the PostgreSQL schema. Each migration runs in one transaction together
//! with the new version number, under a lock, so that two processes that start at once do not
//! interfere.

use super::OpenError;
use super::directory::audit::chain_existing_rows;
use crate::postgres::session::Session;
use crate::row::RowReader;

const MIGRATIONS: [&str; 10] = [
    include_str!("../../migrations/postgres/0001_init.sql"),
    include_str!("../../migrations/postgres/0002_tool_calls.sql"),
    include_str!("../../migrations/postgres/0003_undelivered_requests.sql"),
    include_str!("../../migrations/postgres/0004_access_rules.sql"),
    include_str!("../../migrations/postgres/0005_credentials.sql"),
    include_str!("../../migrations/postgres/0006_approvals.sql"),
    include_str!("../../migrations/postgres/0007_limits_and_switches.sql"),
    AUDIT_CHAIN,
    include_str!("../../migrations/postgres/0009_existing_tool_services.sql"),
    include_str!("../../migrations/postgres/0010_agents.sql"),
];

/// The program chains the rows of the audit log after this migration.
const AUDIT_CHAIN: &str = include_str!("../../migrations/postgres/0008_audit_chain.sql");

/// The schema version that this program writes.
const POSTGRES_SCHEMA_VERSION: i64 = MIGRATIONS.len() as i64;

/// Begins a migration under a lock, whose number differs from that of the writer lease.
const BEGIN_MIGRATION_SQL: &str = "BEGIN; SELECT pg_advisory_xact_lock(1413697091); \
     SET LOCAL client_min_messages = warning; CREATE SCHEMA IF NOT EXISTS toolcrib; \
     CREATE TABLE IF NOT EXISTS toolcrib.schema_version (version BIGINT PRIMARY KEY)";

/// Migrates a database to the current schema version.
pub(super) async fn migrate(session: &Session) -> Result<(), OpenError> {
    // A read-only user may lack the right to create a schema.
    if find_installed_version(session).await? == Some(POSTGRES_SCHEMA_VERSION) {
        return Ok(());
    }
    session.batch_execute(BEGIN_MIGRATION_SQL).await?;
    let result = apply_migrations(session).await;
    session.batch_execute(if result.is_ok() { "COMMIT" } else { "ROLLBACK" }).await?;
    result
}

async fn find_installed_version(session: &Session) -> Result<Option<i64>, OpenError> {
    let sql = "SELECT (to_regclass('toolcrib.schema_version') IS NOT NULL)::int::bigint";
    let exists = session.query_first(sql, &[]).await?.map(|row| row.integer(0)).transpose();
    if exists.map_err(super::SessionError::from)? != Some(1) {
        return Ok(None);
    }
    read_version(session).await.map(Some)
}

async fn read_version(session: &Session) -> Result<i64, OpenError> {
    let sql = "SELECT coalesce(max(version), 0) FROM toolcrib.schema_version";
    let row = session.query_first(sql, &[]).await?.map(|row| row.integer(0)).transpose();
    let found = row.map_err(super::SessionError::from)?.unwrap_or(0);
    if found > POSTGRES_SCHEMA_VERSION {
        return Err(OpenError::NewerSchema { found, known: POSTGRES_SCHEMA_VERSION });
    }
    Ok(found)
}

async fn apply_migrations(session: &Session) -> Result<(), OpenError> {
    let found = read_version(session).await?;
    if found == 0 && has_foreign_tables(session).await? {
        return Err(OpenError::ForeignTables);
    }
    for (next, migration) in
        (1..=POSTGRES_SCHEMA_VERSION).zip(MIGRATIONS).filter(|(next, _)| *next > found)
    {
        session.batch_execute(migration).await?;
        if migration == AUDIT_CHAIN {
            chain_existing_rows(session).await?;
        }
        session.execute("INSERT INTO toolcrib.schema_version VALUES ($1)", &[&next]).await?;
    }
    Ok(())
}

/// Returns true if tables of another program have the names that Toolcrib needs.
async fn has_foreign_tables(session: &Session) -> Result<bool, OpenError> {
    let sql = "SELECT count(*) FROM unnest(ARRAY['public.cards', 'resource.tools', \
               'resource.project_agents', 'state.agent_inbox', 'state.execution_edges']) AS t(n) \
               WHERE to_regclass(t.n) IS NOT NULL";
    let count = session.query_first(sql, &[]).await?.map(|row| row.integer(0)).transpose();
    Ok(count.map_err(super::SessionError::from)?.unwrap_or(0) > 0)
}
