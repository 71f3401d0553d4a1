//! Turns of an agent: lease, dispatch, suspend, wakeup, resume with the results.

use serde_json::{Value, json};

use crate::support::nats::{Nats, NatsPeer, report, result_card, tool};
use crate::support::{Api, Server, until};

struct Fixture {
    nats: Nats,
    server: Server,
    api: Api,
    peer: NatsPeer,
}

const TRACE: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

impl Fixture {
    async fn new() -> Option<Self> {
        let nats = Nats::start().await?;
        let server = nats.server().await;
        let (api, peer) = (server.api(), nats.peer().await);
        let ends = json!({ "after_execution": "terminate" });
        for tool in [tool("hand.work", "hand", json!({})), tool("hand.last", "hand", ends)] {
            api.post("/projects/default/tools", tool).await.is(201);
        }
        let entry = json!({ "worker_target": "w1", "profile": { "model": "x" } });
        api.put("/v1/agents/ada", entry).await.is(200);
        Some(Self { nats, server, api, peer })
    }

    async fn lease(&self, body: Value) -> Value {
        self.api.post("/v1/agents/ada/turns", body).await.is(201)
    }

    async fn act(&self, turn: &Value, action: &str, body: Value) -> crate::support::api::Reply {
        let id = turn["agent_turn_id"].as_str().unwrap();
        self.api.post(&format!("/v1/agents/ada/turns/{id}/{action}"), body).await
    }

    async fn dispatch(&self, turn: &Value, calls: Value) -> Value {
        let body = json!({ "turn_epoch": turn["turn_epoch"], "calls": calls });
        self.act(turn, "dispatch", body).await.is(200)
    }

    /// Receives the next command and reports this result.
    async fn serve(&self, result: Value) -> Value {
        let command = self.peer.next("hand").await;
        command.ack().await;
        let card = format!("r-{}", command.payload["tool_call_id"].as_str().unwrap());
        let mut report_body = report(&command.payload, &card, "success");
        report_body["card"] = result_card(&command.payload, &card, "success", result);
        let headers = [("traceparent", command.header("traceparent"))];
        let headers = headers.each_ref().map(|(name, value)| (*name, value.as_str()));
        let answer = self.peer.request_in("default", "sys.l0.report", report_body, &headers).await;
        assert_eq!(answer["ok"], true, "{answer}");
        answer
    }

    async fn inbox(&self) -> Vec<Value> {
        let found = self.api.get("/v1/agents/ada/inbox?wait_ms=30000").await.is(200);
        found["items"].as_array().unwrap().clone()
    }
}

fn call(id: &str, tool: &str, args: Value) -> Value {
    json!({ "tool_call_id": id, "tool_name": tool, "arguments": args })
}

