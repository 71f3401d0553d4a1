//! Upstreams that are added and removed while the crib runs, and what is left of them.

use serde_json::{Value, json};

use super::{at, call, in_state, words};
use crate::support::upstream::{Http, program};
use crate::support::{Api, Server, process, until};

#[tokio::test]
async fn what_is_added_is_there_after_a_restart_and_gone_when_removed() {
    let upstream = Http::start().await;
    let server = Server::start().await;
    let api = server.api();
    let body = json!({ "name": "fixture", "url": upstream.url() });
    let added = api.post("/v1/sources/mcp?wait_ms=30000", body).await.is(201);
    assert_eq!(added["sources"][0]["state"], "ready", "{added}");
    assert_eq!(words(&call(&api, "fixture.echo", json!({ "text": "a" })).await), "a");
    let server = server.restart().await;
    let api = server.api();
    // Its tools are known before it has answered.
    api.get("/v1/tools/fixture.echo").await.is(200);
    in_state(&api, "fixture", "ready").await;
    assert_eq!(words(&call(&api, "fixture.echo", json!({ "text": "b" })).await), "b");
    let listed = api.get("/v1/sources/mcp").await.is(200);
    assert_eq!(listed["sources"][0]["origin"], "api");
    api.delete("/v1/sources/mcp/fixture").await.is(204);
    api.get("/v1/sources/mcp/fixture").await.refused(404, "NOT_FOUND");
    api.get("/v1/tools/fixture.echo").await.refused(404, "TOOL_NOT_FOUND");
    api.delete("/v1/sources/mcp/fixture").await.refused(404, "NOT_FOUND");
}

#[tokio::test]
async fn the_configuration_of_desktop_clients_is_taken_as_it_is() {
    let (upstream, mut other) = (Http::start().await, program("good"));
    other.env.insert("TOKEN".into(), "sesame-open-123".into());
    let server = Server::start().await;
    let api = server.api();
    let body = json!({ "theme": "dark", "mcpServers": {
        "My Web": { "type": "http", "url": upstream.url(), "alwaysAllow": ["echo"] },
        "local": { "command": other.command, "args": other.args, "env": other.env } } });
    let added = api.post("/v1/sources/mcp?wait_ms=30000", body).await.is(201);
    let states: Vec<&Value> =
        added["sources"].as_array().unwrap().iter().map(|source| &source["state"]).collect();
    assert_eq!(states, ["ready", "ready"], "{added}");
    assert!(!added.to_string().contains("sesame-open-123"), "{added}");
    assert_eq!(words(&call(&api, "My-Web.echo", json!({ "text": "a" })).await), "a");
    assert_eq!(words(&call(&api, "local.echo", json!({ "text": "b" })).await), "b");
}

#[tokio::test]
async fn what_cannot_be_an_upstream_is_refused_by_its_field() {
    let server = Server::start().await;
    let api = server.api();
    for (body, field) in [
        (json!({ "name": "a.b", "url": "http://127.0.0.1:1/mcp" }), "name"),
        (json!({ "name": "a" }), "command"),
        (json!({ "name": "a", "url": "ftp://x" }), "url"),
        (json!({ "name": "a", "url": "http://x/", "command": "y" }), "command"),
        (json!({ "name": "a", "url": "http://x/", "max_tools": 0 }), "max_tools"),
        (json!({ "mcpServers": { "a": { "command": 7 } } }), "command"),
        (
            json!({ "mcpServers": { "a b": { "command": "x" }, "a-b": { "command": "y" } } }),
            "mcpServers",
        ),
    ] {
        let error = api.post("/v1/sources/mcp", body).await.refused(422, "VALIDATION_ERROR");
        assert_eq!(error["detail"]["pointer"], format!("/{field}"), "{error}");
    }
    let odd = json!({ "name": "a", "url": "http://x/", "colour": "blue" });
    let error = api.post("/v1/sources/mcp", odd).await.refused(422, "VALIDATION_ERROR");
    assert!(error["message"].as_str().unwrap().contains("colour"), "{error}");
    assert_eq!(api.get("/v1/sources/mcp").await.is(200), json!({ "sources": [] }));
}

