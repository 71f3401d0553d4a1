//! Reads that run concurrently with the writer, on a few connections used from blocking threads.
//!
//! A read is one transaction: all its statements see the same commit. It is also short, because the
//! WAL cannot start again at its beginning while a read uses it.

use std::path::PathBuf;
use std::time::Duration;

use parking_lot::Mutex;
use rusqlite::{Connection, OpenFlags, Row, ToSql};
use toolcrib::ports::store::StoreError;

/// Maximum number of idle connections that the pool retains.
const MAX_IDLE_CONNECTIONS: usize = 4;

/// Maximum time a connection waits for another process to release the database.
pub(super) const BUSY_TIMEOUT: Duration = Duration::from_secs(5);

/// A pool of idle read connections.
pub(super) struct ReadConnectionPool {
    path: PathBuf,
    idle: Mutex<Vec<Connection>>,
}

impl ReadConnectionPool {
    pub(super) fn new(path: PathBuf) -> Self {
        Self { path, idle: Mutex::default() }
    }

    pub(super) fn with_connection<T>(
        &self,
        read: impl FnOnce(&Connection) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let idle = self.idle.lock().pop();
        let connection = match idle {
            Some(connection) => connection,
            None => self.open().map_err(|error| to_store_error(&error))?,
        };
        let seen = read_snapshot(&connection, read);
        // A connection that is still inside a transaction would block the WAL from now on.
        if !connection.is_autocommit() {
            return seen;
        }
        let mut idle = self.idle.lock();
        if idle.len() < MAX_IDLE_CONNECTIONS {
            idle.push(connection);
        }
        seen
    }

    fn open(&self) -> rusqlite::Result<Connection> {
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let connection = Connection::open_with_flags(&self.path, flags)?;
        connection.busy_timeout(BUSY_TIMEOUT)?;
        connection.execute_batch("PRAGMA query_only = ON; PRAGMA cache_size = -1024;")?;
        connection.set_prepared_statement_cache_capacity(32);
        Ok(connection)
    }
}

/// Reads within one transaction.
fn read_snapshot<T>(
    connection: &Connection,
    read: impl FnOnce(&Connection) -> Result<T, StoreError>,
) -> Result<T, StoreError> {
    let run = |sql: &str| connection.prepare_cached(sql)?.execute([]).map(|_| ());
    run("BEGIN").map_err(|error| to_store_error(&error))?;
    let seen = read(connection);
    // Some errors end the transaction.
    if !connection.is_autocommit() {
        run("COMMIT").map_err(|error| to_store_error(&error))?;
    }
    seen
}

/// Converts an error of SQLite. The message goes to the log and never contains data.
pub(super) fn to_store_error(error: &rusqlite::Error) -> StoreError {
    use rusqlite::ErrorCode as E;
    match error {
        rusqlite::Error::SqliteFailure(code, _)
            if matches!(code.code, E::DatabaseCorrupt | E::NotADatabase | E::TypeMismatch) =>
        {
            StoreError::Corrupt(error.to_string())
        }
        _ => StoreError::Unavailable(error.to_string()),
    }
}

/// Runs a query and converts its rows.
pub(super) fn query_map<T>(
    connection: &Connection,
    sql: &str,
    bound: &[&dyn ToSql],
    read: impl Fn(&Row<'_>) -> Result<T, StoreError>,
) -> Result<Vec<T>, StoreError> {
    let broken = |error: rusqlite::Error| to_store_error(&error);
    let mut select = connection.prepare_cached(sql).map_err(broken)?;
    let mut rows = select.query(bound).map_err(broken)?;
    let mut all = Vec::new();
    while let Some(row) = rows.next().map_err(broken)? {
        all.push(read(row)?);
    }
    Ok(all)
}
