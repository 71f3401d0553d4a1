//! The internal tools over NATS: an agent hands turns to other agents by commands, and joins them.

use async_nats::HeaderMap;
use async_nats::jetstream;
use serde_json::{Value, json};

use crate::support::nats::{Nats, NatsPeer};
use crate::support::{Api, Server, until};

const TRACE: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

/// A principal, `ada`, in a turn, and agents that workers drive.
struct Fixture {
    _nats: Nats,
    _server: Server,
    api: Api,
    peer: NatsPeer,
}

impl Fixture {
    async fn new(workers: &[&str]) -> Option<Self> {
        let nats = Nats::start().await?;
        let server = nats.server().await;
        let (api, peer) = (server.api(), nats.peer().await);
        define_agents(&api, workers).await;
        let fixture = Self { _nats: nats, _server: server, api, peer };
        let lease = json!({ "agent_turn_id": "t1", "traceparent": TRACE });
        fixture.rpc("ada", "lease", lease).await;
        Some(fixture)
    }

    async fn rpc(&self, agent: &str, operation: &str, body: Value) -> Value {
        let answer = self.peer.request(&format!("agent.{agent}.{operation}"), body).await;
        assert_eq!(answer["ok"], true, "{operation}: {answer}");
        answer
    }

    /// Waits for the next turn of an agent, and leases it. A turn whose call was canceled stays in
    /// the inbox for a moment; its lease is refused.
    async fn lease_next(&self, agent: &str) -> Value {
        until(&format!("a turn of {agent}"), || async {
            let inbox = self.rpc(agent, "inbox", json!({ "wait_ms": 1_000 })).await;
            let items = inbox["items"].as_array().unwrap().clone();
            for item in items.into_iter().filter(|item| item["message_type"] == "turn") {
                let body = json!({ "agent_turn_id": item["payload"]["agent_turn_id"] });
                let leased = self.peer.request(&format!("agent.{agent}.lease"), body).await;
                if leased["ok"] == true {
                    return Some(json!({ "item": item, "turn": leased }));
                }
                let message = leased["error"]["message"].as_str().unwrap();
                assert!(message.ends_with("has ended: CANCELED"), "lease: {leased}");
            }
            None
        })
        .await
    }

    /// Ends a leased turn with a deliverable.
    async fn deliver(&self, agent: &str, leased: &Value, data: Value) -> Value {
        let id = leased["turn"]["agent_turn_id"].as_str().unwrap();
        let card = json!({
            "card_id": format!("dlv_{id}"), "type": "task.deliverable", "author_id": agent,
            "content": { "__type__": "JsonContent", "data": data }, "metadata": {},
        });
        let put = self.peer.request("sys.cards.put", json!({ "card": card })).await;
        assert_eq!(put["ok"], true, "{put}");
        let body = json!({
            "agent_turn_id": id, "turn_epoch": leased["turn"]["turn_epoch"],
            "deliverable_card_id": format!("dlv_{id}"),
        });
        self.rpc(agent, "finish", body).await
    }

    /// Waits for the outcome of one of ada's calls: the inbox item and its card.
    async fn result(&self, tool_call_id: &str) -> (Value, Value) {
        let item = until(&format!("the result of {tool_call_id}"), || async {
            let inbox = self.rpc("ada", "inbox", json!({ "wait_ms": 1_000 })).await;
            let items = inbox["items"].as_array().unwrap().clone();
            let mut found = items.into_iter().filter(|i| i["correlation_id"] == tool_call_id);
            let first = found.next();
            assert!(found.next().is_none(), "one notice per call");
            first
        })
        .await;
        let id = item["payload"]["tool_result_card_id"].as_str().unwrap();
        let card = self.api.get(&format!("/v1/cards/{id}")).await.is(200);
        (item, card)
    }

    /// Waits for the refusal of a call, whose message has these words.
    async fn expect_refusal(&self, tool_call_id: &str, words: &str) {
        let (item, card) = self.result(tool_call_id).await;
        assert_eq!(item["payload"]["status"], "failed", "{words}: {item}");
        let message = card["content"]["error"]["message"].as_str().unwrap();
        assert!(message.contains(words), "{words}: {message}");
        self.rpc("ada", "ack", json!({ "inbox_ids": [item["inbox_id"]] })).await;
    }

    async fn command(&self, tool: &str, id: &str, args: Value) -> Value {
        send_command(&self.peer, tool, id, args, |_| {}).await
    }
}

