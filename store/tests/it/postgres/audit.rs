//! The audit log against other programs that write to the tables.

use toolcrib_store::PostgresStore;

use crate::suite::audit::{append, verify};
use crate::support::database::Database;

#[tokio::test]
async fn the_database_refuses_changes_of_the_audit_log() {
    let Some(database) = Database::new().await else { return };
    let store = PostgresStore::open(&database.url).await.unwrap();
    append(&store, 3).await;
    let other = database.client().await;
    for sql in [
        "UPDATE toolcrib.audit SET reason = 'allowed' WHERE number = 2",
        "DELETE FROM toolcrib.audit WHERE number = 3",
        "TRUNCATE toolcrib.audit",
    ] {
        let error = other.batch_execute(sql).await.expect_err(sql);
        let message = error.as_db_error().unwrap().message().to_owned();
        assert!(message.contains("append-only"), "{message}");
    }
    assert_eq!(verify(&store).await.entries, 3);
    drop((store, other));
    database.drop().await;
}

#[tokio::test]
async fn every_kind_of_tampering_is_found() {
    for (sql, at) in [
        ("UPDATE toolcrib.audit SET reason = 'allowed' WHERE number = 2", 2),
        ("UPDATE toolcrib.audit SET at_ms = at_ms + 1 WHERE number = 1", 1),
        ("DELETE FROM toolcrib.audit WHERE number = 2", 3),
        ("DELETE FROM toolcrib.audit WHERE number = 4", 4),
        (
            "UPDATE toolcrib.audit SET number = 9 WHERE number = 2; \
             UPDATE toolcrib.audit SET number = 2 WHERE number = 3; \
             UPDATE toolcrib.audit SET number = 3 WHERE number = 9",
            2,
        ),
    ] {
        let Some(database) = Database::new().await else { return };
        let store = PostgresStore::open(&database.url).await.unwrap();
        append(&store, 4).await;
        assert_eq!(verify(&store).await.problems, []);
        let other = database.client().await;
        other.batch_execute("ALTER TABLE toolcrib.audit DISABLE TRIGGER ALL").await.unwrap();
        other.batch_execute(sql).await.unwrap();
        let problems = verify(&store).await.problems;
        assert_eq!(problems.first().map(|problem| problem.number), Some(at), "{sql}: {problems:?}");
        append(&store, 1).await;
        assert!(!verify(&store).await.problems.is_empty(), "{sql}");
        drop((store, other));
        database.drop().await;
    }
}

#[tokio::test]
async fn a_command_beside_the_server_extends_the_same_chain() {
    let Some(database) = Database::new().await else { return };
    let server = PostgresStore::open(&database.url).await.unwrap();
    let command = PostgresStore::open_for_admin(&database.url).await.unwrap();
    tokio::join!(append(&server, 50), append(&command, 50));
    let found = verify(&server).await;
    assert_eq!((found.problems, found.entries), (vec![], 100));
    drop((server, command));
    database.drop().await;
}
