//! The audit log against other programs that write to the file.

use toolcrib_store::SqliteStore;

use super::{open_fresh, open_raw, query_number};
use crate::suite::audit::{append, rows, verify};
use crate::support::database_in;

/// Runs statements of another program, which drops the triggers first.
fn tamper(directory: &tempfile::TempDir, sql: &str) {
    let other = open_raw(&database_in(directory));
    let drop = "DROP TRIGGER audit_is_never_changed; \
                DROP TRIGGER audit_is_deleted_by_retention_only;";
    other.execute_batch(drop).unwrap();
    other.execute_batch(sql).unwrap();
}

#[tokio::test]
async fn the_database_refuses_changes_of_the_audit_log() {
    let (directory, store) = open_fresh();
    append(&store, 3).await;
    let other = open_raw(&database_in(&directory));
    for sql in [
        "UPDATE audit SET reason = 'allowed' WHERE number = 2",
        "DELETE FROM audit WHERE number = 3",
        "DELETE FROM audit",
    ] {
        let error = other.execute(sql, []).expect_err(sql);
        assert!(error.to_string().contains("append-only"), "{error}");
    }
    assert_eq!(query_number(&other, "SELECT count(*) FROM audit"), 3);
}

#[tokio::test]
async fn every_kind_of_tampering_is_found() {
    for (sql, at) in [
        ("UPDATE audit SET reason = 'allowed' WHERE number = 2", 2),
        ("UPDATE audit SET at_ms = at_ms + 1 WHERE number = 1", 1),
        ("UPDATE audit SET peer = '10.0.0.1' WHERE number = 4", 4),
        ("UPDATE audit SET hash = replace(hash, 'a', 'b') WHERE number = 2", 2),
        ("DELETE FROM audit WHERE number = 2", 3),
        ("DELETE FROM audit WHERE number = 1", 2),
        ("DELETE FROM audit WHERE number >= 4", 4),
        ("DELETE FROM audit", 4),
        (
            "UPDATE audit SET number = 9 WHERE number = 2; \
             UPDATE audit SET number = 2 WHERE number = 3; \
             UPDATE audit SET number = 3 WHERE number = 9",
            2,
        ),
        (
            "INSERT INTO audit SELECT 5, at_ms, project, agent, action, subject, reason, user, \
             credential, transport, peer, request_id, hash FROM audit WHERE number = 4",
            5,
        ),
    ] {
        let (directory, store) = open_fresh();
        append(&store, 4).await;
        assert_eq!(verify(&store).await.problems, []);
        tamper(&directory, sql);
        let problems = verify(&store).await.problems;
        assert_eq!(problems.first().map(|problem| problem.number), Some(at), "{sql}: {problems:?}");
        // The log goes on, and what was found stays found.
        append(&store, 1).await;
        assert!(!verify(&store).await.problems.is_empty(), "{sql}");
    }
}

#[tokio::test]
async fn entries_of_a_log_without_a_chain_are_chained_once() {
    let (directory, store) = open_fresh();
    drop(store);
    let path = database_in(&directory);
    let other = open_raw(&path);
    // The tables as they were before migration 16, with a gap that a purge left.
    other
        .execute_batch(
            "ALTER TABLE roster DROP COLUMN definition; DROP TABLE agent_versions; \
             DROP TABLE run_tree; DROP TABLE card_boxes; DROP TABLE audit; DROP TABLE audit_chain; \
             CREATE TABLE audit (number INTEGER PRIMARY KEY AUTOINCREMENT, at_ms INTEGER NOT NULL, \
             project TEXT NOT NULL, agent TEXT NOT NULL, action TEXT NOT NULL, \
             subject TEXT NOT NULL, reason TEXT NOT NULL) STRICT; \
             CREATE INDEX audit_by_project ON audit (project, number); \
             INSERT INTO audit VALUES (7, 1, 'p', 'ada', 'call.denied', 'x', 'r'), \
             (9, 2, 'p', 'bob', 'rule.set', 'y', ''); \
             PRAGMA user_version = 15",
        )
        .unwrap();
    drop(other);
    let store = SqliteStore::open_for_admin(&path).unwrap();
    let found = verify(&store).await;
    assert_eq!((found.problems, found.entries, found.head.number), (vec![], 2, 9));
    append(&store, 1).await;
    let agents: Vec<(u64, String)> =
        rows(&store).await.into_iter().map(|row| (row.number, row.entry.agent)).collect();
    assert_eq!(agents, [(7, "ada".into()), (9, "bob".into()), (10, "ada".into())]);
    assert_eq!(verify(&store).await.problems, []);
    drop(store);
    // A row that another program adds later is not adopted.
    let forged = "INSERT INTO audit (number, at_ms, project, agent, action, subject, reason, hash) \
                  VALUES (11, 3, 'p', 'eve', 'key.created', 'z', '', 'f')";
    open_raw(&path).execute(forged, []).unwrap();
    let store = SqliteStore::open_for_admin(&path).unwrap();
    assert!(!verify(&store).await.problems.is_empty());
}
