//! Several steps in one epoch of a turn, and partially dispatched steps.

use serde_json::{Value, json};

use crate::support::nats::{Nats, NatsPeer, report, result_card, tool};
use crate::support::{Api, Server};

struct Fixture {
    _nats: Nats,
    _server: Server,
    api: Api,
    peer: NatsPeer,
}

impl Fixture {
    /// Starts a server with this limit of open calls.
    async fn new(max_open_calls: usize) -> Option<Self> {
        let nats = Nats::start().await?;
        let url = nats.url();
        let server = Server::with(|config| {
            config.nats.url = Some(url);
            config.limits.max_open_calls_per_project = max_open_calls;
        })
        .await;
        let (api, peer) = (server.api(), nats.peer().await);
        api.post("/projects/default/tools", tool("hand.work", "hand", json!({}))).await.is(201);
        api.put("/v1/agents/default", json!({ "worker_target": "w1" })).await.is(200);
        api.post("/v1/agents/default/turns", json!({ "agent_turn_id": "t1" })).await.is(201);
        Some(Self { _nats: nats, _server: server, api, peer })
    }

    async fn act(&self, action: &str, body: Value) -> crate::support::api::Reply {
        self.api.post(&format!("/v1/agents/default/turns/t1/{action}"), body).await
    }

    /// Dispatches a step with one call, without a suspend.
    async fn step(&self, step: &str, call: Value) -> Value {
        let body = json!({ "turn_epoch": 1, "step_id": step, "suspend": false, "calls": [call] });
        self.act("dispatch", body).await.is(200)
    }

    async fn inbox(&self) -> Vec<Value> {
        let found = self.api.get("/v1/agents/default/inbox").await.is(200);
        let items = found["items"].as_array().unwrap().iter();
        items.map(|item| item["payload"]["tool_call_id"].clone()).collect()
    }
}

fn eval_call(id: &str, expression: &str) -> Value {
    let args = json!({ "expression": expression });
    json!({ "tool_call_id": id, "tool_name": "calculation.eval", "arguments": args })
}

fn work_call(id: &str) -> Value {
    json!({ "tool_call_id": id, "tool_name": "hand.work", "arguments": {} })
}

fn ids(results: &Value) -> Vec<&Value> {
    results.as_array().unwrap().iter().map(|one| &one["tool_call_id"]).collect()
}

#[tokio::test]
async fn a_turn_resumes_with_the_results_of_all_open_steps() {
    let Some(fixture) = Fixture::new(100).await else { return };
    let first = fixture.step("s1", work_call("a")).await;
    assert_eq!(ids(&first["calls"]), ["a"]);
    let second = fixture.step("s2", eval_call("b", "2+2")).await;
    assert_eq!(ids(&second["calls"]), ["b"]);
    assert_eq!(fixture.step("s1", work_call("a")).await["calls"], first["calls"], "the same again");
    let turn = fixture.api.get("/v1/agents/default/turns/t1").await.is(200);
    assert_eq!(ids(&turn["calls"]), ["a", "b"], "{turn}");
    fixture.act("suspend", json!({ "turn_epoch": 1 })).await.is(200);
    let early = fixture.act("resume", json!({ "turn_epoch": 1 })).await.refused(409, "CONFLICT");
    let pending = early["detail"]["waiting"].as_array().unwrap();
    assert!(pending.contains(&json!("a")), "the first step is pending: {early}");
    let command = fixture.peer.next("hand").await;
    command.ack().await;
    let mut report_body = report(&command.payload, "r1", "success");
    report_body["card"] = result_card(&command.payload, "r1", "success", json!({ "done": 1 }));
    assert_eq!(fixture.peer.request("sys.l0.report", report_body).await["ok"], true);
    let body = json!({ "turn_epoch": 1, "wait_ms": 30_000 });
    let resumed = fixture.act("resume", body).await.is(200);
    assert_eq!(ids(&resumed["results"]), ["a", "b"], "{resumed}");
    assert_eq!(resumed["results"][0]["result"], json!({ "done": 1 }));
    assert_eq!(resumed["results"][1]["result"]["result"], 4);
    assert_eq!(fixture.inbox().await, [""; 0], "delivered results are removed from the inbox");
    // No call is open: the turn can neither suspend nor receive results twice.
    fixture.act("suspend", json!({ "turn_epoch": 2 })).await.refused(409, "CONFLICT");
    fixture.act("resume", json!({ "turn_epoch": 2 })).await.refused(409, "CONFLICT");
    let again = json!({ "turn_epoch": 2, "step_id": "s2", "calls": [eval_call("b", "2+2")] });
    fixture.act("dispatch", again).await.refused(409, "CONFLICT");
    let body = json!({ "turn_epoch": 2, "step_id": "s3", "calls": [eval_call("c", "3+3")] });
    fixture.act("dispatch", body).await.is(200);
    let body = json!({ "turn_epoch": 2, "wait_ms": 30_000 });
    assert_eq!(ids(&fixture.act("resume", body).await.is(200)["results"]), ["c"]);
}

