//! What belongs to another epoch, step, channel or lineage is not taken for this one.

use serde_json::{Value, json};

use crate::support::nats::{Given, Hand, Nats, report, result_card, tool};
use crate::support::{Api, Server, until};

struct World {
    _nats: Nats,
    _server: Server,
    api: Api,
    hand: Hand,
}

impl World {
    async fn new() -> Option<Self> {
        let nats = Nats::start().await?;
        let server = nats.server().await;
        let (api, hand) = (server.api(), nats.hand().await);
        api.post("/projects/default/tools", tool("hand.work", "hand", json!({}))).await.is(201);
        api.put("/v1/agents/ada", json!({ "worker_target": "w1" })).await.is(200);
        Some(Self { _nats: nats, _server: server, api, hand })
    }

    async fn act(&self, turn: &str, what: &str, body: Value) -> crate::support::api::Reply {
        self.api.post(&format!("/v1/agents/ada/turns/{turn}/{what}"), body).await
    }

    /// A turn whose lease runs out soon, and what was dispatched in it before. Where the machine
    /// was too slow for that, the next one is longer.
    async fn under_a_short_lease(&self) -> (String, Value) {
        for lease_ms in [1_000, 4_000, 16_000] {
            let turn = format!("t{lease_ms}");
            let wanted = json!({ "agent_turn_id": turn, "lease_ms": lease_ms });
            self.api.post("/v1/agents/ada/turns", wanted).await.is(201);
            let calls = json!([call("c", "hand.work", json!({}))]);
            let body = json!({ "turn_epoch": 1, "calls": calls, "suspend": false });
            let sent = self.act(&turn, "dispatch", body).await;
            if sent.status == 200 {
                return (turn, sent.body);
            }
            sent.refused(409, "CONFLICT");
        }
        panic!("no lease was long enough to dispatch a call");
    }

    async fn command(&self) -> Given {
        let command = self.hand.next("hand").await;
        command.ack().await;
        command
    }
}

fn call(id: &str, tool: &str, args: Value) -> Value {
    json!({ "tool_call_id": id, "tool_name": tool, "arguments": args })
}

/// A success, with its card.
fn success(command: &Value, card: &str) -> Value {
    let mut said = report(command, card, "success");
    said["card"] = result_card(command, card, "success", json!(card));
    said
}

#[tokio::test]
async fn a_result_for_an_epoch_that_is_over_is_refused() {
    let Some(world) = World::new().await else { return };
    let (turn, sent) = world.under_a_short_lease().await;
    let wanted = json!({ "agent_turn_id": turn });
    let id = sent["calls"][0]["call_id"].as_str().unwrap().to_owned();
    let command = world.command().await;
    // Whoever dispatched it is gone; somebody else has the turn.
    let again = until("the lease to run out", || async {
        let answer = world.api.post("/v1/agents/ada/turns", wanted.clone()).await;
        (answer.status == 201).then_some(answer.body)
    })
    .await;
    assert!(again["turn_epoch"].as_u64().unwrap() > 1, "{again}");
    let said = success(&command.payload, "r1");
    let refused = world.hand.ask("sys.l0.report", said.clone()).await;
    assert_eq!(refused["error"]["code"], "conflict", "{refused}");
    world.api.post("/v1/tool_results", said).await.refused(409, "CONFLICT");
    let dead = world.api.get("/v1/dead_letters").await.is(200)["dead_letters"][0].clone();
    assert_eq!(dead["reason"], "wrong_epoch", "{dead}");
    let path = format!("/v1/dead_letters/{}/redrive", dead["id"].as_str().unwrap());
    world.api.post(&path, json!({})).await.refused(409, "CONFLICT");
    let now = world.api.call(&id).await;
    assert!(["PENDING", "RUNNING"].contains(&now["status"].as_str().unwrap()), "{now}");
    assert_eq!(world.api.get("/v1/agents/ada/inbox").await.is(200)["items"], json!([]));
    world.api.post(&format!("/v1/tool_calls/{id}/cancel"), json!({})).await.is(200);
    assert!(world.api.history(&id).await.contains(&"tool.call.late".to_owned()));
}

#[tokio::test]
async fn a_stopped_turn_cancels_what_was_left_behind_when_its_lease_ran_out() {
    let Some(world) = World::new().await else { return };
    let (turn, sent) = world.under_a_short_lease().await;
    let id = sent["calls"][0]["call_id"].as_str().unwrap().to_owned();
    until("the lease to run out", || async {
        let wanted = json!({ "agent_turn_id": turn });
        (world.api.post("/v1/agents/ada/turns", wanted).await.status == 201).then_some(())
    })
    .await;
    assert_eq!(world.api.call(&id).await["status"], "PENDING");
    world.act(&turn, "stop", json!({})).await.is(200);
    assert_eq!(world.api.finished(&id).await["status"], "CANCELED");
}

