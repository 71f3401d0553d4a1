//! Commands that a tool service cannot execute: it answers them if an answer is possible, and
//! stores them as dead letters otherwise.

use async_nats::jetstream::consumer::pull;
use futures::StreamExt;
use serde_json::{Value, json};

use crate::support::nats::{Nats, NatsPeer, tool};
use crate::support::process::run_cli;
use crate::support::{Api, Server, soon, until};

struct Fixture {
    nats: Nats,
    server: Server,
    api: Api,
    peer: NatsPeer,
    _host: crate::support::nats::HostGuard,
}

const SERVED: &str = "cg.v1r3.default.public.cmd.tool.served.run";

impl Fixture {
    async fn new() -> Option<Self> {
        Some(Self::with_nats(Nats::start().await?).await)
    }

    async fn with_nats(nats: Nats) -> Self {
        let server = nats.server().await;
        let (api, peer) = (server.api(), nats.peer().await);
        // This target has no host: the test reads its commands and publishes them to another one.
        api.post("/projects/default/tools", tool("idle.work", "idle", json!({}))).await.is(201);
        let host = nats
            .host("served", |host| host.with_tool("idle.work", |job| async move { Ok(job.args) }))
            .await;
        Self { nats, server, api, peer, _host: host }
    }

    /// Waits until the tool service has acknowledged every command, so that none is redelivered.
    async fn wait_until_processed(&self) {
        let stream = async_nats::jetstream::new(self.peer.client.clone());
        let stream = stream.get_stream("cg_cmd_v1r3").await.unwrap();
        until("the tool service to finish", || async {
            let found = stream.get_consumer::<pull::Config>("tool_served_cmd_v1r3").await;
            let info = found.ok()?.cached_info().clone();
            (info.num_pending == 0 && info.num_ack_pending == 0).then_some(())
        })
        .await;
    }

    /// Makes a call, changes its command before the host receives it, and returns the ended call.
    async fn run_changed_command(&self, change: impl FnOnce(&mut Value)) -> Value {
        let id = self.api.invoke("idle.work", json!({ "x": 1 })).await;
        let command = self.peer.next("idle").await;
        command.ack().await;
        let mut payload = command.payload.clone();
        change(&mut payload);
        self.peer.command(SERVED, payload.to_string().into_bytes()).await;
        self.api.finished(&id).await
    }

    async fn run_failing_command(&self, word: &str, change: impl FnOnce(&mut Value)) -> Value {
        let call = self.run_changed_command(change).await;
        assert_eq!(call["status"], "FAILED", "{word}: {call}");
        let message = call["error"]["message"].as_str().unwrap();
        assert!(message.contains(word), "{word}: {message}");
        let path = format!("/v1/tool_calls/{}/cards", call["tool_call_id"].as_str().unwrap());
        let cards = self.api.get(&path).await.is(200);
        cards["cards"][1]["content"].clone()
    }

    async fn wait_for_dead_letter(&self, word: &str) -> Value {
        until(&format!("a dead letter with {word}"), || async {
            let dead_letters = self.api.get("/v1/dead_letters").await.is(200);
            let mut dead_letters = dead_letters["dead_letters"].as_array().unwrap().clone();
            dead_letters.retain(|l| l["message"].as_str().unwrap().contains(word));
            dead_letters.pop()
        })
        .await
    }
}

#[tokio::test]
async fn an_invalid_command_is_answered_with_a_failure() {
    let Some(fixture) = Fixture::new().await else { return };
    let good = fixture.run_changed_command(|_| {}).await;
    assert_eq!(good["result"], json!({ "x": 1 }), "{good}");
    let coerced = fixture.run_changed_command(|payload| payload["turn_epoch"] = json!("1")).await;
    assert_eq!(coerced["status"], "SUCCEEDED", "a numeric text is a number: {coerced}");
    for name in ["args", "arguments", "result"] {
        let word = format!("payload.{name} is forbidden");
        let content = fixture.run_failing_command(&word, |payload| payload[name] = json!({})).await;
        assert_eq!(content["error"]["code"], "bad_request");
        assert_eq!(content["result"]["error_code"], "bad_request");
        assert_eq!(content["error"]["source"], "tool");
    }
    for name in ["tool_call_card_id", "tool_name", "after_execution"] {
        for blank in [Value::Null, json!("  ")] {
            let content = fixture.run_failing_command(name, |payload| payload[name] = blank).await;
            assert_eq!(content["error"]["code"], "bad_request");
        }
    }
    let content = fixture
        .run_failing_command("explode", |payload| payload["after_execution"] = json!("explode"))
        .await;
    assert_eq!(content["error"]["code"], "invalid_after_execution");
    assert_eq!(content["result"]["error_code"], "bad_request");
    assert_eq!(content["after_execution"], "suspend");
}

