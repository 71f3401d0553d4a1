//! `toolcrib mcp`: the real binary over stdio, alone and as a proxy of a server.

use std::process::Stdio;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

use crate::support::process::{Server, TOOLCRIB};
use crate::support::soon;

struct StdioClient {
    child: Child,
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
}

impl StdioClient {
    fn start(arguments: &[&str]) -> Self {
        let mut command = Command::new(TOOLCRIB);
        for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("TOOLCRIB_")) {
            command.env_remove(name);
        }
        let mut child = command
            .arg("mcp")
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, input, output }
    }

    async fn send_message(&mut self, message: Value) {
        self.input.write_all(format!("{message}\n").as_bytes()).await.unwrap();
    }

    async fn request(&mut self, id: u64, method: &str, params: Value) -> Value {
        self.send_message(
            json!({ "jsonrpc": "2.0", "id": id, "method": method, "params": params }),
        )
        .await;
        self.read_answer(id).await
    }

    async fn read_answer(&mut self, id: u64) -> Value {
        loop {
            let line = soon("an answer", self.output.next_line()).await.unwrap();
            let line = line.unwrap_or_else(|| panic!("{id}: the pipe was closed"));
            let message: Value = serde_json::from_str(&line).unwrap_or_else(|_| panic!("{line}"));
            if message["id"] == id {
                return message;
            }
        }
    }

    /// Performs the legacy handshake, lists the tools, makes one call, and returns the tool names.
    async fn run_session(mut self) -> Vec<String> {
        let params = json!({ "protocolVersion": "2025-11-25", "capabilities": {},
            "clientInfo": { "name": "test", "version": "1" } });
        let hello = self.request(1, "initialize", params).await;
        assert_eq!(hello["result"]["serverInfo"]["name"], "toolcrib", "{hello}");
        self.send_message(json!({ "jsonrpc": "2.0", "method": "notifications/initialized" })).await;
        let listed = self.request(2, "tools/list", json!({})).await;
        let tools = listed["result"]["tools"].as_array().unwrap_or_else(|| panic!("{listed}"));
        let names = tools.iter().map(|tool| tool["name"].as_str().unwrap().to_owned()).collect();
        let call = json!({ "name": "calculation.eval", "arguments": { "expression": "6*7" } });
        let called = self.request(3, "tools/call", call).await;
        assert_eq!(called["result"]["structuredContent"]["result"], 42, "{called}");
        let repeated =
            r#"{"name":"calculation.eval","arguments":{"expression":"1","expression":"2"}}"#;
        let line =
            format!(r#"{{"jsonrpc":"2.0","id":4,"method":"tools/call","params":{repeated}}}"#);
        self.input.write_all(format!("{line}\n").as_bytes()).await.unwrap();
        let refused = self.read_answer(4).await;
        let error = &refused["result"]["_meta"]["toolcrib/error"];
        assert_eq!(error["code"], "VALIDATION_ERROR", "a repeated key: {refused}");
        drop(self.input);
        let ended = soon("the end", self.child.wait()).await.unwrap();
        assert!(ended.success(), "{ended}");
        names
    }
}

#[tokio::test]
async fn without_a_server_the_command_runs_on_a_data_directory() {
    let directory = tempfile::tempdir().unwrap();
    let data_dir = directory.path().join("data");
    let data_dir = data_dir.to_str().unwrap();
    let names = StdioClient::start(&["--data-dir", data_dir]).run_session().await;
    assert!(names.contains(&"weather__query".to_owned()), "{names:?}");
    // A second process opens the same data directory.
    let names = StdioClient::start(&["--data-dir", data_dir, "--catalogue", "search"]);
    let mut client = names;
    let params = json!({ "name": "tools.search", "arguments": { "query": "weather" },
        "_meta": { "io.modelcontextprotocol/protocolVersion": "2026-07-28",
            "io.modelcontextprotocol/clientInfo": { "name": "test", "version": "1" },
            "io.modelcontextprotocol/clientCapabilities": {} } });
    let found = client.request(1, "tools/call", params).await;
    let tools = &found["result"]["structuredContent"]["tools"];
    assert_eq!(tools[0]["name"], "weather__query", "{found}");
}

