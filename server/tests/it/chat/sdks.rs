//! The official clients, unchanged: `openai` for Python and for JavaScript, and the agent framework
//! of the same vendor. `scripts/test` installs them and sets
//! `TOOLCRIB_TEST_OPENAI_PYTHON` (an interpreter) and `TOOLCRIB_TEST_OPENAI_NODE` (a directory with
//! `node_modules`). Without these variables the tests are skipped.

use std::path::PathBuf;

use serde_json::{Value, json};
use tokio::process::Command;
use toolcrib_bench::model::{
    RecordedRequest, ScriptedAnswer, ScriptedBehavior, ScriptedModel, text_reply, tool_call_reply,
};

use super::*;
use crate::support::soon;

/// Replies with the action that the user's message names.
fn scripted_reply(request: &RecordedRequest) -> ScriptedBehavior {
    if request.body["model"] == "none" {
        let error = json!({ "message": "no such model", "code": "model_not_found" });
        return ScriptedBehavior::Refuse(404, None, json!({ "error": error }));
    }
    let messages = request.messages();
    let results: Vec<&str> = messages
        .iter()
        .filter(|message| message["role"] == "tool")
        .map(|message| message["content"].as_str().unwrap_or("?"))
        .collect();
    let last = messages.last().unwrap();
    if last["role"] == "tool" {
        let seen = |word: &str| results.iter().any(|result| result.contains(word));
        return match (seen("1024"), seen("xyzzy")) {
            (true, true) => text_reply("both came"),
            (true, false) => text_reply("it is 1024"),
            _ => text_reply("something is missing"),
        };
    }
    let eval = eval("2 ^ 10");
    match last["content"].as_str().unwrap_or_default() {
        "calculate" => tool_call_reply("call_a", "calculation__eval", &eval),
        "mixed" => {
            ScriptedBehavior::Reply(
                ScriptedAnswer::text("")
                    .with_call("call_own", "get_secret", r#"{"n": 1}"#)
                    .with_call("call_crib", "calculation__eval", eval.to_string()),
            )
        }
        "tools" => text_reply(request.tool_names().join(" ")),
        "count" => text_reply(format!("{} messages", messages.len())),
        other => text_reply(format!("what is {other:?}?")),
    }
}

/// Runs the script and returns its output lines as pairs.
async fn run_script(mut command: Command) -> Vec<(String, Value)> {
    command.env("NO_PROXY", "127.0.0.1").env("no_proxy", "127.0.0.1").kill_on_drop(true);
    let output = soon("the script's end", command.output()).await.unwrap();
    let (out, err) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{out}\n{err}");
    let line = |line: &str| {
        let line: Value = serde_json::from_str(line).unwrap_or_else(|_| panic!("{line}"));
        (line["what"].as_str().unwrap().to_owned(), line["value"].clone())
    };
    out.lines().map(line).collect()
}

fn script_path(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/it/chat").join(name)
}

fn expected_lines(lines: &[(&str, Value)]) -> Vec<(String, Value)> {
    lines.iter().map(|(label, value)| ((*label).to_owned(), value.clone())).collect()
}

#[tokio::test]
async fn the_python_client_and_the_agent_framework_work_unchanged() {
    let Some(python) = std::env::var_os("TOOLCRIB_TEST_OPENAI_PYTHON") else {
        eprintln!("skipped: TOOLCRIB_TEST_OPENAI_PYTHON is not set; scripts/test sets it");
        return;
    };
    let scripted = ScriptedModel::start_with_script(scripted_reply).await.unwrap();
    let server = start_with_model(&scripted).await;
    let mut command = Command::new(python);
    command.arg(script_path("client.py")).arg(format!("http://{}/v1", server.address));
    let lines = expected_lines(&[
        ("models", json!(["large", "demo"])),
        ("chat", json!("it is 1024")),
        ("chat usage", json!(30)),
        ("chat tools", json!("calculation__eval result__read run__finish")),
        ("chat stream", json!("it is 1024")),
        ("chat stream whole", json!("it is 1024")),
        ("chat calls", json!(["get_secret"])),
        ("chat mixed", json!("both came")),
        ("chat error", json!("model_not_found")),
        ("responses", json!("it is 1024")),
        ("responses stream", json!("it is 1024")),
        ("responses last event", json!("response.completed")),
        ("responses mixed", json!("both came")),
        // The first question, its call, the result, the answer, and the second question.
        ("responses before", json!("5 messages")),
        ("agents OpenAIChatCompletionsModel", json!("both came")),
        ("agents streamed OpenAIChatCompletionsModel", json!("both came")),
        ("agents OpenAIResponsesModel", json!("both came")),
        ("agents streamed OpenAIResponsesModel", json!("both came")),
    ]);
    assert_eq!(run_script(command).await, lines);
}

#[tokio::test]
async fn the_javascript_client_works_unchanged() {
    let Some(directory) = std::env::var_os("TOOLCRIB_TEST_OPENAI_NODE") else {
        eprintln!("skipped: TOOLCRIB_TEST_OPENAI_NODE is not set; scripts/test sets it");
        return;
    };
    let modules = PathBuf::from(directory).join("node_modules");
    let scripted = ScriptedModel::start_with_script(scripted_reply).await.unwrap();
    let server = start_with_model(&scripted).await;
    let mut command = Command::new(modules.join(".bin/node"));
    command.arg(script_path("client.cjs")).arg(format!("http://{}/v1", server.address));
    command.env("NODE_PATH", &modules);
    let lines = expected_lines(&[
        ("models", json!(["large", "demo"])),
        ("chat", json!("it is 1024")),
        ("chat usage", json!(30)),
        ("chat stream", json!("it is 1024")),
        ("chat mixed", json!("both came")),
        ("chat mixed stream", json!("both came")),
        ("chat error", json!([true, "model_not_found"])),
        ("responses", json!("it is 1024")),
        ("responses stream", json!("it is 1024")),
        ("responses mixed", json!("both came")),
    ]);
    assert_eq!(run_script(command).await, lines);
}