#[tokio::test]
async fn a_command_with_a_wrong_card_is_answered_with_a_failure() {
    let Some(fixture) = Fixture::new().await else { return };
    let unknown = |payload: &mut Value| payload["tool_call_card_id"] = json!("nothing");
    assert_eq!(fixture.run_failing_command("no card", unknown).await["error"]["code"], "not_found");
    let thought = json!({
        "card_id": "thought", "type": "agent.thought", "author_id": "a",
        "content": { "__type__": "TextContent", "text": "hm" },
    });
    fixture.api.post("/v1/cards", thought).await.is(201);
    let other = json!({
        "card_id": "other", "type": "tool.call", "author_id": "a", "tool_call_id": "call_9",
        "content": {
            "__type__": "ToolCallContent", "tool_name": "x", "arguments": {}, "status": "called",
        },
    });
    fixture.api.post("/v1/cards", other).await.is(201);
    for (card, word) in [("thought", "not a tool.call"), ("other", "call_9")] {
        let change = |payload: &mut Value| payload["tool_call_card_id"] = json!(card);
        assert_eq!(fixture.run_failing_command(word, change).await["error"]["code"], "bad_request");
    }
    // The host does not know this tool.
    let target = tool("no.such", "idle", json!({}));
    fixture.api.post("/projects/default/tools", target).await.is(201);
    let id = fixture.api.invoke("no.such", json!({})).await;
    let command = fixture.peer.next("idle").await;
    command.ack().await;
    fixture.peer.command(SERVED, command.payload.to_string().into_bytes()).await;
    let call = fixture.api.finished(&id).await;
    assert_eq!(call["error"]["code"], "NOT_FOUND", "UTP's not_found: {call}");
}

