//! Language models over their wire formats: valid answers and all kinds of invalid ones.

mod deltas;
mod endpoints;
mod misbehaving;

use std::sync::Mutex;
use std::time::Duration;

use serde_json::json;
use toolcrib::Json;
use toolcrib::domain::model_reply::ModelReply;
use toolcrib::ports::model::{Delta, Model, ModelError, ModelRequest};
use toolcrib_bench::model::ScriptedModel;
use toolcrib_sources::models::{
    AnthropicModel, ApiKeySource, ModelApi, ModelEndpoint, ModelResponseLimits, OpenAiModel,
};

/// The endpoint of a scripted model, with default limits.
fn endpoint(model: &ScriptedModel, kind: ModelApi) -> ModelEndpoint {
    ModelEndpoint {
        kind,
        base_url: model.url.clone(),
        key: ApiKeySource { variable: None, file: None, is_required: false },
        max_tokens: None,
        limits: ModelResponseLimits::default(),
        native_tool_search: true,
    }
}

fn openai(model: &ScriptedModel) -> OpenAiModel {
    OpenAiModel::new(endpoint(model, ModelApi::OpenAi))
}

fn anthropic(model: &ScriptedModel) -> AnthropicModel {
    AnthropicModel::new(endpoint(model, ModelApi::Anthropic))
}

/// An OpenAI model with these limits.
fn openai_with_limits(model: &ScriptedModel, limits: ModelResponseLimits) -> OpenAiModel {
    OpenAiModel::new(ModelEndpoint { limits, ..endpoint(model, ModelApi::OpenAi) })
}

fn prompt() -> ModelRequest {
    ModelRequest {
        model: "large-1".into(),
        messages: vec![json!({ "role": "user", "content": "What is 6 * 7?" })],
        tools: vec![tool("calculation__eval")],
        ..ModelRequest::default()
    }
}

fn tool(name: &str) -> Json {
    Json::from_value(&json!({ "type": "function", "function": { "name": name,
        "description": "Calculates", "parameters": { "type": "object" } } }))
}

/// Requests a reply and returns it with the deltas that preceded it.
async fn request_reply(
    model: &dyn Model,
    prompt: &ModelRequest,
) -> (Result<ModelReply, ModelError>, Vec<Delta>) {
    let deltas = Mutex::new(Vec::new());
    let reply = model.reply(prompt, &|delta| deltas.lock().unwrap().push(delta)).await;
    (reply, deltas.into_inner().unwrap())
}

fn text_of(deltas: &[Delta]) -> String {
    let text = |delta: &Delta| match delta {
        Delta::Text(text) => text.clone(),
        Delta::Call { .. } => String::new(),
    };
    deltas.iter().map(text).collect()
}

const SHORT: Duration = Duration::from_millis(100);
