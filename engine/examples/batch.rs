//! Runs one step of an agent without a server: describes the tools to a model, runs all tool calls
//! of its reply, and returns the results in the format of its API.
//!
//! `cargo run -p toolcrib --example batch`

use std::fmt::Write;

use toolcrib::calls::BatchMode;
use toolcrib::model_formats::ToolFormat;
use toolcrib::{Batch, Caller, Effect, Engine, FnTool, Json};

#[derive(serde::Deserialize, schemars::JsonSchema)]
struct City {
    /// Name of the city.
    city: String,
}

/// Tool calls of a model's reply to "What is the weather in Oslo and Rome? Note it down." The third
/// one has invalid arguments.
const TOOL_CALLS: [&str; 4] = [
    r#"{"id":"call_0","type":"function","function":
        {"name":"weather__now","arguments":"{\"city\":\"Oslo\"}"}}"#,
    r#"{"id":"call_1","type":"function","function":
        {"name":"weather__now","arguments":"{\"city\":\"Rome\"}"}}"#,
    r#"{"id":"call_2","type":"function","function":
        {"name":"weather__now","arguments":"{\"city\": Paris}"}}"#,
    r#"{"id":"call_3","type":"function","function":
        {"name":"notes__write","arguments":"{\"city\":\"Oslo\"}"}}"#,
];

/// Runs the step and returns the output.
pub async fn show() -> Result<String, Box<dyn std::error::Error>> {
    let weather = FnTool::new("weather.now", "The weather in a city", |args: City| async move {
        let degrees = if args.city == "Oslo" { 4 } else { 17 };
        Ok::<_, String>(format!("{degrees} °C in {}", args.city))
    });
    let notes = FnTool::new("notes.write", "Writes a note about a city", |args: City| async move {
        Ok::<_, String>(format!("noted {}", args.city))
    });
    let engine = Engine::builder().tool(weather.effect(Effect::Read)).tool(notes).start().await?;
    let caller = Caller::local("default");

    let mut output = String::from("tools for the model:\n");
    for tool in engine.registry().model_tool_definitions(&caller, ToolFormat::OpenAi) {
        writeln!(output, "  {}", tool.to_value()["function"]["name"])?;
    }

    let entries = TOOL_CALLS.iter().map(|call| Json::parse(call)).collect::<Result<_, _>>()?;
    let batch = Batch { mode: BatchMode::Parallel, ..Batch::new("run_1", entries) };
    let answer = engine.calls().run_batch(&caller, batch).await?;

    writeln!(output, "messages for the model:")?;
    for message in &answer.messages {
        writeln!(output, "  {}", message.text())?;
    }
    let succeeded = answer.results.iter().filter(|entry| entry.ok() == Some(true)).count();
    writeln!(output, "{succeeded} of {} calls succeeded", answer.results.len())?;
    Ok(output)
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    print!("{}", show().await?);
    Ok(())
}
