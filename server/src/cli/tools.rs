//! `toolcrib tools`: what may be called.

use clap::Args;
use serde_json::Value;

use super::Context;
use super::client::Ask;
use super::failure::Failure;
use super::output::{Tone, duration, indented, number, plain, text};

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  toolcrib tools
  toolcrib tools weather.query
  toolcrib tools --json | jq -r '.tools[].name'
  toolcrib tools --format openai")]
pub struct ToolsArgs {
    /// The tool to show with its schema; `ls`, or nothing, lists them all
    name: Option<String>,
    /// All of them as a model API wants them described: openai, openai_responses, anthropic, mcp
    #[arg(long, value_name = "FORMAT", conflicts_with = "name")]
    format: Option<String>,
}

pub async fn run(context: &Context, args: ToolsArgs) -> Result<(), Failure> {
    let client = context.client()?;
    if let Some(format) = &args.format {
        let ask = Ask::get(&["v1", "tools"]).query("format", Some(format));
        return context.output.value(&client.ask(ask).await?["tools"]);
    }
    match args.name.as_deref() {
        None | Some("ls") => {
            let answer = client.ask(Ask::get(&["v1", "tools"])).await?;
            list(context, &answer)
        }
        Some(name) => {
            let tool = client.ask(Ask::get(&["v1", "tools", name])).await?;
            show(context, &tool)
        }
    }
}

fn list(context: &Context, answer: &Value) -> Result<(), Failure> {
    let output = context.output;
    if output.json {
        return output.value(answer);
    }
    let tools = answer["tools"].as_array().map(Vec::as_slice).unwrap_or_default();
    let row = |tool: &Value| {
        vec![
            text(tool, "name").to_owned(),
            text(tool, "source").to_owned(),
            text(tool, "effect").to_owned(),
            number(tool, "timeout_ms").map(duration).unwrap_or_default(),
            first_sentence(text(tool, "description")),
        ]
    };
    let heads = ["NAME", "SOURCE", "EFFECT", "TIMEOUT", "DESCRIPTION"];
    let none = "no tools: none are registered, or your key may call none (toolcrib allow)";
    output.table(&heads, tools.iter().map(row).collect(), none)
}

fn show(context: &Context, tool: &Value) -> Result<(), Failure> {
    let output = context.output;
    if output.json {
        return output.value(tool);
    }
    let name = plain(text(tool, "name"));
    output.line(&output.tone(&name, Tone::Strong))?;
    output.line(&format!("  {}", plain(text(tool, "description"))))?;
    let facts = [
        ("executor", text(tool, "executor").to_owned()),
        ("effect", text(tool, "effect").to_owned()),
        ("risk", text(tool, "risk").to_owned()),
        ("timeout", number(tool, "timeout_ms").map(duration).unwrap_or_default()),
        ("version", text(tool, "version").to_owned()),
    ];
    for (fact, value) in facts.iter().filter(|(_, value)| !value.is_empty()) {
        output.line(&format!("  {fact:<10}{}", plain(value)))?;
    }
    output.line("arguments")?;
    output.line(&indented(&tool["schema"]))?;
    if !tool["output_schema"].is_null() {
        output.line("result")?;
        output.line(&indented(&tool["output_schema"]))?;
    }
    Ok(())
}

/// Enough to recognise a tool by, in one line.
fn first_sentence(description: &str) -> String {
    let line = plain(description);
    let end = line.find(". ").map_or(line.len(), |at| at + 1);
    let sentence = &line[..end];
    if sentence.chars().count() <= 80 {
        return sentence.to_owned();
    }
    sentence.chars().take(79).chain(['…']).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptions_are_cut_between_characters() {
        assert_eq!(first_sentence("Adds. Then more."), "Adds.");
        let long = "天".repeat(200);
        assert_eq!(first_sentence(&long).chars().count(), 80);
    }
}