async fn define_agents(api: &Api, workers: &[&str]) {
    api.put("/v1/agents/ada", json!({ "worker_target": "w_ada" })).await.is(200);
    for agent in workers {
        let body = json!({
            "driver": "worker", "worker_target": format!("w_{agent}"),
            "profile": { "instructions": "Answer." },
        });
        api.put(&format!("/v1/agents/{agent}"), body).await.is(200);
    }
}

/// Writes the card of a command and publishes the command, changed by `change`.
async fn send_command(
    peer: &NatsPeer,
    tool: &str,
    id: &str,
    args: Value,
    change: impl FnOnce(&mut Value),
) -> Value {
    let card = json!({
        "card_id": format!("call-{id}"), "type": "tool.call", "author_id": "ada",
        "content": {
            "__type__": "ToolCallContent", "tool_name": tool, "arguments": args,
            "status": "called", "target_subject": null,
        },
        "metadata": {
            "agent_turn_id": "t1", "step_id": "s1", "tool_call_id": id,
            "trace_id": &TRACE[3..35], "parent_step_id": "step_above",
        },
    });
    let put = peer.request("sys.cards.put", json!({ "card": card })).await;
    assert_eq!(put["ok"], true, "{put}");
    let mut payload = json!({
        "project_id": "default", "channel": "public", "agent_id": "ada", "agent_turn_id": "t1",
        "turn_epoch": 1, "step_id": "s1", "tool_call_id": id, "tool_name": tool,
        "after_execution": "suspend", "tool_call_card_id": format!("call-{id}"),
    });
    change(&mut payload);
    let mut headers = HeaderMap::new();
    headers.insert("traceparent", TRACE);
    headers.insert("CG-Recursion-Depth", "0");
    let subject = format!("cg.v1r3.default.public.cmd.sys.pmo.internal.{tool}");
    let jetstream = jetstream::new(peer.client.clone());
    until("the stream of commands", || async {
        let body = payload.to_string().into_bytes();
        let sent = jetstream.publish_with_headers(subject.clone(), headers.clone(), body.into());
        sent.await.ok()?.await.ok()
    })
    .await;
    payload
}

fn task(agent: &str, instruction: &str) -> Value {
    json!({ "target_strategy": "new", "target_ref": agent, "instruction": instruction })
}

#[tokio::test]
async fn a_delegated_turn_goes_to_the_worker_and_its_deliverable_to_the_parent() {
    let Some(fixture) = Fixture::new(&["bob"]).await else { return };
    fixture.command("delegate_async", "c1", task("bob", "Count to three.")).await;
    let (item, card) = fixture.result("c1").await;
    assert_eq!(item["payload"]["status"], "success", "{item}");
    assert_eq!(card["author_id"], "sys.pmo", "{card}");
    for (field, value) in
        [("step_id", "s1"), ("parent_step_id", "step_above"), ("trace_id", &TRACE[3..35])]
    {
        assert_eq!(card["metadata"][field], value, "{card}");
    }
    let accepted = &card["content"]["result"];
    assert_eq!((&accepted["status"], &accepted["agent_id"]), (&json!("accepted"), &json!("bob")));
    let subject = "cg.v1r3.default.public.cmd.agent.w_bob.wakeup";
    let wakeup = fixture.peer.next_on(subject, "worker").await;
    assert_eq!(
        (&wakeup.payload["agent_id"], &wakeup.payload["reason"]),
        (&json!("bob"), &json!("turn"))
    );
    assert_eq!(wakeup.header("CG-Recursion-Depth"), "1");
    let span = wakeup.header("traceparent");
    assert!(span.starts_with(&TRACE[..36]) && span != TRACE, "{span}");
    let path = format!("/v1/agents/bob/turns/{}", accepted["agent_turn_id"].as_str().unwrap());
    let turn = fixture.api.get(&path).await.is(200);
    assert_eq!(turn["status"], "dispatched", "{turn}");
    assert_eq!(turn["delegation"]["parent_agent_turn_id"], "t1");
    let leased = fixture.lease_next("bob").await;
    let payload = &leased["item"]["payload"];
    assert_eq!(payload["instruction"], "Count to three.", "{payload}");
    assert_eq!(
        (&payload["parent_agent_id"], &payload["parent_step_id"]),
        (&json!("ada"), &json!("s1"))
    );
    assert_eq!(leased["turn"]["status"], "running");
    let rest = fixture.rpc("bob", "inbox", json!({})).await;
    assert_eq!(rest["items"], json!([]), "the lease acknowledges the item");
    fixture.deliver("bob", &leased, json!({ "numbers": [1, 2, 3] })).await;
    let (_, card) = fixture.result("c1-0").await;
    assert_eq!(card["content"]["result"], json!({ "numbers": [1, 2, 3] }), "{card}");
    assert_eq!(card["author_id"], "bob");
    let state = "cg.v1r3.default.public.evt.agent.bob.state";
    let event = fixture.peer.next_in("cg_evt_v1r3", state, "states").await;
    assert_eq!(event.payload["status"], "dispatched");
}

