//! T8: a server of this version starts on the data of an earlier one that was killed with open
//! calls; the migration is killed half-way; an earlier version refuses the data of this one.
//!
//! `schema_9.sql` holds the data of the earlier version. `TOOLCRIB_TEST_EARLIER_BINARY` names a
//! program of an earlier version; with it, the way there and back is tested with the real programs.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, SystemTime};

use rusqlite::Connection;
use serde_json::{Value, json};
use toolcrib_store::SQLITE_SCHEMA_VERSION;

use super::by_form;
use crate::support::faults::{can_trace, kill_at};
use crate::support::process::{PATIENCE, Server, check, eventually, text};

/// The calls of the earlier server, by idempotency key: tool and status.
const CALLS: [(&str, &str, &str); 7] = [
    ("finished", "calculation.eval", "SUCCEEDED"),
    ("flaky", "probe.flaky", "PENDING"),
    ("running", "probe.once", "RUNNING"),
    ("slot", "probe.one", "RUNNING"),
    ("queued", "probe.one", "PENDING"),
    ("parked", "probe.read", "PENDING"),
    ("canceled", "probe.read", "CANCELED"),
];

fn schema_version(database: &Path) -> i64 {
    let database = Connection::open(database).unwrap();
    database.pragma_query_value(None, "user_version", |row| row.get(0)).unwrap()
}

/// Creates the data directory of the earlier server.
fn earlier_server() -> Server {
    let server = Server::new();
    std::fs::create_dir(server.data_dir()).unwrap();
    let database = Connection::open(server.database()).unwrap();
    database.execute_batch(include_str!("schema_9.sql")).unwrap();
    database.pragma_update(None, "journal_mode", "wal").unwrap();
    let now_ms = SystemTime::UNIX_EPOCH.elapsed().unwrap().as_millis() as i64;
    let later = "UPDATE calls SET deadline_ms = ?1 WHERE completed_ms IS NULL";
    assert_eq!(database.execute(later, [now_ms + 600_000]).unwrap(), 5);
    server
}

/// Returns the ticket of a key, which must be known.
async fn ticket(server: &Server, key: &str, tool: &str) -> String {
    let args = match key {
        "finished" => json!({ "expression": "6*7" }),
        "running" => json!({ "n": 1 }),
        "parked" => json!({ "n": 2 }),
        _ => json!({}),
    };
    let mut body = json!({ "run_id": "run_old", "args": args, "idempotency_key": key,
        "timeout_ms": 7_200_000 });
    if key == "finished" {
        body["wait_ms"] = 5_000.into();
    }
    let answer = server.invoking(tool, &body).send().await.unwrap();
    assert_eq!(answer.headers()["idempotent-replayed"], "true", "{key}");
    text(&answer.json().await.unwrap(), "tool_call_id")
}

