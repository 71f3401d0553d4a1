//! Language models behind their real wire: what comes of a good answer, and of every bad one.

mod endpoints;
mod misbehaving;
mod pieces;

use std::sync::Mutex;
use std::time::Duration;

use serde_json::{Value, json};
use toolcrib::ports::model::{Delta, Model, ModelError, ModelReply, ModelRequest};
use toolcrib_bench::model::ScriptedModel;
use toolcrib_sources::models::{
    AnthropicModel, ApiKeySource, ModelApi, ModelEndpoint, ModelResponseLimits, OpenAiModel,
};

/// Where a scripted model is asked, with this patience.
fn endpoint(model: &ScriptedModel, kind: ModelApi) -> ModelEndpoint {
    ModelEndpoint {
        kind,
        base_url: model.url.clone(),
        key: ApiKeySource { variable: None, file: None, is_required: false },
        max_tokens: None,
        limits: ModelResponseLimits::default(),
    }
}

fn openai(model: &ScriptedModel) -> OpenAiModel {
    OpenAiModel::new(endpoint(model, ModelApi::OpenAi))
}

fn anthropic(model: &ScriptedModel) -> AnthropicModel {
    AnthropicModel::new(endpoint(model, ModelApi::Anthropic))
}

/// With little patience.
fn hasty(model: &ScriptedModel, patience: ModelResponseLimits) -> OpenAiModel {
    OpenAiModel::new(ModelEndpoint { limits: patience, ..endpoint(model, ModelApi::OpenAi) })
}

fn prompt() -> ModelRequest {
    ModelRequest {
        model: "large-1".into(),
        messages: vec![json!({ "role": "user", "content": "What is 6 * 7?" })],
        tools: vec![tool("calculation__eval")],
        ..ModelRequest::default()
    }
}

fn tool(name: &str) -> Value {
    json!({ "type": "function", "function": { "name": name, "description": "Calculates",
        "parameters": { "type": "object" } } })
}

/// The answer, and what was told while it came.
async fn asked(
    model: &dyn Model,
    prompt: &ModelRequest,
) -> (Result<ModelReply, ModelError>, Vec<Delta>) {
    let told = Mutex::new(Vec::new());
    let reply = model.reply(prompt, &|piece| told.lock().unwrap().push(piece)).await;
    (reply, told.into_inner().unwrap())
}

fn text_of(told: &[Delta]) -> String {
    let text = |piece: &Delta| match piece {
        Delta::Text(text) => text.clone(),
        Delta::Call { .. } => String::new(),
    };
    told.iter().map(text).collect()
}

const SHORT: Duration = Duration::from_millis(100);
