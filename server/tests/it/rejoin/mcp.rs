//! MCP clients that send `tools/call` again after a broken connection, instead of resuming its
//! stream.

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::{count_calls, send_request_with, start_bank, text};
use crate::support::api::Api;
use crate::support::mcp::{LEGACY, Mcp};

fn call() -> Value {
    json!({ "name": "bank.pay", "arguments": { "amount": 5 } })
}

/// Returns the headers of requests of this client, each with its line break.
fn headers(client: &Mcp) -> String {
    format!(
        "accept: application/json, text/event-stream\r\nmcp-protocol-version: {LEGACY}\r\n\
         mcp-session-id: {}\r\n",
        client.session.as_deref().unwrap()
    )
}

/// Calls the tool over a connection of its own. Returns the connection and the id of the event with
/// which the stream begins.
async fn begin(api: &Api, client: &Mcp) -> (TcpStream, String) {
    let message = json!({ "jsonrpc": "2.0", "id": 77, "method": "tools/call", "params": call() });
    let mut connection = send_request_with(&api.address, "/mcp", &headers(client), &message).await;
    let received = read_until(&mut connection, "retry:").await;
    let id = received.split("\nid: ").nth(1).and_then(|rest| rest.lines().next());
    (connection, id.unwrap().to_owned())
}

/// Continues a stream over a connection of its own.
async fn resume(api: &Api, client: &Mcp, event: &str) -> TcpStream {
    let mut connection = TcpStream::connect(&api.address).await.unwrap();
    let head = format!(
        "GET /mcp HTTP/1.1\r\nhost: {}\r\n{}last-event-id: {event}\r\n\r\n",
        api.address,
        headers(client)
    );
    connection.write_all(head.as_bytes()).await.unwrap();
    read_until(&mut connection, "retry:").await;
    connection
}

async fn read_until(connection: &mut TcpStream, end: &str) -> String {
    let mut received = String::new();
    while !received.contains(end) {
        let mut part = vec![0; 4_096];
        let length = connection.read(&mut part).await.unwrap();
        assert!(length > 0, "the connection ended: {received}");
        received.push_str(std::str::from_utf8(&part[..length]).unwrap());
    }
    received
}

/// Repeats the call and executes it. Asserts that the repetition joins the call with this id.
async fn assert_joins(api: &Api, client: Mcp, id: &str) {
    let again = tokio::spawn(async move { client.ask("tools/call", call()).await });
    api.succeed(id, json!({ "paid": 5 })).await;
    let result = again.await.unwrap().result();
    assert_eq!(result["_meta"]["toolcrib/tool_call_id"], id, "{result}");
    assert_eq!(result["_meta"]["toolcrib/joined"], true, "{result}");
    assert_eq!(result["structuredContent"], json!({ "paid": 5 }), "{result}");
    assert_eq!(count_calls(api).await, 1);
}

#[tokio::test]
async fn a_call_of_a_session_is_joined_while_it_is_executed() {
    for is_other_session in [false, true] {
        let (_server, api) = start_bank().await;
        let client = Mcp::legacy(&api).await;
        let (connection, _) = begin(&api, &client).await;
        let id = text(&api.poll("bank").await, "tool_call_id").to_owned();
        drop(connection);
        let client = if is_other_session { Mcp::legacy(&api).await } else { client };
        assert_joins(&api, client, &id).await;
    }
}

#[tokio::test]
async fn a_call_is_joined_also_if_its_resumed_stream_breaks() {
    let (_server, api) = start_bank().await;
    let client = Mcp::legacy(&api).await;
    let (connection, event) = begin(&api, &client).await;
    let id = text(&api.poll("bank").await, "tool_call_id").to_owned();
    drop(connection);
    let resumed = resume(&api, &client, &event).await;
    drop(resumed);
    assert_joins(&api, client, &id).await;
}

#[tokio::test]
async fn no_request_joins_a_call_whose_client_resumed_its_stream() {
    let (_server, api) = start_bank().await;
    let client = Mcp::legacy(&api).await;
    let (connection, event) = begin(&api, &client).await;
    let first = text(&api.poll("bank").await, "tool_call_id").to_owned();
    drop(connection);
    let mut resumed = resume(&api, &client, &event).await;
    // The client waits on its resumed stream, so an equal request is another call.
    let other = tokio::spawn(async move { client.ask("tools/call", call()).await });
    let second = text(&api.poll("bank").await, "tool_call_id").to_owned();
    assert_ne!(first, second);
    api.succeed(&first, json!({ "paid": 1 })).await;
    let answer = read_until(&mut resumed, "structuredContent").await;
    assert!(answer.contains(&first) && answer.contains("\"id\":77"), "{answer}");
    api.succeed(&second, json!({ "paid": 2 })).await;
    let result = other.await.unwrap().result();
    assert_eq!(result["_meta"]["toolcrib/tool_call_id"], second.as_str(), "{result}");
    drop(resumed);
    // Both answers are delivered.
    let client = Mcp::legacy(&api).await;
    let third = tokio::spawn(async move { client.ask("tools/call", call()).await });
    let id = text(&api.poll("bank").await, "tool_call_id").to_owned();
    api.succeed(&id, json!({ "paid": 3 })).await;
    assert_eq!(third.await.unwrap().result()["_meta"].get("toolcrib/joined"), None);
    assert_eq!(count_calls(&api).await, 3);
}
