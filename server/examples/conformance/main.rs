//! A crib for the public MCP conformance suite: the real engine, store and MCP door, with tools,
//! resources and prompts behind them that do what the suite wants to see.
//!
//! ```console
//! $ cargo run -p toolcrib-server --example conformance -- 127.0.0.1:3000
//! $ npx -y @modelcontextprotocol/conformance@0.2.0-alpha.12 server \
//!       --url http://127.0.0.1:3000/mcp --requirements 2026-07-28
//! ```
//!
//! The tools are a source like any other, with MCP's own results; what they ask, log and report
//! goes through tickets in the store before the suite sees it.

mod shelf;
mod source;
mod tools;

use std::sync::Arc;

use anyhow::Context;
use tokio_util::sync::CancellationToken;
use toolcrib::Engine;
use toolcrib_server::config::Config;
use toolcrib_server::doors::mcp::{self, Door};
use toolcrib_server::serve;
use toolcrib_store::SqliteStore;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let listen = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:3000".to_owned());
    let directory = tempfile::tempdir()?;
    let store = SqliteStore::open(&directory.path().join("toolcrib.db"))?;
    let shelf = Arc::new(shelf::Fixtures::new());
    let source = Arc::new(source::Fixtures::new(shelf.clone()));
    let engine = Engine::builder().store(Arc::new(store)).source(source.clone()).start().await?;
    source.can_change_the_directory_of(engine.clone());
    let settings = mcp::Settings { task_after_ms: 300, ..mcp::Settings::default() };
    let router = mcp::router(Door::with_shelf(engine, settings, shelf));
    let listener = tokio::net::TcpListener::bind(&listen)
        .await
        .with_context(|| format!("cannot listen on {listen}"))?;
    println!("listening on {}", listener.local_addr()?);
    serve::on(listener, router, &Config::default(), CancellationToken::new()).await;
    Ok(())
}
