//! Session tokens: they narrow a key, end with it, and survive a crash.

use serde_json::{Value, json};

use super::credentials::{bearer, create};
use crate::support::api::{message, offer};
use crate::support::mcp::Mcp;
use crate::support::process;
use crate::support::{Api, Server, until};

async fn mint(api: &Api, body: Value) -> Value {
    api.post("/v1/session_tokens", body).await.is(201)
}

fn holder(server: &Server, token: &Value) -> Api {
    server.with_key(token["token"].as_str().unwrap())
}

fn revocation_path(token: &Value) -> String {
    format!("/v1/session_tokens/{}", token["id"].as_str().unwrap())
}

#[tokio::test]
async fn a_token_calls_tools_as_its_agent_on_every_transport() {
    let server = Server::start().await;
    let admin = server.keyed("default", "boss", "admin", &[]).await;
    let key = bearer(&server, &create(&admin, json!({ "agent": "ada", "allow": ["*"] })).await);
    let token = mint(&key, json!({ "ttl_s": 600 })).await;
    let secret = token["token"].as_str().unwrap();
    assert!(secret.starts_with("tcs_") && token["id"].as_str().unwrap().starts_with("st_"));
    let api = holder(&server, &token);
    let id = api.invoke("calculation.eval", json!({ "expression": "6*7" })).await;
    assert_eq!(api.finished(&id).await["agent"], "ada");
    let client = Mcp::modern(&api);
    client.call("calculation.eval", json!({ "expression": "1" })).await.result();
    let chat = json!({ "model": "demo", "messages": [{ "role": "user", "content": "6 * 7?" }] });
    api.post("/v1/chat/completions", chat).await.is(200);
    let list = key.get("/v1/session_tokens").await;
    assert!(!list.text.contains(secret), "a list has no secrets");
    assert_eq!(list.is(200)["session_tokens"][0]["id"], token["id"]);
}

#[tokio::test]
async fn a_token_can_only_narrow_its_key() {
    let server = Server::start().await;
    let admin = server.keyed("default", "boss", "admin", &[]).await;
    let body = json!({ "agent": "ada", "allow": ["*"], "user": "bob", "environment": "staging",
        "tools": ["calculation.*", "weather.query"] });
    let key = bearer(&server, &create(&admin, body).await);
    for (body, part) in [
        (json!({ "user": "eve" }), "may not assert a user"),
        (json!({ "session": "s1" }), "may not assert a session"),
        (json!({ "environment": "production" }), "environment"),
        (json!({ "tools": ["*"] }), "not within"),
        (json!({ "tools": ["weather.*"] }), "not within"),
    ] {
        let mut body = body;
        body["ttl_s"] = 60.into();
        let error = key.post("/v1/session_tokens", body.clone()).await;
        let error = error.refused(403, "PERMISSION_DENIED");
        assert!(message(&error).contains(part), "{body}: {error}");
    }
    for body in [
        json!({ "ttl_s": 0 }),
        json!({ "ttl_s": 99_999_999 }),
        json!({ "ttl_s": 60, "tools": [] }),
        json!({ "ttl_s": 60, "user": "two words" }),
        json!({ "ttl_s": 60, "sessions": "x" }),
    ] {
        key.post("/v1/session_tokens", body).await.refused(422, "VALIDATION_ERROR");
    }
    let narrow = json!({ "ttl_s": 60, "user": "bob", "environment": "staging",
        "tools": ["calculation.eval"] });
    let token = mint(&key, narrow).await;
    assert_eq!((&token["user"], &token["tools"]), (&json!("bob"), &json!(["calculation.eval"])));
    let api = holder(&server, &token);
    let error = api.post("/v1/session_tokens", json!({ "ttl_s": 1 })).await;
    error.refused(403, "PERMISSION_DENIED");
    let user = api.clone().user("bob").get("/v1/tools").await;
    user.refused(403, "PERMISSION_DENIED");
    let gateway = json!({ "agent": "gw", "allow": ["*"], "may_assert": ["user", "session"] });
    let gateway = bearer(&server, &create(&admin, gateway).await);
    let token = mint(&gateway, json!({ "ttl_s": 60, "user": "eve", "session": "s1" })).await;
    assert_eq!((&token["user"], &token["session"]), (&json!("eve"), &json!("s1")));
    let error = gateway.post("/v1/session_tokens", json!({ "ttl_s": 60, "environment": "prod" }));
    let error = error.await.refused(403, "PERMISSION_DENIED");
    assert!(message(&error).contains("has no environment"), "{error}");
    let asserted = gateway.clone().user("bob");
    let token = mint(&asserted, json!({ "ttl_s": 60 })).await;
    assert_eq!(token["user"], "bob", "the token is for the user of its request");
}

