//! `toolcrib tools`: lists, shows and imports tools.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use serde_json::Value;

use super::CommandContext;
use super::client::{ApiClient, ApiRequest};
use super::failure::CommandFailure;
use super::output::{
    Column, TextStyle, format_duration, pretty_json, sanitize_line, str_member, u64_member,
};

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

pub async fn run(context: &CommandContext, args: ToolsArgs) -> Result<(), CommandFailure> {
    let client = context.client()?;
    if let Some(ToolsCommand::Import(args)) = args.command {
        return import(context, &client, &args).await;
    }
    if let Some(format) = &args.format {
        let request = ApiRequest::get(&["v1", "tools"]).query("format", Some(format));
        return context.output.print_json(&client.request_json(request).await?["tools"]);
    }
    match args.name.as_deref() {
        None | Some("ls") => {
            let answer = client.request_json(ApiRequest::get(&["v1", "tools"])).await?;
            list(context, &answer)
        }
        Some(name) => {
            let tool = client.request_json(ApiRequest::get(&["v1", "tools", name])).await?;
            show(context, &tool)
        }
    }
}

async fn import(
    context: &CommandContext,
    client: &ApiClient,
    args: &ImportArgs,
) -> Result<(), CommandFailure> {
    let (output, file) = (context.output, args.file.display());
    let text = std::fs::read_to_string(&args.file)
        .map_err(|error| CommandFailure::usage(format!("cannot read {file}: {error}")))?;
    let document = toolcrib_protocol::yaml::parse_large(&text)
        .map_err(|error| CommandFailure::usage(format!("{file} cannot be read: {error}")))?;
    let project = match context.global.project.as_deref() {
        Some(project) => project.to_owned(),
        None => resolve_project(client).await?,
    };
    let request = ApiRequest::post(&["projects", &project, "tools", "import"], document)
        .query("prefix", args.prefix.as_ref())
        .query("server", args.api_url.as_ref())
        .query("dry_run", args.dry_run.then_some(true));
    let answer = client.request_json(request).await?;
    if output.json {
        return output.print_json(&answer);
    }
    let list = |name: &str| answer[name].as_array().cloned().unwrap_or_default();
    let row = |tool: &Value| {
        let envs = tool["envs"].as_array().into_iter().flatten().filter_map(Value::as_str);
        vec![
            owned_str_member(tool, "tool_name"),
            owned_str_member(tool, "operation"),
            owned_str_member(tool, "effect"),
            envs.collect::<Vec<_>>().join(" "),
        ]
    };
    let columns = [
        Column::id("NAME"),
        Column::text("OPERATION"),
        Column::detail("EFFECT", 1),
        Column::text("NEEDS"),
    ];
    output.print_table(&columns, list("imported").iter().map(row).collect(), "nothing")?;
    for warning in answer["warnings"].as_array().into_iter().flatten().filter_map(Value::as_str) {
        let label = output.paint_message("warning:", TextStyle::Warning);
        output.print_note(&format!("{label} {}", sanitize_line(warning)));
    }
    for skipped in list("skipped") {
        let (operation, reason) =
            (owned_str_member(&skipped, "operation"), owned_str_member(&skipped, "reason"));
        output.print_line(&format!(
            "skipped: {}: {}",
            sanitize_line(&operation),
            sanitize_line(&reason)
        ))?;
    }
    Ok(())
}

fn owned_str_member(value: &Value, name: &str) -> String {
    str_member(value, name).to_owned()
}

/// Returns the project of the key, or `default` if there is more than one project or none.
async fn resolve_project(client: &ApiClient) -> Result<String, CommandFailure> {
    let projects = client.request_json(ApiRequest::get(&["projects"])).await?;
    let ids: Vec<&str> =
        projects.as_array().into_iter().flatten().map(|p| str_member(p, "project_id")).collect();
    Ok(match ids.as_slice() {
        [only] => (*only).to_owned(),
        _ => "default".to_owned(),
    })
}

