//! Settings of the ways in.

use schemars::JsonSchema;
use serde::Deserialize;

use crate::doors::mcp;

/// The ways in.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DoorSettings {
    /// MCP clients.
    pub mcp: McpSettings,
}

/// MCP clients.
#[derive(Debug, Clone, PartialEq, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct McpSettings {
    /// Whether `/mcp` is there at all.
    pub enabled: bool,
    /// How long a client that knows tasks waits for a result before it gets a task.
    pub task_after_ms: u64,
    /// How long any other client waits before it gets the ticket and can ask again.
    pub wait_ms: u64,
    /// Tools on one page of `tools/list`.
    pub page_size: usize,
    /// Lists of more tools are replaced by three tools that search, describe and call, unless the
    /// client asks for `?catalogue=full`.
    pub catalogue_over: usize,
    /// Results of more tokens are told as a digest, with a link to the whole.
    pub result_tokens: usize,
    /// How long a client may take a list for fresh.
    pub ttl_ms: u64,
    /// Sessions of clients of older revisions at the same time.
    pub max_sessions: usize,
    /// Web pages that may use `/mcp`, beside those of this machine: `https://app.example.com`.
    pub allowed_origins: Vec<String>,
    /// Names of this server, beside loopback. Empty: any name, once there are keys.
    pub allowed_hosts: Vec<String>,
}

impl Default for McpSettings {
    fn default() -> Self {
        let settings = mcp::Settings::default();
        Self {
            enabled: true,
            task_after_ms: settings.task_after_ms,
            wait_ms: settings.wait_ms,
            page_size: settings.page_size,
            catalogue_over: settings.catalogue_over,
            result_tokens: settings.result_tokens,
            ttl_ms: settings.ttl_ms,
            max_sessions: settings.max_sessions,
            allowed_origins: Vec::new(),
            allowed_hosts: Vec::new(),
        }
    }
}
