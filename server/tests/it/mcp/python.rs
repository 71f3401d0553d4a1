//! The official Python SDK as a client. `scripts/test` installs it and names the interpreter in
//! `TOOLCRIB_TEST_MCP_PYTHON`; without that variable the test is skipped.

use std::process::Stdio;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::Command;

use crate::support::process::Server;
use crate::support::soon;

#[tokio::test]
async fn the_python_sdk_lists_calls_and_follows_a_task_across_a_restart() {
    let Some(python) = std::env::var_os("TOOLCRIB_TEST_MCP_PYTHON") else {
        eprintln!("skipped: TOOLCRIB_TEST_MCP_PYTHON is not set; scripts/test sets it");
        return;
    };
    let mut server = Server::ready().await;
    let post = |path: &str, body: Value| server.http.post(server.url(path)).json(&body);
    let schema = json!({ "type": "object", "properties": { "pages": { "type": "integer" } } });
    let tools = json!([{ "name": "report.make", "schema": schema, "async": true,
        "timeout_ms": 60_000, "effect": "idempotent" }]);
    let register = json!({ "client_id": "pc_1", "tools": tools });
    let answer = post("/internal/tools/register", register).send().await.unwrap();
    assert_eq!(answer.status().as_u16(), 200);

    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/mcp/client.py");
    let mut child = Command::new(python)
        .arg(script)
        .arg(server.url("/mcp"))
        .env("NO_PROXY", "127.0.0.1")
        .env("no_proxy", "127.0.0.1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut next = async || {
        let line = soon("a line of the script", output.next_line()).await.unwrap();
        let line = line.unwrap_or_else(|| panic!("the script ended early"));
        serde_json::from_str::<Value>(&line).unwrap_or_else(|_| panic!("{line}"))
    };
    let listed = next().await;
    assert_eq!(listed["protocol"], "2026-07-28", "{listed}");
    assert!(listed["tools"].as_array().unwrap().contains(&json!("calculation__eval")), "{listed}");
    assert_eq!(next().await["result"], json!({ "result": 42, "text": "42" }));
    assert_eq!(next().await["is_error"], true);
    let task = next().await["task"].as_str().unwrap().to_owned();
    assert!(task.starts_with("tc_"), "{task}");

    server.kill();
    server.start().await;
    input.write_all(b"restarted\n").await.unwrap();
    assert_eq!(next().await["status"], "working");
    let submit = json!({ "status": "SUCCEEDED", "result": { "pages": 7 } });
    let path = format!("/internal/tool_calls/{task}/submit");
    let answer = server.http.post(server.url(&path)).json(&submit).send().await.unwrap();
    assert_eq!(answer.status().as_u16(), 200, "{}", answer.text().await.unwrap());
    let done = next().await;
    assert_eq!(done["status"], "completed", "{done}");
    assert_eq!(done["result"]["structuredContent"], json!({ "pages": 7 }));
    assert!(soon("the end", child.wait()).await.unwrap().success());
}
