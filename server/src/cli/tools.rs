//! `toolcrib tools`: lists, shows and imports tools.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use serde_json::Value;

use super::Context;
use super::client::{Ask, Client};
use super::failure::Failure;
use super::output::{Tone, duration, indented, number, plain, text};

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  toolcrib tools
  toolcrib tools weather.query
  toolcrib tools --json | jq -r '.tools[].name'
  toolcrib tools --format openai
  toolcrib tools import petstore.yaml --prefix pets")]
#[command(args_conflicts_with_subcommands = true)]
pub struct ToolsArgs {
    #[command(subcommand)]
    command: Option<ToolsCommand>,
    /// The tool to show with its schema; `ls` or no name lists all tools
    name: Option<String>,
    /// List all tools in the format of a model API: openai, openai_responses, anthropic, mcp
    #[arg(long, value_name = "FORMAT", conflicts_with = "name")]
    format: Option<String>,
}

#[derive(Debug, Subcommand)]
enum ToolsCommand {
    /// Create a tool for every operation of an OpenAPI 3.0 or 3.1 document
    #[command(after_help = "\
Examples:
  toolcrib tools import petstore.yaml --prefix pets --dry-run
  toolcrib tools import petstore.yaml --prefix pets --api-url https://api.example.com/v1")]
    Import(ImportArgs),
}

#[derive(Debug, Args)]
struct ImportArgs {
    /// The document, YAML or JSON
    file: PathBuf,
    /// Prefix of every tool name, followed by a dot
    #[arg(long, value_name = "NAME")]
    prefix: Option<String>,
    /// Base URL of the API, if not the one in the document
    #[arg(long, value_name = "URL")]
    api_url: Option<String>,
    /// Only show what would be imported
    #[arg(long)]
    dry_run: bool,
}

pub async fn run(context: &Context, args: ToolsArgs) -> Result<(), Failure> {
    let client = context.client()?;
    if let Some(ToolsCommand::Import(args)) = args.command {
        return import(context, &client, &args).await;
    }
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

async fn import(context: &Context, client: &Client, args: &ImportArgs) -> Result<(), Failure> {
    let (output, shown) = (context.output, args.file.display());
    let text = std::fs::read_to_string(&args.file)
        .map_err(|error| Failure::usage(format!("cannot read {shown}: {error}")))?;
    let document = crate::yaml::parse_long(&text)
        .map_err(|error| Failure::usage(format!("{shown} cannot be read: {error}")))?;
    let project = match context.global.project.as_deref() {
        Some(project) => project.to_owned(),
        None => own_project(client).await?,
    };
    let ask = Ask::post(&["projects", &project, "tools", "import"], document)
        .query("prefix", args.prefix.as_ref())
        .query("server", args.api_url.as_ref())
        .query("dry_run", args.dry_run.then_some(true));
    let answer = client.ask(ask).await?;
    if output.json {
        return output.value(&answer);
    }
    let list = |name: &str| answer[name].as_array().cloned().unwrap_or_default();
    let row = |tool: &Value| {
        let envs = tool["envs"].as_array().into_iter().flatten().filter_map(Value::as_str);
        vec![
            text_of(tool, "tool_name"),
            text_of(tool, "operation"),
            text_of(tool, "effect"),
            envs.collect::<Vec<_>>().join(" "),
        ]
    };
    let heads = ["NAME", "OPERATION", "EFFECT", "NEEDS"];
    output.table(&heads, list("imported").iter().map(row).collect(), "nothing")?;
    for skipped in list("skipped") {
        let (operation, reason) = (text_of(&skipped, "operation"), text_of(&skipped, "reason"));
        output.line(&format!("left out: {}: {}", plain(&operation), plain(&reason)))?;
    }
    Ok(())
}

fn text_of(value: &Value, name: &str) -> String {
    text(value, name).to_owned()
}

/// Returns the project of the key, or `default` if there is more than one project or none.
async fn own_project(client: &Client) -> Result<String, Failure> {
    let projects = client.ask(Ask::get(&["projects"])).await?;
    let ids: Vec<&str> =
        projects.as_array().into_iter().flatten().map(|p| text(p, "project_id")).collect();
    Ok(match ids.as_slice() {
        [only] => (*only).to_owned(),
        _ => "default".to_owned(),
    })
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

/// Returns a one-line summary of a description: its first sentence, at most 80 characters.
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