#[tokio::test]
async fn a_turn_over_http_from_the_lease_to_the_end() {
    let Some(fixture) = Fixture::new().await else { return };
    let turn = fixture.lease(json!({ "traceparent": TRACE, "parent_step_id": "step_above" })).await;
    assert_eq!((&turn["status"], &turn["turn_epoch"]), (&json!("running"), &json!(1)), "{turn}");
    let calls = json!([
        call("call_0", "hand.work", json!({ "n": 0 })),
        call("call_1", "calculation.eval", json!("{\"expression\": \"6*7\"}")),
    ]);
    let sent = fixture.dispatch(&turn, calls).await;
    assert_eq!(sent["status"], "suspended", "{sent}");
    assert_eq!(sent["calls"].as_array().unwrap().len(), 2);
    // While results of the step are missing, the turn stays suspended.
    let error = until("the result of the sum", || async {
        let early = fixture.act(&turn, "resume", json!({ "turn_epoch": 1 })).await;
        let error = early.refused(409, "CONFLICT");
        (error["detail"]["waiting"].as_array().unwrap().len() == 1).then_some(error)
    })
    .await;
    assert_eq!(error["detail"]["waiting"], json!(["call_0"]), "{error}");
    let answer = fixture.serve(json!({ "done": 0 })).await;
    // A wakeup goes to the worker of the roster, with a child span of the same trace.
    let subject = "cg.v1r3.default.public.cmd.agent.w1.wakeup";
    let mut wakeup = fixture.peer.next_on(subject, "worker").await;
    while wakeup.payload["inbox_id"] != answer["inbox_id"] {
        wakeup.ack().await;
        wakeup = fixture.peer.next_on(subject, "worker").await;
    }
    assert_eq!(wakeup.payload["agent_id"], "ada");
    let span = wakeup.header("traceparent");
    assert!(span.starts_with(&TRACE[..36]) && span != TRACE, "{span}");
    let items = fixture.inbox().await;
    let ids: Vec<&Value> = items.iter().map(|item| &item["payload"]["tool_call_id"]).collect();
    assert_eq!(ids, [&json!("call_1"), &json!("call_0")], "in the order of arrival");
    let item = &items[1];
    assert_eq!(item["inbox_id"], answer["inbox_id"]);
    assert_eq!(item["message_type"], "tool_result");
    assert_eq!(item["traceparent"], span.as_str());
    assert_eq!(item["parent_step_id"], sent["step_id"]);
    let expected = json!({
        "tool_call_id": "call_0", "agent_turn_id": turn["agent_turn_id"], "turn_epoch": 1,
        "agent_id": "ada", "after_execution": "suspend", "status": "success",
        "tool_result_card_id": "r-call_0", "step_id": sent["step_id"],
    });
    assert_eq!(item["payload"], expected);
    let card = fixture.api.get("/v1/cards/r-call_0").await.is(200);
    assert_eq!(card["metadata"]["parent_step_id"], "step_above");
    assert_eq!(card["metadata"]["trace_id"], &TRACE[3..35]);
    let resumed = fixture.act(&turn, "resume", json!({ "turn_epoch": 1 })).await.is(200);
    assert_eq!((&resumed["status"], &resumed["turn_epoch"]), (&json!("running"), &json!(2)));
    assert_eq!(resumed["results"][0]["result"], json!({ "done": 0 }), "{resumed}");
    assert_eq!(resumed["results"][1]["result"]["result"], 42, "{resumed}");
    let empty = fixture.api.get("/v1/agents/ada/inbox").await.is(200);
    assert_eq!(empty["items"], json!([]), "delivered results are removed from the inbox");
    // The next step has another epoch; a tool with `terminate` ends the turn.
    let sent = fixture.dispatch(&resumed, json!([call("call_2", "hand.last", json!({}))])).await;
    assert_eq!(sent["turn_epoch"], 2);
    fixture.serve(json!({ "final": true })).await;
    let body = json!({ "turn_epoch": 2, "wait_ms": 30_000 });
    let ended = fixture.act(&turn, "resume", body).await.is(200);
    assert_eq!(ended["status"], "finished", "{ended}");
    assert_eq!(ended["results"][0]["after_execution"], "terminate");
    fixture
        .act(&turn, "dispatch", json!({ "turn_epoch": 3, "calls": [call("x", "y", json!({}))] }))
        .await
        .refused(409, "CONFLICT");
}

