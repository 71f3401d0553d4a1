//! Agent frameworks, and streams of OpenAI's own clients, whose connection breaks while a tool that
//! must not run twice is executed. What they send when they resume joins the conversation.
//!
//! The part `frameworks` installs them; without their variables the tests are skipped.

use std::path::PathBuf;

use serde_json::json;
use tokio::process::Command;

use crate::mcp::clients::directory;
use crate::rejoin::sdks::run_with_cut_connection;

fn script(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/it/frameworks").join(name)
}

/// Returns the command of a script for Python, if its packages are installed.
fn python(variable: &str, name: &str) -> Option<Command> {
    let mut command = Command::new(directory(variable)?);
    command.arg(script(name));
    Some(command)
}

fn node(variable: &str, name: &str) -> Option<Command> {
    let packages = directory(variable)?;
    let mut command = Command::new(packages.join("node_modules/.bin/node"));
    command.arg(script(name)).env("TOOLCRIB_TEST_NODE_DIRECTORY", &packages);
    command.env("NODE_PATH", packages.join("node_modules"));
    Some(command)
}

#[tokio::test]
async fn a_thread_of_langgraph_is_resumed_after_a_cut_connection() {
    for way in ["invoke", "stream"] {
        let Some(command) = python("TOOLCRIB_TEST_LANGGRAPH_PYTHON", "langgraph_thread.py") else {
            return;
        };
        let answer = run_with_cut_connection(way, command).await;
        assert_eq!(answer, json!({ "text": "paid 5", "resumed": true }), "{way}");
    }
}

#[tokio::test]
async fn an_agent_of_mastra_goes_on_after_a_cut_connection() {
    for way in ["generate", "stream"] {
        let Some(command) = node("TOOLCRIB_TEST_MASTRA_NODE", "mastra.mjs") else { return };
        let answer = run_with_cut_connection(way, command).await;
        assert_eq!(answer["text"], "paid 5", "{way}: {answer}");
    }
}

#[tokio::test]
async fn a_stream_of_the_python_client_is_repeated_after_a_cut_connection() {
    for api_name in ["chat", "responses"] {
        let Some(command) = python("TOOLCRIB_TEST_OPENAI_PYTHON", "stream.py") else { return };
        let answer = run_with_cut_connection(api_name, command).await;
        assert_eq!(answer, json!({ "text": "paid 5", "joined": true }), "{api_name}");
    }
}

#[tokio::test]
async fn a_stream_of_the_javascript_client_is_repeated_after_a_cut_connection() {
    for api_name in ["chat", "responses"] {
        let Some(command) = node("TOOLCRIB_TEST_OPENAI_NODE", "stream.cjs") else { return };
        let answer = run_with_cut_connection(api_name, command).await;
        assert_eq!(answer, json!({ "text": "paid 5", "joined": true }), "{api_name}");
    }
}
