//! MCP servers that ask for a token: a person signs in once, or the crib gets its tokens itself.

use std::sync::atomic::Ordering;

use reqwest::Client;
use reqwest::redirect::Policy;
use serde_json::{Value, json};
use toolcrib_sources::mcp::McpServerSettings;

use super::{at, call, in_state, server, words};
use crate::support::issuer::{Issuer, SECRET};
use crate::support::process::{self, TOOLCRIB};
use crate::support::{Api, Server, soon, until};

/// A server with an upstream that wants somebody to sign in.
async fn unsigned(issuer: &Issuer) -> Server {
    let server = Server::with(|config| config.mcp = vec![at(&issuer.url())]).await;
    in_state(&server.api(), "fixture", "needs_sign_in").await;
    server
}

async fn source(api: &Api) -> Value {
    api.get("/v1/sources/mcp/fixture").await.is(200)
}

/// Opens the address that is shown, and gives where the issuer sends the browser back to: the path
/// and the query, at whatever address this server is.
async fn opened(shown: &Value) -> String {
    let address = shown["oauth"]["sign_in_url"].as_str().unwrap_or_else(|| panic!("{shown}"));
    let browser = Client::builder().redirect(Policy::none()).build().unwrap();
    let sent = browser.get(address).send().await.unwrap();
    assert_eq!(sent.status(), 303, "{address}");
    let back = sent.headers()["location"].to_str().unwrap();
    let back = reqwest::Url::parse(back).unwrap();
    assert_eq!(back.path(), "/oauth/callback");
    format!("{}?{}", back.path(), back.query().unwrap())
}

async fn signed_in(api: &Api) {
    let back = opened(&source(api).await).await;
    let page = api.get(&back).await;
    assert_eq!(page.status, 200, "{}", page.text);
    in_state(api, "fixture", "ready").await;
}

/// Nothing that was ever secret is in this text.
#[track_caller]
fn assert_clean(issuer: &Issuer, text: &str) {
    for secret in issuer.books.secrets.lock().iter().map(String::as_str).chain([SECRET]) {
        assert!(!text.contains(secret), "{secret} is in {text}");
    }
}