#[tokio::test]
async fn a_turn_over_nats_from_the_lease_to_the_end() {
    let Some(fixture) = Fixture::new().await else { return };
    let request = async |operation: &str, body: Value| {
        let answer = fixture.peer.request(&format!("agent.ada.{operation}"), body).await;
        assert_eq!(answer["ok"], true, "{operation}: {answer}");
        answer
    };
    let turn = request("lease", json!({ "agent_turn_id": "t1" })).await;
    let mut body = json!({ "agent_turn_id": "t1", "turn_epoch": turn["turn_epoch"] });
    body["calls"] = json!([call("c", "hand.work", json!({}))]);
    body["step_id"] = json!("s1");
    let sent = request("dispatch", body.clone()).await;
    assert_eq!(sent["status"], "suspended");
    let again = request("dispatch", body).await;
    assert_eq!(again["calls"], sent["calls"], "the same again gives the same calls");
    fixture.serve(json!(1)).await;
    let inbox = request("inbox", json!({ "wait_ms": 20_000 })).await;
    let id = inbox["items"][0]["inbox_id"].clone();
    let seen = request("inbox", json!({})).await;
    assert_eq!(seen["items"][0]["inbox_id"], id, "reading removes nothing");
    assert_eq!(request("ack", json!({ "inbox_ids": [id] })).await["acked"], 1);
    assert_eq!(request("ack", json!({ "inbox_ids": [id] })).await["acked"], 0);
    assert_eq!(request("inbox", json!({})).await["items"], json!([]));
    let resumed = request("resume", json!({ "agent_turn_id": "t1", "turn_epoch": 1 })).await;
    assert_eq!(resumed["results"][0]["result"], 1);
    let ended = request("finish", json!({ "agent_turn_id": "t1", "turn_epoch": 2 })).await;
    assert_eq!(ended["status"], "finished");
    let refused = fixture.peer.request("agent.eve.lease", json!({})).await;
    assert_eq!((&refused["ok"], &refused["error"]["code"]), (&json!(false), &json!("not_found")));
    let unknown = fixture.peer.request("agent.ada.dance", json!({})).await;
    assert_eq!(unknown["error"]["code"], "not_found");
    for (operation, body, word) in [
        ("lease", json!({ "lease_ms": "x" }), "column"),
        ("lease", json!({ "agent_turn_id": "a b" }), "agent_turn_id"),
        ("dispatch", json!({ "agent_turn_id": "t1" }), "turn_epoch"),
        ("dispatch", json!({ "agent_turn_id": "t1", "turn_epoch": 1, "calls": [] }), "calls"),
        ("resume", json!({ "agent_turn_id": "t1" }), "turn_epoch"),
        ("resume", json!({ "agent_turn_id": "t1", "turn_epoch": 1, "wait_ms": -5 }), "wait_ms"),
        ("inbox", json!({ "limit": "x" }), "limit"),
        ("ack", json!({ "inbox_ids": "x" }), "inbox_ids"),
    ] {
        let refused = fixture.peer.request(&format!("agent.ada.{operation}"), body).await;
        assert_eq!(refused["error"]["code"], "bad_request", "{refused}");
        assert!(refused["error"]["message"].as_str().unwrap().contains(word), "{refused}");
    }
}

#[tokio::test]
async fn results_are_idempotent_and_fenced_by_the_epoch() {
    let Some(fixture) = Fixture::new().await else { return };
    let turn = fixture.lease(json!({})).await;
    fixture.dispatch(&turn, json!([call("c", "hand.work", json!({}))])).await;
    let command = fixture.peer.next("hand").await;
    command.ack().await;
    let payload = &command.payload;
    let mut report_body = report(payload, "r1", "success");
    report_body["card"] = result_card(payload, "r1", "success", json!(1));
    let mut old = report_body.clone();
    old["turn_epoch"] = json!(0);
    assert_eq!(fixture.peer.request("sys.l0.report", old).await["error"]["code"], "conflict");
    let first = fixture.peer.request("sys.l0.report", report_body.clone()).await;
    let again = fixture.peer.request("sys.l0.report", report_body).await;
    assert_eq!((&first["duplicate"], &again["duplicate"]), (&json!(false), &json!(true)));
    assert_eq!(first["inbox_id"], again["inbox_id"]);
    assert_eq!(fixture.inbox().await.len(), 1, "once, despite repeated reports");
    // The same call id in another turn is another call.
    let other = fixture.lease(json!({})).await;
    fixture.dispatch(&other, json!([call("c", "hand.work", json!({}))])).await;
    fixture.serve(json!(2)).await;
    let resumed = fixture.act(&other, "resume", json!({ "turn_epoch": 1, "wait_ms": 9000 })).await;
    assert_eq!(resumed.is(200)["results"][0]["result"], 2);
    // In the same turn it is rejected.
    let resumed = fixture.act(&turn, "resume", json!({ "turn_epoch": 1 })).await.is(200);
    let body = json!({ "turn_epoch": 2, "calls": [call("c", "hand.work", json!({}))] });
    fixture.act(&resumed, "dispatch", body).await.refused(409, "CONFLICT");
    let stale = json!({ "turn_epoch": 1, "calls": [call("d", "hand.work", json!({}))] });
    fixture.act(&resumed, "dispatch", stale).await.refused(409, "CONFLICT");
}

