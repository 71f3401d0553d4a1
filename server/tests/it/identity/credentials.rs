//! Keys with roles, attributes and ends: creation, use, rotation, assertion of users and sessions,
//! and their traces in the audit log.

use reqwest::Method;
use serde_json::{Value, json};

use crate::support::api::message;
use crate::support::mcp::Mcp;
use crate::support::ws::Ws;
use crate::support::{Api, Server, process, until};

/// Creates a key. Returns its body, with the secret.
pub async fn create(admin: &Api, body: Value) -> Value {
    admin.post("/v1/keys", body).await.is(201)
}

/// Returns the caller with a key that was created.
pub fn bearer(server: &Server, created: &Value) -> Api {
    server.with_key(created["key"].as_str().unwrap())
}

fn id_of(created: &Value) -> &str {
    created["id"].as_str().unwrap()
}

#[tokio::test]
async fn every_attribute_of_a_key_is_listed_and_survives_a_restart() {
    let server = Server::start().await;
    let admin = server.keyed("default", "boss", "admin", &[]).await;
    let body = json!({
        "agent": "ada", "roles": ["approver", "agent"], "groups": ["eng", "ops"],
        "environment": "production", "user": "bob@example.com", "tools": ["weather.*"],
        "networks": ["127.0.0.0/8", "::1"], "expires_at": "2999-01-31T00:00:00Z",
        "may_assert": ["session"], "rejoin": false,
    });
    let created = create(&admin, body.clone()).await;
    let check = |key: &Value| {
        for (name, value) in body.as_object().unwrap() {
            let expected =
                if name == "roles" { json!(["agent", "approver"]) } else { value.clone() };
            assert_eq!(key[name], expected, "{name}");
        }
        assert_eq!((&key["role"], &key["status"]), (&json!("agent,approver"), &json!("active")));
        assert_eq!(key["rotated_from"], Value::Null);
    };
    check(&created);
    let secret = admin.secret().unwrap().to_owned();
    let server = server.restart().await;
    let listed = server.with_key(&secret).get("/v1/keys").await;
    assert!(!listed.text.contains(created["key"].as_str().unwrap()));
    let listed = listed.is(200);
    let listed = listed["keys"].as_array().unwrap();
    check(listed.iter().find(|key| key["id"] == created["id"]).unwrap());
    bearer(&server, &created).get("/v1/tools").await.is(200);
}

#[tokio::test]
async fn the_first_key_must_administer_without_an_end() {
    let server = Server::start().await;
    let operator = server.operator();
    let expiring =
        json!({ "agent": "op", "roles": ["admin"], "expires_at": "2999-01-01T00:00:00Z" });
    for body in [json!({ "agent": "ada" }), json!({ "agent": "p", "role": "provider" }), expiring] {
        let error = operator.post("/v1/keys", body).await.refused(409, "CONFLICT");
        assert_eq!(error["detail"]["fix"], "toolcrib keys create --agent operator --role admin");
        assert!(message(&error).contains("toolcrib keys create --agent operator --role admin"));
    }
    server.api().get("/v1/tools").await.is(200);
    assert_eq!(operator.get("/v1/rules").await.is(200)["rules"], json!([]));
    create(&operator, json!({ "agent": "op", "roles": ["admin", "agent"] })).await;
    create(&operator, json!({ "agent": "ada" })).await;
}

