//! A command waits for a call while the server is killed.

use std::process::{Command, Stdio};

use serde_json::{Value, json};

use crate::support::process::{PATIENCE, Server, TOOLCRIB, eventually, text};

/// Returns the only call of a tool, once it is stored.
async fn only_call(server: &Server, tool: &str) -> Value {
    eventually("the call", PATIENCE, async || {
        let url = server.url(&format!("/v1/tool_calls?tool_name={tool}"));
        let list: Value = server.http.get(url).send().await.ok()?.json().await.ok()?;
        list["tool_calls"].as_array()?.first().cloned()
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiting_command_receives_the_result_from_the_restarted_server() {
    let mut server = Server::ready().await;
    server.register("client", "probe.parked", "read").await;
    let mut command = Command::new(TOOLCRIB);
    command.args(["--server", &server.url(""), "call", "probe.parked", "--wait", "60s"]);
    command.env_remove("TOOLCRIB_KEY");
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let id = text(&only_call(&server, "probe.parked").await, "tool_call_id");
    // The command may or may not have received the ticket.
    server.kill();
    server.start().await;
    server.submit(&id, json!({ "status": "SUCCEEDED", "result": { "late": true } })).await;
    let ran = tokio::task::spawn_blocking(|| child.wait_with_output().unwrap()).await.unwrap();
    let stderr = String::from_utf8_lossy(&ran.stderr).into_owned();
    assert!(ran.status.success(), "{stderr}");
    assert_eq!(serde_json::from_slice::<Value>(&ran.stdout).unwrap(), json!({ "late": true }));
    assert!(stderr.contains(&id), "{stderr}");
    assert!(server.stop().await.success());
}