#[tokio::test]
async fn an_unanswerable_command_becomes_a_dead_letter() {
    let Some(fixture) = Fixture::new().await else { return };
    let id = fixture.api.invoke("idle.work", json!({ "x": 2 })).await;
    let command = fixture.peer.next("idle").await;
    command.ack().await;
    for name in ["tool_call_id", "agent_turn_id", "agent_id", "turn_epoch"] {
        let mut payload = command.payload.clone();
        payload[name] = json!("  ");
        fixture.peer.command(SERVED, payload.to_string().into_bytes()).await;
        let dead = fixture.wait_for_dead_letter(name).await;
        assert_eq!(dead["kind"], "command", "{dead}");
        assert_eq!(dead["subject"], SERVED);
    }
    for (bytes, word) in [(&b"{\"tool"[..], "not JSON"), (b"[]", "object")] {
        fixture.peer.command(SERVED, bytes.to_vec()).await;
        assert_eq!(fixture.wait_for_dead_letter(word).await["kind"], "command");
    }
    // Missing ids, ids that are not text, and fractional epochs are invalid.
    let mut invalid_fields = vec![("turn_epoch", json!(1.5)), ("turn_epoch", json!("x"))];
    for name in ["tool_call_id", "agent_turn_id", "agent_id"] {
        invalid_fields.extend([(name, Value::Null), (name, json!(7))]);
    }
    let count_dead_letters = async || {
        let dead_letters = fixture.api.get("/v1/dead_letters?limit=200").await.is(200);
        dead_letters["dead_letters"].as_array().unwrap().len()
    };
    let before = count_dead_letters().await;
    for (name, value) in &invalid_fields {
        let mut payload = command.payload.clone();
        payload[*name] = value.clone();
        fixture.peer.command(SERVED, payload.to_string().into_bytes()).await;
    }
    fixture.wait_until_processed().await;
    assert_eq!(count_dead_letters().await, before + invalid_fields.len());
    assert_eq!(fixture.api.call(&id).await["status"], "PENDING", "no command was applied");
    // The redriven command is published, and the original command is executed.
    let dead = fixture.wait_for_dead_letter("turn_epoch").await;
    let dead_id = dead["id"].as_str().unwrap();
    let (list, _) = run_cli(&fixture.server, &["utp", "dead-letters"]).await;
    assert!(list.contains(dead_id) && list.contains("malformed"), "{list}");
    let (_, stderr) = run_cli(&fixture.server, &["utp", "redrive", dead_id]).await;
    assert_eq!(stderr.trim(), format!("{dead_id} was published again"));
    let (list, _) = run_cli(&fixture.server, &["utp", "dead-letters", "--json"]).await;
    let list: Value = list.parse().unwrap();
    let is_same = |dead_letter: &&Value| dead_letter["id"] == dead_id;
    let again = list["dead_letters"].as_array().unwrap().iter().find(is_same).unwrap();
    assert_eq!(again["last_try"], "published again");
    fixture.peer.command(SERVED, command.payload.to_string().into_bytes()).await;
    assert_eq!(fixture.api.finished(&id).await["result"], json!({ "x": 2 }));
    // A command with an invalid trace header is executed all the same.
    let id = fixture.api.invoke("idle.work", json!({})).await;
    let command = fixture.peer.next("idle").await;
    command.ack().await;
    let mut headers = async_nats::HeaderMap::new();
    headers.insert("traceparent", "nonsense");
    let jetstream = async_nats::jetstream::new(fixture.peer.client.clone());
    let bytes = command.payload.to_string().into_bytes();
    jetstream.publish_with_headers(SERVED, headers, bytes.into()).await.unwrap().await.unwrap();
    assert_eq!(fixture.api.finished(&id).await["status"], "SUCCEEDED");
}

#[tokio::test]
async fn an_oversized_command_becomes_a_truncated_dead_letter() {
    let Some(nats) = Nats::start_with(65_536).await else { return };
    let fixture = Fixture::with_nats(nats).await;
    // Each of these bytes takes six bytes in JSON, which exceeds the limit of the broker.
    fixture.peer.command(SERVED, vec![1; 60_000]).await;
    let dead = fixture.wait_for_dead_letter("not JSON").await;
    assert_eq!((&dead["kind"], &dead["cut"]), (&json!("command"), &json!(true)));
    assert_eq!(dead["payload"].as_str().unwrap().len(), 65_536 / 8);
    let path = format!("/v1/dead_letters/{}/redrive", dead["id"].as_str().unwrap());
    fixture.api.post(&path, json!({})).await.refused(409, "CONFLICT");
    fixture.wait_until_processed().await;
}

#[tokio::test]
async fn a_command_of_an_unknown_project_is_not_redelivered_forever() {
    let Some(fixture) = Fixture::new().await else { return };
    // An unknown project stores no dead letters.
    let subject = "cg.v1r3.nobody.public.cmd.tool.served.run";
    fixture.peer.command(subject, b"{\"tool".to_vec()).await;
    fixture.wait_until_processed().await;
    let good = fixture.run_changed_command(|_| {}).await;
    assert_eq!(good["status"], "SUCCEEDED", "{good}");
}

#[tokio::test]
async fn targets_with_similar_names_have_separate_consumers() {
    let Some(fixture) = Fixture::new().await else { return };
    let mut hosts = Vec::new();
    for target in ["a-b", "a_b", "a/b"] {
        let name = format!("{}.work", target.replace(['-', '/'], "x"));
        let make = |host: toolcrib_sources::utp::host::ToolHost| {
            host.with_fallback(move |_| async move {
                toolcrib_sources::utp::host::ToolJobResult::success(json!(target))
            })
        };
        hosts.push(fixture.nats.host(target, make).await);
        let definition = tool(&format!("{name}.{}", hosts.len()), target, json!({}));
        fixture.api.post("/projects/default/tools", definition).await.is(201);
        let id = fixture.api.invoke(&format!("{name}.{}", hosts.len()), json!({})).await;
        assert_eq!(fixture.api.finished(&id).await["result"], target);
    }
}

