//! The official clients of OpenAI for Python and JavaScript, which repeat a request by themselves
//! when its connection breaks. `scripts/test` installs them, see `chat/sdks.rs`.

use std::path::PathBuf;

use serde_json::{Value, json};
use tokio::process::Command;

use super::conversations::start_paying;
use super::proxy::CuttingProxy;
use super::{count_calls, text};
use crate::support::soon;

fn script_path(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/it/rejoin").join(name)
}

/// Runs a client whose first connection breaks after the request was sent. The call is made once,
/// and the client's own retry gets the answer.
async fn check_client(api_name: &str, command: Command) {
    let answer = run_with_cut_connection(api_name, command).await;
    assert_eq!(answer, json!({ "text": "paid 5", "joined": true }), "{api_name}");
}

/// Runs a client whose first connection breaks after the request was sent, and asserts that the
/// call was made once. Returns the output of the client.
pub async fn run_with_cut_connection(api_name: &str, mut command: Command) -> Value {
    let (server, model) = start_paying("irreversible").await;
    let api = server.api();
    let proxy = CuttingProxy::start(&server.address).await;
    command.arg(format!("http://{}/v1", proxy.address)).arg(api_name);
    command.env("NO_PROXY", "127.0.0.1").env("no_proxy", "127.0.0.1").kill_on_drop(true);
    let mut client = tokio::spawn(async move { command.output().await.unwrap() });
    let request = tokio::select! {
        request = api.poll("bank") => request,
        ended = &mut client => panic!("{api_name}: the client ended early: {:?}", ended.unwrap()),
    };
    proxy.cut_first_connection();
    api.succeed(text(&request, "tool_call_id"), json!({ "paid": 5 })).await;
    let output = soon("the client's end", client).await.unwrap();
    let (out, err) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{api_name}: {out}\n{err}");
    let last = out.lines().last().unwrap_or_default();
    let answer: Value = serde_json::from_str(last).unwrap_or_else(|_| panic!("{out}\n{err}"));
    assert_eq!((count_calls(&api).await, model.requests().len()), (1, 2), "{api_name}");
    // The conversation went on with the result, and did not begin again.
    let last = model.requests()[1].last_content();
    assert!(last.contains("paid"), "{api_name}: {last}");
    answer
}

#[tokio::test]
async fn a_retry_of_the_python_client_joins_its_conversation() {
    let Some(python) = std::env::var_os("TOOLCRIB_TEST_OPENAI_PYTHON") else {
        eprintln!("skipped: TOOLCRIB_TEST_OPENAI_PYTHON is not set; scripts/test sets it");
        return;
    };
    for api_name in ["chat", "responses"] {
        let mut command = Command::new(&python);
        command.arg(script_path("client.py"));
        check_client(api_name, command).await;
    }
}

#[tokio::test]
async fn a_retry_of_the_javascript_client_joins_its_conversation() {
    let Some(directory) = std::env::var_os("TOOLCRIB_TEST_OPENAI_NODE") else {
        eprintln!("skipped: TOOLCRIB_TEST_OPENAI_NODE is not set; scripts/test sets it");
        return;
    };
    let modules = PathBuf::from(directory).join("node_modules");
    for api_name in ["chat", "responses"] {
        let mut command = Command::new(modules.join(".bin/node"));
        command.arg(script_path("client.cjs")).env("NODE_PATH", &modules);
        check_client(api_name, command).await;
    }
}