#[tokio::test]
async fn an_invalid_call_of_a_step_fails_immediately() {
    let Some(fixture) = Fixture::new().await else { return };
    let entry = json!({ "worker_target": "w1", "allowed_tools": ["hand.*", "calculation.eval"] });
    fixture.api.put("/v1/agents/ada", entry).await.is(200);
    let turn = fixture.lease(json!({})).await;
    let calls = json!([
        call("not-json", "hand.work", json!("{\"a\": ")),
        call("not-object", "hand.work", json!("[1, 2]")),
        call("unknown", "hand.nothing", json!({})),
        call("misfit", "calculation.eval", json!({ "expression": 7 })),
        call("denied", "weather.query", json!({ "city": "Oslo" })),
    ]);
    fixture.dispatch(&turn, calls).await;
    // The valid call is executed; arguments that are no object are wrapped.
    let command = fixture.peer.next("hand").await;
    let card_request = json!({ "card_ids": [command.payload["tool_call_card_id"]] });
    let card = fixture.peer.request("sys.cards.get", card_request).await;
    assert_eq!(card["cards"][0]["content"]["arguments"], json!({ "_raw": [1, 2] }));
    let mut report_body = report(&command.payload, "r1", "success");
    report_body["card"] = result_card(&command.payload, "r1", "success", json!(1));
    assert_eq!(fixture.peer.request("sys.l0.report", report_body).await["ok"], true);
    let body = json!({ "turn_epoch": 1, "wait_ms": 30_000 });
    let resumed = fixture.act(&turn, "resume", body).await.is(200);
    let results = resumed["results"].as_array().unwrap();
    let result_of = |id: &str| results.iter().find(|r| r["tool_call_id"] == id).unwrap();
    let expected = [
        ("not-json", "bad_request"),
        ("unknown", "not_found"),
        ("misfit", "bad_request"),
        ("denied", "auth_failed"),
    ];
    for (id, code) in expected {
        let result = result_of(id);
        assert_eq!((&result["status"], &result["error"]["code"]), (&json!("failed"), &json!(code)));
        assert_eq!(result["error"]["source"], "worker");
        let card = result["tool_result_card_id"].as_str().unwrap();
        fixture.api.get(&format!("/v1/cards/{card}")).await.is(200);
    }
    assert_eq!(result_of("not-object")["status"], "success");
}

#[tokio::test]
async fn a_tool_that_ends_the_turn_waits_for_results_of_that_turn_only() {
    let Some(fixture) = Fixture::new().await else { return };
    // An item of another turn waits in the inbox.
    let other = fixture.lease(json!({})).await;
    fixture.dispatch(&other, json!([call("bad", "hand.nothing", json!({}))])).await;
    assert_eq!(fixture.inbox().await.len(), 1);
    let turn = fixture.lease(json!({})).await;
    fixture.dispatch(&turn, json!([call("end", "hand.last", json!({}))])).await;
    fixture.serve(json!({ "done": true })).await;
    let body = json!({ "turn_epoch": 1, "wait_ms": 30_000 });
    let ended = fixture.act(&turn, "resume", body).await.is(200);
    assert_eq!(
        (&ended["status"], &ended["results"][0]["status"]),
        (&json!("finished"), &json!("success"))
    );
    // A result of the same turn that the agent has not seen keeps the turn from ending.
    let turn = fixture.lease(json!({})).await;
    let first = json!({
        "turn_epoch": 1, "suspend": false, "calls": [call("first", "hand.nothing", json!({}))],
    });
    fixture.act(&turn, "dispatch", first).await.is(200);
    fixture.dispatch(&turn, json!([call("end", "hand.last", json!({}))])).await;
    let resumed = fixture.act(&turn, "resume", json!({ "turn_epoch": 1 })).await.is(200);
    let results = resumed["results"].as_array().unwrap();
    let end = results.iter().find(|result| result["tool_call_id"] == "end").unwrap();
    let message = end["error"]["message"].as_str().unwrap();
    assert!(message.contains("inbox_not_empty"), "{resumed}");
    assert_eq!(resumed["status"], "running");
    // After the agent has acknowledged the items, the turn can end.
    let body = json!({ "turn_epoch": 2, "calls": [call("again", "hand.last", json!({}))] });
    fixture.act(&turn, "dispatch", body).await.is(200);
    fixture.serve(json!({})).await;
    let body = json!({ "turn_epoch": 2, "wait_ms": 30_000 });
    assert_eq!(fixture.act(&turn, "resume", body).await.is(200)["status"], "finished");
}

