//! The operator token: administration needs it, and the command line uses it by itself.

use std::os::unix::fs::PermissionsExt;

use reqwest::Method;
use serde_json::json;

use crate::support::api::{message, offer};
use crate::support::mcp::Mcp;
use crate::support::process::{self, operator_token, run_cli};
use crate::support::{Api, Server};

/// Every administrative route.
const ADMINISTRATIVE: [(&str, &str); 14] = [
    ("GET", "/v1/keys"),
    ("POST", "/v1/keys"),
    ("DELETE", "/v1/keys/key_x"),
    ("GET", "/v1/rules"),
    ("PUT", "/v1/rules"),
    ("DELETE", "/v1/rules?agent=a&pattern=b"),
    ("GET", "/v1/audit"),
    ("GET", "/v1/sources/mcp"),
    ("POST", "/v1/sources/mcp"),
    ("GET", "/v1/sources/mcp/x"),
    ("DELETE", "/v1/sources/mcp/x"),
    ("POST", "/v1/sources/mcp/x/refresh"),
    ("POST", "/v1/sources/mcp/x/accept"),
    ("POST", "/v1/sources/mcp/x/sign-in"),
];

fn administrative_body(path: &str) -> serde_json::Value {
    match path {
        "/v1/keys" => json!({ "agent": "eve", "role": "admin" }),
        "/v1/rules" => json!({ "agent": "eve", "pattern": "*", "verdict": "allow" }),
        "/v1/sources/mcp" => json!({ "name": "x", "command": "true" }),
        _ => json!({}),
    }
}

async fn ask(api: &Api, method: &str, path: &str) -> crate::support::api::Reply {
    let request = api.request(method.parse::<Method>().unwrap(), path);
    api.send(request.json(&administrative_body(path))).await
}

#[tokio::test]
async fn without_keys_only_administration_needs_the_token() {
    let server = Server::start().await;
    let anonymous = server.api();
    let file = server.config.data_dir.join("operator.token");
    for (method, path) in ADMINISTRATIVE {
        let error = ask(&anonymous, method, path).await.refused(401, "UNAUTHENTICATED");
        assert_eq!(error["detail"]["operator_token_file"], file.to_str().unwrap(), "{path}");
        assert!(message(&error).contains("operator.token"), "{path}: {error}");
        let wrong = server.with_key(&format!("tc_operator_{}", "0".repeat(52)));
        ask(&wrong, method, path).await.refused(401, "UNAUTHENTICATED");
    }
    // The routes of agents and providers stay open.
    anonymous.register("pc_1", json!([offer("x.y")])).await;
    let id = anonymous.invoke("x.y", json!({})).await;
    assert_eq!(anonymous.poll("pc_1").await["tool_call_id"], id.as_str());
    anonymous.succeed(&id, json!(1)).await;
    assert_eq!(anonymous.finished(&id).await["agent"], "default");
    anonymous.post("/projects", json!({ "project_id": "p2", "title": "T" })).await.is(201);
    anonymous.get("/projects/p2/tools").await.is(200);
    // A key that the server does not know, as SDKs send one, is ignored as before.
    server.with_key("sk-anything").get("/v1/tools").await.is(200);
}

#[tokio::test]
async fn an_anonymous_request_starts_no_program() {
    let server = Server::start().await;
    let witness = server.config.data_dir.join("ran");
    let source = json!({
        "name": "evil", "command": "touch", "args": [witness.to_str().unwrap()],
    });
    server.api().post("/v1/sources/mcp", source.clone()).await.refused(401, "UNAUTHENTICATED");
    assert_eq!(server.operator().get("/v1/sources/mcp").await.is(200), json!({ "sources": [] }));
    assert!(!witness.exists());
    server.operator().post("/v1/sources/mcp?wait_ms=20000", source).await.is(201);
    assert!(witness.exists(), "the operator's program was started");
}

#[tokio::test]
async fn the_bearer_of_the_token_is_the_operator_with_and_without_keys() {
    let server = Server::start().await;
    let operator = server.operator();
    operator.post("/v1/keys", json!({ "agent": "boss", "role": "admin" })).await.is(201);
    server.api().get("/v1/tools").await.refused(401, "UNAUTHENTICATED");
    let audit = operator.audit_entries().await;
    assert_eq!(
        (&audit[0]["action"], &audit[0]["agent"]),
        (&json!("key.created"), &json!("operator"))
    );
    assert_eq!(operator.get("/v1/keys").await.is(200)["keys"].as_array().unwrap().len(), 1);
    // In every project, with every transport.
    let body = json!({ "agent": "ada", "pattern": "*", "verdict": "allow" });
    operator.clone().project("acme").put("/v1/rules", body).await.is(200);
    assert_eq!(operator.get("/v1/rules").await.is(200)["rules"], json!([]));
    let client = Mcp::modern(&operator);
    let result = client.call("calculation.eval", json!({ "expression": "1" })).await.result();
    let id = result["_meta"]["toolcrib/tool_call_id"].as_str().unwrap();
    assert_eq!(operator.call(id).await["agent"], "operator");
    let wrong = server.with_key(&format!("tc_operator_{}", "0".repeat(52)));
    assert_eq!(Mcp::modern(&wrong).ask("tools/list", json!({})).await.status, 401);
}

