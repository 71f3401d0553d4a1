//! Language models behind their real wire: what comes of a good answer, and of every bad one.

mod endpoints;
mod misbehaving;
mod pieces;

use std::sync::Mutex;
use std::time::Duration;

use serde_json::{Value, json};
use toolcrib::model::{Model, Piece, Prompt, Reply, Silence};
use toolcrib_bench::model::Scripted;
use toolcrib_server::models::{Anthropic, Endpoint, KeyPlace, Kind, OpenAi, Patience};

/// Where a scripted model is asked, with this patience.
fn endpoint(model: &Scripted, kind: Kind) -> Endpoint {
    Endpoint {
        kind,
        base_url: model.url.clone(),
        key: KeyPlace { variable: None, file: None, needed: false },
        max_tokens: None,
        patience: Patience::default(),
    }
}

fn openai(model: &Scripted) -> OpenAi {
    OpenAi::at(endpoint(model, Kind::OpenAi))
}

fn anthropic(model: &Scripted) -> Anthropic {
    Anthropic::at(endpoint(model, Kind::Anthropic))
}

/// With little patience.
fn hasty(model: &Scripted, patience: Patience) -> OpenAi {
    OpenAi::at(Endpoint { patience, ..endpoint(model, Kind::OpenAi) })
}

fn prompt() -> Prompt {
    Prompt {
        model: "large-1".into(),
        messages: vec![json!({ "role": "user", "content": "What is 6 * 7?" })],
        tools: vec![tool("calculation__eval")],
        ..Prompt::default()
    }
}

fn tool(name: &str) -> Value {
    json!({ "type": "function", "function": { "name": name, "description": "Calculates",
        "parameters": { "type": "object" } } })
}

/// The answer, and what was told while it came.
async fn asked(model: &dyn Model, prompt: &Prompt) -> (Result<Reply, Silence>, Vec<Piece>) {
    let told = Mutex::new(Vec::new());
    let reply = model.reply(prompt, &|piece| told.lock().unwrap().push(piece)).await;
    (reply, told.into_inner().unwrap())
}

fn text_of(told: &[Piece]) -> String {
    let text = |piece: &Piece| match piece {
        Piece::Text(text) => text.clone(),
        Piece::Call { .. } => String::new(),
    };
    told.iter().map(text).collect()
}

const SHORT: Duration = Duration::from_millis(100);
