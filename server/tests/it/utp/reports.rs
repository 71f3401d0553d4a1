//! Reports that cannot be taken: each ends as it must, none is lost, and nothing is stuck.

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::support::nats::{Given, Hand, Nats, report, result_card, tool};
use crate::support::{Api, Server, soon};

struct World {
    nats: Nats,
    server: Server,
    api: Api,
    hand: Hand,
}

impl World {
    async fn new() -> Option<Self> {
        let nats = Nats::start().await?;
        let server = nats.server().await;
        let (api, hand) = (server.api(), nats.hand().await);
        api.post("/projects/default/tools", tool("hand.work", "hand", json!({}))).await.is(201);
        Some(Self { nats, server, api, hand })
    }

    /// A call that is out, and its command.
    async fn call(&self) -> (String, Given) {
        let id = self.api.invoke("hand.work", json!({ "x": 1 })).await;
        let command = self.hand.next("hand").await;
        command.ack().await;
        assert_eq!(command.payload["tool_call_id"], id.as_str());
        (id, command)
    }

    async fn put(&self, command: &Value, card_id: &str, status: &str) {
        let card = result_card(command, card_id, status, json!({ "n": card_id }));
        let put = self.hand.ask("sys.cards.put", json!({ "card": card })).await;
        assert_eq!(put["ok"], true, "{put}");
    }

    async fn report(&self, body: Value) -> Value {
        self.hand.ask("sys.l0.report", body).await
    }

    /// The newest dead letter.
    async fn dead(&self) -> Value {
        self.api.get("/v1/dead_letters?limit=1").await.is(200)["dead_letters"][0].clone()
    }

    /// It is refused with this code and kept for this reason, and the call goes on.
    async fn refused(&self, id: &str, body: Value, code: &str, reason: &str) {
        let answer = self.report(body.clone()).await;
        assert_eq!(answer["ok"], false, "{reason}: {answer}");
        assert_eq!(answer["error"]["code"], code, "{reason}: {answer}");
        assert!(answer["error"]["message"].is_string());
        let dead = self.dead().await;
        assert_eq!((&dead["reason"], &dead["kind"]), (&json!(reason), &json!("report")), "{dead}");
        assert_eq!(serde_json::from_str::<Value>(dead["payload"].as_str().unwrap()).unwrap(), body);
        assert_eq!(self.api.call(id).await["status"], "PENDING", "{reason}");
        // Over HTTP it is the same.
        let answer = self.api.post("/v1/tool_results", body).await;
        assert!((400..500).contains(&answer.status.as_u16()), "{}", answer.text);
        assert_eq!(self.dead().await["reason"], reason);
    }
}

#[tokio::test]
async fn what_names_the_wrong_call_is_refused_and_kept() {
    let Some(world) = World::new().await else { return };
    let (id, command) = world.call().await;
    let command = &command.payload;
    world.put(command, "r1", "success").await;
    let good = report(command, "r1", "success");
    let with = |name: &str, value: Value| {
        let mut body = good.clone();
        body[name] = value;
        body
    };
    world.refused(&id, with("turn_epoch", json!(2)), "conflict", "wrong_epoch").await;
    world.refused(&id, with("agent_turn_id", json!("other")), "conflict", "wrong_turn").await;
    world.refused(&id, with("agent_id", json!("eve")), "conflict", "wrong_agent").await;
    world.refused(&id, with("tool_call_id", json!("call_7")), "not_found", "orphan").await;
    let unknown = json!("tc_01ARZ3NDEKTSV4RRFFQ69G5FAV");
    world.refused(&id, with("tool_call_id", unknown), "not_found", "orphan").await;
    // Written down on the call as well, and never applied later.
    let history = world.api.get(&format!("/v1/tool_calls/{id}")).await.is(200);
    assert_eq!(history["status"], "PENDING");
    // A numeric text is as good as a number, and what nobody knows is ignored.
    let mut good = with("turn_epoch", json!("1"));
    good["extra"] = json!({ "anything": 1 });
    assert_eq!(world.report(good).await["ok"], true);
    assert_eq!(world.api.finished(&id).await["result"], json!({ "n": "r1" }));
    let events = world.api.history(&id).await;
    assert!(events.iter().filter(|kind| *kind == "tool.call.late").count() >= 3, "{events:?}");
}

