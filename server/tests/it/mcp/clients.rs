//! Real MCP clients whose server is killed while their call runs: each gets the result of its call,
//! and the tool is executed once.
//!
//! `scripts/test` installs the official SDKs and the AI SDK. Every other client of
//! `docs/integrations` is tested in the part `frameworks`. A client that is not installed is
//! skipped.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use serde_json::{Value, json};
use tokio::process::Command;

use crate::support::process::{Server, TOOLCRIB, text};
use crate::support::soon;

/// A directory of installed packages, from the environment.
pub fn directory(variable: &str) -> Option<PathBuf> {
    let found = std::env::var_os(variable).map(PathBuf::from);
    if found.is_none() {
        eprintln!("skipped: {variable} is not set; scripts/test sets it");
    }
    found
}

fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/mcp/clients").join(name)
}

/// Builds the command of a client for Python.
fn python(interpreter: &Path, client: &str) -> Command {
    let mut command = Command::new(interpreter);
    command.arg(script("call.py")).arg(client).env("TOOLCRIB_TEST_BINARY", TOOLCRIB);
    command
}

/// Builds the command of a client for JavaScript.
fn node(packages: &Path, client: &str) -> Command {
    let mut command = Command::new(packages.join("node_modules/.bin/node"));
    command.arg(script("call.mjs")).arg(client);
    command.env("TOOLCRIB_TEST_NODE_DIRECTORY", packages);
    command
}

/// Runs a client, and kills the server while its call runs. The call ends once the server is back.
/// Returns the output of the client.
async fn kill_during_call(mut command: Command) -> String {
    let mut server = Server::new().with("DOORS__MCP__RETRY_MS", 1_000);
    server.start().await;
    server.register("pc_1", "pay.once", "irreversible").await;
    command.arg(server.url("/mcp"));
    command.env("NO_PROXY", "127.0.0.1").env("no_proxy", "127.0.0.1");
    let child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let output = tokio::spawn(child.wait_with_output());
    let requests = soon("the call", server.poll_requests("pc_1", 1)).await;
    let id = text(&requests[0], "tool_call_id");
    // The stream of the client opens when the call is stored, before the tool gets it. A server
    // that answers later requests has sent its first event, which names the call.
    for _ in 0..20 {
        server.http.get(server.url("/livez")).send().await.unwrap();
    }
    server.kill();
    server.start().await;
    let report = json!({ "status": "SUCCEEDED", "result": { "paid": "seven" },
        "client_id": "pc_1", "attempt": requests[0]["attempt"] });
    server.submit(&id, report).await;
    let output = soon("the result", output).await.unwrap().unwrap();
    let (out, err) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{out}\n{err}");
    let polled = server.poll("pc_1", 10, 0).await;
    assert!(polled.is_empty(), "the tool was executed again: {polled:?}");
    let listed = server.http.get(server.url("/v1/tool_calls")).send().await.unwrap();
    let listed = listed.json::<Value>().await.unwrap();
    let calls = listed["tool_calls"].as_array().unwrap_or_else(|| panic!("{listed}"));
    assert_eq!(calls.len(), 1, "{listed}");
    out.into_owned()
}

/// Asserts that the client got the result. Returns the last line of its output.
async fn assert_gets_result(command: Command) -> String {
    let output = kill_during_call(command).await;
    assert!(output.contains("seven"), "{output}");
    output.lines().last().unwrap_or_default().to_owned()
}

#[tokio::test]
async fn the_python_sdk_gets_its_result_after_kill_9() {
    let Some(interpreter) = directory("TOOLCRIB_TEST_MCP_PYTHON") else { return };
    for client in ["sdk", "sdk_legacy"] {
        assert_gets_result(python(&interpreter, client)).await;
    }
}

#[tokio::test]
async fn the_python_sdk_gets_its_result_through_the_stdio_bridge() {
    let Some(interpreter) = directory("TOOLCRIB_TEST_MCP_PYTHON") else { return };
    for client in ["sdk_stdio", "sdk_stdio_legacy"] {
        assert_gets_result(python(&interpreter, client)).await;
    }
}

#[tokio::test]
async fn the_typescript_sdks_get_their_result_after_kill_9() {
    let Some(packages) = directory("TOOLCRIB_TEST_MCP_NODE") else { return };
    for client in ["sdk_v1", "sdk_v2"] {
        assert_gets_result(node(&packages, client)).await;
    }
}

#[tokio::test]
async fn the_ai_sdk_gets_its_result_after_kill_9() {
    let Some(packages) = directory("TOOLCRIB_TEST_MCP_NODE") else { return };
    let line = assert_gets_result(node(&packages, "ai_sdk")).await;
    let printed: Value = serde_json::from_str(&line).unwrap_or_else(|_| panic!("{line}"));
    assert_eq!(printed["result"]["unreadable"], json!([]), "it can read every event: {line}");
}
