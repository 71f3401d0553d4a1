//! Commands that a tool service cannot execute: answered where an answer is possible, and kept as
//! dead letters where it is not.

use async_nats::jetstream::consumer::pull;
use futures::StreamExt;
use serde_json::{Value, json};

use crate::support::nats::{Hand, Nats, tool};
use crate::support::process::typed;
use crate::support::{Api, Server, soon, until};

struct World {
    nats: Nats,
    server: Server,
    api: Api,
    hand: Hand,
    _host: crate::support::nats::Hosted,
}

const SERVED: &str = "cg.v1r3.default.public.cmd.tool.served.run";

impl World {
    async fn new() -> Option<Self> {
        Some(Self::over(Nats::start().await?).await)
    }

    async fn over(nats: Nats) -> Self {
        let server = nats.server().await;
        let (api, hand) = (server.api(), nats.hand().await);
        // Nobody serves this target: its commands are read by the test and given to another.
        api.post("/projects/default/tools", tool("idle.work", "idle", json!({}))).await.is(201);
        let host = nats
            .host("served", |host| host.with_tool("idle.work", |job| async move { Ok(job.args) }))
            .await;
        Self { nats, server, api, hand, _host: host }
    }

    /// Everything that was published for the tool service is done with: nothing comes again.
    async fn done(&self) {
        let stream = async_nats::jetstream::new(self.hand.client.clone());
        let stream = stream.get_stream("cg_cmd_v1r3").await.unwrap();
        until("the tool service to be done", || async {
            let found = stream.get_consumer::<pull::Config>("tool_served_cmd_v1r3").await;
            let info = found.ok()?.cached_info().clone();
            (info.num_pending == 0 && info.num_ack_pending == 0).then_some(())
        })
        .await;
    }

    /// A call whose command is changed on its way. Answers with how it ended.
    async fn changed(&self, change: impl FnOnce(&mut Value)) -> Value {
        let id = self.api.invoke("idle.work", json!({ "x": 1 })).await;
        let command = self.hand.next("idle").await;
        command.ack().await;
        let mut payload = command.payload.clone();
        change(&mut payload);
        self.hand.command(SERVED, payload.to_string().into_bytes()).await;
        self.api.finished(&id).await
    }

    async fn failed(&self, word: &str, change: impl FnOnce(&mut Value)) -> Value {
        let call = self.changed(change).await;
        assert_eq!(call["status"], "FAILED", "{word}: {call}");
        let message = call["error"]["message"].as_str().unwrap();
        assert!(message.contains(word), "{word}: {message}");
        let path = format!("/v1/tool_calls/{}/cards", call["tool_call_id"].as_str().unwrap());
        let cards = self.api.get(&path).await.is(200);
        cards["cards"][1]["content"].clone()
    }

    async fn dead(&self, word: &str) -> Value {
        until(&format!("a dead letter with {word}"), || async {
            let letters = self.api.get("/v1/dead_letters").await.is(200);
            let mut letters = letters["dead_letters"].as_array().unwrap().clone();
            letters.retain(|l| l["message"].as_str().unwrap().contains(word));
            letters.pop()
        })
        .await
    }
}

#[tokio::test]
async fn what_is_wrong_and_can_be_answered_is_answered() {
    let Some(world) = World::new().await else { return };
    let good = world.changed(|_| {}).await;
    assert_eq!(good["result"], json!({ "x": 1 }), "{good}");
    let coerced = world.changed(|payload| payload["turn_epoch"] = json!("1")).await;
    assert_eq!(coerced["status"], "SUCCEEDED", "a numeric text is a number: {coerced}");
    for name in ["args", "arguments", "result"] {
        let word = format!("payload.{name} is forbidden");
        let content = world.failed(&word, |payload| payload[name] = json!({})).await;
        assert_eq!(content["error"]["code"], "bad_request");
        assert_eq!(content["result"]["error_code"], "bad_request");
        assert_eq!(content["error"]["source"], "tool");
    }
    for name in ["tool_call_card_id", "tool_name", "after_execution"] {
        for blank in [Value::Null, json!("  ")] {
            let content = world.failed(name, |payload| payload[name] = blank).await;
            assert_eq!(content["error"]["code"], "bad_request");
        }
    }
    let content =
        world.failed("explode", |payload| payload["after_execution"] = json!("explode")).await;
    assert_eq!(content["error"]["code"], "invalid_after_execution");
    assert_eq!(content["result"]["error_code"], "bad_request");
    assert_eq!(content["after_execution"], "suspend");
}