#[tokio::test]
async fn the_same_command_again_has_no_second_effect() {
    let Some(fixture) = Fixture::new(&["bob"]).await else { return };
    for _ in 0..3 {
        fixture.command("delegate_async", "c1", task("bob", "Once.")).await;
    }
    fixture.result("c1").await;
    let leased = fixture.lease_next("bob").await;
    fixture.deliver("bob", &leased, json!(1)).await;
    fixture.result("c1-0").await;
    let calls = fixture.api.get("/v1/tool_calls?tool_name=agent.bob").await.is(200);
    assert_eq!(calls["tool_calls"].as_array().unwrap().len(), 1, "{calls}");
}

#[tokio::test]
async fn a_join_ends_at_its_deadline_with_the_results_that_are_in() {
    let Some(fixture) = Fixture::new(&["bob", "eve", "mute"]).await else { return };
    let tasks = [task("bob", "a"), task("eve", "b"), task("mute", "c")];
    fixture.command("fork_join", "f1", json!({ "tasks": tasks, "deadline_seconds": 4 })).await;
    let leased = fixture.lease_next("bob").await;
    fixture.deliver("bob", &leased, json!({ "a": 1 })).await;
    let leased = fixture.lease_next("eve").await;
    let turn = &leased["turn"];
    let body = json!({
        "agent_turn_id": turn["agent_turn_id"], "turn_epoch": turn["turn_epoch"],
        "status": "failed", "reason": "the archive is closed",
    });
    fixture.rpc("eve", "finish", body).await;
    let mute = fixture.lease_next("mute").await;
    let (item, card) = fixture.result("f1").await;
    assert_eq!(item["payload"]["status"], "partial", "{item}");
    let (result, error) = (&card["content"]["result"], &card["content"]["error"]);
    assert_eq!(result["status"], "partial", "{result}");
    // Only a success has no error.
    let about = (&error["code"], &error["message"]);
    let message = json!("2 of 3 tasks did not succeed; see result.results");
    assert_eq!(about, (&json!("tool_timeout"), &message), "{error}");
    let of = |n: usize| &result["results"][n];
    assert_eq!((&of(0)["status"], &of(0)["result"]), (&json!("success"), &json!({ "a": 1 })));
    assert_eq!(of(1)["status"], "failed");
    assert!(of(1)["error"].as_str().unwrap().contains("the archive is closed"), "{result}");
    assert_eq!((&of(2)["status"], &of(2)["agent_id"]), (&json!("timeout"), &json!("mute")));
    // The turn that nothing waits for any more is stopped, and its worker learns it.
    let id = mute["turn"]["agent_turn_id"].as_str().unwrap();
    until("the stopped turn", || async {
        let turn = fixture.api.get(&format!("/v1/agents/mute/turns/{id}")).await.is(200);
        (turn["status"] == "stopped").then_some(())
    })
    .await;
    let inbox = fixture.rpc("mute", "inbox", json!({ "wait_ms": 5_000 })).await;
    assert_eq!(inbox["items"][0]["message_type"], "stop", "{inbox}");
    // Only the join reports to the parent.
    let inbox = fixture.rpc("ada", "inbox", json!({})).await;
    assert_eq!(inbox["items"].as_array().unwrap().len(), 1, "{inbox}");
}

