//! Settings of the transports.

use schemars::JsonSchema;
use serde::Deserialize;
use toolcrib::domain::directory::credential::ToolNameForm;
use toolcrib_transport::mcp;

/// Transports: the interfaces that callers use.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
#[schemars(rename = "DoorSettings")]
pub struct TransportSettings {
    /// The HTTP API.
    pub http: HttpEndpointSettings,
    /// The MCP endpoint.
    pub mcp: McpEndpointSettings,
}

/// The HTTP API: requests without a key.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
#[schemars(rename = "HttpEndpointSettings")]
pub struct HttpEndpointSettings {
    /// Origins of web pages that may use the HTTP API of a server without keys:
    /// `http://localhost:5173`.
    pub allowed_origins: Vec<String>,
    /// Host names of a server without keys, in addition to loopback and the host of
    /// `upstreams.public_url`.
    pub allowed_hosts: Vec<String>,
}

/// The MCP endpoint.
#[derive(Debug, Clone, PartialEq, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
#[schemars(rename = "McpSettings")]
pub struct McpEndpointSettings {
    /// Serves `/mcp`.
    pub enabled: bool,
    /// Time an MCP client that supports tasks waits for a result before it receives a task.
    pub task_after_ms: u64,
    /// Time any other MCP client waits before it receives the ticket, with which it can ask again.
    pub wait_ms: u64,
    /// Form of the names of tools: `model` (`calculation__eval`) or `dotted` (`calculation.eval`).
    /// A request (`?names=`) or its key may choose another one.
    #[schemars(with = "String", extend("enum" = ["model", "dotted"]))]
    pub names: ToolNameForm,
    /// Number of tools on one page of `tools/list`.
    pub page_size: usize,
    /// Lists of more tools are replaced by three tools that search, describe and call, unless the
    /// MCP client requests `?catalogue=full`.
    pub catalogue_over: usize,
    /// Results of more tokens are returned as a digest with a link to the full result.
    pub result_tokens: usize,
    /// Time for which an MCP client may treat a list as fresh.
    pub ttl_ms: u64,
    /// Maximum number of concurrent sessions of MCP clients that use older protocol revisions.
    pub max_sessions: usize,
    /// Time after which an MCP client that lost the stream of a call connects again. Common MCP
    /// clients try twice, so they get their result if the server is back within twice this time.
    pub retry_ms: u64,
    /// Origins of web pages that may use `/mcp`: `https://app.example.com`. With a key, pages of
    /// this machine may use it too.
    pub allowed_origins: Vec<String>,
    /// Host names of this server, in addition to loopback. If empty, any name is accepted once
    /// there are keys.
    pub allowed_hosts: Vec<String>,
}

impl Default for McpEndpointSettings {
    fn default() -> Self {
        let settings = mcp::McpTransportSettings::default();
        Self {
            enabled: true,
            task_after_ms: settings.task_after_ms,
            wait_ms: settings.wait_ms,
            names: settings.names,
            page_size: settings.page_size,
            catalogue_over: settings.catalogue_threshold,
            result_tokens: settings.result_tokens,
            ttl_ms: settings.ttl_ms,
            max_sessions: settings.max_sessions,
            retry_ms: settings.retry_ms,
            allowed_origins: Vec::new(),
            allowed_hosts: Vec::new(),
        }
    }
}
