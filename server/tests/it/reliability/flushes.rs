//! T19: a flush to disk fails. The server answers that the outcome is unknown, serves no further
//! write and ends with an error; the next start finds every acknowledged call.

use std::time::Duration;

use reqwest::StatusCode;
use serde_json::{Value, json};

use crate::support::faults::fail_flushes;
use crate::support::process::{Server, check};

/// Runs a server whose flushes fail: all of them, or one.
async fn check_failed_flush(when: Option<&str>) {
    let mut server = Server::ready().await;
    server.register("client", "probe.parked", "read").await;
    let body = |key: &str| json!({ "run_id": "r", "args": {}, "idempotency_key": key });
    let stored = server.ticket("probe.parked", body("before")).await;
    if !fail_flushes(&server, when).await {
        return;
    }
    // The first request that writes gets the error; the others arrive before or after the end of
    // the process.
    let mut statuses = Vec::new();
    for key in ["first", "second", "third"] {
        let request = server.invoking("probe.parked", &body(key)).timeout(Duration::from_secs(10));
        if let Ok(answer) = request.send().await {
            let (status, answer) = (answer.status(), answer.json::<Value>().await.unwrap());
            assert_ne!(status, StatusCode::ACCEPTED, "{key} was acknowledged: {answer}");
            statuses.push((status.as_u16(), answer["code"].clone()));
        }
    }
    assert_eq!(statuses.first(), Some(&(502, json!("OUTCOME_UNKNOWN"))), "{statuses:?}");
    let ended = server.ended(Duration::from_secs(15)).await;
    assert_eq!(ended.code(), Some(1), "{ended}\n{}", server.log());
    assert!(server.log().contains("a flush to disk failed"), "{}", server.log());

    server.start().await;
    assert_eq!(server.call(&stored, 0).await["status"], "PENDING");
    // The client repeats what was not acknowledged.
    for key in ["before", "first", "second", "third"] {
        server.ticket("probe.parked", body(key)).await;
    }
    assert_eq!(server.poll_requests("client", 4).await.len(), 4);
    server.evaluated("1+1").await;
    assert!(server.stop().await.success());
    assert_eq!(check(&server.data_dir()).calls.len(), 5, "each key has one call");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_whose_flushes_fail_ends_and_restarts_clean() {
    check_failed_flush(None).await;
}

/// The operating system reports a failed flush once, and later ones succeed without the data.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flush_that_failed_once_is_not_repeated() {
    check_failed_flush(Some("1")).await;
}
