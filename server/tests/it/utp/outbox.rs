//! The outbox: no content of a message can block the messages behind it.

use serde_json::{Value, json};
use toolcrib::domain::utp::OutboxMessage;
use toolcrib::{Caller, Engine};

use crate::support::nats::{Nats, NatsPeer, tool};
use crate::support::{Api, Server, until};

struct Fixture {
    nats: Nats,
    server: Server,
    api: Api,
    peer: NatsPeer,
}

impl Fixture {
    async fn new() -> Option<Self> {
        Self::with_nats(Nats::start().await?).await
    }

    async fn with_nats(nats: Nats) -> Option<Self> {
        let server = nats.server().await;
        let (api, peer) = (server.api(), nats.peer().await);
        api.post("/projects/default/tools", tool("hand.work", "hand", json!({}))).await.is(201);
        api.put("/v1/agents/ada", json!({ "worker_target": "w1" })).await.is(200);
        Some(Self { nats, server, api, peer })
    }

    async fn lease(&self, body: Value) -> Value {
        self.api.post("/v1/agents/ada/turns", body).await.is(201)
    }

    /// Asserts that the event of a new turn is published.
    async fn assert_events_are_published(&self, name: &str) {
        self.lease(json!({ "agent_turn_id": name })).await;
        let subject = "cg.v1r3.default.public.evt.agent.ada.state";
        loop {
            let event = self.peer.next_in("cg_evt_v1r3", subject, "listener").await;
            event.ack().await;
            if event.payload["agent_turn_id"] == name {
                return;
            }
        }
    }

    async fn wait_for_dead_letter(&self, reason: &str) -> Value {
        until(&format!("a dead letter: {reason}"), || async {
            let dead_letters = self.api.get("/v1/dead_letters").await.is(200);
            let dead_letters = dead_letters["dead_letters"].as_array().unwrap().clone();
            dead_letters.into_iter().find(|dead_letter| dead_letter["reason"] == reason)
        })
        .await
    }
}

#[tokio::test]
async fn invalid_characters_in_header_values_are_rejected() {
    let Some(fixture) = Fixture::new().await else { return };
    let long = "x".repeat(513);
    for (field, text) in [
        ("tracestate", "a=1\r\nb"),
        ("tracestate", "a=\u{fc}"),
        ("tracestate", long.as_str()),
        ("parent_step_id", "a\r\nb"),
        ("parent_step_id", ""),
        ("context_box_id", "a b"),
        ("context_box_id", long.as_str()),
    ] {
        let mut body = json!({});
        body[field] = json!(text);
        let refused = fixture.api.post("/v1/agents/ada/turns", body.clone()).await;
        let error = refused.refused(422, "VALIDATION_ERROR");
        assert!(error["message"].as_str().unwrap().contains(field), "{error}");
        let refused = fixture.peer.request("agent.ada.lease", body).await;
        assert_eq!(refused["error"]["code"], "bad_request", "{refused}");
    }
    let turn = fixture.lease(json!({ "tracestate": "a=1,b=2", "parent_step_id": "s0" })).await;
    let path = format!("/v1/agents/ada/turns/{}/dispatch", turn["agent_turn_id"].as_str().unwrap());
    for (step_id, call_id) in [("a\r\nb", "c"), ("a b", "c"), ("s", "a\r\nb"), ("s", "a.b")] {
        let body = json!({
            "turn_epoch": 1, "step_id": step_id,
            "calls": [{ "tool_call_id": call_id, "tool_name": "hand.work", "arguments": {} }],
        });
        fixture.api.post(&path, body).await.refused(422, "VALIDATION_ERROR");
    }
    fixture.assert_events_are_published("t1").await;
}

#[tokio::test]
async fn the_reason_of_an_end_is_truncated() {
    let Some(nats) = Nats::start_with(4_096).await else { return };
    let Some(fixture) = Fixture::with_nats(nats).await else { return };
    for (turn, action) in [("t1", "stop"), ("t2", "finish")] {
        fixture.lease(json!({ "agent_turn_id": turn })).await;
        let body = json!({ "turn_epoch": 1, "reason": "x".repeat(100_000) });
        let path = format!("/v1/agents/ada/turns/{turn}/{action}");
        let ended = fixture.api.post(&path, body).await.is(200);
        assert_eq!(ended["reason"].as_str().unwrap().len(), 500);
        let subject = "cg.v1r3.default.public.evt.agent.ada.task";
        let event = fixture.peer.next_in("cg_evt_v1r3", subject, "tasks").await;
        event.ack().await;
        assert_eq!(event.payload["agent_turn_id"], turn);
    }
}

