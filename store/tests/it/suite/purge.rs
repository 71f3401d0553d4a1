//! Purge: deletes only calls that ended long enough ago, with everything that belongs to them, in
//! steps.

use toolcrib::domain::call::{Call, Status};
use toolcrib::domain::event::EventKind;
use toolcrib::ports::store::{CreateCallResult, Store};

use crate::support::{
    NOW, append, call, call_at, ended, found, history, ids_of, key, of_call, of_project, put,
    put_keyed, put_with_status, record, save,
};

/// Stores a call that ended at this time, one millisecond after its creation.
async fn put_ended(store: &dyn Store, completed_ms: u64) -> Call {
    let fresh = call_at(completed_ms - 1);
    put(store, &fresh).await;
    let done = ended(&fresh, Status::Succeeded, completed_ms);
    save(store, &done).await;
    done
}

pub async fn only_calls_that_ended_before_the_cutoff_are_deleted(store: &dyn Store) {
    let mut expected = vec![];
    for status in Status::ALL {
        let old = put_with_status(store, &call_at(NOW - 10_000), status).await;
        if !status.is_terminal() {
            expected.push(old.id);
        }
    }
    let long = call_at(NOW - 10_000);
    put(store, &long).await;
    save(store, &ended(&long, Status::Failed, NOW)).await;
    expected.push(long.id);
    put_ended(store, NOW - 1).await;
    expected.push(put_ended(store, NOW).await.id);
    expected.push(put_ended(store, NOW + 1).await.id);
    expected.reverse();
    assert_eq!(store.purge(NOW, 100).await.unwrap().calls, 5);
    assert_eq!(ids_of(store, "p").await, expected);
    assert_eq!(store.purge(NOW, 100).await.unwrap().calls, 0);
}

/// A call committed shortly after a younger one may have to wait until that one is purged, but no
/// longer.
pub async fn a_call_committed_out_of_order_is_deleted_eventually(store: &dyn Store) {
    put_ended(store, NOW + 50).await;
    put_ended(store, NOW).await;
    store.purge(NOW + 10, 100).await.unwrap();
    store.purge(NOW + 51, 100).await.unwrap();
    assert_eq!(ids_of(store, "p").await, []);
}

pub async fn events_and_idempotency_keys_are_deleted_with_their_call(store: &dyn Store) {
    let (old, young) = (call(), call());
    put_keyed(store, &old, &key("ada", "old", "f")).await;
    put_keyed(store, &young, &key("ada", "young", "f")).await;
    append(store, &old, record(EventKind::Progress)).await;
    save(store, &ended(&old, Status::Timeout, NOW + 5)).await;
    assert_eq!(store.purge(NOW + 6, 100).await.unwrap().calls, 1);
    assert_eq!(found(store, &old).await, None);
    assert_eq!(history(store, of_call(&old)).await, []);
    assert_eq!(history(store, of_project("p")).await.len(), 1);
    // A late append finds no call and has no effect.
    append(store, &old, record(EventKind::ReportIgnored)).await;
    assert_eq!(history(store, of_project("p")).await.len(), 1);
    // The key of a purged call may be reused for any request; the other key still refers to its
    // call.
    let created = put_keyed(store, &call(), &key("ada", "old", "other")).await;
    assert!(matches!(created, CreateCallResult::New));
    let created = put_keyed(store, &call(), &key("ada", "young", "f")).await;
    assert!(matches!(created, CreateCallResult::Replayed(existing) if existing.id == young.id));
}

pub async fn a_purge_deletes_at_most_its_limit_per_pass(store: &dyn Store) {
    for n in 0..7 {
        put_ended(store, NOW + n).await;
    }
    let mut steps = vec![];
    for _ in 0..4 {
        steps.push(store.purge(NOW + 100, 3).await.unwrap().calls);
    }
    assert_eq!(steps, [3, 3, 1, 0]);
    assert_eq!(ids_of(store, "p").await, []);
}

pub async fn event_numbers_are_not_reused_after_a_purge(store: &dyn Store) {
    put(store, &call()).await;
    let done = put_ended(store, NOW + 1).await;
    append(store, &done, record(EventKind::ReportIgnored)).await;
    let newest = store.last_event_number(of_call(&done)).await.unwrap();
    assert_eq!(store.purge(NOW + 2, 100).await.unwrap().calls, 1);
    let next = call();
    put(store, &next).await;
    let first = history(store, of_call(&next)).await[0].number;
    assert!(first > newest, "{first} came after {newest}");
}

pub async fn a_purge_without_a_cutoff_deletes_every_ended_call(store: &dyn Store) {
    put(store, &call()).await;
    put_ended(store, NOW + 1).await;
    assert_eq!(store.purge(0, usize::MAX).await.unwrap().calls, 0);
    assert_eq!(store.purge(u64::MAX, usize::MAX).await.unwrap().calls, 1);
    assert_eq!(ids_of(store, "p").await.len(), 1);
}
