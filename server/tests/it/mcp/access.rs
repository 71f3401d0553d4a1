//! Access: keys, session ownership, allowed origins and hosts, request limits.

use reqwest::Method;
use serde_json::json;

use crate::support::Server;
use crate::support::api::offer;
use crate::support::mcp::Mcp;

#[tokio::test]
async fn once_keys_exist_a_key_is_required_and_sets_the_project() {
    let server = Server::start().await;
    let ada = server.keyed("acme", "ada", "agent", &["*"]).await;
    let anonymous = Mcp::modern(&server.api()).ask("tools/list", json!({})).await;
    assert_eq!(anonymous.status, 401, "{}", anonymous.text);
    let challenge = anonymous.headers.get("www-authenticate").unwrap().to_str().unwrap();
    assert!(challenge.starts_with("Bearer"), "{challenge}");
    let client = Mcp::modern(&ada);
    let result = client.call("calculation.eval", json!({ "expression": "1" })).await.result();
    let id = result["_meta"]["toolcrib/tool_call_id"].as_str().unwrap();
    assert_eq!(ada.call(id).await["agent"], "ada");
}

#[tokio::test]
async fn a_session_is_usable_only_by_its_owner() {
    let server = Server::start().await;
    let ada = server.keyed("acme", "ada", "agent", &["*"]).await;
    let bob = server.keyed("acme", "bob", "agent", &["*"]).await;
    let session = Mcp::legacy(&ada).await;
    session.ask("tools/list", json!({})).await.result();
    let foreign = session.calling_as(&bob);
    assert_eq!(foreign.ask("tools/list", json!({})).await.status, 404);
    let request = bob
        .request(Method::GET, "/mcp")
        .header("accept", "text/event-stream")
        .header("mcp-session-id", foreign.session.as_ref().unwrap());
    assert_eq!(request.send().await.unwrap().status().as_u16(), 404);
    let request = bob
        .request(Method::DELETE, "/mcp")
        .header("mcp-session-id", foreign.session.as_ref().unwrap());
    assert_eq!(request.send().await.unwrap().status().as_u16(), 404);
    let owner = foreign.calling_as(&ada);
    owner.ask("tools/list", json!({})).await.result();
}

#[tokio::test]
async fn foreign_origins_and_hosts_are_rejected() {
    let server = Server::with(|config| {
        config.transports.mcp.allowed_origins = vec!["http://localhost:5173".to_owned()];
    })
    .await;
    let api = server.api();
    let client = Mcp::modern(&api);
    for (name, value) in [("origin", "https://evil.example"), ("host", "evil.example")] {
        let request = client.request("tools/list", json!({})).header(name, value);
        let status = request.send().await.unwrap().status().as_u16();
        assert_eq!(status, 403, "{name}: {value}");
    }
    for (origin, expected) in [
        ("http://localhost:3000".to_owned(), 403),
        ("http://localhost:5173".to_owned(), 200),
        (format!("http://{}", server.address), 200),
    ] {
        let request = client.request("tools/list", json!({})).header("origin", &origin);
        assert_eq!(request.send().await.unwrap().status().as_u16(), expected, "{origin}");
    }
}

#[tokio::test]
async fn with_keys_only_allowed_origins_and_hosts_are_accepted() {
    let server = Server::with(|config| {
        config.transports.mcp.allowed_origins = vec!["https://app.example.com".to_owned()];
        config.transports.mcp.allowed_hosts = vec!["crib.example.com".to_owned()];
    })
    .await;
    let ada = server.keyed("acme", "ada", "agent", &["*"]).await;
    let client = Mcp::modern(&ada);
    let status = async |name: &str, value: &str| {
        let request = client.request("tools/list", json!({})).header(name, value);
        request.send().await.unwrap().status().as_u16()
    };
    assert_eq!(status("origin", "https://app.example.com").await, 200);
    assert_eq!(status("origin", "https://evil.example").await, 403);
    assert_eq!(status("origin", "null").await, 403);
    assert_eq!(status("host", "crib.example.com").await, 200);
    assert_eq!(status("host", "Crib.Example.COM").await, 200);
    assert_eq!(status("host", "evil.example").await, 403);
}

