//! Long results of MCP servers: their digests, and reading the rest.

use std::sync::Arc;

use async_trait::async_trait;
use serde_json::{Value, json};
use toolcrib::ports::source::{Attempt, ProgressSink, Source, StartResult};
use toolcrib::{CallId, Effect, Engine, Executor, Json, Risk, ToolDefinition};

use super::calling::poll_call_id;
use super::parse_read_hint;
use crate::support::api::offer_with;
use crate::support::mcp::{Mcp, McpResponse};
use crate::support::{Server, soon};

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
        // Arguments have a lower limit than results.
        let picture = attempt.args.to_value()["picture_bytes"].as_u64().map(|bytes| {
            let data = "QUJD".repeat(bytes as usize / 3);
            let picture = json!({ "type": "image", "data": data, "mimeType": "image/png" });
            Json::from_value(&json!({ "content": [picture] }))
        });
        StartResult::Finished(Ok(picture.unwrap_or_else(|| attempt.args.clone())))
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
    for (client, link) in [
        (Mcp::modern(&server.api()), Some("resource_link")),
        // Older clients fail at a part that they do not know.
        (Mcp::legacy(&server.api()).await, None),
    ] {
        let with_link =
            |types: &[&'static str]| types.iter().copied().chain(link).collect::<Vec<_>>();
        let one = json!({ "content": [text(&lines("line"))] });
        let result = client.call("parrot.say", one).await.result();
        assert_eq!(content_types(&result), with_link(&["text"]));
        let (hint, slice) = read_hinted_slice(&client, &result).await;
        assert_eq!(hint["pointer"], "/content/0/text", "{hint}");
        assert!(slice.contains("line 99 of many"), "{slice}");
        // Images stay in the content, and the hint still points to the long text.
        let mixed = json!({ "content": [picture, text("a note"), text(&lines("line"))] });
        let result = client.call("parrot.say", mixed).await.result();
        assert_eq!(content_types(&result), with_link(&["text", "image"]));
        let digest = result["content"][0]["text"].as_str().unwrap();
        assert!(digest.contains("a note") && !digest.contains("QUJD"), "{digest}");
        let (hint, slice) = read_hinted_slice(&client, &result).await;
        assert_eq!(hint["pointer"], "/content/2/text", "{hint}");
        assert!(slice.contains("line 99 of many"), "{slice}");
        // Many texts of similar length are read as a table.
        let many: Vec<Value> =
            (0..50).map(|n| text(&lines(&format!("{n}. line"))[..9_000])).collect();
        let result = client.call("parrot.say", json!({ "content": many })).await.result();
        assert_eq!(content_types(&result), with_link(&["text"]));
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
    for (client, link) in [(&modern, Some("resource_link")), (&legacy, None)] {
        let with_link =
            |types: &[&'static str]| types.iter().copied().chain(link).collect::<Vec<_>>();
        let arguments = json!({ "content": [embedded(&data), embedded(&resource)] });
        let result = client.call("parrot.say", arguments).await.result();
        assert_eq!(content_types(&result), with_link(&["text", "resource"]));
        assert_eq!(result["content"][1]["resource"]["uri"], "file:///data");
        let (hint, slice) = read_hinted_slice(client, &result).await;
        assert_eq!(hint["pointer"], "/content/1/resource/text", "{hint}");
        assert!(slice.contains("entry 99 of many"), "{slice}");

        let arguments = json!({ "content": [], "structuredContent": rows });
        let result = client.call("parrot.say", arguments.clone()).await.result();
        assert_eq!(content_types(&result), with_link(&["text"]));
        assert!(result["structuredContent"].is_null());
        let (hint, slice) = read_hinted_slice(client, &result).await;
        assert_eq!(hint["pointer"], "/structuredContent/rows", "{hint}");
        assert!(slice.contains("all is well"), "{slice}");
        // A tool with an output schema must return structured content: a shortened one.
        let result = client.call("parrot.promise", arguments).await.result();
        let structure = &result["structuredContent"];
        assert_eq!(structure["rows"][0], rows["rows"][0], "{result}");
        let tokens = toolcrib::results::tokens::count(&structure.to_string());
        assert!(tokens < 30_000, "{tokens}");
        assert!(structure["toolcrib_digest"].as_str().unwrap().contains("result__read"));
    }
}

#[tokio::test]
async fn structured_content_always_matches_the_schema_that_the_client_has_seen() {
    let server = start_server().await;
    let api = server.api();
    let schema = json!({ "type": "object", "required": ["rows", "total"], "additionalProperties": false,
        "properties": { "total": { "type": "integer" }, "rows": { "type": "array", "items": {
            "type": "object", "required": ["id"], "properties": { "id": { "type": "integer" } } } } } });
    let rows: Vec<Value> =
        (0..20_000).map(|n| json!({ "id": n, "note": "x".repeat(20) })).collect();
    api.register("pc_1", json!([offer_with("rows.typed", json!({ "output_schema": schema }))]))
        .await;
    for client in [Mcp::modern(&api), Mcp::legacy(&api).await] {
        for (report, is_error) in
            [(json!({ "rows": rows, "total": 20_000 }), false), (Value::Null, true)]
        {
            let request =
                client.request("tools/call", json!({ "name": "rows.typed", "arguments": {} }));
            let request_task =
                tokio::spawn(async move { McpResponse::read(request.send().await.unwrap()).await });
            let id = poll_call_id(&api).await;
            match is_error {
                true => api.fail(&id, json!({ "message": "no rows", "retryable": false })).await,
                false => api.succeed(&id, report).await,
            };
            let result = soon("the answer", request_task).await.unwrap().result();
            assert_eq!(result["isError"], is_error, "{}", result["content"]);
            let structure = &result["structuredContent"];
            if is_error {
                assert!(structure.is_null(), "{structure}");
                assert_eq!(result["_meta"]["toolcrib/error"]["code"], "RUNTIME_ERROR");
                continue;
            }
            assert_eq!(structure["total"], 20_000);
            assert_eq!(structure["rows"][0]["id"], 0);
            assert_eq!(structure.as_object().unwrap().len(), 2, "no more entries are allowed");
            let size = result.to_string().len();
            assert!(size < 200_000, "{size} bytes");
        }
    }
}

#[tokio::test]
async fn a_picture_of_two_megabytes_reaches_every_client() {
    let server = start_server().await;
    for client in [Mcp::modern(&server.api()), Mcp::legacy(&server.api()).await] {
        let result =
            client.call("parrot.say", json!({ "picture_bytes": 2_100_000 })).await.result();
        assert_eq!(result["content"][0]["data"].as_str().unwrap().len(), 2_800_000);
    }
}

#[tokio::test]
async fn only_clients_that_handle_links_get_those_of_an_mcp_server() {
    let server = start_server().await;
    let api = server.api();
    let link = json!({ "type": "resource_link", "uri": "file:///b.pdf", "name": "b",
        "description": "the plan" });
    let text = |text: &str| json!({ "type": "text", "text": text });
    let declared = json!({ "experimental": { "toolcrib/resource_links": {} } });
    for (client, handles_links) in [
        (Mcp::modern(&api), true),
        (Mcp::legacy_with(&api, declared).await, true),
        (Mcp::modern(&api).named("mcp"), false),
        (Mcp::legacy(&api).await, false),
    ] {
        let short = json!({ "content": [text("see"), link] });
        let result = client.call("parrot.say", short).await.result();
        let shown = &result["content"][1];
        match handles_links {
            true => assert_eq!(*shown, link, "{result}"),
            false => assert_eq!(*shown, text("[link to b file:///b.pdf: the plan]"), "{result}"),
        }
        let long = json!({ "content": [text(&lines("line")), link] });
        let result = client.call("parrot.say", long).await.result();
        let types = content_types(&result);
        assert_eq!(types.contains(&"resource_link"), handles_links, "{types:?}");
        assert!(result["content"][1].to_string().contains("file:///b.pdf"), "{result}");
    }
}