#[tokio::test]
async fn a_token_never_administers_approves_or_audits() {
    let server = Server::start().await;
    let admin = server.keyed("default", "boss", "admin", &[]).await;
    let token = mint(&admin, json!({ "ttl_s": 60 })).await;
    let api = holder(&server, &token);
    for path in ["/v1/keys", "/v1/rules", "/v1/audit"] {
        api.get(path).await.refused(403, "PERMISSION_DENIED");
    }
    api.post("/v1/keys", json!({ "agent": "x" })).await.refused(403, "PERMISSION_DENIED");
    for role in ["approver", "auditor"] {
        let key = server.keyed("default", role, role, &[]).await;
        let refused = key.post("/v1/session_tokens", json!({ "ttl_s": 60 })).await;
        refused.refused(403, "PERMISSION_DENIED");
    }
    for api in [server.operator(), server.with_key("tck_unknown")] {
        let refused = api.post("/v1/session_tokens", json!({ "ttl_s": 60 })).await;
        assert!(matches!(refused.status.as_u16(), 401 | 403), "{}", refused.text);
    }
}

#[tokio::test]
async fn tokens_end_by_revocation_by_time_and_with_their_key() {
    let server = Server::start().await;
    let admin = server.keyed("default", "boss", "admin", &[]).await;
    let created = create(&admin, json!({ "agent": "ada", "allow": ["*"] })).await;
    let key = bearer(&server, &created);
    let other = bearer(&server, &create(&admin, json!({ "agent": "bob", "allow": ["*"] })).await);
    let token = mint(&key, json!({ "ttl_s": 600 })).await;
    let unknown = other.delete("/v1/session_tokens/st_none").await.refused(404, "NOT_FOUND");
    let foreign = other.delete(&revocation_path(&token)).await.refused(404, "NOT_FOUND");
    let text = |error: &Value| message(error).split('"').next().unwrap().to_owned();
    assert_eq!(text(&foreign), text(&unknown), "a token of another key looks unknown");
    assert_eq!(other.get("/v1/session_tokens").await.is(200)["session_tokens"], json!([]));
    assert_eq!(key.delete(&revocation_path(&token)).await.status, 204);
    holder(&server, &token).get("/v1/tools").await.refused(401, "UNAUTHENTICATED");
    let own = mint(&key, json!({ "ttl_s": 600 })).await;
    let bearer_of_own = holder(&server, &own);
    assert_eq!(bearer_of_own.delete(&revocation_path(&own)).await.status, 204, "it signs out");
    let short = mint(&key, json!({ "ttl_s": 1 })).await;
    until("the token to end", || async {
        (holder(&server, &short).get("/v1/tools").await.status == 401).then_some(())
    })
    .await;
    let last = mint(&key, json!({ "ttl_s": 600 })).await;
    holder(&server, &last).get("/v1/tools").await.is(200);
    let path = format!("/v1/keys/{}", created["id"].as_str().unwrap());
    assert_eq!(admin.delete(&path).await.status, 204);
    holder(&server, &last).get("/v1/tools").await.refused(401, "UNAUTHENTICATED");
}