#[tokio::test]
async fn a_key_cannot_start_programs_read_the_environment_or_reach_into_the_network() {
    let server = Server::start().await;
    let admin = server.keyed("default", "ops", "admin", &[]).await;
    let agent = server.keyed("default", "ada", "agent", &["*"]).await;
    let denied = |body: Value, api: &crate::support::Api| {
        let api = api.clone();
        async move { api.post("/v1/sources/mcp", body).await }
    };
    let program = json!({ "name": "a", "command": "true" });
    denied(program, &admin).await.refused(403, "PERMISSION_DENIED");
    let url = "https://mcp.example.com/";
    let headers = json!({ "Authorization": "Bearer ${HOME}" });
    let body = json!({ "name": "a", "url": url, "headers": headers });
    denied(body, &admin).await.refused(403, "PERMISSION_DENIED");
    let body = json!({ "name": "a", "url": "http://169.254.169.254/mcp" });
    denied(body, &admin).await.refused(422, "VALIDATION_ERROR");
    denied(json!({ "name": "a", "url": url }), &agent).await.refused(403, "PERMISSION_DENIED");
    agent.get("/v1/sources/mcp").await.refused(403, "PERMISSION_DENIED");
    denied(json!({ "name": "a", "url": url }), &admin).await.is(201);
}

#[tokio::test]
async fn a_program_that_is_removed_leaves_nothing_behind() {
    let server = Server::start().await;
    let api = server.api();
    let settings = serde_json::to_value(program("good")).unwrap();
    let added = api.post("/v1/sources/mcp?wait_ms=30000", settings).await.is(201);
    let pid = added["sources"][0]["pid"].as_u64().unwrap();
    let there = || std::fs::exists(format!("/proc/{pid}")).unwrap();
    assert!(there());
    api.delete("/v1/sources/mcp/fixture").await.is(204);
    until("the process to be gone, not a zombie", || async { (!there()).then_some(()) }).await;
}

/// Whether a process is there, and no zombie.
fn runs(pid: u64) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    state.is_some_and(|state| state != 'Z' && state != 'X')
}

#[tokio::test]
async fn a_program_does_not_outlive_a_server_that_is_killed() {
    let mut crib = process::Server::ready().await;
    let api = Api::new(&format!("127.0.0.1:{}", crib.port));
    let settings = serde_json::to_value(program("stubborn")).unwrap();
    let added = api.post("/v1/sources/mcp?wait_ms=30000", settings).await.is(201);
    let pid = added["sources"][0]["pid"].as_u64().unwrap();
    let started = until("what it has started", || async {
        let shown = api.get("/v1/sources/mcp/fixture").await.is(200);
        let lines = shown["stderr"].as_array().unwrap().clone();
        lines.iter().find_map(|line| line.as_str()?.strip_prefix("started ")?.parse::<u64>().ok())
    })
    .await;
    assert!(runs(pid) && runs(started));
    crib.kill();
    // It is asked to end and then made to, with what it has started.
    for pid in [pid, started] {
        until("it to be gone", || async { (!runs(pid)).then_some(()) }).await;
    }
}

#[tokio::test]
async fn one_in_the_configuration_is_changed_there_only() {
    let upstream = Http::start().await;
    let server = super::server(vec![at(&upstream.url())]).await;
    let api = server.api();
    api.delete("/v1/sources/mcp/fixture").await.refused(409, "CONFLICT");
    let body = json!({ "name": "fixture", "url": upstream.url() });
    api.post("/v1/sources/mcp", body).await.refused(409, "CONFLICT");
    // Out of the configuration, its tools are gone.
    let mut config = server.config.clone();
    config.mcp.clear();
    let server = server.restart_with(config).await;
    let api = server.api();
    until("its tools to be gone", || async {
        (api.get("/v1/tools/fixture.echo").await.status == 404).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_session_that_the_upstream_lost_is_made_again() {
    let upstream = Http::start().await;
    let mut settings = at(&upstream.url());
    settings.older = true;
    let server = super::server(vec![settings]).await;
    let api = server.api();
    assert_eq!(words(&call(&api, "fixture.echo", json!({ "text": "a" })).await), "a");
    let (address, fixture) = upstream.stop();
    let again = until("the address to be free", || async {
        tokio::net::TcpListener::bind(&address).await.ok().map(drop)
    });
    again.await;
    let _upstream = Http::start_at(&address, fixture).await;
    let body = json!({ "run_id": "r", "args": { "text": "b" }, "retry": 8 });
    let id = api.invoke_with("fixture.echo", body).await;
    assert_eq!(words(&api.finished(&id).await), "b");
}

#[tokio::test]
async fn one_that_is_removed_is_left_in_order() {
    let (server, upstream) = (Server::start().await, Http::start().await);
    let api = server.api();
    let sessions = || async { upstream.sessions.sessions.read().await.len() };
    for _ in 0..4 {
        let added = json!({ "name": "fixture", "url": upstream.url(), "older": true });
        api.post("/v1/sources/mcp?wait_ms=20000", added).await.is(201);
        in_state(&api, "fixture", "ready").await;
        assert_eq!(sessions().await, 1);
        api.delete("/v1/sources/mcp/fixture").await.is(204);
        // Its session is ended, and not left to time out.
        until("no session", || async { (sessions().await == 0).then_some(()) }).await;
    }
}
