//! Several clients for one tool: even distribution, pinned calls, and independent speeds.

use std::collections::HashMap;

use serde_json::json;

use crate::support::api::{message, offer};
use crate::support::ws::Ws;
use crate::support::{Api, Server};

async fn leased_calls(api: &Api) -> HashMap<String, u64> {
    let list = api.get("/v1/clients").await.is(200);
    let clients = list["clients"].as_array().unwrap().iter();
    clients
        .map(|client| {
            let name = client["client_id"].as_str().unwrap().to_owned();
            (name, client["in_hand"].as_u64().unwrap())
        })
        .collect()
}

#[tokio::test]
async fn calls_are_distributed_evenly() {
    let server = Server::start().await;
    let api = server.api();
    let tools = json!([offer("a.tool")]);
    let mut one = Ws::offering(&api, "one", tools.clone()).await;
    let mut two = Ws::offering(&api, "two", tools).await;
    for _ in 0..10 {
        api.invoke("a.tool", json!({})).await;
    }
    let mut seen = std::collections::HashSet::new();
    for _ in 0..5 {
        seen.insert(one.expect_message("tool_request").await["tool_call_id"].to_string());
        seen.insert(two.expect_message("tool_request").await["tool_call_id"].to_string());
    }
    assert_eq!(seen.len(), 10, "five each, none twice");
    one.expect_no_message().await;
    two.expect_no_message().await;
    assert_eq!(leased_calls(&api).await, HashMap::from([("one".into(), 5), ("two".into(), 5)]));
}

#[tokio::test]
async fn clients_that_answer_immediately_alternate() {
    let server = Server::start().await;
    let api = server.api();
    let tools = json!([offer("a.tool")]);
    let mut one = Ws::offering(&api, "one", tools.clone()).await;
    let mut two = Ws::offering(&api, "two", tools).await;
    let mut order = Vec::new();
    for n in 0..6 {
        let id = api.invoke("a.tool", json!({})).await;
        let (client, name) = tokio::select! {
            request = one.expect_message("tool_request") => {
                assert_eq!(request["tool_call_id"], json!(id));
                (&mut one, "one")
            }
            request = two.expect_message("tool_request") => {
                assert_eq!(request["tool_call_id"], json!(id));
                (&mut two, "two")
            }
        };
        client.succeed(&json!({ "tool_call_id": id, "attempt": 1 }), json!(n)).await;
        order.push(name);
    }
    assert!(order.windows(2).all(|pair| pair[0] != pair[1]), "{order:?}");
}

#[tokio::test]
async fn a_call_can_be_pinned_to_a_client() {
    let server = Server::start().await;
    let api = server.api();
    let tools = json!([offer("a.tool")]);
    let mut one = Ws::offering(&api, "one", tools.clone()).await;
    api.register("two", tools).await;
    let pinned = json!({ "run_id": "run_1", "args": {}, "client_id": "two" });
    let id = api.invoke_with("a.tool", pinned).await;
    assert_eq!(api.call(&id).await["client_id"], "two");
    one.expect_no_message().await;
    assert_eq!(api.call(&id).await["status"], "PENDING", "it waits for its client");
    let mut two = Ws::hello(&api, "two", json!({})).await;
    let request = two.take().await;
    assert_eq!(request["tool_call_id"], json!(id));
    // An acknowledged call is not redelivered.
    api.until_status(&id, "RUNNING").await;
    // After its client disconnected, no other client receives a pinned call.
    let unacked = json!({ "run_id": "run_1", "args": {}, "client_id": "two" });
    let other = api.invoke_with("a.tool", unacked).await;
    two.expect_message("tool_request").await;
    two.close().await;
    one.expect_no_message().await;
    let mut two = Ws::hello(&api, "two", json!({})).await;
    let again = two.expect_message("tool_request").await;
    assert_eq!(again["tool_call_id"], json!(other));
    let unknown = json!({ "run_id": "run_1", "args": {}, "client_id": "three" });
    let error = api.post("/v1/tools/a.tool/invoke", unknown).await;
    let error = error.refused(422, "VALIDATION_ERROR");
    assert!(message(&error).contains("three"), "{error}");
}

