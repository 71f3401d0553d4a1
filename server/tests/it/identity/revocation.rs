//! Rules that are withdrawn, and keys that are revoked, while calls are queued or held: those calls
//! end, running ones do not.

use serde_json::{Value, json};

use crate::support::api::{offer, offer_with};
use crate::support::database::Database;
use crate::support::process;
use crate::support::{Api, Server, until};

#[track_caller]
fn assert_denied(call: &Value) {
    assert_eq!(call["status"], "FAILED", "{call}");
    assert_eq!(call["error"]["code"], "PERMISSION_DENIED", "{call}");
}

async fn revoke(admin: &Api) {
    admin.delete("/v1/rules?agent=ada&pattern=x.*").await.is(204);
}

#[tokio::test]
async fn waiting_calls_end_when_their_rule_is_removed_and_running_ones_finish() {
    let server = Server::start().await;
    let admin = server.keyed("p", "boss", "admin", &[]).await;
    let provider = server.keyed("p", "prov", "provider", &[]).await;
    let ada = server.keyed("p", "ada", "agent", &["x.*"]).await;
    let bob = server.keyed("p", "bob", "agent", &["x.*"]).await;
    let limited = offer_with("x.one", json!({ "policy": { "max_parallel": 1 } }));
    provider.register("pc_1", json!([limited, offer("x.two")])).await;
    let running = ada.invoke("x.one", json!({})).await;
    assert_eq!(provider.poll("pc_1").await["tool_call_id"], running.as_str());
    let queued = ada.invoke("x.one", json!({})).await;
    let undelivered = ada.invoke("x.two", json!({})).await;
    let of_another = bob.invoke("x.two", json!({})).await;
    let by_admin = admin.invoke("x.two", json!({})).await;
    assert_eq!(ada.call(&running).await["status"], "RUNNING");
    revoke(&admin).await;
    for id in [&queued, &undelivered] {
        assert_denied(&admin.finished(id).await);
    }
    assert_eq!(admin.call(&running).await["status"], "RUNNING");
    provider.succeed(&running, json!(1)).await;
    assert_eq!(admin.finished(&running).await["status"], "SUCCEEDED");
    for id in [&of_another, &by_admin] {
        assert_eq!(admin.call(id).await["status"], "PENDING");
    }
    // The client receives the work of the others, and nothing of what was denied.
    let received = [provider.poll("pc_1").await, provider.poll("pc_1").await];
    let mut received = received.map(|work| work["tool_call_id"].as_str().unwrap().to_owned());
    let mut expected = [of_another, by_admin];
    received.sort();
    expected.sort();
    assert_eq!(received, expected);
    let audit = admin.get("/v1/audit").await.is(200);
    let denied = audit["audit"].as_array().unwrap().iter();
    assert_eq!(denied.filter(|entry| entry["action"] == "call.denied").count(), 2, "{audit}");
}

#[tokio::test]
async fn a_call_that_waits_for_its_retry_ends_too() {
    let server = Server::start().await;
    let admin = server.keyed("p", "boss", "admin", &[]).await;
    let provider = server.keyed("p", "prov", "provider", &[]).await;
    let ada = server.keyed("p", "ada", "agent", &["x.*"]).await;
    let backoff = json!({ "initial_ms": 20_000, "max_ms": 20_000 });
    let patient = json!({ "effect": "read", "policy": { "max_retries": 3, "backoff": backoff } });
    provider.register("pc_1", json!([offer_with("x.one", patient)])).await;
    let id = ada.invoke("x.one", json!({})).await;
    provider.poll("pc_1").await;
    let error = json!({ "code": "RUNTIME_ERROR", "message": "later", "retryable": true });
    provider.fail(&id, error).await;
    until("the retry", || async { (ada.call(&id).await["hold"] == "retry").then_some(()) }).await;
    revoke(&admin).await;
    assert_denied(&admin.finished(&id).await);
}

#[tokio::test]
async fn a_rule_removed_while_the_server_is_down_ends_the_calls_at_its_start() {
    let mut server = process::Server::new();
    let create = |agent: &str, role: &str| {
        let words = ["keys", "create", "--agent", agent, "--role", role, "--json"];
        let output = server.command(&words).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        process::text(&serde_json::from_slice(&output.stdout).unwrap(), "key")
    };
    let (admin, ada) = (create("boss", "admin"), create("ada", "agent"));
    let allowed = server.command(&["allow", "--agent", "ada", "x.*"]).output().unwrap();
    assert!(allowed.status.success(), "{}", String::from_utf8_lossy(&allowed.stderr));
    server.start().await;
    let api = Api::new(&format!("127.0.0.1:{}", server.port));
    let (admin, ada) = (api.clone().key(&admin), api.key(&ada));
    admin.register("pc_1", json!([offer("x.one")])).await;
    let id = ada.invoke("x.one", json!({})).await;
    server.kill();
    let denied = server.command(&["deny", "--agent", "ada", "x.one"]).output().unwrap();
    assert!(denied.status.success(), "{}", String::from_utf8_lossy(&denied.stderr));
    server.start().await;
    assert_denied(&admin.finished(&id).await);
    let work = admin.get("/internal/ingress/poll?client_id=pc_1&wait_ms=1").await.is(200);
    assert_eq!(work["requests"], json!([]));
}

