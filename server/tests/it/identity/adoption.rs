//! Turning keys on: a provider that registered without a key goes on with one, and no provider
//! takes the client of another.

use serde_json::{Value, json};

use crate::support::api::{message, offer};
use crate::support::ws::Ws;
use crate::support::{Api, Server, until};

const POLL: &str = "/internal/ingress/poll?client_id=c1&wait_ms=0";

async fn adoptions(admin: &Api) -> Vec<Value> {
    let log = admin.get("/v1/audit").await.is(200);
    let entries = log["audit"].as_array().unwrap().iter();
    entries.filter(|entry| entry["action"] == "client.adopted").cloned().collect()
}

/// A way in which a provider uses its client.
#[derive(Debug, Clone, Copy)]
enum Use {
    Register,
    Poll,
    Sse,
    WebSocket,
    Submit,
}

async fn use_client(api: &Api, how: Use, call_id: &str) {
    match how {
        Use::Register => api.register("c1", json!([offer("a.tool")])).await,
        Use::Poll => drop(api.get(POLL).await.is(200)),
        Use::Sse => drop(api.follow("/internal/ingress/sse?client_id=c1", None).await),
        Use::WebSocket => drop(Ws::hello(api, "c1", json!({})).await),
        Use::Submit => {
            let body = json!({ "status": "SUCCEEDED", "result": 1, "client_id": "c1" });
            api.submit(call_id, body).await.is(200);
        }
    }
}

#[tokio::test]
async fn a_provider_key_adopts_a_client_that_registered_without_a_key() {
    for how in [Use::Register, Use::Poll, Use::Sse, Use::WebSocket, Use::Submit] {
        let server = Server::start().await;
        server.api().register("c1", json!([offer("a.tool")])).await;
        let id = server.api().invoke("a.tool", json!({})).await;
        let admin = server.keyed("default", "boss", "admin", &[]).await;
        let provider = server.keyed("default", "desk", "provider", &[]).await;
        let other = server.keyed("default", "other", "provider", &[]).await;
        assert_eq!(adoptions(&admin).await, Vec::<Value>::new(), "{how:?}");
        use_client(&provider, how, &id).await;
        let adopted = adoptions(&admin).await;
        assert_eq!(adopted.len(), 1, "{how:?}: {adopted:?}");
        let entry = &adopted[0];
        assert_eq!((&entry["agent"], &entry["subject"]), (&json!("desk"), &json!("c1")));
        assert_eq!(entry["reason"], "registered before the server had keys");
        // From now on it is the client of this key.
        let refused = other.get(POLL).await.refused(403, "PERMISSION_DENIED");
        assert!(message(&refused).contains("belongs to another key"), "{refused}");
        let server = server.restart().await;
        let provider = server.with_key(provider.secret().unwrap());
        let other = server.with_key(other.secret().unwrap());
        provider.get(POLL).await.is(200);
        other.get(POLL).await.refused(403, "PERMISSION_DENIED");
        let admin = server.with_key(admin.secret().unwrap());
        assert_eq!(adoptions(&admin).await.len(), 1, "{how:?}");
    }
}

#[tokio::test]
async fn the_client_of_another_provider_is_never_adopted() {
    let server = Server::start().await;
    server.api().register("c1", json!([offer("a.tool")])).await;
    // A key for the agent name of callers without a key: the client is its own.
    let owner = server.keyed("default", "default", "provider", &[]).await;
    let other = server.keyed("default", "other", "provider", &[]).await;
    let admin = server.keyed("default", "boss", "admin", &[]).await;
    other.get(POLL).await.refused(403, "PERMISSION_DENIED");
    let list = admin.get("/v1/keys").await.is(200);
    let key = list["keys"].as_array().unwrap().iter().find(|key| key["agent"] == "default");
    let id = key.unwrap()["id"].as_str().unwrap().to_owned();
    owner.get(POLL).await.is(200);
    admin.delete(&format!("/v1/keys/{id}")).await;
    until("the key to be revoked", || async {
        (owner.get(POLL).await.status == 401).then_some(())
    })
    .await;
    other.get(POLL).await.refused(403, "PERMISSION_DENIED");
    // Nor is one that registered with a key.
    other.register("c2", json!([offer("b.tool")])).await;
    let third = server.keyed("default", "third", "provider", &[]).await;
    let path = "/internal/ingress/poll?client_id=c2&wait_ms=0";
    third.get(path).await.refused(403, "PERMISSION_DENIED");
    // Nor does a key of another project or of another role adopt one.
    let stranger = server.keyed("elsewhere", "desk", "provider", &[]).await;
    stranger.get(POLL).await.refused(404, "NOT_FOUND");
    assert_eq!(adoptions(&admin).await, Vec::<Value>::new());
}