#[tokio::test]
async fn what_is_malformed_is_refused_and_kept() {
    let Some(world) = World::new().await else { return };
    let (id, command) = world.call().await;
    let (other, another) = world.call().await;
    let command = &command.payload;
    world.put(command, "r1", "success").await;
    world.put(&another.payload, "r2", "success").await;
    let good = report(command, "r1", "success");
    let changed = |name: &str, value: Value| {
        let mut body = good.clone();
        body[name] = value;
        body
    };
    for name in ["tool_call_id", "agent_turn_id", "agent_id", "turn_epoch"] {
        world.refused(&id, changed(name, json!("  ")), "bad_request", "malformed").await;
    }
    world.refused(&id, changed("turn_epoch", json!("x")), "bad_request", "malformed").await;
    for status in [json!("done"), json!(""), Value::Null] {
        world.refused(&id, changed("status", status), "bad_request", "malformed").await;
    }
    let after = "after_execution";
    world.refused(&id, changed(after, json!("explode")), "bad_request", "malformed").await;
    let mismatch = "after_execution_mismatch";
    world.refused(&id, changed(after, json!("terminate")), "bad_request", mismatch).await;
    let card = "tool_result_card_id";
    world.refused(&id, changed(card, Value::Null), "bad_request", "malformed").await;
    world.refused(&id, changed(card, json!("nothing")), "not_found", "no_card").await;
    // The card of another call, a card that is no result, and one that says something else.
    world.refused(&id, changed(card, json!("r2")), "bad_request", "wrong_card").await;
    let asked = command["tool_call_card_id"].clone();
    world.refused(&id, changed(card, asked), "bad_request", "wrong_card").await;
    world.refused(&id, changed("status", json!("failed")), "bad_request", "wrong_card").await;
    for bytes in [&b"{\"tool_call_id\": "[..], b"[1]", b"\xff\xfe", b""] {
        let answer = world.hand.ask_raw("default", "sys.l0.report", bytes.to_vec(), &[]).await;
        assert_eq!(
            (&answer["ok"], &answer["error"]["code"]),
            (&json!(false), &json!("bad_request"))
        );
        assert_eq!(world.dead().await["reason"], "malformed");
    }
    for (depth, word) in [("1", "CG-Recursion-Depth"), ("x", "whole number"), ("20", "exceeded")] {
        let headers = [("CG-Recursion-Depth", depth)];
        let body = good.clone();
        let answer = world.hand.ask_in("default", "sys.l0.report", body, &headers).await;
        assert!(answer["error"]["message"].as_str().unwrap().contains(word), "{answer}");
    }
    assert_eq!(world.report(good).await["ok"], true, "after all that, the right one is taken");
    assert_eq!(world.api.finished(&id).await["status"], "SUCCEEDED");
    assert_eq!(world.api.call(&other).await["status"], "PENDING");
}

#[tokio::test]
async fn an_inline_result_fails_the_call_and_says_so() {
    let Some(world) = World::new().await else { return };
    let (id, command) = world.call().await;
    let mut body = report(&command.payload, "r1", "success");
    body["result"] = json!({ "answer": 42 });
    let answer = world.report(body).await;
    assert_eq!(answer["ok"], false);
    let call = world.api.finished(&id).await;
    assert_eq!(call["status"], "FAILED");
    let message = call["error"]["message"].as_str().unwrap();
    assert!(message.contains("payload.result is forbidden"), "{message}");
}

