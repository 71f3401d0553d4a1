//! Commands that a tool service cannot execute: answered where an answer is possible, and kept as
//! dead letters where it is not.

use serde_json::{Value, json};

use crate::support::nats::{Hand, Nats, tool};
use crate::support::{Api, Server, until};

struct World {
    _nats: Nats,
    _server: Server,
    api: Api,
    hand: Hand,
    _host: crate::support::nats::Hosted,
}

const SERVED: &str = "cg.v1r3.default.public.cmd.tool.served.run";

impl World {
    async fn new() -> Option<Self> {
        let nats = Nats::start().await?;
        let server = nats.server().await;
        let (api, hand) = (server.api(), nats.hand().await);
        // Nobody serves this target: its commands are read by the test and given to another.
        api.post("/projects/default/tools", tool("idle.work", "idle", json!({}))).await.is(201);
        let host = nats
            .host("served", |host| host.tool("idle.work", |job| async move { Ok(job.args) }))
            .await;
        Some(Self { _nats: nats, _server: server, api, hand, _host: host })
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
    assert_eq!(world.api.call(&id).await["status"], "PENDING", "nothing of it was applied");
    // The command itself, driven again, is executed.
    let dead = world.dead("turn_epoch").await;
    let path = format!("/v1/dead_letters/{}/redrive", dead["id"].as_str().unwrap());
    assert_eq!(world.api.post(&path, json!({})).await.is(200)["published"], true);
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