#[tokio::test]
async fn a_join_ends_with_the_first_failure_or_the_first_success() {
    let Some(fixture) = Fixture::new(&["bob", "eve"]).await else { return };
    let tasks = json!([task("bob", "a"), task("eve", "b")]);
    fixture.command("fork_join", "f1", json!({ "tasks": tasks, "fail_fast": true })).await;
    let leased = fixture.lease_next("bob").await;
    let id = leased["turn"]["agent_turn_id"].as_str().unwrap();
    let body = json!({ "agent_turn_id": id, "reason": "no time" });
    fixture.rpc("bob", "stop", body).await;
    let (item, card) = fixture.result("f1").await;
    assert_eq!(item["payload"]["status"], "failed", "{item}");
    let error = &card["content"]["error"];
    assert!(error["message"].as_str().unwrap().contains("no time"), "{error}");
    let results = &error["detail"]["results"];
    assert_eq!(
        (&results[0]["status"], &results[1]["status"]),
        (&json!("canceled"), &json!("canceled"))
    );
    fixture.command("fork_join", "f2", json!({ "tasks": tasks, "join": "any" })).await;
    let leased = fixture.lease_next("eve").await;
    fixture.deliver("eve", &leased, json!("first")).await;
    let (item, card) = fixture.result("f2").await;
    assert_eq!(item["payload"]["status"], "success", "{item}");
    let results = &card["content"]["result"]["results"];
    assert_eq!(
        (&results[0]["status"], &results[1]["result"]),
        (&json!("canceled"), &json!("first"))
    );
}

#[tokio::test]
async fn an_expert_answers_a_question() {
    let Some(fixture) = Fixture::new(&["bob"]).await else { return };
    let question = json!({ "expert_profile": "bob", "question": "Why?" });
    fixture.command("ask_expert", "q1", question).await;
    let leased = fixture.lease_next("bob").await;
    assert_eq!(leased["item"]["payload"]["instruction"], "Why?");
    fixture.deliver("bob", &leased, json!({ "text": "Because." })).await;
    let (_, card) = fixture.result("q1").await;
    let result = &card["content"]["result"];
    assert_eq!(
        (&result["status"], &result["answer"]["text"]),
        (&json!("success"), &json!("Because."))
    );
    let launch = json!({ "profile_name": "bob", "instruction": "Begin." });
    fixture.command("launch_principal", "l1", launch).await;
    let (_, card) = fixture.result("l1").await;
    assert_eq!(card["content"]["result"]["status"], "accepted", "{card}");
}

/// Removes a field of a command, or sets it.
fn change_field(payload: &mut Value, (field, value): (&str, Value)) {
    match value {
        Value::Null => drop(payload.as_object_mut().unwrap().remove(field)),
        value => payload[field] = value,
    }
}

#[tokio::test]
async fn a_command_with_a_wrong_field_is_answered_with_the_reason() {
    let Some(fixture) = Fixture::new(&["bob"]).await else { return };
    let cases = [
        (("step_id", Value::Null), "missing required field: step_id"),
        (("tool_call_card_id", json!("")), "missing required field: tool_call_card_id"),
        (("after_execution", Value::Null), "missing required field: after_execution"),
        (("after_execution", json!("explode")), "invalid_after_execution"),
        (("after_execution", json!("terminate")), "after_execution_mismatch"),
        (("args", json!({})), "payload.args is forbidden"),
        (("result", json!({})), "payload.result is forbidden"),
        (("tool_name", json!("fork_join")), "tool_name mismatch"),
        (("tool_call_card_id", json!("nowhere")), "there is no card"),
        (("step_id", json!("s2")), "step_id mismatch"),
    ];
    for (n, (field, words)) in cases.into_iter().enumerate() {
        let id = format!("r{n}");
        let change = |payload: &mut Value| change_field(payload, field);
        send_command(&fixture.peer, "delegate_async", &id, task("bob", "x"), change).await;
        fixture.expect_refusal(&id, words).await;
    }
    let none = fixture.rpc("bob", "inbox", json!({})).await;
    assert_eq!(none["items"], json!([]), "nothing was handed over");
    // A turn that does not wait for the command cannot be answered.
    let cases = [
        (("turn_epoch", json!(7)), "wrong_epoch"),
        (("agent_id", json!("bob")), "wrong_agent"),
        (("turn_epoch", json!("soon")), "malformed"),
    ];
    for (n, (field, reason)) in cases.into_iter().enumerate() {
        let change = |payload: &mut Value| change_field(payload, field);
        send_command(&fixture.peer, "fork_join", &format!("d{n}"), json!({}), change).await;
        until(&format!("a dead letter: {reason}"), || async {
            let listed = fixture.api.get("/v1/dead_letters?limit=200").await.is(200);
            let all = listed["dead_letters"].as_array().unwrap();
            all.iter().find(|dead| dead["reason"] == reason).cloned()
        })
        .await;
    }
}

