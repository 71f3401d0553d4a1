//! Wakeups of agents' workers by webhook.

use serde_json::{Value, json};

use super::Fixture;
use crate::support::receiver::{Answer, KEY, Receiver};

fn worker(url: &str) -> Value {
    json!({ "driver": "worker", "wakeup_url": url, "profile": { "instructions": "x" } })
}

#[tokio::test]
async fn a_worker_is_woken_by_a_signed_webhook_and_answers_the_call() {
    let fixture = Fixture::start().await;
    let receiver = Receiver::answering([Answer::Code(503)]).await;
    let url = format!("{}/wake", receiver.url);
    let defined = fixture.api.put("/v1/agents/w", worker(&url)).await.is(200);
    assert_eq!(defined["wakeup_url"], url.as_str());
    let body = json!({ "run_id": "r", "args": { "instruction": "this" } });
    let call = fixture.api.post("/v1/tools/agent.w/invoke", body).await.body;
    let messages = receiver.received(2).await;
    for message in &messages {
        assert!(message.is_signed_with(KEY));
        let body = message.json();
        assert_eq!(
            (&body["type"], &body["data"]["agent_id"]),
            (&json!("agent.wakeup"), &json!("w"))
        );
        assert_eq!((&body["data"]["reason"], message.path.as_str()), (&json!("turn"), "/wake"));
    }
    // The worker reads its inbox, leases the turn and finishes it.
    let inbox = fixture.api.get("/v1/agents/w/inbox").await.is(200);
    assert_eq!(inbox["items"][0]["inbox_id"], messages[1].json()["data"]["inbox_id"]);
    let turn = messages[1].json()["data"]["metadata"]["agent_turn_id"].clone();
    let leased = fixture.api.post("/v1/agents/w/turns", json!({ "agent_turn_id": turn })).await;
    let path = format!("/v1/agents/w/turns/{}/finish", turn.as_str().unwrap());
    let finish = json!({ "turn_epoch": leased.body["turn_epoch"], "reason": "done" });
    fixture.api.post(&path, finish).await.is(200);
    let id = call["tool_call_id"].as_str().unwrap();
    let ended = fixture.api.get(&format!("/v1/tool_calls/{id}?wait_ms=5000")).await.is(200);
    assert_eq!(ended["status"], "SUCCEEDED", "{ended}");
}

#[tokio::test]
async fn each_new_item_has_a_wakeup_with_its_own_id_and_turn() {
    let fixture = Fixture::start().await;
    let receiver = Receiver::answering([]).await;
    fixture.api.put("/v1/agents/w", worker(&receiver.url)).await.is(200);
    for run in ["r1", "r2", "r3"] {
        let body = json!({ "run_id": run, "args": { "instruction": run } });
        fixture.api.post("/v1/tools/agent.w/invoke", body).await;
    }
    let ids = |data: &Value, turn: &Value| (data["inbox_id"].to_string(), turn.to_string());
    let messages = receiver.received(3).await;
    let mut woken: Vec<(String, String)> = messages
        .iter()
        .map(|message| message.json()["data"].clone())
        .map(|data| ids(&data, &data["metadata"]["agent_turn_id"]))
        .collect();
    let inbox = fixture.api.get("/v1/agents/w/inbox").await.is(200);
    let items = inbox["items"].as_array().unwrap();
    let mut waiting: Vec<(String, String)> =
        items.iter().map(|item| ids(item, &item["payload"]["agent_turn_id"])).collect();
    woken.sort();
    waiting.sort();
    assert_eq!(woken, waiting);
}

#[tokio::test]
async fn a_wakeup_url_is_checked_when_the_agent_is_defined() {
    let fixture = Fixture::start().await;
    for url in ["http://10.0.0.1/x", "ftp://127.0.0.1/x", "no url"] {
        let refused = fixture.api.put("/v1/agents/w", worker(url)).await.body;
        assert_eq!(refused["code"], "VALIDATION_ERROR", "{url}: {refused}");
        assert!(refused["detail"].to_string().contains("wakeup_url"), "{url}: {refused}");
    }
    let of_loop = json!({ "driver": "loop", "wakeup_url": "http://127.0.0.1/x" });
    let refused = fixture.api.put("/v1/agents/w", of_loop).await.body;
    assert!(refused["detail"].to_string().contains("only for agents"), "{refused}");
    let bare = fixture.api.put("/v1/agents/w", json!({ "driver": "worker" })).await.body;
    assert!(
        bare["detail"].to_string().contains("worker_target or wakeup_url is missing"),
        "{bare}"
    );
}
