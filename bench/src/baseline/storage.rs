//! The baseline's storage: one table, one writer, group commit into a preallocated WAL.
//!
//! The writer takes all queued changes, writes them in one transaction, flushes it, and only then
//! notifies the waiting requests. It never reports a change before its flush has returned.

use std::path::Path;
use std::sync::{Arc, mpsc};

use rusqlite::{Connection, Row, params};
use serde_json::value::RawValue;
use tokio::sync::{oneshot, watch};

use super::{BaselineCall, RESULT, SOURCE};

/// Maximum number of changes that share a flush.
const MAX_GROUP: usize = 512;
/// Number of pages (32 MiB) at which a checkpoint copies the WAL into the database; the WAL then
/// restarts from its beginning.
const CHECKPOINT_PAGES: u32 = 8192;
/// Minimum size to which the WAL is preallocated: a quarter more than it reaches before it
/// restarts, so that a reader that delays a checkpoint does not make it grow.
const LOG_MIB: usize = 40;

/// A change of one row.
pub(super) enum Change {
    /// A new call.
    Insert(Arc<BaselineCall>),
    /// The call with this id succeeded, at this time.
    Finish(String, String),
}

/// A change, and the channel that is notified once it is flushed; dropped without a message when
/// the change could not be committed.
pub(super) struct WriteRequest {
    pub(super) change: Change,
    pub(super) flushed: oneshot::Sender<()>,
}

/// Opens the database for the writer, creates the table, and preallocates the WAL.
///
/// This must be the first connection, and it must stay open: the last connection to close removes
/// the WAL.
pub(super) fn open_writer(path: &Path) -> rusqlite::Result<Connection> {
    let connection = Connection::open(path)?;
    // Without rowid, so that a row is written to one tree instead of two; ids ascend.
    connection.execute_batch(
        "PRAGMA journal_mode = WAL;
         PRAGMA wal_autocheckpoint = 0;
         CREATE TABLE IF NOT EXISTS tool_calls (
             id TEXT PRIMARY KEY NOT NULL,
             run_id TEXT NOT NULL,
             tool_name TEXT NOT NULL,
             status TEXT NOT NULL,
             args TEXT NOT NULL,
             result TEXT,
             created_at TEXT NOT NULL,
             completed_at TEXT
         ) WITHOUT ROWID;",
    )?;
    grow_log(&connection)?;
    connection.execute_batch("PRAGMA synchronous = FULL;")?;
    connection.pragma_update(None, "wal_autocheckpoint", CHECKPOINT_PAGES)?;
    Ok(connection)
}

/// Opens a read-only connection.
pub(super) fn open_reader(path: &Path) -> rusqlite::Result<Connection> {
    let connection = Connection::open(path)?;
    connection.execute_batch("PRAGMA query_only = ON;")?;
    Ok(connection)
}

/// Writes a MiB repeatedly, so that the WAL has its blocks before the first call: flushing blocks
/// that already exist does not have to write the file's size as well. Then restarts the WAL without
/// truncating it, and removes the filler from the database.
///
/// The bytes are random because SQLite does not write a page that would not change.
fn grow_log(connection: &Connection) -> rusqlite::Result<()> {
    connection.execute_batch(
        "PRAGMA synchronous = OFF;
         CREATE TABLE filler (bytes BLOB);
         INSERT INTO filler VALUES (zeroblob(1));",
    )?;
    for _ in 0..LOG_MIB {
        connection.execute("UPDATE filler SET bytes = randomblob(1048576)", [])?;
    }
    // FULL before the checkpoint, so that the checkpoint flushes both files.
    connection.execute_batch("DROP TABLE filler; VACUUM; PRAGMA synchronous = FULL;")?;
    connection.query_row("PRAGMA wal_checkpoint(RESTART)", [], |_| Ok(()))
}

