//! Upstreams that are added and removed while the server runs, and their cleanup.

use serde_json::{Value, json};

use super::{call, http_upstream, result_text, wait_for_state};
use crate::support::upstream::{Http, program};
use crate::support::{Api, Server, process, until};

#[tokio::test]
async fn an_added_upstream_survives_a_restart_until_it_is_removed() {
    let upstream = Http::start().await;
    let server = Server::start().await;
    let api = server.operator();
    let body = json!({ "name": "fixture", "url": upstream.url() });
    let added = api.post("/v1/sources/mcp?wait_ms=30000", body).await.is(201);
    assert_eq!(added["sources"][0]["state"], "ready", "{added}");
    assert_eq!(result_text(&call(&api, "fixture.echo", json!({ "text": "a" })).await), "a");
    let server = server.restart().await;
    let api = server.operator();
    // Its tools are known before it is connected again.
    api.get("/v1/tools/fixture.echo").await.is(200);
    wait_for_state(&api, "fixture", "ready").await;
    assert_eq!(result_text(&call(&api, "fixture.echo", json!({ "text": "b" })).await), "b");
    let listed = api.get("/v1/sources/mcp").await.is(200);
    assert_eq!(listed["sources"][0]["origin"], "api");
    api.delete("/v1/sources/mcp/fixture").await.is(204);
    api.get("/v1/sources/mcp/fixture").await.refused(404, "NOT_FOUND");
    api.get("/v1/tools/fixture.echo").await.refused(404, "TOOL_NOT_FOUND");
    api.delete("/v1/sources/mcp/fixture").await.refused(404, "NOT_FOUND");
}

#[tokio::test]
async fn the_tools_of_an_upstream_that_is_away_say_so() {
    let upstream = Http::start().await;
    let server = Server::start().await;
    let api = server.operator();
    let body = json!({ "name": "fixture", "url": upstream.url() });
    api.post("/v1/sources/mcp?wait_ms=30000", body).await.is(201);
    assert_eq!(api.get("/v1/tools/fixture.echo").await.is(200)["available"], true);
    upstream.stop();
    let server = server.restart().await;
    let api = server.operator();
    let tool = until("the tool to be unavailable", || async {
        let tool = api.get("/v1/tools/fixture.echo").await.is(200);
        (tool["available"] == false).then_some(tool)
    })
    .await;
    let reason = tool["unavailable_reason"].as_str().unwrap();
    assert!(reason.starts_with("the MCP server fixture is not available: "), "{reason}");
}

#[tokio::test]
async fn the_configuration_of_desktop_clients_is_accepted_unchanged() {
    let (upstream, mut other) = (Http::start().await, program("good"));
    other.env.insert("TOKEN".into(), "sesame-open-123".into());
    let server = Server::start().await;
    let api = server.operator();
    let body = json!({ "theme": "dark", "mcpServers": {
        "My Web": { "type": "http", "url": upstream.url(), "alwaysAllow": ["echo"] },
        "local": { "command": other.command, "args": other.args, "env": other.env } } });
    let added = api.post("/v1/sources/mcp?wait_ms=30000", body).await.is(201);
    let states: Vec<&Value> =
        added["sources"].as_array().unwrap().iter().map(|source| &source["state"]).collect();
    assert_eq!(states, ["ready", "ready"], "{added}");
    assert!(!added.to_string().contains("sesame-open-123"), "{added}");
    assert_eq!(result_text(&call(&api, "My-Web.echo", json!({ "text": "a" })).await), "a");
    assert_eq!(result_text(&call(&api, "local.echo", json!({ "text": "b" })).await), "b");
}

