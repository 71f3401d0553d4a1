//! Fencing: messages of another epoch, step, channel or lineage are rejected.

use serde_json::{Value, json};

use crate::support::nats::{Nats, NatsPeer, ReceivedMessage, report, result_card, tool};
use crate::support::{Api, Server, until};

struct Fixture {
    _nats: Nats,
    _server: Server,
    api: Api,
    peer: NatsPeer,
}

impl Fixture {
    async fn new() -> Option<Self> {
        let nats = Nats::start().await?;
        let server = nats.server().await;
        let (api, peer) = (server.api(), nats.peer().await);
        api.post("/projects/default/tools", tool("hand.work", "hand", json!({}))).await.is(201);
        api.put("/v1/agents/ada", json!({ "worker_target": "w1" })).await.is(200);
        Some(Self { _nats: nats, _server: server, api, peer })
    }

    async fn act(&self, turn: &str, action: &str, body: Value) -> crate::support::api::Reply {
        self.api.post(&format!("/v1/agents/ada/turns/{turn}/{action}"), body).await
    }

    /// Dispatches a call in a turn whose lease expires soon. Tries longer leases if the machine is
    /// too slow. Returns the turn and the response.
    async fn dispatch_under_a_short_lease(&self) -> (String, Value) {
        for lease_ms in [1_000, 4_000, 16_000] {
            let turn = format!("t{lease_ms}");
            let lease = json!({ "agent_turn_id": turn, "lease_ms": lease_ms });
            self.api.post("/v1/agents/ada/turns", lease).await.is(201);
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

    async fn command(&self) -> ReceivedMessage {
        let command = self.peer.next("hand").await;
        command.ack().await;
        command
    }
}

fn call(id: &str, tool: &str, args: Value) -> Value {
    json!({ "tool_call_id": id, "tool_name": tool, "arguments": args })
}

/// Returns a report of success with its card.
fn success(command: &Value, card: &str) -> Value {
    let mut report_body = report(command, card, "success");
    report_body["card"] = result_card(command, card, "success", json!(card));
    report_body
}

#[tokio::test]
async fn a_report_of_an_earlier_epoch_is_rejected() {
    let Some(fixture) = Fixture::new().await else { return };
    let (turn, sent) = fixture.dispatch_under_a_short_lease().await;
    let lease = json!({ "agent_turn_id": turn });
    let id = sent["calls"][0]["call_id"].as_str().unwrap().to_owned();
    let command = fixture.command().await;
    // After the lease expired, another worker leases the turn.
    let again = until("the lease to run out", || async {
        let answer = fixture.api.post("/v1/agents/ada/turns", lease.clone()).await;
        (answer.status == 201).then_some(answer.body)
    })
    .await;
    assert!(again["turn_epoch"].as_u64().unwrap() > 1, "{again}");
    let report_body = success(&command.payload, "r1");
    let refused = fixture.peer.request("sys.l0.report", report_body.clone()).await;
    assert_eq!(refused["error"]["code"], "conflict", "{refused}");
    fixture.api.post("/v1/tool_results", report_body).await.refused(409, "CONFLICT");
    let dead = fixture.api.get("/v1/dead_letters").await.is(200)["dead_letters"][0].clone();
    assert_eq!(dead["reason"], "wrong_epoch", "{dead}");
    let path = format!("/v1/dead_letters/{}/redrive", dead["id"].as_str().unwrap());
    fixture.api.post(&path, json!({})).await.refused(409, "CONFLICT");
    let now = fixture.api.call(&id).await;
    assert!(["PENDING", "RUNNING"].contains(&now["status"].as_str().unwrap()), "{now}");
    assert_eq!(fixture.api.get("/v1/agents/ada/inbox").await.is(200)["items"], json!([]));
    fixture.api.post(&format!("/v1/tool_calls/{id}/cancel"), json!({})).await.is(200);
    assert!(fixture.api.history(&id).await.contains(&"tool.call.late".to_owned()));
}

#[tokio::test]
async fn stopping_a_turn_cancels_calls_of_an_expired_lease() {
    let Some(fixture) = Fixture::new().await else { return };
    let (turn, sent) = fixture.dispatch_under_a_short_lease().await;
    let id = sent["calls"][0]["call_id"].as_str().unwrap().to_owned();
    until("the lease to run out", || async {
        let lease = json!({ "agent_turn_id": turn });
        (fixture.api.post("/v1/agents/ada/turns", lease).await.status == 201).then_some(())
    })
    .await;
    assert_eq!(fixture.api.call(&id).await["status"], "PENDING");
    fixture.act(&turn, "stop", json!({})).await.is(200);
    assert_eq!(fixture.api.finished(&id).await["status"], "CANCELED");
}

#[tokio::test]
async fn a_late_report_does_not_replace_the_result_card() {
    let Some(fixture) = Fixture::new().await else { return };
    let body = json!({ "run_id": "r1", "args": {}, "timeout_ms": 2_000 });
    let id =
        fixture.api.post("/v1/tools/hand.work/invoke", body).await.body["tool_call_id"].clone();
    let id = id.as_str().unwrap();
    // A tool service has started the call and reports its timeout too late.
    let card_id = format!("card_{}_call", id.trim_start_matches("tc_"));
    fixture.peer.request("sys.cards.get", json!({ "card_ids": [card_id] })).await;
    until("the call to start", || async {
        (fixture.api.call(id).await["status"] != "PENDING").then_some(())
    })
    .await;
    assert_eq!(fixture.api.finished(id).await["status"], "TIMEOUT");
    let read_cards = async || fixture.api.get(&format!("/v1/tool_calls/{id}/cards")).await.is(200);
    let before = read_cards().await;
    assert_eq!(before["cards"][1]["author_id"], "worker.watchdog", "{before}");
    let command = json!({
        "tool_call_id": id, "agent_turn_id": "r1", "turn_epoch": 1, "agent_id": "default",
        "after_execution": "suspend", "step_id": before["cards"][0]["metadata"]["step_id"],
    });
    let mut report_body = report(&command, "late", "timeout");
    report_body["card"] = result_card(&command, "late", "timeout", Value::Null);
    let late = fixture.peer.request("sys.l0.report", report_body).await;
    assert_eq!((&late["ok"], &late["late"]), (&json!(true), &json!(true)), "{late}");
    assert_eq!(read_cards().await, before);
}

#[tokio::test]
async fn a_repeated_report_after_a_resume_is_a_duplicate() {
    let Some(fixture) = Fixture::new().await else { return };
    fixture.api.post("/v1/agents/ada/turns", json!({ "agent_turn_id": "t1" })).await.is(201);
    let body = json!({ "turn_epoch": 1, "calls": [call("c", "hand.work", json!({}))] });
    fixture.act("t1", "dispatch", body).await.is(200);
    let command = fixture.command().await;
    let report_body = success(&command.payload, "r1");
    assert_eq!(
        fixture.peer.request("sys.l0.report", report_body.clone()).await["duplicate"],
        false
    );
    let body = json!({ "turn_epoch": 1, "wait_ms": 9_000 });
    assert_eq!(fixture.act("t1", "resume", body).await.is(200)["turn_epoch"], 2);
    let again = fixture.peer.request("sys.l0.report", report_body).await;
    assert_eq!((&again["ok"], &again["duplicate"]), (&json!(true), &json!(true)), "{again}");
}

#[tokio::test]
async fn a_dispatched_step_cannot_be_changed() {
    let Some(fixture) = Fixture::new().await else { return };
    fixture.api.post("/v1/agents/ada/turns", json!({ "agent_turn_id": "t1" })).await.is(201);
    let step = |calls: Value| json!({ "turn_epoch": 1, "step_id": "s1", "calls": calls });
    let first = json!([
        call("a", "hand.work", json!({ "n": 1 })),
        call("b", "hand.nothing", json!({ "m": 1 })),
    ]);
    let sent = fixture.act("t1", "dispatch", step(first.clone())).await.is(200);
    let again = fixture.act("t1", "dispatch", step(first)).await.is(200);
    assert_eq!(again["calls"], sent["calls"], "the same again gives the same calls");
    let good = || call("b", "hand.nothing", json!({ "m": 1 }));
    for other in [
        json!([call("a", "hand.work", json!({ "n": 1 }))]),
        json!([call("a", "hand.work", json!({ "n": 2 })), good()]),
        json!([call("a", "hand.other", json!({ "n": 1 })), good()]),
        json!([call("c", "hand.work", json!({ "n": 1 })), good()]),
        json!([call("a", "hand.work", json!({ "n": 1 })), call("b", "hand.nothing", json!({}))]),
    ] {
        fixture.act("t1", "dispatch", step(other)).await.refused(409, "CONFLICT");
    }
    // The step id is not available in a later epoch, either.
    let command = fixture.command().await;
    fixture.peer.request("sys.l0.report", success(&command.payload, "r1")).await;
    let body = json!({ "turn_epoch": 1, "wait_ms": 9_000 });
    fixture.act("t1", "resume", body).await.is(200);
    let body = json!({
        "turn_epoch": 2, "step_id": "s1", "calls": [call("later", "hand.work", json!({}))],
    });
    fixture.act("t1", "dispatch", body).await.refused(409, "CONFLICT");
}

#[tokio::test]
async fn a_step_without_suspend_cannot_be_changed() {
    let Some(fixture) = Fixture::new().await else { return };
    fixture.api.post("/v1/agents/ada/turns", json!({ "agent_turn_id": "t1" })).await.is(201);
    let step = |args: Value| {
        json!({
            "turn_epoch": 1, "step_id": "s1", "suspend": false,
            "calls": [call("a", "hand.work", args)],
        })
    };
    let sent = fixture.act("t1", "dispatch", step(json!({ "n": 1 }))).await.is(200);
    let again = fixture.act("t1", "dispatch", step(json!({ "n": 1 }))).await.is(200);
    assert_eq!(again["calls"], sent["calls"]);
    fixture.act("t1", "dispatch", step(json!({ "n": 2 }))).await.refused(409, "CONFLICT");
}

#[tokio::test]
async fn a_report_header_must_match_the_channel_of_the_subject() {
    let Some(fixture) = Fixture::new().await else { return };
    let id = fixture.api.invoke("hand.work", json!({})).await;
    let command = fixture.command().await;
    let report_body = success(&command.payload, "r1");
    let other = [("CG-Channel-Id", "another")];
    let refused =
        fixture.peer.request_in("default", "sys.l0.report", report_body.clone(), &other).await;
    assert_eq!(refused["error"]["code"], "bad_request", "{refused}");
    let dead = fixture.api.get("/v1/dead_letters").await.is(200)["dead_letters"][0].clone();
    assert_eq!(dead["reason"], "malformed", "{dead}");
    let headers = [("CG-Channel-Id", "public")];
    assert_eq!(
        fixture.peer.request_in("default", "sys.l0.report", report_body, &headers).await["ok"],
        true
    );
    assert_eq!(fixture.api.finished(&id).await["status"], "SUCCEEDED");
}

#[tokio::test]
async fn a_result_card_must_have_the_parent_step_of_its_call() {
    let Some(fixture) = Fixture::new().await else { return };
    let id = fixture.api.invoke("hand.work", json!({})).await;
    let command = fixture.command().await;
    let mut card = result_card(&command.payload, "r1", "success", json!(1));
    card["metadata"]["parent_step_id"] = json!("step_of_somebody_else");
    let refused = fixture.peer.request("sys.cards.put", json!({ "card": card })).await;
    assert_eq!(refused["error"]["code"], "bad_request", "{refused}");
    card["metadata"]["parent_step_id"] = Value::Null;
    assert_eq!(fixture.peer.request("sys.cards.put", json!({ "card": card })).await["ok"], true);
    let answer =
        fixture.peer.request("sys.l0.report", report(&command.payload, "r1", "success")).await;
    assert_eq!(answer["ok"], true, "{answer}");
    assert_eq!(fixture.api.finished(&id).await["status"], "SUCCEEDED");
}

#[tokio::test]
async fn a_call_id_may_look_like_the_fallback_id_of_another_call() {
    let Some(fixture) = Fixture::new().await else { return };
    for (turn, ids) in [("t1", &["c-a1"][..]), ("t2", &["c", "c-a1", "c-a1-a2"][..])] {
        let lease = json!({ "agent_turn_id": turn });
        fixture.api.post("/v1/agents/ada/turns", lease).await.is(201);
        let calls: Vec<Value> = ids.iter().map(|id| call(id, "hand.work", json!({}))).collect();
        let body = json!({ "turn_epoch": 1, "calls": calls });
        fixture.act(turn, "dispatch", body).await.is(200);
        for _ in ids {
            let command = fixture.command().await;
            let card = format!("{turn}-{}", command.payload["tool_call_id"].as_str().unwrap());
            let answer =
                fixture.peer.request("sys.l0.report", success(&command.payload, &card)).await;
            assert_eq!(
                (&answer["ok"], &answer["duplicate"]),
                (&json!(true), &json!(false)),
                "{answer}"
            );
        }
        let body = json!({ "turn_epoch": 1, "wait_ms": 9_000 });
        let resumed = fixture.act(turn, "resume", body).await.is(200);
        let results = resumed["results"].as_array().unwrap().clone();
        for (id, result) in ids.iter().zip(&results) {
            assert_eq!(result["tool_call_id"], *id);
            assert_eq!(result["result"], format!("{turn}-{id}"), "each has its own: {resumed}");
        }
    }
}

#[tokio::test]
async fn an_agent_removed_from_the_roster_cannot_call_tools() {
    let Some(fixture) = Fixture::new().await else { return };
    let entry = json!({ "worker_target": "w1", "allowed_tools": [] });
    fixture.api.put("/v1/agents/ada", entry).await.is(200);
    fixture.api.post("/v1/agents/ada/turns", json!({ "agent_turn_id": "t1" })).await.is(201);
    let sum = |id: &str| call(id, "calculation.eval", json!({ "expression": "1+1" }));
    for (epoch, id, word) in [(1, "a", "allowed tools"), (2, "b", "not on the roster")] {
        let body = json!({ "turn_epoch": epoch, "calls": [sum(id)] });
        fixture.act("t1", "dispatch", body).await.is(200);
        let body = json!({ "turn_epoch": epoch, "wait_ms": 9_000 });
        let resumed = fixture.act("t1", "resume", body).await.is(200);
        let result = &resumed["results"][0];
        assert_eq!(
            (&result["status"], &result["error"]["code"]),
            (&json!("failed"), &json!("auth_failed")),
            "{result}"
        );
        assert!(result["error"]["message"].as_str().unwrap().contains(word), "{result}");
        fixture.api.delete("/v1/agents/ada").await;
    }
    // The agent can still finish its turn.
    fixture.act("t1", "finish", json!({ "turn_epoch": 3 })).await.is(200);
}

/// Asserts that the call of a suspended step is still open.
async fn assert_call_is_open(fixture: &Fixture, turn: &str) {
    let turn_body = fixture.api.get(&format!("/v1/agents/ada/turns/{turn}")).await.is(200);
    let id = turn_body["calls"][0]["call_id"].as_str().unwrap();
    assert_eq!(fixture.api.call(id).await["status"], "PENDING", "{turn}: {turn_body}");
    assert_eq!(turn_body["status"], "suspended", "{turn_body}");
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_dispatches_of_a_step_make_its_calls_once() {
    let Some(fixture) = Fixture::new().await else { return };
    for turn in ["t1", "t2", "t3"] {
        fixture.api.post("/v1/agents/ada/turns", json!({ "agent_turn_id": turn })).await.is(201);
        let calls = json!([call("c", "hand.work", json!({})), call("d", "no.such", json!({}))]);
        let body = json!({ "turn_epoch": 1, "step_id": "s1", "calls": calls });
        let sent = (0..8).map(|_| fixture.act(turn, "dispatch", body.clone()));
        let sent = futures::future::join_all(sent).await;
        let first = sent[0].body["calls"][0]["call_id"].clone();
        for reply in sent {
            assert_eq!(reply.is(200)["calls"][0]["call_id"], first);
        }
        assert_call_is_open(&fixture, turn).await;
    }
    // Without a step id, each dispatch is a step of its own; all but one are rejected.
    fixture.api.post("/v1/agents/ada/turns", json!({ "agent_turn_id": "t4" })).await.is(201);
    let body = json!({ "turn_epoch": 1, "calls": [call("c", "hand.work", json!({}))] });
    let sent = (0..8).map(|_| fixture.act("t4", "dispatch", body.clone()));
    let sent = futures::future::join_all(sent).await;
    assert_eq!(sent.iter().filter(|reply| reply.status == 200).count(), 1);
    assert_call_is_open(&fixture, "t4").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_concurrent_renewal_does_not_undo_a_dispatch() {
    let Some(fixture) = Fixture::new().await else { return };
    for turn in ["t1", "t2", "t3"] {
        fixture.api.post("/v1/agents/ada/turns", json!({ "agent_turn_id": turn })).await.is(201);
        let body = json!({ "turn_epoch": 1, "calls": [call("c", "hand.work", json!({}))] });
        let renewing = (0..6).map(|_| fixture.act(turn, "renew", json!({ "turn_epoch": 1 })));
        let (sent, _) =
            tokio::join!(fixture.act(turn, "dispatch", body), futures::future::join_all(renewing));
        sent.is(200);
        assert_call_is_open(&fixture, turn).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_concurrent_renewal_does_not_prevent_suspend_or_finish() {
    let Some(fixture) = Fixture::new().await else { return };
    for turn in ["t1", "t2", "t3", "t4"] {
        fixture.api.post("/v1/agents/ada/turns", json!({ "agent_turn_id": turn })).await.is(201);
        let calls = json!([call("c", "hand.work", json!({}))]);
        let body = json!({ "turn_epoch": 1, "calls": calls, "suspend": false });
        fixture.act(turn, "dispatch", body).await.is(200);
        let action = if turn < "t3" { "suspend" } else { "finish" };
        let renewing = (0..6).map(|_| fixture.act(turn, "renew", json!({ "turn_epoch": 1 })));
        let ending = fixture.act(turn, action, json!({ "turn_epoch": 1 }));
        let (_, ended) = tokio::join!(futures::future::join_all(renewing), ending);
        ended.is(200);
    }
}
