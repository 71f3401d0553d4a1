//! `toolcrib mcp add`, `ls`, `show`, `accept`, `refresh`, `sign-in`, `sign-out`, `rm`: manage
//! upstream MCP servers.
//!
//! The commands use the server given with `--server`, or the one on this machine. If there is none,
//! or a data directory is given, `add`, `ls` and `rm` work on the data directory; a server that
//! uses the directory picks up the change. The other commands fail then, because only a running
//! server has the state of its MCP servers. `add` and `rm` also work on the data directory if the
//! server on this machine rejects the key.

mod sign_in;
use std::collections::BTreeMap;
use std::time::Duration;

use clap::Subcommand;
use reqwest::Method;
use serde_json::{Map, Value, json};
use toolcrib::{Caller, Engine};

use crate::cli::client::{ApiClient, ApiRequest};
use crate::cli::failure::{CommandFailure, exit};
use crate::cli::output::{Column, format_age, now_ms, sanitize_line, str_member, u64_member};
use crate::cli::{CommandContext, StorageArgs};
use crate::mcp_servers::{
    MCP_UPSTREAM_KIND, find_desktop_servers, parse_servers_to_add, to_stored_settings,
};

/// Maximum time to wait for the first connection to a new MCP server.
const CONNECT_WAIT: Duration = Duration::from_secs(30);

#[derive(Debug, Subcommand)]
pub enum McpServersCommand {
    /// Add an MCP server: a program to start, or a URL
    #[command(after_help = "\
Examples:
  toolcrib mcp add files -- npx -y @modelcontextprotocol/server-filesystem /srv/files
  toolcrib mcp add far https://mcp.example.com/mcp --header 'Authorization: Bearer ${TOKEN}'
  toolcrib mcp add far https://mcp.example.com/mcp && toolcrib mcp sign-in far
  toolcrib mcp add db --env-from DATABASE_URL --pin -- uvx mcp-server-postgres
  toolcrib mcp add --file ~/.config/client.json")]
    Add(Box<AddMcpServerArgs>),
    /// List the MCP servers and their state
    #[command(alias = "list")]
    Ls,
    /// Show one MCP server in detail: its problem, its changes and its last output
    Show {
        /// Name of the MCP server
        name: String,
    },
    /// Accept the current tools of a pinned MCP server
    Accept {
        /// Name of the MCP server
        name: String,
        /// Only these tools [default: all]
        #[arg(value_name = "TOOL")]
        tools: Vec<String>,
    },
    /// Reconnect to an MCP server now, or read its tools again
    Refresh {
        /// Name of the MCP server
        name: String,
    },
    /// Sign in to an MCP server that requires it: prints the URL to open, and waits
    SignIn {
        /// Name of the MCP server
        name: String,
        /// Print the URL and do not wait
        #[arg(long)]
        no_wait: bool,
    },
    /// Delete the tokens of an MCP server
    SignOut {
        /// Name of the MCP server
        name: String,
    },
    /// Remove an MCP server and its tools
    #[command(alias = "remove")]
    Rm {
        /// Name of the MCP server
        name: String,
    },
}

/// Arguments that describe a single server. The others apply to each server of a file.
const SINGLE_SERVER_ARGS: [&str; 7] =
    ["name", "url", "command", "env", "env_from", "header", "cwd"];

#[derive(Debug, clap::Args)]
pub struct AddMcpServerArgs {
    /// Name, and prefix of its tools: NAME.tool
    #[arg(required_unless_present = "file")]
    name: Option<String>,
    /// URL of a server that uses HTTP
    #[arg(conflicts_with = "command")]
    url: Option<String>,
    /// Environment variable for the program: NAME=VALUE; ${OTHER} comes from the server's
    /// environment
    #[arg(long, value_name = "NAME=VALUE")]
    env: Vec<String>,
    /// Environment variable to pass from the server's environment to the program
    #[arg(long, value_name = "NAME")]
    env_from: Vec<String>,
    /// Header to send with every request: 'Name: value'
    #[arg(long, value_name = "HEADER")]
    header: Vec<String>,
    /// Working directory of the program
    #[arg(long, value_name = "DIR")]
    cwd: Option<String>,
    /// Reject tools that change until they are accepted
    #[arg(long)]
    pin: bool,
    /// Minimum effect of its tools: read, idempotent or irreversible
    #[arg(long, value_name = "EFFECT")]
    effect: Option<String>,
    /// Minimum risk of its tools: low, medium, high or critical
    #[arg(long, value_name = "RISK")]
    risk: Option<String>,
    /// File with mcpServers in the format of desktop clients; - for standard input
    #[arg(long, value_name = "FILE", conflicts_with_all = SINGLE_SERVER_ARGS)]
    file: Option<String>,
    /// The program and its arguments
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<String>,
}

