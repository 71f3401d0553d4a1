//! Upstreams that require OAuth: a person signs in once, or Toolcrib uses client credentials.

use std::sync::atomic::Ordering;

use reqwest::Client;
use reqwest::redirect::Policy;
use serde_json::{Value, json};
use toolcrib_sources::mcp::McpServerSettings;

use super::{call, http_upstream, result_text, server, wait_for_state};
use crate::support::issuer::{Issuer, SECRET};
use crate::support::process::{self, TOOLCRIB};
use crate::support::{Api, Server, soon, until};

/// Starts a server with an upstream that needs a sign-in.
async fn start_signed_out_server(issuer: &Issuer) -> Server {
    let server = Server::with(|config| config.mcp = vec![http_upstream(&issuer.url())]).await;
    wait_for_state(&server.operator(), "fixture", "needs_sign_in").await;
    server
}

async fn get_source(api: &Api) -> Value {
    api.get("/v1/sources/mcp/fixture").await.is(200)
}

/// Opens the sign-in URL of the source and returns the path and query of the redirect, without the
/// address of the server.
async fn follow_sign_in_url(source: &Value) -> String {
    let address = source["oauth"]["sign_in_url"].as_str().unwrap_or_else(|| panic!("{source}"));
    let browser = Client::builder().redirect(Policy::none()).build().unwrap();
    let response = browser.get(address).send().await.unwrap();
    assert_eq!(response.status(), 303, "{address}");
    let location = response.headers()["location"].to_str().unwrap();
    let location = reqwest::Url::parse(location).unwrap();
    assert_eq!(location.path(), "/oauth/callback");
    format!("{}?{}", location.path(), location.query().unwrap())
}

async fn sign_in(api: &Api) {
    let back = follow_sign_in_url(&get_source(api).await).await;
    let page = api.get(&back).await;
    assert_eq!(page.status, 200, "{}", page.text);
    wait_for_state(api, "fixture", "ready").await;
}

/// Asserts that the text contains no secret of the issuer.
#[track_caller]
fn assert_no_secrets(issuer: &Issuer, text: &str) {
    for secret in issuer.books.secrets.lock().iter().map(String::as_str).chain([SECRET]) {
        assert!(!text.contains(secret), "{secret} is in {text}");
    }
}

