//! Invalid reports: each is rejected and stored as a dead letter, and none blocks later reports.

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::support::nats::{Nats, NatsPeer, ReceivedMessage, report, result_card, tool};
use crate::support::{Api, Server, soon};

struct Fixture {
    nats: Nats,
    server: Server,
    api: Api,
    peer: NatsPeer,
}

impl Fixture {
    async fn new() -> Option<Self> {
        let nats = Nats::start().await?;
        let server = nats.server().await;
        let (api, peer) = (server.api(), nats.peer().await);
        api.post("/projects/default/tools", tool("hand.work", "hand", json!({}))).await.is(201);
        Some(Self { nats, server, api, peer })
    }

    /// Makes a call and receives its command.
    async fn call(&self) -> (String, ReceivedMessage) {
        let id = self.api.invoke("hand.work", json!({ "x": 1 })).await;
        let command = self.peer.next("hand").await;
        command.ack().await;
        assert_eq!(command.payload["tool_call_id"], id.as_str());
        (id, command)
    }

    async fn put(&self, command: &Value, card_id: &str, status: &str) {
        let card = result_card(command, card_id, status, json!({ "n": card_id }));
        let put = self.peer.request("sys.cards.put", json!({ "card": card })).await;
        assert_eq!(put["ok"], true, "{put}");
    }

    async fn report(&self, body: Value) -> Value {
        self.peer.request("sys.l0.report", body).await
    }

    /// Returns the newest dead letter.
    async fn newest_dead_letter(&self) -> Value {
        self.api.get("/v1/dead_letters?limit=1").await.is(200)["dead_letters"][0].clone()
    }

    /// Asserts that a report is rejected with this code and stored with this reason, and that the
    /// call stays open.
    async fn assert_rejected(&self, id: &str, body: Value, code: &str, reason: &str) {
        let answer = self.report(body.clone()).await;
        assert_eq!(answer["ok"], false, "{reason}: {answer}");
        assert_eq!(answer["error"]["code"], code, "{reason}: {answer}");
        assert!(answer["error"]["message"].is_string());
        let dead = self.newest_dead_letter().await;
        assert_eq!((&dead["reason"], &dead["kind"]), (&json!(reason), &json!("report")), "{dead}");
        assert_eq!(serde_json::from_str::<Value>(dead["payload"].as_str().unwrap()).unwrap(), body);
        assert_eq!(self.api.call(id).await["status"], "PENDING", "{reason}");
        // The same report over HTTP is rejected, too.
        let answer = self.api.post("/v1/tool_results", body).await;
        assert!((400..500).contains(&answer.status.as_u16()), "{}", answer.text);
        assert_eq!(self.newest_dead_letter().await["reason"], reason);
    }
}

#[tokio::test]
async fn a_report_for_the_wrong_call_becomes_a_dead_letter() {
    let Some(fixture) = Fixture::new().await else { return };
    let (id, command) = fixture.call().await;
    let command = &command.payload;
    fixture.put(command, "r1", "success").await;
    let good = report(command, "r1", "success");
    let with = |name: &str, value: Value| {
        let mut body = good.clone();
        body[name] = value;
        body
    };
    fixture.assert_rejected(&id, with("turn_epoch", json!(2)), "conflict", "wrong_epoch").await;
    fixture
        .assert_rejected(&id, with("agent_turn_id", json!("other")), "conflict", "wrong_turn")
        .await;
    fixture.assert_rejected(&id, with("agent_id", json!("eve")), "conflict", "wrong_agent").await;
    fixture
        .assert_rejected(&id, with("tool_call_id", json!("call_7")), "not_found", "orphan")
        .await;
    let unknown = json!("tc_01ARZ3NDEKTSV4RRFFQ69G5FAV");
    fixture.assert_rejected(&id, with("tool_call_id", unknown), "not_found", "orphan").await;
    // The rejected reports do not change the call.
    let history = fixture.api.get(&format!("/v1/tool_calls/{id}")).await.is(200);
    assert_eq!(history["status"], "PENDING");
    // A numeric text is accepted as a number, and unknown fields are ignored.
    let mut good = with("turn_epoch", json!("1"));
    good["extra"] = json!({ "anything": 1 });
    assert_eq!(fixture.report(good).await["ok"], true);
    assert_eq!(fixture.api.finished(&id).await["result"], json!({ "n": "r1" }));
    let events = fixture.api.history(&id).await;
    assert!(events.iter().filter(|kind| *kind == "tool.call.late").count() >= 3, "{events:?}");
}

