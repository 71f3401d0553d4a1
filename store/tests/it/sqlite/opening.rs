//! Opening a database: Toolcrib's own is migrated, and one of another program stays untouched.

use std::path::Path;

use rusqlite::Connection;
use toolcrib::ports::store::{CallFilter, Store};
use toolcrib_store::{SQLITE_SCHEMA_VERSION, SqliteOpenError, SqliteStore};

use super::{fresh, number, raw};
use crate::support::{beside, call, database_in, found, ids, ids_of, put};

const INIT: &str = include_str!("../../../migrations/sqlite/0001_init.sql");

/// Tries to open a file that must be refused, in both ways, and checks that not a byte has changed.
fn refused_untouched(path: &Path) -> SqliteOpenError {
    let before = std::fs::read(path).unwrap();
    let first = SqliteStore::open(path).err().expect("must not be opened");
    let second = SqliteStore::open_for_admin(path).err().expect("must not be opened");
    assert_eq!(first.to_string(), second.to_string());
    assert!(std::fs::read(path).unwrap() == before, "the file has changed");
    for ending in ["-wal", "-journal"] {
        let left = std::fs::metadata(beside(path, ending)).map_or(0, |file| file.len());
        assert_eq!(left, 0, "something was left in {ending}");
    }
    first
}

#[tokio::test]
async fn a_database_of_a_newer_version_is_refused_and_untouched() {
    let (directory, store) = fresh();
    let path = database_in(&directory);
    let kept = call();
    put(&store, &kept).await;
    drop(store);
    let newer = SQLITE_SCHEMA_VERSION + 1;
    raw(&path).pragma_update(None, "user_version", newer).unwrap();
    let error = refused_untouched(&path);
    let SqliteOpenError::NewerSchema { found: version, known } = &error else { panic!("{error}") };
    assert_eq!((*version, *known), (newer, SQLITE_SCHEMA_VERSION));
    let said = error.to_string();
    assert!(said.contains(&newer.to_string()) && said.contains("newer toolcrib"), "{said}");
    // The newer program still finds everything.
    raw(&path).pragma_update(None, "user_version", SQLITE_SCHEMA_VERSION).unwrap();
    let store = SqliteStore::open_for_admin(&path).unwrap();
    assert_eq!(found(&store, &kept).await, Some(kept));
}

#[test]
fn somebody_elses_database_is_refused_and_untouched() {
    let statements = [
        "CREATE TABLE notes (text TEXT); INSERT INTO notes VALUES ('mine');",
        "PRAGMA user_version = 7;",
        "PRAGMA application_id = 42; PRAGMA user_version = 1; CREATE TABLE calls (id TEXT);",
        "PRAGMA journal_mode = WAL; CREATE TABLE calls (id TEXT);",
    ];
    for sql in statements {
        let directory = tempfile::tempdir().unwrap();
        let path = database_in(&directory);
        raw(&path).execute_batch(sql).unwrap();
        let error = refused_untouched(&path);
        assert!(matches!(error, SqliteOpenError::ForeignDatabase), "{sql}: {error}");
    }
}

#[test]
fn what_is_no_database_is_refused_and_untouched() {
    let directory = tempfile::tempdir().unwrap();
    let path = database_in(&directory);
    std::fs::write(&path, "Dear diary, today I wrote a text file. ".repeat(100)).unwrap();
    let error = refused_untouched(&path);
    let SqliteOpenError::Sqlite(cause) = &error else { panic!("{error}") };
    assert_eq!(cause.sqlite_error_code(), Some(rusqlite::ErrorCode::NotADatabase));
}

#[tokio::test]
async fn an_empty_file_and_a_missing_directory_become_a_store() {
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
        assert_eq!(number(&raw(&path), "PRAGMA user_version"), SQLITE_SCHEMA_VERSION);
    }
}

#[tokio::test]
async fn opening_again_changes_nothing() {
    let (directory, store) = fresh();
    put(&store, &call()).await;
    drop(store);
    let path = database_in(&directory);
    let schema = "SELECT group_concat(sql) FROM (SELECT sql FROM sqlite_schema ORDER BY name)";
    let look = || -> String { raw(&path).query_row(schema, [], |row| row.get(0)).unwrap() };
    let before = look();
    for _ in 0..2 {
        drop(SqliteStore::open(&path).unwrap());
        drop(SqliteStore::open_for_admin(&path).unwrap());
    }
    assert_eq!(look(), before);
    let store = SqliteStore::open_for_admin(&path).unwrap();
    assert_eq!(ids_of(&store, "p").await.len(), 1);
}