#[tokio::test]
async fn invalid_headers_of_a_redriven_command_are_dropped() {
    let Some(fixture) = Fixture::new().await else { return };
    let subject = "cg.v1r3.default.public.cmd.tool.hand.run";
    let headers = json!({
        "tracestate": "a\r\nb", "CG-Odd\r\n": "x", "Nats-Expected-Stream": "another",
        "CG-Sender": "somebody",
    });
    let message = json!({
        "reason": "malformed", "message": "odd", "subject": subject, "headers": headers,
        "payload": "{\"again\": 1}",
    });
    let stored = fixture.peer.request("sys.l0.dead_letter", message).await;
    let path = format!("/v1/dead_letters/{}/redrive", stored["dead_letter_id"].as_str().unwrap());
    fixture.api.post(&path, json!({})).await.is(200);
    let again = fixture.peer.next("hand").await;
    assert_eq!(again.payload, json!({ "again": 1 }));
    assert_eq!(again.header("CG-Sender"), "somebody");
    assert_eq!(again.header("tracestate"), "", "omitted");
    fixture.assert_events_are_published("t1").await;
    let server = fixture.server.restart().await;
    assert_eq!(server.api().get("/v1/dead_letters").await.status, 200);
}

#[tokio::test]
async fn a_message_over_max_payload_becomes_a_dead_letter() {
    let Some(nats) = Nats::start_with(4_096).await else { return };
    let Some(fixture) = Fixture::with_nats(nats).await else { return };
    fixture.lease(json!({ "agent_turn_id": "large" })).await;
    // The state event lists every open call.
    let call = |n: usize| {
        let id = format!("{n}-{}", "x".repeat(100));
        json!({ "tool_call_id": id, "tool_name": "hand.work", "arguments": {} })
    };
    let body = json!({ "turn_epoch": 1, "calls": (0..50).map(call).collect::<Vec<_>>() });
    fixture.api.post("/v1/agents/ada/turns/large/dispatch", body).await.is(200);
    let dead = fixture.wait_for_dead_letter("too_large").await;
    assert_eq!(dead["kind"], "letter", "{dead}");
    assert_eq!(dead["subject"], "cg.v1r3.default.public.evt.agent.ada.state");
    assert!(dead["message"].as_str().unwrap().contains("max_payload"), "{dead}");
    fixture.assert_events_are_published("t1").await;
    // With a higher limit the message can be published.
    let Fixture { mut nats, server, api, .. } = fixture;
    nats.down();
    nats.max_payload(1 << 20);
    nats.up().await;
    let peer = nats.peer().await;
    let path = format!("/v1/dead_letters/{}/redrive", dead["id"].as_str().unwrap());
    api.post(&path, json!({})).await.is(200);
    let subject = "cg.v1r3.default.public.evt.agent.ada.state";
    loop {
        let event = peer.next_in("cg_evt_v1r3", subject, "listener").await;
        event.ack().await;
        if event.payload["metadata"]["waiting_tool_count"] == 50 {
            break;
        }
    }
    drop(server);
}

/// Creates a stream with the name of the event stream and other subjects.
async fn occupy_event_stream(peer: &NatsPeer) {
    let jetstream = async_nats::jetstream::new(peer.client.clone());
    let stream = async_nats::jetstream::stream::Config {
        name: "cg_evt_v1r3".to_owned(),
        subjects: vec!["other.>".to_owned()],
        ..Default::default()
    };
    jetstream.create_stream(stream).await.unwrap();
}

#[tokio::test]
async fn undeliverable_outbox_messages_do_not_block_others() {
    let Some(nats) = Nats::start().await else { return };
    let peer = nats.peer().await;
    occupy_event_stream(&peer).await;
    let engine = Engine::builder().publishes_outbox(true).build_idle().await.unwrap();
    let caller = Caller::local("p");
    let enqueue = async |id: String, to: &str| {
        let message = OutboxMessage {
            id,
            subject: format!("p.public.{to}"),
            headers: Vec::new(),
            payload: json!({}),
            expires_ms: u64::MAX,
        };
        engine.utp().outbox().enqueue(&caller, message).await.unwrap();
    };
    // More than one read of the outbox returns.
    for n in 0..600 {
        enqueue(format!("event-{n}"), "evt.agent.ada.state").await;
    }
    enqueue("wakeup".to_owned(), "cmd.agent.w1.wakeup").await;
    let _open = toolcrib_transport::nats::start(engine.clone(), nats.connect("v1r3").await);
    peer.next_on("cg.v1r3.p.public.cmd.agent.w1.wakeup", "worker").await;
    until("the outbox to be empty", || async {
        engine.utp().outbox().messages(0, 1).await.unwrap().is_empty().then_some(())
    })
    .await;
    let dead = engine.utp().dead_letters().list(&caller, None, 1_000).await.unwrap();
    assert_eq!(dead.len(), 600);
}

#[tokio::test]
async fn a_message_without_a_stream_becomes_a_dead_letter() {
    let Some(nats) = Nats::start().await else { return };
    occupy_event_stream(&nats.peer().await).await;
    let Some(fixture) = Fixture::with_nats(nats).await else { return };
    let turn = fixture.lease(json!({ "agent_turn_id": "t1" })).await;
    fixture.api.post("/v1/agents/ada/turns/t1/stop", json!({})).await.is(200);
    let subject = "cg.v1r3.default.public.cmd.agent.w1.wakeup";
    let woken = fixture.peer.next_on(subject, "worker").await;
    assert_eq!(woken.payload["metadata"]["agent_turn_id"], turn["agent_turn_id"]);
    let dead = fixture.wait_for_dead_letter("no_stream").await;
    assert_eq!((&dead["kind"], &dead["cut"]), (&json!("letter"), &json!(false)), "{dead}");
}