#[tokio::test]
async fn finish_refuses_unknown_fields() {
    let Some(fixture) = Fixture::new().await else { return };
    let turn = fixture.lease(json!({ "agent_turn_id": "t1" })).await;
    let body = json!({ "turn_epoch": 1, "deliverable": "r1" });
    let error = fixture.act(&turn, "finish", body).await.refused(400, "BAD_REQUEST");
    assert!(error["message"].as_str().unwrap().contains("deliverable"), "{error}");
    let body = json!({ "agent_turn_id": "t1", "turn_epoch": 1, "deliverable": "r1" });
    let refused = fixture.peer.request("agent.ada.finish", body).await;
    assert_eq!(refused["error"]["code"], "bad_request", "{refused}");
    assert!(refused["error"]["message"].as_str().unwrap().contains("deliverable"), "{refused}");
    let now = fixture.api.get("/v1/agents/ada/turns/t1").await.is(200);
    assert_eq!(now["status"], "running", "nothing was finished");
    let body = json!({ "agent_turn_id": "t1", "turn_epoch": 1, "reason": "done" });
    assert_eq!(fixture.peer.request("agent.ada.finish", body).await["status"], "finished");
}

#[tokio::test]
async fn a_result_can_override_after_execution() {
    let Some(fixture) = Fixture::new().await else { return };
    let turn = fixture.lease(json!({})).await;
    fixture.dispatch(&turn, json!([call("a", "hand.work", json!({}))])).await;
    let control = json!({ "x": 1, "__cg_control": { "after_execution": "terminate" } });
    fixture.serve(control.clone()).await;
    let item = fixture.inbox().await.remove(0);
    assert_eq!(item["payload"]["after_execution"], "suspend", "carried unchanged");
    let ended = fixture.act(&turn, "resume", json!({ "turn_epoch": 1 })).await.is(200);
    assert_eq!(ended["status"], "finished", "{ended}");
    assert_eq!(ended["results"][0]["after_execution"], "terminate");
    assert_eq!(ended["results"][0]["result"], control, "it stays in the card");
    // An unknown value is ignored.
    let turn = fixture.lease(json!({})).await;
    fixture.dispatch(&turn, json!([call("b", "hand.work", json!({}))])).await;
    fixture.serve(json!({ "__cg_control": { "after_execution": "explode" } })).await;
    let body = json!({ "turn_epoch": 1, "wait_ms": 9_000 });
    assert_eq!(fixture.act(&turn, "resume", body).await.is(200)["status"], "running");
}

#[tokio::test]
async fn a_timeout_wakes_the_agent_and_a_late_result_has_no_effect() {
    let Some(fixture) = Fixture::new().await else { return };
    let turn = fixture.lease(json!({})).await;
    let mut slow = call("slow", "hand.work", json!({}));
    slow["timeout_ms"] = json!(300);
    let sent = fixture.dispatch(&turn, json!([slow])).await;
    // The command may not have been published yet, so the test builds its fields.
    let command = json!({
        "tool_call_id": "slow", "agent_turn_id": turn["agent_turn_id"], "turn_epoch": 1,
        "agent_id": "ada", "after_execution": "suspend", "step_id": sent["step_id"],
    });
    let item = fixture.inbox().await.remove(0);
    assert_eq!(
        (&item["message_type"], &item["payload"]["status"]),
        (&json!("timeout"), &json!("timeout"))
    );
    let resumed = fixture.act(&turn, "resume", json!({ "turn_epoch": 1 })).await.is(200);
    let result = &resumed["results"][0];
    assert_eq!(
        (&result["status"], &result["error"]["code"]),
        (&json!("timeout"), &json!("tool_timeout"))
    );
    assert_eq!(result["error"]["source"], "watchdog");
    let mut report_body = report(&command, "late", "success");
    report_body["card"] = result_card(&command, "late", "success", json!(1));
    let late = fixture.peer.request("sys.l0.report", report_body).await;
    assert_eq!((&late["ok"], &late["late"]), (&json!(true), &json!(true)), "{late}");
    let empty = fixture.api.get("/v1/agents/ada/inbox").await.is(200);
    assert_eq!(empty["items"], json!([]));
}

