//! Acknowledged changes are durable: after reopening, for other connections, and in a copy of the
//! files taken while the store was writing, which is what a crash leaves behind.

use std::path::Path;

use toolcrib::domain::call::{Call, Status};
use toolcrib::domain::caller::Role;
use toolcrib::domain::directory::{ApiKey, AuditEntry, DirectoryChange, KeyAttributes};
use toolcrib::domain::event::{EventKind, EventRecord};
use toolcrib::domain::id::CallId;
use toolcrib::ports::store::{CreateCallResult, SaveResult, Store};
use toolcrib_store::SqliteStore;

use super::{open_fresh, open_raw, query_number};
use crate::support::{
    NOW, append, call, creating, database_in, ended, file_with_suffix, found, history, ids_of, key,
    of_call, of_project, put, put_keyed, put_with_status, read, record, requested, running, save,
};

fn reopen(path: &Path, store: SqliteStore) -> SqliteStore {
    drop(store);
    SqliteStore::open_for_admin(path).unwrap()
}

fn add_key_change(id: &str) -> (DirectoryChange, AuditEntry) {
    let key = ApiKey {
        id: id.into(),
        digest: format!("digest of {id}"),
        project: "p".into(),
        agent: "ada".into(),
        roles: Role::Admin.into(),
        attributes: KeyAttributes::default(),
        created_ms: NOW,
        expires_ms: None,
        revoked_ms: None,
        rejoin: true,
    };
    let entry = AuditEntry {
        at_ms: NOW,
        project: "p".into(),
        agent: "ada".into(),
        action: "key.created".into(),
        subject: id.into(),
        reason: String::new(),
        ..AuditEntry::default()
    };
    (DirectoryChange::AddKey(key), entry)
}

#[tokio::test]
async fn all_data_is_readable_after_reopening() {
    let (directory, store) = open_fresh();
    let path = database_in(&directory);
    let mut calls = vec![];
    for status in Status::ALL {
        calls.push(put_with_status(&store, &call(), status).await);
        append(&store, &calls[calls.len() - 1], record(EventKind::Progress).with("at", 0.5)).await;
    }
    let (change, entry) = add_key_change("key_1");
    assert_eq!(
        store.change_directory(change, 0, Some(entry.clone())).await.unwrap(),
        SaveResult::Saved
    );
    let events = history(&store, of_project("p")).await;
    let keys = store.directory().await.unwrap().keys;
    let store = reopen(&path, store);
    for call in &calls {
        assert_eq!(read(&store, call).await, *call);
    }
    assert_eq!(history(&store, of_project("p")).await, events);
    let directory = store.directory().await.unwrap();
    assert_eq!((directory.version, directory.keys), (1, keys));
    assert_eq!(store.audit_log(None, 10).await.unwrap(), [entry]);
}

#[tokio::test]
async fn idempotency_keys_survive_reopening() {
    let (directory, store) = open_fresh();
    let first = call();
    put_keyed(&store, &first, &key("ada", "k", "f")).await;
    let store = reopen(&database_in(&directory), store);
    let created = put_keyed(&store, &call(), &key("ada", "k", "f")).await;
    assert!(matches!(created, CreateCallResult::Replayed(existing) if *existing == first));
    let created = put_keyed(&store, &call(), &key("ada", "k", "other")).await;
    assert!(matches!(created, CreateCallResult::Mismatch(id) if id == first.id));
    assert_eq!(ids_of(&store, "p").await, [first.id]);
}

#[tokio::test]
async fn event_numbers_are_not_reused_after_a_purge_and_reopening() {
    let (directory, mut store) = open_fresh();
    let path = database_in(&directory);
    let mut newest = 0;
    for round in 0..4 {
        let done = put_with_status(&store, &call(), Status::Succeeded).await;
        append(&store, &done, record(EventKind::ReportIgnored)).await;
        let events = history(&store, of_call(&done)).await;
        assert!(events[0].number > newest, "round {round}: {} after {newest}", events[0].number);
        newest = events[events.len() - 1].number;
        assert_eq!(store.purge(NOW + 1_000, 100).await.unwrap().calls, 1);
        store = reopen(&path, store);
    }
    let next = call();
    put(&store, &next).await;
    assert!(history(&store, of_call(&next)).await[0].number > newest);
    // The same holds when the newest event is implied and has no row.
    let implied = call();
    let requested = EventRecord::new(EventKind::Requested, implied.created_ms, 0)
        .with("tool", implied.tool_name.as_str())
        .with("args_bytes", implied.target.args.text().len());
    creating(&store, &implied, vec![requested], None).await.unwrap();
    let newest = history(&store, of_call(&implied)).await[0].number;
    store = reopen(&path, store);
    let last = call();
    put(&store, &last).await;
    assert!(history(&store, of_call(&last)).await[0].number > newest);
}

