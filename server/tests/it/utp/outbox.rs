//! What is published of turns: nothing that somebody puts into one can keep it from the others.

use serde_json::{Value, json};
use toolcrib::domain::utp::OutboxMessage;
use toolcrib::{Caller, Engine};

use crate::support::nats::{Hand, Nats, tool};
use crate::support::{Api, Server, until};

struct World {
    nats: Nats,
    server: Server,
    api: Api,
    hand: Hand,
}

impl World {
    async fn new() -> Option<Self> {
        Self::over(Nats::start().await?).await
    }

    async fn over(nats: Nats) -> Option<Self> {
        let server = nats.server().await;
        let (api, hand) = (server.api(), nats.hand().await);
        api.post("/projects/default/tools", tool("hand.work", "hand", json!({}))).await.is(201);
        api.put("/v1/agents/ada", json!({ "worker_target": "w1" })).await.is(200);
        Some(Self { nats, server, api, hand })
    }

    async fn lease(&self, body: Value) -> Value {
        self.api.post("/v1/agents/ada/turns", body).await.is(201)
    }

    /// An event of a new turn is published.
    async fn goes_on(&self, name: &str) {
        self.lease(json!({ "agent_turn_id": name })).await;
        let subject = "cg.v1r3.default.public.evt.agent.ada.state";
        loop {
            let event = self.hand.next_in("cg_evt_v1r3", subject, "listener").await;
            event.ack().await;
            if event.payload["agent_turn_id"] == name {
                return;
            }
        }
    }

    async fn dead(&self, reason: &str) -> Value {
        until(&format!("a dead letter: {reason}"), || async {
            let letters = self.api.get("/v1/dead_letters").await.is(200);
            let letters = letters["dead_letters"].as_array().unwrap().clone();
            letters.into_iter().find(|letter| letter["reason"] == reason)
        })
        .await
    }
}

#[tokio::test]
async fn a_line_break_in_what_goes_into_headers_is_refused() {
    let Some(world) = World::new().await else { return };
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
        let refused = world.api.post("/v1/agents/ada/turns", body.clone()).await;
        let error = refused.refused(422, "VALIDATION_ERROR");
        assert!(error["message"].as_str().unwrap().contains(field), "{error}");
        let refused = world.hand.ask("agent.ada.lease", body).await;
        assert_eq!(refused["error"]["code"], "bad_request", "{refused}");
    }
    let turn = world.lease(json!({ "tracestate": "a=1,b=2", "parent_step_id": "s0" })).await;
    let path = format!("/v1/agents/ada/turns/{}/dispatch", turn["agent_turn_id"].as_str().unwrap());
    for (step_id, call_id) in [("a\r\nb", "c"), ("a b", "c"), ("s", "a\r\nb"), ("s", "a.b")] {
        let body = json!({
            "turn_epoch": 1, "step_id": step_id,
            "calls": [{ "tool_call_id": call_id, "tool_name": "hand.work", "arguments": {} }],
        });
        world.api.post(&path, body).await.refused(422, "VALIDATION_ERROR");
    }
    world.goes_on("t1").await;
}

#[tokio::test]
async fn the_reason_of_an_end_is_published_in_part() {
    let Some(nats) = Nats::start_with(4_096).await else { return };
    let Some(world) = World::over(nats).await else { return };
    for (turn, what) in [("t1", "stop"), ("t2", "finish")] {
        world.lease(json!({ "agent_turn_id": turn })).await;
        let body = json!({ "turn_epoch": 1, "reason": "x".repeat(100_000) });
        let path = format!("/v1/agents/ada/turns/{turn}/{what}");
        let ended = world.api.post(&path, body).await.is(200);
        assert_eq!(ended["reason"].as_str().unwrap().len(), 500);
        let subject = "cg.v1r3.default.public.evt.agent.ada.task";
        let event = world.hand.next_in("cg_evt_v1r3", subject, "tasks").await;
        event.ack().await;
        assert_eq!(event.payload["agent_turn_id"], turn);
    }
}