#[tokio::test]
async fn a_malformed_report_becomes_a_dead_letter() {
    let Some(fixture) = Fixture::new().await else { return };
    let (id, command) = fixture.call().await;
    let (other, another) = fixture.call().await;
    let command = &command.payload;
    fixture.put(command, "r1", "success").await;
    fixture.put(&another.payload, "r2", "success").await;
    let good = report(command, "r1", "success");
    let changed = |name: &str, value: Value| {
        let mut body = good.clone();
        body[name] = value;
        body
    };
    for name in ["tool_call_id", "agent_turn_id", "agent_id", "turn_epoch"] {
        fixture.assert_rejected(&id, changed(name, json!("  ")), "bad_request", "malformed").await;
    }
    fixture
        .assert_rejected(&id, changed("turn_epoch", json!("x")), "bad_request", "malformed")
        .await;
    for status in [json!("done"), json!(""), Value::Null] {
        fixture.assert_rejected(&id, changed("status", status), "bad_request", "malformed").await;
    }
    let after = "after_execution";
    fixture
        .assert_rejected(&id, changed(after, json!("explode")), "bad_request", "malformed")
        .await;
    let mismatch = "after_execution_mismatch";
    fixture.assert_rejected(&id, changed(after, json!("terminate")), "bad_request", mismatch).await;
    let card = "tool_result_card_id";
    for missing in [Value::Null, json!(" ")] {
        let mut body = changed(card, missing);
        fixture.assert_rejected(&id, body.clone(), "bad_request", "malformed").await;
        // An inline card does not replace the id, whatever id the card has.
        let own_id = command["tool_call_card_id"].as_str().unwrap().replace("_call", "_result");
        for card_id in ["r1", own_id.as_str()] {
            body["card"] = result_card(command, card_id, "success", json!({ "n": "r1" }));
            fixture.assert_rejected(&id, body.clone(), "bad_request", "malformed").await;
        }
    }
    fixture.assert_rejected(&id, changed(card, json!("nothing")), "not_found", "no_card").await;
    // The card of another call, a card that is no result, and a card with another status.
    fixture.assert_rejected(&id, changed(card, json!("r2")), "bad_request", "wrong_card").await;
    let call_card = command["tool_call_card_id"].clone();
    fixture.assert_rejected(&id, changed(card, call_card), "bad_request", "wrong_card").await;
    fixture
        .assert_rejected(&id, changed("status", json!("failed")), "bad_request", "wrong_card")
        .await;
    for bytes in [&b"{\"tool_call_id\": "[..], b"[1]", b"\xff\xfe", b""] {
        let answer =
            fixture.peer.request_raw("default", "sys.l0.report", bytes.to_vec(), &[]).await;
        assert_eq!(
            (&answer["ok"], &answer["error"]["code"]),
            (&json!(false), &json!("bad_request"))
        );
        assert_eq!(fixture.newest_dead_letter().await["reason"], "malformed");
    }
    for (depth, word) in [("1", "CG-Recursion-Depth"), ("x", "whole number"), ("20", "exceeded")] {
        let headers = [("CG-Recursion-Depth", depth)];
        let body = good.clone();
        let answer = fixture.peer.request_in("default", "sys.l0.report", body, &headers).await;
        assert!(answer["error"]["message"].as_str().unwrap().contains(word), "{answer}");
    }
    assert_eq!(fixture.report(good).await["ok"], true, "a valid report is accepted afterwards");
    assert_eq!(fixture.api.finished(&id).await["status"], "SUCCEEDED");
    assert_eq!(fixture.api.call(&other).await["status"], "PENDING");
}