#[tokio::test]
async fn a_command_with_wrong_arguments_is_answered_with_the_reason() {
    let Some(fixture) = Fixture::new(&["bob"]).await else { return };
    let fork = |tasks: Value, more: Value| json!({ "tasks": tasks, "deadline_seconds": more });
    let many = vec![task("bob", "x"); 10_000];
    let mut reused = task("bob", "x");
    reused["target_strategy"] = json!("reuse");
    let mut stolen = task("bob", "x");
    stolen["target_strategy"] = json!("steal");
    let cases = [
        ("delegate_async", task("nobody", "x"), "the agents are: bob"),
        ("delegate_async", task(&"x".repeat(300), "x"), "there is no agent"),
        ("delegate_async", json!({ "target_ref": "bob", "instruction": "x" }), "target_strategy"),
        ("delegate_async", stolen, "target_strategy"),
        ("delegate_async", task("bob", &"x".repeat(5 << 20)), "limit"),
        ("ask_expert", json!({ "expert_profile": "ada", "question": "x" }), "there is no agent"),
        ("fork_join", fork(json!(many), json!(9)), "tasks"),
        ("fork_join", fork(json!([]), json!(9)), "tasks"),
        ("fork_join", fork(json!([task("bob", "x"), task("no", "x")]), json!(9)), "no agent"),
        ("fork_join", fork(json!([reused, reused]), json!(9)), "a second time"),
        ("fork_join", fork(json!([task("bob", "x")]), json!(-5)), "deadline_seconds"),
    ];
    for (n, (tool, args, words)) in cases.into_iter().enumerate() {
        let id = format!("r{n}");
        fixture.command(tool, &id, args).await;
        fixture.expect_refusal(&id, words).await;
    }
    let none = fixture.rpc("bob", "inbox", json!({})).await;
    assert_eq!(none["items"], json!([]), "nothing was handed over");
}

#[tokio::test]
async fn an_agent_provisions_agents_and_reads_why_it_may_not() {
    let Some(fixture) = Fixture::new(&["bob"]).await else { return };
    let cases = [
        (json!({ "action": "ensure", "agent_id": "bob" }), "accepted", Value::Null),
        (json!({ "action": "explode", "agent_id": "x" }), "rejected", json!("invalid_action")),
        (json!({ "action": "create" }), "rejected", json!("missing_agent_id")),
        (json!({ "action": "create", "agent_id": "x" }), "rejected", json!("missing_profile")),
        (
            json!({ "action": "create", "agent_id": "x", "profile_name": "none" }),
            "rejected",
            json!("profile_not_found"),
        ),
        (json!({ "action": "derive", "agent_id": "x" }), "rejected", json!("missing_derived_from")),
        (
            json!({ "action": "create", "agent_id": "cy", "profile": { "instructions": "Hi." } }),
            "accepted",
            Value::Null,
        ),
        (
            json!({ "action": "create", "agent_id": "cy", "profile": { "instructions": "No." } }),
            "rejected",
            json!("agent_exists"),
        ),
        (
            json!({ "action": "derive", "agent_id": "dee", "derived_from": "cy" }),
            "accepted",
            Value::Null,
        ),
    ];
    for (n, (args, status, code)) in cases.into_iter().enumerate() {
        let id = format!("p{n}");
        fixture.command("provision_agent", &id, args.clone()).await;
        let (item, card) = fixture.result(&id).await;
        assert_eq!(item["payload"]["status"], "success", "{args}: {card}");
        let result = &card["content"]["result"];
        assert_eq!(
            (&result["status"], &result["error_code"]),
            (&json!(status), &code),
            "{args}: {result}"
        );
    }
    fixture.api.get("/v1/agents/dee").await.is(200);
}

#[tokio::test]
async fn a_turn_that_its_worker_lost_goes_to_another_worker() {
    let Some(fixture) = Fixture::new(&["bob"]).await else { return };
    fixture.command("delegate_async", "c1", task("bob", "x")).await;
    fixture.result("c1").await;
    let inbox = fixture.rpc("bob", "inbox", json!({ "wait_ms": 20_000 })).await;
    let id = inbox["items"][0]["payload"]["agent_turn_id"].clone();
    let body = json!({ "agent_turn_id": id, "lease_ms": 1_000 });
    let lost = fixture.rpc("bob", "lease", body).await;
    let leased = fixture.lease_next("bob").await;
    assert!(leased["turn"]["turn_epoch"].as_u64() > lost["turn_epoch"].as_u64(), "{leased}");
    let late = json!({ "agent_turn_id": id, "turn_epoch": lost["turn_epoch"] });
    let refused = fixture.peer.request("agent.bob.finish", late).await;
    assert_eq!(refused["error"]["code"], "conflict", "{refused}");
    fixture.deliver("bob", &leased, json!("second try")).await;
    let (_, card) = fixture.result("c1-0").await;
    assert_eq!(card["content"]["result"], "second try", "{card}");
}

