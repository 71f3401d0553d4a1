//! Long results of MCP servers: their digests, and reading the rest.

use std::sync::Arc;

use async_trait::async_trait;
use serde_json::{Value, json};
use toolcrib::ports::source::{Attempt, ProgressSink, Source, StartResult};
use toolcrib::{CallId, Effect, Engine, Executor, Json, Risk, ToolDefinition};

use super::parse_read_hint;
use crate::support::Server;
use crate::support::mcp::Mcp;

/// Tools of an MCP server that return their arguments as the result.
struct EchoSource;

#[async_trait]
impl Source for EchoSource {
    fn executor(&self) -> Executor {
        Executor::MCP
    }

    fn list(&self) -> Vec<ToolDefinition> {
        let tool = |name: &str, output: Option<Value>| ToolDefinition {
            project: None,
            name: name.to_owned(),
            description: "says it back".to_owned(),
            executor: Executor::MCP,
            input_schema: Json::from_value(&json!({ "type": "object" })),
            output_schema: output.map(|schema| Json::from_value(&schema)),
            timeout_ms: 60_000,
            background: false,
            effect: Effect::Read,
            risk: Risk::Low,
            policy: Default::default(),
            fallback: Vec::new(),
            binding: None,
            metadata: None,
        };
        let object = json!({ "type": "object" });
        vec![tool("parrot.say", None), tool("parrot.promise", Some(object))]
    }

    async fn start(&self, attempt: Attempt, _: ProgressSink) -> StartResult {
        StartResult::Finished(Ok(attempt.args.clone()))
    }

    fn cancel(&self, _: &CallId, _: u32) {}
}

async fn start_server() -> Server {
    let engine = Engine::builder().source(Arc::new(EchoSource)).with_result_read_tool();
    Server::with_engine(engine.start().await.unwrap()).await
}

fn lines(word: &str) -> String {
    (0..10_000).map(|n| format!("{word} {n} of many\n")).collect()
}

fn content_types(result: &Value) -> Vec<&str> {
    let content = result["content"].as_array().unwrap_or_else(|| panic!("{result}"));
    content.iter().map(|block| block["type"].as_str().unwrap()).collect()
}

/// Reads the slice that the digest names.
async fn read_hinted_slice(client: &Mcp, result: &Value) -> (Value, String) {
    let hint = parse_read_hint(result);
    let read = client.call("result.read", hint.clone()).await.result();
    assert_eq!(read["isError"], false, "{read}");
    (hint, read["structuredContent"].to_string())
}

#[tokio::test]
async fn the_digest_of_a_long_text_says_how_to_read_the_rest() {
    let server = start_server().await;
    let picture = json!({ "type": "image", "data": "QUJD", "mimeType": "image/png" });
    let text = |text: &str| json!({ "type": "text", "text": text });
    for client in [Mcp::modern(&server.api()), Mcp::legacy(&server.api()).await] {
        let one = json!({ "content": [text(&lines("line"))] });
        let result = client.call("parrot.say", one).await.result();
        assert_eq!(content_types(&result), ["text", "resource_link"]);
        let (hint, slice) = read_hinted_slice(&client, &result).await;
        assert_eq!(hint["pointer"], "/content/0/text", "{hint}");
        assert!(slice.contains("line 99 of many"), "{slice}");
        // Images stay in the content, and the hint still points to the long text.
        let mixed = json!({ "content": [picture, text("a note"), text(&lines("line"))] });
        let result = client.call("parrot.say", mixed).await.result();
        assert_eq!(content_types(&result), ["text", "image", "resource_link"]);
        let digest = result["content"][0]["text"].as_str().unwrap();
        assert!(digest.contains("a note") && !digest.contains("QUJD"), "{digest}");
        let (hint, slice) = read_hinted_slice(&client, &result).await;
        assert_eq!(hint["pointer"], "/content/2/text", "{hint}");
        assert!(slice.contains("line 99 of many"), "{slice}");
        // Many texts of similar length are read as a table.
        let many: Vec<Value> =
            (0..50).map(|n| text(&lines(&format!("{n}. line"))[..9_000])).collect();
        let result = client.call("parrot.say", json!({ "content": many })).await.result();
        assert_eq!(content_types(&result), ["text", "resource_link"]);
        let (hint, slice) = read_hinted_slice(&client, &result).await;
        assert_eq!(hint["pointer"], "/content", "{hint}");
        assert!(slice.contains("0. line 9 of many"), "{slice}");
    }
}

#[tokio::test]
async fn long_resources_and_structured_content_are_digested_too() {
    let server = start_server().await;
    let (modern, legacy) = (Mcp::modern(&server.api()), Mcp::legacy(&server.api()).await);
    let resource =
        json!({ "uri": "file:///log", "mimeType": "text/plain", "text": lines("entry") });
    let data = json!({ "uri": "file:///data", "blob": "QUJD".repeat(20) });
    let embedded = |resource: &Value| json!({ "type": "resource", "resource": resource });
    let rows: Vec<Value> = (0..5_000).map(|n| json!({ "id": n, "said": "all is well" })).collect();
    let rows = json!({ "rows": rows });
    for client in [&modern, &legacy] {
        let arguments = json!({ "content": [embedded(&data), embedded(&resource)] });
        let result = client.call("parrot.say", arguments).await.result();
        assert_eq!(content_types(&result), ["text", "resource", "resource_link"]);
        assert_eq!(result["content"][1]["resource"]["uri"], "file:///data");
        let (hint, slice) = read_hinted_slice(client, &result).await;
        assert_eq!(hint["pointer"], "/content/1/resource/text", "{hint}");
        assert!(slice.contains("entry 99 of many"), "{slice}");

        let arguments = json!({ "content": [], "structuredContent": rows });
        let result = client.call("parrot.say", arguments.clone()).await.result();
        assert_eq!(content_types(&result), ["text", "resource_link"]);
        assert!(result["structuredContent"].is_null());
        let (hint, slice) = read_hinted_slice(client, &result).await;
        assert_eq!(hint["pointer"], "/structuredContent/rows", "{hint}");
        assert!(slice.contains("all is well"), "{slice}");
        // A tool with an output schema must return structured content of any length.
        let result = client.call("parrot.promise", arguments).await.result();
        assert_eq!(result["structuredContent"], rows);
    }
}
