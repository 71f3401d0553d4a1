//! The MCP transport: offers every tool of Toolcrib to MCP clients, over streamable HTTP at `/mcp`
//! and over standard input and output.
//!
//! One address serves both revisions, as the MCP client requests: 2026-07-28, which has no
//! sessions, and 2025-11-25 and older, which have them. `rmcp` implements the protocol. This module
//! decides who the caller is, which tools the caller sees, and how the outcome of a call is
//! reported.

mod builtin_tools;
mod call;
mod catalogue;
mod elicitation;
mod http;
mod notifications;
mod param_errors;
mod passthrough;
mod progress;
mod resources;
mod server;
mod tasks;
mod tool_list_splice;
mod tool_result;
mod tools;

use std::sync::Arc;

use rmcp::model::CacheScope;
use toolcrib::{Caller, Engine};

pub use crate::mcp::passthrough::{
    PassthroughChange, PassthroughChangeKind, PassthroughChangeStream, PassthroughProvider,
};
pub use catalogue::CatalogueMode;
pub use http::router;

use server::{CallerView, McpHandler, McpTransportState};

/// Limits and defaults of the MCP transport.
#[derive(Debug, Clone)]
pub struct McpTransportSettings {
    /// Maximum time to wait for a result before an MCP client that supports tasks gets a task.
    pub task_after_ms: u64,
    /// Maximum time any other MCP client waits before it gets a text with the id of the pending
    /// call.
    pub wait_ms: u64,
    /// Number of tools on one page of the list.
    pub page_size: usize,
    /// Number of tools above which the list is replaced by the three catalogue tools, unless the
    /// MCP client chooses a mode.
    pub catalogue_threshold: usize,
    /// Number of tokens above which a result is returned as a digest with a link to the full
    /// result.
    pub result_tokens: usize,
    /// Time for which an MCP client may treat a list as fresh.
    pub ttl_ms: u64,
    /// Time for which a finished call is stored, reported as a task's `ttlMs`.
    pub retention_ms: Option<u64>,
    /// Maximum size of a request body in bytes.
    pub max_body_bytes: usize,
    /// Maximum number of concurrent legacy sessions.
    pub max_sessions: usize,
    /// Origins of web pages that may use this transport, in addition to pages of this machine:
    /// `https://app.example.com`.
    pub allowed_origins: Vec<String>,
    /// Host names of this server, in addition to loopback. An empty list allows every name if the
    /// server has API keys; without keys only loopback names are accepted.
    pub allowed_hosts: Vec<String>,
    /// The issuer whose OAuth tokens are accepted, if any.
    pub protected_resource: Option<ProtectedResourceMetadata>,
}

/// Metadata that tells an MCP client without a token where to get one (RFC 9728).
#[derive(Debug, Clone)]
pub struct ProtectedResourceMetadata {
    pub issuer: String,
    /// The URL of this transport.
    pub resource: String,
}

impl Default for McpTransportSettings {
    fn default() -> Self {
        Self {
            task_after_ms: 2_000,
            wait_ms: 45_000,
            page_size: 1_000,
            catalogue_threshold: 200,
            result_tokens: 10_000,
            ttl_ms: 60_000,
            retention_ms: None,
            max_body_bytes: 2 << 20,
            max_sessions: 10_000,
            allowed_origins: Vec::new(),
            allowed_hosts: Vec::new(),
            protected_resource: None,
        }
    }
}

/// The MCP transport of one engine.
#[derive(Clone)]
pub struct McpTransport {
    shared: Arc<McpTransportState>,
}

impl McpTransport {
    /// Returns a transport without resources and prompts of MCP servers.
    pub fn new(engine: Engine, settings: McpTransportSettings) -> Self {
        Self::with_passthrough(
            engine,
            settings,
            Arc::new(crate::mcp::passthrough::EmptyPassthrough),
        )
    }

    /// Returns a transport that also offers the resources and prompts of `passthrough`.
    pub fn with_passthrough(
        engine: Engine,
        settings: McpTransportSettings,
        shelf: Arc<dyn PassthroughProvider>,
    ) -> Self {
        let (lists, peers) = Default::default();
        Self {
            shared: Arc::new(McpTransportState {
                engine,
                settings,
                tool_lists: lists,
                passthrough: shelf,
                legacy_sessions: peers,
            }),
        }
    }

    fn new_handler(&self, view: CallerView) -> McpHandler {
        McpHandler { shared: self.shared.clone(), view, session: Arc::default() }
    }

    /// Serves one MCP client over these pipes until they are closed. The MCP client sees every
    /// tool, or, if a source is given, the tools of that source under their unprefixed names.
    pub async fn serve_pipes<R, W>(
        &self,
        caller: Caller,
        catalogue: Option<CatalogueMode>,
        source: Option<String>,
        input: R,
        output: W,
    ) -> Result<(), Box<dyn std::error::Error + Send + Sync>>
    where
        R: tokio::io::AsyncRead + Send + Unpin + 'static,
        W: tokio::io::AsyncWrite + Send + Unpin + 'static,
    {
        if let Some(name) =
            source.as_deref().filter(|name| !self.shared.passthrough.has_source(&caller, name))
        {
            return Err(format!("there is no source \"{name}\"").into());
        }
        let server = self.new_handler(CallerView {
            caller,
            credentials: None,
            catalogue,
            source: source.map(Into::into),
        });
        let running = rmcp::serve_server(server, (input, output)).await?;
        running.waiting().await?;
        Ok(())
    }
}

/// Sets the cache hints of a list: its lifetime, and that it is private to one caller.
fn with_cache_hints<T>(
    result: T,
    settings: &McpTransportSettings,
    set: impl FnOnce(T, u64, CacheScope) -> T,
) -> T {
    set(result, settings.ttl_ms, CacheScope::Private)
}