fn list(context: &CommandContext, answer: &Value) -> Result<(), CommandFailure> {
    let output = context.output;
    if output.json {
        return output.print_json(answer);
    }
    let tools = answer["tools"].as_array().map(Vec::as_slice).unwrap_or_default();
    let row = |tool: &Value| {
        vec![
            str_member(tool, "name").to_owned(),
            str_member(tool, "source").to_owned(),
            str_member(tool, "effect").to_owned(),
            u64_member(tool, "timeout_ms").map(format_duration).unwrap_or_default(),
            match tool["available"].as_bool() {
                Some(true) => "yes".to_owned(),
                Some(false) => "no".to_owned(),
                None => String::new(),
            },
            first_sentence(str_member(tool, "description")),
        ]
    };
    let columns = [
        Column::id("NAME"),
        Column::detail("SOURCE", 2),
        Column::detail("EFFECT", 3),
        Column::detail("TIMEOUT", 1),
        Column::id("AVAILABLE"),
        Column::text("DESCRIPTION"),
    ];
    let none = "no tools: none are registered, or your key may call none (toolcrib allow)";
    output.print_table(&columns, tools.iter().map(row).collect(), none)?;
    if tools.iter().any(|tool| tool["available"] == false) {
        output.print_note("calls of an unavailable tool wait: toolcrib tools NAME");
    }
    Ok(())
}

fn show(context: &CommandContext, tool: &Value) -> Result<(), CommandFailure> {
    let output = context.output;
    if output.json {
        return output.print_json(tool);
    }
    let name = sanitize_line(str_member(tool, "name"));
    output.print_line(&output.paint(&name, TextStyle::Bold))?;
    output.print_line(&format!("  {}", sanitize_line(str_member(tool, "description"))))?;
    let facts = [
        ("executor", str_member(tool, "executor").to_owned()),
        ("effect", str_member(tool, "effect").to_owned()),
        ("risk", str_member(tool, "risk").to_owned()),
        ("timeout", u64_member(tool, "timeout_ms").map(format_duration).unwrap_or_default()),
        ("version", str_member(tool, "version").to_owned()),
        ("available", describe_availability(tool)),
        ("clients", describe_clients(tool)),
    ];
    for (fact, value) in facts.iter().filter(|(_, value)| !value.is_empty()) {
        output.print_line(&format!("  {fact:<11}{}", sanitize_line(value)))?;
    }
    output.print_line("arguments")?;
    output.print_line(&pretty_json(&tool["schema"]))?;
    if !tool["output_schema"].is_null() {
        output.print_line("result")?;
        output.print_line(&pretty_json(&tool["output_schema"]))?;
    }
    Ok(())
}

/// Says whether a call can be executed now, and if not, why.
fn describe_availability(tool: &Value) -> String {
    match (tool["available"].as_bool(), str_member(tool, "unavailable_reason")) {
        (Some(true), _) => "yes".to_owned(),
        (Some(false), "") => "no".to_owned(),
        (Some(false), reason) => format!("no: {reason}"),
        (None, _) => String::new(),
    }
}

/// Lists the clients that offer a tool: `client_demo (connected)`.
fn describe_clients(tool: &Value) -> String {
    let clients = tool["providers"].as_array().into_iter().flatten();
    let clients = clients.map(|client| {
        let state = if client["connected"] == true { "connected" } else { "away" };
        format!("{} ({state})", str_member(client, "client_id"))
    });
    clients.collect::<Vec<_>>().join(", ")
}

/// Returns a one-line summary of a description: its first sentence, at most 80 characters.
fn first_sentence(description: &str) -> String {
    let line = sanitize_line(description);
    let end = line.find(". ").map_or(line.len(), |index| index + 1);
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
    fn descriptions_are_truncated_between_characters() {
        assert_eq!(first_sentence("Adds. Then more."), "Adds.");
        let long = "天".repeat(200);
        assert_eq!(first_sentence(&long).chars().count(), 80);
    }
}
