//! The framework matrix in its long form: each program of `docs/integrations` in every cell of the
//! table, with a call of 60 seconds and a server that is killed during a call of ten. Then agent
//! frameworks, and streams of OpenAI's own clients, whose connection breaks while a tool that must
//! not run twice is executed: what they send when they resume joins the conversation.
//!
//! The part `frameworks` installs them; without `TOOLCRIB_TEST_FRAMEWORKS` the tests are skipped.

use std::path::PathBuf;

use serde_json::json;
use tokio::process::Command;

use crate::integrations::{Form, PAGES, check_page};
use crate::mcp::clients::directory;
use crate::rejoin::sdks::run_with_cut_connection;

fn script(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/it/frameworks").join(name)
}

/// Returns the command of a script for Python, if its packages are installed.
fn python(packages: &str, name: &str) -> Option<Command> {
    let packages = directory("TOOLCRIB_TEST_FRAMEWORKS")?.join(packages);
    let mut command = Command::new(packages.join("bin/python"));
    command.arg(script(name));
    Some(command)
}

fn node(name: &str) -> Option<Command> {
    let packages = directory("TOOLCRIB_TEST_FRAMEWORKS")?.join("node");
    let mut command = Command::new(packages.join("node_modules/.bin/node"));
    command.arg(script(name)).env("TOOLCRIB_TEST_NODE_DIRECTORY", &packages);
    command.env("NODE_PATH", packages.join("node_modules"));
    Some(command)
}

#[tokio::test]
async fn a_thread_of_langgraph_is_resumed_after_a_cut_connection() {
    for way in ["invoke", "stream"] {
        let Some(command) = python("python-langchain", "langgraph_thread.py") else {
            return;
        };
        let answer = run_with_cut_connection(way, command).await;
        assert_eq!(answer, json!({ "text": "paid 5", "resumed": true }), "{way}");
    }
}

#[tokio::test]
async fn an_agent_of_mastra_goes_on_after_a_cut_connection() {
    for way in ["generate", "stream"] {
        let Some(command) = node("mastra.mjs") else { return };
        let answer = run_with_cut_connection(way, command).await;
        assert_eq!(answer["text"], "paid 5", "{way}: {answer}");
    }
}

#[tokio::test]
async fn a_stream_of_the_python_client_is_repeated_after_a_cut_connection() {
    for api_name in ["chat", "responses"] {
        let Some(command) = python("python", "stream.py") else { return };
        let answer = run_with_cut_connection(api_name, command).await;
        assert_eq!(answer, json!({ "text": "paid 5", "joined": true }), "{api_name}");
    }
}

#[tokio::test]
async fn a_stream_of_the_javascript_client_is_repeated_after_a_cut_connection() {
    for api_name in ["chat", "responses"] {
        let Some(command) = node("stream.cjs") else { return };
        let answer = run_with_cut_connection(api_name, command).await;
        assert_eq!(answer, json!({ "text": "paid 5", "joined": true }), "{api_name}");
    }
}

/// Runs a page with the packages that the part `frameworks` installs.
async fn check_long(page: &str) {
    let Some(packages) = directory("TOOLCRIB_TEST_FRAMEWORKS") else { return };
    let (_, name) = PAGES.iter().find(|(known, _)| *known == page).unwrap();
    let packages = packages.join(name);
    let interpreter = packages.join("bin/python");
    let runtime = if interpreter.exists() { interpreter } else { packages };
    check_page(page, &runtime, Form::Long).await;
}

#[tokio::test]
async fn fastmcp() {
    check_long("fastmcp").await;
}

#[tokio::test]
async fn google_adk() {
    check_long("google-adk").await;
}

#[tokio::test]
async fn langchain() {
    check_long("langchain").await;
}

#[tokio::test]
async fn llamaindex() {
    check_long("llamaindex").await;
}

#[tokio::test]
async fn mastra() {
    check_long("mastra").await;
}

#[tokio::test]
async fn mcp_inspector() {
    check_long("mcp-inspector").await;
}

#[tokio::test]
async fn mcp_python() {
    check_long("mcp-python").await;
}

#[tokio::test]
async fn mcp_typescript_v1() {
    check_long("mcp-typescript-v1").await;
}

#[tokio::test]
async fn mcp_typescript_v2() {
    check_long("mcp-typescript-v2").await;
}

#[tokio::test]
async fn openai_agents_javascript() {
    check_long("openai-agents-javascript").await;
}

#[tokio::test]
async fn openai_agents_python() {
    check_long("openai-agents-python").await;
}

#[tokio::test]
async fn openai_javascript() {
    check_long("openai-javascript").await;
}

#[tokio::test]
async fn openai_python() {
    check_long("openai-python").await;
}

#[tokio::test]
async fn pydantic_ai() {
    check_long("pydantic-ai").await;
}

#[tokio::test]
async fn vercel_ai_sdk() {
    check_long("vercel-ai-sdk").await;
}
