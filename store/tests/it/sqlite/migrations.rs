//! Databases of every earlier schema version are migrated, and everything in them is read back.

use std::path::{Path, PathBuf};

use toolcrib_store::{SQLITE_SCHEMA_VERSION, SqliteStore};

use super::{open_fresh, open_raw, query_number};
use crate::support::population::{
    Reading, calls_in_every_hold, populate, read_everything, write_on,
};
use crate::support::{database_in, put, read};

/// The first version whose table of calls is `tool_calls`.
const TOOL_CALLS_VERSION: i64 = 10;

/// The rules of an agent on a pattern, as they were stored before rules were objects.
const RULES_BEFORE_OBJECTS: &str = "(SELECT project, \
    coalesce(json_extract(rule, '$.agents[0]'), '*') AS agent, \
    json_extract(rule, '$.tools[0]') AS pattern, json_extract(rule, '$.verdict') AS verdict \
    FROM current.access_rules WHERE until IS NULL)";

/// Returns the SQL of each migration, in order.
fn migrations() -> Vec<String> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("migrations/sqlite");
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(directory).unwrap().map(|file| file.unwrap().path()).collect();
    files.sort();
    assert_eq!(files.len() as i64, SQLITE_SCHEMA_VERSION);
    files.iter().map(|file| std::fs::read_to_string(file).unwrap()).collect()
}

/// Creates a database of an earlier version and fills its tables from a current one. Earlier
/// versions stored the holds `input` and `after` as `queue`.
fn create_earlier(path: &Path, version: i64, current: &Path) {
    let earlier = open_raw(path);
    earlier.execute_batch("PRAGMA foreign_keys = OFF").unwrap();
    for migration in &migrations()[..version as usize] {
        earlier.execute_batch(migration).unwrap();
    }
    earlier.execute("ATTACH ?1 AS current", [current.to_str().unwrap()]).unwrap();
    let names = |sql: &str| -> Vec<String> {
        let mut select = earlier.prepare(sql).unwrap();
        let names = select.query_map([], |row| row.get(0)).unwrap();
        names.map(Result::unwrap).collect()
    };
    let tables = "SELECT name FROM main.sqlite_schema \
                  WHERE type = 'table' AND name NOT LIKE 'sqlite_%'";
    for table in names(tables) {
        let columns = names(&format!("SELECT name FROM pragma_table_info('{table}', 'main')"));
        let from = match table.as_str() {
            "calls" => "current.tool_calls".to_owned(),
            "tools" => "current.client_tools".to_owned(),
            "rules" => RULES_BEFORE_OBJECTS.to_owned(),
            same => format!("current.{same}"),
        };
        let values = columns.iter().map(|column| match (table.as_str(), column.as_str()) {
            ("calls", "id") => "tool_call_id",
            ("keys", "role") => "roles",
            ("calls", "hold") => "CASE WHEN hold IN ('input', 'after') THEN 'queue' ELSE hold END",
            (_, same) => same,
        });
        let values: Vec<&str> = values.collect();
        let (columns, values) = (columns.join(", "), values.join(", "));
        earlier
            .execute_batch(&format!(
                "DELETE FROM main.{table}; \
                 INSERT INTO main.{table} ({columns}) SELECT {values} FROM {from};"
            ))
            .unwrap();
    }
    earlier
        .execute_batch(&format!(
            "DETACH current; PRAGMA application_id = 0x54435242; PRAGMA user_version = {version};"
        ))
        .unwrap();
}

#[tokio::test]
async fn databases_of_every_earlier_schema_version_are_read_completely() {
    let (directory, store) = open_fresh();
    populate(&store).await;
    let expected = read_everything(&store).await;
    drop(store);
    for version in 1..TOOL_CALLS_VERSION {
        let earlier = tempfile::tempdir().unwrap();
        let path = database_in(&earlier);
        create_earlier(&path, version, &database_in(&directory));
        let store = SqliteStore::open(&path).unwrap();
        assert_eq!(query_number(&open_raw(&path), "PRAGMA user_version"), SQLITE_SCHEMA_VERSION);
        let found = read_everything(&store).await;
        let readable_by_version = |all: &[Reading]| -> Vec<Reading> {
            all.iter().filter(|reading| reading.since <= version).cloned().collect()
        };
        let (found, expected) = (readable_by_version(&found), readable_by_version(&expected));
        assert_eq!(found.len(), expected.len(), "version {version}");
        for (found, expected) in found.into_iter().zip(expected) {
            assert_eq!(found, expected, "version {version}");
        }
        let stored = "SELECT count(DISTINCT hold) FROM tool_calls \
                      WHERE hold IN ('queue', 'retry', 'parked', 'input', 'after')";
        assert_eq!(query_number(&open_raw(&path), stored), 5, "version {version}");
        write_on(&store).await;
        assert_eq!(store.check_integrity().await.unwrap(), "ok");
    }
}

#[tokio::test]
async fn holds_stored_as_queue_are_still_read() {
    let (directory, store) = open_fresh();
    let calls = calls_in_every_hold();
    for call in &calls {
        put(&store, call).await;
    }
    let other = open_raw(&database_in(&directory));
    let renamed = "UPDATE tool_calls SET hold = 'queue' WHERE hold IN ('input', 'after')";
    assert_eq!(other.execute(renamed, []).unwrap(), 2);
    for call in &calls {
        assert_eq!(read(&store, call).await, *call);
    }
}
