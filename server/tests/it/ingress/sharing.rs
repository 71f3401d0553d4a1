//! Several clients for one tool: evenly, pinned, and each at its own speed.

use std::collections::HashMap;

use serde_json::json;

use crate::support::api::{message, offer};
use crate::support::ws::Ws;
use crate::support::{Api, Server};

async fn in_hand(api: &Api) -> HashMap<String, u64> {
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
async fn work_is_shared_evenly() {
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
        seen.insert(one.hear_a("tool_request").await["tool_call_id"].to_string());
        seen.insert(two.hear_a("tool_request").await["tool_call_id"].to_string());
    }
    assert_eq!(seen.len(), 10, "five each, none twice");
    one.quiet().await;
    two.quiet().await;
    assert_eq!(in_hand(&api).await, HashMap::from([("one".into(), 5), ("two".into(), 5)]));
}

#[tokio::test]
async fn who_answers_at_once_takes_turns_too() {
    let server = Server::start().await;
    let api = server.api();
    let tools = json!([offer("a.tool")]);
    let mut one = Ws::offering(&api, "one", tools.clone()).await;
    let mut two = Ws::offering(&api, "two", tools).await;
    let mut turns = Vec::new();
    for n in 0..6 {
        let id = api.invoke("a.tool", json!({})).await;
        let (client, name) = tokio::select! {
            request = one.hear_a("tool_request") => {
                assert_eq!(request["tool_call_id"], json!(id));
                (&mut one, "one")
            }
            request = two.hear_a("tool_request") => {
                assert_eq!(request["tool_call_id"], json!(id));
                (&mut two, "two")
            }
        };
        client.succeed(&json!({ "tool_call_id": id, "attempt": 1 }), json!(n)).await;
        turns.push(name);
    }
    assert!(turns.windows(2).all(|pair| pair[0] != pair[1]), "{turns:?}");
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
    one.quiet().await;
    assert_eq!(api.call(&id).await["status"], "PENDING", "it waits for its client");
    let mut two = Ws::hello(&api, "two", json!({})).await;
    let request = two.take().await;
    assert_eq!(request["tool_call_id"], json!(id));
    // Taken, and known to be: it is not given again.
    api.until_status(&id, "RUNNING").await;
    // Its client goes away without having answered: still nobody else is given it.
    let unacked = json!({ "run_id": "run_1", "args": {}, "client_id": "two" });
    let other = api.invoke_with("a.tool", unacked).await;
    two.hear_a("tool_request").await;
    two.hang_up().await;
    one.quiet().await;
    let mut two = Ws::hello(&api, "two", json!({})).await;
    let again = two.hear_a("tool_request").await;
    assert_eq!(again["tool_call_id"], json!(other));
    let nobody = json!({ "run_id": "run_1", "args": {}, "client_id": "three" });
    let error = api.post("/v1/tools/a.tool/invoke", nobody).await;
    let error = error.refused(422, "VALIDATION_ERROR");
    assert!(message(&error).contains("three"), "{error}");
}

#[tokio::test]
async fn a_window_is_not_exceeded_and_refills() {
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
    client.quiet().await;
    assert_eq!((&first["tool_call_id"], &second["tool_call_id"]), (&json!(ids[0]), &json!(ids[1])));
    client
        .say(json!({
            "type": "tool_result", "tool_call_id": ids[0], "status": "SUCCEEDED", "result": 1
        }))
        .await;
    let mut kinds = Vec::new();
    for _ in 0..2 {
        let heard = client.hear().await;
        if heard["type"] == "tool_request" {
            assert_eq!(heard["tool_call_id"], json!(ids[2]), "the oldest comes next");
        }
        kinds.push(heard["type"].as_str().unwrap().to_owned());
    }
    kinds.sort();
    assert_eq!(kinds, ["result_ack", "tool_request"]);
    client.quiet().await;
    assert_eq!(api.call(&ids[3]).await["status"], "PENDING");
}

#[tokio::test]
async fn a_slow_client_does_not_slow_the_others() {
    let server = Server::start().await;
    let api = server.api();
    let tools = json!([offer("a.tool")]);
    // One that takes what it is given and never answers.
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
        let heard = quick.hear().await;
        if heard["type"] == "tool_request" {
            quick
                .say(json!({
                    "type": "tool_result", "tool_call_id": heard["tool_call_id"],
                    "attempt": heard["attempt"], "status": "SUCCEEDED", "result": "quick"
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
    slow.quiet().await;
}

#[tokio::test]
async fn two_connections_of_one_client_are_one_client() {
    let server = Server::start().await;
    let api = server.api();
    let mut first = Ws::offering(&api, "c1", json!([offer("a.tool")])).await;
    let id = api.invoke("a.tool", json!({})).await;
    let request = first.take().await;
    let mut second = Ws::hello(&api, "c1", json!({})).await;
    second.quiet().await;
    // Its acknowledgement is on its way on the first connection, and must be there first.
    crate::support::until("the call to be taken", || async {
        (api.call(&id).await["status"] == "RUNNING").then_some(())
    })
    .await;
    // What was taken on one connection may be answered on the other.
    second.succeed(&request, json!("from the other")).await;
    assert_eq!(api.call(&id).await["result"], "from the other");
    // What was given on a connection that ends goes on over the one that is left.
    let id = api.invoke("a.tool", json!({})).await;
    second.hear_a("tool_request").await;
    second.hang_up().await;
    let request = first.hear_a("tool_request").await;
    assert_eq!(request["tool_call_id"], json!(id));
}

#[tokio::test]
async fn of_many_who_take_it_at_once_one_has_it() {
    let server = Server::start().await;
    let api = server.api();
    let names: Vec<String> = (0..6).map(|n| format!("c{n}")).collect();
    for name in &names {
        api.register(name, json!([offer("a.tool")])).await;
    }
    for _ in 0..10 {
        let id = api.invoke("a.tool", json!({})).await;
        let path = format!("/internal/tool_calls/{id}/ack");
        let takes =
            names.iter().map(|name| api.post(&path, json!({ "client_id": name, "attempt": 1 })));
        let answers = futures::future::join_all(takes).await;
        let taken: Vec<&String> =
            names.iter().zip(&answers).filter(|(_, a)| a.status == 200).map(|(n, _)| n).collect();
        assert_eq!(taken.len(), 1, "{taken:?}");
        assert!(answers.iter().all(|answer| matches!(answer.status.as_u16(), 200 | 403 | 409)));
        assert_eq!(api.call(&id).await["taken_by"], json!(taken[0]));
        let body = json!({ "client_id": taken[0], "status": "SUCCEEDED", "result": 1 });
        api.submit(&id, body).await.is(200);
        let history = api.history(&id).await;
        assert_eq!(history.iter().filter(|name| *name == "tool.call.taken").count(), 1);
    }
}