#[tokio::test]
async fn an_inline_result_fails_the_call() {
    let Some(fixture) = Fixture::new().await else { return };
    let (id, command) = fixture.call().await;
    let mut body = report(&command.payload, "r1", "success");
    body["result"] = json!({ "answer": 42 });
    let answer = fixture.report(body).await;
    assert_eq!(answer["ok"], false);
    let call = fixture.api.finished(&id).await;
    assert_eq!(call["status"], "FAILED");
    let message = call["error"]["message"].as_str().unwrap();
    assert!(message.contains("payload.result is forbidden"), "{message}");
}

#[tokio::test]
async fn a_repeated_report_is_a_duplicate_and_a_late_one_is_recorded() {
    let Some(fixture) = Fixture::new().await else { return };
    let (id, command) = fixture.call().await;
    let command = &command.payload;
    fixture.put(command, "r1", "success").await;
    let first = fixture.report(report(command, "r1", "success")).await;
    assert_eq!((&first["ok"], &first["duplicate"]), (&json!(true), &json!(false)));
    for _ in 0..3 {
        let again = fixture.report(report(command, "r1", "success")).await;
        assert_eq!((&again["ok"], &again["duplicate"]), (&json!(true), &json!(true)), "{again}");
    }
    let over_http = fixture.api.post("/v1/tool_results", report(command, "r1", "success")).await;
    assert_eq!(over_http.is(200)["duplicate"], true);
    // A call has one result card: a second one is rejected, an equal one is accepted.
    let card = result_card(command, "r1", "success", json!({ "n": "r1" }));
    assert_eq!(fixture.peer.request("sys.cards.put", json!({ "card": card })).await["ok"], true);
    let second = result_card(command, "r9", "success", json!(9));
    let put = fixture.peer.request("sys.cards.put", json!({ "card": second })).await;
    assert_eq!(put["error"]["code"], "conflict", "{put}");
    assert_eq!(put["error"]["detail"]["card_id"], "r1");
    let other = result_card(command, "r1", "success", json!("other"));
    let put = fixture.peer.request("sys.cards.put", json!({ "card": other })).await;
    assert_eq!(put["error"]["code"], "conflict", "{put}");
    fixture.api.post("/v1/cards", second).await.refused(409, "CONFLICT");
    assert_eq!(fixture.api.call(&id).await["result"], json!({ "n": "r1" }));
    // A report after the end of the call is acknowledged and recorded, and changes nothing.
    let (id, command) = fixture.call().await;
    let command = &command.payload;
    fixture.api.post(&format!("/v1/tool_calls/{id}/cancel"), json!({})).await.is(200);
    fixture.put(command, "late", "success").await;
    let late = fixture.report(report(command, "late", "success")).await;
    assert_eq!((&late["ok"], &late["late"]), (&json!(true), &json!(true)), "{late}");
    assert_eq!(fixture.api.call(&id).await["status"], "CANCELED");
    assert!(fixture.api.history(&id).await.contains(&"tool.call.late".to_owned()));
    assert_eq!(fixture.api.get("/v1/dead_letters").await.is(200)["dead_letters"], json!([]));
}

/// Returns a report with its card.
fn report_with_card(command: &Value, card_id: &str, status: &str, card: Value) -> Value {
    let mut body = report(command, card_id, status);
    body["card"] = card;
    body
}

