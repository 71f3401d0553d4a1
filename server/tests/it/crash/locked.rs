//! Another process locks the database for longer than the store waits for it.

use std::time::{Duration, Instant};

use reqwest::StatusCode;
use rusqlite::Connection;
use serde_json::{Value, json};

use crate::support::process::{Server, check, eventually};

/// The store waits 5 s for the lock; no caller waits much longer, at whatever time it arrives.
const ANSWERED_WITHIN: Duration = Duration::from_millis(6_500);
const ALIVE_WITHIN: Duration = Duration::from_millis(500);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_locked_database_gives_503_and_loses_nothing() {
    let mut server = Server::ready().await;
    server.register("client", "probe.parked", "read").await;
    let body = json!({ "run_id": "run_locked", "args": {}, "timeout_ms": 60_000 });
    let parked = server.ticket("probe.parked", body.clone()).await;
    let eval = json!({ "run_id": "run_locked", "args": { "expression": "6*7" } });
    let done = server.evaluated("6*7").await;

    let other = Connection::open(server.database()).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    let locked = Instant::now();
    let callers = (0..9).map(async |number| {
        // The callers arrive one after the other, while the earlier ones wait.
        tokio::time::sleep(Duration::from_millis(500 * number)).await;
        let sent = Instant::now();
        let answer = server.invoking("probe.parked", &body).send().await.unwrap();
        let took = sent.elapsed();
        assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE, "caller {number}");
        assert!(answer.headers().contains_key("retry-after"));
        assert!(took < ANSWERED_WITHIN, "caller {number} waited {took:?}");
        took
    });
    let all_callers = futures::future::join_all(callers);
    let (waited, alive) =
        tokio::join!(all_callers, assert_server_stays_responsive(&server, &done, locked));
    let longest = waited.iter().max().unwrap();
    eprintln!("9 callers answered 503, the slowest after {longest:?}; /livez within {alive:?}");

    other.execute_batch("ROLLBACK").unwrap();
    let works = async || {
        let answer = server.invoking("calculation.eval", &eval).send().await.unwrap();
        (answer.status() == StatusCode::ACCEPTED).then_some(())
    };
    eventually("calls work again", Duration::from_secs(6), works).await;
    server.submit(&parked, json!({ "status": "SUCCEEDED", "result": 1 })).await;
    assert_eq!(server.call(&parked, 0).await["status"], "SUCCEEDED");
    drop(other);
    assert!(server.stop().await.success());
    let stored = check(&server.data_dir());
    assert_eq!(stored.open, 0);
    assert_eq!(stored.count("SUCCEEDED"), stored.calls.len(), "rejected calls are not stored");
    assert!(stored.calls.len() >= 3);
}

/// Asserts that the server answers and stored calls are readable while the database is locked.
/// Returns the longest response time.
async fn assert_server_stays_responsive(
    server: &Server,
    done: &Value,
    locked: Instant,
) -> Duration {
    let id = done["tool_call_id"].as_str().unwrap();
    let mut longest = Duration::ZERO;
    while locked.elapsed() < Duration::from_secs(9) {
        let sent = Instant::now();
        assert_eq!(server.get("/livez").await, StatusCode::OK);
        let took = sent.elapsed();
        assert!(took < ALIVE_WITHIN, "/livez took {took:?}");
        longest = longest.max(took);
        assert_eq!(&server.call(id, 0).await, done, "stored calls are readable");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    longest
}
