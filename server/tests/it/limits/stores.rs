//! Limits and switches on both stores: they survive a kill of the real binary.

use serde_json::{Value, json};

use crate::support::database::Database;
use crate::support::process::{PATIENCE, Server, eventually};

async fn invoke(server: &Server, tool: &str, body: &Value) -> (u16, Value) {
    let answer = server.invoking(tool, body).send().await.unwrap();
    let status = answer.status().as_u16();
    (status, answer.json().await.unwrap_or_default())
}

/// Makes calls until one is refused. Returns the number of accepted ones.
async fn exhaust(server: &Server) -> usize {
    let body = json!({ "run_id": "r", "args": { "expression": "1+1" } });
    for count in 0..20 {
        let (status, answer) = invoke(server, "calculation.eval", &body).await;
        match status {
            202 => {}
            429 => return count,
            _ => panic!("{status}: {answer}"),
        }
    }
    panic!("no limit applies");
}

/// Runs a command of the operator on the data of a running server.
fn command(server: &Server, words: &[&str]) {
    let ran = server.command(words).output().unwrap();
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
}

async fn counters_and_switches_survive_a_kill(mut server: Server) -> Server {
    server.start().await;
    command(&server, &["limits", "set", "agent", "default", "--per-minute", "5"]);
    // The server notices the change of another process within a second.
    let headers = eventually("the limit to apply", PATIENCE, || async {
        let body = json!({ "run_id": "r", "args": { "expression": "1" } });
        let answer = server.invoking("calculation.eval", &body).send().await.unwrap();
        answer.headers().contains_key("ratelimit").then(|| answer.headers().clone())
    })
    .await;
    assert_eq!(headers["ratelimit-policy"], "\"agent\";q=5;w=60");
    // The call that shows the limit first may have been accepted before it.
    let left = headers["ratelimit"].to_str().unwrap().strip_prefix("\"agent\";r=").unwrap();
    let left: usize = left[..1].parse().unwrap();
    assert!((4..=5).contains(&left), "{left}");
    assert_eq!(exhaust(&server).await, left);
    server.kill();
    server.start().await;
    assert_eq!(exhaust(&server).await, 0, "the kill permits nothing more");
    command(&server, &["limits", "rm", "agent", "default"]);
    eventually("the limit to be gone", PATIENCE, || async {
        let body = json!({ "run_id": "r", "args": { "expression": "1" } });
        (invoke(&server, "calculation.eval", &body).await.0 == 202).then_some(())
    })
    .await;
    server.register("c1", "door.open", "idempotent").await;
    let open = server.ticket("door.open", json!({ "run_id": "r", "args": {} })).await;
    command(&server, &["switch", "off", "tool", "door.*", "--reason", "painted"]);
    server.kill();
    server.start().await;
    let call = server.call(&open, 10_000).await;
    assert_eq!(
        (&call["status"], &call["error"]["code"]),
        (&json!("FAILED"), &json!("PERMISSION_DENIED"))
    );
    let (status, refused) =
        invoke(&server, "door.open", &json!({ "run_id": "r", "args": {} })).await;
    assert_eq!(status, 403);
    assert!(refused["detail"].as_str().unwrap().contains("painted"), "{refused}");
    command(&server, &["switch", "on", "tool", "door.*"]);
    eventually("the tool to be on", PATIENCE, || async {
        let body = json!({ "run_id": "r", "args": {} });
        (invoke(&server, "door.open", &body).await.0 == 202).then_some(())
    })
    .await;
    server
}

#[tokio::test]
async fn counters_and_switches_survive_a_kill_with_sqlite() {
    let mut server = counters_and_switches_survive_a_kill(Server::new()).await;
    server.stop().await;
}

#[tokio::test]
async fn counters_and_switches_survive_a_kill_with_postgresql() {
    let Some(database) = Database::new().await else { return };
    let server = Server::new().with("STORE__URL", &database.url);
    let mut server = counters_and_switches_survive_a_kill(server).await;
    server.stop().await;
    database.drop().await;
}
