//! The WebSocket protocol of clients.

use std::time::Duration;

use futures::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::protocol::CloseFrame;
use tokio_tungstenite::tungstenite::protocol::frame::Frame;
use tokio_tungstenite::tungstenite::protocol::frame::coding::{CloseCode, Data, OpCode};

use super::use_short_heartbeat;
use crate::support::api::{message, offer, offer_with};
use crate::support::ws::Ws;
use crate::support::{Server, soon, until};

#[tokio::test]
async fn a_call_over_websocket_from_hello_to_result() {
    let server = Server::start().await;
    let api = server.api();
    let mut client = Ws::open(&api).await.unwrap();
    let tool = json!({ "name": "a.tool", "schema": { "type": "object" }, "timeout_ms": 7_000 });
    client.send(json!({ "type": "hello", "client_id": "c1", "tools": [tool] })).await;
    let answer = client.expect_message("hello_ack").await;
    let expected = json!({
        "type": "hello_ack", "client_id": "c1", "heartbeat_ms": 15_000, "dead_after_ms": 45_000,
        "max_in_flight": 16
    });
    assert_eq!(answer, expected);
    let id = api.invoke("a.tool", json!({ "n": 1.10 })).await;
    let request = client.expect_message("tool_request").await;
    assert_eq!(request["tool_call_id"], json!(id));
    assert_eq!(request["run_id"], "run_1");
    assert_eq!(request["tool_name"], "a.tool");
    assert_eq!(request["args"], json!({ "n": 1.10 }));
    assert_eq!(request["attempt"], 1);
    assert_eq!(request["effect"], "irreversible");
    assert_eq!(request["redelivered"], false);
    assert!((1..=7_000).contains(&request["timeout_ms"].as_u64().unwrap()), "{request}");
    assert_eq!(request["deadline_at_ms"], api.call(&id).await["deadline_at_ms"]);
    let call = api.call(&id).await;
    assert_eq!((&call["status"], &call["hold"]), (&json!("PENDING"), &json!("parked")));
    client.ack(&request).await;
    let call = api.until_status(&id, "RUNNING").await;
    assert_eq!(call["taken_by"], "c1");
    client.send(json!({ "type": "tool_progress", "tool_call_id": id, "percent": 50 })).await;
    let answer = client.succeed(&request, json!({ "ok": "yes" })).await;
    assert_eq!(answer["status"], "SUCCEEDED");
    let call = api.call(&id).await;
    assert_eq!((&call["status"], &call["result"]), (&json!("SUCCEEDED"), &json!({ "ok": "yes" })));
    let history = api.history(&id).await;
    let kinds = ["requested", "started", "taken", "progress", "finished"];
    assert_eq!(history, kinds.map(|kind| format!("tool.call.{kind}")));
    client.expect_no_message().await;
}

#[tokio::test]
async fn a_result_without_an_acknowledgement_is_accepted() {
    let server = Server::start().await;
    let api = server.api();
    let mut client = Ws::offering(&api, "c1", json!([offer("a.tool")])).await;
    let id = api.invoke("a.tool", json!({})).await;
    let request = client.expect_message("tool_request").await;
    client.succeed(&request, json!(7)).await;
    let call = api.call(&id).await;
    assert_eq!((&call["result"], &call["taken_by"]), (&json!(7), &json!("c1")));
    client.succeed(&request, json!(7)).await;
    client
        .send(json!({
            "type": "tool_result", "tool_call_id": id, "status": "SUCCEEDED", "result": 8
        }))
        .await;
    let error = client.expect_message("error").await;
    assert_eq!(error["tool_call_id"], json!(id));
    assert_eq!(error["error"]["code"], "CONFLICT");
    assert_eq!(api.call(&id).await, call, "an equal result is accepted, another changes nothing");
}

