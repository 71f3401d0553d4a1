//! Settings of the MCP transport.

use toolcrib::domain::directory::credential::ToolNameForm;
use toolcrib_protocol::outbound::OutboundPolicy;

use super::sessions::SessionKey;
use crate::auth::OriginPolicy;

/// Limits and defaults of the MCP transport.
#[derive(Debug, Clone)]
pub struct McpTransportSettings {
    /// Maximum time to wait for a result before an MCP client that supports tasks gets a task.
    pub task_after_ms: u64,
    /// Maximum time any other MCP client waits before it gets a text with the id of the pending
    /// call.
    pub wait_ms: u64,
    /// Maximum of the waits that requests and keys choose themselves.
    pub max_wait_ms: u64,
    /// Form of the names of tools, unless the request or its key chooses one.
    pub names: ToolNameForm,
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
    /// Time after which an MCP client that lost the stream of a call is asked to connect again.
    /// Common MCP clients try twice, so the server may be away for up to twice this time.
    pub retry_ms: u64,
    /// The key that authenticates the ids of legacy sessions. With the same key, sessions survive a
    /// restart. If `None`, they end with the process.
    pub session_key: Option<SessionKey>,
    /// Origins of web pages that may use this transport, and host names of this server. With a key,
    /// pages of this machine may use it too, and an empty list of hosts allows every name.
    pub origins: OriginPolicy,
    /// The URL of this server, as the server card names it; `None` for the host of each request.
    pub public_url: Option<String>,
    /// The addresses to which events may be sent.
    pub event_callbacks: OutboundPolicy,
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
            max_wait_ms: 300_000,
            names: ToolNameForm::Model,
            page_size: 1_000,
            catalogue_threshold: 200,
            result_tokens: 10_000,
            ttl_ms: 60_000,
            retention_ms: None,
            max_body_bytes: 2 << 20,
            max_sessions: 10_000,
            retry_ms: 5_000,
            session_key: None,
            origins: OriginPolicy::default(),
            public_url: None,
            event_callbacks: OutboundPolicy::new("webhooks", false, &[]),
            protected_resource: None,
        }
    }
}
