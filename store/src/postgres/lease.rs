//! One server per database: an advisory lock that lives as long as the writer's connection, and a
//! generation that shows if another server has held the lock in between.

use std::time::Duration;

use super::OpenError;
use super::link::{Broke, Session};
use super::writer::Numbers;
use crate::row::Fields;

/// "TCRB", like the `application_id` of Toolcrib's SQLite files.
const LOCK: i64 = 0x5443_5242;
/// A new server retries because the connection of a server that has just exited may outlive it for
/// a moment.
const LOOKS: u32 = 40;
const LOOK: Duration = Duration::from_millis(50);

/// This server's exclusive right to assign numbers and to write.
pub(super) struct Lease {
    pub(super) owner: i64,
    /// Number of transactions that are known to be committed.
    pub(super) commits: i64,
    /// The PostgreSQL backend that holds the lock for this server: its process id and its start
    /// time.
    pub(super) holder: (i64, String),
}

/// Tries to take the lock; returns false if another session holds it.
pub(super) async fn claim(session: &Session) -> Result<bool, Broke> {
    let row = session.row("SELECT pg_try_advisory_lock($1)::int::bigint", &[&LOCK]).await?;
    Ok(row.map(|row| row.number(0)).transpose()? == Some(1))
}

/// Returns the PostgreSQL backend that serves this session.
pub(super) async fn holder(session: &Session) -> Result<(i64, String), Broke> {
    let sql = "SELECT pid::bigint, backend_start::text FROM pg_stat_activity \
               WHERE pid = pg_backend_pid()";
    let row = session.row(sql, &[]).await?;
    row.map_or(Ok((0, String::new())), |row| Ok((row.number(0)?, row.text(1)?)))
}

/// Terminates the backend of a lost session of this server. PostgreSQL may not have noticed the
/// loss yet, and would keep the lock for that session.
pub(super) async fn end(session: &Session, holder: &(i64, String)) -> Result<(), Broke> {
    let sql = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
               WHERE pid::bigint = $1 AND backend_start::text = $2";
    session.rows(sql, &[&holder.0, &holder.1]).await?;
    Ok(())
}

/// Takes the lock for a new server.
pub(super) async fn lock(session: &Session) -> Result<(), OpenError> {
    for _ in 0..LOOKS {
        if claim(session).await? {
            return Ok(());
        }
        tokio::time::sleep(LOOK).await;
    }
    Err(OpenError::Taken)
}

impl Lease {
    /// Starts a new generation of a database that is locked and migrated.
    pub(super) async fn take(session: &Session) -> Result<(Self, Numbers), OpenError> {
        let sql = "UPDATE writer SET owner = owner + 1 \
                   RETURNING owner, commits, last_event, last_place";
        let row = session.row(sql, &[]).await?.ok_or(OpenError::NotOurs)?;
        let number = |n: usize| row.number(n).map_err(|error| OpenError::from(Broke::from(error)));
        let numbers = Numbers { event: number(2)?, place: number(3)? };
        let holder = holder(session).await?;
        Ok((Self { owner: number(0)?, commits: number(1)?, holder }, numbers))
    }

    /// Counts the current transaction.
    pub(super) async fn mark(&self, session: &Session, numbers: Numbers) -> Result<(), Broke> {
        let sql = "UPDATE writer SET commits = $1, last_event = $2, last_place = $3";
        session.execute(sql, &[&(self.commits + 1), &numbers.event, &numbers.place]).await?;
        Ok(())
    }
}
