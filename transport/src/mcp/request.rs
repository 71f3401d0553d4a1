//! Properties of one MCP request: its protocol revision, the capabilities of its MCP client, its
//! session, and its caller with the part of the tools that the caller chose to see.

use std::sync::Arc;

use axum::http::HeaderMap;
use axum::http::request::Parts;
use rmcp::RoleServer;
use rmcp::model::{ClientCapabilities, Extensions, ProtocolVersion};
use rmcp::service::RequestContext;
use toolcrib::Caller;
use toolcrib::registry::RESULT_READ;

use crate::auth::RequestCredentials;

const SESSION_HEADER: &str = "mcp-session-id";

/// The protocol revision of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ProtocolRevision {
    /// 2025-11-25 and older.
    Legacy,
    /// 2026-07-28.
    Modern,
}

impl ProtocolRevision {
    /// Returns the revision of a request.
    pub(super) fn from_context(context: &RequestContext<RoleServer>) -> Self {
        match context.protocol_version() {
            Some(version) if version.as_str() >= ProtocolVersion::V_2026_07_28.as_str() => {
                Self::Modern
            }
            _ => Self::Legacy,
        }
    }
}

/// Properties that an MCP client declared with a request.
pub(super) struct McpClientInfo {
    pub(super) revision: ProtocolRevision,
    pub(super) capabilities: ClientCapabilities,
    /// The name of the program, if it states one.
    name: Option<String>,
}

/// Name of the Python SDK, which agent frameworks send unless they state their own.
const PYTHON_SDK_NAME: &str = "mcp";
/// The experimental capability of MCP clients that handle links to resources in results.
const LINKS_CAPABILITY: &str = "toolcrib/resource_links";

impl McpClientInfo {
    /// Reads them from the context of a request.
    pub(super) fn from_context(context: &RequestContext<RoleServer>) -> Self {
        Self {
            revision: ProtocolRevision::from_context(context),
            capabilities: context.client_capabilities().unwrap_or_default(),
            name: context.client_info().map(|client| client.name),
        }
    }

    /// Returns whether links to resources may be among the parts of a result. Some agent frameworks
    /// fail at a part that they do not know, so only those MCP clients get links that declare it,
    /// and those of 2026-07-28 that are no such framework.
    pub(super) fn accepts_resource_links(&self) -> bool {
        let experimental = self.capabilities.experimental.as_ref();
        experimental.is_some_and(|declared| declared.contains_key(LINKS_CAPABILITY))
            || self.revision == ProtocolRevision::Modern
                && self.name.as_deref().is_some_and(|name| name != PYTHON_SDK_NAME)
    }

    /// Returns whether the MCP client can receive a task as the response.
    pub(super) fn supports_tasks(&self) -> bool {
        self.capabilities.supports_tasks()
    }
}

/// The form in which an MCP client sees the tools.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CatalogueMode {
    /// The full list of tools.
    Full,
    /// Three tools that search, describe and call all others.
    Search,
}

impl CatalogueMode {
    /// Parses the value of the query parameter: `?catalogue=search`.
    pub(super) fn parse(word: &str) -> Option<Self> {
        match word {
            "full" => Some(Self::Full),
            "search" => Some(Self::Search),
            _ => None,
        }
    }
}

/// The caller of a request, and the part of the tools that the caller chose to see.
#[derive(Clone)]
pub(super) struct CallerView {
    pub(super) caller: Caller,
    /// The credentials of the request, if they can be revoked.
    pub(super) credentials: Option<RequestCredentials>,
    /// The requested catalogue mode. If `None`, the number of tools decides.
    pub(super) catalogue: Option<CatalogueMode>,
    /// The only source that the caller sees, under unprefixed names.
    pub(super) source: Option<Arc<str>>,
}

impl CallerView {
    /// Returns the prefix that is removed from the names the caller sees.
    pub(super) fn prefix(&self) -> Option<String> {
        self.source.as_ref().map(|source| format!("{source}."))
    }

    /// Returns Toolcrib's name for a tool name of the MCP client. The tool that reads long results
    /// belongs to Toolcrib and has no prefix, regardless of the source.
    pub(super) fn qualified_tool_name(&self, name: &str) -> String {
        if name == RESULT_READ { name.to_owned() } else { self.qualified_name(name) }
    }

    /// Returns Toolcrib's name for a name of the MCP client.
    pub(super) fn qualified_name(&self, name: &str) -> String {
        match &self.source {
            Some(source) => format!("{source}.{name}"),
            None => name.to_owned(),
        }
    }
}

/// Returns the HTTP request that carried a message, or `None` over pipes. Its own extensions hold
/// the values that the HTTP layer attached.
pub(super) fn http_parts(extensions: &Extensions) -> Option<&Parts> {
    extensions.get::<Parts>()
}

/// Returns the id of the session that a message belongs to.
pub(super) fn session_id(headers: &HeaderMap) -> Option<String> {
    headers.get(SESSION_HEADER).and_then(|value| value.to_str().ok()).map(str::to_owned)
}

/// Removes the session from the headers of a request that belongs to none.
pub(super) fn remove_session_id(headers: &mut HeaderMap) {
    headers.remove(SESSION_HEADER);
}
