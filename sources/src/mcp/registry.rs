//! The port through which upstreams record their tools and credentials. The server implements it
//! over its store.

use std::collections::BTreeMap;

use async_trait::async_trait;
use toolcrib::domain::tool::ToolDefinition;

/// The durable record of the tools and credentials of upstreams.
#[async_trait]
pub trait UpstreamRegistry: Send + Sync + 'static {
    /// Returns the accepted tools of an upstream, by name.
    fn accepted_tools(&self, project: &str, upstream: &str) -> BTreeMap<String, ToolDefinition>;

    /// Replaces the tools of an upstream. Returns the names of those that were rejected, with the
    /// reasons.
    async fn set_tools(
        &self,
        project: &str,
        upstream: &str,
        tools: Vec<ToolDefinition>,
        reason: &str,
    ) -> Result<Vec<(String, String)>, String>;

    /// Returns the stored OAuth credential of an upstream, if any.
    async fn credential(&self, project: &str, upstream: &str) -> Result<Option<String>, String>;

    /// Stores the OAuth credential of an upstream, or deletes it when it is `None`.
    async fn set_credential(
        &self,
        project: &str,
        upstream: &str,
        grant: Option<String>,
    ) -> Result<(), String>;

    /// Timeout of a call where neither the request nor the tool sets one.
    fn default_timeout_ms(&self, project: &str) -> u64;
}
