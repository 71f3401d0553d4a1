//! Settings of MCP servers whose tools are offered.

use std::collections::HashSet;
use std::net::SocketAddr;

use schemars::JsonSchema;
use serde::Deserialize;

use super::{Config, ConfigError};

/// What a key may add over the API. Whoever is at the machine may add anything.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct UpstreamSettings {
    /// Whether an admin's key may add programs, which are started on the server's machine.
    pub allow_commands: bool,
    /// Whether it may take values from the server's environment.
    pub allow_env: bool,
    /// Whether it may add servers at private addresses.
    pub allow_private: bool,
    /// Hosts whose addresses may be private: names, addresses, or `*.name`.
    pub allow_hosts: Vec<String>,
    /// Where a browser reaches this server: `https://crib.example.com`. People who sign in to an
    /// MCP server are sent back there, to `/oauth/callback`. Unset: the address it listens on.
    pub public_url: Option<String>,
}

/// The address of a server on this machine.
pub fn local_url(address: SocketAddr) -> String {
    // Every address is reached by the loopback one as well.
    let ip = if address.ip().is_unspecified() { [127, 0, 0, 1].into() } else { address.ip() };
    format!("http://{}", SocketAddr::new(ip, address.port()))
}

impl Config {
    /// Where a browser reaches this server, as far as the settings say.
    pub fn public_url(&self) -> String {
        let listens = || match self.listen.parse() {
            Ok(address) => local_url(address),
            Err(_) => format!("http://{}", self.listen),
        };
        let url = self.upstreams.public_url.clone().unwrap_or_else(listens);
        url.trim_end_matches('/').to_owned()
    }

    fn check_public_url(&self) -> Result<(), ConfigError> {
        let Some(url) = &self.upstreams.public_url else { return Ok(()) };
        let fine = reqwest::Url::parse(url).is_ok_and(|url| {
            let plain = url.query().is_none() && url.fragment().is_none();
            matches!(url.scheme(), "http" | "https") && url.has_host() && plain
        });
        let why = "must begin with https:// or http://, and have no query";
        if fine { Ok(()) } else { Err(ConfigError::invalid("upstreams.public_url", why)) }
    }

    /// Checks `[[mcp]]`.
    pub(super) fn check_mcp(&self) -> Result<(), ConfigError> {
        self.check_public_url()?;
        let mut seen = HashSet::new();
        for settings in &self.mcp {
            settings.check().map_err(|wrong| {
                let key = format!("mcp.{}.{}", settings.name, wrong.field);
                ConfigError::invalid(&key, wrong.why)
            })?;
            if !seen.insert((&settings.project, &settings.name)) {
                let key = format!("mcp.{}.name", settings.name);
                return Err(ConfigError::invalid(&key, "is the name of another [[mcp]] too"));
            }
        }
        Ok(())
    }
}
