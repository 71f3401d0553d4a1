//! Requests without an answer come again after a reconnect, where twice is as good as once.

use serde_json::{Value, json};

use crate::support::api::{offer, offer_with};
use crate::support::ws::Ws;
use crate::support::{Api, Server};

fn reading() -> Value {
    json!([offer_with("a.tool", json!({ "effect": "read" }))])
}

/// A call that the client has acknowledged before it hung up.
async fn taken(api: &Api, tools: Value) -> (String, Value) {
    let mut client = Ws::offering(api, "c1", tools).await;
    let id = api.invoke("a.tool", json!({ "n": 1 })).await;
    let request = client.take().await;
    api.until_status(&id, "RUNNING").await;
    client.hang_up().await;
    (id, request)
}

#[tokio::test]
async fn what_was_not_acknowledged_goes_to_anybody() {
    let server = Server::start().await;
    let api = server.api();
    let tools = json!([offer("a.tool")]);
    let mut first = Ws::offering(&api, "c1", tools.clone()).await;
    let mut ids = Vec::new();
    for _ in 0..3 {
        ids.push(api.invoke("a.tool", json!({})).await);
        first.hear_a("tool_request").await;
    }
    let mut second = Ws::offering(&api, "c2", tools).await;
    second.quiet().await;
    // Without a word, as when a process is killed.
    drop(first);
    for id in &ids {
        let request = second.hear_a("tool_request").await;
        assert_eq!(request["tool_call_id"], json!(id), "in their old order");
        assert_eq!(request["attempt"], 1, "the same attempt");
        assert_eq!(request["redelivered"], true);
        second.succeed(&request, json!("second")).await;
        assert_eq!(api.call(id).await["taken_by"], "c2");
    }
}

#[tokio::test]
async fn what_only_reads_is_given_again_and_marked() {
    let server = Server::start().await;
    let api = server.api();
    let (id, before) = taken(&api, reading()).await;
    assert_eq!(before["redelivered"], false);
    let mut other = Ws::offering(&api, "c2", reading()).await;
    other.quiet().await;
    let mut client = Ws::hello(&api, "c1", json!({})).await;
    let again = client.hear_a("tool_request").await;
    assert_eq!(again["tool_call_id"], json!(id));
    assert_eq!(again["attempt"], before["attempt"]);
    assert_eq!(again["args"], before["args"]);
    assert_eq!(again["redelivered"], true);
    client.ack(&again).await;
    client.succeed(&again, json!("read")).await;
    let call = api.call(&id).await;
    assert_eq!(call["result"], "read");
    assert_eq!(call["outcome"]["metrics"]["attempts"], 1, "it was one attempt");
}

#[tokio::test]
async fn what_is_irreversible_is_not_given_again() {
    let server = Server::start().await;
    let api = server.api();
    let (id, request) = taken(&api, json!([offer("a.tool")])).await;
    let mut other = Ws::offering(&api, "c2", json!([offer("a.tool")])).await;
    let mut client = Ws::hello(&api, "c1", json!({})).await;
    client.quiet().await;
    other.quiet().await;
    assert_eq!(api.call(&id).await["status"], "RUNNING", "it may be happening");
    // It was done all the time, and its result is welcome.
    client.succeed(&request, json!("done once")).await;
    assert_eq!(api.call(&id).await["result"], "done once");
}

#[tokio::test]
async fn what_is_irreversible_is_given_again_to_who_keeps_a_record() {
    let server = Server::start().await;
    let api = server.api();
    let (id, _) = taken(&api, json!([offer("a.tool")])).await;
    let mut client = Ws::hello(&api, "c1", json!({ "resume": true })).await;
    let again = client.hear_a("tool_request").await;
    assert_eq!((&again["tool_call_id"], &again["redelivered"]), (&json!(id), &json!(true)));
    client.succeed(&again, json!("from my record")).await;
    assert_eq!(api.call(&id).await["result"], "from my record");
}

#[tokio::test]
async fn what_was_answered_is_not_given_again() {
    let server = Server::start().await;
    let api = server.api();
    let mut client = Ws::offering(&api, "c1", reading()).await;
    api.invoke("a.tool", json!({})).await;
    let request = client.take().await;
    client.succeed(&request, json!(1)).await;
    client.hang_up().await;
    let mut client = Ws::hello(&api, "c1", json!({ "resume": true })).await;
    client.quiet().await;
}

#[tokio::test]
async fn over_sse_it_is_the_same() {
    let server = Server::start().await;
    let api = server.api();
    let (id, _) = taken(&api, reading()).await;
    let mut work = api.follow("/internal/ingress/sse?client_id=c1", None).await;
    let again = work.event().await;
    assert_eq!(again.name, "tool_request");
    assert_eq!(
        (&again.data["tool_call_id"], &again.data["redelivered"]),
        (&json!(id), &json!(true))
    );
}

#[tokio::test]
async fn over_sse_who_keeps_a_record_says_so() {
    let server = Server::start().await;
    let api = server.api();
    let (id, _) = taken(&api, json!([offer("a.tool")])).await;
    let mut work = api.follow("/internal/ingress/sse?client_id=c1&resume=true", None).await;
    let again = work.event().await;
    assert_eq!(again.data["tool_call_id"], json!(id));
    assert_eq!(again.data["redelivered"], true);
}

#[tokio::test]
async fn a_restart_of_the_server_is_a_reconnect() {
    let server = Server::start().await;
    let api = server.api();
    let (read, _) = taken(&api, reading()).await;
    let waiting = api.invoke("a.tool", json!({})).await;
    let server = server.restart().await;
    let api = server.api();
    assert_eq!(api.call(&read).await["status"], "RUNNING", "taken is taken");
    let mut client = Ws::hello(&api, "c1", json!({})).await;
    for _ in 0..2 {
        let request = client.hear_a("tool_request").await;
        assert_eq!(request["redelivered"], true, "nobody can know whether it was given");
        client.succeed(&request, json!("after")).await;
    }
    assert_eq!(api.call(&read).await["result"], "after");
    assert_eq!(api.call(&waiting).await["result"], "after");
}

#[tokio::test]
async fn irreversible_work_is_not_repeated_over_a_restart() {
    let server = Server::start().await;
    let api = server.api();
    let (id, request) = taken(&api, json!([offer("a.tool")])).await;
    let server = server.restart().await;
    let api = server.api();
    let mut client = Ws::hello(&api, "c1", json!({})).await;
    client.quiet().await;
    assert_eq!(api.call(&id).await["status"], "RUNNING");
    client.succeed(&request, json!("done once")).await;
    assert_eq!(api.call(&id).await["result"], "done once");
}