#[tokio::test]
async fn one_sign_in_makes_the_tools_available() {
    let issuer = Issuer::start().await;
    let server = start_signed_out_server(&issuer).await;
    let api = server.operator();
    let source = get_source(&api).await;
    assert!(
        source["problem"].as_str().unwrap().contains("toolcrib mcp sign-in fixture"),
        "{source}"
    );
    assert_eq!(source["oauth"]["signed_in"], false);
    assert_eq!(source["oauth"]["grant"], "authorization_code");
    sign_in(&api).await;
    assert_eq!(result_text(&call(&api, "fixture.echo", json!({ "text": "hello" })).await), "hello");
    let source = get_source(&api).await;
    assert_eq!(source["oauth"]["signed_in"], true);
    assert_eq!(source["oauth"]["scopes"], json!(["files", "offline_access"]));
    assert_eq!(source["oauth"]["sign_in_url"], Value::Null);
    assert_no_secrets(&issuer, &source.to_string());
    assert_no_secrets(&issuer, &api.get("/v1/sources/mcp").await.text);
    assert_eq!(issuer.books.authorized.load(Ordering::SeqCst), 1);
    assert_eq!(issuer.books.registered.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_call_without_a_sign_in_names_the_sign_in_command() {
    let issuer = Issuer::start().await;
    let server = start_signed_out_server(&issuer).await;
    let api = server.operator();
    sign_in(&api).await;
    api.delete("/v1/sources/mcp/fixture/sign-in").await.is(204);
    wait_for_state(&api, "fixture", "needs_sign_in").await;
    let failed = call(&api, "fixture.echo", json!({ "text": "hello" })).await;
    assert_eq!(failed["status"], "FAILED", "{failed}");
    let message = failed["error"]["message"].as_str().unwrap();
    assert!(message.contains("toolcrib mcp sign-in fixture"), "{message}");
    assert!(!message.contains("http"), "the address is for operators: {message}");
}

#[tokio::test]
async fn an_oauth_state_is_valid_once_and_cannot_be_forged() {
    let issuer = Issuer::start().await;
    let server = start_signed_out_server(&issuer).await;
    let api = server.operator();
    for guess in ["/oauth/callback", "/oauth/callback?code=c", "/oauth/callback?code=c&state=guess"]
    {
        let page = api.get(guess).await;
        assert_eq!(page.status, 400, "{guess}: {}", page.text);
    }
    let back = follow_sign_in_url(&get_source(&api).await).await;
    // The callback names another issuer.
    let forged = back.replace("&iss=http%3A%2F%2F", "&iss=http%3A%2F%2Fevil.");
    assert_ne!(forged, back);
    assert_eq!(api.get(&forged).await.status, 400);
    assert_eq!(get_source(&api).await["oauth"]["signed_in"], false);
    assert_eq!(api.get(&back).await.status, 200);
    wait_for_state(&api, "fixture", "ready").await;
    let again = api.get(&back).await;
    assert_eq!(again.status, 400, "{}", again.text);
    assert_eq!(again.header("cache-control"), Some("no-store"));
    assert!(again.header("content-type").unwrap().starts_with("text/plain"));
}

#[tokio::test]
async fn a_denied_sign_in_can_be_repeated() {
    let issuer = Issuer::start().await;
    let server = start_signed_out_server(&issuer).await;
    let api = server.operator();
    let source = get_source(&api).await;
    let back = follow_sign_in_url(&source).await;
    let state = back.split(['&', '?']).find(|pair| pair.starts_with("state=")).unwrap();
    let page = api.get(&format!("/oauth/callback?error=access_denied&{state}")).await;
    assert_eq!(page.status, 400);
    assert!(page.text.contains("access_denied"), "{}", page.text);
    assert_eq!(api.get(&back).await.status, 400, "the state is used up");
    let first = source["oauth"]["sign_in_url"].clone();
    until("another address", || async {
        let source = get_source(&api).await;
        let problem = source["problem"].as_str().unwrap_or_default().to_owned();
        let other = source["oauth"]["sign_in_url"] != first;
        (other && problem.contains("access_denied")).then_some(())
    })
    .await;
    sign_in(&api).await;
}

#[tokio::test]
async fn a_restart_needs_no_new_sign_in() {
    let issuer = Issuer::start().await;
    let server = start_signed_out_server(&issuer).await;
    sign_in(&server.operator()).await;
    let server = server.restart().await;
    wait_for_state(&server.operator(), "fixture", "ready").await;
    assert_eq!(issuer.books.authorized.load(Ordering::SeqCst), 1);
    // The stored token can be refreshed too.
    issuer.books.revoke();
    let api = server.operator();
    assert_eq!(result_text(&call(&api, "fixture.echo", json!({ "text": "still" })).await), "still");
    assert_eq!(issuer.books.refreshed.load(Ordering::SeqCst), 1);
    assert_eq!(issuer.books.registered.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_token_is_refreshed_before_expiry_and_on_rejection() {
    let issuer = Issuer::start().await;
    issuer.books.lives.store(0, Ordering::SeqCst);
    let server = start_signed_out_server(&issuer).await;
    let api = server.operator();
    sign_in(&api).await;
    issuer.books.lives.store(3_600, Ordering::SeqCst);
    let before = issuer.books.refreshed.load(Ordering::SeqCst);
    assert_eq!(result_text(&call(&api, "fixture.echo", json!({ "text": "a" })).await), "a");
    let after = issuer.books.refreshed.load(Ordering::SeqCst);
    assert!(after > before, "the token had expired");
    let calls = issuer.fixture.calls();
    issuer.books.revoke();
    assert_eq!(result_text(&call(&api, "fixture.echo", json!({ "text": "b" })).await), "b");
    assert_eq!(issuer.books.refreshed.load(Ordering::SeqCst), after + 1);
    assert_eq!(issuer.fixture.calls(), calls + 1, "the rejected request must not run the tool");
    assert_eq!(issuer.books.authorized.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_rejected_refresh_token_requires_a_new_sign_in() {
    let issuer = Issuer::start().await;
    let server = start_signed_out_server(&issuer).await;
    let api = server.operator();
    sign_in(&api).await;
    issuer.books.refuses.store(true, Ordering::SeqCst);
    issuer.books.revoke();
    let failed = call(&api, "fixture.add", json!({ "a": 1, "b": 2 })).await;
    assert_eq!(failed["status"], "FAILED", "{failed}");
    wait_for_state(&api, "fixture", "needs_sign_in").await;
    issuer.books.refuses.store(false, Ordering::SeqCst);
    sign_in(&api).await;
    let sum = call(&api, "fixture.add", json!({ "a": 1, "b": 2 })).await;
    assert_eq!(sum["status"], "SUCCEEDED", "{sum}");
    assert_eq!(
        issuer.books.registered.load(Ordering::SeqCst),
        1,
        "the client registration is still valid"
    );
}

/// Settings of a preregistered OAuth client.
fn machine_client(issuer: &Issuer) -> McpServerSettings {
    let oauth = json!({ "grant": "client_credentials", "client_id": "robot",
        "client_secret": SECRET });
    McpServerSettings {
        oauth: Some(serde_json::from_value(oauth).unwrap()),
        ..http_upstream(&issuer.url())
    }
}

#[tokio::test]
async fn client_credentials_tokens_are_fetched() {
    let issuer = Issuer::start().await;
    let server = server(vec![machine_client(&issuer)]).await;
    let api = server.operator();
    assert_eq!(result_text(&call(&api, "fixture.echo", json!({ "text": "m2m" })).await), "m2m");
    issuer.books.revoke();
    assert_eq!(result_text(&call(&api, "fixture.echo", json!({ "text": "again" })).await), "again");
    assert_eq!(issuer.books.exchanged.load(Ordering::SeqCst), 2);
    let source = get_source(&api).await;
    assert_eq!(source["oauth"]["grant"], "client_credentials");
    assert_no_secrets(&issuer, &source.to_string());
    assert_eq!(issuer.books.authorized.load(Ordering::SeqCst), 0);
    api.post("/v1/sources/mcp/fixture/sign-in", json!({})).await.refused(409, "CONFLICT");
}

#[tokio::test]
async fn an_additional_scope_is_requested_once() {
    let issuer = Issuer::start().await;
    *issuer.books.guarded.lock() = Some(("add".into(), "sums".into()));
    let machine_server = server(vec![machine_client(&issuer)]).await;
    let sum = call(&machine_server.operator(), "fixture.add", json!({ "a": 1, "b": 2 })).await;
    assert_eq!(sum["status"], "SUCCEEDED", "client credentials need no person: {sum}");
    drop(machine_server);
    let server = start_signed_out_server(&issuer).await;
    let api = server.operator();
    sign_in(&api).await;
    let refused = call(&api, "fixture.add", json!({ "a": 1, "b": 2 })).await;
    assert_eq!(refused["status"], "FAILED", "{refused}");
    let source = get_source(&api).await;
    assert_eq!(source["state"], "ready", "other tools can still be called: {source}");
    assert_eq!(result_text(&call(&api, "fixture.echo", json!({ "text": "x" })).await), "x");
    sign_in(&api).await;
    let sum = call(&api, "fixture.add", json!({ "a": 1, "b": 2 })).await;
    assert_eq!(sum["status"], "SUCCEEDED", "{sum}");
    // A granted scope that is still insufficient is not requested again.
    *issuer.books.guarded.lock() = Some(("add".into(), "nothing-helps".into()));
    call(&api, "fixture.add", json!({ "a": 1, "b": 2 })).await;
    let source = get_source(&api).await;
    assert!(source["oauth"]["sign_in_url"].is_string(), "{source}");
}

#[tokio::test]
async fn tokens_are_bound_to_the_url_and_deleted_with_the_source() {
    let issuer = Issuer::start().await;
    let server = Server::start().await;
    let api = server.operator();
    let added = json!({ "name": "fixture", "url": issuer.url() });
    api.post("/v1/sources/mcp?wait_ms=20000", added).await.is(201);
    sign_in(&api).await;
    assert_eq!(server.engine.upstreams().list_with_credentials().await.unwrap().len(), 1);
    // The same name at another URL: the tokens are not sent to it.
    let other = Issuer::start().await;
    let moved = json!({ "name": "fixture", "url": other.url() });
    api.post("/v1/sources/mcp?wait_ms=20000", moved).await.is(201);
    wait_for_state(&api, "fixture", "needs_sign_in").await;
    assert!(other.books.presented_tokens.lock().is_empty(), "the token was sent to another URL");
    api.delete("/v1/sources/mcp/fixture").await.is(204);
    assert!(server.engine.upstreams().list_with_credentials().await.unwrap().is_empty());
}

#[tokio::test]
async fn an_upstream_cannot_name_an_issuer_in_a_private_network() {
    // The upstream is on an allowed host, the issuer that it names is not.
    let issuer = Issuer::start_on("localhost").await;
    let hosts = vec!["127.0.0.1".to_owned()];
    let server = Server::with(|config| config.mcp_servers.allow_hosts = hosts).await;
    let admin = server.keyed("default", "ada", "admin", &["*"]).await;
    let added = json!({ "name": "fixture", "url": issuer.url() });
    admin.post("/v1/sources/mcp?wait_ms=20000", added).await.is(201);
    let source = wait_for_state(&admin, "fixture", "waiting").await;
    let problem = source["problem"].as_str().unwrap();
    assert!(problem.contains("private network"), "{problem}");
    assert_eq!(issuer.books.registered.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn a_401_without_oauth_metadata_starts_no_sign_in() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/mcp", listener.local_addr().unwrap());
    let refuse = || async { axum::http::StatusCode::UNAUTHORIZED };
    let router = axum::Router::new().route("/mcp", axum::routing::any(refuse));
    tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    let server = Server::with(|config| config.mcp = vec![http_upstream(&url)]).await;
    let source = wait_for_state(&server.operator(), "fixture", "waiting").await;
    let problem = source["problem"].as_str().unwrap();
    assert!(problem.contains("401") && problem.contains("header"), "{problem}");
}

/// Runs the real binary with the most verbose log level.
#[tokio::test]
async fn the_command_line_signs_in_and_nothing_secret_is_logged() {
    let issuer = Issuer::start().await;
    let mut server = process::Server::new().with("LOG", "trace,rmcp=trace");
    server.start().await;
    let api = Api::new(&format!("127.0.0.1:{}", server.port))
        .key(&process::operator_token(&server.data_dir()));
    let server_url = format!("http://127.0.0.1:{}", server.port);
    let run = async |arguments: &[&str]| {
        let mut command = tokio::process::Command::new(TOOLCRIB);
        command.args(arguments).args(["--server", &server_url]);
        let done = soon("the command", command.output()).await.unwrap();
        let output = String::from_utf8_lossy(&done.stderr).into_owned();
        assert!(done.status.success(), "{arguments:?}: {output}");
        String::from_utf8(done.stdout).unwrap()
    };
    let added = run(&["mcp", "add", "fixture", &issuer.url()]).await;
    assert!(added.contains("toolcrib mcp sign-in fixture"), "{added}");
    let address = run(&["mcp", "sign-in", "fixture", "--no-wait"]).await;
    assert!(address.trim().starts_with(&format!("http://{}/authorize?", issuer.address)));
    let waiting = run(&["mcp", "sign-in", "fixture"]);
    let person = async {
        // The command starts another sign-in: only the latest URL is valid.
        until("the address", || async {
            let source = get_source(&api).await;
            (source["oauth"]["sign_in_url"].as_str()? != address.trim()).then_some(())
        })
        .await;
        let back = follow_sign_in_url(&get_source(&api).await).await;
        assert_eq!(api.get(&back).await.status, 200);
    };
    let (output, ()) = tokio::join!(waiting, person);
    assert!(output.starts_with("fixture is ready"), "{output}");
    assert_eq!(result_text(&call(&api, "fixture.echo", json!({ "text": "cli" })).await), "cli");
    run(&["mcp", "sign-out", "fixture"]).await;
    wait_for_state(&api, "fixture", "needs_sign_in").await;
    let listed = run(&["mcp", "ls"]).await;
    assert!(listed.contains("needs_sign_in"), "{listed}");
    server.stop().await;
    let log = server.log();
    assert!(log.contains("fixture"), "{log}");
    assert_no_secrets(&issuer, &log);
}
