//! Tests of what only the PostgreSQL store has: a database server that may disappear, competing
//! Toolcrib servers, other programs in the same tables.

mod audit;
mod migrations;

use std::sync::Arc;
use std::time::Duration;

use toolcrib::domain::call::Status;
use toolcrib::domain::utp::card::into_map;
use toolcrib::ports::store::{Store, StoreError};
use toolcrib_store::{PostgresOpenError, PostgresStore};

use crate::support::database::Database;
use crate::support::{call, call_of, creating, ended, found, put, read, requested, save};

#[tokio::test]
async fn a_second_server_is_refused_until_the_first_is_gone() {
    let Some(database) = Database::new().await else { return };
    let first = PostgresStore::open(&database.url).await.unwrap();
    let refused = PostgresStore::open(&database.url).await.err().unwrap();
    assert!(matches!(refused, PostgresOpenError::AlreadyServed), "{refused}");
    assert!(refused.to_string().contains("another toolcrib"), "{refused}");
    let stored_call = call();
    put(&first, &stored_call).await;
    // Meanwhile an administrator may read and change the directory, but cannot create calls.
    let admin = PostgresStore::open_for_admin(&database.url).await.unwrap();
    assert_eq!(read(&admin, &stored_call).await, stored_call);
    let created = creating(&admin, &call(), vec![requested()], None).await;
    assert!(matches!(created, Err(StoreError::Unavailable(_))), "{created:?}");
    drop((first, admin));
    let second = PostgresStore::open(&database.url).await.unwrap();
    assert_eq!(read(&second, &stored_call).await, stored_call);
    drop(second);
    database.drop().await;
}

#[tokio::test]
async fn event_numbers_continue_after_a_purge_and_a_restart() {
    let Some(database) = Database::new().await else { return };
    let store = PostgresStore::open(&database.url).await.unwrap();
    let old = call();
    put(&store, &old).await;
    save(&store, &ended(&old, Status::Succeeded, old.created_ms + 1)).await;
    let scope = || toolcrib::ports::store::EventScope::Project("p".into());
    let newest = store.last_event_number(scope()).await.unwrap();
    assert_eq!(store.purge(u64::MAX, 10).await.unwrap().calls, 1);
    drop(store);
    let store = PostgresStore::open(&database.url).await.unwrap();
    put(&store, &call()).await;
    assert!(store.last_event_number(scope()).await.unwrap() > newest);
    drop(store);
    database.drop().await;
}

#[tokio::test]
async fn a_connection_cut_between_two_calls_is_reestablished() {
    let Some(database) = Database::new().await else { return };
    let store = PostgresStore::open(&database.url).await.unwrap();
    let (before, after) = (call(), call());
    put(&store, &before).await;
    database.cut().await;
    put(&store, &after).await;
    assert_eq!(read(&store, &before).await, before);
    assert_eq!(read(&store, &after).await, after);
    drop(store);
    database.drop().await;
}

/// Cuts the connection repeatedly while calls are created: a call reported as stored is found, and
/// a call reported as not stored is not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn create_results_are_correct_when_the_connection_is_cut() {
    let Some(database) = Database::new().await else { return };
    let store = Arc::new(PostgresStore::open(&database.url).await.unwrap());
    let creations: Vec<_> = (0..8)
        .map(|_| {
            let store = store.clone();
            tokio::spawn(async move {
                let mut results = Vec::new();
                for _ in 0..25 {
                    let new = call();
                    let created = creating(store.as_ref(), &new, vec![requested()], None).await;
                    results.push((new, created.is_ok()));
                }
                results
            })
        })
        .collect();
    for _ in 0..6 {
        database.cut().await;
        tokio::task::yield_now().await;
    }
    for results in futures::future::join_all(creations).await {
        for (call, stored) in results.unwrap() {
            let is_stored = loop {
                match store.call("p", &call.id).await {
                    Ok(found) => break found.is_some(),
                    // The cut ended a read connection as well.
                    Err(_) => tokio::task::yield_now().await,
                }
            };
            assert_eq!(is_stored, stored, "{}", call.id);
        }
    }
    drop(store);
    database.drop().await;
}

#[tokio::test]
async fn an_unreachable_database_is_reported_and_used_again_on_return() {
    let Some(database) = Database::new().await else { return };
    let store = PostgresStore::open(&database.url).await.unwrap();
    let old = call();
    put(&store, &old).await;
    database.shut(true).await;
    let refused = store.check_health().await;
    assert!(matches!(&refused, Err(StoreError::Unavailable(_))), "{refused:?}");
    let created = creating(&store, &call(), vec![requested()], None).await;
    let Err(StoreError::Unavailable(reason)) = created else { panic!("{created:?}") };
    assert!(reason.contains("connection"), "{reason}");
    assert!(!reason.contains("toolcrib-test"), "{reason}");
    database.shut(false).await;
    while store.check_health().await.is_err() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    put(&store, &call()).await;
    assert!(found(&store, &old).await.is_some());
    drop(store);
    database.drop().await;
}