#[tokio::test]
async fn with_a_server_the_command_forwards_to_it() {
    let server = Server::ready().await;
    let url = format!("http://127.0.0.1:{}", server.port);
    let options = ["--server", url.as_str(), "--names", "dotted"];
    let names = StdioClient::start(&options).run_session().await;
    assert!(names.contains(&"calculation.eval".to_owned()), "{names:?}");
    let calls = server.http.get(server.url("/v1/tool_calls")).send().await.unwrap();
    let calls: Value = calls.json().await.unwrap();
    assert_eq!(calls["tool_calls"].as_array().unwrap().len(), 1, "the server has the call");
}

#[tokio::test]
async fn requests_written_all_at_once_are_answered() {
    let server = Server::ready().await;
    let url = format!("http://127.0.0.1:{}", server.port);
    let mut client = StdioClient::start(&["--server", &url]);
    let params = json!({ "protocolVersion": "2025-11-25", "capabilities": {},
        "clientInfo": { "name": "test", "version": "1" } });
    client
        .send_message(
            json!({ "jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params }),
        )
        .await;
    client.send_message(json!({ "jsonrpc": "2.0", "method": "notifications/initialized" })).await;
    let call = json!({ "name": "calculation.eval", "arguments": { "expression": "6*7" } });
    client
        .send_message(json!({ "jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": call }))
        .await;
    let StdioClient { mut child, input, mut output } = client;
    drop(input);
    let mut answers = Vec::new();
    while let Some(line) = soon("the output", output.next_line()).await.unwrap() {
        answers.push(serde_json::from_str::<Value>(&line).unwrap());
    }
    let last = answers.last().unwrap();
    assert_eq!(last["result"]["structuredContent"]["result"], 42, "{answers:?}");
    assert!(soon("the end", child.wait()).await.unwrap().success());
}

#[tokio::test]
async fn an_unreachable_server_ends_the_command_with_code_4() {
    let mut client = StdioClient::start(&["--server", "http://127.0.0.1:9"]);
    let params = json!({ "protocolVersion": "2025-11-25", "capabilities": {},
        "clientInfo": { "name": "test", "version": "1" } });
    client
        .send_message(
            json!({ "jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params }),
        )
        .await;
    let ended = soon("the end", client.child.wait()).await.unwrap();
    assert_eq!(ended.code(), Some(4), "not reachable");
}

#[tokio::test]
async fn a_process_on_the_data_directory_ends_when_its_key_is_revoked() {
    let server = Server::new();
    let run = |arguments: &[&str]| {
        let output = server.command(arguments).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice::<Value>(&output.stdout).unwrap()
    };
    run(&["keys", "create", "--agent", "operator", "--role", "admin", "--json"]);
    let network = ["--network", "127.0.0.1"];
    let create = ["keys", "create", "--agent", "ada", "--allow", "*", "--json"];
    let key = run(&[&create[..], &network].concat());
    let data_dir = server.data_dir();
    let directory = data_dir.to_str().unwrap();
    let mut client =
        StdioClient::start(&["--data-dir", directory, "--key", key["key"].as_str().unwrap()]);
    let params = json!({ "protocolVersion": "2025-11-25", "capabilities": {},
        "clientInfo": { "name": "test", "version": "1" } });
    let hello = client.request(1, "initialize", params).await;
    assert_eq!(hello["result"]["serverInfo"]["name"], "toolcrib", "{hello}");
    run(&["keys", "revoke", key["id"].as_str().unwrap(), "--json"]);
    let end = async { while client.output.next_line().await.unwrap().is_some() {} };
    soon("the process to end", end).await;
    assert!(!client.child.wait().await.unwrap().success());
}
