//! A database of the first schema version is migrated, and everything in it is read back.

use tokio_postgres::Client;
use toolcrib_store::PostgresStore;

use crate::support::database::Database;
use crate::support::population::{calls_in_every_hold, populate, read_everything, write_on};
use crate::support::{put, read};

const INIT: &str = include_str!("../../../migrations/postgres/0001_init.sql");

/// Creates the tables of the first version and fills them from a current database. That version
/// stored the holds `input` and `after` as `queue`.
async fn create_first_version(earlier: &Client, current: &Client) {
    let prepare = "CREATE SCHEMA toolcrib; SET session_replication_role = replica; \
                   CREATE TABLE toolcrib.schema_version (version BIGINT PRIMARY KEY); \
                   INSERT INTO toolcrib.schema_version VALUES (1)";
    earlier.batch_execute(prepare).await.unwrap();
    earlier.batch_execute(INIT).await.unwrap();
    let tables = "SELECT table_schema || '.' || table_name FROM information_schema.tables \
                  WHERE table_schema IN ('toolcrib', 'public', 'resource', 'state') \
                  AND table_name <> 'schema_version'";
    for table in earlier.query(tables, &[]).await.unwrap() {
        let table: String = table.get(0);
        let source = match table.as_str() {
            "toolcrib.calls" => {
                "(SELECT t.*, tool_call_id AS id, CASE WHEN hold IN ('input', 'after') \
                 THEN 'queue' ELSE hold END AS stored_hold FROM toolcrib.tool_calls t)"
            }
            "toolcrib.keys" => "(SELECT k.*, roles AS role FROM toolcrib.keys k)",
            "toolcrib.tools" => "toolcrib.client_tools",
            "toolcrib.rules" => {
                "(SELECT project, coalesce(rule::json -> 'agents' ->> 0, '*') AS agent, \
                 rule::json -> 'tools' ->> 0 AS pattern, rule::json ->> 'verdict' AS verdict \
                 FROM toolcrib.access_rules WHERE until IS NULL)"
            }
            same => same,
        };
        let rows = format!("SELECT coalesce(json_agg(r), '[]')::text FROM {source} r");
        let rows: String = current.query_one(&rows, &[]).await.unwrap().get(0);
        let rows = rows.replace("\"hold\":", "\"-\":").replace("\"stored_hold\":", "\"hold\":");
        let sql = format!(
            "INSERT INTO {table} OVERRIDING SYSTEM VALUE \
             SELECT * FROM json_populate_recordset(NULL::{table}, $1::text::json)"
        );
        earlier.batch_execute(&format!("DELETE FROM {table}")).await.unwrap();
        earlier.execute(&sql, &[&rows]).await.unwrap();
    }
}

#[tokio::test]
async fn a_database_of_the_first_schema_version_is_read_completely() {
    let Some(database) = Database::new().await else { return };
    let store = PostgresStore::open(&database.url).await.unwrap();
    populate(&store).await;
    let expected = read_everything(&store).await;
    drop(store);
    let Some(earlier) = Database::new().await else { return };
    let client = earlier.client().await;
    create_first_version(&client, &database.client().await).await;
    let store = PostgresStore::open(&earlier.url).await.unwrap();
    let found = read_everything(&store).await;
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(&expected) {
        assert_eq!(found, expected);
    }
    let holds = "SELECT count(DISTINCT hold) FROM toolcrib.tool_calls";
    assert_eq!(client.query_one(holds, &[]).await.unwrap().get::<_, i64>(0), 5);
    // The sequences of the copied tables start again.
    let identity = "SELECT setval(pg_get_serial_sequence('toolcrib.audit', 'number'), 1000)";
    client.execute(identity, &[]).await.unwrap();
    write_on(&store).await;
    drop((store, client));
    earlier.drop().await;
    database.drop().await;
}

#[tokio::test]
async fn holds_stored_as_queue_are_still_read() {
    let Some(database) = Database::new().await else { return };
    let store = PostgresStore::open(&database.url).await.unwrap();
    let calls = calls_in_every_hold();
    for call in &calls {
        put(&store, call).await;
    }
    let client = database.client().await;
    let renamed = "UPDATE toolcrib.tool_calls SET hold = 'queue' WHERE hold IN ('input', 'after')";
    assert_eq!(client.execute(renamed, &[]).await.unwrap(), 2);
    for call in &calls {
        assert_eq!(read(&store, call).await, *call);
    }
    drop((store, client));
    database.drop().await;
}