#[tokio::test]
async fn a_server_whose_writer_lease_was_taken_stops_writing() {
    let Some(database) = Database::new().await else { return };
    let first = PostgresStore::open(&database.url).await.unwrap();
    put(&first, &call()).await;
    // The state left by another server that started and stopped while this one was disconnected.
    let client = database.client().await;
    client.batch_execute("UPDATE toolcrib.writer SET owner = owner + 1").await.unwrap();
    database.cut().await;
    let reason = loop {
        match first.check_health().await {
            Err(StoreError::Unavailable(reason)) if reason.contains("restart") => break reason,
            Ok(()) => panic!("it wrote after another server took over"),
            Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    };
    assert!(reason.contains("another toolcrib"), "{reason}");
    drop(first);
    database.drop().await;
}

#[tokio::test]
async fn a_server_recognizes_that_another_one_serves_its_database() {
    let Some(database) = Database::new().await else { return };
    let first = PostgresStore::open(&database.url).await.unwrap();
    put(&first, &call()).await;
    database.cut().await;
    // The second server keeps the lock.
    let second = PostgresStore::open(&database.url).await.unwrap();
    let failed = tokio::time::timeout(Duration::from_secs(10), async {
        let _ = first.check_health().await;
        first.wait_for_failure().await
    });
    let reason = failed.await.expect("the first server goes on");
    assert!(reason.contains("another toolcrib"), "{reason}");
    assert!(matches!(first.check_health().await, Err(StoreError::Unavailable(_))));
    put(&second, &call()).await;
    drop((first, second));
    database.drop().await;
}

#[tokio::test]
async fn a_failing_change_does_not_affect_others_of_its_commit_group() {
    let Some(database) = Database::new().await else { return };
    let store = PostgresStore::open(&database.url).await.unwrap();
    let bad = call_of("p\0", "run", "x");
    let good: Vec<_> = (0..20).map(|_| call()).collect();
    let all = good.iter().take(10).chain([&bad]).chain(good.iter().skip(10));
    let creations = all.map(|call| creating(&store, call, vec![requested()], None));
    let created = futures::future::join_all(creations).await;
    assert_eq!(created.iter().filter(|created| created.is_err()).count(), 1);
    assert!(created[10].is_err());
    for call in &good {
        assert_eq!(read(&store, call).await, *call);
    }
    drop(store);
    database.drop().await;
}

#[tokio::test]
async fn an_unusable_database_url_is_refused_without_its_password() {
    for url in [
        "postgres://u:secret@h/d?sslmode=require",
        "postgres://u:secret@h:port/d",
        "postgres://u:secret@127.0.0.1:1/d",
    ] {
        let refused = PostgresStore::open(url).await.err().unwrap().to_string();
        assert!(!refused.contains("secret"), "{refused}");
    }
    let Some(database) = Database::new().await else { return };
    let client = database.client().await;
    client.batch_execute("CREATE TABLE public.cards (a INT)").await.unwrap();
    let refused = PostgresStore::open(&database.url).await.err().unwrap();
    assert!(matches!(refused, PostgresOpenError::ForeignTables), "{refused}");
    let schema_count = "SELECT count(*) FROM pg_namespace WHERE nspname = 'toolcrib'";
    let schema_count: i64 = client.query_one(schema_count, &[]).await.unwrap().get(0);
    assert_eq!(schema_count, 0, "a refused open leaves no schema behind");
    drop(client);
    database.drop().await;
}

#[tokio::test]
async fn a_newer_database_is_not_opened() {
    let Some(database) = Database::new().await else { return };
    drop(PostgresStore::open(&database.url).await.unwrap());
    let client = database.client().await;
    client.batch_execute("INSERT INTO toolcrib.schema_version VALUES (999)").await.unwrap();
    let refused = PostgresStore::open(&database.url).await.err().unwrap();
    assert!(matches!(refused, PostgresOpenError::NewerSchema { found: 999, .. }), "{refused}");
    drop(client);
    database.drop().await;
}

#[tokio::test]
async fn cards_are_stored_in_the_table_that_tool_services_read() {
    let Some(database) = Database::new().await else { return };
    let store = PostgresStore::open(&database.url).await.unwrap();
    let content = serde_json::json!({ "__type__": "TextContent", "text": "a\0b" });
    let card = toolcrib::domain::utp::Card {
        card_id: "c1".into(),
        project: "p".into(),
        kind: "task.instruction".into(),
        content: into_map(content),
        created_ms: 1_790_000_000_123,
        author_id: "ada".into(),
        metadata: into_map(serde_json::json!({ "agent_turn_id": "t1", "type": "mine" })),
        tool_calls: None,
        tool_call_id: None,
        ttl_seconds: Some(60),
    };
    store.utp().put_card(card.clone()).await.unwrap();
    assert_eq!(
        store.utp().card("p", "c1").await.unwrap(),
        Some(card),
        "the card reads back unchanged"
    );
    let client = database.client().await;
    let sql = "SELECT tenant_id, metadata->>'type', metadata->>'author_id', content->>'text', \
               metadata->>'created_at', extract(epoch FROM expires_at - created_at)::int \
               FROM public.cards WHERE card_id = 'c1'";
    let row = client.query_one(sql, &[]).await.unwrap();
    let text = |n: usize| row.get::<_, String>(n);
    assert_eq!((text(0), text(1), text(2)), ("p".into(), "task.instruction".into(), "ada".into()));
    assert_eq!((text(3), text(4)), ("ab".into(), "2026-09-21T14:13:20.123Z".into()));
    assert_eq!(row.get::<_, i32>(5), 60);
    drop((store, client));
    database.drop().await;
}