#[tokio::test]
async fn open_calls_are_found_after_reopening_among_ended_ones() {
    let (directory, mut store) = open_fresh();
    let path = database_in(&directory);
    let mut open: Vec<Call> = vec![];
    for round in 0..3 {
        for status in [Status::Succeeded, Status::Pending, Status::Failed, Status::Running] {
            let created = put_with_status(&store, &call(), status).await;
            if !status.is_terminal() {
                open.push(created);
            }
        }
        // The oldest open call ends; one round purges the ended calls.
        let oldest = open.remove(0);
        save(&store, &ended(&oldest, Status::Canceled, NOW + 20)).await;
        if round == 1 {
            store.purge(NOW + 1_000, 100).await.unwrap();
        }
        store = reopen(&path, store);
        let found = store.open_calls(0, 100).await.unwrap();
        let found: Vec<Call> = found.into_iter().map(|open| open.call).collect();
        assert_eq!(found, open, "round {round}");
    }
}

/// Creates this many calls and ends all of them.
async fn create_and_end(store: &SqliteStore, count: usize) {
    let calls: Vec<Call> = (0..count).map(|_| call()).collect();
    futures::future::join_all(calls.iter().map(|call| put(store, call))).await;
    let ended: Vec<Call> =
        calls.iter().map(|call| ended(call, Status::Succeeded, NOW + 9)).collect();
    futures::future::join_all(ended.iter().map(|call| save(store, call))).await;
}

async fn open_ids(store: &SqliteStore) -> Vec<CallId> {
    let open = store.open_calls(0, 100).await.unwrap();
    open.into_iter().map(|open| open.call.id).collect()
}

#[tokio::test]
async fn a_long_open_call_is_found_after_reopening() {
    let directory = tempfile::tempdir().unwrap();
    let path = database_in(&directory);
    let store = SqliteStore::open(&path).unwrap();
    create_and_end(&store, 1_500).await;
    let open = call();
    put(&store, &open).await;
    create_and_end(&store, 1_500).await;
    drop(store);
    let store = SqliteStore::open(&path).unwrap();
    assert_eq!(open_ids(&store).await, std::slice::from_ref(&open.id));
    // The same while other calls start and end concurrently and share commits.
    let mut waiting: Vec<Call> = (0..1_500).map(|_| call()).collect();
    futures::future::join_all(waiting.iter().map(|call| put(&store, call))).await;
    for _ in 0..2 {
        let new_calls: Vec<Call> = (0..1_500).map(|_| call()).collect();
        let turns = waiting.iter().zip(&new_calls).map(async |(old, new)| {
            let done = ended(old, Status::Succeeded, NOW + 9);
            futures::join!(save(&store, &done), put(&store, new));
        });
        futures::future::join_all(turns).await;
        waiting = new_calls;
    }
    drop(store);
    let store = SqliteStore::open(&path).unwrap();
    let found = store.open_calls(0, 10_000).await.unwrap();
    assert_eq!((found.len(), &found[0].call), (1_501, &open));
}

/// An idle server: every call has ended and was purged before the next one arrives.
#[tokio::test]
async fn a_call_created_after_a_full_purge_is_found_after_reopening() {
    let directory = tempfile::tempdir().unwrap();
    let path = database_in(&directory);
    let store = SqliteStore::open(&path).unwrap();
    for _ in 0..3 {
        create_and_end(&store, 1_500).await;
    }
    let last = call();
    put(&store, &last).await;
    create_and_end(&store, 1_500).await;
    save(&store, &ended(&last, Status::Canceled, NOW + 9)).await;
    assert_eq!(store.purge(NOW + 10, 100_000).await.unwrap().calls, 6_001);
    let open = call();
    put(&store, &open).await;
    drop(store);
    let store = SqliteStore::open(&path).unwrap();
    assert_eq!(open_ids(&store).await, [open.id]);
}

