//! The audit log from outside: origin of entries, verification, export, retention, tampering.

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::support::database::Database;
use crate::support::process::{self, eventually, run_cli};
use crate::support::{Api, Server, until};

/// Returns the entries of the whole log, oldest first.
async fn export(api: &Api) -> Vec<Value> {
    let reply = api.get("/v1/audit/export").await;
    assert_eq!(reply.status.as_u16(), 200, "{}", reply.text);
    assert_eq!(reply.header("content-type"), Some("application/x-ndjson"));
    reply.text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Computes the hashes of an export as the documentation describes, without Toolcrib's code.
fn check_export(entries: &[Value]) {
    let mut previous = "0".repeat(64);
    for entry in entries {
        let mut row = entry.clone();
        let hash = row.as_object_mut().unwrap().remove("hash").unwrap();
        // The maps of serde_json are sorted and written without spaces.
        let text = format!("{previous}\n{row}");
        let digest = Sha256::digest(text.as_bytes());
        let digest: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hash, digest.as_str(), "{entry}");
        previous = digest;
    }
}

#[tokio::test]
async fn entries_name_their_actor_and_origin_over_every_transport() {
    let server = Server::start().await;
    let operator = server.operator();
    operator.post("/v1/keys", json!({ "agent": "boss", "role": "admin" })).await.is(201);
    let ada = server.keyed("default", "ada", "agent", &[]).await;
    let request = ada.request(reqwest::Method::POST, "/v1/tools/calculation.eval/invoke");
    let request = request.header("x-request-id", "req_test_1");
    let body = json!({ "run_id": "r", "args": { "expression": "1" } });
    ada.send(request.json(&body)).await.refused(403, "PERMISSION_DENIED");
    let mcp = crate::support::mcp::Mcp::modern(&ada);
    mcp.call("calculation.eval", json!({ "expression": "1" })).await;
    let entries = export(&operator).await;
    let denied: Vec<&Value> =
        entries.iter().filter(|entry| entry["action"] == "call.denied").collect();
    assert_eq!(denied.len(), 2, "{entries:?}");
    assert_eq!(denied[0]["agent"], "ada");
    let origin = json!({ "transport": "http", "peer": "127.0.0.1", "request_id": "req_test_1" });
    assert_eq!(denied[0]["origin"], origin);
    assert_eq!(denied[1]["origin"]["transport"], "mcp", "{}", denied[1]);
    assert_eq!(denied[1]["origin"]["peer"], "127.0.0.1", "{}", denied[1]);
    check_export(&entries);
    // The same entries, newest first and in pages.
    let page = operator.get("/v1/audit?limit=2").await.is(200);
    let first = page["audit"].as_array().unwrap();
    assert_eq!(first[0], entries[entries.len() - 1]);
    let before = first[1]["number"].as_u64().unwrap();
    let next = operator.get(&format!("/v1/audit?limit=2&before={before}")).await.is(200);
    assert_eq!(next["audit"][0], entries[entries.len() - 3]);
}

#[tokio::test]
async fn refused_credentials_are_audited_without_filling_the_log() {
    let server = Server::start().await;
    let operator = server.operator();
    operator.post("/v1/keys", json!({ "agent": "boss", "role": "admin" })).await.is(201);
    for _ in 0..50 {
        server.with_key("tck_wrong").get("/v1/tools").await.refused(401, "UNAUTHENTICATED");
    }
    let failed = until("the failed sign-in in the log", || async {
        let entries = export(&operator).await;
        let failed: Vec<Value> =
            entries.into_iter().filter(|entry| entry["action"] == "sign_in.failed").collect();
        (!failed.is_empty()).then_some(failed)
    })
    .await;
    assert!(failed.len() < 50, "{}", failed.len());
    assert_eq!(failed[0]["origin"]["peer"], "127.0.0.1");
    assert!(!failed[0].to_string().contains("tck_wrong"), "{}", failed[0]);
}

#[tokio::test]
async fn a_project_exports_its_own_entries_and_verifies_the_log() {
    let server = Server::start().await;
    let admin = server.keyed("default", "boss", "admin", &[]).await;
    let other = server.keyed("theirs", "chief", "admin", &[]).await;
    other.post("/v1/keys", json!({ "agent": "eve", "role": "agent" })).await.is(201);
    let entries = export(&other).await;
    assert!(entries.iter().all(|entry| entry["project"] == "theirs"), "{entries:?}");
    let all = export(&server.operator()).await;
    let is_sign_in = |entry: &&Value| entry["action"] == "sign_in";
    assert_eq!(all.len() - all.iter().filter(is_sign_in).count(), 3);
    let found = admin.get("/v1/audit/verify").await.is(200);
    assert_eq!(found["ok"], true, "{found}");
    assert!(found["entries"].as_u64().unwrap() >= 3, "{found}");
    let head = found["head"]["hash"].as_str().unwrap().to_owned();
    // The log may grow; the earlier head stays in it.
    admin.post("/v1/keys", json!({ "agent": "eve", "role": "agent" })).await.is(201);
    let expect = format!("/v1/audit/verify?expect={head}");
    assert_eq!(admin.get(&expect).await.is(200)["ok"], true);
    let unknown = format!("/v1/audit/verify?expect={}", "a".repeat(64));
    assert_eq!(admin.get(&unknown).await.is(200)["ok"], false);
    let error = admin.get("/v1/audit/verify?expect=x").await.refused(422, "VALIDATION_ERROR");
    assert_eq!(error["detail"]["field"], "expect");
    let agent = server.keyed("default", "ada", "agent", &["*"]).await;
    for path in ["/v1/audit/verify", "/v1/audit/export"] {
        agent.get(path).await.refused(403, "PERMISSION_DENIED");
        server.api().get(path).await.refused(401, "UNAUTHENTICATED");
    }
}