#[tokio::test]
async fn the_card_of_a_rejected_report_is_not_stored() {
    let Some(fixture) = Fixture::new().await else { return };
    let (id, command) = fixture.call().await;
    let (other, another) = fixture.call().await;
    let (command, another) = (&command.payload, &another.payload);
    // The card belongs to another open call.
    let foreign = result_card(another, "x1", "success", json!({ "of": "the first" }));
    fixture
        .assert_rejected(
            &id,
            report_with_card(command, "x1", "success", foreign),
            "bad_request",
            "wrong_card",
        )
        .await;
    fixture.api.get("/v1/cards/x1").await.refused(404, "NOT_FOUND");
    assert_eq!(fixture.api.call(&other).await["status"], "PENDING");
    let card = result_card(another, "x2", "success", json!({ "of": "the second" }));
    let answer = fixture.report(report_with_card(another, "x2", "success", card)).await;
    assert_eq!(answer["ok"], true, "{answer}");
    assert_eq!(fixture.api.finished(&other).await["result"], json!({ "of": "the second" }));
    // The card contradicts the report; a corrected card with the same id is accepted.
    let failed = result_card(command, "x3", "failed", json!(1));
    fixture
        .assert_rejected(
            &id,
            report_with_card(command, "x3", "success", failed),
            "bad_request",
            "wrong_card",
        )
        .await;
    let right = result_card(command, "x3", "success", json!({ "of": "the first" }));
    let answer = fixture.report(report_with_card(command, "x3", "success", right)).await;
    assert_eq!(answer["ok"], true, "{answer}");
    assert_eq!(fixture.api.finished(&id).await["result"], json!({ "of": "the first" }));
}

#[tokio::test]
async fn a_report_with_a_second_result_card_is_rejected() {
    let Some(fixture) = Fixture::new().await else { return };
    let (id, command) = fixture.call().await;
    let command = &command.payload;
    fixture.put(command, "r1", "success").await;
    let other = result_card(command, "r2", "success", json!({ "n": "r2" }));
    fixture
        .assert_rejected(
            &id,
            report_with_card(command, "r2", "success", other),
            "conflict",
            "wrong_card",
        )
        .await;
    // An equal card with another id is accepted.
    let same_card = result_card(command, "r3", "success", json!({ "n": "r1" }));
    assert_eq!(
        fixture.report(report_with_card(command, "r3", "success", same_card)).await["ok"],
        true
    );
    assert_eq!(fixture.api.finished(&id).await["result"], json!({ "n": "r1" }));
    // After the end of the call, the first result stays, and other reports are late.
    let other = result_card(command, "r4", "success", json!({ "n": "r4" }));
    let late = fixture.report(report_with_card(command, "r4", "success", other)).await;
    assert_eq!(late["ok"], true, "{late}");
    assert_eq!(fixture.api.call(&id).await["result"], json!({ "n": "r1" }));
}

#[tokio::test]
async fn another_project_can_neither_report_nor_read() {
    let Some(fixture) = Fixture::new().await else { return };
    let (id, command) = fixture.call().await;
    let command = &command.payload;
    fixture.put(command, "r1", "success").await;
    let body = report(command, "r1", "success");
    let answer = fixture.peer.request_in("other", "sys.l0.report", body, &[]).await;
    assert_eq!((&answer["ok"], &answer["error"]["code"]), (&json!(false), &json!("not_found")));
    for card in [json!("r1"), command["tool_call_card_id"].clone()] {
        let ids = json!({ "card_ids": [card] });
        let answer = fixture.peer.request_in("other", "sys.cards.get", ids, &[]).await;
        assert_eq!(answer["error"]["code"], "not_found", "{answer}");
    }
    assert_eq!(fixture.api.call(&id).await["status"], "PENDING");
    let other = fixture.api.clone().project("other");
    let dead_letters = other.get("/v1/dead_letters").await.is(200);
    assert_eq!(dead_letters["dead_letters"][0]["reason"], "orphan");
    assert_eq!(fixture.api.get("/v1/dead_letters").await.is(200)["dead_letters"], json!([]));
}

