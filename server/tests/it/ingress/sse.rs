//! SSE: requests as they come; everything the client says goes by POST.

use serde_json::json;

use crate::support::api::{message, offer};
use crate::support::{Server, until};

#[tokio::test]
async fn requests_come_as_events_and_answers_go_by_post() {
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
async fn a_window_holds_here_too() {
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
async fn hanging_up_gives_back_what_was_not_acknowledged() {
    let server = Server::start().await;
    let api = server.api();
    api.register("c1", json!([offer("a.tool")])).await;
    let id = api.invoke("a.tool", json!({})).await;
    let mut work = api.follow("/internal/ingress/sse?client_id=c1", None).await;
    work.event().await;
    drop(work);
    until("the end of the connection", || async {
        (server.engine.client_connections() == 0).then_some(())
    })
    .await;
    let request = api.poll("c1").await;
    assert_eq!((&request["tool_call_id"], &request["redelivered"]), (&json!(id), &json!(true)));
}

#[tokio::test]
async fn a_client_that_has_not_registered_hears_nothing() {
    let server = Server::start().await;
    let api = server.api();
    let error = api.get("/internal/ingress/sse?client_id=c1").await.refused(404, "NOT_FOUND");
    assert!(message(&error).contains("register first"), "{error}");
    api.get("/internal/ingress/sse").await.refused(400, "BAD_REQUEST");
}
