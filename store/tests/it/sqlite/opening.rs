//! Opening a database: Toolcrib's own is migrated, and one of another program stays untouched.

use std::path::Path;

use rusqlite::Connection;
use toolcrib::ports::store::Store;
use toolcrib_store::{SQLITE_SCHEMA_VERSION, SqliteOpenError, SqliteStore};

use super::{open_fresh, open_raw, query_number};
use crate::support::{call, database_in, file_with_suffix, found, ids_of, put};

const INIT: &str = include_str!("../../../migrations/sqlite/0001_init.sql");

/// Tries to open a file that must be refused, in both ways, and checks that not a byte has changed.
fn assert_refused_untouched(path: &Path) -> SqliteOpenError {
    let before = std::fs::read(path).unwrap();
    let first = SqliteStore::open(path).err().expect("must not be opened");
    let second = SqliteStore::open_for_admin(path).err().expect("must not be opened");
    assert_eq!(first.to_string(), second.to_string());
    assert!(std::fs::read(path).unwrap() == before, "the file has changed");
    for ending in ["-wal", "-journal"] {
        let length = std::fs::metadata(file_with_suffix(path, ending)).map_or(0, |file| file.len());
        assert_eq!(length, 0, "something was left in {ending}");
    }
    first
}

#[tokio::test]
async fn a_database_of_a_newer_version_is_refused_and_untouched() {
    let (directory, store) = open_fresh();
    let path = database_in(&directory);
    let stored_call = call();
    put(&store, &stored_call).await;
    drop(store);
    let newer = SQLITE_SCHEMA_VERSION + 1;
    open_raw(&path).pragma_update(None, "user_version", newer).unwrap();
    let error = assert_refused_untouched(&path);
    let SqliteOpenError::NewerSchema { found: version, known: supported } = &error else {
        panic!("{error}")
    };
    assert_eq!((*version, *supported), (newer, SQLITE_SCHEMA_VERSION));
    let message = error.to_string();
    assert!(
        message.contains(&newer.to_string()) && message.contains("newer toolcrib"),
        "{message}"
    );
    // The newer program still finds everything.
    open_raw(&path).pragma_update(None, "user_version", SQLITE_SCHEMA_VERSION).unwrap();
    let store = SqliteStore::open_for_admin(&path).unwrap();
    assert_eq!(found(&store, &stored_call).await, Some(stored_call));
}

#[test]
fn a_foreign_database_is_refused_and_untouched() {
    let statements = [
        "CREATE TABLE notes (text TEXT); INSERT INTO notes VALUES ('mine');",
        "PRAGMA user_version = 7;",
        "PRAGMA application_id = 42; PRAGMA user_version = 1; CREATE TABLE calls (id TEXT);",
        "PRAGMA journal_mode = WAL; CREATE TABLE calls (id TEXT);",
    ];
    for sql in statements {
        let directory = tempfile::tempdir().unwrap();
        let path = database_in(&directory);
        open_raw(&path).execute_batch(sql).unwrap();
        let error = assert_refused_untouched(&path);
        assert!(matches!(error, SqliteOpenError::ForeignDatabase), "{sql}: {error}");
    }
}

#[test]
fn a_file_that_is_not_a_database_is_refused_and_untouched() {
    let directory = tempfile::tempdir().unwrap();
    let path = database_in(&directory);
    std::fs::write(&path, "Dear diary, today I wrote a text file. ".repeat(100)).unwrap();
    let error = assert_refused_untouched(&path);
    let SqliteOpenError::Sqlite(cause) = &error else { panic!("{error}") };
    assert_eq!(cause.sqlite_error_code(), Some(rusqlite::ErrorCode::NotADatabase));
}

#[tokio::test]
async fn an_empty_file_and_a_missing_directory_are_initialized() {
    let directory = tempfile::tempdir().unwrap();
    let empty = database_in(&directory);
    std::fs::write(&empty, "").unwrap();
    let nowhere = directory.path().join("a/b/c/toolcrib.db");
    for path in [empty, nowhere] {
        let store = SqliteStore::open(&path).unwrap();
        put(&store, &call()).await;
        assert_eq!(ids_of(&store, "p").await.len(), 1);
        assert_eq!(store.check_integrity().await.unwrap(), "ok");
        drop(store);
        assert_eq!(query_number(&open_raw(&path), "PRAGMA user_version"), SQLITE_SCHEMA_VERSION);
    }
}

#[tokio::test]
async fn reopening_does_not_change_the_schema() {
    let (directory, store) = open_fresh();
    put(&store, &call()).await;
    drop(store);
    let path = database_in(&directory);
    let schema = "SELECT group_concat(sql) FROM (SELECT sql FROM sqlite_schema ORDER BY name)";
    let read_schema =
        || -> String { open_raw(&path).query_row(schema, [], |row| row.get(0)).unwrap() };
    let before = read_schema();
    for _ in 0..2 {
        drop(SqliteStore::open(&path).unwrap());
        drop(SqliteStore::open_for_admin(&path).unwrap());
    }
    assert_eq!(read_schema(), before);
    let store = SqliteStore::open_for_admin(&path).unwrap();
    assert_eq!(ids_of(&store, "p").await.len(), 1);
}