#[tokio::test]
async fn a_card_that_does_not_fit_is_answered() {
    let Some(world) = World::new().await else { return };
    let unknown = |payload: &mut Value| payload["tool_call_card_id"] = json!("nothing");
    assert_eq!(world.failed("no card", unknown).await["error"]["code"], "not_found");
    let thought = json!({
        "card_id": "thought", "type": "agent.thought", "author_id": "a",
        "content": { "__type__": "TextContent", "text": "hm" },
    });
    world.api.post("/v1/cards", thought).await.is(201);
    let other = json!({
        "card_id": "other", "type": "tool.call", "author_id": "a", "tool_call_id": "call_9",
        "content": {
            "__type__": "ToolCallContent", "tool_name": "x", "arguments": {}, "status": "called",
        },
    });
    world.api.post("/v1/cards", other).await.is(201);
    for (card, word) in [("thought", "not a tool.call"), ("other", "call_9")] {
        let change = |payload: &mut Value| payload["tool_call_card_id"] = json!(card);
        assert_eq!(world.failed(word, change).await["error"]["code"], "bad_request");
    }
    // A tool that is not served there.
    let target = tool("no.such", "idle", json!({}));
    world.api.post("/projects/default/tools", target).await.is(201);
    let id = world.api.invoke("no.such", json!({})).await;
    let command = world.hand.next("idle").await;
    command.ack().await;
    world.hand.command(SERVED, command.payload.to_string().into_bytes()).await;
    let call = world.api.finished(&id).await;
    assert_eq!(call["error"]["code"], "NOT_FOUND", "UTP's not_found: {call}");
}

