//! Kills with thousands of open calls, and with calls that a client has acknowledged.

use std::collections::HashMap;
use std::time::Duration;

use futures::{SinkExt, StreamExt};
use reqwest::StatusCode;
use serde_json::{Value, json};
use tokio_tungstenite::tungstenite::Message;

use super::clients::ToolClients;
use crate::support::process::{PATIENCE, Server, check, eventually, text};

const PARKED: usize = 3_000;
const RETRYING: usize = 100;

/// Counts the pending calls by hold reason.
async fn count_pending(server: &Server) -> HashMap<String, usize> {
    let (mut count, mut cursor) = (HashMap::new(), String::new());
    loop {
        let path = format!("/v1/tool_calls?status=PENDING&limit=200&cursor={cursor}");
        let answer = server.http.get(server.url(&path)).send().await.unwrap();
        let page = answer.json::<Value>().await.unwrap();
        for call in page["tool_calls"].as_array().unwrap() {
            *count.entry(text(call, "hold")).or_default() += 1;
        }
        match page["next_cursor"].as_str() {
            Some(next) => cursor = next.to_owned(),
            None => return count,
        }
    }
}

/// Makes calls whose first attempt failed and whose next attempt is some seconds away.
async fn make_calls_that_failed_once(server: &Server) {
    let policy = json!({ "backoff": {
        "initial_ms": 5_000, "factor": 1.0, "max_ms": 5_000, "jitter": 0.0
    } });
    let tool = json!({ "name": "probe.flaky", "effect": "read", "policy": policy });
    let body = json!({ "client_id": "flaky", "tools": [tool] });
    server.post("/internal/tools/register", body).await;
    let body = json!({ "run_id": "run_flaky", "timeout_ms": 120_000 });
    for _ in 0..RETRYING {
        server.invoke("probe.flaky", body.clone()).await;
    }
    let error = json!({ "message": "not today", "retryable": true });
    for request in server.poll_requests("flaky", RETRYING).await {
        let id = text(&request, "tool_call_id");
        server.submit(&id, json!({ "status": "FAILED", "error": error })).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thousands_of_open_calls_survive_a_crash() {
    let mut server = Server::ready().await;
    let clients = ToolClients::register(&server).await;
    let parked = (0..PARKED).map(|number| {
        let args = json!({ "n": number });
        server.ticket("probe.read", json!({ "run_id": "r", "args": args, "timeout_ms": 120_000 }))
    });
    let ids: Vec<String> = futures::stream::iter(parked).buffer_unordered(64).collect().await;
    make_calls_that_failed_once(&server).await;
    server.kill();
    assert_eq!(check(&server.data_dir()).open, PARKED + RETRYING);

    let ready = server.start().await;
    assert!(ready < Duration::from_secs(5), "ready after {ready:?}");
    let found = count_pending(&server).await;
    eprintln!("ready after {} ms with {found:?}", ready.as_millis());
    assert_eq!(found.values().sum::<usize>(), PARKED + RETRYING);
    assert!(found["parked"] >= PARKED);

    clients.connect_all();
    for request in server.poll_requests("flaky", RETRYING).await {
        let id = text(&request, "tool_call_id");
        server.submit(&id, json!({ "status": "SUCCEEDED", "result": "today" })).await;
    }
    let done = async || count_pending(&server).await.is_empty().then_some(());
    eventually("a client finishes everything", PATIENCE, done).await;
    let executed = clients.executed();
    for id in &ids {
        assert_eq!(server.call(id, 5_000).await["status"], "SUCCEEDED");
        assert_eq!(executed.get(id), Some(&1), "{id}");
    }
    clients.disconnect().await;
    assert!(server.stop().await.success());
    let stored = check(&server.data_dir());
    assert_eq!((stored.open, stored.count("SUCCEEDED")), (0, PARKED + RETRYING));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tools_concurrency_limit_holds_across_a_crash() {
    let mut server = Server::ready().await;
    let policy = json!({ "max_parallel": 1 });
    let tool = json!({ "name": "probe.one", "effect": "idempotent", "policy": policy });
    server.post("/internal/tools/register", json!({ "client_id": "c1", "tools": [tool] })).await;
    let first = server.ticket("probe.one", json!({ "run_id": "r" })).await;
    let second = server.ticket("probe.one", json!({ "run_id": "r" })).await;
    assert_eq!(text(&server.poll_requests("c1", 1).await[0], "tool_call_id"), first);
    server.kill();
    server.start().await;
    assert_eq!(server.poll("c1", 5, 200).await, Vec::<Value>::new(), "one at a time");
    assert_eq!(server.call(&first, 0).await["status"], "RUNNING");
    server.submit(&first, json!({ "status": "SUCCEEDED", "client_id": "c1" })).await;
    assert_eq!(text(&server.poll_requests("c1", 1).await[0], "tool_call_id"), second);
    server.submit(&second, json!({ "status": "SUCCEEDED", "client_id": "c1" })).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_acknowledged_call_stays_with_its_client_across_a_crash() {
    let mut server = Server::ready().await;
    for client in ["taker", "other"] {
        server.register(client, "probe.once", "irreversible").await;
    }
    let body = |timeout_ms: u64| json!({ "run_id": "r", "timeout_ms": timeout_ms });
    let answered = server.ticket("probe.once", body(60_000)).await;
    let forgotten = server.ticket("probe.once", body(4_000)).await;
    let resumed = server.ticket("probe.once", body(60_000)).await;
    server.poll_requests("taker", 3).await;
    server.kill();
    server.start().await;

    for client in ["other", "taker"] {
        let again = server.poll(client, 3, 200).await;
        assert_eq!(again, Vec::<Value>::new(), "{client} receives an acknowledged call again");
    }
    let call = server.call(&answered, 0).await;
    assert_eq!((&call["status"], &call["taken_by"]), (&json!("RUNNING"), &json!("taker")));
    let result = json!({ "status": "SUCCEEDED", "result": 7, "client_id": "taker", "attempt": 1 });
    server.submit(&answered, result.clone()).await;
    assert_eq!(server.call(&answered, 0).await["result"], json!(7));

    // A client that connects with `resume` receives the call again, marked as redelivered.
    let request = first_request_after_resuming(&server, &resumed).await;
    assert_eq!(request["redelivered"], json!(true));
    server.submit(&resumed, result.clone()).await;

    let call = server.call(&forgotten, 10_000).await;
    assert_eq!((&call["status"], &call["error"]["code"]), (&json!("TIMEOUT"), &json!("TIMEOUT")));
    assert!(text(&call["error"], "message").contains("may have taken effect"), "{call}");
    let late = server.url(&format!("/internal/tool_calls/{forgotten}/submit"));
    let late = server.http.post(late).json(&result).send().await.unwrap();
    assert_eq!(late.status(), StatusCode::CONFLICT);
    assert_eq!(server.call(&forgotten, 0).await, call, "a late result changes nothing");
    assert!(server.stop().await.success());
    assert_eq!(check(&server.data_dir()).open, 0);
}

async fn first_request_after_resuming(server: &Server, id: &str) -> Value {
    let address = server.url("/internal/ingress/ws").replace("http://", "ws://");
    let (mut socket, _) = tokio_tungstenite::connect_async(address).await.unwrap();
    let hello = json!({ "type": "hello", "client_id": "taker", "resume": true });
    socket.send(Message::text(hello.to_string())).await.unwrap();
    let listening = async {
        loop {
            let frame = socket.next().await.unwrap().unwrap();
            let Message::Text(message) = frame else { continue };
            let request: Value = message.parse().unwrap();
            if request["type"] == "tool_request" && request["tool_call_id"] == id {
                return request;
            }
        }
    };
    tokio::time::timeout(PATIENCE, listening).await.unwrap()
}
