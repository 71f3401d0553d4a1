//! Approvals of calls that tool services execute, of turns over NATS, and in the formats of model
//! APIs.

use serde_json::{Value, json};

use super::{Fixture, set_rule};
use crate::support::nats::{Nats, tool};
use crate::support::until;
use toolcrib::domain::access_rules::RuleVerdict;

#[tokio::test]
async fn tool_services_get_a_call_after_its_approval() {
    let Some(nats) = Nats::start().await else { return };
    let server = nats.server().await;
    let (api, operator) = (server.api(), server.operator());
    api.post("/projects/default/tools", tool("hand.work", "hand", json!({}))).await.is(201);
    set_rule(&server, "hands", RuleVerdict::Ask, &["hand.*"], |_| {}).await;
    let _host = nats
        .host("hand", |host| {
            host.with_tool("hand.work", |job| async move { Ok(json!({ "done": job.args["n"] })) })
        })
        .await;
    // An agent whose turn runs over NATS, and a caller over HTTP.
    let body = json!({ "agent_id": "ada", "worker_target": "w" });
    operator.put("/v1/agents/ada", body).await;
    let peer = nats.peer().await;
    let leased = peer.request("agent.ada.lease", json!({ "agent_turn_id": "t1" })).await;
    assert_eq!(leased["ok"], true, "{leased}");
    let call = json!({ "tool_call_id": "c1", "tool_name": "hand.work", "arguments": { "n": 1 } });
    let step = json!({ "agent_turn_id": "t1", "turn_epoch": leased["turn_epoch"],
        "step_id": "s1", "calls": [call] });
    let dispatched = peer.request("agent.ada.dispatch", step).await;
    assert_eq!(dispatched["ok"], true, "{dispatched}");
    let over_http = json!({ "run_id": "r", "args": { "n": 2 } });
    let ticket = api.post("/v1/tools/hand.work/invoke", over_http).await.is(202);
    assert_eq!(ticket["hold"], "approval", "{ticket}");
    let pending = operator.get("/v1/approvals?status=pending").await.is(200)["approvals"].clone();
    let ids: Vec<&Value> = pending.as_array().unwrap().iter().map(|a| &a["approval_id"]).collect();
    assert_eq!(ids.len(), 2, "{pending}");
    let approve = |id: &&Value| json!({ "approval_id": id, "verdict": "approve" });
    let decisions: Vec<Value> = ids.iter().map(approve).collect();
    operator.post("/v1/approvals/decide", json!({ "decisions": decisions })).await.is(200);
    let ended = api.finished(ticket["tool_call_id"].as_str().unwrap()).await;
    assert_eq!(ended["result"], json!({ "done": 2 }), "{ended}");
    let resumed = until("the turn to have its result", || async {
        let body = json!({ "agent_turn_id": "t1", "turn_epoch": leased["turn_epoch"],
            "wait_ms": 2_000 });
        let answer = peer.request("agent.ada.resume", body).await;
        (answer["ok"] == true).then_some(answer)
    })
    .await;
    assert_eq!(resumed["results"][0]["result"], json!({ "done": 1 }), "{resumed}");
}

#[tokio::test]
async fn the_formats_of_model_apis_say_that_a_call_waits() {
    let fixture = Fixture::start().await;
    let arguments = json!({ "to": "ada" });
    let responses = json!({ "type": "function_call", "call_id": "c1", "name": "mail__send",
        "arguments": arguments.to_string() });
    let anthropic =
        json!({ "type": "tool_use", "id": "c2", "name": "mail__send", "input": arguments });
    for (run, entry) in [("r1", responses), ("r2", anthropic)] {
        let body = json!({ "run_id": run, "tool_calls": [entry], "wait_ms": 100 });
        let answer = fixture.api.post("/v1/tool_calls", body).await.body;
        let result = &answer["results"][0];
        assert_eq!(result["hold"], "approval", "{answer}");
        let approval_id = result["approval_id"].as_str().unwrap();
        assert!(answer["messages"].to_string().contains("approval"), "{answer}");
        fixture.approve(approval_id).await;
        fixture.execute(json!("sent")).await;
        let call = fixture.api.finished(result["tool_call_id"].as_str().unwrap()).await;
        assert_eq!(call["status"], "SUCCEEDED", "{call}");
    }
}