#[tokio::test]
async fn invalid_upstream_settings_are_refused_with_their_field() {
    let server = Server::start().await;
    let api = server.operator();
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
async fn a_key_cannot_add_programs_variables_or_private_addresses() {
    let server = Server::start().await;
    let admin = server.keyed("default", "ops", "admin", &[]).await;
    let agent = server.keyed("default", "ada", "agent", &["*"]).await;
    let add_source = |body: Value, api: &crate::support::Api| {
        let api = api.clone();
        async move { api.post("/v1/sources/mcp", body).await }
    };
    let program = json!({ "name": "a", "command": "true" });
    add_source(program, &admin).await.refused(403, "PERMISSION_DENIED");
    let url = "https://mcp.example.com/";
    let headers = json!({ "Authorization": "Bearer ${HOME}" });
    let body = json!({ "name": "a", "url": url, "headers": headers });
    add_source(body, &admin).await.refused(403, "PERMISSION_DENIED");
    let body = json!({ "name": "a", "url": "http://169.254.169.254/mcp" });
    add_source(body, &admin).await.refused(422, "VALIDATION_ERROR");
    add_source(json!({ "name": "a", "url": url }), &agent).await.refused(403, "PERMISSION_DENIED");
    agent.get("/v1/sources/mcp").await.refused(403, "PERMISSION_DENIED");
    add_source(json!({ "name": "a", "url": url }), &admin).await.is(201);
}

#[tokio::test]
async fn removing_an_upstream_ends_its_process() {
    let server = Server::start().await;
    let api = server.operator();
    let settings = serde_json::to_value(program("good")).unwrap();
    let added = api.post("/v1/sources/mcp?wait_ms=30000", settings).await.is(201);
    let pid = added["sources"][0]["pid"].as_u64().unwrap();
    let exists = || std::fs::exists(format!("/proc/{pid}")).unwrap();
    assert!(exists());
    api.delete("/v1/sources/mcp/fixture").await.is(204);
    until("the process to be gone, not a zombie", || async { (!exists()).then_some(()) }).await;
}

/// Returns true if the process exists and is not a zombie.
fn is_running(pid: u64) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    state.is_some_and(|state| state != 'Z' && state != 'X')
}

#[tokio::test]
async fn an_upstream_process_does_not_outlive_a_killed_server() {
    let mut server = process::Server::ready().await;
    let api = Api::new(&format!("127.0.0.1:{}", server.port))
        .key(&process::operator_token(&server.data_dir()));
    let settings = serde_json::to_value(program("stubborn")).unwrap();
    let added = api.post("/v1/sources/mcp?wait_ms=30000", settings).await.is(201);
    let pid = added["sources"][0]["pid"].as_u64().unwrap();
    let child_pid = until("what it has started", || async {
        let source = api.get("/v1/sources/mcp/fixture").await.is(200);
        let lines = source["stderr"].as_array().unwrap().clone();
        lines.iter().find_map(|line| line.as_str()?.strip_prefix("started ")?.parse::<u64>().ok())
    })
    .await;
    assert!(is_running(pid) && is_running(child_pid));
    server.kill();
    // The process and its child are terminated, first gracefully and then by force.
    for pid in [pid, child_pid] {
        until("it to be gone", || async { (!is_running(pid)).then_some(()) }).await;
    }
}

#[tokio::test]
async fn a_configured_upstream_cannot_be_changed_over_the_api() {
    let upstream = Http::start().await;
    let server = super::server(vec![http_upstream(&upstream.url())]).await;
    let api = server.operator();
    api.delete("/v1/sources/mcp/fixture").await.refused(409, "CONFLICT");
    let body = json!({ "name": "fixture", "url": upstream.url() });
    api.post("/v1/sources/mcp", body).await.refused(409, "CONFLICT");
    // Without its configuration entry, its tools are removed.
    let mut config = server.config.clone();
    config.mcp.clear();
    let server = server.restart_with(config).await;
    let api = server.operator();
    until("its tools to be gone", || async {
        (api.get("/v1/tools/fixture.echo").await.status == 404).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_session_that_the_upstream_lost_is_reestablished() {
    let upstream = Http::start().await;
    let mut settings = http_upstream(&upstream.url());
    settings.older = true;
    let server = super::server(vec![settings]).await;
    let api = server.operator();
    assert_eq!(result_text(&call(&api, "fixture.echo", json!({ "text": "a" })).await), "a");
    let (address, fixture) = upstream.stop();
    let again = until("the address to be free", || async {
        tokio::net::TcpListener::bind(&address).await.ok().map(drop)
    });
    again.await;
    let _upstream = Http::start_at(&address, fixture).await;
    let body = json!({ "run_id": "r", "args": { "text": "b" }, "retry": 8 });
    let id = api.invoke_with("fixture.echo", body).await;
    assert_eq!(result_text(&api.finished(&id).await), "b");
}

#[tokio::test]
async fn removing_an_upstream_ends_its_session() {
    let (server, upstream) = (Server::start().await, Http::start().await);
    let api = server.operator();
    let sessions = || async { upstream.sessions.sessions.read().await.len() };
    for _ in 0..4 {
        let added = json!({ "name": "fixture", "url": upstream.url(), "older": true });
        api.post("/v1/sources/mcp?wait_ms=20000", added).await.is(201);
        wait_for_state(&api, "fixture", "ready").await;
        assert_eq!(sessions().await, 1);
        api.delete("/v1/sources/mcp/fixture").await.is(204);
        // The session is ended at once and not by its timeout.
        until("no session", || async { (sessions().await == 0).then_some(()) }).await;
    }
}