/// Creates a key over HTTP. Returns its id, and a caller with it.
async fn create_key(server: &Server, admin: &Api, body: Value) -> (String, Api) {
    let created = admin.post("/v1/keys", body).await.is(201);
    let text = |field: &str| created[field].as_str().unwrap().to_owned();
    (text("id"), server.with_key(&text("key")))
}

#[tokio::test]
async fn waiting_calls_end_when_their_key_is_revoked_and_running_ones_finish() {
    let server = Server::start().await;
    let admin = server.keyed("p", "boss", "admin", &[]).await;
    let provider = server.keyed("p", "prov", "provider", &[]).await;
    let key = json!({ "agent": "ada", "allow": ["x.*"] });
    let (stolen, thief) = create_key(&server, &admin, key.clone()).await;
    let (_, ada) = create_key(&server, &admin, key).await;
    let (second_admin, deputy) =
        create_key(&server, &admin, json!({ "agent": "boss2", "role": "admin" })).await;
    let limited = offer_with("x.one", json!({ "policy": { "max_parallel": 1 } }));
    provider.register("pc_1", json!([limited, offer("x.two")])).await;
    let running = thief.invoke("x.one", json!({})).await;
    assert_eq!(provider.poll("pc_1").await["tool_call_id"], running.as_str());
    let queued = thief.invoke("x.one", json!({})).await;
    let undelivered = thief.invoke("x.two", json!({})).await;
    let by_deputy = deputy.invoke("x.two", json!({})).await;
    // The same agent with another key.
    let of_the_agent = ada.invoke("x.two", json!({})).await;
    let waiting = tokio::spawn({
        let (admin, id) = (admin.clone(), undelivered.clone());
        async move { admin.finished(&id).await }
    });
    admin.delete(&format!("/v1/keys/{stolen}")).await.is(204);
    admin.delete(&format!("/v1/keys/{second_admin}")).await.is(204);
    assert_denied(&waiting.await.unwrap());
    for id in [&queued, &undelivered, &by_deputy] {
        let call = admin.finished(id).await;
        assert_denied(&call);
        let message = call["error"]["message"].as_str().unwrap();
        assert!(message.contains("was revoked"), "{message}");
    }
    assert_eq!(admin.call(&running).await["status"], "RUNNING");
    assert_eq!(admin.call(&of_the_agent).await["status"], "PENDING");
    provider.succeed(&running, json!(1)).await;
    assert_eq!(provider.poll("pc_1").await["tool_call_id"], of_the_agent.as_str());
    let work = provider.get("/internal/ingress/poll?client_id=pc_1&wait_ms=1").await.is(200);
    assert_eq!(work["requests"], json!([]), "the client receives nothing of a revoked key");
    let audit = admin.get("/v1/audit").await.is(200);
    let denied = audit["audit"].as_array().unwrap().iter();
    assert_eq!(denied.filter(|entry| entry["action"] == "call.denied").count(), 3, "{audit}");
}

/// A key that is revoked while the server is down, or by a command next to it, ends its calls.
async fn check_revoked_on_the_command_line(mut server: process::Server) {
    let create = |agent: &str, role: &str| {
        let words = ["keys", "create", "--agent", agent, "--role", role, "--json"];
        let output = server.command(&words).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let created: Value = serde_json::from_slice(&output.stdout).unwrap();
        (process::text(&created, "id"), process::text(&created, "key"))
    };
    let (admin, down, running) =
        (create("boss", "admin"), create("a", "admin"), create("b", "admin"));
    server.start().await;
    let api = Api::new(&format!("127.0.0.1:{}", server.port));
    let (admin, a, b) = (api.clone().key(&admin.1), api.clone().key(&down.1), api.key(&running.1));
    admin.register("pc_1", json!([offer("x.one")])).await;
    let (of_a, of_b) = (a.invoke("x.one", json!({})).await, b.invoke("x.one", json!({})).await);
    server.kill();
    let revoke = |id: &str| {
        let revoked = server.command(&["keys", "revoke", id]).output().unwrap();
        assert!(revoked.status.success(), "{}", String::from_utf8_lossy(&revoked.stderr));
    };
    revoke(&down.0);
    server.start().await;
    assert_denied(&admin.finished(&of_a).await);
    assert_eq!(admin.call(&of_b).await["status"], "PENDING");
    let revoke = |id: &str| {
        let revoked = server.command(&["keys", "revoke", id]).output().unwrap();
        assert!(revoked.status.success(), "{}", String::from_utf8_lossy(&revoked.stderr));
    };
    revoke(&running.0);
    assert_denied(&admin.finished(&of_b).await);
    assert!(server.stop().await.success());
}

#[tokio::test]
async fn a_key_revoked_while_the_server_is_down_ends_its_calls_at_the_start() {
    check_revoked_on_the_command_line(process::Server::new()).await;
}

#[tokio::test]
async fn a_key_revoked_while_the_server_is_down_ends_its_calls_with_postgresql() {
    let Some(database) = Database::new().await else { return };
    check_revoked_on_the_command_line(process::Server::new().with("STORE__URL", &database.url))
        .await;
    database.drop().await;
}