#[tokio::test]
async fn somebody_signs_in_once_and_the_tools_are_there() {
    let issuer = Issuer::start().await;
    let server = unsigned(&issuer).await;
    let api = server.api();
    let shown = source(&api).await;
    assert!(shown["problem"].as_str().unwrap().contains("toolcrib mcp sign-in fixture"), "{shown}");
    assert_eq!(shown["oauth"]["signed_in"], false);
    assert_eq!(shown["oauth"]["grant"], "authorization_code");
    signed_in(&api).await;
    assert_eq!(words(&call(&api, "fixture.echo", json!({ "text": "hello" })).await), "hello");
    let shown = source(&api).await;
    assert_eq!(shown["oauth"]["signed_in"], true);
    assert_eq!(shown["oauth"]["scopes"], json!(["files", "offline_access"]));
    assert_eq!(shown["oauth"]["sign_in_url"], Value::Null);
    assert_clean(&issuer, &shown.to_string());
    assert_clean(&issuer, &api.get("/v1/sources/mcp").await.text);
    assert_eq!(issuer.books.authorized.load(Ordering::SeqCst), 1);
    assert_eq!(issuer.books.registered.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_call_before_the_sign_in_says_what_is_to_be_done() {
    let issuer = Issuer::start().await;
    let server = unsigned(&issuer).await;
    let api = server.api();
    signed_in(&api).await;
    api.delete("/v1/sources/mcp/fixture/sign-in").await.is(204);
    in_state(&api, "fixture", "needs_sign_in").await;
    let failed = call(&api, "fixture.echo", json!({ "text": "hello" })).await;
    assert_eq!(failed["status"], "FAILED", "{failed}");
    let message = failed["error"]["message"].as_str().unwrap();
    assert!(message.contains("toolcrib mcp sign-in fixture"), "{message}");
    assert!(!message.contains("http"), "the address is for operators: {message}");
}

#[tokio::test]
async fn a_state_is_good_once_and_only_for_who_has_it() {
    let issuer = Issuer::start().await;
    let server = unsigned(&issuer).await;
    let api = server.api();
    for guess in ["/oauth/callback", "/oauth/callback?code=c", "/oauth/callback?code=c&state=guess"]
    {
        let page = api.get(guess).await;
        assert_eq!(page.status, 400, "{guess}: {}", page.text);
    }
    let back = opened(&source(&api).await).await;
    // Another issuer than the one that was asked.
    let forged = back.replace("&iss=http%3A%2F%2F", "&iss=http%3A%2F%2Fevil.");
    assert_ne!(forged, back);
    assert_eq!(api.get(&forged).await.status, 400);
    assert_eq!(source(&api).await["oauth"]["signed_in"], false);
    assert_eq!(api.get(&back).await.status, 200);
    in_state(&api, "fixture", "ready").await;
    let again = api.get(&back).await;
    assert_eq!(again.status, 400, "{}", again.text);
    assert_eq!(again.header("cache-control"), Some("no-store"));
    assert!(again.header("content-type").unwrap().starts_with("text/plain"));
}

#[tokio::test]
async fn a_sign_in_that_was_refused_can_be_begun_again() {
    let issuer = Issuer::start().await;
    let server = unsigned(&issuer).await;
    let api = server.api();
    let shown = source(&api).await;
    let back = opened(&shown).await;
    let state = back.split(['&', '?']).find(|pair| pair.starts_with("state=")).unwrap();
    let page = api.get(&format!("/oauth/callback?error=access_denied&{state}")).await;
    assert_eq!(page.status, 400);
    assert!(page.text.contains("access_denied"), "{}", page.text);
    assert_eq!(api.get(&back).await.status, 400, "it is over");
    let first = shown["oauth"]["sign_in_url"].clone();
    until("another address", || async {
        let shown = source(&api).await;
        let problem = shown["problem"].as_str().unwrap_or_default().to_owned();
        let other = shown["oauth"]["sign_in_url"] != first;
        (other && problem.contains("access_denied")).then_some(())
    })
    .await;
    signed_in(&api).await;
}

#[tokio::test]
async fn a_restart_needs_no_new_sign_in() {
    let issuer = Issuer::start().await;
    let server = unsigned(&issuer).await;
    signed_in(&server.api()).await;
    let server = server.restart().await;
    in_state(&server.api(), "fixture", "ready").await;
    assert_eq!(issuer.books.authorized.load(Ordering::SeqCst), 1);
    // The one that was kept is renewed as well.
    issuer.books.revoke();
    let api = server.api();
    assert_eq!(words(&call(&api, "fixture.echo", json!({ "text": "still" })).await), "still");
    assert_eq!(issuer.books.refreshed.load(Ordering::SeqCst), 1);
    assert_eq!(issuer.books.registered.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_token_is_renewed_before_it_ends_and_when_it_is_refused() {
    let issuer = Issuer::start().await;
    issuer.books.lives.store(0, Ordering::SeqCst);
    let server = unsigned(&issuer).await;
    let api = server.api();
    signed_in(&api).await;
    issuer.books.lives.store(3_600, Ordering::SeqCst);
    let before = issuer.books.refreshed.load(Ordering::SeqCst);
    assert_eq!(words(&call(&api, "fixture.echo", json!({ "text": "a" })).await), "a");
    let after = issuer.books.refreshed.load(Ordering::SeqCst);
    assert!(after > before, "it was at its end");
    let calls = issuer.fixture.calls();
    issuer.books.revoke();
    assert_eq!(words(&call(&api, "fixture.echo", json!({ "text": "b" })).await), "b");
    assert_eq!(issuer.books.refreshed.load(Ordering::SeqCst), after + 1);
    assert_eq!(issuer.fixture.calls(), calls + 1, "what was turned away has not run");
    assert_eq!(issuer.books.authorized.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn somebody_is_asked_again_when_the_issuer_takes_it_back() {
    let issuer = Issuer::start().await;
    let server = unsigned(&issuer).await;
    let api = server.api();
    signed_in(&api).await;
    issuer.books.refuses.store(true, Ordering::SeqCst);
    issuer.books.revoke();
    let failed = call(&api, "fixture.add", json!({ "a": 1, "b": 2 })).await;
    assert_eq!(failed["status"], "FAILED", "{failed}");
    in_state(&api, "fixture", "needs_sign_in").await;
    issuer.books.refuses.store(false, Ordering::SeqCst);
    signed_in(&api).await;
    let sum = call(&api, "fixture.add", json!({ "a": 1, "b": 2 })).await;
    assert_eq!(sum["status"], "SUCCEEDED", "{sum}");
    assert_eq!(issuer.books.registered.load(Ordering::SeqCst), 1, "who we are is still known");
}

/// Our own settings for a client that is known beforehand.
fn machine(issuer: &Issuer) -> McpServerSettings {
    let oauth = json!({ "grant": "client_credentials", "client_id": "robot",
        "client_secret": SECRET });
    McpServerSettings { oauth: Some(serde_json::from_value(oauth).unwrap()), ..at(&issuer.url()) }
}

#[tokio::test]
async fn a_machine_gets_its_tokens_by_itself() {
    let issuer = Issuer::start().await;
    let server = server(vec![machine(&issuer)]).await;
    let api = server.api();
    assert_eq!(words(&call(&api, "fixture.echo", json!({ "text": "m2m" })).await), "m2m");
    issuer.books.revoke();
    assert_eq!(words(&call(&api, "fixture.echo", json!({ "text": "again" })).await), "again");
    assert_eq!(issuer.books.exchanged.load(Ordering::SeqCst), 2);
    let shown = source(&api).await;
    assert_eq!(shown["oauth"]["grant"], "client_credentials");
    assert_clean(&issuer, &shown.to_string());
    assert_eq!(issuer.books.authorized.load(Ordering::SeqCst), 0);
    api.post("/v1/sources/mcp/fixture/sign-in", json!({})).await.refused(409, "CONFLICT");
}

#[tokio::test]
async fn a_tool_that_needs_more_is_asked_for_once() {
    let issuer = Issuer::start().await;
    *issuer.books.guarded.lock() = Some(("add".into(), "sums".into()));
    let machine = server(vec![machine(&issuer)]).await;
    let sum = call(&machine.api(), "fixture.add", json!({ "a": 1, "b": 2 })).await;
    assert_eq!(sum["status"], "SUCCEEDED", "a machine asks by itself: {sum}");
    drop(machine);
    let server = unsigned(&issuer).await;
    let api = server.api();
    signed_in(&api).await;
    let refused = call(&api, "fixture.add", json!({ "a": 1, "b": 2 })).await;
    assert_eq!(refused["status"], "FAILED", "{refused}");
    let shown = source(&api).await;
    assert_eq!(shown["state"], "ready", "the others can still be called: {shown}");
    assert_eq!(words(&call(&api, "fixture.echo", json!({ "text": "x" })).await), "x");
    signed_in(&api).await;
    let sum = call(&api, "fixture.add", json!({ "a": 1, "b": 2 })).await;
    assert_eq!(sum["status"], "SUCCEEDED", "{sum}");
    // What was granted and is still not enough is not asked for again.
    *issuer.books.guarded.lock() = Some(("add".into(), "nothing-helps".into()));
    call(&api, "fixture.add", json!({ "a": 1, "b": 2 })).await;
    let shown = source(&api).await;
    assert!(shown["oauth"]["sign_in_url"].is_string(), "{shown}");
}

#[tokio::test]
async fn tokens_go_with_the_source_and_to_no_other_address() {
    let issuer = Issuer::start().await;
    let server = Server::start().await;
    let api = server.api();
    let added = json!({ "name": "fixture", "url": issuer.url() });
    api.post("/v1/sources/mcp?wait_ms=20000", added).await.is(201);
    signed_in(&api).await;
    assert_eq!(server.engine.upstreams_with_credentials().await.unwrap().len(), 1);
    // The same name at another address: what was granted is not for it.
    let other = Issuer::start().await;
    let moved = json!({ "name": "fixture", "url": other.url() });
    api.post("/v1/sources/mcp?wait_ms=20000", moved).await.is(201);
    in_state(&api, "fixture", "needs_sign_in").await;
    assert!(other.books.shown.lock().is_empty(), "it was shown somebody else's token");
    api.delete("/v1/sources/mcp/fixture").await.is(204);
    assert!(server.engine.upstreams_with_credentials().await.unwrap().is_empty());
}

#[tokio::test]
async fn a_source_of_a_key_is_no_way_into_the_network() {
    // The upstream may be where it is; that it names an issuer elsewhere does not help it.
    let issuer = Issuer::named("localhost").await;
    let hosts = vec!["127.0.0.1".to_owned()];
    let server = Server::with(|config| config.mcp_servers.allow_hosts = hosts).await;
    let admin = server.keyed("default", "ada", "admin", &["*"]).await;
    let added = json!({ "name": "fixture", "url": issuer.url() });
    admin.post("/v1/sources/mcp?wait_ms=20000", added).await.is(201);
    let shown = in_state(&admin, "fixture", "waiting").await;
    let problem = shown["problem"].as_str().unwrap();
    assert!(problem.contains("private network"), "{problem}");
    assert_eq!(issuer.books.registered.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn a_server_that_only_refuses_is_not_signed_in_to() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/mcp", listener.local_addr().unwrap());
    let refuse = || async { axum::http::StatusCode::UNAUTHORIZED };
    let router = axum::Router::new().route("/mcp", axum::routing::any(refuse));
    tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    let server = Server::with(|config| config.mcp = vec![at(&url)]).await;
    let shown = in_state(&server.api(), "fixture", "waiting").await;
    let problem = shown["problem"].as_str().unwrap();
    assert!(problem.contains("401") && problem.contains("header"), "{problem}");
}

/// The real binary, with everything in its log that it can say.
#[tokio::test]
async fn the_command_line_signs_in_and_nothing_secret_is_logged() {
    let issuer = Issuer::start().await;
    let mut crib = process::Server::new().with("LOG", "trace,rmcp=trace");
    crib.start().await;
    let api = Api::new(&format!("127.0.0.1:{}", crib.port));
    let to = format!("http://127.0.0.1:{}", crib.port);
    let run = async |words: &[&str]| {
        let mut command = tokio::process::Command::new(TOOLCRIB);
        command.args(words).args(["--server", &to]);
        let done = soon("the command", command.output()).await.unwrap();
        let said = String::from_utf8_lossy(&done.stderr).into_owned();
        assert!(done.status.success(), "{words:?}: {said}");
        String::from_utf8(done.stdout).unwrap()
    };
    let added = run(&["mcp", "add", "fixture", &issuer.url()]).await;
    assert!(added.contains("toolcrib mcp sign-in fixture"), "{added}");
    let address = run(&["mcp", "sign-in", "fixture", "--no-wait"]).await;
    assert!(address.trim().starts_with(&format!("http://{}/authorize?", issuer.address)));
    let waiting = run(&["mcp", "sign-in", "fixture"]);
    let person = async {
        // The command begins a sign-in of its own: the last address that is shown is the one.
        until("the address", || async {
            let shown = source(&api).await;
            (shown["oauth"]["sign_in_url"].as_str()? != address.trim()).then_some(())
        })
        .await;
        let back = opened(&source(&api).await).await;
        assert_eq!(api.get(&back).await.status, 200);
    };
    let (said, ()) = tokio::join!(waiting, person);
    assert!(said.starts_with("fixture is ready"), "{said}");
    assert_eq!(words(&call(&api, "fixture.echo", json!({ "text": "cli" })).await), "cli");
    run(&["mcp", "sign-out", "fixture"]).await;
    in_state(&api, "fixture", "needs_sign_in").await;
    let listed = run(&["mcp", "ls"]).await;
    assert!(listed.contains("needs_sign_in"), "{listed}");
    crib.stop().await;
    let log = crib.log();
    assert!(log.contains("fixture"), "{log}");
    assert_clean(&issuer, &log);
}
