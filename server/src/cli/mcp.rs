//! `toolcrib mcp`: Toolcrib as an MCP server on standard input and output, for MCP clients that
//! start their servers themselves. It relays messages to a running server, or runs an engine on a
//! data directory. Standard output belongs to the protocol; everything else goes to standard error.
//!
//! With a subcommand it manages upstream MCP servers.

mod retrying_client;
mod servers;
use std::collections::HashSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::task::Poll;
use std::time::Duration;

use clap::{Args, ValueEnum};
use futures::future::{Fuse, FusedFuture};
use futures::stream::FuturesUnordered;
use futures::{FutureExt, StreamExt};
use rmcp::model::{
    ClientJsonRpcMessage, ClientRequest, ErrorData, RequestId, ServerJsonRpcMessage,
};
use rmcp::transport::async_rw::AsyncRwTransport;
use rmcp::transport::streamable_http_client::StreamableHttpClientTransportConfig;
use rmcp::transport::{StreamableHttpClientTransport, Transport};
use rmcp::{RoleClient, RoleServer};
use tokio::time::Instant;
use toolcrib::Caller;
use toolcrib::domain::directory::credential::ToolNameForm;
use toolcrib::domain::fault::Code;
use toolcrib_store::file_permissions;
use toolcrib_transport::auth::ProcessCredentials;
use toolcrib_transport::mcp::{CatalogueMode, McpViewOptions, mark_lines};

use self::retrying_client::RetryingClient;
use super::failure::{CommandFailure, exit};
use super::{CommandContext, StorageArgs, ToolNamesArg};
use crate::config::Config;
use crate::{bootstrap, telemetry};