#[tokio::test]
async fn the_same_report_again_is_the_same_and_a_late_one_is_written_down() {
    let Some(world) = World::new().await else { return };
    let (id, command) = world.call().await;
    let command = &command.payload;
    world.put(command, "r1", "success").await;
    let first = world.report(report(command, "r1", "success")).await;
    assert_eq!((&first["ok"], &first["duplicate"]), (&json!(true), &json!(false)));
    for _ in 0..3 {
        let again = world.report(report(command, "r1", "success")).await;
        assert_eq!((&again["ok"], &again["duplicate"]), (&json!(true), &json!(true)), "{again}");
    }
    let over_http = world.api.post("/v1/tool_results", report(command, "r1", "success")).await;
    assert_eq!(over_http.is(200)["duplicate"], true);
    // There is one result of a call: another card is refused, the same one again is not.
    let card = result_card(command, "r1", "success", json!({ "n": "r1" }));
    assert_eq!(world.hand.ask("sys.cards.put", json!({ "card": card })).await["ok"], true);
    let second = result_card(command, "r9", "success", json!(9));
    let put = world.hand.ask("sys.cards.put", json!({ "card": second })).await;
    assert_eq!(put["error"]["code"], "conflict", "{put}");
    assert_eq!(put["error"]["detail"]["card_id"], "r1");
    let other = result_card(command, "r1", "success", json!("other"));
    let put = world.hand.ask("sys.cards.put", json!({ "card": other })).await;
    assert_eq!(put["error"]["code"], "conflict", "{put}");
    world.api.post("/v1/cards", second).await.refused(409, "CONFLICT");
    assert_eq!(world.api.call(&id).await["result"], json!({ "n": "r1" }));
    // Late: the call has ended otherwise. It is acknowledged, written down, and changes nothing.
    let (id, command) = world.call().await;
    let command = &command.payload;
    world.api.post(&format!("/v1/tool_calls/{id}/cancel"), json!({})).await.is(200);
    world.put(command, "late", "success").await;
    let late = world.report(report(command, "late", "success")).await;
    assert_eq!((&late["ok"], &late["late"]), (&json!(true), &json!(true)), "{late}");
    assert_eq!(world.api.call(&id).await["status"], "CANCELED");
    assert!(world.api.history(&id).await.contains(&"tool.call.late".to_owned()));
    assert_eq!(world.api.get("/v1/dead_letters").await.is(200)["dead_letters"], json!([]));
}

/// A report with its card.
fn whole(command: &Value, card_id: &str, status: &str, card: Value) -> Value {
    let mut body = report(command, card_id, status);
    body["card"] = card;
    body
}

#[tokio::test]
async fn a_card_that_came_with_a_refused_report_is_nobodys_result() {
    let Some(world) = World::new().await else { return };
    let (id, command) = world.call().await;
    let (other, another) = world.call().await;
    let (command, another) = (&command.payload, &another.payload);
    // The card is of another call that is open.
    let strange = result_card(another, "x1", "success", json!({ "of": "the first" }));
    world.refused(&id, whole(command, "x1", "success", strange), "bad_request", "wrong_card").await;
    world.api.get("/v1/cards/x1").await.refused(404, "NOT_FOUND");
    assert_eq!(world.api.call(&other).await["status"], "PENDING");
    let own = result_card(another, "x2", "success", json!({ "of": "the second" }));
    let taken = world.report(whole(another, "x2", "success", own)).await;
    assert_eq!(taken["ok"], true, "{taken}");
    assert_eq!(world.api.finished(&other).await["result"], json!({ "of": "the second" }));
    // The card says something else than the report; corrected, under the same id, it is taken.
    let failed = result_card(command, "x3", "failed", json!(1));
    world.refused(&id, whole(command, "x3", "success", failed), "bad_request", "wrong_card").await;
    let right = result_card(command, "x3", "success", json!({ "of": "the first" }));
    let taken = world.report(whole(command, "x3", "success", right)).await;
    assert_eq!(taken["ok"], true, "{taken}");
    assert_eq!(world.api.finished(&id).await["result"], json!({ "of": "the first" }));
}

#[tokio::test]
async fn a_report_does_not_take_another_result_for_its_own() {
    let Some(world) = World::new().await else { return };
    let (id, command) = world.call().await;
    let command = &command.payload;
    world.put(command, "r1", "success").await;
    let other = result_card(command, "r2", "success", json!({ "n": "r2" }));
    world.refused(&id, whole(command, "r2", "success", other), "conflict", "wrong_card").await;
    // Under another id, it says what is there.
    let same = result_card(command, "r3", "success", json!({ "n": "r1" }));
    assert_eq!(world.report(whole(command, "r3", "success", same)).await["ok"], true);
    assert_eq!(world.api.finished(&id).await["result"], json!({ "n": "r1" }));
    // Once the call has ended, its first result stands, and the rest is late.
    let other = result_card(command, "r4", "success", json!({ "n": "r4" }));
    let late = world.report(whole(command, "r4", "success", other)).await;
    assert_eq!(late["ok"], true, "{late}");
    assert_eq!(world.api.call(&id).await["result"], json!({ "n": "r1" }));
}