#[tokio::test]
async fn a_resume_removes_only_its_own_results_from_the_inbox() {
    let Some(fixture) = Fixture::new(100).await else { return };
    // A call that the agent made outside its turn, with the turn id as run id.
    let body = json!({ "run_id": "t1", "args": {}, "timeout_ms": 60_000 });
    let other_call =
        fixture.api.post("/v1/tools/hand.work/invoke", body).await.body["tool_call_id"].clone();
    let command = fixture.peer.next("hand").await;
    command.ack().await;
    let mut report_body = report(&command.payload, "r1", "success");
    report_body["card"] = result_card(&command.payload, "r1", "success", json!(1));
    assert_eq!(fixture.peer.request("sys.l0.report", report_body).await["ok"], true);
    fixture.step("s1", eval_call("a", "1+1")).await;
    fixture.act("suspend", json!({ "turn_epoch": 1 })).await.is(200);
    let body = json!({ "turn_epoch": 1, "wait_ms": 30_000 });
    assert_eq!(ids(&fixture.act("resume", body).await.is(200)["results"]), ["a"]);
    assert_eq!(fixture.inbox().await, [other_call]);
}

#[tokio::test]
async fn stopping_a_turn_cancels_the_calls_of_every_step() {
    let Some(fixture) = Fixture::new(100).await else { return };
    let sent = [fixture.step("s1", work_call("a")).await, fixture.step("s2", work_call("b")).await];
    fixture.act("stop", json!({})).await.is(200);
    for step in sent {
        let id = step["calls"][0]["call_id"].as_str().unwrap();
        assert_eq!(fixture.api.finished(id).await["status"], "CANCELED", "{step}");
    }
}

#[tokio::test]
async fn calls_of_a_rejected_step_are_reused_and_canceled_with_the_turn() {
    let Some(fixture) = Fixture::new(2).await else { return };
    let calls = json!([work_call("a"), work_call("b"), work_call("c")]);
    let body = json!({ "turn_epoch": 1, "calls": calls });
    let refused = fixture.act("dispatch", body.clone()).await;
    assert_eq!(refused.status, 429, "{}", refused.text);
    let list_calls = async || fixture.api.get("/v1/tool_calls?run_id=t1").await.is(200);
    let listed_calls = list_calls().await["tool_calls"].as_array().unwrap().clone();
    assert_eq!(listed_calls.len(), 2);
    assert_eq!(fixture.act("dispatch", body).await.status, 429, "the same two calls are open");
    assert_eq!(list_calls().await["tool_calls"].as_array().unwrap().len(), 2);
    fixture.act("stop", json!({})).await.is(200);
    for call in listed_calls {
        let id = call["tool_call_id"].as_str().unwrap();
        assert_eq!(fixture.api.finished(id).await["status"], "CANCELED", "{call}");
    }
}