#[tokio::test]
async fn what_cannot_be_answered_becomes_a_dead_letter_and_can_be_driven_again() {
    let Some(world) = World::new().await else { return };
    let id = world.api.invoke("idle.work", json!({ "x": 2 })).await;
    let command = world.hand.next("idle").await;
    command.ack().await;
    for name in ["tool_call_id", "agent_turn_id", "agent_id", "turn_epoch"] {
        let mut payload = command.payload.clone();
        payload[name] = json!("  ");
        world.hand.command(SERVED, payload.to_string().into_bytes()).await;
        let dead = world.dead(name).await;
        assert_eq!(dead["kind"], "command", "{dead}");
        assert_eq!(dead["subject"], SERVED);
    }
    for (bytes, word) in [(&b"{\"tool"[..], "not JSON"), (b"[]", "object")] {
        world.hand.command(SERVED, bytes.to_vec()).await;
        assert_eq!(world.dead(word).await["kind"], "command");
    }
    // Neither what is not there nor what is no text is an id, and half an epoch is none.
    let mut wrong = vec![("turn_epoch", json!(1.5)), ("turn_epoch", json!("x"))];
    for name in ["tool_call_id", "agent_turn_id", "agent_id"] {
        wrong.extend([(name, Value::Null), (name, json!(7))]);
    }
    let letters = async || {
        let letters = world.api.get("/v1/dead_letters?limit=200").await.is(200);
        letters["dead_letters"].as_array().unwrap().len()
    };
    let before = letters().await;
    for (name, value) in &wrong {
        let mut payload = command.payload.clone();
        payload[*name] = value.clone();
        world.hand.command(SERVED, payload.to_string().into_bytes()).await;
    }
    world.done().await;
    assert_eq!(letters().await, before + wrong.len());
    assert_eq!(world.api.call(&id).await["status"], "PENDING", "nothing of it was applied");
    // The command itself, driven again, is executed.
    let dead = world.dead("turn_epoch").await;
    let dead_id = dead["id"].as_str().unwrap();
    let (list, _) = typed(&world.server, &["utp", "dead-letters"]).await;
    assert!(list.contains(dead_id) && list.contains("malformed"), "{list}");
    let (_, told) = typed(&world.server, &["utp", "redrive", dead_id]).await;
    assert_eq!(told.trim(), format!("{dead_id} was published again"));
    let (list, _) = typed(&world.server, &["utp", "dead-letters", "--json"]).await;
    let list: Value = list.parse().unwrap();
    let same = |letter: &&Value| letter["id"] == dead_id;
    let again = list["dead_letters"].as_array().unwrap().iter().find(same).unwrap();
    assert_eq!(again["last_try"], "published again");
    world.hand.command(SERVED, command.payload.to_string().into_bytes()).await;
    assert_eq!(world.api.finished(&id).await["result"], json!({ "x": 2 }));
    // A trace that cannot be read is no reason to leave a command without an answer.
    let id = world.api.invoke("idle.work", json!({})).await;
    let command = world.hand.next("idle").await;
    command.ack().await;
    let mut headers = async_nats::HeaderMap::new();
    headers.insert("traceparent", "nonsense");
    let jetstream = async_nats::jetstream::new(world.hand.client.clone());
    let bytes = command.payload.to_string().into_bytes();
    jetstream.publish_with_headers(SERVED, headers, bytes.into()).await.unwrap().await.unwrap();
    assert_eq!(world.api.finished(&id).await["status"], "SUCCEEDED");
}

#[tokio::test]
async fn a_command_that_no_letter_can_hold_is_kept_in_part() {
    let Some(nats) = Nats::start_with(65_536).await else { return };
    let world = World::over(nats).await;
    // As JSON each of these bytes is six, which is more than the broker carries.
    world.hand.command(SERVED, vec![1; 60_000]).await;
    let dead = world.dead("not JSON").await;
    assert_eq!((&dead["kind"], &dead["cut"]), (&json!("command"), &json!(true)));
    assert_eq!(dead["payload"].as_str().unwrap().len(), 65_536 / 8);
    let path = format!("/v1/dead_letters/{}/redrive", dead["id"].as_str().unwrap());
    world.api.post(&path, json!({})).await.refused(409, "CONFLICT");
    world.done().await;
}

#[tokio::test]
async fn what_nobody_keeps_does_not_come_again_for_ever() {
    let Some(world) = World::new().await else { return };
    // A project that nobody made keeps no letters.
    let subject = "cg.v1r3.nobody.public.cmd.tool.served.run";
    world.hand.command(subject, b"{\"tool".to_vec()).await;
    world.done().await;
    let good = world.changed(|_| {}).await;
    assert_eq!(good["status"], "SUCCEEDED", "{good}");
}

#[tokio::test]
async fn targets_that_are_written_alike_are_served_apart() {
    let Some(world) = World::new().await else { return };
    let mut hosts = Vec::new();
    for target in ["a-b", "a_b", "a/b"] {
        let name = format!("{}.work", target.replace(['-', '/'], "x"));
        let make = |host: toolcrib_sources::utp::host::ToolHost| {
            host.with_fallback(move |_| async move {
                toolcrib_sources::utp::host::ToolJobResult::success(json!(target))
            })
        };
        hosts.push(world.nats.host(target, make).await);
        let definition = tool(&format!("{name}.{}", hosts.len()), target, json!({}));
        world.api.post("/projects/default/tools", definition).await.is(201);
        let id = world.api.invoke(&format!("{name}.{}", hosts.len()), json!({})).await;
        assert_eq!(world.api.finished(&id).await["result"], target);
    }
}