#[tokio::test]
async fn an_agent_cannot_wait_for_itself_nor_go_too_deep() {
    let Some(fixture) = Fixture::new(&["bob", "eve"]).await else { return };
    fixture.command("ask_expert", "q1", json!({ "expert_profile": "bob", "question": "x" })).await;
    let leased = fixture.lease_next("bob").await;
    let turn = &leased["turn"];
    assert_eq!(turn["recursion_depth"], 1, "{turn}");
    let ask = |id: &str, agent: &str| {
        json!({
            "agent_turn_id": turn["agent_turn_id"], "turn_epoch": turn["turn_epoch"],
            "suspend": false, "step_id": format!("s_{id}"),
            "calls": [{ "tool_call_id": id, "tool_name": "ask_expert",
                "arguments": { "expert_profile": agent, "question": "x" } }],
        })
    };
    fixture.rpc("bob", "dispatch", ask("self", "bob")).await;
    let inbox = until("the refusal", || async {
        let inbox = fixture.rpc("bob", "inbox", json!({ "wait_ms": 1_000 })).await;
        inbox["items"].as_array().unwrap().first().cloned()
    })
    .await;
    let id = inbox["payload"]["tool_result_card_id"].as_str().unwrap();
    let card = fixture.api.get(&format!("/v1/cards/{id}")).await.is(200);
    let message = card["content"]["error"]["message"].as_str().unwrap();
    assert!(message.contains("wait for itself"), "{message}");
    let lease = json!({ "agent_turn_id": "deep", "recursion_depth": 19 });
    fixture.rpc("eve", "lease", lease).await;
    let body = json!({
        "agent_turn_id": "deep", "turn_epoch": 1, "suspend": false,
        "calls": [{ "tool_call_id": "d", "tool_name": "ask_expert",
            "arguments": { "expert_profile": "bob", "question": "x" } }],
    });
    fixture.rpc("eve", "dispatch", body).await;
    let inbox = fixture.rpc("eve", "inbox", json!({ "wait_ms": 20_000 })).await;
    let id = inbox["items"][0]["payload"]["tool_result_card_id"].as_str().unwrap();
    let card = fixture.api.get(&format!("/v1/cards/{id}")).await.is(200);
    let message = card["content"]["error"]["message"].as_str().unwrap();
    assert!(message.contains("recursion_depth_exceeded"), "{message}");
}

#[tokio::test]
async fn rules_approvals_and_switches_hold_for_commands() {
    let Some(fixture) = Fixture::new(&["bob"]).await else { return };
    let operator = fixture._server.operator();
    let rule = async |verdict: &str, tool: &str| {
        let rule = json!({ "verdict": verdict, "tools": [tool] });
        operator.put("/v1/rules/restrict", rule).await.is(200);
    };
    rule("deny", "delegate_async").await;
    fixture.command("delegate_async", "p1", task("bob", "x")).await;
    fixture.expect_refusal("p1", "may not call \"delegate_async\"").await;
    // A rule on the agent that gets the work.
    rule("deny", "agent.bob").await;
    fixture.command("delegate_async", "p2", task("bob", "x")).await;
    fixture.expect_refusal("p2", "there is no agent \"bob\"").await;
    operator.delete("/v1/rules/restrict").await.is(204);
    let off = json!({ "reason": "bob is on leave" });
    operator.put("/v1/switches/agent/bob", off).await.is(200);
    fixture.command("delegate_async", "p3", task("bob", "x")).await;
    fixture.expect_refusal("p3", "bob is on leave").await;
    operator.delete("/v1/switches/agent/bob").await.is(204);
    let none = fixture.rpc("bob", "inbox", json!({})).await;
    assert_eq!(none["items"], json!([]), "nothing was handed over");
    rule("ask", "delegate_async").await;
    fixture.command("delegate_async", "p4", task("bob", "x")).await;
    let pending = until("the approval", || async {
        let list = operator.get("/v1/approvals?status=pending").await.is(200);
        list["approvals"].as_array().unwrap().first().cloned()
    })
    .await;
    assert_eq!(pending["requested_by"]["agent"], "ada", "{pending}");
    let decision = json!({ "approval_id": pending["approval_id"], "verdict": "approve" });
    operator.post("/v1/approvals/decide", json!({ "decisions": [decision] })).await.is(200);
    fixture.lease_next("bob").await;
}
