//! One server per database: an advisory lock that lives as long as the writer's connection, and a
//! generation that shows whether another server has held the lock in between.

use std::time::Duration;

use super::OpenError;
use crate::postgres::session::{Session, SessionError};
use crate::row::RowReader;

/// The key of the advisory lock: "TCRB", like the `application_id` of Toolcrib's SQLite files.
const ADVISORY_LOCK_KEY: i64 = 0x5443_5242;
/// Number of attempts of a new server to take the lock. It retries, because the connection of a
/// server that has just exited may outlive that server for a moment.
const LOCK_ATTEMPTS: u32 = 40;
const LOCK_RETRY_DELAY: Duration = Duration::from_millis(50);

/// The last numbers that were assigned.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct SequenceCounters {
    pub(super) last_event: i64,
    pub(super) last_position: i64,
}

/// This server's exclusive right to assign numbers and to write.
pub(super) struct WriterLease {
    pub(super) generation: i64,
    /// Number of transactions that are known to be committed.
    pub(super) commits: i64,
    /// The PostgreSQL backend that holds the lock for this server: its process id and its start
    /// time.
    pub(super) backend: (i64, String),
}

/// Tries to take the lock; returns false if another session holds it.
pub(super) async fn try_lock(session: &Session) -> Result<bool, SessionError> {
    let row = session
        .query_first("SELECT pg_try_advisory_lock($1)::int::bigint", &[&ADVISORY_LOCK_KEY])
        .await?;
    Ok(row.map(|row| row.integer(0)).transpose()? == Some(1))
}

/// Returns the generation of the server that took the lock last.
pub(super) async fn read_generation(session: &Session) -> Result<Option<i64>, SessionError> {
    let row = session.query_first("SELECT owner FROM writer", &[]).await?;
    Ok(row.map(|row| row.integer(0)).transpose()?)
}

/// Returns the PostgreSQL backend that serves this session.
pub(super) async fn current_backend(session: &Session) -> Result<(i64, String), SessionError> {
    let sql = "SELECT pid::bigint, backend_start::text FROM pg_stat_activity \
               WHERE pid = pg_backend_pid()";
    let row = session.query_first(sql, &[]).await?;
    row.map_or(Ok((0, String::new())), |row| Ok((row.integer(0)?, row.text(1)?)))
}

/// Terminates the backend of a lost session of this server. PostgreSQL may not have noticed the
/// loss yet, and would keep the lock for that session.
pub(super) async fn terminate_backend(
    session: &Session,
    holder: &(i64, String),
) -> Result<(), SessionError> {
    let sql = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
               WHERE pid::bigint = $1 AND backend_start::text = $2";
    session.query(sql, &[&holder.0, &holder.1]).await?;
    Ok(())
}

/// Takes the lock for a new server.
pub(super) async fn acquire_lock(session: &Session) -> Result<(), OpenError> {
    for _ in 0..LOCK_ATTEMPTS {
        if try_lock(session).await? {
            return Ok(());
        }
        tokio::time::sleep(LOCK_RETRY_DELAY).await;
    }
    Err(OpenError::AlreadyServed)
}

impl WriterLease {
    /// Starts a new generation of a database that is locked and migrated.
    pub(super) async fn acquire(session: &Session) -> Result<(Self, SequenceCounters), OpenError> {
        let sql = "UPDATE writer SET owner = owner + 1 \
                   RETURNING owner, commits, last_event, last_place";
        let row = session.query_first(sql, &[]).await?.ok_or(OpenError::ForeignTables)?;
        let number =
            |n: usize| row.integer(n).map_err(|error| OpenError::from(SessionError::from(error)));
        let numbers = SequenceCounters { last_event: number(2)?, last_position: number(3)? };
        let holder = current_backend(session).await?;
        Ok((Self { generation: number(0)?, commits: number(1)?, backend: holder }, numbers))
    }

    /// Counts the current transaction.
    pub(super) async fn record_commit(
        &self,
        session: &Session,
        numbers: SequenceCounters,
    ) -> Result<(), SessionError> {
        let sql = "UPDATE writer SET commits = $1, last_event = $2, last_place = $3";
        session
            .execute(sql, &[&(self.commits + 1), &numbers.last_event, &numbers.last_position])
            .await?;
        Ok(())
    }
}