#[tokio::test]
async fn a_tool_that_panics_at_once_has_failed() {
    let Some(world) = World::new().await else { return };
    let make = |host: toolcrib_sources::utp::host::ToolHost| {
        host.with_tool("odd.work", |job| {
            assert_eq!(job.args["panics"], false, "before there is anything to wait for");
            async move { Ok(job.args) }
        })
    };
    let _host = world.nats.host("odd", make).await;
    let definition = tool("odd.work", "odd", json!({}));
    world.api.post("/projects/default/tools", definition).await.is(201);
    let id = world.api.invoke("odd.work", json!({ "panics": true })).await;
    let call = world.api.finished(&id).await;
    assert_eq!(call["status"], "FAILED", "{call}");
    assert!(call["error"]["message"].as_str().unwrap().contains("panicked"), "{call}");
    let id = world.api.invoke("odd.work", json!({ "panics": false })).await;
    assert_eq!(world.api.finished(&id).await["status"], "SUCCEEDED");
}

/// Our own crib keeps no such card; another's may.
#[tokio::test]
async fn a_card_with_another_content_is_answered() {
    let Some(nats) = Nats::start().await else { return };
    let hand = nats.hand().await;
    let mut asked = hand.client.subscribe("cg.v9.*.*.rpc.sys.*.*").await.unwrap();
    nats.link("v9").await.ensure_streams().await.unwrap();
    let command = json!({
        "tool_call_id": "c", "agent_turn_id": "t", "turn_epoch": 1, "agent_id": "a",
        "tool_name": "odd.work", "after_execution": "suspend", "tool_call_card_id": "k",
    });
    hand.command("cg.v9.p.c.cmd.tool.odd.run", command.to_string().into_bytes()).await;
    let _host = nats
        .host_of("v9", "odd", |host| host.with_tool("odd.work", |job| async move { Ok(job.args) }))
        .await;
    let report = loop {
        let request = soon("a request", asked.next()).await.unwrap();
        let what = request.subject.split(".rpc.sys.").nth(1).unwrap().to_owned();
        let body: Value = serde_json::from_slice(&request.payload).unwrap();
        let card = json!({
            "card_id": "k", "type": "tool.call", "tool_call_id": "c", "metadata": {},
            "content": { "__type__": "TextContent", "text": "hm" },
        });
        if let Some(reply) = request.reply {
            let answer = json!({ "ok": true, "cards": [card] });
            hand.client.publish(reply, answer.to_string().into()).await.unwrap();
        }
        if what == "l0.report" {
            break body;
        }
    };
    assert_eq!(report["status"], "failed", "{report}");
    let error = &report["card"]["content"]["error"];
    assert_eq!(error["code"], "bad_request", "{report}");
    assert!(error["message"].as_str().unwrap().contains("ToolCallContent"), "{report}");
}

/// What makes spans is stricter than the protocol: a trace that it cannot read would be another.
#[tokio::test]
async fn a_tool_is_told_its_trace_as_everybody_reads_it() {
    let Some(world) = World::new().await else { return };
    let make = |host: toolcrib_sources::utp::host::ToolHost| {
        host.with_tool("idle.work", |job| async move { Ok(json!(job.traceparent)) })
    };
    let _host = world.nats.host("traced", make).await;
    let id = world.api.invoke("idle.work", json!({})).await;
    let command = world.hand.next("idle").await;
    command.ack().await;
    let trace = command.header("traceparent");
    let mut headers = async_nats::HeaderMap::new();
    headers.insert("traceparent", trace.to_uppercase());
    let jetstream = async_nats::jetstream::new(world.hand.client.clone());
    let (subject, bytes) = (SERVED.replace("served", "traced"), command.payload.to_string());
    jetstream.publish_with_headers(subject, headers, bytes.into()).await.unwrap().await.unwrap();
    assert_eq!(world.api.finished(&id).await["result"], trace);
}