/// The target of the commands: a running server or a data directory.
enum McpServersTarget {
    Server(ApiClient),
    Directory { engine: Engine, caller: Caller },
}

impl McpServersTarget {
    async fn open(
        context: &CommandContext,
        storage: &StorageArgs,
        command: &McpServersCommand,
    ) -> Result<Self, CommandFailure> {
        context.check_one_target(storage)?;
        let has_server = context.global.server.is_some();
        if has_server && !storage.is_set() {
            return Ok(Self::Server(context.client()?));
        }
        if !storage.is_set() {
            let client = context.client()?;
            match probe_server(&client).await {
                Some(Ok(())) => return Ok(Self::Server(client)),
                Some(Err(failure)) if failure.exit == exit::AUTH && command.works_without_key() => {
                }
                // The server is there and refuses: its data directory has no other answer.
                Some(Err(failure)) => return Err(failure),
                None => {}
            }
        }
        let config = context.config(None, storage)?;
        let engine = crate::bootstrap::open_admin_engine(&config).await?;
        Ok(Self::Directory { engine, caller: Caller::local(context.project()) })
    }
}

/// Requests the list of sources from a server. Returns `None` if no Toolcrib server responds.
async fn probe_server(client: &ApiClient) -> Option<Result<(), CommandFailure>> {
    if !client.is_toolcrib_alive().await {
        return None;
    }
    let listed = client.request_json(ApiRequest::get(&["v1", "sources", "mcp"])).await;
    match listed {
        Err(failure) if failure.exit == exit::UNREACHABLE => None,
        listed => Some(listed.map(drop)),
    }
}

impl McpServersCommand {
    /// Returns true if the command works on the data directory when the server rejects the key:
    /// write access to the directory makes the user the operator.
    fn works_without_key(&self) -> bool {
        matches!(self, Self::Add(_) | Self::Rm { .. })
    }
}

pub async fn run(
    context: &CommandContext,
    command: McpServersCommand,
    storage: &StorageArgs,
) -> Result<(), CommandFailure> {
    let target = McpServersTarget::open(context, storage, &command).await?;
    match command {
        McpServersCommand::Add(args) => add(context, &target, *args).await,
        McpServersCommand::Ls => list(context, &target).await,
        McpServersCommand::Show { name } => show(context, &target, &name).await,
        McpServersCommand::Accept { name, tools } => accept(context, &target, &name, tools).await,
        McpServersCommand::Refresh { name } => refresh(context, &target, &name).await,
        McpServersCommand::SignIn { name, no_wait } => {
            sign_in::sign_in(context, &target, &name, no_wait).await
        }
        McpServersCommand::SignOut { name } => sign_in::sign_out(context, &target, &name).await,
        McpServersCommand::Rm { name } => remove(context, &target, &name).await,
    }
}

/// Builds the body of `POST /v1/sources/mcp` from the arguments.
fn build_definition(args: AddMcpServerArgs) -> Result<Value, CommandFailure> {
    if let Some(file) = &args.file {
        let read = match file.as_str() {
            "-" => std::io::read_to_string(std::io::stdin()),
            path => std::fs::read_to_string(path),
        };
        let text =
            read.map_err(|error| CommandFailure::usage(format!("{file} cannot be read: {error}")))?;
        let mut document: Value = serde_json::from_str(&text)
            .map_err(|error| CommandFailure::usage(format!("{file} is not JSON: {error}")))?;
        let mut overrides = Map::new();
        if args.pin {
            overrides.insert("pin".to_owned(), true.into());
        }
        for (field, value) in [("effect", args.effect), ("risk", args.risk)] {
            overrides.extend(value.map(|value| (field.to_owned(), value.into())));
        }
        match find_desktop_servers(&mut document) {
            Some(servers) => {
                let documents = servers.values_mut().filter_map(Value::as_object_mut);
                documents.for_each(|server_document| server_document.extend(overrides.clone()));
            }
            None => document
                .as_object_mut()
                .into_iter()
                .for_each(|server_document| server_document.extend(overrides.clone())),
        }
        return Ok(document);
    }
    let parse_pairs = |entries: &[String], separator: char, usage: &str| {
        let split = |entry: &String| {
            let (name, value) = entry.split_once(separator)?;
            Some((name.trim().to_owned(), value.trim().to_owned()))
        };
        let pairs: Option<BTreeMap<String, String>> = entries.iter().map(split).collect();
        pairs.ok_or_else(|| CommandFailure::usage(format!("write {usage}")))
    };
    let mut definition = json!({
        "name": args.name,
        "env": parse_pairs(&args.env, '=', "--env NAME=VALUE")?,
        "env_from": args.env_from,
        "headers": parse_pairs(&args.header, ':', "--header 'Name: value'")?,
        "pin": args.pin,
    });
    let mut command = args.command.into_iter();
    let optional_fields = [
        ("command", command.next()),
        ("url", args.url),
        ("cwd", args.cwd),
        ("effect", args.effect),
        ("risk", args.risk),
    ];
    for (field, value) in optional_fields {
        if let Some(value) = value {
            definition[field] = value.into();
        }
    }
    definition["args"] = command.collect::<Vec<String>>().into();
    Ok(definition)
}