#[tokio::test]
async fn the_command_refuses_another_first_key_with_the_fix() {
    let server = process::Server::new();
    let refused = server.command(&["keys", "create", "--agent", "ada"]).output().unwrap();
    assert!(!refused.status.success());
    let error = String::from_utf8(refused.stderr).unwrap();
    assert!(error.contains("toolcrib keys create --agent operator --role admin"), "{error}");
    let first = ["keys", "create", "--agent", "operator", "--role", "admin"];
    assert!(server.command(&first).output().unwrap().status.success());
    let arguments = [
        "keys",
        "create",
        "--agent",
        "ada",
        "--role",
        "agent",
        "--role",
        "auditor",
        "--group",
        "eng",
        "--environment",
        "test",
        "--user",
        "bob",
        "--tools",
        "calculation.*",
        "--network",
        "127.0.0.1",
        "--expires",
        "30d",
        "--may-assert",
        "session",
        "--json",
    ];
    let created = server.command(&arguments).output().unwrap();
    assert!(created.status.success(), "{}", String::from_utf8_lossy(&created.stderr));
    let created: Value = serde_json::from_slice(&created.stdout).unwrap();
    assert_eq!(created["roles"], json!(["agent", "auditor"]));
    assert_eq!(created["networks"], json!(["127.0.0.1"]));
    assert!(created["expires_at_ms"].is_u64());
    let rotate = ["keys", "rotate", id_of(&created), "--overlap", "1h", "--json"];
    let rotated = server.command(&rotate).output().unwrap();
    let rotated: Value = serde_json::from_slice(&rotated.stdout).unwrap();
    assert_eq!(rotated["rotated_from"], created["id"]);
    assert_eq!(rotated["groups"], json!(["eng"]));
    let revoke = ["keys", "revoke", id_of(&rotated)];
    assert!(server.command(&revoke).output().unwrap().status.success());
}

#[tokio::test]
async fn the_last_admin_key_cannot_be_revoked_before_the_others() {
    let server = Server::start().await;
    let admin = create(&server.operator(), json!({ "agent": "boss", "roles": ["admin"] })).await;
    let ada = create(&server.operator(), json!({ "agent": "ada", "allow": ["*"] })).await;
    let boss = bearer(&server, &admin);
    let path = format!("/v1/keys/{}", id_of(&admin));
    for api in [&boss, &server.operator()] {
        let error = api.delete(&path).await.refused(409, "CONFLICT");
        let fix = format!("toolcrib keys rotate {} --overlap 0", id_of(&admin));
        assert_eq!(error["detail"]["fix"], fix);
    }
    // The fix works: the old secret is not valid any more, and the new one administers.
    let rotated = boss.post(&format!("{path}/rotate"), json!({})).await.is(201);
    boss.get("/v1/keys").await.refused(401, "UNAUTHENTICATED");
    let boss = bearer(&server, &rotated);
    assert_eq!(boss.delete(&format!("/v1/keys/{}", id_of(&ada))).await.status, 204);
    assert_eq!(boss.delete(&format!("/v1/keys/{}", id_of(&rotated))).await.status, 204);
    server.api().get("/v1/tools").await.refused(401, "UNAUTHENTICATED");
    let next = json!({ "agent": "ada" });
    server.operator().post("/v1/keys", next).await.refused(409, "CONFLICT");
    create(&server.operator(), json!({ "agent": "boss", "roles": ["admin"] })).await;
}

#[tokio::test]
async fn a_rotated_key_stays_valid_for_its_overlap() {
    let server = Server::start().await;
    let admin = server.keyed("default", "boss", "admin", &[]).await;
    let old = create(&admin, json!({ "agent": "ada", "allow": ["*"], "groups": ["eng"] })).await;
    let path = format!("/v1/keys/{}/rotate", id_of(&old));
    let new = admin.post(&path, json!({ "overlap_s": 2 })).await.is(201);
    assert_eq!(new["rotated_from"], old["id"]);
    assert_eq!((&new["agent"], &new["groups"]), (&json!("ada"), &json!(["eng"])));
    assert_ne!(new["key"], old["key"]);
    let (old_api, new_api) = (bearer(&server, &old), bearer(&server, &new));
    old_api.get("/v1/tools").await.is(200);
    new_api.get("/v1/tools").await.is(200);
    until("the overlap to end", || async {
        (old_api.get("/v1/tools").await.status == 401).then_some(())
    })
    .await;
    new_api.get("/v1/tools").await.is(200);
    let keys = until("the end to be stored", || async {
        let keys = admin.get("/v1/keys").await.is(200);
        let keys = keys["keys"].as_array().unwrap().clone();
        let ended = keys.iter().find(|key| key["id"] == old["id"]).unwrap();
        ended["revoked_at_ms"].is_u64().then_some(keys)
    })
    .await;
    let status = |id: &Value| keys.iter().find(|key| key["id"] == *id).unwrap()["status"].clone();
    assert_eq!((status(&old["id"]), status(&new["id"])), (json!("expired"), json!("active")));
    admin.post(&path, json!({})).await.refused(409, "CONFLICT");
    admin.post("/v1/keys/key_none/rotate", json!({})).await.refused(404, "NOT_FOUND");
    let long = json!({ "overlap_s": 99_999_999 });
    let path = format!("/v1/keys/{}/rotate", id_of(&new));
    admin.post(&path, long).await.refused(422, "VALIDATION_ERROR");
}