#[tokio::test]
async fn a_late_report_does_not_change_the_card_that_a_call_ended_with() {
    let Some(world) = World::new().await else { return };
    let body = json!({ "run_id": "r1", "args": {}, "timeout_ms": 2_000 });
    let id = world.api.post("/v1/tools/hand.work/invoke", body).await.body["tool_call_id"].clone();
    let id = id.as_str().unwrap();
    // A tool service has begun it, and says too late that its own time was over.
    let asked = format!("card_{}_call", id.trim_start_matches("tc_"));
    world.hand.ask("sys.cards.get", json!({ "card_ids": [asked] })).await;
    until("the call to be taken", || async {
        (world.api.call(id).await["status"] != "PENDING").then_some(())
    })
    .await;
    assert_eq!(world.api.finished(id).await["status"], "TIMEOUT");
    let shown = async || world.api.get(&format!("/v1/tool_calls/{id}/cards")).await.is(200);
    let before = shown().await;
    assert_eq!(before["cards"][1]["author_id"], "worker.watchdog", "{before}");
    let command = json!({
        "tool_call_id": id, "agent_turn_id": "r1", "turn_epoch": 1, "agent_id": "default",
        "after_execution": "suspend", "step_id": before["cards"][0]["metadata"]["step_id"],
    });
    let mut said = report(&command, "late", "timeout");
    said["card"] = result_card(&command, "late", "timeout", Value::Null);
    let late = world.hand.ask("sys.l0.report", said).await;
    assert_eq!((&late["ok"], &late["late"]), (&json!(true), &json!(true)), "{late}");
    assert_eq!(shown().await, before);
}

#[tokio::test]
async fn a_report_that_comes_again_after_the_turn_went_on_is_the_same() {
    let Some(world) = World::new().await else { return };
    world.api.post("/v1/agents/ada/turns", json!({ "agent_turn_id": "t1" })).await.is(201);
    let body = json!({ "turn_epoch": 1, "calls": [call("c", "hand.work", json!({}))] });
    world.act("t1", "dispatch", body).await.is(200);
    let command = world.command().await;
    let said = success(&command.payload, "r1");
    assert_eq!(world.hand.ask("sys.l0.report", said.clone()).await["duplicate"], false);
    let body = json!({ "turn_epoch": 1, "wait_ms": 9_000 });
    assert_eq!(world.act("t1", "resume", body).await.is(200)["turn_epoch"], 2);
    let again = world.hand.ask("sys.l0.report", said).await;
    assert_eq!((&again["ok"], &again["duplicate"]), (&json!(true), &json!(true)), "{again}");
}

#[tokio::test]
async fn a_step_that_was_dispatched_has_its_calls() {
    let Some(world) = World::new().await else { return };
    world.api.post("/v1/agents/ada/turns", json!({ "agent_turn_id": "t1" })).await.is(201);
    let step = |calls: Value| json!({ "turn_epoch": 1, "step_id": "s1", "calls": calls });
    let first = json!([
        call("a", "hand.work", json!({ "n": 1 })),
        call("b", "hand.nothing", json!({ "m": 1 })),
    ]);
    let sent = world.act("t1", "dispatch", step(first.clone())).await.is(200);
    let again = world.act("t1", "dispatch", step(first)).await.is(200);
    assert_eq!(again["calls"], sent["calls"], "the same again gives the same calls");
    let good = || call("b", "hand.nothing", json!({ "m": 1 }));
    for other in [
        json!([call("a", "hand.work", json!({ "n": 1 }))]),
        json!([call("a", "hand.work", json!({ "n": 2 })), good()]),
        json!([call("a", "hand.other", json!({ "n": 1 })), good()]),
        json!([call("c", "hand.work", json!({ "n": 1 })), good()]),
        json!([call("a", "hand.work", json!({ "n": 1 })), call("b", "hand.nothing", json!({}))]),
    ] {
        world.act("t1", "dispatch", step(other)).await.refused(409, "CONFLICT");
    }
    // Nor is its name free in a later epoch.
    let command = world.command().await;
    world.hand.ask("sys.l0.report", success(&command.payload, "r1")).await;
    let body = json!({ "turn_epoch": 1, "wait_ms": 9_000 });
    world.act("t1", "resume", body).await.is(200);
    let body = json!({
        "turn_epoch": 2, "step_id": "s1", "calls": [call("later", "hand.work", json!({}))],
    });
    world.act("t1", "dispatch", body).await.refused(409, "CONFLICT");
}

