//! SSE: the server streams requests; the client answers with POST requests.

use std::time::Duration;

use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::use_short_heartbeat;
use crate::support::api::{message, offer};
use crate::support::{Server, soon, until};

#[tokio::test]
async fn requests_arrive_as_events_and_answers_are_posted() {
    let server = Server::start().await;
    let api = server.api();
    api.register("c1", json!([offer("a.tool")])).await;
    let waiting = api.invoke("a.tool", json!({ "n": 1 })).await;
    let mut work = api.follow("/internal/ingress/sse?client_id=c1", None).await;
    let event = work.event().await;
    assert_eq!(event.name, "tool_request");
    assert_eq!(event.data["type"], "tool_request");
    assert_eq!(event.data["tool_call_id"], json!(waiting));
    assert_eq!(event.data["args"], json!({ "n": 1 }));
    assert_eq!(api.call(&waiting).await["status"], "PENDING");
    let body = json!({ "client_id": "c1" });
    let ack = format!("/internal/tool_calls/{waiting}/ack");
    assert_eq!(api.post(&ack, body).await.is(200)["status"], "RUNNING");
    let body = json!({ "client_id": "c1", "percent": 10 });
    api.post(&format!("/internal/tool_calls/{waiting}/progress"), body).await.is(200);
    let body = json!({ "client_id": "c1", "status": "SUCCEEDED", "result": "by post" });
    api.submit(&waiting, body).await.is(200);
    assert_eq!(api.call(&waiting).await["result"], "by post");
    let next = api.invoke("a.tool", json!({})).await;
    assert_eq!(work.event().await.data["tool_call_id"], json!(next));
}

#[tokio::test]
async fn max_in_flight_is_respected_over_sse() {
    let server = Server::start().await;
    let api = server.api();
    api.register("c1", json!([offer("a.tool")])).await;
    let mut ids = Vec::new();
    for _ in 0..3 {
        ids.push(api.invoke("a.tool", json!({})).await);
    }
    let mut work = api.follow("/internal/ingress/sse?client_id=c1&max_in_flight=1", None).await;
    for id in &ids {
        assert_eq!(work.event().await.data["tool_call_id"], json!(id));
        let clients = api.get("/v1/clients").await.is(200);
        assert_eq!(clients["clients"][0]["in_hand"], 1);
        api.succeed(id, json!(1)).await;
    }
}

#[tokio::test]
async fn a_disconnect_requeues_unacknowledged_calls() {
    let server = Server::start().await;
    let api = server.api();
    api.register("c1", json!([offer("a.tool")])).await;
    let id = api.invoke("a.tool", json!({})).await;
    let mut work = api.follow("/internal/ingress/sse?client_id=c1", None).await;
    work.event().await;
    drop(work);
    until("the end of the connection", || async {
        (server.engine.clients().client_connection_count() == 0).then_some(())
    })
    .await;
    let request = api.poll("c1").await;
    assert_eq!((&request["tool_call_id"], &request["redelivered"]), (&json!(id), &json!(true)));
}

#[tokio::test]
async fn an_unregistered_client_is_rejected() {
    let server = Server::start().await;
    let api = server.api();
    let error = api.get("/internal/ingress/sse?client_id=c1").await.refused(404, "NOT_FOUND");
    assert!(message(&error).contains("register first"), "{error}");
    api.get("/internal/ingress/sse").await.refused(400, "BAD_REQUEST");
}

/// Loopback acknowledges every packet, so a test cannot simulate a vanished machine. For the
/// server, a client whose receive buffer is full looks the same.
#[tokio::test]
async fn calls_of_a_dead_connection_go_to_another_client() {
    let server = Server::with(use_short_heartbeat).await;
    let api = server.api();
    api.register("dead", json!([offer("a.tool")])).await;
    let mut dead = TcpStream::connect(&server.address).await.unwrap();
    let path = "/internal/ingress/sse?client_id=dead";
    let request = format!("GET {path} HTTP/1.1\r\nHost: {}\r\n\r\n", server.address);
    dead.write_all(request.as_bytes()).await.unwrap();
    let mut first = [0; 64];
    let read = soon("the head of the answer", dead.read(&mut first)).await.unwrap();
    let first = String::from_utf8_lossy(&first[..read]);
    assert!(first.starts_with("HTTP/1.1 200 OK"), "{first}");
    // More than the send and receive buffers hold for a client that does not read.
    let mut ids = Vec::new();
    for _ in 0..16 {
        ids.push(api.invoke("a.tool", json!({ "text": "x".repeat(900_000) })).await);
    }
    api.register("alive", json!([offer("a.tool")])).await;
    let mut alive = api.follow("/internal/ingress/sse?client_id=alive", None).await;
    let mut again = Vec::new();
    for id in ids {
        let request = alive.wait_for("tool_request").await.data;
        assert_eq!(request["tool_call_id"], json!(id));
        again.push(request["redelivered"].as_bool().unwrap());
    }
    // A slow machine may detect the dead connection before it delivers the last calls.
    assert!(again[0] && again.is_sorted_by(|one, next| one >= next), "{again:?}");
    assert_eq!(server.engine.clients().client_connection_count(), 1);
    drop(dead);
}

#[tokio::test]
async fn an_idle_connection_stays_open() {
    let server = Server::with(use_short_heartbeat).await;
    let api = server.api();
    api.register("c1", json!([offer("a.tool")])).await;
    let mut work = api.follow("/internal/ingress/sse?client_id=c1", None).await;
    // Several times `dead_after_ms`, with nothing but heartbeats.
    let quiet = tokio::time::timeout(Duration::from_millis(3_000), work.next()).await;
    assert!(quiet.is_err(), "{quiet:?}");
    let id = api.invoke("a.tool", json!({})).await;
    let request = work.event().await.data;
    assert_eq!((&request["tool_call_id"], &request["redelivered"]), (&json!(id), &json!(false)));
}
