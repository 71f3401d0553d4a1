//! Results of MCP servers as models receive them: texts as text, images as images.

use std::sync::Arc;

use async_trait::async_trait;
use serde_json::{Value, json};
use toolcrib::domain::run::options::RunOptions;
use toolcrib::domain::run::progress::Conversation;
use toolcrib::ports::source::{Attempt, ProgressSink, Source, StartResult};
use toolcrib::{Batch, CallId, Caller, Effect, Engine, Executor, Json, Risk, ToolDefinition};

use crate::script::Script;

/// A file of 20 KB, in the form in which MCP servers return files: as text and as a structure.
fn file_result() -> Value {
    let text = "let total: u64 = 1_000; // \"quoted\"\n".repeat(600);
    json!({ "content": [{ "type": "text", "text": text },
        { "type": "image", "data": "QUJD", "mimeType": "image/png" }],
        "structuredContent": { "content": text }, "isError": false })
}

/// A tool of an MCP server.
struct FileSource;

#[async_trait]
impl Source for FileSource {
    fn executor(&self) -> Executor {
        Executor::MCP
    }

    fn list(&self) -> Vec<ToolDefinition> {
        vec![ToolDefinition {
            project: None,
            name: "files.read".to_owned(),
            description: "Reads a file".to_owned(),
            executor: Executor::MCP,
            input_schema: Json::from_value(&json!({ "type": "object" })),
            output_schema: None,
            timeout_ms: 60_000,
            background: false,
            effect: Effect::Read,
            risk: Risk::Low,
            policy: Default::default(),
            fallback: Vec::new(),
            binding: None,
            metadata: None,
        }]
    }

    async fn start(&self, _: Attempt, _: ProgressSink) -> StartResult {
        StartResult::Finished(Ok(Json::from_value(&file_result())))
    }

    fn cancel(&self, _: &CallId, _: u32) {}
}

async fn engine() -> Engine {
    Engine::builder().source(Arc::new(FileSource)).with_result_read_tool().start().await.unwrap()
}

fn text() -> String {
    file_result()["structuredContent"]["content"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn each_format_gets_the_text_once_and_the_image_in_its_own_form() {
    let engine = engine().await;
    let function = json!({ "name": "files.read", "arguments": "{}" });
    let entries = [
        json!({ "id": "a", "type": "function", "function": function }),
        json!({ "type": "function_call", "call_id": "b", "name": "files.read", "arguments": "{}" }),
        json!({ "type": "tool_use", "id": "c", "name": "files.read", "input": {} }),
    ];
    let entries = entries.iter().map(Json::from_value).collect();
    let batch = Batch::new("run_1".to_owned(), entries);
    let answer = engine.calls().run_batch(&Caller::local("default"), batch).await.unwrap();
    let messages: Vec<Value> = answer.messages.iter().map(Json::to_value).collect();
    assert_eq!(messages.len(), 4, "three answers, and the image of the chat format");
    let expected = format!("{}[image: image/png, 3 bytes]", text());
    assert_eq!(messages[0]["content"], expected);
    assert_eq!(messages[1]["output"][0], json!({ "type": "input_text", "text": expected }));
    assert_eq!(messages[1]["output"][1]["image_url"], "data:image/png;base64,QUJD");
    assert_eq!(messages[2]["content"][0]["text"], expected);
    let source = json!({ "type": "base64", "media_type": "image/png", "data": "QUJD" });
    assert_eq!(messages[2]["content"][1], json!({ "type": "image", "source": source }));
    assert_eq!(messages[3]["role"], "user");
    let image = json!({ "url": "data:image/png;base64,QUJD" });
    assert_eq!(messages[3]["content"][1], json!({ "type": "image_url", "image_url": image }));
    // A programmatic caller gets the result as it is.
    let entry = Json::from_value(&json!({ "call_id": "d", "name": "files.read", "args": {} }));
    let batch = Batch::new("run_1".to_owned(), vec![entry]);
    let answer = engine.calls().run_batch(&Caller::local("default"), batch).await.unwrap();
    assert_eq!(answer.messages[0].to_value()["data"], file_result());
}

#[tokio::test]
async fn a_run_shows_the_image_to_its_model_and_spends_no_tokens_on_the_envelope() {
    let engine = engine().await;
    let script = Script::default().calls(&[("call_1", "files__read", "{}")]).says("It is a file.");
    let mut conversation = Conversation::from_user_text("What is in it?");
    let options = RunOptions::new("scripted", "run_1");
    let caller = Caller::local("default");
    engine.runs().run_agent_loop(&caller, &script, &options, &mut conversation).await.unwrap();
    let messages = script.request(1).messages;
    let whole = serde_json::to_string(&messages).unwrap();
    assert!(!whole.contains("structuredContent"), "{}", &whole[..600]);
    let shown = messages.iter().find(|message| message["role"] == "tool").unwrap();
    let content = shown["content"].as_str().unwrap();
    assert!(content.contains("[image: image/png, 3 bytes]") || content.contains("result__read"));
    assert!(toolcrib::results::tokens::count(content) < 8_500, "{}", content.len());
    let last = messages.last().unwrap();
    assert_eq!(last["content"][1]["image_url"]["url"], "data:image/png;base64,QUJD", "{last}");
}