#[tokio::test]
async fn a_letter_whose_headers_cannot_be_written_goes_out_without_them() {
    let Some(world) = World::new().await else { return };
    let subject = "cg.v1r3.default.public.cmd.tool.hand.run";
    let headers = json!({
        "tracestate": "a\r\nb", "CG-Odd\r\n": "x", "Nats-Expected-Stream": "another",
        "CG-Sender": "somebody",
    });
    let letter = json!({
        "reason": "malformed", "message": "odd", "subject": subject, "headers": headers,
        "payload": "{\"again\": 1}",
    });
    let kept = world.hand.ask("sys.l0.dead_letter", letter).await;
    let path = format!("/v1/dead_letters/{}/redrive", kept["dead_letter_id"].as_str().unwrap());
    world.api.post(&path, json!({})).await.is(200);
    let again = world.hand.next("hand").await;
    assert_eq!(again.payload, json!({ "again": 1 }));
    assert_eq!(again.header("CG-Sender"), "somebody");
    assert_eq!(again.header("tracestate"), "", "left out");
    world.goes_on("t1").await;
    let server = world.server.restart().await;
    assert_eq!(server.api().get("/v1/dead_letters").await.status, 200);
}

#[tokio::test]
async fn what_is_too_large_for_the_broker_becomes_a_dead_letter() {
    let Some(nats) = Nats::start_with(4_096).await else { return };
    let Some(world) = World::over(nats).await else { return };
    world.lease(json!({ "agent_turn_id": "large" })).await;
    // The state names every call that is out.
    let call = |n: usize| {
        let id = format!("{n}-{}", "x".repeat(100));
        json!({ "tool_call_id": id, "tool_name": "hand.work", "arguments": {} })
    };
    let body = json!({ "turn_epoch": 1, "calls": (0..50).map(call).collect::<Vec<_>>() });
    world.api.post("/v1/agents/ada/turns/large/dispatch", body).await.is(200);
    let dead = world.dead("too_large").await;
    assert_eq!(dead["kind"], "letter", "{dead}");
    assert_eq!(dead["subject"], "cg.v1r3.default.public.evt.agent.ada.state");
    assert!(dead["message"].as_str().unwrap().contains("max_payload"), "{dead}");
    world.goes_on("t1").await;
    // With more room it can be published after all.
    let World { mut nats, server, api, .. } = world;
    nats.down();
    nats.max_payload(1 << 20);
    nats.up().await;
    let hand = nats.hand().await;
    let path = format!("/v1/dead_letters/{}/redrive", dead["id"].as_str().unwrap());
    api.post(&path, json!({})).await.is(200);
    let subject = "cg.v1r3.default.public.evt.agent.ada.state";
    loop {
        let event = hand.next_in("cg_evt_v1r3", subject, "listener").await;
        event.ack().await;
        if event.payload["metadata"]["waiting_tool_count"] == 50 {
            break;
        }
    }
    drop(server);
}

/// Somebody else made the stream of events, for something else.
async fn no_stream_for_events(hand: &Hand) {
    let jetstream = async_nats::jetstream::new(hand.client.clone());
    let stream = async_nats::jetstream::stream::Config {
        name: "cg_evt_v1r3".to_owned(),
        subjects: vec!["other.>".to_owned()],
        ..Default::default()
    };
    jetstream.create_stream(stream).await.unwrap();
}

#[tokio::test]
async fn what_waits_is_overtaken_and_does_not_stay_for_ever() {
    let Some(nats) = Nats::start().await else { return };
    let hand = nats.hand().await;
    no_stream_for_events(&hand).await;
    let engine = Engine::builder().publishes_outbox(true).build_idle().await.unwrap();
    let caller = Caller::local("p");
    let post = async |id: String, to: &str| {
        let letter = OutboxMessage {
            id,
            subject: format!("p.public.{to}"),
            headers: Vec::new(),
            payload: json!({}),
            expires_ms: u64::MAX,
        };
        engine.enqueue_outbox(&caller, letter).await.unwrap();
    };
    // More than are read at once.
    for n in 0..600 {
        post(format!("event-{n}"), "evt.agent.ada.state").await;
    }
    post("wakeup".to_owned(), "cmd.agent.w1.wakeup").await;
    let _open = toolcrib_transport::nats::start(engine.clone(), nats.link("v1r3").await);
    hand.next_on("cg.v1r3.p.public.cmd.agent.w1.wakeup", "worker").await;
    until("the outbox to be empty", || async {
        engine.outbox(0, 1).await.unwrap().is_empty().then_some(())
    })
    .await;
    let dead = engine.dead_letters(&caller, None, 1_000).await.unwrap();
    assert_eq!(dead.len(), 600);
}