#[tokio::test]
async fn a_call_ended_by_the_server_is_not_open_for_other_connections() {
    let (directory, server) = open_fresh();
    let (one, two, three) = (call(), call(), call());
    for call in [&one, &two, &three] {
        put(&server, call).await;
    }
    let operator = SqliteStore::open_for_admin(&database_in(&directory)).unwrap();
    save(&server, &ended(&one, Status::Succeeded, NOW + 9)).await;
    save(&server, &ended(&two, Status::Canceled, NOW + 9)).await;
    // An empty page would mean that there are no more.
    let page = operator.open_calls(0, 1).await.unwrap();
    assert_eq!(page[0].call, three);
    assert_eq!(open_ids(&operator).await, [three.id]);
    assert_eq!(operator.open_calls(page[0].position, 1).await.unwrap().len(), 0);
}

#[tokio::test]
async fn commits_are_visible_to_other_connections_immediately() {
    let (directory, store) = open_fresh();
    let path = database_in(&directory);
    let connection = open_raw(&path);
    let admin = SqliteStore::open_for_admin(&path).unwrap();
    for n in 1..=20 {
        let created = call();
        put(&store, &created).await;
        assert_eq!(query_number(&connection, "SELECT count(*) FROM tool_calls"), n);
        assert_eq!(read(&admin, &created).await, created);
        let next = running(&created);
        save(&store, &next).await;
        assert_eq!(read(&admin, &created).await, next);
    }
}

/// `toolcrib keys create` while a server runs.
#[tokio::test]
async fn a_directory_change_by_another_process_is_visible_to_the_server() {
    let (directory, server) = open_fresh();
    let path = database_in(&directory);
    put(&server, &call()).await;
    let operator = SqliteStore::open_for_admin(&path).unwrap();
    let (change, entry) = add_key_change("key_1");
    assert_eq!(operator.change_directory(change, 0, Some(entry)).await.unwrap(), SaveResult::Saved);
    drop(operator);
    assert_eq!(server.directory_version().await.unwrap(), 1);
    assert_eq!(server.directory().await.unwrap().keys.len(), 1);
    let (change, entry) = add_key_change("key_2");
    assert_eq!(
        server.change_directory(change.clone(), 0, None).await.unwrap(),
        SaveResult::Conflict
    );
    assert_eq!(server.change_directory(change, 1, Some(entry)).await.unwrap(), SaveResult::Saved);
    put(&server, &call()).await;
    assert_eq!(history(&server, of_project("p")).await.len(), 2);
}

/// Copies the files in their current state to another path. The WAL comes last: frames that a
/// concurrent checkpoint moves into the database are still in it.
fn copy_after_crash(path: &Path, to: &Path) -> SqliteStore {
    std::fs::copy(path, to).unwrap();
    std::fs::copy(file_with_suffix(path, "-wal"), file_with_suffix(to, "-wal")).unwrap();
    SqliteStore::open_for_admin(to).unwrap()
}