#[derive(Debug, Args)]
#[command(after_help = "\
In the configuration of a desktop client:
  {\"mcpServers\": {\"toolcrib\": {\"command\": \"toolcrib\", \"args\": [\"mcp\"]}}}

Examples:
  toolcrib mcp                                   the server on this machine, or the data directory
  toolcrib mcp --server https://crib.example.com --key tck_…
  toolcrib mcp --data-dir ~/.toolcrib            no server needed
  toolcrib mcp --catalogue search                three tools instead of many
  toolcrib mcp --names dotted                    calculation.eval instead of calculation__eval
  toolcrib mcp --source files                    one upstream MCP server, under its own names

Upstream MCP servers:
  toolcrib mcp add files -- npx -y @modelcontextprotocol/server-filesystem /srv/files
  toolcrib mcp add far https://mcp.example.com/mcp --header 'Authorization: Bearer ${TOKEN}'
  toolcrib mcp add --file ~/.config/client.json   the mcpServers of a desktop client
  toolcrib mcp ls
  toolcrib mcp show files
  toolcrib mcp accept far
  toolcrib mcp sign-in far                        in a browser, if a server requires it
  toolcrib mcp rm files")]
#[command(args_conflicts_with_subcommands = true)]
pub struct McpArgs {
    #[command(subcommand)]
    verb: Option<crate::cli::mcp::servers::McpServersCommand>,
    /// Present each tool, or only three tools that search, describe and call
    #[arg(long, value_name = "HOW")]
    catalogue: Option<CatalogueArg>,
    /// Only the tools of this upstream MCP server, under their own names
    #[arg(long, value_name = "NAME", conflicts_with = "catalogue")]
    source: Option<String>,
    /// Form of the names of tools [default: that of the key or the server]
    #[arg(long, value_enum, value_name = "FORM")]
    names: Option<ToolNamesArg>,
    /// Time that tools/call waits for a result [default: that of the key or the server]
    #[arg(long, value_name = "MS")]
    wait_ms: Option<u64>,
    #[command(flatten)]
    storage: StorageArgs,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum CatalogueArg {
    Full,
    Search,
}

/// Maximum time to close the connection to the server.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// Maximum time to wait for open requests after the MCP client has closed its input: it may be a
/// script that wrote all its requests at once.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

/// Serves until standard input is closed.
pub async fn run(context: &CommandContext, args: McpArgs) -> Result<(), CommandFailure> {
    if let Some(verb) = args.verb {
        return crate::cli::mcp::servers::run(context, verb, &args.storage).await;
    }
    context.check_one_target(&args.storage)?;
    if args.storage.is_set() {
        return run_embedded(context, &args).await;
    }
    // Without an explicit choice: the server on this machine if one is running, otherwise the data
    // directory.
    if context.global.server.is_some() || context.client()?.is_toolcrib_alive().await {
        return run_bridge(context, &args).await;
    }
    run_embedded(context, &args).await
}

/// Serves from an engine in this process, on the data directory.
async fn run_embedded(context: &CommandContext, args: &McpArgs) -> Result<(), CommandFailure> {
    let mut config = context.config(None, &args.storage)?;
    // A configuration that names the default directory counts as unset.
    let is_unset = !args.storage.is_set() && config.data_dir == Config::default().data_dir;
    if is_unset
        && config.store.url.is_none()
        && let Some(fallback) = fallback_data_dir(&config.data_dir, |name| std::env::var_os(name))
    {
        let (unusable, replacement) = (config.data_dir.display(), fallback.display());
        context
            .output
            .print_note(&format!("{unusable} cannot be written: data is stored in {replacement}"));
        config.data_dir = fallback;
    }
    telemetry::start_logging(&config.log.level, config.log.format);
    let served = bootstrap::start_server(&config).await?;
    let engine = served.engine.clone();
    let has_keys = engine.registry().credentials().has_keys();
    let credentials = match (has_keys, context.global.key.as_deref()) {
        (false, _) => None,
        (true, Some(key)) => Some(ProcessCredentials::authenticate(&engine, key).await?),
        (true, None) => {
            let message = "there are keys in this data directory, so one is needed";
            return Err(CommandFailure::new(exit::AUTH, Code::Unauthenticated.as_str(), message)
                .hint("give it with --key or TOOLCRIB_KEY"));
        }
    };
    let local = || Caller::local(context.project());
    let caller = credentials.as_ref().map_or_else(local, |found| found.caller().clone());
    let transport = served.mcp_transport(&config);
    let options = McpViewOptions {
        catalogue: args.catalogue.map(|mode| match mode {
            CatalogueArg::Full => CatalogueMode::Full,
            CatalogueArg::Search => CatalogueMode::Search,
        }),
        source: args.source.as_deref().map(Into::into),
        names: args.names.map(Into::into),
        wait_ms: args.wait_ms,
    };
    let (input, output) = (tokio::io::stdin(), tokio::io::stdout());
    let serving = transport.serve_pipes(caller, options, input, output);
    let invalid = async {
        match &credentials {
            Some(credentials) => credentials.wait_until_invalid(&engine).await,
            None => std::future::pending().await,
        }
    };
    let ended = tokio::select! {
        ended = serving => ended,
        error = invalid => Err(error.into()),
    };
    let drain = Duration::from_millis(config.shutdown.drain_ms);
    engine.shut_down(drain).await;
    served.stop_mcp_servers().await;
    served.flush_telemetry(drain).await;
    ended.map_err(|error| CommandFailure::new(exit::FAILURE, "MCP", error.to_string()))
}

/// Returns the user's data directory if this directory is not writable: desktop applications start
/// programs in any directory, often in `/`. Creates the lock file to find out whether the directory
/// is writable. `lookup_env` returns an environment variable.
fn fallback_data_dir(
    directory: &Path,
    lookup_env: impl Fn(&str) -> Option<OsString>,
) -> Option<PathBuf> {
    if file_permissions::create_owner_only(&directory.join("toolcrib.lock")).is_ok() {
        return None;
    }
    let absolute_path =
        |name: &str| lookup_env(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let default_data_home = || Some(absolute_path("HOME")?.join(".local/share"));
    Some(absolute_path("XDG_DATA_HOME").or_else(default_data_home)?.join("toolcrib"))
}

/// Relays messages between the MCP client and a server. Only calls are changed: they get an
/// idempotency key. The MCP client does not notice a restart of the server.
async fn run_bridge(context: &CommandContext, args: &McpArgs) -> Result<(), CommandFailure> {
    let api_client = context.client()?;
    let url = format!("{}/mcp{}", api_client.server(), path_and_query(args));
    // This client sends the key and the project with every request.
    let http = RetryingClient::new(api_client.http_client(), api_client.server());
    let config = StreamableHttpClientTransportConfig::with_uri(url.as_str());
    let server = StreamableHttpClientTransport::with_client(http.clone(), config);
    let client = AsyncRwTransport::new_server(mark_lines(tokio::io::stdin()), tokio::io::stdout());
    let ended = relay_messages(client, server, &url).await;
    // If a cancellation cannot be delivered in this time, its call ends by its deadline.
    let _ = tokio::time::timeout(CLOSE_TIMEOUT, http.finish()).await;
    ended
}

/// Returns the part of the server's URL after `/mcp` that the arguments select.
fn path_and_query(args: &McpArgs) -> String {
    let mut path = args.source.as_ref().map(|source| format!("/{source}")).unwrap_or_default();
    let catalogue = args.catalogue.map(|mode| match mode {
        CatalogueArg::Full => "full",
        CatalogueArg::Search => "search",
    });
    let names = args.names.map(|form| ToolNameForm::from(form).as_str());
    let parameters = [
        ("catalogue", catalogue.map(str::to_owned)),
        ("names", names.map(str::to_owned)),
        ("wait_ms", args.wait_ms.map(|ms| ms.to_string())),
    ];
    let mut separator = '?';
    for (name, value) in parameters {
        let Some(value) = value else { continue };
        path.push_str(&format!("{separator}{name}={value}"));
        separator = '&';
    }
    path
}

/// Relays messages between the MCP client and the server until one of them closes. Messages are
/// sent in the order in which they arrived: a message that is not a request is delivered before the
/// next one is sent. Requests run concurrently.
async fn relay_messages(
    mut client: impl Transport<RoleServer>,
    mut server: impl Transport<RoleClient>,
    url: &str,
) -> Result<(), CommandFailure> {
    let mut requests = FuturesUnordered::new();
    // The delivery of a message that is not a request. While it runs, no other message is read.
    let mut delivery = Fuse::terminated();
    // Ids of the requests that await a response, and the drain deadline once the MCP client has
    // closed its input.
    let (mut open_requests, mut drain_deadline) = (HashSet::new(), None::<Instant>);
    while drain_deadline.is_none() || !open_requests.is_empty() || !delivery.is_terminated() {
        let reads_client = delivery.is_terminated() && drain_deadline.is_none();
        let answer = tokio::select! {
            next = client.receive(), if reads_client => match next {
                None => {
                    drain_deadline = Some(Instant::now() + DRAIN_TIMEOUT);
                    continue;
                }
                Some(message) => {
                    let is_subscription = is_subscription_request(&message);
                    open_requests.extend(request_id(&message).filter(|_| !is_subscription));
                    let (id, sending) = (request_id(&message), server.send(message));
                    let is_request = id.is_some();
                    let mut sending = Box::pin(async move { (id, sending.await.err()) });
                    match is_request {
                        // The first poll hands the request to the transport, which fixes its place
                        // in the order.
                        true => match futures::poll!(&mut sending) {
                            Poll::Pending => {
                                requests.push(sending);
                                continue;
                            }
                            Poll::Ready((_, None)) => continue,
                            Poll::Ready((id, Some(error))) => relay_error(url, id, &error),
                        },
                        false => {
                            delivery = sending.fuse();
                            continue;
                        }
                    }
                }
            },
            () = sleep_until_or_forever(drain_deadline) => break,
            (id, error) = &mut delivery => match error {
                None => continue,
                Some(error) => relay_error(url, id, &error),
            },
            Some((id, error)) = requests.next() => match error {
                None => continue,
                Some(error) => relay_error(url, id, &error),
            },
            next = server.receive() => match next {
                Some(message) => message,
                None => {
                    // A request that has failed may report the cause.
                    let ended_request = requests.next().now_or_never().flatten();
                    let reason = ended_request.and_then(|(_, error)| Some(format!(": {}", error?)));
                    let message = format!("{url} does not answer{}", reason.unwrap_or_default());
                    return Err(CommandFailure::unreachable(message)
                        .hint("is the server running, and the key right? toolcrib doctor"));
                }
            },
        };
        if let Some(id) = answered_request_id(&answer) {
            open_requests.remove(id);
        }
        if client.send(answer).await.is_err() {
            break;
        }
    }
    // Responses that are still in flight are discarded.
    let _ = tokio::time::timeout(CLOSE_TIMEOUT, server.close()).await;
    Ok(())
}

/// Builds the error that tells the MCP client about a message that was not delivered.
fn relay_error(
    url: &str,
    id: Option<RequestId>,
    error: &impl std::error::Error,
) -> ServerJsonRpcMessage {
    let error = ErrorData::internal_error(format!("{url}: {error}"), None);
    ServerJsonRpcMessage::error(error, id)
}

/// Sleeps until this time, or forever if there is none.
async fn sleep_until_or_forever(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

/// Returns true if the request is a subscription, which is answered only when it ends.
fn is_subscription_request(message: &ClientJsonRpcMessage) -> bool {
    let ClientJsonRpcMessage::Request(request) = message else { return false };
    matches!(request.request, ClientRequest::SubscriptionsListenRequest(_))
}

/// Returns the id of the request that a message answers.
fn answered_request_id(message: &ServerJsonRpcMessage) -> Option<&RequestId> {
    match message {
        ServerJsonRpcMessage::Response(answer) => Some(&answer.id),
        ServerJsonRpcMessage::Error(error) => error.id.as_ref(),
        _ => None,
    }
}

fn request_id(message: &ClientJsonRpcMessage) -> Option<RequestId> {
    match message {
        ClientJsonRpcMessage::Request(request) => Some(request.id.clone()),
        _ => None,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::convert::Infallible;
    use std::sync::Arc;

    use parking_lot::Mutex;
    use rmcp::service::{RxJsonRpcMessage, TxJsonRpcMessage};
    use serde_json::json;
    use tokio::sync::{mpsc, watch};

    use super::*;

    #[test]
    fn an_unusable_data_directory_falls_back_to_the_users_data_home() {
        let directory = tempfile::tempdir().unwrap();
        let lookup_env_in = |variables: &'static [(&str, &str)]| {
            move |name: &str| {
                variables.iter().find(|(key, _)| *key == name).map(|(_, value)| value.into())
            }
        };
        let writable = directory.path().join("toolcrib-data");
        assert_eq!(fallback_data_dir(&writable, lookup_env_in(&[("HOME", "/home/ada")])), None);
        // A file in its place: even a user who may write everywhere cannot use it as a directory.
        let occupied = directory.path().join("taken");
        std::fs::write(&occupied, "a file").unwrap();
        for (variables, expected) in [
            (&[("HOME", "/home/ada")][..], Some("/home/ada/.local/share/toolcrib")),
            (&[("HOME", "/home/ada"), ("XDG_DATA_HOME", "/data")], Some("/data/toolcrib")),
            (
                &[("HOME", "/home/ada"), ("XDG_DATA_HOME", "")],
                Some("/home/ada/.local/share/toolcrib"),
            ),
            (&[], None),
        ] {
            assert_eq!(
                fallback_data_dir(&occupied, lookup_env_in(variables)).as_deref(),
                expected.map(Path::new),
                "{variables:?}"
            );
        }
    }

    /// An MCP client that has written all its messages at once.
    struct ClientTransport(mpsc::UnboundedReceiver<RxJsonRpcMessage<RoleServer>>);

    impl Transport<RoleServer> for ClientTransport {
        type Error = Infallible;

        fn send(
            &mut self,
            _item: TxJsonRpcMessage<RoleServer>,
        ) -> impl Future<Output = Result<(), Infallible>> + Send + 'static {
            std::future::ready(Ok(()))
        }

        async fn receive(&mut self) -> Option<RxJsonRpcMessage<RoleServer>> {
            self.0.recv().await
        }

        async fn close(&mut self) -> Result<(), Infallible> {
            Ok(())
        }
    }

    /// A server that accepts nothing until the test opens it.
    struct GatedServer {
        received: Arc<Mutex<Vec<String>>>,
        open: watch::Receiver<bool>,
    }

    impl Transport<RoleClient> for GatedServer {
        type Error = Infallible;

        fn send(
            &mut self,
            item: TxJsonRpcMessage<RoleClient>,
        ) -> impl Future<Output = Result<(), Infallible>> + Send + 'static {
            let (received, mut open) = (self.received.clone(), self.open.clone());
            async move {
                let message = serde_json::to_value(&item).unwrap();
                received.lock().push(message["method"].as_str().unwrap().to_owned());
                let _ = open.wait_for(|open| *open).await;
                Ok(())
            }
        }

        async fn receive(&mut self) -> Option<RxJsonRpcMessage<RoleClient>> {
            std::future::pending().await
        }

        async fn close(&mut self) -> Result<(), Infallible> {
            Ok(())
        }
    }

    #[tokio::test]
    async fn messages_are_relayed_in_order() {
        let (client, client_messages) = mpsc::unbounded_channel();
        let (open, opened) = watch::channel(false);
        let received: Arc<Mutex<Vec<String>>> = Arc::default();
        for message in [
            json!({ "jsonrpc": "2.0", "id": 1, "method": "ping" }),
            json!({ "jsonrpc": "2.0", "id": 2, "method": "tools/list" }),
            json!({ "jsonrpc": "2.0", "method": "notifications/initialized" }),
            json!({ "jsonrpc": "2.0", "id": 3, "method": "prompts/list" }),
        ] {
            client.send(serde_json::from_value(message).unwrap()).unwrap();
        }
        let server = GatedServer { received: received.clone(), open: opened };
        let relay =
            tokio::spawn(relay_messages(ClientTransport(client_messages), server, "http://there"));
        let seen = || received.lock().clone();
        while seen().len() < 3 {
            tokio::task::yield_now().await;
        }
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        let expected = ["ping", "tools/list", "notifications/initialized"];
        assert_eq!(
            seen(),
            expected,
            "requests are concurrent, and nothing overtakes a notification"
        );
        open.send_replace(true);
        while seen().len() < 4 {
            tokio::task::yield_now().await;
        }
        assert_eq!(seen()[3], "prompts/list");
        drop(client);
        relay.await.unwrap().unwrap();
    }
}
