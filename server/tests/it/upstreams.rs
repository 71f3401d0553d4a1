//! Upstream MCP servers: real programs over stdio and real servers over HTTP.

mod bad;
mod calling;
mod changing;
mod cli;
mod elicitation;
mod lifecycle;
mod oauth;
pub mod odd;
mod panicking;
mod passing;
mod tasks;

use serde_json::{Value, json};
use toolcrib_sources::mcp::McpServerSettings;

use crate::support::{Api, Server, until};

/// Starts a server with these configured upstreams and waits until all of them are ready.
async fn server(upstreams: Vec<McpServerSettings>) -> Server {
    let names: Vec<String> = upstreams.iter().map(|upstream| upstream.name.clone()).collect();
    let server = Server::with(|config| config.mcp = upstreams).await;
    for name in names {
        wait_for_state(&server.operator(), &name, "ready").await;
    }
    server
}

/// Waits until a source is in this state and returns the response that shows it.
pub async fn wait_for_state(api: &Api, name: &str, state: &str) -> Value {
    until(&format!("{name} to be {state}"), || async {
        let reply = api.get(&format!("/v1/sources/mcp/{name}")).await;
        (reply.body["state"] == state).then_some(reply.body)
    })
    .await
}

/// Calls a tool and waits until the call ends or is held.
async fn call(api: &Api, tool: &str, args: Value) -> Value {
    let path = format!("/v1/tools/{tool}/invoke?wait_ms=50000");
    let body = json!({ "run_id": "run_1", "args": args });
    let call = api.post(&path, body).await.body;
    assert!(call["status"] != "PENDING" || !call["hold"].is_null(), "{call}");
    call
}

/// Returns the text of a successful result.
fn result_text(call: &Value) -> &str {
    assert_eq!(call["status"], "SUCCEEDED", "{call}");
    call["result"]["content"][0]["text"].as_str().unwrap()
}

/// Settings of an upstream over HTTP.
pub fn http_upstream(url: &str) -> McpServerSettings {
    McpServerSettings {
        name: "fixture".into(),
        url: Some(url.to_owned()),
        ..McpServerSettings::default()
    }
}
