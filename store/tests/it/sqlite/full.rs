//! A full disk: each write is refused as a whole, everything else continues, and writes succeed
//! again once there is space.
//!
//! The test simulates a full disk with the system's file size limit, which applies to root as well
//! and needs no mount. The limit applies to the whole process, so the test runs itself again in a
//! process where it is the only test.

use std::process::Command;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use toolcrib::domain::call::{Call, Status};
use toolcrib::ports::store::Store;
use toolcrib_store::SqliteStore;

use super::is_unavailable;
use crate::support::{
    NOW, call, creating, database_in, ended, found, history, ids_of, json, key, of_call,
    of_project, put, put_with_status, read, requested, save, saving,
};

/// Set in the process that runs this test alone.
const ALONE: &str = "TOOLCRIB_TEST_FULL_DISK";
const TEST: &str = "a_full_disk_refuses_writes_and_nothing_else";

#[test]
fn a_full_disk_refuses_writes_and_nothing_else() {
    if std::env::var_os(ALONE).is_some() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        return runtime.block_on(run_alone());
    }
    let (_, module) = module_path!().split_once("::").unwrap();
    // The signal that accompanies the limit would end the process; a full disk sends no signal.
    let ran = Command::new("sh")
        .args(["-c", "trap '' XFSZ; exec \"$0\" \"$@\""])
        .arg(std::env::current_exe().unwrap())
        .args([&format!("{module}::{TEST}"), "--exact", "--nocapture", "--test-threads=1"])
        .env(ALONE, "yes")
        .output()
        .unwrap();
    let stdout = String::from_utf8_lossy(&ran.stdout);
    let stderr = String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success(), "{stdout}\n{stderr}");
    assert!(stdout.contains("1 passed"), "{stdout}\n{stderr}");
}

/// Prevents every file from growing beyond this size, until `lift_file_size_limit` is called.
fn limit_file_size(bytes: u64) {
    let maximum = getrlimit(Resource::Fsize).maximum;
    setrlimit(Resource::Fsize, Rlimit { current: Some(bytes), maximum }).unwrap();
}

fn lift_file_size_limit() {
    let maximum = getrlimit(Resource::Fsize).maximum;
    setrlimit(Resource::Fsize, Rlimit { current: maximum, maximum }).unwrap();
}

async fn run_alone() {
    let directory = tempfile::tempdir().unwrap();
    let path = database_in(&directory);
    let store = SqliteStore::open_for_admin(&path).unwrap();
    survives_a_full_disk(&store).await;
    drop(store);
    // Again with the settings of a server, and on the database that the first pass left behind.
    let store = SqliteStore::open(&path).unwrap();
    survives_a_full_disk(&store).await;
    let stored = ids_of(&store, "p").await;
    drop(store);
    let store = SqliteStore::open(&path).unwrap();
    assert_eq!(ids_of(&store, "p").await, stored);
    assert_eq!(store.check_integrity().await.unwrap(), "ok");
}

/// A call large enough to fill the disk soon.
fn large() -> Call {
    let mut large = call();
    large.target.args = json(&format!("\"{}\"", "x".repeat(20_000)));
    large
}

async fn survives_a_full_disk(store: &SqliteStore) {
    let waiting = put_with_status(store, &call(), Status::Running).await;
    // More than the WAL holds after the database was created.
    limit_file_size(900_000);
    let (mut accepted, mut refused) = (vec![], vec![]);
    for _ in 0..200 {
        let call = large();
        let key = Some(key("ada", call.id.as_str(), "f"));
        let created = creating(store, &call, vec![requested()], key).await;
        if created.is_ok() {
            assert!(refused.is_empty(), "no write succeeds after the disk is full");
            accepted.push(call);
        } else {
            assert!(is_unavailable(&created), "{created:?}");
            refused.push(call);
        }
        if refused.len() == 5 {
            break;
        }
    }
    assert!(!accepted.is_empty() && refused.len() == 5, "{} {}", accepted.len(), refused.len());
    let mut done = ended(&waiting, Status::Succeeded, NOW + 9);
    // Larger than the refused calls, so that it does not fit into the remaining space.
    let result = json(&format!("\"{}\"", "y".repeat(60_000)));
    done.outcome.as_mut().unwrap().data = Some(result);
    assert!(is_unavailable(&saving(store, &done, vec![requested()]).await));
    // None of the refused writes had an effect, and everything can be read.
    for call in &accepted {
        assert_eq!(read(store, call).await, *call);
        assert_eq!(history(store, of_call(call)).await.len(), 1);
    }
    for call in &refused {
        assert_eq!(found(store, call).await, None);
    }
    assert_eq!(read(store, &waiting).await, waiting);
    let events = history(store, of_project("p")).await.len();
    assert_eq!(events, ids_of(store, "p").await.len(), "one event for each call");
    assert_eq!(store.check_integrity().await.unwrap(), "ok");
    lift_file_size_limit();
    store.check_health().await.unwrap();
    for call in &refused {
        put(store, call).await;
    }
    save(store, &done).await;
    assert_eq!(read(store, &done).await, done);
    assert_eq!(history(store, of_project("p")).await.len(), events + refused.len());
}
