//! Batched reports, cards that are sent before their commands, and a tool service that uses both.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures::StreamExt;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::Semaphore;

use crate::support::nats::{Nats, NatsPeer, report, result_card, tool};
use crate::support::{Api, soon, until};

/// Returns a report with its card.
fn card_report(command: &Value, card_id: &str) -> Value {
    let mut body = report(command, card_id, "success");
    body["card"] = result_card(command, card_id, "success", json!({ "n": card_id }));
    body
}

#[tokio::test]
async fn each_report_of_a_batch_is_answered_separately() {
    let Some(nats) = Nats::start().await else { return };
    let server = nats.server().await;
    let (api, peer) = (server.api(), nats.peer().await);
    api.post("/projects/default/tools", tool("hand.work", "hand", json!({}))).await.is(201);
    let mut commands = Vec::new();
    for _ in 0..4 {
        let id = api.invoke("hand.work", json!({ "x": 1 })).await;
        let command = peer.next("hand").await;
        command.ack().await;
        assert_eq!(command.payload["tool_call_id"], id.as_str());
        commands.push((id, command.payload));
    }
    let mut late = card_report(&commands[1].1, "r1");
    late["turn_epoch"] = json!(7);
    let reports = json!([
        { "report": card_report(&commands[0].1, "r0") },
        { "report": late },
        { "report": "nonsense" },
        { "report": card_report(&commands[2].1, "r2"), "headers": { "CG-Recursion-Depth": "3" } },
        { "report": card_report(&commands[3].1, "r3"), "headers": { "CG-Recursion-Depth": "0" } },
        { "report": card_report(&commands[3].1, "r3") },
    ]);
    let headers = [("CG-Sender", "tool.hand")];
    let body = json!({ "reports": reports });
    let answer = peer.request_in("default", "sys.l0.reports", body, &headers).await;
    let ok: Vec<&Value> = answer["answers"].as_array().unwrap().iter().map(|a| &a["ok"]).collect();
    assert_eq!(ok, [true, false, false, false, true, true], "{answer}");
    assert_eq!(answer["answers"][1]["error"]["code"], "conflict");
    assert_eq!(answer["answers"][3]["error"]["code"], "bad_request");
    let both = [&answer["answers"][4]["duplicate"], &answer["answers"][5]["duplicate"]];
    assert_eq!(both.iter().filter(|duplicate| **duplicate == &json!(true)).count(), 1);
    for (index, n) in [(0, "r0"), (3, "r3")] {
        let call = api.finished(&commands[index].0).await;
        assert_eq!((&call["result"], &call["taken_by"]), (&json!({ "n": n }), &json!("tool.hand")));
    }
    for index in [1, 2] {
        assert_eq!(api.call(&commands[index].0).await["status"], "PENDING");
    }
    // A rejected report of a batch becomes a dead letter, like a single report.
    let dead = api.get("/v1/dead_letters").await.is(200)["dead_letters"].clone();
    let mut reasons: Vec<&str> = dead
        .as_array()
        .unwrap()
        .iter()
        .map(|dead_letter| dead_letter["reason"].as_str().unwrap())
        .collect();
    reasons.sort_unstable();
    assert_eq!(reasons, ["malformed", "malformed", "wrong_epoch"]);
    for dead_letter in dead.as_array().unwrap() {
        assert_eq!(dead_letter["subject"], "cg.v1r3.default.public.rpc.sys.l0.report");
        assert_eq!(dead_letter["headers"]["cg-sender"], "tool.hand");
    }
    for wrong in [json!({}), json!({ "reports": [] }), json!({ "reports": [{ "headers": {} }] })] {
        let answer = peer.request("sys.l0.reports", wrong).await;
        assert_eq!(
            (&answer["ok"], &answer["error"]["code"]),
            (&json!(false), &json!("bad_request"))
        );
    }
}