/// Commits queued changes until all senders are gone.
pub(super) fn write_loop(
    connection: &Connection,
    queue: &mpsc::Receiver<WriteRequest>,
    commits: &watch::Sender<()>,
) {
    let mut group = Vec::with_capacity(MAX_GROUP);
    while let Ok(first) = queue.recv() {
        group.push(first);
        // Takes only the changes that are already queued. Pausing to gather more was tried on a
        // disk that flushes in about 0.1 ms; it was slower with 8 callers and no faster with 64.
        group.extend(queue.try_iter().take(MAX_GROUP - 1));
        match commit(connection, &group) {
            Ok(()) => {
                for WriteRequest { change, flushed: done } in group.drain(..) {
                    // Drop the reference to the call first, so that the notified request is its
                    // only owner.
                    drop(change);
                    let _ = done.send(());
                }
                commits.send_replace(());
            }
            Err(error) => {
                eprintln!("baseline: {} changes are lost: {error}", group.len());
                if !connection.is_autocommit() {
                    let _ = connection.execute_batch("ROLLBACK");
                }
                // Dropping the group notifies every request in it that its change was not made.
                group.clear();
            }
        }
    }
}

fn commit(connection: &Connection, group: &[WriteRequest]) -> rusqlite::Result<()> {
    connection.prepare_cached("BEGIN IMMEDIATE")?.execute([])?;
    let mut insert = connection.prepare_cached(
        "INSERT INTO tool_calls (id, run_id, tool_name, status, args, created_at)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
    )?;
    let mut finish = connection.prepare_cached(
        "UPDATE tool_calls SET status = 'SUCCEEDED', result = ?2, completed_at = ?3
         WHERE id = ?1",
    )?;
    for op in group {
        match &op.change {
            Change::Insert(call) => insert.execute(params![
                call.tool_call_id,
                call.run_id,
                call.tool_name,
                call.status,
                call.args.get(),
                call.created_at,
            ])?,
            Change::Finish(id, completed_at) => {
                finish.execute(params![id, RESULT, completed_at])?
            }
        };
    }
    connection.prepare_cached("COMMIT")?.execute([])?;
    Ok(())
}

/// Returns the call with this id.
pub(super) fn find(connection: &Connection, id: &str) -> rusqlite::Result<BaselineCall> {
    let mut select = connection.prepare_cached(
        "SELECT id, run_id, tool_name, status, args, result, created_at, completed_at
         FROM tool_calls WHERE id = ?1",
    )?;
    select.query_row([id], |row| {
        Ok(BaselineCall {
            tool_call_id: row.get(0)?,
            run_id: row.get(1)?,
            tool_name: row.get(2)?,
            source: SOURCE,
            status: match row.get_ref(3)?.as_str()? {
                "SUCCEEDED" => "SUCCEEDED",
                _ => "RUNNING",
            },
            args: raw_json(row, 4)?.unwrap_or_default(),
            result: raw_json(row, 5)?,
            error: None,
            created_at: row.get(6)?,
            completed_at: row.get(7)?,
        })
    })
}

/// Reads JSON that was validated when it arrived and is returned unchanged.
fn raw_json(row: &Row<'_>, column: usize) -> rusqlite::Result<Option<Box<RawValue>>> {
    let text: Option<String> = row.get(column)?;
    Ok(text.and_then(|text| RawValue::from_string(text).ok()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn size(path: &Path) -> u64 {
        std::fs::metadata(path).unwrap().len()
    }

    fn setting(connection: &Connection, name: &str) -> i64 {
        connection.pragma_query_value(None, name, |row| row.get(0)).unwrap()
    }

    #[test]
    fn the_wal_is_preallocated_and_then_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.sqlite");
        let log = dir.path().join("x.sqlite-wal");
        let writer = open_writer(&path).unwrap();
        let grown = size(&log);
        assert!(grown >= (LOG_MIB as u64) << 20, "the log has {grown} bytes");
        assert!(size(&path) < 100_000, "the filler is left in the database");
        assert_eq!(setting(&writer, "synchronous"), 2, "FULL");
        assert_eq!(setting(&writer, "wal_autocheckpoint"), i64::from(CHECKPOINT_PAGES));

        writer.execute_batch("CREATE TABLE more (n); INSERT INTO more VALUES (1);").unwrap();
        assert_eq!(size(&log), grown, "a commit was appended and not overwritten");
        // Frames in use after a few commits: few, if the WAL was restarted.
        let frames: i64 =
            writer.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |row| row.get(1)).unwrap();
        assert!((1..20).contains(&frames), "{frames} frames in use");
    }
}
