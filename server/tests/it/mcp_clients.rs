//! Configurations of MCP clients whose server is killed during a call of ten seconds. The part
//! `mcp-clients` installs them, and is the only one that runs and counts these tests; without
//! `TOOLCRIB_TEST_MCP_CLIENTS` they do nothing.

use std::path::PathBuf;

use tokio::process::Command;

use crate::mcp::clients::{
    FAST, SLOW, assert_gets_result, directory, kill_during_call, node, python,
};

fn installed(name: &str) -> Option<PathBuf> {
    Some(directory("TOOLCRIB_TEST_MCP_CLIENTS")?.join(name))
}

async fn assert_python(packages: &str, client: &str) {
    let Some(directory) = installed(packages) else { return };
    assert_gets_result(python(&directory.join("bin/python"), client), SLOW).await;
}

async fn assert_node(packages: &str, client: &str) {
    let Some(directory) = installed(packages) else { return };
    assert_gets_result(node(&directory, client), SLOW).await;
}

#[tokio::test]
async fn python_sdk() {
    assert_python("python", "sdk").await;
}

#[tokio::test]
async fn python_sdk_v1() {
    assert_python("python-v1", "sdk_v1").await;
}

#[tokio::test]
async fn fastmcp() {
    assert_python("python", "fastmcp").await;
}

#[tokio::test]
async fn langchain() {
    assert_python("python-v1", "langchain").await;
}

#[tokio::test]
async fn pydantic_ai() {
    assert_python("python", "pydantic_ai").await;
}

#[tokio::test]
async fn openai_agents_for_python() {
    assert_python("python", "openai_agents").await;
}

#[tokio::test]
async fn llama_index() {
    assert_python("python", "llama_index").await;
}

#[tokio::test]
async fn google_adk() {
    assert_python("python", "google_adk").await;
}

#[tokio::test]
async fn typescript_sdk_v1() {
    assert_node("node", "sdk_v1").await;
}

#[tokio::test]
async fn typescript_sdk_v2() {
    assert_node("node", "sdk_v2").await;
}

#[tokio::test]
async fn ai_sdk() {
    assert_node("node", "ai_sdk").await;
}

#[tokio::test]
async fn mastra() {
    assert_node("node", "mastra").await;
}

#[tokio::test]
async fn openai_agents_for_javascript() {
    assert_node("node", "openai_agents").await;
}

#[tokio::test]
async fn inspector() {
    let Some(directory) = installed("node") else { return };
    let bin = directory.join("node_modules/.bin");
    let mut command = Command::new(bin.join("node"));
    command.arg(bin.join("mcp-inspector")).arg("--cli");
    let arguments = ["--method", "tools/call", "--tool-name", "pay.once", "--tool-arg", "sum=7"];
    // It supports tasks: a call of ten seconds is answered with a task after two, which it prints.
    let output = kill_during_call(command, &arguments, FAST).await;
    assert!(output.contains("seven"), "{output}");
}
