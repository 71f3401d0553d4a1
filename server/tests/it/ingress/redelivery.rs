//! Redelivery: unanswered requests are delivered again after a reconnect if a repetition is safe.

use serde_json::{Value, json};

use crate::support::api::{offer, offer_with};
use crate::support::ws::Ws;
use crate::support::{Api, Server};

fn read_tools() -> Value {
    json!([offer_with("a.tool", json!({ "effect": "read" }))])
}

/// Makes a call that the client acknowledges before it disconnects.
async fn make_acknowledged_call(api: &Api, tools: Value) -> (String, Value) {
    let mut client = Ws::offering(api, "c1", tools).await;
    let id = api.invoke("a.tool", json!({ "n": 1 })).await;
    let request = client.take().await;
    api.until_status(&id, "RUNNING").await;
    client.close().await;
    (id, request)
}

#[tokio::test]
async fn an_unacknowledged_call_is_redelivered_to_any_client() {
    let server = Server::start().await;
    let api = server.api();
    let tools = json!([offer("a.tool")]);
    let mut first = Ws::offering(&api, "c1", tools.clone()).await;
    let mut ids = Vec::new();
    for _ in 0..3 {
        ids.push(api.invoke("a.tool", json!({})).await);
        first.expect_message("tool_request").await;
    }
    let mut second = Ws::offering(&api, "c2", tools).await;
    second.expect_no_message().await;
    // Without a close frame, as if the process was killed.
    drop(first);
    for id in &ids {
        let request = second.expect_message("tool_request").await;
        assert_eq!(request["tool_call_id"], json!(id), "in the original order");
        assert_eq!(request["attempt"], 1, "the same attempt");
        assert_eq!(request["redelivered"], true);
        second.succeed(&request, json!("second")).await;
        assert_eq!(api.call(id).await["taken_by"], "c2");
    }
}

#[tokio::test]
async fn an_acknowledged_read_is_redelivered_and_marked() {
    let server = Server::start().await;
    let api = server.api();
    let (id, before) = make_acknowledged_call(&api, read_tools()).await;
    assert_eq!(before["redelivered"], false);
    let mut other = Ws::offering(&api, "c2", read_tools()).await;
    other.expect_no_message().await;
    let mut client = Ws::hello(&api, "c1", json!({})).await;
    let again = client.expect_message("tool_request").await;
    assert_eq!(again["tool_call_id"], json!(id));
    assert_eq!(again["attempt"], before["attempt"]);
    assert_eq!(again["args"], before["args"]);
    assert_eq!(again["redelivered"], true);
    client.ack(&again).await;
    client.succeed(&again, json!("read")).await;
    let call = api.call(&id).await;
    assert_eq!(call["result"], "read");
    assert_eq!(call["outcome"]["metrics"]["attempts"], 1, "redelivery is not a new attempt");
}

#[tokio::test]
async fn an_acknowledged_irreversible_call_is_not_redelivered() {
    let server = Server::start().await;
    let api = server.api();
    let (id, request) = make_acknowledged_call(&api, json!([offer("a.tool")])).await;
    let mut other = Ws::offering(&api, "c2", json!([offer("a.tool")])).await;
    let mut client = Ws::hello(&api, "c1", json!({})).await;
    client.expect_no_message().await;
    other.expect_no_message().await;
    assert_eq!(api.call(&id).await["status"], "RUNNING", "the client may still execute it");
    // The client executed the call meanwhile; its result is accepted.
    client.succeed(&request, json!("done once")).await;
    assert_eq!(api.call(&id).await["result"], "done once");
}

#[tokio::test]
async fn an_irreversible_call_is_redelivered_to_a_client_that_resumes() {
    let server = Server::start().await;
    let api = server.api();
    let (id, _) = make_acknowledged_call(&api, json!([offer("a.tool")])).await;
    let mut client = Ws::hello(&api, "c1", json!({ "resume": true })).await;
    let again = client.expect_message("tool_request").await;
    assert_eq!((&again["tool_call_id"], &again["redelivered"]), (&json!(id), &json!(true)));
    client.succeed(&again, json!("from my record")).await;
    assert_eq!(api.call(&id).await["result"], "from my record");
}

#[tokio::test]
async fn an_answered_call_is_not_redelivered() {
    let server = Server::start().await;
    let api = server.api();
    let mut client = Ws::offering(&api, "c1", read_tools()).await;
    api.invoke("a.tool", json!({})).await;
    let request = client.take().await;
    client.succeed(&request, json!(1)).await;
    client.close().await;
    let mut client = Ws::hello(&api, "c1", json!({ "resume": true })).await;
    client.expect_no_message().await;
}

#[tokio::test]
async fn an_acknowledged_read_is_redelivered_over_sse() {
    let server = Server::start().await;
    let api = server.api();
    let (id, _) = make_acknowledged_call(&api, read_tools()).await;
    let mut work = api.follow("/internal/ingress/sse?client_id=c1", None).await;
    let again = work.event().await;
    assert_eq!(again.name, "tool_request");
    assert_eq!(
        (&again.data["tool_call_id"], &again.data["redelivered"]),
        (&json!(id), &json!(true))
    );
}

#[tokio::test]
async fn an_sse_client_resumes_with_a_query_parameter() {
    let server = Server::start().await;
    let api = server.api();
    let (id, _) = make_acknowledged_call(&api, json!([offer("a.tool")])).await;
    let mut work = api.follow("/internal/ingress/sse?client_id=c1&resume=true", None).await;
    let again = work.event().await;
    assert_eq!(again.data["tool_call_id"], json!(id));
    assert_eq!(again.data["redelivered"], true);
}

#[tokio::test]
async fn a_server_restart_redelivers_like_a_reconnect() {
    let server = Server::start().await;
    let api = server.api();
    let (read, _) = make_acknowledged_call(&api, read_tools()).await;
    let waiting = api.invoke("a.tool", json!({})).await;
    let server = server.restart().await;
    let api = server.api();
    assert_eq!(api.call(&read).await["status"], "RUNNING", "an acknowledgement survives a restart");
    let mut client = Ws::hello(&api, "c1", json!({})).await;
    for _ in 0..2 {
        let request = client.expect_message("tool_request").await;
        assert_eq!(request["redelivered"], true, "an earlier delivery is possible");
        client.succeed(&request, json!("after")).await;
    }
    assert_eq!(api.call(&read).await["result"], "after");
    assert_eq!(api.call(&waiting).await["result"], "after");
}

#[tokio::test]
async fn an_irreversible_call_is_not_redelivered_after_a_restart() {
    let server = Server::start().await;
    let api = server.api();
    let (id, request) = make_acknowledged_call(&api, json!([offer("a.tool")])).await;
    let server = server.restart().await;
    let api = server.api();
    let mut client = Ws::hello(&api, "c1", json!({})).await;
    client.expect_no_message().await;
    assert_eq!(api.call(&id).await["status"], "RUNNING");
    client.succeed(&request, json!("done once")).await;
    assert_eq!(api.call(&id).await["result"], "done once");
}