#[tokio::test]
async fn a_card_follower_receives_the_card_before_the_command() {
    let Some(nats) = Nats::start().await else { return };
    let server = nats.server().await;
    let (api, peer) = (server.api(), nats.peer().await);
    api.post("/projects/default/tools", tool("hand.work", "hand", json!({}))).await.is(201);
    let inbox = peer.client.new_inbox();
    let mut cards = peer.client.subscribe(inbox.clone()).await.unwrap();
    let follow = json!({ "target": "hand", "inbox": inbox });
    let answer = peer.request("sys.cards.follow", follow).await;
    assert_eq!(answer["ok"], true, "{answer}");
    assert!(answer["for_ms"].as_u64().unwrap() >= 1_000, "{answer}");
    let id = api.invoke("hand.work", json!({ "x": "y" })).await;
    let sent = soon("the card", cards.next()).await.unwrap();
    let sent: Value = serde_json::from_slice(&sent.payload).unwrap();
    let card_id = peer.next("hand").await.payload["tool_call_card_id"].clone();
    assert_eq!(sent["cards"][0]["card_id"], card_id);
    assert_eq!(sent["cards"][0]["content"]["arguments"], json!({ "x": "y" }));
    // The delivery of a card does not acknowledge the call.
    assert_eq!(api.call(&id).await["status"], "PENDING");
    let fetched = peer.request("sys.cards.get", json!({ "card_ids": [card_id] })).await;
    assert_eq!(fetched["cards"], sent["cards"], "the same card in both ways");
    until("the call is acknowledged", || async {
        (api.call(&id).await["status"] == "RUNNING").then_some(())
    })
    .await;
    // With two followers the receiver of the command is unknown, so no card is sent.
    let other = json!({ "target": "hand", "inbox": peer.client.new_inbox() });
    assert_eq!(peer.request("sys.cards.follow", other).await["ok"], true);
    api.invoke("hand.work", json!({ "x": "z" })).await;
    peer.next("hand").await;
    peer.client.publish(inbox, "no card before this".into()).await.unwrap();
    let next = soon("the next message", cards.next()).await.unwrap();
    assert_eq!(&next.payload[..], b"no card before this");
    for (target, inbox) in [
        ("hand", "cg.v1r3.default.public.cmd.tool.hand.run"),
        ("hand", "_INBOX.>"),
        ("hand", ""),
        ("a.b", "_INBOX.x"),
        ("", "_INBOX.x"),
    ] {
        let body = json!({ "target": target, "inbox": inbox });
        let answer = peer.request("sys.cards.follow", body).await;
        assert_eq!(answer["error"]["code"], "bad_request", "{target} {inbox}: {answer}");
    }
}

/// Executes the first call of a service; from then on it follows cards.
async fn run_first_call(api: &Api, peer: &NatsPeer, name: &str) {
    let subject = "cg.v1r3.*.*.rpc.sys.cards.follow";
    let mut follow_requests = peer.client.subscribe(subject).await.unwrap();
    peer.client.flush().await.unwrap();
    let id = api.invoke(name, json!({ "first": true })).await;
    assert_eq!(api.finished(&id).await["status"], "SUCCEEDED");
    soon("it follows", follow_requests.next()).await.unwrap();
    // The answer proves that the server has processed the earlier requests.
    peer.request("sys.cards.follow", json!({})).await;
}

#[tokio::test]
async fn a_call_with_a_prefetched_card_becomes_running() {
    let Some(nats) = Nats::start().await else { return };
    let server = nats.server().await;
    let (api, peer) = (server.api(), nats.peer().await);
    let gate = Arc::new(Semaphore::new(1));
    let opened = gate.clone();
    let _host = nats
        .host("slow", |host| {
            host.with_tool("slow.work", move |job| {
                let gate = gate.clone();
                async move {
                    gate.acquire().await.unwrap().forget();
                    Ok(job.args)
                }
            })
        })
        .await;
    api.post("/projects/default/tools", tool("slow.work", "slow", json!({}))).await.is(201);
    run_first_call(&api, &peer, "slow.work").await;
    let id = api.invoke("slow.work", json!({ "x": 1 })).await;
    until("it is running", || async { (api.call(&id).await["status"] == "RUNNING").then_some(()) })
        .await;
    opened.add_permits(1);
    let call = api.finished(&id).await;
    assert_eq!((&call["result"], &call["taken_by"]), (&json!({ "x": 1 }), &json!("tool.rust")));
}