#[tokio::test]
async fn a_tool_that_panics_fails_its_call() {
    let Some(fixture) = Fixture::new().await else { return };
    let make = |host: toolcrib_sources::utp::host::ToolHost| {
        host.with_tool("odd.work", |job| {
            assert_eq!(job.args["panics"], false, "before there is anything to wait for");
            async move { Ok(job.args) }
        })
    };
    let _host = fixture.nats.host("odd", make).await;
    let definition = tool("odd.work", "odd", json!({}));
    fixture.api.post("/projects/default/tools", definition).await.is(201);
    let id = fixture.api.invoke("odd.work", json!({ "panics": true })).await;
    let call = fixture.api.finished(&id).await;
    assert_eq!(call["status"], "FAILED", "{call}");
    assert!(call["error"]["message"].as_str().unwrap().contains("panicked"), "{call}");
    let id = fixture.api.invoke("odd.work", json!({ "panics": false })).await;
    assert_eq!(fixture.api.finished(&id).await["status"], "SUCCEEDED");
}

/// Toolcrib stores no such card, but another server may.
#[tokio::test]
async fn a_call_card_with_wrong_content_is_answered_with_a_failure() {
    let Some(nats) = Nats::start().await else { return };
    let peer = nats.peer().await;
    let mut requests = peer.client.subscribe("cg.v9.*.*.rpc.sys.*.*").await.unwrap();
    nats.connect("v9").await.ensure_streams().await.unwrap();
    let command = json!({
        "tool_call_id": "c", "agent_turn_id": "t", "turn_epoch": 1, "agent_id": "a",
        "tool_name": "odd.work", "after_execution": "suspend", "tool_call_card_id": "k",
    });
    peer.command("cg.v9.p.c.cmd.tool.odd.run", command.to_string().into_bytes()).await;
    let _host = nats
        .host_version("v9", "odd", |host| {
            host.with_tool("odd.work", |job| async move { Ok(job.args) })
        })
        .await;
    let report = loop {
        let request = soon("a request", requests.next()).await.unwrap();
        let operation = request.subject.split(".rpc.sys.").nth(1).unwrap().to_owned();
        let body: Value = serde_json::from_slice(&request.payload).unwrap();
        let card = json!({
            "card_id": "k", "type": "tool.call", "tool_call_id": "c", "metadata": {},
            "content": { "__type__": "TextContent", "text": "hm" },
        });
        if let Some(reply) = request.reply {
            let answer = json!({ "ok": true, "cards": [card] });
            peer.client.publish(reply, answer.to_string().into()).await.unwrap();
        }
        if operation == "l0.report" {
            break body;
        }
    };
    assert_eq!(report["status"], "failed", "{report}");
    let error = &report["card"]["content"]["error"];
    assert_eq!(error["code"], "bad_request", "{report}");
    assert!(error["message"].as_str().unwrap().contains("ToolCallContent"), "{report}");
}

/// OpenTelemetry is stricter than the protocol: a trace in upper case would start a new one.
#[tokio::test]
async fn a_tool_receives_its_traceparent_in_lower_case() {
    let Some(fixture) = Fixture::new().await else { return };
    let make = |host: toolcrib_sources::utp::host::ToolHost| {
        host.with_tool("idle.work", |job| async move { Ok(json!(job.traceparent)) })
    };
    let _host = fixture.nats.host("traced", make).await;
    let id = fixture.api.invoke("idle.work", json!({})).await;
    let command = fixture.peer.next("idle").await;
    command.ack().await;
    let trace = command.header("traceparent");
    let mut headers = async_nats::HeaderMap::new();
    headers.insert("traceparent", trace.to_uppercase());
    let jetstream = async_nats::jetstream::new(fixture.peer.client.clone());
    let (subject, bytes) = (SERVED.replace("served", "traced"), command.payload.to_string());
    jetstream.publish_with_headers(subject, headers, bytes.into()).await.unwrap().await.unwrap();
    assert_eq!(fixture.api.finished(&id).await["result"], trace);
}