#[tokio::test]
async fn what_no_stream_takes_becomes_a_dead_letter_and_is_overtaken() {
    let Some(nats) = Nats::start().await else { return };
    no_stream_for_events(&nats.hand().await).await;
    let Some(world) = World::over(nats).await else { return };
    let turn = world.lease(json!({ "agent_turn_id": "t1" })).await;
    world.api.post("/v1/agents/ada/turns/t1/stop", json!({})).await.is(200);
    let subject = "cg.v1r3.default.public.cmd.agent.w1.wakeup";
    let woken = world.hand.next_on(subject, "worker").await;
    assert_eq!(woken.payload["metadata"]["agent_turn_id"], turn["agent_turn_id"]);
    let dead = world.dead("no_stream").await;
    assert_eq!((&dead["kind"], &dead["cut"]), (&json!("letter"), &json!(false)), "{dead}");
}

#[tokio::test]
async fn a_dead_letter_is_of_its_own_project_and_goes_to_a_tool() {
    let Some(world) = World::new().await else { return };
    world.api.post("/projects", json!({ "project_id": "shop" })).await.is(201);
    let letter = |subject: &str| {
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
        let refused = world.hand.ask_in("shop", "sys.l0.dead_letter", letter(subject), &[]).await;
        assert_eq!(refused["error"]["code"], "bad_request", "{subject}: {refused}");
    }
    let own = letter("cg.v1r3.shop.public.cmd.tool.hand.run");
    let kept = world.hand.ask_in("shop", "sys.l0.dead_letter", own, &[]).await;
    let path = format!("/v1/dead_letters/{}/redrive", kept["dead_letter_id"].as_str().unwrap());
    world.api.clone().project("shop").post(&path, json!({})).await.is(200);
    let again = world.hand.next("hand").await;
    assert_eq!(again.message.subject.as_str(), "cg.v1r3.shop.public.cmd.tool.hand.run");
}

#[tokio::test]
async fn a_dead_letter_is_limited_in_every_part() {
    let Some(world) = World::new().await else { return };
    let long = "x".repeat(100_000);
    let subject = "cg.v1r3.default.public.cmd.tool.hand.run";
    let letter = json!({
        "reason": format!("mine-{long}"), "message": long, "subject": subject,
        "headers": { "a": "1", "b": long }, "payload": "{}",
    });
    let kept = world.hand.ask("sys.l0.dead_letter", letter.clone()).await;
    assert_eq!(kept["ok"], true, "{kept}");
    let dead = world.api.get("/v1/dead_letters").await.is(200)["dead_letters"][0].clone();
    assert!(dead.to_string().len() < 10_000, "{} bytes", dead.to_string().len());
    assert_eq!((&dead["cut"], &dead["headers"]), (&json!(true), &json!({ "a": "1" })));
    // What somebody calls it is not a name that things are counted under.
    let metrics = world.api.get("/metrics").await.text;
    let counted = metrics.lines().filter(|line| line.starts_with("toolcrib_dead_letters_total"));
    assert!(counted.clone().any(|line| line.contains("reason=\"other\"")), "{metrics}");
    assert!(!metrics.contains("mine-"), "{metrics}");
    // A project that nobody made keeps nothing.
    let mut other = letter;
    other["subject"] = json!("cg.v1r3.nobody.public.cmd.tool.hand.run");
    let refused = world.hand.ask_in("nobody", "sys.l0.dead_letter", other, &[]).await;
    assert_eq!(refused["error"]["code"], "not_found", "{refused}");
    let card = json!({
        "type": "agent.thought", "author_id": "x",
        "content": { "__type__": "TextContent", "text": "hm" },
    });
    let put = |project: &'static str| {
        world.hand.ask_in(project, "sys.cards.put", json!({ "card": card }), &[])
    };
    assert_eq!(put("nobody").await["error"]["code"], "not_found");
    assert_eq!(put("default").await["ok"], true);
}

#[tokio::test]
async fn no_more_cards_are_read_than_the_broker_carries() {
    let Some(nats) = Nats::start_with(65_536).await else { return };
    let Some(world) = World::over(nats).await else { return };
    let mut ids = Vec::new();
    for n in 0..4 {
        let card = json!({
            "card_id": format!("k{n}"), "type": "agent.thought", "author_id": "x",
            "content": { "__type__": "TextContent", "text": "x".repeat(30_000) },
        });
        world.api.post("/v1/cards", card).await.is(201);
        ids.push(format!("k{n}"));
    }
    let two = world.hand.ask("sys.cards.get", json!({ "card_ids": ids[..2] })).await;
    assert_eq!(two["cards"].as_array().unwrap().len(), 2, "{two}");
    // Nobody gets as far as to the last, which there is not.
    ids.push("nothing".to_owned());
    let refused = world.hand.ask("sys.cards.get", json!({ "card_ids": ids })).await;
    assert!(refused["error"]["message"].as_str().unwrap().contains("limit"), "{refused}");
}