#[tokio::test]
async fn a_dead_letter_must_name_a_tool_subject_of_its_project() {
    let Some(fixture) = Fixture::new().await else { return };
    fixture.api.post("/projects", json!({ "project_id": "shop" })).await.is(201);
    let message_for = |subject: &str| {
        json!({
            "reason": "malformed", "message": "odd", "subject": subject, "headers": {},
            "payload": "{}",
        })
    };
    for subject in [
        "cg.v1r3.default.public.cmd.tool.hand.run",
        "cg.v1r3.shop.public.cmd.agent.w1.wakeup",
        "cg.v1r3.shop.public.evt.agent.ada.state",
        "cg.v1r3.shop.*.cmd.tool.hand.run",
        "shop.public.cmd.tool.hand.run",
        "",
    ] {
        let refused =
            fixture.peer.request_in("shop", "sys.l0.dead_letter", message_for(subject), &[]).await;
        assert_eq!(refused["error"]["code"], "bad_request", "{subject}: {refused}");
    }
    let valid = message_for("cg.v1r3.shop.public.cmd.tool.hand.run");
    let stored = fixture.peer.request_in("shop", "sys.l0.dead_letter", valid, &[]).await;
    let path = format!("/v1/dead_letters/{}/redrive", stored["dead_letter_id"].as_str().unwrap());
    fixture.api.clone().project("shop").post(&path, json!({})).await.is(200);
    let again = fixture.peer.next("hand").await;
    assert_eq!(again.message.subject.as_str(), "cg.v1r3.shop.public.cmd.tool.hand.run");
}

#[tokio::test]
async fn the_size_of_a_dead_letter_is_limited() {
    let Some(fixture) = Fixture::new().await else { return };
    let long = "x".repeat(100_000);
    let subject = "cg.v1r3.default.public.cmd.tool.hand.run";
    let message = json!({
        "reason": format!("mine-{long}"), "message": long, "subject": subject,
        "headers": { "a": "1", "b": long }, "payload": "{}",
    });
    let stored = fixture.peer.request("sys.l0.dead_letter", message.clone()).await;
    assert_eq!(stored["ok"], true, "{stored}");
    let dead = fixture.api.get("/v1/dead_letters").await.is(200)["dead_letters"][0].clone();
    assert!(dead.to_string().len() < 10_000, "{} bytes", dead.to_string().len());
    assert_eq!((&dead["cut"], &dead["headers"]), (&json!(true), &json!({ "a": "1" })));
    // A reason from outside is not a label of the metric.
    let metrics = fixture.api.get("/metrics").await.text;
    let counted = metrics.lines().filter(|line| line.starts_with("toolcrib_dead_letters_total"));
    assert!(counted.clone().any(|line| line.contains("reason=\"other\"")), "{metrics}");
    assert!(!metrics.contains("mine-"), "{metrics}");
    // An unknown project stores nothing.
    let mut other = message;
    other["subject"] = json!("cg.v1r3.nobody.public.cmd.tool.hand.run");
    let refused = fixture.peer.request_in("nobody", "sys.l0.dead_letter", other, &[]).await;
    assert_eq!(refused["error"]["code"], "not_found", "{refused}");
    let card = json!({
        "type": "agent.thought", "author_id": "x",
        "content": { "__type__": "TextContent", "text": "hm" },
    });
    let put = |project: &'static str| {
        fixture.peer.request_in(project, "sys.cards.put", json!({ "card": card }), &[])
    };
    assert_eq!(put("nobody").await["error"]["code"], "not_found");
    assert_eq!(put("default").await["ok"], true);
}

#[tokio::test]
async fn a_card_request_over_max_payload_is_rejected() {
    let Some(nats) = Nats::start_with(65_536).await else { return };
    let Some(fixture) = Fixture::with_nats(nats).await else { return };
    let mut ids = Vec::new();
    for n in 0..4 {
        let card = json!({
            "card_id": format!("k{n}"), "type": "agent.thought", "author_id": "x",
            "content": { "__type__": "TextContent", "text": "x".repeat(30_000) },
        });
        fixture.api.post("/v1/cards", card).await.is(201);
        ids.push(format!("k{n}"));
    }
    let two = fixture.peer.request("sys.cards.get", json!({ "card_ids": ids[..2] })).await;
    assert_eq!(two["cards"].as_array().unwrap().len(), 2, "{two}");
    // The limit applies before the missing last card is found.
    ids.push("nothing".to_owned());
    let refused = fixture.peer.request("sys.cards.get", json!({ "card_ids": ids })).await;
    assert!(refused["error"]["message"].as_str().unwrap().contains("limit"), "{refused}");
}
