//! `toolcrib mcp`: the crib as an MCP server on standard input and output, for clients that start
//! their servers themselves. It passes messages on to a running server, or is one itself on a data
//! directory. Standard output belongs to the protocol; everything else goes to standard error.
//!
//! With a verb, it is about the MCP servers behind the crib.

mod upstreams;

use std::time::Duration;

use clap::{Args, ValueEnum};
use rmcp::model::{ClientJsonRpcMessage, ErrorData, RequestId, ServerJsonRpcMessage};
use rmcp::transport::async_rw::AsyncRwTransport;
use rmcp::transport::streamable_http_client::StreamableHttpClientTransportConfig;
use rmcp::transport::{StreamableHttpClientTransport, Transport};
use rmcp::{RoleClient, RoleServer};
use toolcrib::Caller;
use toolcrib::fault::Code;

use super::failure::{Failure, exit};
use super::{Context, Place};
use crate::doors::mcp::Catalogue;
use crate::{assemble, telemetry};

#[derive(Debug, Args)]
#[command(after_help = "\
In the configuration of a desktop client:
  {\"mcpServers\": {\"toolcrib\": {\"command\": \"toolcrib\", \"args\": [\"mcp\"]}}}

Examples:
  toolcrib mcp                                   the server on this machine, or the data directory
  toolcrib mcp --server https://crib.example.com --key tck_…
  toolcrib mcp --data-dir ~/.toolcrib            no server needed
  toolcrib mcp --catalogue search                three tools in place of many
  toolcrib mcp --source files                    one MCP server behind the crib, under its own names

MCP servers behind the crib:
  toolcrib mcp add files -- npx -y @modelcontextprotocol/server-filesystem /srv/files
  toolcrib mcp add far https://mcp.example.com/mcp --header 'Authorization: Bearer ${TOKEN}'
  toolcrib mcp add --file ~/.config/client.json   the mcpServers of a desktop client
  toolcrib mcp ls
  toolcrib mcp show files
  toolcrib mcp accept far
  toolcrib mcp sign-in far                        in a browser, where a server asks for it
  toolcrib mcp rm files")]
#[command(args_conflicts_with_subcommands = true)]
pub struct McpArgs {
    #[command(subcommand)]
    verb: Option<upstreams::Verb>,
    /// How the tools are shown: each of them, or three that search, describe and call
    #[arg(long, value_name = "HOW")]
    catalogue: Option<Shown>,
    /// Only the tools of this MCP server behind the crib, under their own names
    #[arg(long, value_name = "NAME", conflicts_with = "catalogue")]
    source: Option<String>,
    #[command(flatten)]
    place: Place,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Shown {
    Full,
    Search,
}

/// Serves until standard input is closed.
pub async fn run(context: &Context, args: McpArgs) -> Result<(), Failure> {
    if let Some(verb) = args.verb {
        return upstreams::run(context, verb, &args.place).await;
    }
    let named = context.global.server.is_some();
    if args.place.is_named() && !context.server_typed {
        return embedded(context, &args).await;
    }
    // With nothing said: the server of this machine when there is one, else its data.
    if named || context.client()?.is_alive().await {
        return bridge(context, &args).await;
    }
    embedded(context, &args).await
}

/// An engine of its own on the data directory.
async fn embedded(context: &Context, args: &McpArgs) -> Result<(), Failure> {
    let config = context.config(None, &args.place)?;
    telemetry::start_logging(&config.log.level, config.log.format);
    let served = assemble::engine(&config).await?;
    let engine = served.engine.clone();
    let caller = match (engine.has_keys(), context.global.key.as_deref()) {
        (false, _) => Caller::local(context.project()),
        (true, Some(key)) => engine.authenticate(key).ok_or_else(|| {
            let message = "this key is unknown or was revoked";
            Failure::new(exit::AUTH, Code::Unauthenticated.as_str(), message)
        })?,
        (true, None) => {
            let message = "there are keys in this data directory, so one is needed";
            return Err(Failure::new(exit::AUTH, Code::Unauthenticated.as_str(), message)
                .hint("give it with --key or TOOLCRIB_KEY"));
        }
    };
    let door = served.mcp_door(&config);
    let catalogue = args.catalogue.map(|shown| match shown {
        Shown::Full => Catalogue::Full,
        Shown::Search => Catalogue::Search,
    });
    let (input, output) = (tokio::io::stdin(), tokio::io::stdout());
    let ended = door.serve_pipes(caller, catalogue, args.source.clone(), input, output).await;
    let drain = Duration::from_millis(config.shutdown.drain_ms);
    engine.shut_down(drain).await;
    served.close().await;
    served.flush(drain).await;
    ended.map_err(|error| Failure::new(exit::FAILURE, "MCP", error.to_string()))
}

/// Passes messages between the pipes and a server, as they are.
async fn bridge(context: &Context, args: &McpArgs) -> Result<(), Failure> {
    let client = context.client()?;
    let query = match (args.catalogue, &args.source) {
        (Some(Shown::Full), _) => "?catalogue=full".to_owned(),
        (Some(Shown::Search), _) => "?catalogue=search".to_owned(),
        (None, Some(source)) => format!("/{source}"),
        (None, None) => String::new(),
    };
    let url = format!("{}/mcp{query}", client.server());
    // The key and the project are what this client sends with everything.
    let config = StreamableHttpClientTransportConfig::with_uri(url.as_str());
    let far = StreamableHttpClientTransport::with_client(client.http(), config);
    let near = AsyncRwTransport::new_server(tokio::io::stdin(), tokio::io::stdout());
    pass(near, far, &url).await
}

/// Until one side has nothing more to say.
async fn pass(
    mut near: impl Transport<RoleServer>,
    mut far: impl Transport<RoleClient>,
    url: &str,
) -> Result<(), Failure> {
    let (failed, mut failures) = tokio::sync::mpsc::unbounded_channel();
    loop {
        let answer = tokio::select! {
            said = near.receive() => match said {
                None => break,
                Some(message) => {
                    let (id, sending) = (id_of(&message), far.send(message));
                    let failed = failed.clone();
                    tokio::spawn(async move {
                        if let Err(error) = sending.await {
                            let _ = failed.send((id, error.to_string()));
                        }
                    });
                    continue;
                }
            },
            said = far.receive() => match said {
                Some(message) => message,
                None => {
                    // Why, as far as the failed message knows it.
                    let why = failures.try_recv().map(|(_, why)| format!(": {why}"));
                    let message = format!("{url} does not answer{}", why.unwrap_or_default());
                    return Err(Failure::unreachable(message)
                        .hint("is the server running, and the key right? toolcrib doctor"));
                }
            },
            Some((id, why)) = failures.recv() => {
                let error = ErrorData::internal_error(format!("{url}: {why}"), None);
                ServerJsonRpcMessage::error(error, id)
            }
        };
        if near.send(answer).await.is_err() {
            break;
        }
    }
    let _ = far.close().await;
    Ok(())
}

fn id_of(message: &ClientJsonRpcMessage) -> Option<RequestId> {
    match message {
        ClientJsonRpcMessage::Request(request) => Some(request.id.clone()),
        _ => None,
    }
}