#[tokio::test]
async fn max_in_flight_is_respected_and_refilled() {
    let server = Server::start().await;
    let api = server.api();
    let hello = json!({ "tools": [offer("a.tool")], "max_in_flight": 2 });
    let mut client = Ws::hello(&api, "c1", hello).await;
    let mut ids = Vec::new();
    for _ in 0..4 {
        ids.push(api.invoke("a.tool", json!({})).await);
    }
    let first = client.take().await;
    let second = client.take().await;
    client.expect_no_message().await;
    assert_eq!((&first["tool_call_id"], &second["tool_call_id"]), (&json!(ids[0]), &json!(ids[1])));
    client
        .send(json!({
            "type": "tool_result", "tool_call_id": ids[0], "status": "SUCCEEDED", "result": 1
        }))
        .await;
    let mut kinds = Vec::new();
    for _ in 0..2 {
        let message = client.receive().await;
        if message["type"] == "tool_request" {
            assert_eq!(message["tool_call_id"], json!(ids[2]), "the oldest call is next");
        }
        kinds.push(message["type"].as_str().unwrap().to_owned());
    }
    kinds.sort();
    assert_eq!(kinds, ["result_ack", "tool_request"]);
    client.expect_no_message().await;
    assert_eq!(api.call(&ids[3]).await["status"], "PENDING");
}

#[tokio::test]
async fn a_slow_client_does_not_delay_other_clients() {
    let server = Server::start().await;
    let api = server.api();
    let tools = json!([offer("a.tool")]);
    // This client acknowledges its call and never answers.
    let hello = json!({ "tools": tools.clone(), "max_in_flight": 1 });
    let mut slow = Ws::hello(&api, "slow", hello).await;
    let stuck = api.invoke("a.tool", json!({})).await;
    slow.take().await;
    let mut quick = Ws::offering(&api, "quick", tools).await;
    let mut ids = Vec::new();
    for _ in 0..30 {
        ids.push(api.invoke("a.tool", json!({})).await);
    }
    let mut answered = 0;
    while answered < ids.len() {
        let message = quick.receive().await;
        if message["type"] == "tool_request" {
            quick
                .send(json!({
                    "type": "tool_result", "tool_call_id": message["tool_call_id"],
                    "attempt": message["attempt"], "status": "SUCCEEDED", "result": "quick"
                }))
                .await;
        } else {
            answered += 1;
        }
    }
    for id in &ids {
        assert_eq!(api.call(id).await["taken_by"], "quick");
    }
    assert_eq!(api.call(&stuck).await["status"], "RUNNING");
    slow.expect_no_message().await;
}

#[tokio::test]
async fn two_connections_of_one_client_share_its_calls() {
    let server = Server::start().await;
    let api = server.api();
    let mut first = Ws::offering(&api, "c1", json!([offer("a.tool")])).await;
    let id = api.invoke("a.tool", json!({})).await;
    let request = first.take().await;
    let mut second = Ws::hello(&api, "c1", json!({})).await;
    second.expect_no_message().await;
    // Waits for the acknowledgement on the first connection.
    crate::support::until("the acknowledgement", || async {
        (api.call(&id).await["status"] == "RUNNING").then_some(())
    })
    .await;
    // A call acknowledged on one connection can be answered on the other.
    second.succeed(&request, json!("from the other")).await;
    assert_eq!(api.call(&id).await["result"], "from the other");
    // An unacknowledged call of a closed connection is redelivered on the remaining one.
    let id = api.invoke("a.tool", json!({})).await;
    second.expect_message("tool_request").await;
    second.close().await;
    let request = first.expect_message("tool_request").await;
    assert_eq!(request["tool_call_id"], json!(id));
}

#[tokio::test]
async fn one_of_many_concurrent_acknowledgements_succeeds() {
    let server = Server::start().await;
    let api = server.api();
    let names: Vec<String> = (0..6).map(|n| format!("c{n}")).collect();
    for name in &names {
        api.register(name, json!([offer("a.tool")])).await;
    }
    for _ in 0..10 {
        let id = api.invoke("a.tool", json!({})).await;
        let path = format!("/internal/tool_calls/{id}/ack");
        let acks =
            names.iter().map(|name| api.post(&path, json!({ "client_id": name, "attempt": 1 })));
        let answers = futures::future::join_all(acks).await;
        let winners: Vec<&String> =
            names.iter().zip(&answers).filter(|(_, a)| a.status == 200).map(|(n, _)| n).collect();
        assert_eq!(winners.len(), 1, "{winners:?}");
        assert!(answers.iter().all(|answer| matches!(answer.status.as_u16(), 200 | 403 | 409)));
        assert_eq!(api.call(&id).await["taken_by"], json!(winners[0]));
        let body = json!({ "client_id": winners[0], "status": "SUCCEEDED", "result": 1 });
        api.submit(&id, body).await.is(200);
        let history = api.history(&id).await;
        assert_eq!(history.iter().filter(|name| *name == "tool.call.taken").count(), 1);
    }
}