#[tokio::test]
async fn the_token_is_private_survives_a_kill_and_is_never_logged() {
    let mut server = process::Server::new().with("LOG__LEVEL", "trace");
    server.start().await;
    let file = server.data_dir().join("operator.token");
    let token = operator_token(&server.data_dir());
    assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    let get_keys = async |server: &process::Server, token: &str| {
        let request = server.http.get(server.url("/v1/keys")).bearer_auth(token);
        request.send().await.unwrap().status().as_u16()
    };
    assert_eq!(get_keys(&server, &token).await, 200);
    server.kill();
    server.start().await;
    assert_eq!(operator_token(&server.data_dir()), token);
    assert_eq!(get_keys(&server, &token).await, 200);
    server.stop().await;
    // Others could read it meanwhile: the next start replaces it.
    std::fs::set_permissions(&file, PermissionsExt::from_mode(0o644)).unwrap();
    server.start().await;
    let next = operator_token(&server.data_dir());
    assert_ne!(next, token);
    assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!((get_keys(&server, &token).await, get_keys(&server, &next).await), (401, 200));
    server.stop().await;
    let log = std::fs::read_to_string(server.directory.path().join("server.log")).unwrap();
    assert!(!log.contains(&token) && !log.contains(&next), "the token is in the log");
}

#[tokio::test]
async fn commands_on_the_same_machine_use_the_token_by_themselves() {
    let server = Server::start().await;
    // Without keys the server says where its token is.
    let create = ["keys", "create", "--agent", "ada", "--role", "admin", "--json"];
    let (created, _) = run_cli(&server, &create).await;
    assert!(created.contains("tck_"), "{created}");
    // With keys the settings say it.
    let run = async |words: &[&str]| {
        let mut command = std::process::Command::new(process::TOOLCRIB);
        command.args(["--server", &format!("http://{}", server.address)]).args(words);
        command.env("TOOLCRIB_DATA_DIR", &server.config.data_dir).env_remove("TOOLCRIB_KEY");
        tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap()
    };
    let output = run(&["audit", "--json"]).await;
    let audit: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(audit["audit"][0]["agent"], "operator", "{audit}");
    // A command that calls tools still needs a key: the token is for administration.
    let output = run(&["tools"]).await;
    assert_eq!(output.status.code(), Some(3), "{}", String::from_utf8_lossy(&output.stderr));
}

#[tokio::test]
async fn a_command_does_not_send_the_token_to_a_program_of_another_user() {
    use axum::http::{HeaderMap, StatusCode};
    let server = Server::start().await;
    let file = server.config.data_dir.join("operator.token");
    // As if the file belonged to another user than the program on the port.
    std::os::unix::fs::chown(&file, Some(65_534), None).unwrap();
    let (seen, mut received) = tokio::sync::mpsc::unbounded_channel();
    let refusal = json!({ "error": { "code": "UNAUTHENTICATED", "message": "no",
        "detail": { "operator_token_file": file.to_str().unwrap() } } });
    let answer = move |headers: HeaderMap| {
        let _ = seen.send(headers.contains_key("authorization"));
        let refusal = refusal.clone();
        async move { (StatusCode::UNAUTHORIZED, axum::Json(refusal)) }
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        axum::serve(listener, axum::Router::new().fallback(answer)).await.unwrap();
    });
    let mut command = std::process::Command::new(process::TOOLCRIB);
    command.args(["--server", &url, "keys", "ls"]).env_remove("TOOLCRIB_KEY");
    let output = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
    assert_eq!(output.status.code(), Some(3), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(received.recv().await, Some(false));
    assert!(received.try_recv().is_err(), "one request, without a token");
}

/// The hold of a call names this command, so it works for the owner of the token without a key.
#[tokio::test]
async fn the_owner_of_the_token_decides_approvals_with_a_command() {
    let server = Server::start().await;
    let rule = json!({ "verdict": "ask", "tools": ["calculation.eval"] });
    server.operator().put("/v1/rules/sums", rule).await.is(200);
    for (expression, verb, status) in [("6*7", "approve", "SUCCEEDED"), ("1", "reject", "FAILED")] {
        let body = json!({ "run_id": "r", "args": { "expression": expression } });
        let ticket = server.api().post("/v1/tools/calculation.eval/invoke", body).await.is(202);
        let approval = ticket["approval_id"].as_str().unwrap();
        run_cli(&server, &["approvals", verb, approval]).await;
        let call = server.api().finished(ticket["tool_call_id"].as_str().unwrap()).await;
        assert_eq!(call["status"], status, "{call}");
    }
}