/// Copies the files of a database, in their current state on disk, to another path.
fn copy_files(path: &Path, into: &Path) {
    std::fs::copy(path, into).unwrap();
    for ending in ["-wal", "-journal"] {
        if file_with_suffix(path, ending).exists() {
            std::fs::copy(file_with_suffix(path, ending), file_with_suffix(into, ending)).unwrap();
        }
    }
}

/// Begins the migration as the store does, with so little cache that its pages reach the disk
/// before the commit.
fn begin_migration(path: &Path, journal: &str) -> Connection {
    let connection = open_raw(path);
    connection
        .query_row(&format!("PRAGMA journal_mode = {journal}"), [], |row| row.get::<_, String>(0))
        .unwrap();
    connection.execute_batch("PRAGMA cache_size = 2; BEGIN IMMEDIATE;").unwrap();
    connection.execute_batch(INIT).unwrap();
    connection
}

#[tokio::test]
async fn an_interrupted_migration_is_repeated() {
    for journal in ["WAL", "DELETE"] {
        let directory = tempfile::tempdir().unwrap();
        let path = database_in(&directory);
        let killed = directory.path().join("killed.db");
        let connection = begin_migration(&path, journal);
        copy_files(&path, &killed);
        let log = file_with_suffix(&killed, if journal == "WAL" { "-wal" } else { "-journal" });
        assert!(
            std::fs::metadata(log).unwrap().len() > 0,
            "no page of the migration reached the disk"
        );
        drop(connection);
        for path in [killed, path] {
            let store = SqliteStore::open(&path).unwrap();
            put(&store, &call()).await;
            assert_eq!(ids_of(&store, "p").await.len(), 1);
            assert_eq!(store.directory_version().await.unwrap(), 0);
            assert_eq!(store.check_integrity().await.unwrap(), "ok");
        }
    }
}

/// The machine stops while the store creates a new database: its WAL ends after any of its pages.
#[tokio::test]
async fn an_interrupted_creation_of_a_database_is_repeated() {
    let (directory, _store) = open_fresh();
    let path = database_in(&directory);
    let database = std::fs::read(&path).unwrap();
    let log = std::fs::read(file_with_suffix(&path, "-wal")).unwrap();
    // The WAL has a header of 32 bytes, followed by pages with a header of 24 bytes each.
    let page = 24 + query_number(&open_raw(&path), "PRAGMA page_size") as usize;
    let cuts: Vec<usize> = (32..=log.len()).step_by(page).collect();
    assert!(cuts.len() > 10, "the tables take some pages");
    for cut in cuts {
        let copy = directory.path().join(format!("cut-{cut}.db"));
        std::fs::write(&copy, &database).unwrap();
        std::fs::write(file_with_suffix(&copy, "-wal"), &log[..cut]).unwrap();
        let opened = SqliteStore::open_for_admin(&copy);
        let store = opened.unwrap_or_else(|error| panic!("after {cut} bytes: {error}"));
        put(&store, &call()).await;
        assert_eq!(ids_of(&store, "p").await.len(), 1);
        assert_eq!(store.check_integrity().await.unwrap(), "ok");
    }
}

#[tokio::test]
async fn two_stores_can_open_a_new_file_concurrently() {
    let directory = tempfile::tempdir().unwrap();
    let path = database_in(&directory);
    let stores: Vec<SqliteStore> = std::thread::scope(|scope| {
        let open = || SqliteStore::open_for_admin(&path).unwrap();
        let both: Vec<_> = (0..2).map(|_| scope.spawn(open)).collect();
        both.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    put(&stores[0], &call()).await;
    assert_eq!(ids_of(&stores[1], "p").await.len(), 1);
}

#[cfg(unix)]
#[tokio::test]
async fn database_files_are_readable_by_their_owner_only() {
    use std::os::unix::fs::PermissionsExt;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("data").join("toolcrib.db");
    let store = SqliteStore::open_for_admin(&path).unwrap();
    put(&store, &call()).await;
    let mode = |path: &std::path::Path| path.metadata().unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(path.parent().unwrap()), 0o700);
    assert_eq!(mode(&path), 0o600);
    assert_eq!(mode(&path.with_extension("db-wal")), 0o600);
}

#[test]
fn the_linked_sqlite_has_the_fix_for_resets_of_the_wal() {
    // Earlier versions can corrupt a database when a checkpoint resets the WAL.
    let version = rusqlite::version_number();
    assert!(version >= 3_051_003, "SQLite {} is linked", rusqlite::version());
}