#[tokio::test]
async fn unreadable_requests_are_rejected_and_the_server_survives() {
    let server = Server::with(|config| config.limits.max_body_bytes = 4_096).await;
    let api = server.api();
    let client = Mcp::modern(&api);
    let long =
        json!({ "name": "calculation.eval", "arguments": { "expression": "1".repeat(9_000) } });
    assert_eq!(client.ask("tools/call", long).await.status, 413);
    let deep = format!("{}1{}", "[".repeat(2_000), "]".repeat(2_000));
    for body in ["", "{", "[]", "null", "{\"jsonrpc\":\"2.0\"}", deep.as_str()] {
        let request = api
            .request(Method::POST, "/mcp")
            .header("content-type", "application/json")
            .header("accept", "application/json, text/event-stream")
            .body(body.to_owned());
        let status = request.send().await.unwrap().status();
        assert!(status.is_client_error(), "{body:.20}: {status}");
    }
    client.ask("tools/list", json!({})).await.result();
}

#[tokio::test]
async fn a_legacy_session_survives_a_restart_for_its_own_caller() {
    let server = Server::start().await;
    let ada = server.keyed("acme", "ada", "agent", &["*"]).await;
    let eve = server.keyed("acme", "eve", "agent", &["*"]).await;
    let client = Mcp::legacy(&ada).await;
    let mut other = Mcp::legacy(&ada).await;
    let server = server.restart().await;
    let operator = server.keyed("acme", "op", "admin", &["*"]).await;
    let (ada, eve) = (ada.at(&server.address), eve.at(&server.address));
    let client = client.calling_as(&ada);
    assert!(!client.names().await.is_empty());
    let mut stream = client.session_stream().await;
    operator.register("pc_1", json!([offer("x.y")])).await;
    stream.until("notifications/tools/list_changed").await;
    let client = client.calling_as(&eve);
    assert_eq!(client.ask("tools/list", json!({})).await.status, 404, "it is not eve's");
    other.session = Some("made.up".to_owned());
    assert_eq!(other.calling_as(&ada).ask("tools/list", json!({})).await.status, 404);
}

#[tokio::test]
async fn a_closed_session_gets_404() {
    let server = Server::start().await;
    let client = Mcp::legacy(&server.api()).await;
    assert_eq!(client.close().await, 204);
    assert_eq!(client.ask("tools/list", json!({})).await.status, 404);
    let again = Mcp::legacy(&server.api()).await;
    assert!(!again.names().await.is_empty());
}

#[tokio::test]
async fn a_body_that_is_not_json_is_a_json_rpc_parse_error() {
    let server = Server::start().await;
    let request = server.api().request(Method::POST, "/mcp");
    let request = request.header("content-type", "application/json");
    let answer = request.body("{").send().await.unwrap();
    assert_eq!(answer.status().as_u16(), 400);
    let body: serde_json::Value = answer.json().await.unwrap();
    assert_eq!((&body["error"]["code"], &body["id"]), (&json!(-32700), &json!(null)), "{body}");
}

#[tokio::test]
async fn the_session_limit_does_not_affect_stateless_clients() {
    let server = Server::with(|config| config.transports.mcp.max_sessions = 4).await;
    let ada = server.keyed("acme", "ada", "agent", &["*"]).await;
    let eve = server.keyed("other", "eve", "agent", &["*"]).await;
    let begin = async |api: &crate::support::Api| {
        let params = json!({ "protocolVersion": "2025-11-25", "capabilities": {},
            "clientInfo": { "name": "test", "version": "1" } });
        let mut client = Mcp::modern(api);
        client.revision = crate::support::mcp::LEGACY;
        client.ask("initialize", params).await.status
    };
    assert_eq!((begin(&ada).await, begin(&ada).await), (200, 200));
    assert_eq!(begin(&ada).await, 503, "one project must not use all sessions");
    assert_eq!((begin(&eve).await, begin(&eve).await), (200, 200));
    assert_eq!(begin(&eve).await, 503);
    for api in [&ada, &eve] {
        Mcp::modern(api).ask("tools/list", json!({})).await.result();
    }
}

#[tokio::test]
async fn the_mcp_transport_can_be_disabled() {
    let server = Server::with(|config| config.transports.mcp.enabled = false).await;
    assert_eq!(Mcp::modern(&server.api()).ask("tools/list", json!({})).await.status, 404);
}
