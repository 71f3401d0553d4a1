//! A server with PostgreSQL as its store: restart after a kill, a second server on the same
//! database, a database outage, and tool services that use the shared tables.

mod reference_service;
mod shared_tables;

use serde_json::json;

use crate::support::database::Database;
use crate::support::process::{PATIENCE, Server, eventually};

#[tokio::test]
async fn acknowledged_calls_survive_a_kill() {
    let Some(database) = Database::new().await else { return };
    let mut server = Server::new().with("STORE__URL", &database.url);
    server.start().await;
    let done = server.evaluated("6*7").await;
    assert_eq!(done["result"]["result"], 42, "{done}");
    server.register("c1", "door.open", "idempotent").await;
    let open = server.ticket("door.open", json!({ "run_id": "r", "args": {} })).await;
    server.kill();
    server.start().await;
    let id = done["tool_call_id"].as_str().unwrap();
    assert_eq!(server.call(id, 0).await["status"], "SUCCEEDED");
    let requests = server.poll_requests("c1", 1).await;
    assert_eq!(requests[0]["tool_call_id"], open.as_str(), "{requests:?}");
    server.submit(&open, json!({ "status": "SUCCEEDED", "result": { "open": true } })).await;
    let call = server.call(&open, 5_000).await;
    assert_eq!((&call["status"], &call["result"]), (&json!("SUCCEEDED"), &json!({ "open": true })));
    assert!(!server.database().exists(), "there is no SQLite file");
    assert!(!server.log().contains("toolcrib-test"), "the password is in the log");
    server.stop().await;
    database.drop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn trees_of_agents_survive_kills() {
    let Some(database) = Database::new().await else { return };
    let server = Server::new().with("STORE__URL", &database.url);
    crate::agents::crash::check_killed_trees(server).await;
    database.drop().await;
}

#[tokio::test]
async fn a_second_server_on_the_same_database_fails_to_start() {
    let Some(database) = Database::new().await else { return };
    let mut first = Server::new().with("STORE__URL", &database.url);
    first.start().await;
    let mut second = Server::new().with("STORE__URL", &database.url);
    second.spawn();
    assert!(!second.ended(PATIENCE).await.success());
    assert!(second.log().contains("another toolcrib serves this database"), "{}", second.log());
    assert!(!second.log().contains("toolcrib-test"), "{}", second.log());
    // A command works while the server runs.
    let created = first.command(&["keys", "create", "--agent", "ada", "--role", "admin"]).output();
    let created = created.unwrap();
    assert!(created.status.success(), "{}", String::from_utf8_lossy(&created.stderr));
    eventually("the server requires the key", PATIENCE, || async {
        let answer = first.http.get(first.url("/v1/tools")).send().await.unwrap();
        (answer.status() == 401).then_some(())
    })
    .await;
    first.stop().await;
    database.drop().await;
}

#[tokio::test]
async fn a_database_outage_is_reported_and_recovered_from() {
    let Some(database) = Database::new().await else { return };
    let mut server = Server::new().with("STORE__URL", &database.url);
    server.start().await;
    database.set_outage(true).await;
    let report = eventually("not ready", PATIENCE, || async {
        let answer = server.http.get(server.url("/readyz?verbose")).send().await.unwrap();
        let (status, text) = (answer.status(), answer.text().await.unwrap());
        (status == 503).then_some(text)
    })
    .await;
    assert!(report.contains("[-]store failed"), "{report}");
    let body = json!({ "run_id": "r", "args": { "expression": "1+1" } });
    let refused = server.invoking("calculation.eval", &body).send().await.unwrap();
    assert_eq!(refused.status(), 503);
    database.set_outage(false).await;
    eventually("ready again", PATIENCE, || async {
        (server.get("/readyz").await == 200).then_some(())
    })
    .await;
    assert_eq!(server.evaluated("1+1").await["result"]["result"], 2);
    server.stop().await;
    database.drop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn followers_that_reconnect_see_every_event_once() {
    let Some(database) = Database::new().await else { return };
    let mut server = Server::new().with("STORE__URL", &database.url);
    server.start().await;
    let api = crate::support::Api::new(server.url("").trim_start_matches("http://"));
    crate::events::check_that_followers_miss_nothing(&api).await;
    server.stop().await;
    database.drop().await;
}
