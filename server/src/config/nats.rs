//! Settings of tools over NATS.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::Deserialize;

/// Tools over NATS.
#[derive(Debug, Clone, PartialEq, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct NatsSettings {
    /// `nats://HOST:PORT`. Without it NATS is not used; everything else works.
    pub url: Option<String>,
    /// The protocol version, which is part of every subject: `v1r3` or `v1r4`.
    pub version: String,
    /// A file with NATS credentials.
    pub credentials: Option<PathBuf>,
}

impl Default for NatsSettings {
    fn default() -> Self {
        Self {
            url: None,
            version: toolcrib_protocol::utp::DEFAULT_VERSION.into(),
            credentials: None,
        }
    }
}

impl NatsSettings {
    /// Returns the endpoint to connect to, if NATS is configured.
    pub fn endpoint(&self) -> Option<toolcrib_protocol::utp::nats_connection::NatsEndpoint> {
        let (version, credentials) = (self.version.clone(), self.credentials.clone());
        Some(toolcrib_protocol::utp::nats_connection::NatsEndpoint {
            url: self.url.clone()?,
            credentials,
            version,
        })
    }
}
