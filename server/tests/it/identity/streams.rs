//! Streams and waits end when their credentials are revoked or expire, also while nothing happens
//! on them.

use serde_json::{Value, json};

use super::credentials::{bearer, create};
use crate::support::api::offer;
use crate::support::mcp::Mcp;
use crate::support::ws::Ws;
use crate::support::{Api, Server};

/// Opens every kind of stream and wait of a caller, ends its credentials, and asserts that all of
/// them end.
async fn assert_all_end<F: Future<Output = ()>>(
    (api, other): (Api, &Api),
    end_credentials: impl FnOnce() -> F,
) {
    let mut socket = Ws::offering(&api, "c1", json!([offer("a.tool")])).await;
    let mut work = api.follow("/internal/ingress/sse?client_id=c1", None).await;
    let mut events = api.follow("/v1/events", None).await;
    let mut run_events = api.follow("/v1/runs/run_1/events", None).await;
    let client = Mcp::legacy(&api).await;
    let mut session = client.session_stream().await;
    let call = api.invoke("a.tool", json!({})).await;
    let mut call_events = api.follow(&format!("/v1/tool_calls/{call}/events"), None).await;
    // A revoked key ends its queued calls at once. This call runs, so that the wait has to end.
    let mut worker = Ws::offering(other, "c2", json!([offer("a.running_tool")])).await;
    let running = api.invoke("a.running_tool", json!({})).await;
    worker.take().await;
    worker.expect_no_message().await;
    let waiting = {
        let (api, path) = (api.clone(), format!("/v1/tool_calls/{running}?wait_ms=50000"));
        tokio::spawn(async move { api.get(&path).await })
    };
    let polling = {
        let (api, path) = (api.clone(), "/internal/ingress/poll?client_id=c1&wait_ms=50000");
        tokio::spawn(async move { api.get(path).await })
    };
    end_credentials().await;
    while socket.next().await.is_some() {}
    for stream in [&mut work, &mut events, &mut run_events, &mut call_events] {
        stream.rest().await;
    }
    while session.next().await.is_some() {}
    waiting.await.unwrap().refused(401, "UNAUTHENTICATED");
    polling.await.unwrap();
}

fn key_body() -> Value {
    json!({ "agent": "ada", "roles": ["agent", "provider"], "allow": ["*"] })
}

#[tokio::test]
async fn revoking_a_key_ends_idle_streams_and_waits() {
    let server = Server::with(|config| config.ingress.heartbeat_ms = 500).await;
    let admin = server.keyed("default", "boss", "admin", &[]).await;
    let created = create(&admin, key_body()).await;
    let path = format!("/v1/keys/{}", created["id"].as_str().unwrap());
    assert_all_end((bearer(&server, &created), &admin), || async {
        assert_eq!(admin.delete(&path).await.status, 204);
    })
    .await;
}

#[tokio::test]
async fn an_expired_session_token_ends_idle_streams_and_waits() {
    let server = Server::with(|config| config.ingress.heartbeat_ms = 500).await;
    let admin = server.keyed("default", "boss", "admin", &[]).await;
    let key = bearer(&server, &create(&admin, key_body()).await);
    let token = key.post("/v1/session_tokens", json!({ "ttl_s": 5 })).await.is(201);
    let api = server.with_key(token["token"].as_str().unwrap());
    assert_all_end((api, &admin), || async {}).await;
}

#[tokio::test]
async fn streams_of_a_rotated_key_end_with_its_overlap_and_not_before() {
    let server = Server::start().await;
    let admin = server.keyed("default", "boss", "admin", &[]).await;
    let created = create(&admin, key_body()).await;
    let mut events = bearer(&server, &created).follow("/v1/events", None).await;
    let path = format!("/v1/keys/{}/rotate", created["id"].as_str().unwrap());
    let rotated = admin.post(&path, json!({ "overlap_s": 3 })).await.is(201);
    let new = bearer(&server, &rotated);
    new.invoke("calculation.eval", json!({ "expression": "1" })).await;
    events.event().await;
    events.rest().await;
    new.get("/v1/tools").await.is(200);
}