async fn add(
    context: &CommandContext,
    target: &McpServersTarget,
    args: AddMcpServerArgs,
) -> Result<(), CommandFailure> {
    let output = context.output;
    let document = build_definition(args)?;
    match target {
        McpServersTarget::Server(client) => {
            let spinner = output.start_spinner("waiting for its first answer");
            let request = ApiRequest::post(&["v1", "sources", "mcp"], document).wait(CONNECT_WAIT);
            let added = client.request_json(request).await;
            spinner.finish_and_clear();
            let added = added?;
            if output.json {
                return output.print_json(&added);
            }
            let sources = added["sources"].as_array().map(Vec::as_slice).unwrap_or_default();
            for source in sources {
                output.print_line(&describe_source(source))?;
            }
            Ok(())
        }
        McpServersTarget::Directory { engine, caller } => {
            for settings in parse_servers_to_add(engine, caller, document)? {
                engine
                    .upstreams()
                    .put(caller, &settings.name, MCP_UPSTREAM_KIND, to_stored_settings(&settings))
                    .await?;
                output.print_line(&format!("{} is added", settings.name))?;
            }
            output.print_note(
                "a server on this data directory connects to it; toolcrib mcp ls shows it",
            );
            Ok(())
        }
    }
}

fn describe_source(source: &Value) -> String {
    let name = sanitize_line(str_member(source, "name"));
    let state = str_member(source, "state");
    match (state, source["problem"].as_str()) {
        ("ready", _) => {
            let tools = u64_member(source, "tools").unwrap_or_default();
            let skipped = source["skipped"].as_array().map(Vec::as_slice).unwrap_or_default();
            let skipped_note = skipped.iter().take(10).map(|skipped| {
                let (tool, reason) = (str_member(skipped, "tool"), str_member(skipped, "why"));
                let line = match reason.starts_with(tool) {
                    true => reason.to_owned(),
                    false => format!("{tool}: {reason}"),
                };
                format!("\n  skipped: {}", sanitize_line(&line))
            });
            format!("{name} is ready: {tools} tools, {name}.…{}", skipped_note.collect::<String>())
        }
        ("needs_sign_in", _) => {
            let address = source["oauth"]["sign_in_url"].as_str().unwrap_or_default();
            let address = sanitize_line(address);
            format!(
                "{name} needs a person to sign in: toolcrib mcp sign-in {name}, or open\n{address}"
            )
        }
        (_, Some(problem)) => {
            format!("{name} is added, and is {state}: {}", sanitize_line(problem))
        }
        _ => format!("{name} is added, and is {state}"),
    }
}

async fn list(context: &CommandContext, target: &McpServersTarget) -> Result<(), CommandFailure> {
    let output = context.output;
    let answer = match target {
        McpServersTarget::Server(client) => {
            client.request_json(ApiRequest::get(&["v1", "sources", "mcp"])).await?
        }
        McpServersTarget::Directory { engine, caller } => {
            let listed =
                engine.upstreams().list_all().into_iter().filter(|u| u.project == caller.project);
            let sources: Vec<Value> = listed
                .map(|upstream| {
                    let tools = engine.upstreams().tools(&upstream.project, &upstream.name).len();
                    json!({ "name": upstream.name, "kind": upstream.kind, "state": "unknown",
                        "tools": tools })
                })
                .collect();
            output.print_note(
                "this is the stored configuration; only a running server knows the present states",
            );
            json!({ "sources": sources })
        }
    };
    if output.json {
        return output.print_json(&answer);
    }
    let sources = answer["sources"].as_array().map(Vec::as_slice).unwrap_or_default();
    let now = now_ms();
    let rows = sources.iter().map(|source| {
        let since = u64_member(source, "since_ms").map(|ms| format_age(now.saturating_sub(ms)));
        let pending = source["pending"].as_array().map_or(0, Vec::len);
        let problem = source["problem"].as_str().map(str::to_owned);
        let pending_note = (pending > 0).then(|| format!("{pending} to accept"));
        let skipped = source["skipped"].as_array().map_or(0, Vec::len);
        let skipped_note = (skipped > 0).then(|| format!("{skipped} skipped: toolcrib mcp show"));
        vec![
            str_member(source, "name").to_owned(),
            str_member(source, "state").to_owned(),
            since.unwrap_or_default(),
            u64_member(source, "tools").map(|n| n.to_string()).unwrap_or_default(),
            str_member(source, "place").to_owned(),
            problem.or(pending_note).or(skipped_note).unwrap_or_default(),
        ]
    });
    let columns = [
        Column::id("NAME"),
        Column::id("STATE"),
        Column::detail("SINCE", 1),
        Column::detail("TOOLS", 2),
        Column::text("PLACE"),
        Column::text("PROBLEM"),
    ];
    output.print_table(&columns, rows.collect(), "no MCP servers: toolcrib mcp add --help")?;
    for source in sources {
        if let Some(address) = source["oauth"]["sign_in_url"].as_str() {
            output.print_note(&format!(
                "to sign in to {}, open",
                sanitize_line(str_member(source, "name"))
            ));
            output.print_note(&format!("  {}", sanitize_line(address)));
        }
    }
    Ok(())
}

