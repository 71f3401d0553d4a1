//! The loop without a server: a model is asked, what it calls is executed, the results go back to
//! it, until it answers; and a run that is kept and goes on in another process.
//!
//! The model here is scripted. A real one asks an endpoint in `Model::reply`; the crate
//! `toolcrib-server` has such for OpenAI-compatible endpoints and for Anthropic's.
//!
//! `cargo run -p toolcrib --example run`

use std::fmt::Write;
use std::sync::Arc;

use async_trait::async_trait;
use toolcrib::domain::model_reply::{ModelReply, ToolCallRequest};
use toolcrib::domain::run::options::RunOptions;
use toolcrib::domain::run::progress::Conversation;
use toolcrib::ports::model::{
    DeltaListener, Model, ModelError, ModelRequest, ModelResolver, ResolvedModel,
};
use toolcrib::runs::RunRequest;
use toolcrib::runs::agent_loop::StepOutcome;
use toolcrib::{Caller, Effect, Engine, FnTool};

#[derive(serde::Deserialize, schemars::JsonSchema)]
struct City {
    /// Where.
    city: String,
}

/// Asks for the weather in two cities at once, and then compares.
struct Traveller;

#[async_trait]
impl Model for Traveller {
    async fn reply(
        &self,
        prompt: &ModelRequest,
        _: DeltaListener<'_>,
    ) -> Result<ModelReply, ModelError> {
        let results: Vec<&str> = prompt
            .messages
            .iter()
            .filter(|message| message["role"] == "tool")
            .filter_map(|message| message["content"].as_str())
            .collect();
        if results.is_empty() {
            let ask = |(n, city): (usize, &str)| ToolCallRequest {
                id: format!("call_{n}"),
                name: "weather__now".to_owned(),
                arguments: format!("{{\"city\":\"{city}\"}}"),
            };
            let calls = ["Oslo", "Rome"].into_iter().enumerate().map(ask).collect();
            return Ok(ModelReply { calls, ..ModelReply::default() });
        }
        let text = format!("Go south: {}.", results.join(", "));
        Ok(ModelReply { text, ..ModelReply::default() })
    }
}

/// The only model there is.
struct Only;

impl ModelResolver for Only {
    fn find(&self, name: &str) -> Option<ResolvedModel> {
        let chosen = || ResolvedModel { model: Arc::new(Traveller), name: name.to_owned() };
        (name == "traveller").then(chosen)
    }

    fn names(&self) -> Vec<String> {
        vec!["traveller".to_owned()]
    }
}

/// Both kinds of run; answers with what there is to show.
pub async fn show() -> Result<String, Box<dyn std::error::Error>> {
    let weather = FnTool::new("weather.now", "The weather in a city", |args: City| async move {
        let degrees = if args.city == "Oslo" { 4 } else { 17 };
        Ok::<_, String>(format!("{degrees} °C in {}", args.city))
    });
    let tool = weather.effect(Effect::Read);
    let engine = Engine::builder().tool(tool).models(Arc::new(Only)).start().await?;
    let caller = Caller::local("default");
    let mut output = String::new();

    // In this process: the conversation is yours, between any two turns.
    let mut talk = Conversation::from_user_text("Where is it warmer?");
    let terms = RunOptions::new("traveller", "run_1");
    while let StepOutcome::Continue =
        engine.runs().run_agent_step(&caller, &Traveller, &terms, &mut talk).await?
    {
        writeln!(output, "turn {}: {} calls", talk.progress.steps, talk.progress.calls)?;
    }
    let last = talk.messages.last().map(|message| message["content"].clone());
    writeln!(output, "answer: {}", last.unwrap_or_default())?;

    // Kept: with a store on a disk it goes on after a crash.
    let new = RunRequest {
        model: "traveller".to_owned(),
        messages: Conversation::from_user_text("Where is it warmer?").messages,
        ..RunRequest::default()
    };
    let started = engine.runs().start_run(&caller, new).await?;
    let run = engine.runs().wait_for_run(&caller, &started.run.id, 10_000).await?;
    let answer = run.answer.map(|answer| answer.text).unwrap_or_default();
    writeln!(output, "{} after {} steps: {answer}", run.status.as_str(), run.progress.steps)?;
    Ok(output)
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    print!("{}", show().await?);
    Ok(())
}
