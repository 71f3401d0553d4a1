//! Arguments and results arrive unchanged or are rejected with the location of the error. A payload
//! that is too large ends its own call and nothing else.

use futures::StreamExt;
use reqwest::Method;
use serde_json::{Value, json};
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::protocol::CloseFrame;

use crate::support::api::{message, offer, offer_with};
use crate::support::ws::Ws;
use crate::support::{Server, soon};

/// Texts with JSON syntax that have no valid value.
const INVALID_VALUES: [&str; 3] = ["1e400", r#""\ud800""#, r#"{"\udfff": 1}"#];

#[tokio::test]
async fn arguments_with_invalid_json_values_are_rejected_with_the_location() {
    let server = Server::start().await;
    let api = server.api();
    api.register("c1", json!([offer_with("a.tool", json!({ "schema": {} }))])).await;
    for invalid in INVALID_VALUES {
        let single = format!("{{\"run_id\": \"r\",\n \"args\": {invalid}}}");
        let error = api.post_raw("/v1/tools/a.tool/invoke", single).await;
        let error = error.refused(400, "BAD_REQUEST");
        assert!(message(&error).contains("line 2 column"), "{error}");
        let batch = format!(
            "{{\"run_id\": \"r\", \"tool_calls\": [{{\"name\": \"a.tool\", \"args\": {invalid}}}]}}"
        );
        api.post_raw("/v1/tool_calls", batch).await.refused(400, "BAD_REQUEST");
    }
    let listed = api.get("/v1/tool_calls").await.is(200);
    assert_eq!(listed["tool_calls"], json!([]), "no call was stored");
}

#[tokio::test]
async fn arguments_with_invalid_json_values_do_not_use_up_the_key() {
    let server = Server::start().await;
    let api = server.api();
    api.register("c1", json!([offer("a.tool")])).await;
    let body = |args: &str| {
        format!("{{\"run_id\": \"r\", \"idempotency_key\": \"k\", \"args\": {{\"n\": {args}}}}}")
    };
    let path = "/v1/tools/a.tool/invoke";
    api.post_raw(path, body("1e400")).await.refused(400, "BAD_REQUEST");
    api.post_raw(path, body("1e308")).await.is(202);
    api.post_raw(path, body("2e400")).await.refused(400, "BAD_REQUEST");
    api.post_raw(path, body("null")).await.refused(422, "IDEMPOTENCY_MISMATCH");
}

#[tokio::test]
async fn a_result_with_an_invalid_json_value_is_rejected_without_effect() {
    let server = Server::start().await;
    let api = server.api();
    let output = json!({ "type": ["object", "null"] });
    let tools = json!([offer_with("a.tool", json!({ "output_schema": output })), offer("b.tool")]);
    api.register("c1", tools).await;
    for tool in ["a.tool", "b.tool"] {
        let id = api.invoke(tool, json!({})).await;
        let path = format!("/internal/tool_calls/{id}/submit");
        let body = "{\"status\": \"SUCCEEDED\",\n \"result\": 1e400}";
        let error = api.post_raw(&path, body).await.refused(400, "BAD_REQUEST");
        let expected = "number out of range at line 2 column 12";
        assert!(message(&error).contains(expected), "{error}");
        assert_eq!(api.call(&id).await["status"], "PENDING");
        api.succeed(&id, json!(null)).await;
        let other = "{\"status\": \"SUCCEEDED\", \"result\": [1e400]}";
        api.post_raw(&path, other).await.refused(400, "BAD_REQUEST");
        assert_eq!(api.call(&id).await["result"], json!(null));
    }
}

#[tokio::test]
async fn an_unpaired_surrogate_in_a_result_is_replaced() {
    let server = Server::start().await;
    let api = server.api();
    let mut client = Ws::offering(&api, "c1", json!([offer("a.tool")])).await;
    let result = r#"{"text": "cut \ud83d", "whole": "\ud83d\ude00"}"#;
    let expected = json!({ "text": "cut \u{fffd}", "whole": "😀" });
    let id = api.invoke("a.tool", json!({})).await;
    client.expect_message("tool_request").await;
    let text = format!(
        r#"{{"type":"tool_result","tool_call_id":"{id}","status":"SUCCEEDED","result":{result}}}"#
    );
    client.send_raw(Message::text(text.clone())).await;
    assert_eq!(client.expect_message("result_ack").await["status"], "SUCCEEDED");
    assert_eq!(api.call(&id).await["result"], expected);
    client.send_raw(Message::text(text.replace(result, "1e400"))).await;
    let error = client.expect_message("error").await;
    assert!(message(&error["error"]).contains("number out of range"), "{error}");

    let id = api.invoke("a.tool", json!({})).await;
    let path = format!("/internal/tool_calls/{id}/submit");
    let body = format!(r#"{{"status": "SUCCEEDED", "result": {result}}}"#);
    api.post_raw(&path, body.clone()).await.is(200);
    assert_eq!(api.call(&id).await["result"], expected);
    api.post_raw(&path, body).await.is(200);
}

#[tokio::test]
async fn clients_receive_the_arguments_byte_for_byte() {
    let server = Server::start().await;
    let api = server.api();
    let args = r#"{"z": 123456789012345678901234567890, "a":1.10, "é": "\u00e9"}"#;
    let body = format!(r#"{{"run_id": "r", "args": {args}}}"#);
    api.register("poll", json!([offer("p.tool")])).await;
    api.post_raw("/v1/tools/p.tool/invoke", body.clone()).await.is(202);
    let polled = api.get("/internal/ingress/poll?client_id=poll&wait_ms=30000").await;
    assert!(polled.text.contains(args), "{}", polled.text);

    api.register("sse", json!([offer("s.tool")])).await;
    api.post_raw("/v1/tools/s.tool/invoke", body.clone()).await.is(202);
    let request = api.request(Method::GET, "/internal/ingress/sse?client_id=sse");
    let mut stream = request.send().await.unwrap();
    let mut received = String::new();
    while !received.contains("tool_request\"}") {
        let chunk = soon("an event", stream.chunk()).await.unwrap().unwrap();
        received.push_str(std::str::from_utf8(&chunk).unwrap());
    }
    assert!(received.contains(args), "{received}");

    let mut client = Ws::offering(&api, "ws", json!([offer("w.tool")])).await;
    api.post_raw("/v1/tools/w.tool/invoke", body).await.is(202);
    let received = soon("a request", async {
        loop {
            match client.socket.next().await.unwrap().unwrap() {
                Message::Text(text) => break text.to_string(),
                _ => continue,
            }
        }
    });
    let received = received.await;
    assert!(
        received.contains(args) && received.contains("\"type\":\"tool_request\""),
        "{received}"
    );
}

/// Starts a server whose limits are small enough for a message to exceed them.
async fn start_with_small_limits() -> Server {
    Server::with(|config| {
        config.limits.max_result_bytes = 10_000;
        config.limits.max_body_bytes = 10_000;
    })
    .await
}

fn result(id: &Value, size: usize) -> Value {
    let text = "x".repeat(size);
    json!({ "type": "tool_result", "tool_call_id": id, "status": "SUCCEEDED", "result": text })
}

#[tokio::test]
async fn a_result_over_the_limit_fails_its_call_and_not_the_connection() {
    let server = start_with_small_limits().await;
    let api = server.api();
    let mut client = Ws::offering(&api, "c1", json!([offer("a.tool")])).await;
    let ids = [api.invoke("a.tool", json!({})).await, api.invoke("a.tool", json!({})).await];
    let (first, second) = (client.take().await, client.take().await);
    client.send(result(&first["tool_call_id"], 30_000)).await;
    let answer = client.expect_message("result_ack").await;
    assert_eq!(answer["status"], "FAILED", "{answer}");
    let call = api.call(&ids[0]).await;
    assert_eq!(call["error"]["code"], "PAYLOAD_TOO_LARGE", "{call}");
    client.succeed(&second, json!("fine")).await;
    assert_eq!(api.call(&ids[1]).await["result"], "fine");
}

/// Reads until the connection is closed. Returns the messages and the close frame.
async fn read_until_close(client: &mut Ws) -> (Vec<Value>, CloseFrame) {
    let mut received = Vec::new();
    let frame = soon("the end", async {
        loop {
            match client.socket.next().await.unwrap().unwrap() {
                Message::Close(frame) => break frame.unwrap(),
                Message::Text(text) => received.push(serde_json::from_str(&text).unwrap()),
                _ => continue,
            }
        }
    });
    let frame = frame.await;
    (received, frame)
}

#[tokio::test]
async fn an_oversized_message_closes_the_connection_and_fails_its_call() {
    let server = start_with_small_limits().await;
    let api = server.api();
    let tools = json!([offer("a.tool")]);
    let large = "x".repeat(200_000);
    // Fields have any order: the call id may follow the oversized result.
    let first = |id: &str| {
        format!(
            r#"{{"type": "tool_result", "tool_call_id": "{id}", "attempt": 1, "status": "SUCCEEDED", "result": "{large}"}}"#
        )
    };
    let last = |id: &str| result(&json!(id), 200_000).to_string();
    for oversized in [&first as &dyn Fn(&str) -> String, &last] {
        let mut client = Ws::offering(&api, "c1", tools.clone()).await;
        let ids = [api.invoke("a.tool", json!({})).await, api.invoke("a.tool", json!({})).await];
        client.take().await;
        client.expect_message("tool_request").await;
        client.send_raw(Message::text(oversized(&ids[0]))).await;
        let (received, frame) = read_until_close(&mut client).await;
        let expected = json!({ "type": "result_ack", "tool_call_id": ids[0], "status": "FAILED" });
        assert_eq!(received, [expected]);
        assert_eq!(u16::from(frame.code), 1009);
        assert!(frame.reason.contains("bytes"), "{frame:?}");
        let call = api.call(&ids[0]).await;
        assert_eq!(call["error"]["code"], "PAYLOAD_TOO_LARGE", "{call}");
        assert!(message(&call["error"]).contains("10000"), "{call}");
        // The other call is redelivered, the failed one is not.
        let mut client = Ws::offering(&api, "c1", tools.clone()).await;
        let again = client.expect_message("tool_request").await;
        assert_eq!(again["tool_call_id"], json!(ids[1]));
        client.succeed(&again, json!("fine")).await;
        client.expect_no_message().await;
        client.close().await;
    }
}

#[tokio::test]
async fn an_oversized_message_that_is_no_result_fails_no_call() {
    let server = start_with_small_limits().await;
    let api = server.api();
    let tools = json!([offer_with("a.tool", json!({ "effect": "read" }))]);
    let id = {
        let mut client = Ws::offering(&api, "c1", tools.clone()).await;
        let id = api.invoke("a.tool", json!({})).await;
        client.take().await;
        let mut progress = result(&json!(id), 500_000);
        progress["type"] = "tool_progress".into();
        client.send(progress).await;
        assert_eq!(u16::from(read_until_close(&mut client).await.1.code), 1009);
        id
    };
    let mut client = Ws::offering(&api, "c1", tools.clone()).await;
    let again = client.expect_message("tool_request").await;
    // A nested message does not identify the call.
    let nested = json!({ "type": "tool_result", "result": [result(&json!(id), 500_000)] });
    client.send(nested).await;
    let (received, frame) = read_until_close(&mut client).await;
    assert_eq!((received, u16::from(frame.code)), (Vec::<Value>::new(), 1009));
    let mut client = Ws::offering(&api, "c1", tools).await;
    assert_eq!(client.expect_message("tool_request").await["tool_call_id"], json!(id));
    client.succeed(&again, json!("fine")).await;
    assert_eq!(api.call(&id).await["result"], "fine");
}

#[tokio::test]
async fn a_submitted_result_over_the_limit_fails_its_attempt() {
    let server = start_with_small_limits().await;
    let api = server.api();
    api.register("c1", json!([offer("a.tool")])).await;
    for size in [20_000, 100_000] {
        let id = api.invoke("a.tool", json!({})).await;
        api.poll("c1").await;
        let mut body = result(&json!(id), size);
        body["client_id"] = "c1".into();
        for _ in 0..2 {
            let error = api.submit(&id, body.clone()).await.refused(413, "PAYLOAD_TOO_LARGE");
            assert!(message(&error).contains("over the limit of 14096"), "{error}");
        }
        let call = api.call(&id).await;
        assert_eq!((&call["status"], &call["attempt"]), (&json!("FAILED"), &json!(1)), "{call}");
        assert_eq!(call["error"]["code"], "PAYLOAD_TOO_LARGE", "{call}");
    }
    let id = api.invoke("a.tool", json!({})).await;
    api.poll("c1").await;
    let mut late = result(&json!(id), 20_000);
    late["attempt"] = 7.into();
    api.submit(&id, late).await.refused(409, "CONFLICT");
    assert_eq!(api.call(&id).await["status"], "RUNNING", "the result is of another attempt");
}
