//! MCP: every tool of the crib for every MCP client, over streamable HTTP at `/mcp` and over
//! standard input and output.
//!
//! Two revisions on one address, as the client asks: 2026-07-28, which has no sessions, and
//! 2025-11-25 with those before it, which do. The protocol itself is `rmcp`'s; here is what it is
//! about: who asks, which tools they see, and what becomes of a call.

mod announce;
mod answer;
mod beside;
mod call;
mod catalogue;
mod http;
mod input;
mod own;
mod progress;
mod resources;
mod server;
mod shelf;
mod tasks;
mod tools;
mod unread;

use std::sync::Arc;

use rmcp::model::CacheScope;
use toolcrib::{Caller, Engine};

pub use catalogue::Catalogue;
pub use http::router;
pub use shelf::{Change, Changed, Changes, Shelf};

use server::{Server, Shared, View};

/// The door's own settings.
#[derive(Debug, Clone)]
pub struct Settings {
    /// How long a client that knows tasks waits for a result before it gets a task.
    pub task_after_ms: u64,
    /// How long any other client waits before it gets the ticket in words.
    pub wait_ms: u64,
    /// Tools on one page of the list.
    pub page_size: usize,
    /// Longer lists are replaced by the three tools that search, unless the client says otherwise.
    pub catalogue_over: usize,
    /// Results of more tokens are told as a digest, with a link to the whole.
    pub result_tokens: usize,
    /// How long a client may take a list for fresh.
    pub ttl_ms: u64,
    /// How long a finished call is kept: what a task's `ttlMs` says.
    pub retention_ms: Option<u64>,
    /// Bytes of one request.
    pub max_body_bytes: usize,
    /// Sessions of older clients at the same time.
    pub max_sessions: usize,
    /// Web pages that may use the door, beside those of this machine: `https://app.example.com`.
    pub allowed_origins: Vec<String>,
    /// Names of this server, beside loopback. Empty: any name, where keys are needed.
    pub allowed_hosts: Vec<String>,
    /// Whose tokens are taken, where there is such an issuer.
    pub issuer: Option<Issuer>,
}

/// What a client without a token is told about where to get one.
#[derive(Debug, Clone)]
pub struct Issuer {
    pub issuer: String,
    /// The address of this door.
    pub resource: String,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            task_after_ms: 2_000,
            wait_ms: 45_000,
            page_size: 1_000,
            catalogue_over: 200,
            result_tokens: 10_000,
            ttl_ms: 60_000,
            retention_ms: None,
            max_body_bytes: 2 << 20,
            max_sessions: 10_000,
            allowed_origins: Vec::new(),
            allowed_hosts: Vec::new(),
            issuer: None,
        }
    }
}

/// The door.
#[derive(Clone)]
pub struct Door {
    shared: Arc<Shared>,
}

impl Door {
    /// A door to this engine.
    pub fn new(engine: Engine, settings: Settings) -> Self {
        Self::with_shelf(engine, settings, Arc::new(shelf::Empty))
    }

    /// The same with resources and prompts beside the tools.
    pub fn with_shelf(engine: Engine, settings: Settings, shelf: Arc<dyn Shelf>) -> Self {
        let (lists, peers) = Default::default();
        Self { shared: Arc::new(Shared { engine, settings, lists, shelf, peers }) }
    }

    fn server(&self, view: View) -> Server {
        Server { shared: self.shared.clone(), view, session: Arc::default() }
    }

    /// Serves one client over these pipes, until they are closed. It sees every tool, or those of
    /// one source under their own names.
    pub async fn serve_pipes<R, W>(
        &self,
        caller: Caller,
        catalogue: Option<Catalogue>,
        source: Option<String>,
        input: R,
        output: W,
    ) -> Result<(), Box<dyn std::error::Error + Send + Sync>>
    where
        R: tokio::io::AsyncRead + Send + Unpin + 'static,
        W: tokio::io::AsyncWrite + Send + Unpin + 'static,
    {
        if let Some(name) = source.as_deref().filter(|name| !self.shared.shelf.has(&caller, name)) {
            return Err(format!("there is no source \"{name}\"").into());
        }
        let server =
            self.server(View { caller, standing: None, catalogue, source: source.map(Into::into) });
        let running = rmcp::serve_server(server, (input, output)).await?;
        running.waiting().await?;
        Ok(())
    }
}

/// How long and by whom a list may be kept: it is one caller's.
fn hints<T>(result: T, settings: &Settings, set: impl FnOnce(T, u64, CacheScope) -> T) -> T {
    set(result, settings.ttl_ms, CacheScope::Private)
}