#[tokio::test]
async fn a_token_ends_with_the_end_of_its_key() {
    let server = Server::start().await;
    let admin = server.keyed("default", "boss", "admin", &[]).await;
    let body = json!({ "agent": "ada", "allow": ["*"], "expires_at": "2999-01-01T00:00:00Z" });
    let created = create(&admin, body).await;
    let key = bearer(&server, &created);
    let token = mint(&key, json!({ "ttl_s": 600 })).await;
    let path = format!("/v1/keys/{}/rotate", created["id"].as_str().unwrap());
    admin.post(&path, json!({ "overlap_s": 0 })).await.is(201);
    holder(&server, &token).get("/v1/tools").await.refused(401, "UNAUTHENTICATED");
}

#[tokio::test]
async fn tokens_survive_a_killed_server_and_serve_the_command_line() {
    let mut server = process::Server::new();
    let create = |arguments: &[&str]| {
        let output = server.command(arguments).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    };
    create(&["keys", "create", "--agent", "operator", "--role", "admin"]);
    let key = create(&["keys", "create", "--agent", "ada", "--allow", "*"]);
    server.start().await;
    let address = format!("127.0.0.1:{}", server.port);
    let api = Api::new(&address).key(&key);
    let token = mint(&api, json!({ "ttl_s": 600, "tools": ["calculation.*"] })).await;
    let revoked = mint(&api, json!({ "ttl_s": 600 })).await;
    assert_eq!(api.delete(&revocation_path(&revoked)).await.status, 204);
    server.kill();
    server.start().await;
    let secret = token["token"].as_str().unwrap();
    Api::new(&address).key(secret).get("/v1/tools").await.is(200);
    let refused = Api::new(&address).key(revoked["token"].as_str().unwrap()).get("/v1/tools").await;
    refused.refused(401, "UNAUTHENTICATED");
    let url = format!("http://{address}");
    let command = |arguments: &[&str], key: &str| {
        let mut command = std::process::Command::new(process::TOOLCRIB);
        command.args(arguments).env("TOOLCRIB_SERVER", &url).env("TOOLCRIB_KEY", key);
        command.output().unwrap()
    };
    let call = command(&["call", "calculation.eval", "expression=6*7"], secret);
    assert!(call.status.success(), "{}", String::from_utf8_lossy(&call.stderr));
    let minted = command(&["tokens", "create", "--ttl", "1h"], &key);
    let minted = String::from_utf8(minted.stdout).unwrap();
    assert!(minted.starts_with("tcs_"), "{minted}");
    let listed = command(&["tokens", "ls", "--json"], &key);
    let listed: Value = serde_json::from_slice(&listed.stdout).unwrap();
    assert_eq!(listed["session_tokens"].as_array().unwrap().len(), 3);
    let id = token["id"].as_str().unwrap();
    assert!(command(&["tokens", "revoke", id], &key).status.success());
    Api::new(&address).key(secret).get("/v1/tools").await.refused(401, "UNAUTHENTICATED");
}

#[tokio::test]
async fn waiting_calls_end_when_their_token_is_revoked() {
    let server = Server::start().await;
    let admin = server.keyed("default", "boss", "admin", &[]).await;
    let provider = server.keyed("default", "worker", "provider", &[]).await;
    provider.register("c1", json!([offer("a.tool")])).await;
    let key = bearer(&server, &create(&admin, json!({ "agent": "ada", "allow": ["*"] })).await);
    let token = mint(&key, json!({ "ttl_s": 600 })).await;
    let of_token = holder(&server, &token).invoke("a.tool", json!({})).await;
    let of_key = key.invoke("a.tool", json!({})).await;
    key.delete(&revocation_path(&token)).await.is(204);
    let ended = admin.finished(&of_token).await;
    assert_eq!(ended["error"]["code"], "PERMISSION_DENIED", "{ended}");
    assert_eq!(admin.call(&of_key).await["status"], "PENDING");
}