/// Asserts that each call of the earlier server is there and ends.
async fn finish_everything(server: &mut Server) {
    assert_eq!(schema_version(&server.database()), SQLITE_SCHEMA_VERSION);
    let mut ids = Vec::new();
    for (key, tool, status) in CALLS {
        let id = ticket(server, key, tool).await;
        let call = server.call(&id, 0).await;
        // The time of the next attempt has come since.
        let retried = key == "flaky" && call["status"] == "PENDING";
        assert!(call["status"] == status || retried, "{key}: {call}");
        ids.push((key, id));
    }
    let id_of = |key: &str| ids.iter().find(|(known, _)| *known == key).unwrap().1.clone();
    assert_eq!(server.call(&id_of("finished"), 0).await["result"]["result"], 42);
    let report = json!({ "status": "SUCCEEDED", "result": "after the upgrade",
        "client_id": "c1", "attempt": 1 });
    for key in ["running", "slot"] {
        server.submit(&id_of(key), report.clone()).await;
    }
    let mut work = server.poll_requests("c1", 3).await;
    work.sort_by_key(|request| text(request, "tool_call_id"));
    let mut expected = ["flaky", "queued", "parked"].map(id_of);
    expected.sort();
    let received: Vec<String> = work.iter().map(|work| text(work, "tool_call_id")).collect();
    assert_eq!(received, expected);
    for request in work {
        let body = json!({ "status": "SUCCEEDED", "result": "after the upgrade",
            "client_id": "c1", "attempt": request["attempt"] });
        server.submit(&text(&request, "tool_call_id"), body).await;
    }
    for (key, id) in &ids {
        let expected = if *key == "canceled" { "CANCELED" } else { "SUCCEEDED" };
        assert_eq!(server.call(id, 5_000).await["status"], expected, "{key}");
    }
    server.evaluated("1+1").await;
    assert!(server.stop().await.success());
    let stored = check(&server.data_dir());
    assert_eq!((stored.open, stored.calls.len()), (0, CALLS.len() + 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn open_calls_of_an_earlier_version_go_on_after_the_upgrade() {
    let mut server = earlier_server();
    server.start().await;
    finish_everything(&mut server).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_migration_that_is_killed_is_completed_by_the_next_start() {
    if !can_trace() {
        return;
    }
    let all: Vec<usize> = (1..500).collect();
    for (syscall, short) in [("pwrite64", &[4, 9, 14, 19][..]), ("fdatasync", &[1, 2, 3][..])] {
        let mut killed = 0;
        for count in by_form(short, &all) {
            let mut server = earlier_server();
            server.set_wrapper(kill_at(syscall, *count));
            server.spawn();
            if server.is_ready().await {
                server.kill();
                break;
            }
            server.ended(PATIENCE).await;
            let version = schema_version(&server.database());
            assert!((9..=SQLITE_SCHEMA_VERSION).contains(&version), "{version}");
            server.set_wrapper(Vec::new());
            server.start().await;
            finish_everything(&mut server).await;
            killed += 1;
        }
        eprintln!("{killed} points at {syscall}");
        assert!(killed > 0, "no start was killed at {syscall}");
    }
}

fn database_bytes(server: &Server) -> Vec<u8> {
    std::fs::read(server.database()).unwrap()
}

/// Starts a server that must refuse its data. Returns its log.
async fn refused(server: &mut Server) -> String {
    let before = database_bytes(server);
    server.spawn();
    let ended = server.ended(Duration::from_secs(15)).await;
    assert!(!ended.success(), "it started");
    assert!(database_bytes(server) == before, "it changed the data");
    server.log()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_downgrade_changes_nothing() {
    let mut server = Server::ready().await;
    let done = server.evaluated("6*7").await;
    server.register("client", "probe.parked", "read").await;
    let parked = server.ticket("probe.parked", json!({ "run_id": "r", "args": {} })).await;
    assert!(server.stop().await.success());
    // The data of a version to come.
    let set = |version: i64, statements: &str| {
        let database = Connection::open(server.database()).unwrap();
        database.execute_batch(statements).unwrap();
        database.pragma_update(None, "user_version", version).unwrap();
    };
    set(SQLITE_SCHEMA_VERSION + 1, "CREATE TABLE later (x INTEGER) STRICT");
    let log = refused(&mut server).await;
    assert!(log.contains("newer toolcrib"), "{log}");
    let database = Connection::open(server.database()).unwrap();
    database.execute_batch("DROP TABLE later").unwrap();
    database.pragma_update(None, "user_version", SQLITE_SCHEMA_VERSION).unwrap();
    drop(database);
    server.start().await;
    assert_eq!(server.call(&text(&done, "tool_call_id"), 0).await, done);
    assert_eq!(server.call(&parked, 0).await["status"], "PENDING");
    assert!(server.stop().await.success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_way_to_this_version_and_back_with_the_program_of_an_earlier_one() {
    let Some(earlier) = std::env::var_os("TOOLCRIB_TEST_EARLIER_BINARY") else {
        eprintln!("skipped: TOOLCRIB_TEST_EARLIER_BINARY is not set");
        return;
    };
    let mut server = Server::new();
    let serve = |server: &Server| {
        let mut command = Command::new(&earlier);
        command.args(["serve", "--listen", &format!("127.0.0.1:{}", server.port)]);
        command.arg("--data-dir").arg(server.data_dir()).env("TOOLCRIB_QUIET", "1");
        command.output()
    };
    let (port, directory) = (server.port, server.data_dir());
    let mut running = Command::new(&earlier)
        .args(["serve", "--listen", &format!("127.0.0.1:{port}"), "--data-dir"])
        .arg(&directory)
        .env("TOOLCRIB_QUIET", "1")
        .spawn()
        .unwrap();
    eventually("the earlier server is ready", PATIENCE, || async {
        let ready = server.http.get(server.url("/readyz")).send().await;
        ready.is_ok_and(|answer| answer.status() == 200).then_some(())
    })
    .await;
    server.register("c1", "probe.read", "read").await;
    let body = json!({ "run_id": "r", "args": {}, "timeout_ms": 60_000 });
    let id = server.ticket("probe.read", body).await;
    let before = schema_version(&server.database());
    running.kill().unwrap();
    running.wait().unwrap();

    server.start().await;
    assert!(schema_version(&server.database()) > before, "there is nothing to migrate");
    let work = server.poll_requests("c1", 1).await;
    assert_eq!(text(&work[0], "tool_call_id"), id);
    assert!(server.stop().await.success());

    let ran = serve(&server).unwrap();
    let said = String::from_utf8_lossy(&ran.stderr).into_owned();
    assert!(!ran.status.success() && said.contains("newer toolcrib"), "{said}");
    assert_eq!(schema_version(&server.database()), SQLITE_SCHEMA_VERSION);

    server.start().await;
    let result = json!({ "status": "SUCCEEDED", "result": 1, "client_id": "c1", "attempt": 1 });
    server.submit(&id, result).await;
    assert_eq!(server.call(&id, 0).await["status"], Value::from("SUCCEEDED"));
    assert!(server.stop().await.success());
    assert_eq!(check(&server.data_dir()).open, 0);
    eprintln!("schema {before} to {SQLITE_SCHEMA_VERSION}; back refused: {}", said.trim());
}
