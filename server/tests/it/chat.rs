//! OpenAI's API with the crib's tools behind it: what a client asks, what the model's endpoint is
//! asked, and what comes back.

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

/// A server whose model follows this script.
async fn serving(turns: impl IntoIterator<Item = ScriptedBehavior>) -> (Server, ScriptedModel) {
    let scripted = ScriptedModel::start_with_replies(turns).await.unwrap();
    (served_by(&scripted).await, scripted)
}

async fn served_by(scripted: &ScriptedModel) -> Server {
    Server::with(|config| {
        config.llm.base_url = Some(scripted.url.clone());
        config.llm.model = Some(MODEL.into());
    })
    .await
}

/// A question with the crib's calculator alone.
fn question(text: &str) -> Value {
    json!({
        "model": MODEL,
        "messages": [{ "role": "user", "content": text }],
        "toolcrib": { "tools": ["calculation.eval"] },
    })
}

/// A tool of the client's own.
fn own_tool(name: &str) -> Value {
    json!({ "type": "function", "function": { "name": name, "description": "The client's own",
        "parameters": { "type": "object", "properties": {} } } })
}

fn eval(expression: &str) -> Value {
    json!({ "expression": expression })
}

/// The roles of a conversation, with the calls and what they answer.
fn shape(asked: &RecordedRequest) -> Vec<String> {
    let describe = |message: &Value| {
        let role = message["role"].as_str().unwrap();
        let calls = message["tool_calls"].as_array();
        let ids = calls.into_iter().flatten().map(|call| call["id"].as_str().unwrap());
        let ids: Vec<&str> = ids.chain(message["tool_call_id"].as_str()).collect();
        [&[role], ids.as_slice()].concat().join(" ")
    };
    asked.messages().iter().map(describe).collect()
}