#[tokio::test]
async fn another_project_can_neither_report_nor_read() {
    let Some(world) = World::new().await else { return };
    let (id, command) = world.call().await;
    let command = &command.payload;
    world.put(command, "r1", "success").await;
    let body = report(command, "r1", "success");
    let answer = world.hand.ask_in("other", "sys.l0.report", body, &[]).await;
    assert_eq!((&answer["ok"], &answer["error"]["code"]), (&json!(false), &json!("not_found")));
    for card in [json!("r1"), command["tool_call_card_id"].clone()] {
        let ids = json!({ "card_ids": [card] });
        let answer = world.hand.ask_in("other", "sys.cards.get", ids, &[]).await;
        assert_eq!(answer["error"]["code"], "not_found", "{answer}");
    }
    assert_eq!(world.api.call(&id).await["status"], "PENDING");
    let other = world.api.clone().project("other");
    let letters = other.get("/v1/dead_letters").await.is(200);
    assert_eq!(letters["dead_letters"][0]["reason"], "orphan");
    assert_eq!(world.api.get("/v1/dead_letters").await.is(200)["dead_letters"], json!([]));
}

/// Sends a whole request before it reads a byte of the answer, as many clients do.
async fn sent_whole(server: &Server, path: &str, body: &str) -> String {
    let mut stream = tokio::net::TcpStream::connect(&server.api().address).await.unwrap();
    let head = format!(
        "POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\
         Content-Type: application/json\r\nConnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    stream.write_all(body.as_bytes()).await.expect("it is heard to the end");
    let mut answer = String::new();
    soon("the answer", stream.read_to_string(&mut answer)).await.unwrap();
    answer
}

#[tokio::test]
async fn ten_megabytes_are_a_clear_fault() {
    let Some(world) = World::new().await else { return };
    let (id, command) = world.call().await;
    let large = "x".repeat(10 << 20);
    let card = result_card(&command.payload, "big", "success", json!({ "text": large }));
    let put = world.hand.ask("sys.cards.put", json!({ "card": card })).await;
    assert_eq!(put["ok"], false);
    assert!(put["error"]["message"].as_str().unwrap().contains("limit"), "{put}");
    let mut body = report(&command.payload, "big", "success");
    body["card"] = card.clone();
    let answer = world.report(body.clone()).await;
    assert_eq!((&answer["ok"], &answer["error"]["code"]), (&json!(false), &json!("bad_request")));
    let dead = world.dead().await;
    assert_eq!(
        (&dead["reason"], &dead["cut"], &dead["subject"]),
        (&json!("too_large"), &json!(true), &json!("cg.v1r3.default.public.rpc.sys.l0.report"))
    );
    // Over HTTP it is the same, also for whoever sends all of it before it listens.
    let said = sent_whole(&world.server, "/v1/tool_results", &body.to_string()).await;
    assert!(said.starts_with("HTTP/1.1 413") && said.contains("PAYLOAD_TOO_LARGE"), "{said}");
    let dead = world.dead().await;
    assert_eq!(
        (&dead["reason"], &dead["cut"], &dead["subject"]),
        (&json!("too_large"), &json!(true), &json!("/v1/tool_results"))
    );
    assert_eq!(dead["payload"].as_str().unwrap().len(), 262_144, "the beginning");
    let said = sent_whole(&world.server, "/v1/cards", &card.to_string()).await;
    assert!(said.starts_with("HTTP/1.1 413"), "{said}");
    let path = format!("/v1/dead_letters/{}/redrive", dead["id"].as_str().unwrap());
    world.api.post(&path, json!({})).await.refused(409, "CONFLICT");
    world.api.post("/v1/cards", card).await.refused(413, "PAYLOAD_TOO_LARGE");
    assert_eq!(world.api.call(&id).await["status"], "PENDING");
    // A tool service in Rust answers such a call with a failure.
    drop(id);
    let target = tool("big.work", "big", json!({}));
    world.api.post("/projects/default/tools", target).await.is(201);
    let _host = world
        .nats
        .host("big", |host| {
            host.with_tool("big.work", |_| async { Ok(json!({ "text": "x".repeat(10 << 20) })) })
        })
        .await;
    let id = world.api.invoke("big.work", json!({})).await;
    let call = world.api.finished(&id).await;
    assert_eq!(call["status"], "FAILED", "{call}");
    assert!(call["error"]["message"].as_str().unwrap().contains("too large"), "{call}");
}

#[tokio::test]
async fn a_dead_letter_can_be_driven_again() {
    let Some(world) = World::new().await else { return };
    let (id, command) = world.call().await;
    let command = &command.payload;
    // Reported before its card was there.
    let early = report(command, "r1", "success");
    world.refused(&id, early, "not_found", "no_card").await;
    let dead = world.dead().await;
    let path = format!("/v1/dead_letters/{}/redrive", dead["id"].as_str().unwrap());
    world.api.post(&path, json!({})).await.refused(404, "NOT_FOUND");
    assert!(world.dead().await["last_try"].as_str().unwrap().contains("there is no card"));
    world.put(command, "r1", "success").await;
    let taken = world.api.post(&path, json!({})).await.is(200);
    assert_eq!((&taken["ok"], &taken["duplicate"]), (&json!(true), &json!(false)), "{taken}");
    assert_eq!(world.api.finished(&id).await["status"], "SUCCEEDED");
    let dead = world.dead().await;
    assert_eq!(dead["last_try"], "taken");
    assert!(dead["redriven_at"].is_string());
    world.api.post("/v1/dead_letters/dl_x/redrive", json!({})).await.refused(404, "NOT_FOUND");
    // They survive a restart of the server.
    let server = world.server.restart().await;
    let letters = server.api().get("/v1/dead_letters").await.is(200);
    assert_eq!(letters["dead_letters"][0]["id"], dead["id"]);
}

#[tokio::test]
async fn cards_are_checked_before_they_are_kept() {
    let server = Server::start().await;
    let api = server.api();
    let good = json!({
        "type": "tool.call",
        "author_id": "ada",
        "content": {
            "__type__": "ToolCallContent", "tool_name": "a.b", "arguments": {}, "status": "called",
        },
        "metadata": { "note": "mine" },
    });
    let made = api.post("/v1/cards", good.clone()).await.is(201);
    let id = made["card_id"].as_str().unwrap();
    assert_eq!(api.get(&format!("/v1/cards/{id}")).await.is(200), made);
    let mut same = good.clone();
    same["card_id"] = json!(id);
    api.post("/v1/cards", same.clone()).await.is(200);
    same["metadata"] = json!({ "note": "changed" });
    api.post("/v1/cards", same).await.refused(409, "CONFLICT");
    let result = json!({
        "type": "tool.result",
        "author_id": "t",
        "content": {
            "__type__": "ToolResultContent", "status": "success", "after_execution": "suspend",
            "result": 1, "error": null,
        },
        "metadata": { "agent_turn_id": "t1", "tool_call_id": "c1" },
    });
    api.post("/v1/cards", result.clone()).await.is(201);
    let thought = json!({
        "type": "agent.thought", "author_id": "ada",
        "content": { "__type__": "TextContent", "text": "hm" },
    });
    api.post("/v1/cards", thought.clone()).await.is(201);
    let pointer = |base: &Value, path: &str, value: Value| {
        let mut card = base.clone();
        let (parent, name) = path.rsplit_once('/').unwrap();
        card.pointer_mut(parent).unwrap()[name] = value;
        card
    };
    let wrong = [
        (pointer(&good, "/type", json!("tool.nothing")), "type"),
        (pointer(&good, "/author_id", json!("")), "author_id"),
        (pointer(&good, "/surprise", json!(1)), "surprise"),
        (pointer(&good, "/project_id", json!("other")), "project_id"),
        (pointer(&good, "/card_id", json!("a b")), "card_id"),
        (pointer(&good, "/content", json!("text")), "content"),
        (pointer(&good, "/content/__type__", json!("Nothing")), "__type__"),
        (pointer(&good, "/content/__type__", json!("TextContent")), "ToolCallContent"),
        (pointer(&good, "/content/arguments", json!([])), "arguments"),
        (pointer(&good, "/content/more", json!(1)), "more"),
        (pointer(&good, "/content/status", json!(7)), "status"),
        (pointer(&good, "/content/target_subject", json!(7)), "target_subject"),
        (pointer(&good, "/ttl_seconds", json!(-1)), "ttl_seconds"),
        (pointer(&good, "/ttl_seconds", json!("soon")), "ttl_seconds"),
        (pointer(&thought, "/content/text", json!(7)), "text"),
        (pointer(&result, "/content/status", json!("done")), "status"),
        (pointer(&result, "/content/status", json!("failed")), "error"),
        (pointer(&result, "/content/error", json!({ "code": "x", "message": "y" })), "error"),
        (pointer(&result, "/content/after_execution", json!("explode")), "after_execution"),
        (pointer(&result, "/metadata/agent_turn_id", json!("")), "agent_turn_id"),
        (pointer(&result, "/tool_call_id", json!("c2")), "tool_call_id"),
        (json!([]), "object"),
    ];
    for (card, word) in wrong {
        let error = api.post("/v1/cards", card).await.refused(400, "BAD_REQUEST");
        assert!(error["message"].as_str().unwrap().contains(word), "{word}: {error}");
    }
}