#[tokio::test]
async fn all_acknowledged_changes_are_present_after_a_crash() {
    let directory = tempfile::tempdir().unwrap();
    let path = database_in(&directory);
    let store = SqliteStore::open(&path).unwrap();
    let mut acknowledged: Vec<Call> = vec![];
    // The last step is long enough for a checkpoint to happen during it.
    for (step, count) in [1, 10, 300, 3_000].into_iter().enumerate() {
        let calls: Vec<Call> = (0..count).map(|_| call()).collect();
        let creates = calls.iter().map(|call| {
            let key = Some(key("ada", call.id.as_str(), "f"));
            creating(&store, call, vec![requested()], key)
        });
        for created in futures::future::join_all(creates).await {
            assert!(matches!(created.unwrap(), CreateCallResult::New));
        }
        acknowledged.extend(calls);
        let last = acknowledged.len() - 1;
        let done = ended(&acknowledged[last], Status::Succeeded, NOW + 9);
        save(&store, &done).await;
        acknowledged[last] = done;
        let copy = copy_after_crash(&path, &directory.path().join(format!("crashed-{step}.db")));
        assert_eq!(ids_of(&copy, "p").await.len(), acknowledged.len());
        assert_eq!(history(&copy, of_project("p")).await.len(), acknowledged.len());
        for call in acknowledged.iter().rev().take(20).chain(&acknowledged[..1]) {
            assert_eq!(read(&copy, call).await, *call);
        }
        let again = key("ada", acknowledged[0].id.as_str(), "f");
        let created = put_keyed(&copy, &call(), &again).await;
        assert!(matches!(created, CreateCallResult::Replayed(_)));
        assert_eq!(copy.check_integrity().await.unwrap(), "ok");
    }
}

/// The power fails during a flush, so the WAL ends at an arbitrary byte. Commits before the tear
/// are present and complete; a call is never stored without its event.
#[tokio::test]
async fn a_torn_wal_yields_complete_commits_in_order() {
    let (directory, store) = open_fresh();
    let path = database_in(&directory);
    let mut calls = vec![];
    let mut lengths = vec![];
    for _ in 0..12 {
        calls.push(call());
        put(&store, &calls[calls.len() - 1]).await;
        lengths.push(std::fs::metadata(file_with_suffix(&path, "-wal")).unwrap().len());
    }
    let (database, log) =
        (std::fs::read(&path).unwrap(), std::fs::read(file_with_suffix(&path, "-wal")));
    let log = log.unwrap();
    let tears = lengths.iter().flat_map(|length| [length - 5_000, length - 1, *length]);
    for (n, tear) in tears.enumerate() {
        let copy = directory.path().join(format!("torn-{n}.db"));
        std::fs::write(&copy, &database).unwrap();
        std::fs::write(file_with_suffix(&copy, "-wal"), &log[..tear as usize]).unwrap();
        let torn = SqliteStore::open_for_admin(&copy).unwrap();
        let whole = lengths.iter().filter(|length| **length <= tear).count();
        for (n, call) in calls.iter().enumerate() {
            let expected = (n < whole).then(|| call.clone());
            assert_eq!(found(&torn, call).await, expected, "call {n} of a log of {tear} bytes");
        }
        assert_eq!(history(&torn, of_project("p")).await.len(), whole);
        assert_eq!(torn.check_integrity().await.unwrap(), "ok");
        put(&torn, &call()).await;
    }
}

/// The server preallocates its WAL in chunks while it is idle, and calls arrive in between. Calls
/// stored before, between and after are present, even if the machine stops at any of these points.
#[tokio::test]
async fn preallocating_the_wal_while_idle_loses_no_call() {
    let directory = tempfile::tempdir().unwrap();
    let path = database_in(&directory);
    let store = SqliteStore::open(&path).unwrap();
    let length = || std::fs::metadata(file_with_suffix(&path, "-wal")).unwrap().len();
    let mut stored = vec![call()];
    put(&store, &stored[0]).await;
    let first = length();
    assert!(first < 2 << 20, "preallocation does not delay the start: {first} bytes");
    while length() < 20 << 20 {
        let seen = length();
        let copy = copy_after_crash(&path, &directory.path().join(format!("at-{seen}.db")));
        assert_eq!(ids_of(&copy, "p").await.len(), stored.len());
        assert_eq!(copy.check_integrity().await.unwrap(), "ok");
        while length() == seen {
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
        stored.push(call());
        put(&store, &stored[stored.len() - 1]).await;
    }
    let calls: Vec<Call> = (0..500).map(|_| call()).collect();
    futures::future::join_all(calls.iter().map(|call| put(&store, call))).await;
    assert_eq!(length(), 20 << 20, "the preallocated WAL is overwritten, not extended");
    let copy = copy_after_crash(&path, &directory.path().join("grown.db"));
    assert_eq!(ids_of(&copy, "p").await.len(), stored.len() + calls.len());
    for call in stored.iter().chain(&calls) {
        assert_eq!(read(&copy, call).await, *call);
    }
}