#[tokio::test]
async fn a_step_that_did_not_suspend_has_its_calls_too() {
    let Some(world) = World::new().await else { return };
    world.api.post("/v1/agents/ada/turns", json!({ "agent_turn_id": "t1" })).await.is(201);
    let step = |args: Value| {
        json!({
            "turn_epoch": 1, "step_id": "s1", "suspend": false,
            "calls": [call("a", "hand.work", args)],
        })
    };
    let sent = world.act("t1", "dispatch", step(json!({ "n": 1 }))).await.is(200);
    let again = world.act("t1", "dispatch", step(json!({ "n": 1 }))).await.is(200);
    assert_eq!(again["calls"], sent["calls"]);
    world.act("t1", "dispatch", step(json!({ "n": 2 }))).await.refused(409, "CONFLICT");
}

#[tokio::test]
async fn a_report_names_the_channel_that_it_is_sent_under_or_none() {
    let Some(world) = World::new().await else { return };
    let id = world.api.invoke("hand.work", json!({})).await;
    let command = world.command().await;
    let said = success(&command.payload, "r1");
    let other = [("CG-Channel-Id", "another")];
    let refused = world.hand.ask_in("default", "sys.l0.report", said.clone(), &other).await;
    assert_eq!(refused["error"]["code"], "bad_request", "{refused}");
    let dead = world.api.get("/v1/dead_letters").await.is(200)["dead_letters"][0].clone();
    assert_eq!(dead["reason"], "malformed", "{dead}");
    let own = [("CG-Channel-Id", "public")];
    assert_eq!(world.hand.ask_in("default", "sys.l0.report", said, &own).await["ok"], true);
    assert_eq!(world.api.finished(&id).await["status"], "SUCCEEDED");
}

#[tokio::test]
async fn a_result_has_no_other_parent_than_its_call() {
    let Some(world) = World::new().await else { return };
    let id = world.api.invoke("hand.work", json!({})).await;
    let command = world.command().await;
    let mut card = result_card(&command.payload, "r1", "success", json!(1));
    card["metadata"]["parent_step_id"] = json!("step_of_somebody_else");
    let refused = world.hand.ask("sys.cards.put", json!({ "card": card })).await;
    assert_eq!(refused["error"]["code"], "bad_request", "{refused}");
    card["metadata"]["parent_step_id"] = Value::Null;
    assert_eq!(world.hand.ask("sys.cards.put", json!({ "card": card })).await["ok"], true);
    let taken = world.hand.ask("sys.l0.report", report(&command.payload, "r1", "success")).await;
    assert_eq!(taken["ok"], true, "{taken}");
    assert_eq!(world.api.finished(&id).await["status"], "SUCCEEDED");
}

#[tokio::test]
async fn a_call_may_be_named_as_the_alternates_of_another_are() {
    let Some(world) = World::new().await else { return };
    for (turn, ids) in [("t1", &["c-a1"][..]), ("t2", &["c", "c-a1", "c-a1-a2"][..])] {
        let wanted = json!({ "agent_turn_id": turn });
        world.api.post("/v1/agents/ada/turns", wanted).await.is(201);
        let calls: Vec<Value> = ids.iter().map(|id| call(id, "hand.work", json!({}))).collect();
        let body = json!({ "turn_epoch": 1, "calls": calls });
        world.act(turn, "dispatch", body).await.is(200);
        for _ in ids {
            let command = world.command().await;
            let card = format!("{turn}-{}", command.payload["tool_call_id"].as_str().unwrap());
            let taken = world.hand.ask("sys.l0.report", success(&command.payload, &card)).await;
            assert_eq!(
                (&taken["ok"], &taken["duplicate"]),
                (&json!(true), &json!(false)),
                "{taken}"
            );
        }
        let body = json!({ "turn_epoch": 1, "wait_ms": 9_000 });
        let resumed = world.act(turn, "resume", body).await.is(200);
        let results = resumed["results"].as_array().unwrap().clone();
        for (id, result) in ids.iter().zip(&results) {
            assert_eq!(result["tool_call_id"], *id);
            assert_eq!(result["result"], format!("{turn}-{id}"), "each has its own: {resumed}");
        }
    }
}