/// Returns the client of the running server, for commands that need the state of its MCP servers.
fn require_server(target: &McpServersTarget) -> Result<&ApiClient, CommandFailure> {
    match target {
        McpServersTarget::Server(client) => Ok(client),
        McpServersTarget::Directory { .. } => {
            let message = "this needs a running server, which has the state of its MCP servers";
            Err(CommandFailure::new(exit::UNREACHABLE, "UNREACHABLE", message)
                .hint("start it, or name it with --server URL --key KEY"))
        }
    }
}

async fn show(
    context: &CommandContext,
    target: &McpServersTarget,
    name: &str,
) -> Result<(), CommandFailure> {
    let source = require_server(target)?
        .request_json(ApiRequest::get(&["v1", "sources", "mcp", name]))
        .await?;
    context.output.print_json(&source)
}

async fn refresh(
    context: &CommandContext,
    target: &McpServersTarget,
    name: &str,
) -> Result<(), CommandFailure> {
    let request = ApiRequest::post(&["v1", "sources", "mcp", name, "refresh"], json!({}));
    let source = require_server(target)?.request_json(request.wait(CONNECT_WAIT)).await?;
    match context.output.json {
        true => context.output.print_json(&source),
        false => context.output.print_line(&describe_source(&source)),
    }
}

async fn accept(
    context: &CommandContext,
    target: &McpServersTarget,
    name: &str,
    tools: Vec<String>,
) -> Result<(), CommandFailure> {
    let body = if tools.is_empty() { json!({}) } else { json!({ "tools": tools }) };
    let request = ApiRequest::post(&["v1", "sources", "mcp", name, "accept"], body);
    let answer = require_server(target)?.request_json(request).await?;
    if context.output.json {
        return context.output.print_json(&answer);
    }
    let accepted = answer["accepted"].as_array().map(Vec::as_slice).unwrap_or_default();
    for change in accepted {
        let line = format!("{} ({})", str_member(change, "tool"), str_member(change, "change"));
        context.output.print_line(&sanitize_line(&line))?;
    }
    if accepted.is_empty() {
        context.output.print_note("there was nothing to accept");
    }
    Ok(())
}

async fn remove(
    context: &CommandContext,
    target: &McpServersTarget,
    name: &str,
) -> Result<(), CommandFailure> {
    match target {
        McpServersTarget::Server(client) => {
            let path = ["v1", "sources", "mcp", name];
            client.request_json(ApiRequest::new(Method::DELETE, &path)).await?;
        }
        McpServersTarget::Directory { engine, caller } => {
            engine.upstreams().remove(caller, name).await?
        }
    }
    context.output.print_note(&format!("{} is removed, with its tools", sanitize_line(name)));
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use axum::http::StatusCode;
    use axum::routing::get;

    use super::*;

    /// Starts a fake server with these routes and returns a client of it.
    async fn serve(router: axum::Router) -> ApiClient {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        tokio::spawn(async move { axum::serve(listener, router).await });
        ApiClient::new(&address, None, None).unwrap()
    }

    #[tokio::test]
    async fn a_server_that_requires_a_key_is_not_treated_as_absent() {
        let refusal = || async {
            let error = json!({ "code": "UNAUTHENTICATED", "message": "a key is needed" });
            (StatusCode::UNAUTHORIZED, axum::Json(json!({ "error": error })))
        };
        let healthz = get(|| async { ([("toolcrib-version", "1")], "ok") });
        let router = axum::Router::new().route("/healthz", healthz);
        let client = serve(router.route("/v1/sources/mcp", get(refusal))).await;
        let failure = probe_server(&client).await.unwrap().unwrap_err();
        assert_eq!((failure.exit, failure.message.as_str()), (exit::AUTH, "a key is needed"));
        assert!(
            !McpServersCommand::Ls.works_without_key()
                && !McpServersCommand::Show { name: String::new() }.works_without_key()
        );
        assert!(McpServersCommand::Rm { name: String::new() }.works_without_key());
        let other = axum::Router::new().fallback(|| async { "ok" });
        assert!(probe_server(&serve(other).await).await.is_none());
    }
}
