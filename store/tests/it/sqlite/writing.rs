//! The single writer: many changes share a commit, and the store survives a lock held by another
//! program.

use std::path::Path;
use std::sync::Arc;

use toolcrib::domain::call::{Call, Status};
use toolcrib::domain::event::EventKind;
use toolcrib::ports::store::{CreateCallResult, SaveResult, Store};
use toolcrib::{CallRequest, Caller, Effect, Engine, Fault, FnTool};
use toolcrib_store::SqliteStore;

use super::{is_unavailable, open_fresh, open_raw};
use crate::support::{
    self, Answer, NOW, call, database_in, ended, file_with_suffix, found, history, ids_of, of_call,
    of_project, put, read, record, requested, running, save, saving,
};

/// Returns the number of transactions committed since the WAL was created: the counter `iChange` in
/// the header of the WAL index (sqlite.org/walformat.html).
fn commit_count(path: &Path) -> u32 {
    let index = std::fs::read(file_with_suffix(path, "-shm")).unwrap();
    u32::from_ne_bytes(index[8..12].try_into().unwrap())
}

fn creating<'a>(store: &'a dyn Store, call: &Call) -> Answer<'a, CreateCallResult> {
    support::creating(store, call, vec![requested()], None)
}

/// Polls each request once, which sends its change to the writer; none can be finished yet.
async fn submit(answers: &mut [Answer<'_, CreateCallResult>]) {
    for answer in answers {
        assert!(futures::poll!(answer.as_mut()).is_pending());
    }
}

#[tokio::test]
async fn sequential_writes_use_one_commit_each() {
    let (directory, store) = open_fresh();
    let path = database_in(&directory);
    let before = commit_count(&path);
    for _ in 0..5 {
        put(&store, &call()).await;
    }
    assert_eq!(commit_count(&path) - before, 5, "sequential writes do not share a commit");
}

#[tokio::test]
async fn a_thousand_concurrent_creates_share_a_few_commits() {
    let directory = tempfile::tempdir().unwrap();
    let path = database_in(&directory);
    let store = SqliteStore::open(&path).unwrap();
    let calls: Vec<Call> = (0..1_000).map(|_| call()).collect();
    let before = commit_count(&path);
    let mut answers: Vec<_> = calls.iter().map(|call| creating(&store, call)).collect();
    // All requests queue up while another program writes.
    let other = open_raw(&path);
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    submit(&mut answers).await;
    other.execute_batch("ROLLBACK").unwrap();
    for answer in answers {
        assert!(matches!(answer.await.unwrap(), CreateCallResult::New));
    }
    let used = commit_count(&path) - before;
    assert!((1..=10).contains(&used), "{used} commits for 1000 calls");
    assert_eq!(ids_of(&store, "p").await.len(), 1_000);
    assert_eq!(history(&store, of_project("p")).await.len(), 1_000);
}

#[tokio::test]
async fn dropping_a_pending_write_does_not_undo_it() {
    let (directory, store) = open_fresh();
    let other = open_raw(&database_in(&directory));
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    let (dropped, stayed) = (call(), call());
    let mut answers = vec![creating(&store, &dropped), creating(&store, &stayed)];
    submit(&mut answers).await;
    let waiting = answers.pop().unwrap();
    drop(answers);
    other.execute_batch("ROLLBACK").unwrap();
    assert!(matches!(waiting.await.unwrap(), CreateCallResult::New));
    assert_eq!(found(&store, &dropped).await, Some(dropped));
}

#[tokio::test]
async fn dropping_the_store_commits_all_submitted_changes() {
    let (directory, store) = open_fresh();
    let path = database_in(&directory);
    let calls: Vec<Call> = (0..100).map(|_| call()).collect();
    {
        let mut answers: Vec<_> = calls.iter().map(|call| creating(&store, call)).collect();
        let other = open_raw(&path);
        other.execute_batch("BEGIN IMMEDIATE").unwrap();
        submit(&mut answers).await;
    }
    drop(store);
    let store = SqliteStore::open_for_admin(&path).unwrap();
    assert_eq!(ids_of(&store, "p").await.len(), 100);
}

/// The database rejects one event in the middle of a group, after much of the group was written:
/// each reply is correct, and no change is stored partially.
#[tokio::test]
async fn a_failed_commit_group_leaves_no_partial_changes() {
    let (directory, store) = open_fresh();
    let other = open_raw(&database_in(&directory));
    let (existing, before, after) = (call(), call(), call());
    put(&store, &existing).await;
    let refuse = "CREATE TRIGGER no BEFORE INSERT ON events WHEN NEW.kind = 'tool.call.late' \
                  BEGIN SELECT RAISE(ABORT, 'not this one'); END; BEGIN IMMEDIATE;";
    other.execute_batch(refuse).unwrap();
    let done = ended(&existing, Status::Succeeded, NOW + 9);
    let records = vec![record(EventKind::Finished), record(EventKind::ReportIgnored)];
    let mut end = saving(&store, &done, records.clone());
    let mut answers = vec![creating(&store, &before)];
    submit(&mut answers).await;
    assert!(futures::poll!(end.as_mut()).is_pending());
    answers.push(creating(&store, &after));
    submit(&mut answers[1..]).await;
    other.execute_batch("ROLLBACK").unwrap();
    let saved = end.await;
    assert!(is_unavailable(&saved), "{saved:?}");
    assert_eq!(read(&store, &existing).await, existing);
    let mut events = 1;
    for (call, answer) in [&before, &after].into_iter().zip(answers) {
        let stored = answer.await.is_ok();
        assert_eq!(found(&store, call).await.is_some(), stored);
        events += usize::from(stored);
    }
    assert_eq!(history(&store, of_project("p")).await.len(), events);
    put(&store, &call()).await;
    assert_eq!(store.open_calls(0, 1).await.unwrap()[0].call, existing, "the call has not ended");
    other.execute_batch("DROP TRIGGER no").unwrap();
    assert_eq!(saving(&store, &done, records).await.unwrap(), SaveResult::Saved);
    assert_eq!(history(&store, of_call(&existing)).await.len(), 3);
    assert_eq!(read(&store, &existing).await, done);
}

/// Takes as long as the store waits for a lock: five seconds.
#[tokio::test]
async fn a_locked_database_refuses_writes_but_serves_reads() {
    let (directory, store) = open_fresh();
    let path = database_in(&directory);
    let (stored_call, refused) = (call(), call());
    put(&store, &stored_call).await;
    let other = open_raw(&path);
    other.execute_batch("BEGIN EXCLUSIVE").unwrap();
    let mut answers = vec![creating(&store, &refused)];
    submit(&mut answers).await;
    let reads = async {
        for _ in 0..50 {
            assert_eq!(read(&store, &stored_call).await, stored_call);
            assert_eq!(ids_of(&store, "p").await.len(), 1);
            assert_eq!(store.directory_version().await.unwrap(), 0);
        }
    };
    let (answer, ()) = tokio::join!(answers.remove(0), reads);
    assert!(is_unavailable(&answer), "{answer:?}");
    other.execute_batch("ROLLBACK").unwrap();
    assert_eq!(found(&store, &refused).await, None);
    assert_eq!(history(&store, of_project("p")).await.len(), 1);
    store.check_health().await.unwrap();
    put(&store, &refused).await;
    save(&store, &running(&stored_call)).await;
    let numbers: Vec<u64> =
        history(&store, of_project("p")).await.iter().map(|event| event.number).collect();
    assert_eq!(numbers, [1, 2], "refused writes use no event number");
}

/// Uses the engine's real event records: one more fact in any of them would cost every call a row.
#[tokio::test]
async fn a_call_that_ends_in_its_first_commit_is_one_row() {
    #[derive(serde::Deserialize, schemars::JsonSchema)]
    struct Nothing {}
    let directory = tempfile::tempdir().unwrap();
    let path = database_in(&directory);
    let store = Arc::new(SqliteStore::open(&path).unwrap());
    let noop = FnTool::new("t.noop", "Nothing", |_: Nothing| async { Ok::<u8, Fault>(1) });
    let builder = Engine::builder().store(store).tool(noop.effect(Effect::Read));
    let engine = builder.start().await.unwrap();
    let caller = Caller::local("default");
    for _ in 0..3 {
        engine.calls().invoke(&caller, CallRequest::new("t.noop", "{}").unwrap()).await.unwrap();
    }
    let rows = |table: &str| -> i64 {
        let sql = format!("SELECT count(*) FROM {table}");
        open_raw(&path).query_row(&sql, [], |row| row.get(0)).unwrap()
    };
    assert_eq!((rows("tool_calls"), rows("events")), (3, 0));
}