#[tokio::test]
async fn an_invalid_message_gets_an_error_and_the_connection_stays_open() {
    let server = Server::start().await;
    let api = server.api();
    let mut client = Ws::offering(&api, "c1", json!([offer("a.tool")])).await;
    let unknown = "tc_01ARZ3NDEKTSV4RRFFQ69G5FAV";
    let deep = format!("{}{}", "[".repeat(65), "]".repeat(65));
    let cases = [
        ("not json".to_owned(), "BAD_REQUEST", "line 1 column"),
        ("[1, 2]".to_owned(), "BAD_REQUEST", "line 1"),
        ("{}".to_owned(), "BAD_REQUEST", "type"),
        (json!({ "type": 7 }).to_string(), "BAD_REQUEST", "line 1"),
        (json!({ "type": "dance" }).to_string(), "BAD_REQUEST", "dance"),
        (json!({ "type": "dance", "tool_call_id": unknown }).to_string(), "BAD_REQUEST", "dance"),
        (json!({ "type": "tool_ack" }).to_string(), "BAD_REQUEST", "tool_call_id"),
        (json!({ "type": "tool_ack", "tool_call_id": "x" }).to_string(), "NOT_FOUND", "\"x\""),
        (json!({ "type": "tool_ack", "tool_call_id": unknown }).to_string(), "NOT_FOUND", unknown),
        (format!("{{\"type\":\"ping\",\"x\":{deep}}}"), "BAD_REQUEST", "64 levels"),
    ];
    for (text, code, names) in cases {
        client.send_raw(Message::text(text.clone())).await;
        let answer = client.expect_message("error").await;
        assert_eq!(answer["error"]["code"], code, "{text}: {answer}");
        assert!(message(&answer["error"]).contains(names), "{text}: {answer}");
    }
    client.send_raw(Message::binary(vec![0xff, 0x00])).await;
    assert_eq!(client.expect_message("error").await["error"]["code"], "BAD_REQUEST");
    let id = api.invoke("a.tool", json!({})).await;
    let bad = json!({ "type": "tool_result", "tool_call_id": id, "status": "PERHAPS" });
    client.expect_message("tool_request").await;
    client.send(bad).await;
    let answer = client.expect_message("error").await;
    assert_eq!(answer["error"]["code"], "VALIDATION_ERROR");
    assert_eq!(answer["tool_call_id"], json!(id));
    let request = json!({ "tool_call_id": id, "attempt": 1 });
    client.succeed(&request, json!("still here")).await;
    assert_eq!(api.call(&id).await["result"], "still here");
}

