//! The audit log: a chain of rows in which every row follows from the one before it.

use toolcrib::domain::directory::AuditEntry;
use toolcrib::domain::directory::audit::{
    AuditRow, AuditVerification, AuditVerifier, FIRST_HASH, RequestOrigin,
};
use toolcrib::ports::store::Store;
use toolcrib::ports::store::audit::{AuditFilter, AuditOrder};

use super::directory::entry;
use crate::support::NOW;

/// Returns all rows, oldest first.
pub async fn rows(store: &dyn Store) -> Vec<AuditRow> {
    page(store, None, AuditOrder::OldestFirst { after: 0 }, usize::MAX).await
}

async fn page(
    store: &dyn Store,
    project: Option<&str>,
    order: AuditOrder,
    limit: usize,
) -> Vec<AuditRow> {
    let filter = AuditFilter { project: project.map(str::to_owned), order, limit };
    store.audit().audit_rows(filter).await.unwrap()
}

/// Checks all rows against the chain.
pub async fn verify(store: &dyn Store) -> AuditVerification {
    let chain = store.audit().audit_chain().await.unwrap();
    let mut verifier = AuditVerifier::new(chain, None);
    rows(store).await.iter().for_each(|row| verifier.check(row));
    verifier.finish()
}

/// Appends entries of consecutive times.
pub async fn append(store: &dyn Store, count: u64) {
    for n in 0..count {
        let entry = AuditEntry { at_ms: NOW + n, ..entry("p", &format!("subject {n}")) };
        store.append_audit_entry(entry).await.unwrap();
    }
}

pub async fn an_audit_row_is_read_back_with_its_actor_and_origin(store: &dyn Store) {
    let full = AuditEntry {
        user: Some("ünal".into()),
        credential: Some("key_1".into()),
        origin: RequestOrigin {
            transport: Some("http".into()),
            peer: Some("127.0.0.1".into()),
            request_id: Some("req_1".into()),
        },
        ..entry("p", "with \"quotes\" and\nlines\u{7f}")
    };
    store.append_audit_entry(full.clone()).await.unwrap();
    let odd = AuditEntry { reason: "nul \0 inside".into(), ..entry("p", "x") };
    store.append_audit_entry(odd.clone()).await.unwrap();
    let rows = rows(store).await;
    assert_eq!(rows[0].entry, full);
    assert_eq!(rows[1].entry, odd.storable());
    assert_eq!((rows[0].number, rows[1].number), (1, 2));
    assert_eq!(verify(store).await.problems, []);
}

pub async fn the_audit_log_is_a_chain(store: &dyn Store) {
    assert_eq!(store.audit().audit_chain().await.unwrap().head.hash, FIRST_HASH);
    append(store, 5).await;
    let found = verify(store).await;
    assert_eq!((found.problems, found.entries, found.head.number), (vec![], 5, 5));
    let rows = rows(store).await;
    assert_eq!(found.head.hash, rows[4].hash);
    let hashes: std::collections::HashSet<&String> = rows.iter().map(|row| &row.hash).collect();
    assert_eq!(hashes.len(), 5);
}

pub async fn concurrent_audit_entries_make_one_chain(store: &dyn Store) {
    let appends = (0..200).map(|n| store.append_audit_entry(entry("p", &n.to_string())));
    futures::future::try_join_all(appends).await.unwrap();
    let found = verify(store).await;
    assert_eq!((found.problems, found.entries), (vec![], 200));
}

pub async fn audit_rows_are_read_in_pages_of_both_orders(store: &dyn Store) {
    for project in ["p", "q", "p", "q", "p"] {
        store.append_audit_entry(entry(project, "s")).await.unwrap();
    }
    let numbers = async |project, order, limit| -> Vec<u64> {
        page(store, project, order, limit).await.iter().map(|row| row.number).collect()
    };
    let newest = |before| AuditOrder::NewestFirst { before };
    let oldest = |after| AuditOrder::OldestFirst { after };
    assert_eq!(numbers(None, newest(u64::MAX), 2).await, [5, 4]);
    assert_eq!(numbers(None, newest(4), 2).await, [3, 2]);
    assert_eq!(numbers(Some("p"), newest(5), 9).await, [3, 1]);
    assert_eq!(numbers(None, oldest(0), 2).await, [1, 2]);
    assert_eq!(numbers(Some("q"), oldest(2), 9).await, [4]);
    assert_eq!(numbers(None, oldest(5), 9).await, [] as [u64; 0]);
}

pub async fn a_pruned_audit_log_still_verifies(store: &dyn Store) {
    append(store, 6).await;
    assert_eq!(store.audit().prune_audit_log(NOW + 3, NOW + 9, 2).await.unwrap(), 2);
    assert_eq!(store.audit().prune_audit_log(NOW + 3, NOW + 9, 2).await.unwrap(), 1);
    assert_eq!(store.audit().prune_audit_log(NOW + 3, NOW + 9, 2).await.unwrap(), 0);
    let found = verify(store).await;
    assert_eq!((found.problems, found.entries, found.pruned), (vec![], 3, 3));
    append(store, 1).await;
    assert_eq!(rows(store).await.last().unwrap().number, 7);
    // All of it: numbers go on.
    assert_eq!(store.audit().prune_audit_log(u64::MAX, u64::MAX, 100).await.unwrap(), 4);
    append(store, 1).await;
    let found = verify(store).await;
    assert_eq!((found.problems, found.entries, found.pruned), (vec![], 1, 7));
    assert_eq!(found.head.number, 8);
}

pub async fn pruning_stops_at_the_first_young_entry(store: &dyn Store) {
    for at_ms in [NOW, NOW + 9, NOW + 1] {
        store.append_audit_entry(AuditEntry { at_ms, ..entry("p", "s") }).await.unwrap();
    }
    assert_eq!(store.audit().prune_audit_log(NOW + 5, NOW + 9, 100).await.unwrap(), 1);
    assert_eq!(rows(store).await.len(), 2);
    assert_eq!(verify(store).await.problems, []);
}

pub async fn an_entry_with_a_future_time_does_not_stop_pruning(store: &dyn Store) {
    let (now, future) = (NOW + 100, NOW + 9_000);
    for at_ms in [NOW, future, NOW + 1, future, NOW + 90, NOW + 2, future] {
        store.append_audit_entry(AuditEntry { at_ms, ..entry("p", "s") }).await.unwrap();
    }
    assert_eq!(store.audit().prune_audit_log(NOW + 50, now, 2).await.unwrap(), 2);
    assert_eq!(store.audit().prune_audit_log(NOW + 50, now, 2).await.unwrap(), 1);
    // The next one is young, and so may be the future one before it.
    assert_eq!(store.audit().prune_audit_log(NOW + 50, now, 2).await.unwrap(), 0);
    assert_eq!(rows(store).await.len(), 4);
    assert_eq!(verify(store).await.problems, []);
    assert_eq!(store.audit().prune_audit_log(NOW + 95, now, 100).await.unwrap(), 3);
    assert_eq!(rows(store).await.len(), 1, "the last one is kept until a later one is old");
    assert_eq!(verify(store).await.problems, []);
}

pub async fn a_purge_of_calls_keeps_the_audit_log(store: &dyn Store) {
    append(store, 3).await;
    store.purge(NOW + 100, 100).await.unwrap();
    assert_eq!(rows(store).await.len(), 3);
}
