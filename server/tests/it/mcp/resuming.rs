//! Streams of calls that are resumed, after a lost connection and after `kill -9` of the server.

use serde_json::{Value, json};

use crate::support::Api;
use crate::support::mcp::{Mcp, Stream};
use crate::support::process::{Server, text};

/// A server process with an irreversible tool of the client `pc_1`.
async fn started() -> (Server, Api) {
    let server = Server::ready().await;
    server.register("pc_1", "pay.once", "irreversible").await;
    let api = Api::new(&format!("127.0.0.1:{}", server.port));
    (server, api)
}

/// Calls the tool. Returns the stream and the id of its first event.
async fn begin(client: &Mcp) -> (Stream, String) {
    let params = json!({ "name": "pay.once", "arguments": { "sum": 7 } });
    let mut stream = client.open("tools/call", params).await;
    let first = stream.event().await.unwrap();
    assert_eq!(first["data"], "", "{first:?}");
    assert_eq!(first["retry"], "5000", "{first:?}");
    (stream, first["id"].clone())
}

/// Executes the call as the client does. Returns its id.
async fn take(server: &Server) -> String {
    let requests = server.poll_requests("pc_1", 1).await;
    text(&requests[0], "tool_call_id")
}

async fn succeed(server: &Server, id: &str) {
    let body = json!({ "status": "SUCCEEDED", "result": { "paid": 7 }, "client_id": "pc_1" });
    server.submit(id, body).await;
}

/// Asserts that the stream ends with the result of the call, for this request.
async fn assert_result(stream: &mut Stream, request: &Value, call: &str) {
    let message = stream.next().await.unwrap_or_else(|| panic!("the stream ended"));
    assert_eq!(&message["id"], request, "{message}");
    let result = &message["result"];
    assert_eq!(result["structuredContent"], json!({ "paid": 7 }), "{message}");
    assert_eq!(result["_meta"]["toolcrib/tool_call_id"], call, "{message}");
    assert!(stream.next().await.is_none(), "the stream ends with its response");
}

#[tokio::test]
async fn the_result_of_a_call_follows_kill_9_in_both_revisions() {
    for legacy in [true, false] {
        let (mut server, api) = started().await;
        let client = if legacy { Mcp::legacy(&api).await } else { Mcp::modern(&api) };
        let request = json!(if legacy { 2 } else { 1 });
        let (mut stream, event) = begin(&client).await;
        let call = take(&server).await;
        assert!(event.starts_with(&format!("{call}.")), "the event id names the call: {event}");
        server.kill();
        assert!(stream.event().await.is_none());
        server.start().await;
        // Resumed before the end of the call, and again after a second kill.
        let mut stream = client.resume(&event).await;
        assert_eq!(stream.event().await.unwrap()["id"], event);
        server.kill();
        server.start().await;
        let mut stream = client.resume(&event).await;
        stream.event().await.unwrap();
        succeed(&server, &call).await;
        assert_result(&mut stream, &request, &call).await;
        // Resumed after the end.
        let mut stream = client.resume(&event).await;
        assert_result(&mut stream, &request, &call).await;
        let polled = server.poll("pc_1", 10, 0).await;
        assert!(polled.is_empty(), "the tool is executed once: {polled:?}");
    }
}

#[tokio::test]
async fn a_session_resumes_a_call_while_it_still_handles_the_request() {
    let (server, api) = started().await;
    let client = Mcp::legacy(&api).await;
    let (first, event) = begin(&client).await;
    let call = take(&server).await;
    drop(first);
    let mut second = client.resume(&event).await;
    second.event().await.unwrap();
    succeed(&server, &call).await;
    assert_result(&mut second, &json!(2), &call).await;
}

#[tokio::test]
async fn a_stream_that_another_one_supersedes_ends_without_a_message() {
    // A client that reads both would take an error on the first one for the response.
    let (server, api) = started().await;
    for (client, request) in [(Mcp::legacy(&api).await, 2), (Mcp::modern(&api), 1)] {
        let (mut first, event) = begin(&client).await;
        let call = take(&server).await;
        let mut second = client.resume(&event).await;
        second.event().await.unwrap();
        assert_eq!(first.next().await, None);
        let mut third = client.resume(&event).await;
        third.event().await.unwrap();
        assert_eq!(second.next().await, None);
        succeed(&server, &call).await;
        assert_result(&mut third, &json!(request), &call).await;
    }
}

#[tokio::test]
async fn a_resumed_call_can_be_canceled_by_the_id_of_its_request() {
    let (mut server, api) = started().await;
    let client = Mcp::legacy(&api).await;
    let (_first, event) = begin(&client).await;
    let call = take(&server).await;
    server.kill();
    server.start().await;
    let mut stream = client.resume(&event).await;
    stream.event().await.unwrap();
    client.notify("notifications/cancelled", json!({ "requestId": 2 })).await;
    api.until_status(&call, "CANCELED").await;
}

#[tokio::test]
async fn a_call_that_is_unknown_ends_the_resumed_stream_with_an_error() {
    let (server, api) = started().await;
    let client = Mcp::modern(&api);
    let (_first, event) = begin(&client).await;
    take(&server).await;
    let (call, rest) = event.split_once('.').unwrap();
    let (head, last) = call.split_at(call.len() - 1);
    let unknown = format!("{head}{}.{rest}", if last == "0" { "1" } else { "0" });
    let mut stream = client.resume(&unknown).await;
    let message = stream.next().await.unwrap();
    assert_eq!((&message["id"], &message["error"]["code"]), (&json!(1), &json!(-32602)));
    assert!(stream.next().await.is_none());
    // Another project does not learn of the call.
    let other = Mcp::modern(&api.clone().project("other"));
    let message = other.resume(&event).await.next().await.unwrap();
    assert_eq!(message["error"]["code"], -32602, "{message}");
}

#[tokio::test]
async fn progress_goes_to_the_resumed_stream() {
    let (server, api) = started().await;
    let client = Mcp::legacy(&api).await;
    let params = json!({ "name": "pay.once", "arguments": {}, "_meta": { "progressToken": "p" } });
    let mut first = client.open("tools/call", params).await;
    let event = first.event().await.unwrap()["id"].clone();
    let call = take(&server).await;
    drop(first);
    let mut second = client.resume(&event).await;
    second.event().await.unwrap();
    let progress = json!({ "client_id": "pc_1", "percent": 40 });
    server.post(&format!("/internal/tool_calls/{call}/progress"), progress).await;
    let message = second.until("notifications/progress").await;
    assert_eq!(message["params"]["progressToken"], "p", "{message}");
    succeed(&server, &call).await;
    assert_result(&mut second, &json!(2), &call).await;
}

#[tokio::test]
async fn a_session_is_restored_once_for_concurrent_requests() {
    let (mut server, api) = started().await;
    for _ in 0..5 {
        let client = Mcp::legacy(&api).await;
        server.kill();
        server.start().await;
        let ask = || async { client.ask("tools/list", json!({})).await.status };
        let stream = || async { client.get().send().await.unwrap().status().as_u16() };
        let (a, b, c, d, e) = tokio::join!(ask(), stream(), ask(), ask(), stream());
        assert_eq!([a, b, c, d, e], [200; 5]);
        client.ask("tools/list", json!({})).await.result();
    }
}