#[tokio::test]
async fn unknown_and_invalid_fields_of_a_key_are_refused() {
    let server = Server::start().await;
    let admin = server.keyed("default", "boss", "admin", &[]).await;
    for (field, value, part) in [
        ("rolles", json!(["agent"]), "roles"),
        ("mayAssert", json!(["user"]), "may_assert"),
        ("network", json!(["10.0.0.0/8"]), "networks"),
    ] {
        let mut body = json!({ "agent": "ada" });
        body[field] = value;
        let error = admin.post("/v1/keys", body).await.refused(422, "VALIDATION_ERROR");
        assert!(message(&error).contains(&format!("did you mean `{part}`")), "{error}");
    }
    for (field, value) in [
        ("roles", json!([])),
        ("roles", json!(["king"])),
        ("tools", json!([])),
        ("tools", json!(["no spaces"])),
        ("networks", json!([])),
        ("networks", json!(["10.0.0.0/99"])),
        ("groups", json!(["a,b"])),
        ("user", json!("")),
        ("environment", json!("two words")),
        ("may_assert", json!(["agent"])),
        ("expires_at", json!("tomorrow")),
        ("expires_at", json!("2001-01-01T00:00:00Z")),
    ] {
        let mut body = json!({ "agent": "ada" });
        body[field] = value.clone();
        let error = admin.post("/v1/keys", body).await.refused(422, "VALIDATION_ERROR");
        assert!(!message(&error).is_empty(), "{field} {value}");
    }
    let both = json!({ "agent": "ada", "role": "agent", "roles": ["agent"] });
    admin.post("/v1/keys", both).await.refused(422, "VALIDATION_ERROR");
    assert_eq!(admin.get("/v1/keys").await.is(200)["keys"].as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn a_key_is_valid_in_its_networks_alone() {
    let server = Server::start().await;
    let admin = server.keyed("default", "boss", "admin", &[]).await;
    let key = |networks: Value| json!({ "agent": "ada", "allow": ["*"], "networks": networks });
    let here = bearer(&server, &create(&admin, key(json!(["127.0.0.0/8"]))).await);
    let elsewhere = bearer(&server, &create(&admin, key(json!(["10.0.0.0/8"]))).await);
    here.get("/v1/tools").await.is(200);
    let refused = elsewhere.get("/v1/tools").await.refused(401, "UNAUTHENTICATED");
    let unknown = server.with_key("tck_unknown").get("/v1/tools").await;
    let unknown = unknown.refused(401, "UNAUTHENTICATED");
    assert_eq!(refused, unknown, "the refusal does not reveal that the key exists");
    assert_eq!(Mcp::modern(&elsewhere).ask("tools/list", json!({})).await.status, 401);
    let forwarded = elsewhere.request(Method::GET, "/v1/tools");
    let forwarded = forwarded.header("x-forwarded-for", "10.1.1.1");
    elsewhere.send(forwarded).await.refused(401, "UNAUTHENTICATED");
}

#[tokio::test]
async fn only_a_key_that_may_assert_names_users_and_sessions() {
    let server = Server::start().await;
    // Without keys a request has no credentials that could permit it.
    for api in [server.api().user("bob"), server.api().session("s1")] {
        let error = api.get("/v1/tools").await.refused(403, "PERMISSION_DENIED");
        assert!(message(&error).contains("X-Toolcrib-"), "{error}");
    }
    server.operator().user("bob").session("s1").get("/v1/tools").await.is(200);
    let admin = server.keyed("default", "boss", "admin", &[]).await;
    let allow = json!(["*"]);
    let plain = create(&admin, json!({ "agent": "ada", "allow": allow })).await;
    let own = create(&admin, json!({ "agent": "ada", "allow": allow, "user": "bob" })).await;
    let user =
        create(&admin, json!({ "agent": "gw", "allow": allow, "may_assert": ["user"] })).await;
    for (key, asserts) in
        [(&plain, true), (&plain, false), (&own, true), (&own, false), (&user, false)]
    {
        let api = bearer(&server, key);
        let api = if asserts { api.user("bob") } else { api.session("s1") };
        let error = api.get("/v1/tools").await.refused(403, "PERMISSION_DENIED");
        assert!(message(&error).contains("--may-assert"), "{error}");
        assert_eq!(Mcp::modern(&api).ask("tools/list", json!({})).await.status, 403);
        api.get("/v1/events").await.refused(403, "PERMISSION_DENIED");
    }
    let gateway = bearer(&server, &user);
    gateway.clone().user("bob").get("/v1/tools").await.is(200);
    for name in ["", "two words", "a*b", "é", &"x".repeat(129)] {
        gateway.clone().user(name).get("/v1/tools").await.refused(400, "BAD_REQUEST");
    }
    let twice = gateway.clone().user("bob").user("eve").get("/v1/tools").await;
    twice.refused(400, "BAD_REQUEST");
    let provider = json!({ "agent": "tools", "roles": ["provider"] });
    let provider = bearer(&server, &create(&admin, provider).await);
    Ws::open(&provider).await.unwrap();
    assert!(Ws::open(&provider.user("bob")).await.is_err(), "the upgrade is refused");
}

#[tokio::test]
async fn two_users_of_one_key_share_nothing() {
    let server = Server::start().await;
    let admin = server.keyed("default", "boss", "admin", &[]).await;
    let body = json!({ "agent": "gw", "allow": ["*"], "may_assert": ["user", "session"] });
    let gateway = bearer(&server, &create(&admin, body).await);
    let (bob, eve) = (gateway.clone().user("bob"), gateway.clone().user("eve"));
    let path = "/v1/tools/calculation.eval/invoke?wait_ms=20000";
    let body = json!({ "run_id": "r", "args": { "expression": "1" }, "idempotency_key": "k1" });
    let invoke = async |api: &Api| {
        let call = api.post(path, body.clone()).await;
        call.body["tool_call_id"].as_str().unwrap_or_else(|| panic!("{}", call.text)).to_owned()
    };
    let first = invoke(&bob).await;
    assert_eq!(invoke(&bob).await, first, "one user's key repeats the call");
    assert_ne!(invoke(&eve).await, first, "another user's key is another key");
    let in_session = invoke(&bob.clone().session("s1")).await;
    assert!(in_session != first);
    let client = Mcp::legacy(&bob).await;
    client.ask("tools/list", json!({})).await.result();
    let client = client.calling_as(&eve);
    assert_eq!(client.ask("tools/list", json!({})).await.status, 404, "the session is bob's");
    let client = client.calling_as(&bob);
    client.ask("tools/list", json!({})).await.result();
    let run = json!({ "model": "demo", "idempotency_key": "r1",
        "messages": [{ "role": "user", "content": "What is 6 * 7?" }] });
    let start = async |api: &Api| {
        let run = api.post("/v1/runs?wait_ms=20000", run.clone()).await;
        run.body["run_id"].as_str().unwrap_or_else(|| panic!("{}", run.text)).to_owned()
    };
    let bobs = start(&bob).await;
    assert_eq!(start(&bob).await, bobs);
    assert_ne!(start(&eve).await, bobs);
    let more = json!({ "messages": [{ "role": "user", "content": "And 7 * 7?" }] });
    let refused = eve.post(&format!("/v1/runs/{bobs}/messages"), more).await;
    assert!(matches!(refused.status.as_u16(), 403 | 404), "{}", refused.text);
}

#[tokio::test]
async fn an_auditor_reads_what_an_agent_may_not() {
    let server = Server::start().await;
    let admin = server.keyed("default", "boss", "admin", &[]).await;
    let auditor = server.keyed("default", "eye", "auditor", &[]).await;
    let agent = server.keyed("default", "ada", "agent", &["*"]).await;
    for path in ["/v1/keys", "/v1/rules", "/v1/audit", "/v1/session_tokens"] {
        auditor.get(path).await.is(200);
    }
    for path in ["/v1/keys", "/v1/rules", "/v1/audit"] {
        agent.get(path).await.refused(403, "PERMISSION_DENIED");
    }
    let created = create(&admin, json!({ "agent": "x" })).await;
    let path = format!("/v1/keys/{}", id_of(&created));
    auditor.delete(&path).await.refused(403, "PERMISSION_DENIED");
    auditor.post(&format!("{path}/rotate"), json!({})).await.refused(403, "PERMISSION_DENIED");
    auditor.post("/v1/keys", json!({ "agent": "y" })).await.refused(403, "PERMISSION_DENIED");
    let call = json!({ "run_id": "r", "args": { "expression": "1" } });
    let refused = auditor.post("/v1/tools/calculation.eval/invoke", call.clone()).await;
    refused.refused(403, "PERMISSION_DENIED");
    let both = server.keyed("default", "both", "agent,auditor", &["*"]).await;
    both.get("/v1/keys").await.is(200);
    assert!(both.post("/v1/tools/calculation.eval/invoke", call).await.status.is_success());
}

#[tokio::test]
async fn a_server_that_starts_in_the_past_counts_on_from_the_recorded_time() {
    let mut server = process::Server::new();
    let run = |server: &process::Server, arguments: &[&str]| {
        let output = server.command(arguments).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    };
    run(&server, &["keys", "create", "--agent", "operator", "--role", "admin"]);
    let key = run(&server, &["keys", "create", "--agent", "ada", "--expires", "1h"]);
    server.start().await;
    let api = Api::new(&format!("127.0.0.1:{}", server.port)).key(&key);
    api.get("/v1/tools").await.is(200);
    let database = || rusqlite::Connection::open(server.database()).unwrap();
    let recorded = || {
        let sql = "SELECT value FROM counters WHERE name = 'latest_time_ms'";
        database().query_row(sql, [], |row| row.get::<_, i64>(0)).unwrap()
    };
    until("the time to be recorded", || async { (recorded() > 0).then_some(()) }).await;
    // The machine ran for two more hours, then its clock was set back.
    let later = recorded() + 2 * 3_600_000;
    server.kill();
    let connection = rusqlite::Connection::open(server.database()).unwrap();
    connection
        .execute("UPDATE counters SET value = ?1 WHERE name = 'latest_time_ms'", [later])
        .unwrap();
    drop(connection);
    server.start().await;
    api.get("/v1/tools").await.refused(401, "UNAUTHENTICATED");
}

#[tokio::test]
async fn sign_ins_are_audited_once_and_failures_within_a_limit() {
    let server = Server::start().await;
    let admin = server.keyed("default", "boss", "admin", &[]).await;
    let key = create(&admin, json!({ "agent": "ada", "allow": ["*"] })).await;
    let ada = bearer(&server, &key);
    for _ in 0..3 {
        ada.get("/v1/tools").await.is(200);
    }
    for _ in 0..30 {
        server.with_key("tck_guessed").get("/v1/tools").await.refused(401, "UNAUTHENTICATED");
    }
    assert_eq!(admin.delete(&format!("/v1/keys/{}", id_of(&key))).await.status, 204);
    let entries = until("the sign-ins to be written", || async {
        let log = admin.get("/v1/audit?limit=1000").await.is(200);
        let entries = log["audit"].as_array().unwrap().clone();
        let is_it = |entry: &&Value| entry["action"] == "sign_in.failed";
        (entries.iter().filter(is_it).count() >= 5).then_some(entries)
    })
    .await;
    let of = |action: &str| entries.iter().filter(|e| e["action"] == action).collect::<Vec<_>>();
    assert_eq!(of("sign_in.failed").len(), 5, "more of one address are not recorded");
    let failed = of("sign_in.failed")[0];
    assert_eq!(failed["reason"], "unknown credentials");
    assert_eq!(failed["origin"]["peer"], "127.0.0.1");
    assert_eq!(failed["origin"]["transport"], "http");
    assert!(!failed.to_string().contains("guessed"));
    let of_ada: Vec<_> = of("sign_in").into_iter().filter(|e| e["agent"] == "ada").collect();
    assert_eq!(of_ada.len(), 1, "the first use alone");
    assert_eq!(of_ada[0]["subject"], key["id"]);
}
