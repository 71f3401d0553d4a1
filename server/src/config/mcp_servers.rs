//! Settings of the MCP servers whose tools Toolcrib offers.

use std::collections::HashSet;
use std::net::SocketAddr;

use schemars::JsonSchema;
use serde::Deserialize;

use super::{Config, ConfigError};

/// Rules for MCP servers that an API key adds. A local operator may add any server.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
#[schemars(rename = "UpstreamSettings")]
pub struct McpServerAdmissionSettings {
    /// Lets an admin key add commands, which the server runs as child processes on its machine.
    pub allow_commands: bool,
    /// Lets an admin key use values from the server's environment.
    pub allow_env: bool,
    /// Lets an admin key add servers at private addresses.
    pub allow_private: bool,
    /// Hosts that may have private addresses: names, addresses, or `*.name`.
    pub allow_hosts: Vec<String>,
    /// URL at which browsers reach this server: `https://crib.example.com`. After signing in to an
    /// MCP server, people are redirected to its `/oauth/callback`. Default: the listen address.
    pub public_url: Option<String>,
}

/// Returns the URL of a server on this machine.
pub fn local_url(address: SocketAddr) -> String {
    // An unspecified address (`0.0.0.0`, `[::]`) includes loopback.
    let ip = if address.ip().is_unspecified() { [127, 0, 0, 1].into() } else { address.ip() };
    format!("http://{}", SocketAddr::new(ip, address.port()))
}

impl Config {
    /// Returns the URL at which browsers reach this server, as far as the settings determine it.
    pub fn public_url(&self) -> String {
        let listens = || match self.listen.parse() {
            Ok(address) => local_url(address),
            Err(_) => format!("http://{}", self.listen),
        };
        let url = self.mcp_servers.public_url.clone().unwrap_or_else(listens);
        url.trim_end_matches('/').to_owned()
    }

    fn check_public_url(&self) -> Result<(), ConfigError> {
        let Some(url) = &self.mcp_servers.public_url else { return Ok(()) };
        let is_valid = reqwest::Url::parse(url).is_ok_and(|url| {
            let has_only_path = url.query().is_none() && url.fragment().is_none();
            matches!(url.scheme(), "http" | "https") && url.has_host() && has_only_path
        });
        let reason = "must begin with https:// or http://, and have no query";
        if is_valid { Ok(()) } else { Err(ConfigError::invalid("upstreams.public_url", reason)) }
    }

    /// Checks `[[mcp]]` and `upstreams.public_url`.
    pub(super) fn check_mcp(&self) -> Result<(), ConfigError> {
        self.check_public_url()?;
        let mut seen = HashSet::new();
        for settings in &self.mcp {
            settings.check().map_err(|error| {
                let key = format!("mcp.{}.{}", settings.name, error.field);
                ConfigError::invalid(&key, error.why)
            })?;
            if !seen.insert((&settings.project, &settings.name)) {
                let key = format!("mcp.{}.name", settings.name);
                return Err(ConfigError::invalid(&key, "is the name of another [[mcp]] too"));
            }
        }
        Ok(())
    }
}
