//! Many waiting calls, decided in one request and one commit.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::Fixture;
use crate::support::Server;
use crate::support::database::Database;

const COUNT: usize = 500;

async fn decide_many(server: Server, store: &str) {
    let fixture = Fixture::on(server).await;
    let held: Vec<(String, String)> = {
        let calls = (0..COUNT).map(|n| fixture.held(&fixture.api, json!({ "n": n })));
        futures::future::join_all(calls).await
    };
    let decision = |(n, (_, id)): (usize, &(String, String))| match n % 2 {
        0 => json!({ "approval_id": id, "verdict": "approve" }),
        _ => json!({ "approval_id": id, "verdict": "reject", "reason": "odd" }),
    };
    let decisions: Vec<Value> = held.iter().enumerate().map(decision).collect();
    let body = json!({ "decisions": decisions });
    let began = Instant::now();
    let answer = fixture.operator.post("/v1/approvals/decide", body).await.is(200);
    let took = began.elapsed();
    println!("{COUNT} decisions on {store}: {took:?}");
    assert_eq!((&answer["decided"], &answer["failed"]), (&json!(COUNT), &json!(0)));
    // The promise is 200 ms for the program as it is built for users.
    let limit = if cfg!(debug_assertions) { 5_000 } else { 200 };
    assert!(took < Duration::from_millis(limit), "{took:?}");
    for (n, (call_id, approval_id)) in held.iter().enumerate().step_by(99) {
        let status = &fixture.approval(approval_id).await["status"];
        assert_eq!(status, if n % 2 == 0 { "approved" } else { "rejected" });
        let call = fixture.api.call(call_id).await;
        assert_eq!(call["status"] == "FAILED", n % 2 == 1, "{call}");
    }
    // Each decision has its entry in the audit log.
    let audit = fixture.operator.get("/v1/audit?limit=1000").await;
    let entries = audit.body.to_string().matches("approval.decided").count();
    assert!(entries >= 200, "{entries}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn five_hundred_calls_are_decided_at_once_on_sqlite() {
    decide_many(Server::start().await, "SQLite").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn five_hundred_calls_are_decided_at_once_on_postgresql() {
    let Some(database) = Database::new().await else { return };
    let url = database.url.clone();
    let server = Server::with(|config| config.store.url = Some(url)).await;
    decide_many(server, "PostgreSQL").await;
}
