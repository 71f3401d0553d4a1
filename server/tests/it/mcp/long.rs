//! Long results of MCP servers: what is told in place of them, and how the rest is read.

use std::sync::Arc;

use async_trait::async_trait;
use serde_json::{Value, json};
use toolcrib::ports::source::{Attempt, ProgressSink, Source, Started};
use toolcrib::{CallId, Effect, Engine, Executor, Json, Risk, ToolDefinition};

use super::hint;
use crate::support::Server;
use crate::support::mcp::Mcp;

/// A tool of an MCP server that answers with what it is given.
struct Parrot;

#[async_trait]
impl Source for Parrot {
    fn executor(&self) -> Executor {
        Executor::Mcp
    }

    fn list(&self) -> Vec<ToolDefinition> {
        let tool = |name: &str, output: Option<Value>| ToolDefinition {
            project: None,
            name: name.to_owned(),
            description: "says it back".to_owned(),
            executor: Executor::Mcp,
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

    async fn start(&self, attempt: Attempt, _: ProgressSink) -> Started {
        Started::Finished(Ok(attempt.args.clone()))
    }

    fn cancel(&self, _: &CallId, _: u32) {}
}

async fn server() -> Server {
    let engine = Engine::builder().source(Arc::new(Parrot)).with_result_read_tool();
    Server::of(engine.start().await.unwrap()).await
}

fn lines(what: &str) -> String {
    (0..10_000).map(|n| format!("{what} {n} of many\n")).collect()
}

fn kinds(result: &Value) -> Vec<&str> {
    let content = result["content"].as_array().unwrap_or_else(|| panic!("{result}"));
    content.iter().map(|block| block["type"].as_str().unwrap()).collect()
}

/// Reads what the digest says that can be read.
async fn read(client: &Mcp, told: &Value) -> (Value, String) {
    let hint = hint(told);
    let read = client.call("result.read", hint.clone()).await.result();
    assert_eq!(read["isError"], false, "{read}");
    (hint, read["structuredContent"].to_string())
}

#[tokio::test]
async fn the_digest_of_a_long_text_says_how_to_read_the_rest() {
    let server = server().await;
    let picture = json!({ "type": "image", "data": "QUJD", "mimeType": "image/png" });
    let text = |text: &str| json!({ "type": "text", "text": text });
    for client in [Mcp::modern(&server.api()), Mcp::legacy(&server.api()).await] {
        let one = json!({ "content": [text(&lines("line"))] });
        let told = client.call("parrot.say", one).await.result();
        assert_eq!(kinds(&told), ["text", "resource_link"]);
        let (hint, part) = read(&client, &told).await;
        assert_eq!(hint["pointer"], "/content/0/text", "{hint}");
        assert!(part.contains("line 99 of many"), "{part}");
        // Pictures stay what they are, and do not hide where the text is.
        let beside = json!({ "content": [picture, text("a note"), text(&lines("line"))] });
        let told = client.call("parrot.say", beside).await.result();
        assert_eq!(kinds(&told), ["text", "image", "resource_link"]);
        let digest = told["content"][0]["text"].as_str().unwrap();
        assert!(digest.contains("a note") && !digest.contains("QUJD"), "{digest}");
        let (hint, part) = read(&client, &told).await;
        assert_eq!(hint["pointer"], "/content/2/text", "{hint}");
        assert!(part.contains("line 99 of many"), "{part}");
        // Many texts, none of them nearly everything, are a table.
        let many: Vec<Value> =
            (0..50).map(|n| text(&lines(&format!("{n}. line"))[..9_000])).collect();
        let told = client.call("parrot.say", json!({ "content": many })).await.result();
        assert_eq!(kinds(&told), ["text", "resource_link"]);
        let (hint, part) = read(&client, &told).await;
        assert_eq!(hint["pointer"], "/content", "{hint}");
        assert!(part.contains("0. line 9 of many"), "{part}");
    }
}

#[tokio::test]
async fn what_is_long_beside_the_text_is_digested_too() {
    let server = server().await;
    let (modern, legacy) = (Mcp::modern(&server.api()), Mcp::legacy(&server.api()).await);
    let resource =
        json!({ "uri": "file:///log", "mimeType": "text/plain", "text": lines("entry") });
    let data = json!({ "uri": "file:///data", "blob": "QUJD".repeat(20) });
    let embedded = |resource: &Value| json!({ "type": "resource", "resource": resource });
    let rows: Vec<Value> = (0..5_000).map(|n| json!({ "id": n, "said": "all is well" })).collect();
    let rows = json!({ "rows": rows });
    for client in [&modern, &legacy] {
        let given = json!({ "content": [embedded(&data), embedded(&resource)] });
        let told = client.call("parrot.say", given).await.result();
        assert_eq!(kinds(&told), ["text", "resource", "resource_link"]);
        assert_eq!(told["content"][1]["resource"]["uri"], "file:///data");
        let (hint, part) = read(client, &told).await;
        assert_eq!(hint["pointer"], "/content/1/resource/text", "{hint}");
        assert!(part.contains("entry 99 of many"), "{part}");

        let given = json!({ "content": [], "structuredContent": rows });
        let told = client.call("parrot.say", given.clone()).await.result();
        assert_eq!(kinds(&told), ["text", "resource_link"]);
        assert!(told["structuredContent"].is_null());
        let (hint, part) = read(client, &told).await;
        assert_eq!(hint["pointer"], "/structuredContent/rows", "{hint}");
        assert!(part.contains("all is well"), "{part}");
        // Where a structure was promised it has to be there, however long it is.
        let told = client.call("parrot.promise", given).await.result();
        assert_eq!(told["structuredContent"], rows);
    }
}
