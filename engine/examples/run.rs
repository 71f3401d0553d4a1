//! Runs the agent loop without a server: once over a conversation of this program, and once as a
//! stored run, which survives a restart.
//!
//! The model is scripted. A real model sends a request to an endpoint in `Model::reply`; the crate
//! `toolcrib-sources` has models for OpenAI-compatible endpoints and for Anthropic's API.
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
    /// Name of the city.
    city: String,
}

/// A scripted model: calls a tool for two cities in its first reply and answers in its second.
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
            let tool_call = |(n, city): (usize, &str)| ToolCallRequest {
                id: format!("call_{n}"),
                name: "weather__now".to_owned(),
                arguments: format!("{{\"city\":\"{city}\"}}"),
            };
            let calls = ["Oslo", "Rome"].into_iter().enumerate().map(tool_call).collect();
            return Ok(ModelReply { calls, ..ModelReply::default() });
        }
        let text = format!("Go south: {}.", results.join(", "));
        Ok(ModelReply { text, ..ModelReply::default() })
    }
}

/// Resolves the name of the one model.
struct SingleModel;

impl ModelResolver for SingleModel {
    fn find(&self, name: &str) -> Option<ResolvedModel> {
        let chosen = || ResolvedModel { model: Arc::new(Traveller), name: name.to_owned() };
        (name == "traveller").then(chosen)
    }

    fn names(&self) -> Vec<String> {
        vec!["traveller".to_owned()]
    }
}

/// Runs the loop in both ways and returns the output.
pub async fn show() -> Result<String, Box<dyn std::error::Error>> {
    let weather = FnTool::new("weather.now", "The weather in a city", |args: City| async move {
        let degrees = if args.city == "Oslo" { 4 } else { 17 };
        Ok::<_, String>(format!("{degrees} °C in {}", args.city))
    });
    let tool = weather.effect(Effect::Read);
    let engine = Engine::builder().tool(tool).models(Arc::new(SingleModel)).start().await?;
    let caller = Caller::local("default");
    let mut output = String::new();

    // The program owns the conversation and can change it between two steps.
    let mut conversation = Conversation::from_user_text("Where is it warmer?");
    let options = RunOptions::new("traveller", "run_1");
    while let StepOutcome::Continue =
        engine.runs().run_agent_step(&caller, &Traveller, &options, &mut conversation).await?
    {
        writeln!(
            output,
            "step {}: {} calls",
            conversation.progress.steps, conversation.progress.calls
        )?;
    }
    let last = conversation.messages.last().map(|message| message["content"].clone());
    writeln!(output, "answer: {}", last.unwrap_or_default())?;

    // The engine stores the run. With a store on disk, it continues after a crash.
    let request = RunRequest {
        model: "traveller".to_owned(),
        messages: Conversation::from_user_text("Where is it warmer?").messages,
        ..RunRequest::default()
    };
    let started = engine.runs().start_run(&caller, request).await?;
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