#[tokio::test]
async fn the_first_message_must_be_a_valid_hello() {
    let server = Server::start().await;
    let api = server.api();
    for (first, code) in [
        ("gibberish", "BAD_REQUEST"),
        (r#"{"type":"ping"}"#, "BAD_REQUEST"),
        (r#"{"type":"hello"}"#, "BAD_REQUEST"),
        (r#"{"type":"hello","client_id":""}"#, "VALIDATION_ERROR"),
        (r#"{"type":"hello","client_id":"c1","max_in_flight":0}"#, "VALIDATION_ERROR"),
        (r#"{"type":"hello","client_id":"c1","max_in_flight":-1}"#, "BAD_REQUEST"),
        (r#"{"type":"hello","client_id":"nobody_knows"}"#, "NOT_FOUND"),
        (r#"{"type":"hello","client_id":"c1","tools":[{"name":"weather.query"}]}"#, "CONFLICT"),
    ] {
        let mut client = Ws::open(&api).await.unwrap();
        client.send_raw(Message::text(first)).await;
        let answer = client.expect_message("error").await;
        assert_eq!(answer["error"]["code"], code, "{first}: {answer}");
        assert_eq!(client.next().await, None, "the connection is closed");
    }
}

#[tokio::test]
async fn the_server_confirms_and_caps_max_in_flight() {
    let server = Server::start().await;
    let api = server.api();
    api.register("c1", json!([offer("a.tool")])).await;
    for (requested, granted) in [(1, 1), (1_024, 1_024), (1_000_000, 1_024)] {
        let mut client = Ws::open(&api).await.unwrap();
        let hello = json!({ "type": "hello", "client_id": "c1", "max_in_flight": requested });
        client.send(hello).await;
        assert_eq!(client.expect_message("hello_ack").await["max_in_flight"], granted);
        client.close().await;
    }
    for path in ["sse?client_id=c1&max_in_flight=0", "poll?client_id=c1&max=0"] {
        let refused = api.get(&format!("/internal/ingress/{path}")).await;
        let error = refused.refused(422, "VALIDATION_ERROR");
        assert!(message(&error).contains("at least 1"), "{error}");
    }
}

#[tokio::test]
async fn the_size_limit_of_registrations_applies_to_http_and_websocket() {
    let server = Server::with(|config| config.limits.max_body_bytes = 10_000).await;
    let api = server.api();
    let tools =
        json!([offer("a.tool"), offer_with("b.tool", json!({ "metadata": "x".repeat(10_000) }))]);
    let body = json!({ "client_id": "c1", "tools": tools });
    api.post("/internal/tools/register", body).await.refused(413, "PAYLOAD_TOO_LARGE");
    let mut client = Ws::open(&api).await.unwrap();
    client.send(json!({ "type": "hello", "client_id": "c1", "tools": tools })).await;
    let answer = client.expect_message("error").await;
    assert_eq!(answer["error"]["code"], "PAYLOAD_TOO_LARGE", "{answer}");
    assert_eq!(client.next().await, None);
}

#[tokio::test]
async fn a_websocket_counts_towards_max_connections() {
    let server = Server::with(|config| config.limits.max_connections = 2).await;
    let api = server.api();
    let first = Ws::offering(&api, "c1", json!([offer("a.tool")])).await;
    let second = Ws::offering(&api, "c2", json!([offer("a.tool")])).await;
    let refused = api.get("/v1/tools").await;
    assert_eq!(refused.header("retry-after"), Some("1"));
    refused.refused(503, "OVERLOADED");
    assert_eq!(api.get("/livez").await.status.as_u16(), 200, "health checks are always answered");
    first.close().await;
    until("a free connection", || async {
        (api.get("/v1/tools").await.status.as_u16() == 200).then_some(())
    })
    .await;
    drop(second);
}

#[tokio::test]
async fn a_request_without_an_upgrade_is_rejected() {
    let server = Server::start().await;
    let api = server.api();
    let error = api.get("/internal/ingress/ws").await.refused(400, "BAD_REQUEST");
    assert!(message(&error).contains("WebSocket"), "{error}");
}

#[tokio::test]
async fn every_message_of_a_flood_is_answered() {
    const MANY: usize = 40_000;
    let server = Server::start().await;
    let api = server.api();
    let client = Ws::offering(&api, "c1", json!([offer("a.tool")])).await;
    let (mut sink, mut source) = client.socket.split();
    let sending = tokio::spawn(async move {
        for _ in 0..MANY {
            sink.feed(Message::text(r#"{"type":"ping"}"#)).await.unwrap();
        }
        sink.flush().await.unwrap();
        sink
    });
    let mut answers = 0;
    while answers < MANY {
        match soon("an answer", source.next()).await {
            Some(Ok(Message::Text(_))) => answers += 1,
            Some(Ok(_)) => {}
            other => panic!("after {answers} answers: {other:?}"),
        }
    }
    drop(sending.await.unwrap());
}

#[tokio::test]
async fn a_large_result_is_accepted() {
    let server = Server::start().await;
    let api = server.api();
    let mut client = Ws::offering(&api, "c1", json!([offer("a.tool")])).await;
    let id = api.invoke("a.tool", json!({})).await;
    let request = client.take().await;
    let large = "x".repeat(5 << 20);
    client.succeed(&request, json!(large)).await;
    assert_eq!(api.call(&id).await["result"], json!(large));
}

#[tokio::test]
async fn calls_of_a_dead_connection_go_to_another_client() {
    let server = Server::with(use_short_heartbeat).await;
    let api = server.api();
    let tools = json!([offer("a.tool")]);
    // The test does not read from this connection again, so it answers no pings.
    let dead = Ws::offering(&api, "dead", tools.clone()).await;
    let id = api.invoke("a.tool", json!({})).await;
    let mut alive = Ws::offering(&api, "alive", tools).await;
    let request = alive.expect_message("tool_request").await;
    assert_eq!((&request["tool_call_id"], &request["redelivered"]), (&json!(id), &json!(true)));
    let connections = |name: &'static str| {
        let api = api.clone();
        async move {
            let list = api.get("/v1/clients").await.is(200);
            let clients = list["clients"].as_array().unwrap().clone();
            let found = clients.into_iter().find(|client| client["client_id"] == name).unwrap();
            found["connections"].as_u64().unwrap()
        }
    };
    assert_eq!(connections("dead").await, 0);
    assert_eq!(connections("alive").await, 1);
    drop(dead);
}

#[tokio::test]
async fn an_idle_connection_stays_open() {
    let server = Server::with(use_short_heartbeat).await;
    let api = server.api();
    let mut client = Ws::offering(&api, "c1", json!([offer("a.tool")])).await;
    // Reading answers the server's pings for several times `dead_after_ms`, without messages.
    let quiet = tokio::time::timeout(Duration::from_millis(3_000), client.receive()).await;
    assert!(quiet.is_err(), "{quiet:?}");
    client.expect_no_message().await;
    let id = api.invoke("a.tool", json!({})).await;
    let request = client.take().await;
    client.succeed(&request, json!(1)).await;
    assert_eq!(api.call(&id).await["status"], "SUCCEEDED");
}

#[tokio::test]
async fn a_connection_without_hello_is_closed() {
    let server = Server::with(use_short_heartbeat).await;
    let api = server.api();
    let mut silent = Ws::open(&api).await.unwrap();
    assert_eq!(silent.next().await, None::<Value>);
    until("no connection", || async {
        (server.engine.clients().client_connection_count() == 0).then_some(())
    })
    .await;
}

#[tokio::test]
async fn an_acknowledgement_is_confirmed_on_request() {
    let server = Server::start().await;
    let api = server.api();
    let mut client = Ws::offering(&api, "c1", json!([offer("a.tool")])).await;
    let id = api.invoke("a.tool", json!({})).await;
    client.expect_message("tool_request").await;
    let ack = json!({ "type": "tool_ack", "tool_call_id": id, "attempt": 1, "confirm": true });
    client.send(ack.clone()).await;
    let confirmation = json!({ "type": "tool_taken", "tool_call_id": id, "attempt": 1 });
    assert_eq!(client.receive().await, confirmation);
    assert_eq!(api.call(&id).await["status"], "RUNNING", "stored before confirmed");
    client.send(ack).await;
    assert_eq!(client.receive().await, confirmation, "twice is the same as once");
    let wrong = json!({ "type": "tool_ack", "tool_call_id": id, "attempt": 2, "confirm": true });
    client.send(wrong).await;
    assert_eq!(client.expect_message("error").await["error"]["code"], "CONFLICT");
}

/// Waits for the close frame. Returns its code and reason.
async fn read_close_frame(client: &mut Ws) -> Option<(u16, String)> {
    soon("the end", async {
        loop {
            match client.socket.next().await? {
                Ok(Message::Close(frame)) => {
                    return frame.map(|frame| (frame.code.into(), frame.reason.to_string()));
                }
                Ok(_) => {}
                Err(error) => panic!("no close frame: {error}"),
            }
        }
    })
    .await
}

#[tokio::test]
async fn a_close_frame_is_answered() {
    let server = Server::start().await;
    let mut client = Ws::offering(&server.api(), "c1", json!([offer("a.tool")])).await;
    let goodbye = CloseFrame { code: CloseCode::Normal, reason: "done".into() };
    client.send_raw(Message::Close(Some(goodbye))).await;
    assert_eq!(read_close_frame(&mut client).await.map(|(code, _)| code), Some(1000));
}

#[tokio::test]
async fn a_protocol_violation_is_closed_with_a_reason() {
    let server = Server::start().await;
    let api = server.api();
    let text = OpCode::Data(Data::Text);
    let frames = [
        (Frame::message(vec![0xff, 0xfe], text, true), 1007, "UTF-8"),
        (Frame::message(vec![b'x'], OpCode::Data(Data::Continue), true), 1002, "ontinu"),
    ];
    for (frame, code, expected) in frames {
        let mut client = Ws::offering(&api, "c1", json!([offer("a.tool")])).await;
        client.send_raw(Message::Frame(frame)).await;
        let (actual, reason) = read_close_frame(&mut client).await.unwrap();
        assert_eq!(actual, code, "{reason}");
        assert!(reason.contains(expected), "{reason}");
    }
}

#[tokio::test]
async fn a_stopping_server_sends_a_close_frame() {
    let server = Server::start().await;
    let mut client = Ws::offering(&server.api(), "c1", json!([offer("a.tool")])).await;
    server.engine.shut_down(Duration::ZERO).await;
    let goodbye = soon("the end", async {
        loop {
            match client.socket.next().await {
                Some(Ok(Message::Ping(_))) => {}
                other => return other,
            }
        }
    });
    let Some(Ok(Message::Close(Some(frame)))) = goodbye.await else { panic!("no close frame") };
    assert_eq!(u16::from(frame.code), 1001);
}
