//! The length of the WAL: bounded while reads overlap without a pause, and short again after a read
//! that prevented it.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rusqlite::Connection;
use tempfile::TempDir;
use toolcrib::domain::call::Call;
use toolcrib_store::SqliteStore;

use super::{open_raw, query_number};
use crate::support::{call, database_in, file_with_suffix, ids_of, json, put};

/// The length that the server preallocates.
const USUAL_LENGTH: u64 = 20 << 20;
const MAX_LENGTH: u64 = 64 << 20;
/// Size of the arguments of a call, which is nearly all that the call adds to the WAL.
const ARGS_BYTES: usize = 50_000;

struct WalTest {
    _directory: TempDir,
    path: PathBuf,
    store: SqliteStore,
}

impl WalTest {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = database_in(&directory);
        let store = SqliteStore::open(&path).unwrap();
        Self { _directory: directory, path, store }
    }

    fn wal_length(&self) -> u64 {
        std::fs::metadata(file_with_suffix(&self.path, "-wal")).unwrap().len()
    }

    /// Stores calls, eight at a time, and returns the greatest length that the WAL had.
    async fn put_calls(&self, count: usize) -> u64 {
        let mut longest = 0;
        for _ in 0..count / 8 {
            let calls: Vec<Call> = (0..8).map(|_| large_call()).collect();
            futures::future::join_all(calls.iter().map(|call| put(&self.store, call))).await;
            longest = longest.max(self.wal_length());
        }
        longest
    }

    async fn wait_until_short(&self) {
        let until = tokio::time::Instant::now() + Duration::from_secs(30);
        while self.wal_length() > USUAL_LENGTH {
            assert!(tokio::time::Instant::now() < until, "{} bytes", self.wal_length());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

fn large_call() -> Call {
    let mut call = call();
    call.args = json(&format!("\"{}\"", "x".repeat(ARGS_BYTES)));
    call.target.args = call.args.clone();
    call
}

fn begin_read(connection: &Connection) {
    connection.execute_batch("BEGIN").unwrap();
    query_number(connection, "SELECT count(*) FROM counters");
}

/// Reads so that at every moment at least one of two connections is within a short transaction, as
/// with several followed event streams.
fn read_without_pause(path: &Path, stopped: &AtomicBool) {
    let connections = [open_raw(path), open_raw(path)];
    begin_read(&connections[0]);
    for n in 1.. {
        begin_read(&connections[n % 2]);
        connections[(n + 1) % 2].execute_batch("COMMIT").unwrap();
        std::thread::sleep(Duration::from_millis(2));
        if stopped.load(Ordering::Relaxed) {
            return;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_wal_stays_bounded_while_reads_overlap_without_a_pause() {
    let test = WalTest::new();
    let stopped = AtomicBool::new(false);
    std::thread::scope(|threads| {
        threads.spawn(|| read_without_pause(&test.path, &stopped));
        let work = test.put_calls(1_600);
        let longest =
            tokio::task::block_in_place(|| tokio::runtime::Handle::current().block_on(work));
        stopped.store(true, Ordering::Relaxed);
        assert!(longest <= MAX_LENGTH, "{longest} bytes");
    });
    test.wait_until_short().await;
    assert_eq!(ids_of(&test.store, "p").await.len(), 1_600);
    assert_eq!(test.store.check_integrity().await.unwrap(), "ok");
}

#[tokio::test]
async fn the_wal_is_short_again_after_a_read_that_prevented_it() {
    let test = WalTest::new();
    let reader = open_raw(&test.path);
    begin_read(&reader);
    let longest = test.put_calls(1_000).await;
    assert!(longest > USUAL_LENGTH, "the read should have prevented it: {longest} bytes");
    reader.execute_batch("COMMIT").unwrap();
    test.wait_until_short().await;
    assert_eq!(ids_of(&test.store, "p").await.len(), 1_000);
    assert_eq!(test.store.check_integrity().await.unwrap(), "ok");
}
