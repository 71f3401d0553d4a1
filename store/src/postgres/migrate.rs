//! Versioned migrations of the PostgreSQL schema. Each migration runs in one transaction together
//! with the new version number, under a lock, so that two processes that start at once do not
//! interfere.

use super::OpenError;
use super::link::Session;
use crate::row::Fields;

const MIGRATIONS: [&str; 1] = [include_str!("../../migrations/postgres/0001_init.sql")];

/// The schema version that this program writes.
const VERSION: i64 = MIGRATIONS.len() as i64;

/// The number of this lock differs from that of the writer lease.
const BEGIN: &str = "BEGIN; SELECT pg_advisory_xact_lock(1413697091); \
     SET LOCAL client_min_messages = warning; CREATE SCHEMA IF NOT EXISTS toolcrib; \
     CREATE TABLE IF NOT EXISTS toolcrib.schema_version (version BIGINT PRIMARY KEY)";

/// Migrates a database to the current schema version.
pub(super) async fn migrate(session: &Session) -> Result<(), OpenError> {
    // A read-only user may lack the right to create a schema.
    if present(session).await? == Some(VERSION) {
        return Ok(());
    }
    session.run(BEGIN).await?;
    let made = bring_up(session).await;
    session.run(if made.is_ok() { "COMMIT" } else { "ROLLBACK" }).await?;
    made
}

async fn present(session: &Session) -> Result<Option<i64>, OpenError> {
    let sql = "SELECT (to_regclass('toolcrib.schema_version') IS NOT NULL)::int::bigint";
    let there = session.row(sql, &[]).await?.map(|row| row.number(0)).transpose();
    if there.map_err(super::Broke::from)? != Some(1) {
        return Ok(None);
    }
    version(session).await.map(Some)
}

async fn version(session: &Session) -> Result<i64, OpenError> {
    let sql = "SELECT coalesce(max(version), 0) FROM toolcrib.schema_version";
    let row = session.row(sql, &[]).await?.map(|row| row.number(0)).transpose();
    let found = row.map_err(super::Broke::from)?.unwrap_or(0);
    if found > VERSION {
        return Err(OpenError::Newer { found, known: VERSION });
    }
    Ok(found)
}

async fn bring_up(session: &Session) -> Result<(), OpenError> {
    let found = version(session).await?;
    if found == 0 && has_others(session).await? {
        return Err(OpenError::NotOurs);
    }
    for (next, migration) in (1..=VERSION).zip(MIGRATIONS).filter(|(next, _)| *next > found) {
        session.run(migration).await?;
        session.execute("INSERT INTO toolcrib.schema_version VALUES ($1)", &[&next]).await?;
    }
    Ok(())
}

/// Returns true if tables of another program have the names that Toolcrib needs.
async fn has_others(session: &Session) -> Result<bool, OpenError> {
    let sql = "SELECT count(*) FROM unnest(ARRAY['public.cards', 'resource.tools', \
               'resource.project_agents', 'state.agent_inbox', 'state.execution_edges']) AS t(n) \
               WHERE to_regclass(t.n) IS NOT NULL";
    let count = session.row(sql, &[]).await?.map(|row| row.number(0)).transpose();
    Ok(count.map_err(super::Broke::from)?.unwrap_or(0) > 0)
}