#[tokio::test]
async fn a_stopped_turn_cancels_its_calls_and_notifies_the_agent() {
    let Some(fixture) = Fixture::new().await else { return };
    let turn = fixture.lease(json!({})).await;
    let sent = fixture.dispatch(&turn, json!([call("a", "hand.work", json!({}))])).await;
    let id = sent["calls"][0]["call_id"].as_str().unwrap().to_owned();
    let command = fixture.peer.next("hand").await;
    command.ack().await;
    let stopped = fixture.act(&turn, "stop", json!({ "reason": "enough" })).await.is(200);
    assert_eq!((&stopped["status"], &stopped["turn_epoch"]), (&json!("stopped"), &json!(2)));
    assert_eq!(fixture.api.finished(&id).await["status"], "CANCELED");
    let items = fixture.inbox().await;
    let stop = items.iter().find(|item| item["message_type"] == "stop").unwrap();
    assert_eq!(stop["payload"]["reason"], "enough");
    assert_eq!(fixture.act(&turn, "stop", json!({})).await.is(200)["turn_epoch"], 2, "once");
    fixture.act(&turn, "resume", json!({ "turn_epoch": 2 })).await.refused(409, "CONFLICT");
    let lease = json!({ "agent_turn_id": turn["agent_turn_id"] });
    fixture.api.post("/v1/agents/ada/turns", lease).await.refused(409, "CONFLICT");
    let mut report_body = report(&command.payload, "r1", "success");
    report_body["card"] = result_card(&command.payload, "r1", "success", json!(1));
    assert_eq!(fixture.peer.request("sys.l0.report", report_body).await["late"], true);
}

#[tokio::test]
async fn a_lease_is_exclusive_and_expires() {
    let Some(fixture) = Fixture::new().await else { return };
    fixture.api.post("/v1/agents/eve/turns", json!({})).await.refused(404, "NOT_FOUND");
    fixture
        .api
        .post("/v1/agents/ada/turns", json!({ "lease_ms": 5 }))
        .await
        .refused(422, "VALIDATION_ERROR");
    let deep = json!({ "recursion_depth": 20 });
    fixture.api.post("/v1/agents/ada/turns", deep).await.refused(422, "VALIDATION_ERROR");
    let dotted = json!({ "agent_turn_id": "a.b" });
    fixture.api.post("/v1/agents/ada/turns", dotted).await.refused(422, "VALIDATION_ERROR");
    let turn = fixture.lease(json!({ "agent_turn_id": "t0" })).await;
    let same_turn = json!({ "agent_turn_id": "t0" });
    fixture.api.post("/v1/agents/ada/turns", same_turn).await.refused(409, "CONFLICT");
    let renewed = fixture.act(&turn, "renew", json!({ "turn_epoch": 1 })).await.is(200);
    assert!(renewed["lease_until_ms"].as_u64() >= turn["lease_until_ms"].as_u64());
    fixture.act(&turn, "suspend", json!({ "turn_epoch": 1 })).await.refused(409, "CONFLICT");
    let turn = fixture.lease(json!({ "agent_turn_id": "t1", "lease_ms": 1_000 })).await;
    let same_turn = json!({ "agent_turn_id": "t1" });
    let again = until("the lease to run out", || async {
        let answer = fixture.api.post("/v1/agents/ada/turns", same_turn.clone()).await;
        (answer.status == 201).then_some(answer.body)
    })
    .await;
    assert!(again["turn_epoch"].as_u64().unwrap() > 1, "{again}");
    fixture.act(&turn, "renew", json!({ "turn_epoch": 1 })).await.refused(409, "CONFLICT");
}

#[tokio::test]
async fn inboxes_and_turns_survive_a_restart_of_server_and_broker() {
    let Some(mut fixture) = Fixture::new().await else { return };
    let turn = fixture.lease(json!({})).await;
    fixture
        .dispatch(
            &turn,
            json!([call("a", "hand.work", json!({})), call("b", "hand.work", json!({}))]),
        )
        .await;
    fixture.serve(json!("first")).await;
    let before = fixture.inbox().await;
    fixture.nats.down();
    fixture.server = fixture.server.restart().await;
    fixture.api = fixture.server.api();
    fixture.nats.up().await;
    fixture.peer = fixture.nats.peer().await;
    assert_eq!(fixture.inbox().await, before, "unacknowledged items are still there");
    fixture.serve(json!("second")).await;
    let body = json!({ "turn_epoch": 1, "wait_ms": 30_000 });
    let resumed = fixture.act(&turn, "resume", body).await.is(200);
    assert_eq!(resumed["results"].as_array().unwrap().len(), 2, "{resumed}");
}
