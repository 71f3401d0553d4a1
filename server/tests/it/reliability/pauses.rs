//! T17: SIGSTOP. A server that stood still continues with what it has; a client that stood still
//! past its time reports in vain; a server that lost its database to another one writes nothing.

use std::process::Stdio;
use std::time::Duration;

use reqwest::StatusCode;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::Command;

use super::by_form;
use crate::support::database::Database;
use crate::support::process::{PATIENCE, Server, check, eventually, text};
use crate::support::soon;

fn signal(pid: u32, name: &str) {
    let sent = std::process::Command::new("kill").args(["-s", name, &pid.to_string()]).status();
    assert!(sent.unwrap().success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_stood_still_ends_every_call_once() {
    let pause = Duration::from_millis(by_form(2_500, 30_000));
    let mut server = Server::ready().await;
    server.register("client", "probe.parked", "irreversible").await;
    let body = |timeout_ms: u64| json!({ "run_id": "r", "args": {}, "timeout_ms": timeout_ms });
    let running = server.ticket("probe.parked", body(120_000)).await;
    let late = server.ticket("probe.parked", body(2_000)).await;
    assert_eq!(server.poll_requests("client", 2).await.len(), 2);
    server.signal("STOP");
    // These requests arrive while it stands still.
    let report = json!({ "status": "SUCCEEDED", "result": 1, "client_id": "client", "attempt": 1 });
    let submitting = [&running, &late].map(|id| {
        let path = server.url(&format!("/internal/tool_calls/{id}/submit"));
        tokio::spawn(server.http.post(path).json(&report).send())
    });
    let evaluating = json!({ "run_id": "r", "args": { "expression": "6*7" }, "wait_ms": 10_000 });
    let evaluating = tokio::spawn(server.invoking("calculation.eval", &evaluating).send());
    tokio::time::sleep(pause).await;
    server.signal("CONT");
    let [of_running, of_late] = submitting;
    assert_eq!(of_running.await.unwrap().unwrap().status(), StatusCode::OK);
    // The deadline passed during the pause: the report came in time or too late, never both.
    let of_late = of_late.await.unwrap().unwrap().status();
    let call = server.call(&late, 10_000).await;
    let expected = if of_late == StatusCode::OK { "SUCCEEDED" } else { "TIMEOUT" };
    assert_eq!(call["status"], expected, "{of_late}: {call}");
    let evaluated = evaluating.await.unwrap().unwrap().json::<Value>().await.unwrap();
    assert_eq!(evaluated["status"], "SUCCEEDED", "{evaluated}");
    assert!(server.stop().await.success());
    let stored = check(&server.data_dir());
    assert_eq!((stored.open, stored.calls.len()), (0, 3));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_result_of_a_client_that_stood_still_past_its_time_is_refused() {
    let mut server = Server::ready().await;
    let policy = json!({ "attempt_timeout_ms": 1_500,
        "backoff": { "initial_ms": 20, "factor": 1.0, "max_ms": 20, "jitter": 0.0 } });
    let tool = json!({ "name": "probe.read", "effect": "read", "policy": policy });
    let body = json!({ "client_id": "worker", "tools": [tool] });
    server.post("/internal/tools/register", body).await;
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/reliability/zombie.py");
    let mut zombie = Command::new("python3")
        .args([script, &server.url(""), "worker"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(zombie.stdout.take().unwrap()).lines();
    let body = json!({ "run_id": "r", "args": {}, "timeout_ms": 60_000 });
    let id = server.ticket("probe.read", body).await;
    let work = soon("the client takes the call", lines.next_line()).await.unwrap().unwrap();
    assert_eq!(text(&work.parse::<Value>().unwrap(), "tool_call_id"), id);
    let pid = zombie.id().unwrap();
    signal(pid, "STOP");
    // The attempt times out, and another process of the same client executes the next one.
    let again = eventually("another attempt", PATIENCE, || async {
        server.poll("worker", 1, 1_000).await.pop()
    })
    .await;
    assert_eq!((text(&again, "tool_call_id"), &again["attempt"]), (id.clone(), &json!(2)));
    signal(pid, "CONT");
    zombie.stdin.take().unwrap().write_all(b"submit\n").await.unwrap();
    let refused = soon("the zombie's answer", lines.next_line()).await.unwrap().unwrap();
    let refused: Value = refused.parse().unwrap();
    assert_eq!(refused["status"], 409, "{refused}");
    assert_eq!(server.call(&id, 0).await["status"], "RUNNING", "the second attempt goes on");
    let report = json!({ "status": "SUCCEEDED", "result": { "by": "other" },
        "client_id": "worker", "attempt": 2 });
    server.submit(&id, report).await;
    assert_eq!(server.call(&id, 0).await["result"], json!({ "by": "other" }));
    assert!(soon("the zombie's end", zombie.wait()).await.unwrap().success());
    assert!(server.stop().await.success());
    assert_eq!(check(&server.data_dir()).open, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_lost_its_database_while_it_stood_still_writes_nothing() {
    let Some(database) = Database::new().await else { return };
    let mut first = Server::new().with("STORE__URL", &database.url);
    first.start().await;
    first.register("client", "probe.parked", "irreversible").await;
    let body = |key: &str| json!({ "run_id": "r", "args": {}, "idempotency_key": key });
    let acked = first.ticket("probe.parked", body("first")).await;
    first.signal("STOP");
    let written_late = tokio::spawn(first.invoking("probe.parked", &body("late")).send());
    // The database ends the sessions of the server that stands still, as after a partition, and a
    // second server takes over.
    database.set_outage(true).await;
    database.set_outage(false).await;
    let mut second = Server::new().with("STORE__URL", &database.url);
    second.start().await;
    let work = second.poll_requests("client", 1).await;
    assert_eq!(text(&work[0], "tool_call_id"), acked);
    let result = json!({ "status": "SUCCEEDED", "result": "by the second", "client_id": "client",
        "attempt": work[0]["attempt"] });
    second.submit(&acked, result).await;

    first.signal("CONT");
    let answer = written_late.await.unwrap().unwrap();
    assert_ne!(answer.status(), StatusCode::ACCEPTED, "it acknowledged without the lease");
    // It cannot know what the other has written, so it ends; a supervisor starts it again.
    let ended = first.ended(PATIENCE).await;
    assert_eq!(ended.code(), Some(1), "{ended}");
    assert!(first.log().contains("another toolcrib has served this database"), "{}", first.log());
    let call = second.call(&acked, 0).await;
    assert_eq!(call["result"], "by the second", "{call}");
    second.evaluated("6*7").await;
    let listed = second.http.get(second.url("/v1/tool_calls")).send().await.unwrap();
    let listed: Value = listed.json().await.unwrap();
    assert_eq!(listed["tool_calls"].as_array().unwrap().len(), 2, "{listed}");
    assert!(second.stop().await.success());
    database.drop().await;
}
