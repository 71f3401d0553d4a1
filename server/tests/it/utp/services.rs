//! Tool services as other programs: the Python example, and the crib's own tools served to others.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use serde_json::json;

use crate::support::nats::{Nats, tool};

struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a program and waits for a line that begins with a word.
async fn start(mut command: Command, word: &'static str) -> Running {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn().unwrap();
    let out = child.stdout.take().unwrap();
    let running = Running(child);
    let found = tokio::task::spawn_blocking(move || {
        let mut lines = BufReader::new(out).lines();
        let found = lines.by_ref().map_while(Result::ok).any(|line| line.starts_with(word));
        // Who prints must be read, or it stops.
        std::thread::spawn(move || lines.for_each(drop));
        found
    })
    .await
    .unwrap();
    assert!(found, "it ended before it said \"{word}\"");
    running
}

/// A Python that has nats-py: `./scripts/test` makes one.
fn python() -> Command {
    Command::new(std::env::var("TOOLCRIB_TEST_PYTHON").unwrap_or_else(|_| "python3".into()))
}

#[tokio::test(flavor = "multi_thread")]
async fn the_python_example_serves_calls() {
    let Some(nats) = Nats::start().await else { return };
    let file = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../examples/python/utp_service.py");
    let lines = std::fs::read_to_string(&file).unwrap().lines().count();
    assert!(lines < 60, "a tool service in under 60 lines, not {lines}");
    let server = nats.server().await;
    let api = server.api();
    api.post("/projects/default/tools", tool("text.count", "count", json!({}))).await.is(201);
    let waiting = api.invoke("text.count", json!({ "text": "asked before it was there" })).await;
    let mut command = python();
    command.arg(&file).env("NATS_URL", nats.url());
    let _service = start(command, "ready").await;
    assert_eq!(api.finished(&waiting).await["result"], json!({ "words": 5 }));
    for n in 1..=10 {
        let id = api.invoke("text.count", json!({ "text": "w ".repeat(n) })).await;
        assert_eq!(api.finished(&id).await["result"], json!({ "words": n }));
    }
    let id = api.invoke("text.count", json!({ "nothing": true })).await;
    let call = api.finished(&id).await;
    assert_eq!(call["status"], "FAILED");
    assert!(call["error"]["message"].as_str().unwrap().contains("KeyError"), "{call}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_cribs_own_tools_are_served_to_others() {
    let Some(nats) = Nats::start().await else { return };
    let mut command = Command::new(env!("CARGO_BIN_EXE_toolcrib"));
    let data = tempfile::tempdir().unwrap();
    command.args(["utp", "serve", "--target", "crib", "--nats", &nats.url()]);
    command.arg("--data-dir").arg(data.path()).current_dir(data.path());
    let _service = start(command, "serving").await;
    // A crib without tools of its own sends the calls of a tool of that name to the other.
    let without = crate::support::Server::with(|config| {
        config.nats.url = Some(nats.url());
        config.builtin.enabled = false;
    })
    .await;
    let api = without.api();
    let sum = tool("calculation.eval", "crib", json!({}));
    api.post("/projects/default/tools", sum).await.is(201);
    let id = api.invoke("calculation.eval", json!({ "expression": "6*7" })).await;
    let call = api.finished(&id).await;
    assert_eq!(call["status"], "SUCCEEDED", "{call}");
    assert_eq!((&call["result"]["result"], &call["executor"]), (&json!(42), &json!("utp")));
    let id = api.invoke("calculation.eval", json!({ "expression": "1/0" })).await;
    let call = api.finished(&id).await;
    assert_eq!((&call["status"], &call["taken_by"]), (&json!("FAILED"), &json!("tool.toolcrib")));
    let id = api.invoke("calculation.eval", json!({ "wrong": 1 })).await;
    assert_eq!(api.finished(&id).await["error"]["code"], "VALIDATION_ERROR");
}
