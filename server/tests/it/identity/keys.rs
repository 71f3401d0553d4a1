//! Keys: created, shown once, stored as a hash, revoked.

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::support::api::{message, offer};
use crate::support::ws::Ws;
use crate::support::{Api, Server, until};

/// Returns every byte that the server has written to disk.
fn on_disk(server: &Server) -> Vec<u8> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(&server.config.data_dir).unwrap() {
        all.extend(std::fs::read(entry.unwrap().path()).unwrap());
    }
    all
}

fn contains(bytes: &[u8], text: &str) -> bool {
    bytes.windows(text.len()).any(|window| window == text.as_bytes())
}

async fn create(api: &Api, body: Value) -> Value {
    api.post("/v1/keys", body).await.is(201)
}

#[tokio::test]
async fn the_secret_is_shown_once_and_never_stored() {
    let server = Server::start().await;
    let created = create(&server.operator(), json!({ "agent": "boss", "role": "admin" })).await;
    let secret = created["key"].as_str().unwrap();
    assert!(secret.starts_with("tck_") && secret.len() >= 40, "{secret}");
    assert_eq!((&created["project"], &created["role"]), (&json!("default"), &json!("admin")));
    assert!(created["created_at"].is_u64());
    let admin = server.with_key(secret);
    let list = admin.get("/v1/keys").await;
    assert!(!list.text.contains(secret) && !list.text.contains(&secret[4..]));
    let listed = &list.is(200)["keys"][0];
    assert_eq!((&listed["id"], &listed["agent"]), (&created["id"], &json!("boss")));
    assert_eq!(listed["revoked_at_ms"], Value::Null);
    assert!(listed.get("key").is_none() && listed.get("digest").is_none(), "{listed}");
    let audit = admin.get("/v1/audit").await;
    assert!(!audit.text.contains(&secret[4..]));
    let disk = on_disk(&server);
    assert!(contains(&disk, created["id"].as_str().unwrap()), "the key itself is there");
    assert!(!contains(&disk, secret) && !contains(&disk, &secret[4..]), "its secret is not");
    let digest = toolcrib::domain::id::hex(&Sha256::digest(secret.as_bytes()));
    assert!(contains(&disk, &digest), "its hash is");
}

#[tokio::test]
async fn after_the_first_key_every_caller_needs_one() {
    let server = Server::start().await;
    let anonymous = server.api();
    anonymous.get("/v1/tools").await.is(200);
    let created = create(&server.operator(), json!({ "agent": "boss", "role": "admin" })).await;
    let refused = anonymous.get("/v1/tools").await;
    assert_eq!(refused.header("www-authenticate"), Some("Bearer"));
    let error = refused.refused(401, "UNAUTHENTICATED");
    assert!(message(&error).contains("Authorization: Bearer"), "{error}");
    let wrong = server.with_key("tck_wrong").get("/v1/tools").await;
    wrong.refused(401, "UNAUTHENTICATED");
    let basic = anonymous.request(reqwest::Method::GET, "/v1/tools").basic_auth("boss", Some("x"));
    anonymous.send(basic).await.refused(401, "UNAUTHENTICATED");
    server.with_key(created["key"].as_str().unwrap()).get("/v1/tools").await.is(200);
}

#[tokio::test]
async fn a_revoked_key_is_rejected_immediately_and_after_a_restart() {
    let server = Server::start().await;
    let admin = server.keyed("default", "boss", "admin", &[]).await;
    let created = create(&admin, json!({ "agent": "ada", "allow": ["*"] })).await;
    let ada = server.with_key(created["key"].as_str().unwrap());
    ada.get("/v1/tools").await.is(200);
    let path = format!("/v1/keys/{}", created["id"].as_str().unwrap());
    assert_eq!(admin.delete(&path).await.status, 204);
    ada.get("/v1/tools").await.refused(401, "UNAUTHENTICATED");
    let listed = admin.get("/v1/keys").await.is(200);
    let revoked = listed["keys"].as_array().unwrap().iter().find(|key| key["id"] == created["id"]);
    assert!(revoked.unwrap()["revoked_at_ms"].is_u64());
    admin.delete("/v1/keys/key_nobody").await.refused(404, "NOT_FOUND");
    let secret = ada.secret().unwrap().to_owned();
    let server = server.restart().await;
    server.with_key(&secret).get("/v1/tools").await.refused(401, "UNAUTHENTICATED");
}

#[tokio::test]
async fn revoking_the_last_key_does_not_allow_anonymous_access() {
    let server = Server::start().await;
    let created = create(&server.operator(), json!({ "agent": "boss", "role": "admin" })).await;
    let admin = server.with_key(created["key"].as_str().unwrap());
    let path = format!("/v1/keys/{}", created["id"].as_str().unwrap());
    assert_eq!(admin.delete(&path).await.status, 204);
    server.api().get("/v1/keys").await.refused(401, "UNAUTHENTICATED");
    let server = server.restart().await;
    server.api().get("/v1/tools").await.refused(401, "UNAUTHENTICATED");
}

