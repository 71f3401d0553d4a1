//! A server for the public MCP conformance suite: the real engine, store, source and MCP transport,
//! with an upstream MCP server whose tools, resources and prompts do what the suite expects.
//!
//! ```console
//! $ cargo run -p toolcrib-server --example conformance -- 127.0.0.1:3000
//! $ npx -y @modelcontextprotocol/conformance@0.2.0-alpha.12 server \
//!       --url http://127.0.0.1:3000/mcp/suite --requirements 2026-07-28
//! ```
//!
//! The upstream is this program again, as a child process on standard input and output: a request
//! of the suite becomes a stored call, goes to the upstream and returns. Only behavior that MCP
//! cannot express for an upstream's tools comes from a local source.

mod source;
mod tools;
mod upstream;

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use tokio_util::sync::CancellationToken;
use toolcrib::Engine;
use toolcrib_protocol::secrets::SecretPolicy;
use toolcrib_server::config::{Config, McpServerAdmissionSettings};
use toolcrib_server::mcp_servers::{McpServerReconciler, outbound_policy};
use toolcrib_server::{mcp_servers, serve};
use toolcrib_sources::mcp::{McpServerSettings, McpSource};
use toolcrib_store::SqliteStore;
use toolcrib_transport::mcp::{self, McpTransport};

/// The argument that makes this program run as the upstream MCP server.
const UPSTREAM: &str = "upstream";

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let argument = std::env::args().nth(1);
    if argument.as_deref() == Some(UPSTREAM) {
        return upstream::serve().await;
    }
    let listen = argument.unwrap_or_else(|| "127.0.0.1:3000".to_owned());
    let directory = tempfile::tempdir()?;
    let store = SqliteStore::open(&directory.path().join("toolcrib.db"))?;
    let behind = Arc::new(McpSource::new(
        outbound_policy(&McpServerAdmissionSettings::default()),
        String::new(),
    ));
    let engine = Engine::builder()
        .store(Arc::new(store))
        .source(Arc::new(source::Tools::new(behind.clone())))
        .start()
        .await?;
    let program = std::env::current_exe()?;
    let settings = McpServerSettings {
        name: tools::SUITE.to_owned(),
        command: program.to_str().map(str::to_owned),
        args: vec![UPSTREAM.to_owned()],
        ..McpServerSettings::default()
    };
    let keeper = McpServerReconciler::start(
        engine.clone(),
        behind,
        vec![settings],
        McpServerAdmissionSettings::default(),
        SecretPolicy::default(),
    );
    if !keeper.wait_until_ready("default", tools::SUITE, Duration::from_secs(30)).await {
        bail!("its MCP server: {}", keeper.problem("default", tools::SUITE).unwrap_or_default());
    }
    let settings =
        mcp::McpTransportSettings { task_after_ms: 300, ..mcp::McpTransportSettings::default() };
    let shelf: Arc<mcp_servers::UpstreamPassthrough> = keeper.passthrough();
    let router = mcp::router(McpTransport::with_passthrough(engine, settings, shelf));
    let listener = tokio::net::TcpListener::bind(&listen)
        .await
        .with_context(|| format!("cannot listen on {listen}"))?;
    println!("listening on {}", listener.local_addr()?);
    serve::serve_listener(listener, router, &Config::default(), CancellationToken::new()).await;
    Ok(())
}
