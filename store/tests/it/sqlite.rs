//! Tests of what only the SQLite store has: a file, a schema that rejects contradictions, a single
//! writer that commits in groups, and interference by disks and other programs.

mod audit;
mod constraints;
mod durability;
mod full;
mod migrations;
mod opening;
#[cfg(target_os = "linux")]
mod reads;
mod wal;
mod writing;

use std::path::Path;

use rusqlite::Connection;
use tempfile::TempDir;
use toolcrib::ports::store::StoreError;
use toolcrib_store::SqliteStore;

use crate::support::database_in;

/// Opens a store in a new temporary directory.
fn open_fresh() -> (TempDir, SqliteStore) {
    let directory = tempfile::tempdir().unwrap();
    let store = SqliteStore::open_for_admin(&database_in(&directory)).unwrap();
    (directory, store)
}

/// Opens the same file as another program would.
fn open_raw(path: &Path) -> Connection {
    Connection::open(path).unwrap()
}

fn query_number(connection: &Connection, sql: &str) -> i64 {
    connection.query_row(sql, [], |row| row.get(0)).unwrap()
}

fn is_unavailable<T>(answer: &Result<T, StoreError>) -> bool {
    matches!(answer, Err(StoreError::Unavailable(_)))
}