#[tokio::test(flavor = "multi_thread")]
async fn many_concurrent_calls_are_each_executed_once() {
    let Some(nats) = Nats::start().await else { return };
    let server = nats.server().await;
    let (api, peer) = (server.api(), nats.peer().await);
    let runs: Arc<Mutex<HashMap<u64, usize>>> = Arc::default();
    let counted = runs.clone();
    let _host = nats
        .host("many", |host| {
            host.with_tool("many.work", move |job| {
                *counted.lock().entry(job.args["n"].as_u64().unwrap_or(999)).or_default() += 1;
                async move { Ok(job.args) }
            })
        })
        .await;
    api.post("/projects/default/tools", tool("many.work", "many", json!({}))).await.is(201);
    run_first_call(&api, &peer, "many.work").await;
    let mut requests = peer.client.subscribe("cg.v1r3.*.*.rpc.sys.>").await.unwrap();
    peer.client.flush().await.unwrap();
    let calling = (0..200u64).map(|n| {
        let api = &api;
        async move {
            let id = api.invoke("many.work", json!({ "n": n })).await;
            let call = api.finished(&id).await;
            assert_eq!(
                (&call["status"], &call["result"]),
                (&json!("SUCCEEDED"), &json!({ "n": n }))
            );
        }
    });
    futures::future::join_all(calling).await;
    peer.client.publish("cg.v1r3.x.x.rpc.sys.x.end", "".into()).await.unwrap();
    let mut request_count = 0;
    while !soon("a request", requests.next()).await.unwrap().subject.ends_with(".end") {
        request_count += 1;
    }
    assert!(request_count < 400, "{request_count} requests for 200 calls");
    assert!(runs.lock().values().all(|count| *count == 1), "{runs:?}");
    assert_eq!(runs.lock().len(), 201);
}

#[tokio::test]
async fn a_tool_host_works_with_a_server_without_batched_reports() {
    let Some(nats) = Nats::start().await else { return };
    let peer = nats.peer().await;
    let mut requests = peer.client.subscribe("cg.v9.*.*.rpc.sys.*.*").await.unwrap();
    nats.connect("v9").await.ensure_streams().await.unwrap();
    for n in 0..50 {
        let command = json!({
            "tool_call_id": format!("c{n}"), "agent_turn_id": "t", "turn_epoch": 1, "agent_id": "a",
            "tool_name": "old.work", "after_execution": "suspend", "tool_call_card_id": format!("k{n}"),
        });
        let subject = "cg.v9.p.c.cmd.tool.old.run";
        peer.command(subject, command.to_string().into_bytes()).await;
    }
    let runs = Arc::new(AtomicUsize::new(0));
    let counted = runs.clone();
    let _host = nats
        .host_version("v9", "old", |host| {
            host.with_tool("old.work", move |job| {
                counted.fetch_add(1, Ordering::Relaxed);
                async move { Ok(job.args) }
            })
        })
        .await;
    let mut reported: HashMap<String, usize> = HashMap::new();
    while reported.len() < 50 {
        let request = soon("a request", requests.next()).await.unwrap();
        let body: Value = serde_json::from_slice(&request.payload).unwrap();
        let operation = request.subject.split(".rpc.sys.").nth(1).unwrap();
        let answer = match operation {
            "cards.get" => {
                let ids: Vec<String> = serde_json::from_value(body["card_ids"].clone()).unwrap();
                let cards: Vec<Value> = ids.iter().map(|id| old_card(id)).collect();
                json!({ "ok": true, "cards": cards })
            }
            "l0.report" => {
                let id = body["tool_call_id"].as_str().unwrap().to_owned();
                *reported.entry(id).or_default() += 1;
                json!({ "ok": true })
            }
            _ => json!({ "ok": false, "error": { "code": "not_found", "message": "what?" } }),
        };
        let Some(reply) = request.reply else { continue };
        peer.client.publish(reply, answer.to_string().into()).await.unwrap();
    }
    assert!(reported.values().all(|count| *count == 1), "{reported:?}");
    assert_eq!(runs.load(Ordering::Relaxed), 50);
}

fn old_card(id: &str) -> Value {
    json!({
        "card_id": id, "type": "tool.call", "author_id": "a", "metadata": {},
        "tool_call_id": id.replace('k', "c"),
        "content": { "__type__": "ToolCallContent", "tool_name": "old.work", "arguments": {} },
    })
}