#[tokio::test]
async fn a_new_key_has_the_configured_default_rules() {
    let server = Server::with(|config| {
        config.auth.default_allow = vec!["calculation.*".to_owned()];
    })
    .await;
    let admin = server.keyed("default", "boss", "admin", &[]).await;
    let plain = create(&admin, json!({ "agent": "ada" })).await;
    let more = create(&admin, json!({ "agent": "bob", "allow": ["weather.query"] })).await;
    let provider = create(&admin, json!({ "agent": "tools", "role": "provider" })).await;
    let tools = |created: &Value| {
        let api = server.with_key(created["key"].as_str().unwrap());
        async move {
            let list = api.get("/v1/tools").await.is(200);
            let tools = list["tools"].as_array().unwrap().clone();
            tools.into_iter().map(|tool| tool["name"].to_string()).collect::<Vec<_>>()
        }
    };
    assert_eq!(tools(&plain).await, ["\"calculation.eval\""]);
    assert_eq!(tools(&more).await, ["\"calculation.eval\"", "\"weather.query\""]);
    assert_eq!(tools(&provider).await, Vec::<String>::new());
}

#[tokio::test]
async fn an_invalid_key_request_is_rejected() {
    let server = Server::start().await;
    let admin = server.keyed("default", "boss", "admin", &[]).await;
    for body in [
        json!({ "agent": "ada", "role": "king" }),
        json!({ "agent": "" }),
        json!({ "agent": "two words" }),
        json!({ "agent": "ada", "allow": ["no spaces allowed"] }),
    ] {
        admin.post("/v1/keys", body).await.refused(422, "VALIDATION_ERROR");
    }
    admin.post("/v1/keys", json!({})).await.refused(400, "BAD_REQUEST");
    let elsewhere = json!({ "agent": "ada", "project": "other" });
    admin.post("/v1/keys", elsewhere).await.refused(403, "PERMISSION_DENIED");
    assert_eq!(admin.get("/v1/keys").await.is(200)["keys"].as_array().unwrap().len(), 1);
    let rules = admin.get("/v1/rules").await.is(200);
    assert_eq!(rules["rules"], json!([]), "a refused key leaves no rule behind");
}

#[tokio::test]
async fn key_changes_are_audited() {
    let server = Server::start().await;
    let admin = server.keyed("default", "boss", "admin", &[]).await;
    let created = create(&admin, json!({ "agent": "ada", "allow": ["a.*"] })).await;
    admin.delete(&format!("/v1/keys/{}", created["id"].as_str().unwrap())).await;
    let audit = admin.audit_entries().await;
    let entries: Vec<(&str, &str)> = audit[..3]
        .iter()
        .map(|entry| {
            assert_eq!(entry["agent"], "boss");
            assert!(entry["at_ms"].is_u64());
            (entry["action"].as_str().unwrap(), entry["subject"].as_str().unwrap())
        })
        .collect();
    let id = created["id"].as_str().unwrap();
    assert_eq!(entries, [("key.revoked", id), ("key.created", id), ("rule.set", "a.*")]);
    let one = admin.get("/v1/audit?limit=1").await.is(200);
    assert_eq!(one["audit"].as_array().unwrap().len(), 1, "newest first");
}

/// Creates a key. Returns a client with the key, and the path that revokes it.
async fn create_revocable_key(server: &Server, admin: &Api, body: Value) -> (Api, String) {
    let created = create(admin, body).await;
    let path = format!("/v1/keys/{}", created["id"].as_str().unwrap());
    (server.with_key(created["key"].as_str().unwrap()), path)
}

#[tokio::test]
async fn revoking_a_key_closes_its_open_connections() {
    let server = Server::start().await;
    let admin = server.keyed("default", "boss", "admin", &[]).await;
    let key_request = json!({ "agent": "tools", "role": "provider" });
    let (provider, path) = create_revocable_key(&server, &admin, key_request).await;
    let tools = json!([offer("a.tool")]);
    let mut revoked = Ws::offering(&provider, "c1", tools.clone()).await;
    let mut silent = Ws::offering(&provider, "c2", tools.clone()).await;
    let mut work = provider.follow("/internal/ingress/sse?client_id=c1", None).await;
    let mut events = provider.follow("/v1/events", None).await;
    let polling = {
        let (provider, poll) = (provider.clone(), "/internal/ingress/poll?client_id=c2");
        tokio::spawn(async move { provider.get(&format!("{poll}&wait_ms=30000")).await })
    };
    until("all to be connected", || async {
        (server.engine.clients().client_connection_count() == 4).then_some(())
    })
    .await;
    assert_eq!(admin.delete(&path).await.status, 204);
    silent.send(json!({ "type": "ping" })).await;
    assert_eq!(silent.next().await, None, "its messages are ignored");
    admin.register("c3", tools).await;
    let mut ids = Vec::new();
    for _ in 0..4 {
        ids.push(json!(admin.invoke("a.tool", json!({ "secret": 1 })).await));
    }
    // Calls that were assigned to the revoked clients go to the client with a valid key.
    let mut other = Ws::hello(&admin, "c3", json!({})).await;
    let mut delivered = Vec::new();
    for _ in 0..4 {
        delivered.push(other.expect_message("tool_request").await["tool_call_id"].clone());
    }
    delivered.sort_by_key(Value::to_string);
    assert_eq!(delivered, ids);
    assert_eq!(revoked.next().await, None);
    assert_eq!(work.next().await, None);
    assert_eq!(events.next().await, None);
    polling.await.unwrap().refused(401, "UNAUTHENTICATED");
}