/// Copies the files of a database, in their current state on disk, to another path.
fn copied_now(path: &Path, into: &Path) {
    std::fs::copy(path, into).unwrap();
    for ending in ["-wal", "-journal"] {
        if beside(path, ending).exists() {
            std::fs::copy(beside(path, ending), beside(into, ending)).unwrap();
        }
    }
}

/// Begins the migration as the store does, with so little cache that its pages reach the disk
/// before the commit.
fn migrating(path: &Path, journal: &str) -> Connection {
    let connection = raw(path);
    connection
        .query_row(&format!("PRAGMA journal_mode = {journal}"), [], |row| row.get::<_, String>(0))
        .unwrap();
    connection.execute_batch("PRAGMA cache_size = 2; BEGIN IMMEDIATE;").unwrap();
    connection.execute_batch(INIT).unwrap();
    connection
}

#[tokio::test]
async fn a_migration_that_was_killed_half_way_is_made_again() {
    for journal in ["WAL", "DELETE"] {
        let directory = tempfile::tempdir().unwrap();
        let path = database_in(&directory);
        let killed = directory.path().join("killed.db");
        let connection = migrating(&path, journal);
        copied_now(&path, &killed);
        let log = beside(&killed, if journal == "WAL" { "-wal" } else { "-journal" });
        assert!(std::fs::metadata(log).unwrap().len() > 0, "nothing of it was on the disk");
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

/// A database written by the first schema version, with a background task in it.
#[tokio::test]
async fn a_database_of_the_first_version_is_brought_up_to_date() {
    let directory = tempfile::tempdir().unwrap();
    let path = database_in(&directory);
    let newer = tempfile::tempdir().unwrap();
    let store = SqliteStore::open_for_admin(&database_in(&newer)).unwrap();
    let (plain, mut task) = (call(), call());
    task.origin.background = true;
    put(&store, &plain).await;
    put(&store, &task).await;
    drop(store);
    let old = raw(&path);
    old.execute_batch(INIT).unwrap();
    old.execute("ATTACH ?1 AS newer", [database_in(&newer).to_str().unwrap()]).unwrap();
    old.execute_batch(
        "INSERT INTO calls SELECT * FROM newer.calls; DETACH newer; \
         PRAGMA user_version = 1; PRAGMA application_id = 0x54435242;",
    )
    .unwrap();
    drop(old);
    let store = SqliteStore::open(&path).unwrap();
    assert_eq!(number(&raw(&path), "PRAGMA user_version"), SQLITE_SCHEMA_VERSION);
    assert_eq!(ids_of(&store, "p").await.len(), 2);
    let tasks = CallFilter { project: "p".into(), background: true, ..CallFilter::default() };
    assert_eq!(ids(&store, CallFilter { limit: 10, ..tasks }).await, [task.id]);
}

/// The machine stops while the store creates a new database: its WAL ends after any of its pages.
#[tokio::test]
async fn a_new_database_that_was_cut_off_anywhere_is_made_again() {
    let (directory, _store) = fresh();
    let path = database_in(&directory);
    let database = std::fs::read(&path).unwrap();
    let log = std::fs::read(beside(&path, "-wal")).unwrap();
    // The WAL has a header of 32 bytes, followed by pages with a header of 24 bytes each.
    let page = 24 + number(&raw(&path), "PRAGMA page_size") as usize;
    let cuts: Vec<usize> = (32..=log.len()).step_by(page).collect();
    assert!(cuts.len() > 10, "the tables take some pages");
    for cut in cuts {
        let copy = directory.path().join(format!("cut-{cut}.db"));
        std::fs::write(&copy, &database).unwrap();
        std::fs::write(beside(&copy, "-wal"), &log[..cut]).unwrap();
        let opened = SqliteStore::open_for_admin(&copy);
        let store = opened.unwrap_or_else(|error| panic!("after {cut} bytes: {error}"));
        put(&store, &call()).await;
        assert_eq!(ids_of(&store, "p").await.len(), 1);
        assert_eq!(store.check_integrity().await.unwrap(), "ok");
    }
}

#[tokio::test]
async fn two_that_open_a_new_file_at_once_both_get_it() {
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
async fn what_is_stored_is_its_owners_alone_to_read() {
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
