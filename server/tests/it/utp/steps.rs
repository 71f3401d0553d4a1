//! Several steps in one epoch of a turn, and steps that came out only half way.

use serde_json::{Value, json};

use crate::support::nats::{Hand, Nats, report, result_card, tool};
use crate::support::{Api, Server};

struct World {
    _nats: Nats,
    _server: Server,
    api: Api,
    hand: Hand,
}

impl World {
    /// With room for so many open calls.
    async fn new(room: usize) -> Option<Self> {
        let nats = Nats::start().await?;
        let url = nats.url();
        let server = Server::with(|config| {
            config.nats.url = Some(url);
            config.limits.max_open_calls_per_project = room;
        })
        .await;
        let (api, hand) = (server.api(), nats.hand().await);
        api.post("/projects/default/tools", tool("hand.work", "hand", json!({}))).await.is(201);
        api.put("/v1/agents/default", json!({ "worker_target": "w1" })).await.is(200);
        api.post("/v1/agents/default/turns", json!({ "agent_turn_id": "t1" })).await.is(201);
        Some(Self { _nats: nats, _server: server, api, hand })
    }

    async fn act(&self, what: &str, body: Value) -> crate::support::api::Reply {
        self.api.post(&format!("/v1/agents/default/turns/t1/{what}"), body).await
    }

    /// Dispatches a step with one call, and goes on.
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

fn sum(id: &str, expression: &str) -> Value {
    let args = json!({ "expression": expression });
    json!({ "tool_call_id": id, "tool_name": "calculation.eval", "arguments": args })
}

fn work(id: &str) -> Value {
    json!({ "tool_call_id": id, "tool_name": "hand.work", "arguments": {} })
}

fn ids(results: &Value) -> Vec<&Value> {
    results.as_array().unwrap().iter().map(|one| &one["tool_call_id"]).collect()
}

#[tokio::test]
async fn a_turn_goes_on_with_the_results_of_all_steps_that_are_out() {
    let Some(world) = World::new(100).await else { return };
    let first = world.step("s1", work("a")).await;
    assert_eq!(ids(&first["calls"]), ["a"]);
    let second = world.step("s2", sum("b", "2+2")).await;
    assert_eq!(ids(&second["calls"]), ["b"]);
    assert_eq!(world.step("s1", work("a")).await["calls"], first["calls"], "the same again");
    let shown = world.api.get("/v1/agents/default/turns/t1").await.is(200);
    assert_eq!(ids(&shown["calls"]), ["a", "b"], "{shown}");
    world.act("suspend", json!({ "turn_epoch": 1 })).await.is(200);
    let early = world.act("resume", json!({ "turn_epoch": 1 })).await.refused(409, "CONFLICT");
    let waits = early["detail"]["waiting"].as_array().unwrap();
    assert!(waits.contains(&json!("a")), "the first step is waited for: {early}");
    let command = world.hand.next("hand").await;
    command.ack().await;
    let mut said = report(&command.payload, "r1", "success");
    said["card"] = result_card(&command.payload, "r1", "success", json!({ "done": 1 }));
    assert_eq!(world.hand.ask("sys.l0.report", said).await["ok"], true);
    let body = json!({ "turn_epoch": 1, "wait_ms": 30_000 });
    let resumed = world.act("resume", body).await.is(200);
    assert_eq!(ids(&resumed["results"]), ["a", "b"], "{resumed}");
    assert_eq!(resumed["results"][0]["result"], json!({ "done": 1 }));
    assert_eq!(resumed["results"][1]["result"]["result"], 4);
    assert_eq!(world.inbox().await, [""; 0], "what was handed over is out of the inbox");
    // Nothing is out now: there is nothing to wait for, and nothing is handed over twice.
    world.act("suspend", json!({ "turn_epoch": 2 })).await.refused(409, "CONFLICT");
    world.act("resume", json!({ "turn_epoch": 2 })).await.refused(409, "CONFLICT");
    let again = json!({ "turn_epoch": 2, "step_id": "s2", "calls": [sum("b", "2+2")] });
    world.act("dispatch", again).await.refused(409, "CONFLICT");
    let body = json!({ "turn_epoch": 2, "step_id": "s3", "calls": [sum("c", "3+3")] });
    world.act("dispatch", body).await.is(200);
    let body = json!({ "turn_epoch": 2, "wait_ms": 30_000 });
    assert_eq!(ids(&world.act("resume", body).await.is(200)["results"]), ["c"]);
}

#[tokio::test]
async fn what_a_turn_goes_on_with_is_all_that_leaves_the_inbox() {
    let Some(world) = World::new(100).await else { return };
    // A call that the agent made beside its turn, under the turn's name.
    let body = json!({ "run_id": "t1", "args": {}, "timeout_ms": 60_000 });
    let beside =
        world.api.post("/v1/tools/hand.work/invoke", body).await.body["tool_call_id"].clone();
    let command = world.hand.next("hand").await;
    command.ack().await;
    let mut said = report(&command.payload, "r1", "success");
    said["card"] = result_card(&command.payload, "r1", "success", json!(1));
    assert_eq!(world.hand.ask("sys.l0.report", said).await["ok"], true);
    world.step("s1", sum("a", "1+1")).await;
    world.act("suspend", json!({ "turn_epoch": 1 })).await.is(200);
    let body = json!({ "turn_epoch": 1, "wait_ms": 30_000 });
    assert_eq!(ids(&world.act("resume", body).await.is(200)["results"]), ["a"]);
    assert_eq!(world.inbox().await, [beside]);
}

#[tokio::test]
async fn a_stopped_turn_cancels_the_calls_of_every_step() {
    let Some(world) = World::new(100).await else { return };
    let sent = [world.step("s1", work("a")).await, world.step("s2", work("b")).await];
    world.act("stop", json!({})).await.is(200);
    for step in sent {
        let id = step["calls"][0]["call_id"].as_str().unwrap();
        assert_eq!(world.api.finished(id).await["status"], "CANCELED", "{step}");
    }
}

#[tokio::test]
async fn what_went_out_of_a_step_that_was_refused_is_found_again_and_stopped_with_the_turn() {
    let Some(world) = World::new(2).await else { return };
    let calls = json!([work("a"), work("b"), work("c")]);
    let body = json!({ "turn_epoch": 1, "calls": calls });
    let refused = world.act("dispatch", body.clone()).await;
    assert_eq!(refused.status, 429, "{}", refused.text);
    let open = async || world.api.get("/v1/tool_calls?run_id=t1").await.is(200);
    let out = open().await["tool_calls"].as_array().unwrap().clone();
    assert_eq!(out.len(), 2);
    assert_eq!(world.act("dispatch", body).await.status, 429, "the same two are out");
    assert_eq!(open().await["tool_calls"].as_array().unwrap().len(), 2);
    world.act("stop", json!({})).await.is(200);
    for call in out {
        let id = call["tool_call_id"].as_str().unwrap();
        assert_eq!(world.api.finished(id).await["status"], "CANCELED", "{call}");
    }
}