#[tokio::test]
async fn an_agent_that_was_taken_off_the_roster_calls_nothing_more() {
    let Some(world) = World::new().await else { return };
    let member = json!({ "worker_target": "w1", "allowed_tools": [] });
    world.api.put("/v1/agents/ada", member).await.is(200);
    world.api.post("/v1/agents/ada/turns", json!({ "agent_turn_id": "t1" })).await.is(201);
    let sum = |id: &str| call(id, "calculation.eval", json!({ "expression": "1+1" }));
    for (epoch, id, word) in [(1, "a", "allowed tools"), (2, "b", "not on the roster")] {
        let body = json!({ "turn_epoch": epoch, "calls": [sum(id)] });
        world.act("t1", "dispatch", body).await.is(200);
        let body = json!({ "turn_epoch": epoch, "wait_ms": 9_000 });
        let resumed = world.act("t1", "resume", body).await.is(200);
        let result = &resumed["results"][0];
        assert_eq!(
            (&result["status"], &result["error"]["code"]),
            (&json!("failed"), &json!("auth_failed")),
            "{result}"
        );
        assert!(result["error"]["message"].as_str().unwrap().contains(word), "{result}");
        world.api.delete("/v1/agents/ada").await;
    }
    // What it has begun it can end.
    world.act("t1", "finish", json!({ "turn_epoch": 3 })).await.is(200);
}

/// The call of a step that is out: nobody has taken it back.
async fn still_out(world: &World, turn: &str) {
    let shown = world.api.get(&format!("/v1/agents/ada/turns/{turn}")).await.is(200);
    let id = shown["calls"][0]["call_id"].as_str().unwrap();
    assert_eq!(world.api.call(id).await["status"], "PENDING", "{turn}: {shown}");
    assert_eq!(shown["status"], "suspended", "{shown}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_step_that_is_dispatched_twice_at_once_keeps_its_calls() {
    let Some(world) = World::new().await else { return };
    for turn in ["t1", "t2", "t3"] {
        world.api.post("/v1/agents/ada/turns", json!({ "agent_turn_id": turn })).await.is(201);
        let calls = json!([call("c", "hand.work", json!({})), call("d", "no.such", json!({}))]);
        let body = json!({ "turn_epoch": 1, "step_id": "s1", "calls": calls });
        let sent = (0..8).map(|_| world.act(turn, "dispatch", body.clone()));
        let sent = futures::future::join_all(sent).await;
        let first = sent[0].body["calls"][0]["call_id"].clone();
        for reply in sent {
            assert_eq!(reply.is(200)["calls"][0]["call_id"], first);
        }
        still_out(&world, turn).await;
    }
    // Without a step's name they are two steps, of which one is refused; the call is the other's.
    world.api.post("/v1/agents/ada/turns", json!({ "agent_turn_id": "t4" })).await.is(201);
    let body = json!({ "turn_epoch": 1, "calls": [call("c", "hand.work", json!({}))] });
    let sent = (0..8).map(|_| world.act("t4", "dispatch", body.clone()));
    let sent = futures::future::join_all(sent).await;
    assert_eq!(sent.iter().filter(|reply| reply.status == 200).count(), 1);
    still_out(&world, "t4").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_that_is_renewed_meanwhile_does_not_take_a_step_back() {
    let Some(world) = World::new().await else { return };
    for turn in ["t1", "t2", "t3"] {
        world.api.post("/v1/agents/ada/turns", json!({ "agent_turn_id": turn })).await.is(201);
        let body = json!({ "turn_epoch": 1, "calls": [call("c", "hand.work", json!({}))] });
        let renewing = (0..6).map(|_| world.act(turn, "renew", json!({ "turn_epoch": 1 })));
        let (sent, _) =
            tokio::join!(world.act(turn, "dispatch", body), futures::future::join_all(renewing));
        sent.is(200);
        still_out(&world, turn).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_that_is_renewed_meanwhile_does_not_keep_a_turn_from_ending() {
    let Some(world) = World::new().await else { return };
    for turn in ["t1", "t2", "t3", "t4"] {
        world.api.post("/v1/agents/ada/turns", json!({ "agent_turn_id": turn })).await.is(201);
        let calls = json!([call("c", "hand.work", json!({}))]);
        let body = json!({ "turn_epoch": 1, "calls": calls, "suspend": false });
        world.act(turn, "dispatch", body).await.is(200);
        let what = if turn < "t3" { "suspend" } else { "finish" };
        let renewing = (0..6).map(|_| world.act(turn, "renew", json!({ "turn_epoch": 1 })));
        let ending = world.act(turn, what, json!({ "turn_epoch": 1 }));
        let (_, ended) = tokio::join!(futures::future::join_all(renewing), ending);
        ended.is(200);
    }
}