/// Makes some entries over the command line of a running server.
async fn make_entries(server: &process::Server) {
    for agent in ["boss", "ops", "root"] {
        let made =
            server.command(&["keys", "create", "--agent", agent, "--role", "admin"]).output();
        let made = made.unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    }
}

/// Runs `toolcrib audit verify`. Returns whether it succeeded, and what it printed.
fn verify(server: &process::Server, more: &[&str]) -> (bool, String) {
    let output = server.command(&[&["audit", "verify"], more].concat()).output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8(text).unwrap())
}

#[tokio::test]
async fn the_command_finds_rows_that_sqlite3_changed() {
    let server = process::Server::ready().await;
    make_entries(&server).await;
    let (ok, text) = verify(&server, &[]);
    assert!(ok, "{text}");
    let head = text.lines().find(|line| line.len() == 64).unwrap().to_owned();
    assert!(verify(&server, &["--expect", &head]).0);
    let output = server.command(&["audit", "export"]).output().unwrap();
    let lines = String::from_utf8(output.stdout).unwrap();
    let entries: Vec<Value> =
        lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(entries.len(), 3);
    assert_eq!(entries[0]["origin"], json!({ "transport": "command" }), "{}", entries[0]);
    check_export(&entries);
    let sqlite3 = |sql: &str| {
        let mut command = std::process::Command::new("sqlite3");
        command.arg(server.database()).arg(sql).output().unwrap()
    };
    let refused = sqlite3("UPDATE audit SET agent = 'nobody' WHERE number = 2");
    assert!(String::from_utf8_lossy(&refused.stderr).contains("append-only"));
    assert!(verify(&server, &[]).0);
    let changed = sqlite3(
        "DROP TRIGGER audit_is_never_changed; UPDATE audit SET agent = 'nobody' WHERE number = 2",
    );
    assert!(changed.status.success());
    let (ok, text) = verify(&server, &[]);
    assert!(!ok && text.contains("entry 2"), "{text}");
    let (ok, text) = verify(&server, &["--json"]);
    assert!(!ok, "{text}");
    let found: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(found["problems"][0]["number"], 2, "{found}");
}

#[tokio::test]
async fn the_command_finds_rows_that_psql_removed() {
    let Some(database) = Database::new().await else { return };
    let mut server = process::Server::new().with("STORE__URL", &database.url);
    server.start().await;
    make_entries(&server).await;
    assert!(verify(&server, &[]).0);
    let psql = |sql: &str| {
        let mut command = std::process::Command::new("psql");
        command.arg(&database.url).args(["-v", "ON_ERROR_STOP=1", "-c", sql]).output().unwrap()
    };
    let refused = psql("DELETE FROM toolcrib.audit WHERE number = 3");
    assert!(String::from_utf8_lossy(&refused.stderr).contains("append-only"));
    let removed = psql(
        "ALTER TABLE toolcrib.audit DISABLE TRIGGER ALL; \
         DELETE FROM toolcrib.audit WHERE number = 3",
    );
    assert!(removed.status.success(), "{}", String::from_utf8_lossy(&removed.stderr));
    let (ok, text) = verify(&server, &[]);
    assert!(!ok && text.contains("the log ends with entry 2"), "{text}");
    server.stop().await;
    database.drop().await;
}

#[tokio::test]
async fn retention_deletes_old_entries_and_the_rest_verifies() {
    let server = Server::start().await;
    let operator = server.operator();
    for agent in ["boss", "ops"] {
        operator.post("/v1/keys", json!({ "agent": agent, "role": "admin" })).await.is(201);
    }
    let mut config = server.config.clone();
    // Five seconds: the entries from before the restart are deleted by the second pass.
    config.retention.audit_days = 5.0 / 86_400.0;
    let server = server.restart_with(config).await;
    let operator = server.operator();
    let found = eventually("the entries to be deleted", process::PATIENCE, || async {
        let found = operator.get("/v1/audit/verify").await.is(200);
        (found["pruned"].as_u64() >= Some(2)).then_some(found)
    })
    .await;
    assert_eq!(found["ok"], true, "{found}");
    assert!(found["entries"].as_u64() <= Some(1), "the sign-in after the restart: {found}");
    operator.post("/v1/keys", json!({ "agent": "root", "role": "admin" })).await.is(201);
    let head = found["head"]["hash"].as_str().unwrap();
    let expect = format!("/v1/audit/verify?expect={head}");
    let verified = operator.get(&expect).await.is(200);
    assert_eq!(verified["ok"], true, "the checkpoint has the head: {found} {verified}");
    let key = process::operator_token(&server.config.data_dir);
    let (stdout, _) = run_cli(&server, &["--key", &key, "audit", "ls"]).await;
    assert!(stdout.contains("key.created"), "{stdout}");
}
