//! Real MCP clients whose server is killed while their call runs: each gets the result of its call,
//! and the tool is executed once.
//!
//! `scripts/test` installs the clients. The official SDKs and the AI SDK are always tested; the
//! others in the part `mcp-clients`, which sets `TOOLCRIB_TEST_MCP_CLIENTS`. A client that is not
//! installed is skipped.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

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
pub fn python(interpreter: &Path, client: &str) -> Command {
    let mut command = Command::new(interpreter);
    command.arg(script("call.py")).arg(client).env("TOOLCRIB_TEST_BINARY", TOOLCRIB);
    command
}

/// Builds the command of a client for JavaScript.
pub fn node(packages: &Path, client: &str) -> Command {
    let mut command = Command::new(packages.join("node_modules/.bin/node"));
    command.arg(script("call.mjs")).arg(client);
    command.env("TOOLCRIB_TEST_NODE_DIRECTORY", packages);
    command
}

/// The time that the tool takes, and the time after which the server is killed.
#[derive(Clone, Copy)]
pub struct Timing {
    tool: Duration,
    kill: Duration,
}

/// The call is killed once it runs, and ends once the server is back.
pub const FAST: Timing = Timing { tool: Duration::ZERO, kill: Duration::ZERO };

/// A call of ten seconds, killed after three.
pub const SLOW: Timing = Timing { tool: Duration::from_secs(10), kill: Duration::from_secs(3) };

/// Runs a client, and kills the server while its call runs. Returns the output of the client.
pub async fn kill_during_call(mut command: Command, arguments: &[&str], timing: Timing) -> String {
    let mut server = Server::new();
    if timing.tool.is_zero() {
        server = server.with("DOORS__MCP__RETRY_MS", 1_000);
    }
    server.start().await;
    server.register("pc_1", "pay.once", "irreversible").await;
    command.arg(server.url("/mcp")).args(arguments);
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
    let (began, id) = (Instant::now(), text(&requests[0], "tool_call_id"));
    tokio::time::sleep(timing.kill).await;
    server.kill();
    server.start().await;
    tokio::time::sleep(timing.tool.saturating_sub(began.elapsed())).await;
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
pub async fn assert_gets_result(command: Command, timing: Timing) -> String {
    let output = kill_during_call(command, &[], timing).await;
    assert!(output.contains("seven"), "{output}");
    output.lines().last().unwrap_or_default().to_owned()
}

#[tokio::test]
async fn the_python_sdk_gets_its_result_after_kill_9() {
    let Some(interpreter) = directory("TOOLCRIB_TEST_MCP_PYTHON") else { return };
    for client in ["sdk", "sdk_legacy"] {
        assert_gets_result(python(&interpreter, client), FAST).await;
    }
}

#[tokio::test]
async fn the_python_sdk_gets_its_result_through_the_stdio_bridge() {
    let Some(interpreter) = directory("TOOLCRIB_TEST_MCP_PYTHON") else { return };
    for client in ["sdk_stdio", "sdk_stdio_legacy"] {
        assert_gets_result(python(&interpreter, client), FAST).await;
    }
}

#[tokio::test]
async fn the_typescript_sdks_get_their_result_after_kill_9() {
    let Some(packages) = directory("TOOLCRIB_TEST_MCP_NODE") else { return };
    for client in ["sdk_v1", "sdk_v2"] {
        assert_gets_result(node(&packages, client), FAST).await;
    }
}

#[tokio::test]
async fn the_ai_sdk_gets_its_result_after_kill_9() {
    let Some(packages) = directory("TOOLCRIB_TEST_MCP_NODE") else { return };
    let line = assert_gets_result(node(&packages, "ai_sdk"), FAST).await;
    let printed: Value = serde_json::from_str(&line).unwrap_or_else(|_| panic!("{line}"));
    assert_eq!(printed["result"]["unreadable"], json!([]), "it can read every event: {line}");
}
