//! The OpenAI-compatible API with Toolcrib's tools: requests of clients, requests to the model's
//! endpoint, and responses.

mod completions;
mod keys;
mod mixed;
mod refusals;
mod responses;
mod sdks;
mod streaming;
mod summaries;

use serde_json::{Value, json};
use toolcrib_bench::model::{RecordedRequest, ScriptedBehavior, ScriptedModel};

use crate::support::Server;

/// The name of the configured model.
const MODEL: &str = "large";

/// Starts a server whose model gives these replies in order.
async fn start_with_replies(
    replies: impl IntoIterator<Item = ScriptedBehavior>,
) -> (Server, ScriptedModel) {
    let scripted = ScriptedModel::start_with_replies(replies).await.unwrap();
    (start_with_model(&scripted).await, scripted)
}

async fn start_with_model(scripted: &ScriptedModel) -> Server {
    Server::with(|config| {
        config.llm.base_url = Some(scripted.url.clone());
        config.llm.model = Some(MODEL.into());
    })
    .await
}

/// A chat request that selects only the tool `calculation.eval`.
fn question(text: &str) -> Value {
    json!({
        "model": MODEL,
        "messages": [{ "role": "user", "content": text }],
        "toolcrib": { "tools": ["calculation.eval"] },
    })
}

/// The same question as the body of a run.
fn run_question(text: &str) -> Value {
    json!({
        "model": MODEL,
        "messages": [{ "role": "user", "content": text }],
        "tools": ["calculation.eval"],
    })
}

/// The definition of a caller tool, which the client executes itself.
fn caller_tool(name: &str) -> Value {
    json!({ "type": "function", "function": { "name": name, "description": "The client's own",
        "parameters": { "type": "object", "properties": {} } } })
}

fn eval(expression: &str) -> Value {
    json!({ "expression": expression })
}

/// Returns the role of each message with the call ids that it makes or answers.
fn message_shape(request: &RecordedRequest) -> Vec<String> {
    let describe = |message: &Value| {
        let role = message["role"].as_str().unwrap();
        let calls = message["tool_calls"].as_array();
        let ids = calls.into_iter().flatten().map(|call| call["id"].as_str().unwrap());
        let ids: Vec<&str> = ids.chain(message["tool_call_id"].as_str()).collect();
        [&[role], ids.as_slice()].concat().join(" ")
    };
    request.messages().iter().map(describe).collect()
}