/// Sends a complete request before it reads the response, as many HTTP clients do.
async fn send_before_reading(server: &Server, path: &str, body: &str) -> String {
    let mut stream = tokio::net::TcpStream::connect(&server.api().address).await.unwrap();
    let head = format!(
        "POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\
         Content-Type: application/json\r\nConnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    stream.write_all(body.as_bytes()).await.expect("the server reads the whole body");
    let mut answer = String::new();
    soon("the answer", stream.read_to_string(&mut answer)).await.unwrap();
    answer
}

#[tokio::test]
async fn a_result_of_ten_megabytes_is_rejected_as_too_large() {
    let Some(fixture) = Fixture::new().await else { return };
    let (id, command) = fixture.call().await;
    let large = "x".repeat(10 << 20);
    let card = result_card(&command.payload, "big", "success", json!({ "text": large }));
    let put = fixture.peer.request("sys.cards.put", json!({ "card": card })).await;
    assert_eq!(put["ok"], false);
    assert!(put["error"]["message"].as_str().unwrap().contains("limit"), "{put}");
    let mut body = report(&command.payload, "big", "success");
    body["card"] = card.clone();
    let answer = fixture.report(body.clone()).await;
    assert_eq!((&answer["ok"], &answer["error"]["code"]), (&json!(false), &json!("bad_request")));
    let dead = fixture.newest_dead_letter().await;
    assert_eq!(
        (&dead["reason"], &dead["cut"], &dead["subject"]),
        (&json!("too_large"), &json!(true), &json!("cg.v1r3.default.public.rpc.sys.l0.report"))
    );
    // HTTP rejects it as well, even if the client sends the whole body before it reads.
    let response =
        send_before_reading(&fixture.server, "/v1/tool_results", &body.to_string()).await;
    assert!(
        response.starts_with("HTTP/1.1 413") && response.contains("PAYLOAD_TOO_LARGE"),
        "{response}"
    );
    let dead = fixture.newest_dead_letter().await;
    assert_eq!(
        (&dead["reason"], &dead["cut"], &dead["subject"]),
        (&json!("too_large"), &json!(true), &json!("/v1/tool_results"))
    );
    assert_eq!(dead["payload"].as_str().unwrap().len(), 262_144, "the beginning");
    let response = send_before_reading(&fixture.server, "/v1/cards", &card.to_string()).await;
    assert!(response.starts_with("HTTP/1.1 413"), "{response}");
    let path = format!("/v1/dead_letters/{}/redrive", dead["id"].as_str().unwrap());
    fixture.api.post(&path, json!({})).await.refused(409, "CONFLICT");
    fixture.api.post("/v1/cards", card).await.refused(413, "PAYLOAD_TOO_LARGE");
    assert_eq!(fixture.api.call(&id).await["status"], "PENDING");
    // A tool host reports such a result as a failure.
    drop(id);
    let target = tool("big.work", "big", json!({}));
    fixture.api.post("/projects/default/tools", target).await.is(201);
    let _host = fixture
        .nats
        .host("big", |host| {
            host.with_tool("big.work", |_| async { Ok(json!({ "text": "x".repeat(10 << 20) })) })
        })
        .await;
    let id = fixture.api.invoke("big.work", json!({})).await;
    let call = fixture.api.finished(&id).await;
    assert_eq!(call["status"], "FAILED", "{call}");
    assert!(call["error"]["message"].as_str().unwrap().contains("too large"), "{call}");
}

#[tokio::test]
async fn a_dead_letter_can_be_redriven() {
    let Some(fixture) = Fixture::new().await else { return };
    let (id, command) = fixture.call().await;
    let command = &command.payload;
    // The report arrives before its card.
    let early = report(command, "r1", "success");
    fixture.assert_rejected(&id, early, "not_found", "no_card").await;
    let dead = fixture.newest_dead_letter().await;
    let path = format!("/v1/dead_letters/{}/redrive", dead["id"].as_str().unwrap());
    fixture.api.post(&path, json!({})).await.refused(404, "NOT_FOUND");
    assert!(
        fixture.newest_dead_letter().await["last_try"]
            .as_str()
            .unwrap()
            .contains("there is no card")
    );
    fixture.put(command, "r1", "success").await;
    let answer = fixture.api.post(&path, json!({})).await.is(200);
    assert_eq!((&answer["ok"], &answer["duplicate"]), (&json!(true), &json!(false)), "{answer}");
    assert_eq!(fixture.api.finished(&id).await["status"], "SUCCEEDED");
    let dead = fixture.newest_dead_letter().await;
    assert_eq!(dead["last_try"], "taken");
    assert!(dead["redriven_at"].is_string());
    fixture.api.post("/v1/dead_letters/dl_x/redrive", json!({})).await.refused(404, "NOT_FOUND");
    // Dead letters survive a restart of the server.
    let server = fixture.server.restart().await;
    let dead_letters = server.api().get("/v1/dead_letters").await.is(200);
    assert_eq!(dead_letters["dead_letters"][0]["id"], dead["id"]);
}

#[tokio::test]
async fn cards_are_validated_before_they_are_stored() {
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
    let stored = api.post("/v1/cards", good.clone()).await.is(201);
    let id = stored["card_id"].as_str().unwrap();
    assert_eq!(api.get(&format!("/v1/cards/{id}")).await.is(200), stored);
    let mut same_card = good.clone();
    same_card["card_id"] = json!(id);
    api.post("/v1/cards", same_card.clone()).await.is(200);
    same_card["metadata"] = json!({ "note": "changed" });
    api.post("/v1/cards", same_card).await.refused(409, "CONFLICT");
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
    let with_value = |base: &Value, path: &str, value: Value| {
        let mut card = base.clone();
        let (parent, name) = path.rsplit_once('/').unwrap();
        card.pointer_mut(parent).unwrap()[name] = value;
        card
    };
    let cases = [
        (with_value(&good, "/type", json!("tool.nothing")), "type"),
        (with_value(&good, "/author_id", json!("")), "author_id"),
        (with_value(&good, "/surprise", json!(1)), "surprise"),
        (with_value(&good, "/project_id", json!("other")), "project_id"),
        (with_value(&good, "/card_id", json!("a b")), "card_id"),
        (with_value(&good, "/content", json!("text")), "content"),
        (with_value(&good, "/content/__type__", json!("Nothing")), "__type__"),
        (with_value(&good, "/content/__type__", json!("TextContent")), "ToolCallContent"),
        (with_value(&good, "/content/arguments", json!([])), "arguments"),
        (with_value(&good, "/content/more", json!(1)), "more"),
        (with_value(&good, "/content/status", json!(7)), "status"),
        (with_value(&good, "/content/target_subject", json!(7)), "target_subject"),
        (with_value(&good, "/ttl_seconds", json!(-1)), "ttl_seconds"),
        (with_value(&good, "/ttl_seconds", json!("soon")), "ttl_seconds"),
        (with_value(&thought, "/content/text", json!(7)), "text"),
        (with_value(&result, "/content/status", json!("done")), "status"),
        (with_value(&result, "/content/status", json!("failed")), "error"),
        (with_value(&result, "/content/error", json!({ "code": "x", "message": "y" })), "error"),
        (with_value(&result, "/content/after_execution", json!("explode")), "after_execution"),
        (with_value(&result, "/metadata/agent_turn_id", json!("")), "agent_turn_id"),
        (with_value(&result, "/tool_call_id", json!("c2")), "tool_call_id"),
        (json!([]), "object"),
    ];
    for (card, word) in cases {
        let error = api.post("/v1/cards", card).await.refused(400, "BAD_REQUEST");
        assert!(error["message"].as_str().unwrap().contains(word), "{word}: {error}");
    }
}
