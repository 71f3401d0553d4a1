//! Properties of one MCP request: its protocol revision, the capabilities of its MCP client, its
//! session, and its caller with the part of the tools that the caller chose to see.

// Logging belongs to the legacy revisions, whose clients still use it.
#![allow(deprecated)]
use std::sync::Arc;

use axum::http::HeaderMap;
use axum::http::request::Parts;
use rmcp::RoleServer;
use rmcp::model::{
    ClientCapabilities, Extensions, Implementation, LoggingMessageNotification,
    LoggingMessageNotificationParam, ProgressNotification, ProgressNotificationParam,
    ProtocolVersion, RequestMetaObject, ServerJsonRpcMessage, ServerNotification,
};
use rmcp::service::{Peer, RequestContext};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use toolcrib::domain::directory::credential::ToolNameForm;
use toolcrib::{Caller, Engine};

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
    fn from_context(context: &RequestContext<RoleServer>) -> Self {
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
    /// The program, if it states one.
    pub(super) program: Option<Implementation>,
}

/// Name of the Python SDK, which agent frameworks send unless they state their own.
const PYTHON_SDK_NAME: &str = "mcp";
/// The experimental capability of MCP clients that handle links to resources in results.
const LINKS_CAPABILITY: &str = "toolcrib/resource_links";
/// The experimental capability of MCP clients that expect the names of tools with dots.
const DOTTED_NAMES_CAPABILITY: &str = "toolcrib/dotted_names";

impl McpClientInfo {
    pub(super) fn from_context(context: &RequestContext<RoleServer>) -> Self {
        Self {
            revision: ProtocolRevision::from_context(context),
            capabilities: context.client_capabilities().unwrap_or_default(),
            program: context.client_info(),
        }
    }

    /// Returns whether links to resources may be among the parts of a result. Some agent frameworks
    /// fail at a part that they do not know, so only those MCP clients get links that declare it,
    /// and those of 2026-07-28 that are no such framework.
    pub(super) fn accepts_resource_links(&self) -> bool {
        self.has_declared(LINKS_CAPABILITY)
            || self.revision == ProtocolRevision::Modern
                && self.program.as_ref().is_some_and(|program| program.name != PYTHON_SDK_NAME)
    }

    /// Returns whether the MCP client expects the names of tools with dots, as another Toolcrib
    /// does.
    pub(super) fn expects_dotted_names(&self) -> bool {
        self.has_declared(DOTTED_NAMES_CAPABILITY)
    }

    fn has_declared(&self, experimental_capability: &str) -> bool {
        let experimental = self.capabilities.experimental.as_ref();
        experimental.is_some_and(|declared| declared.contains_key(experimental_capability))
    }

    /// Returns whether the MCP client can receive a task as the response: it declared the extension
    /// and speaks the revision that has it. Earlier revisions have tasks of another form.
    pub(super) fn supports_tasks(&self) -> bool {
        self.revision == ProtocolRevision::Modern && self.capabilities.supports_tasks()
    }
}

/// One request, as the operations see it, whether `rmcp` read it or not.
pub(super) struct McpRequest<'a> {
    pub(super) client: McpClientInfo,
    pub(super) meta: &'a RequestMetaObject,
    /// The HTTP request that carried the message, or `None` over pipes. Its extensions hold the
    /// values that the HTTP layer attached.
    pub(super) http: Option<&'a Parts>,
    /// Canceled when the MCP client cancels the request or disconnects.
    pub(super) canceled: &'a CancellationToken,
    pub(super) peer: McpPeer,
}

impl<'a> McpRequest<'a> {
    /// Returns a request that `rmcp` read.
    pub(super) fn from_context(context: &'a RequestContext<RoleServer>) -> Self {
        Self {
            client: McpClientInfo::from_context(context),
            meta: &context.meta,
            http: http_parts(&context.extensions),
            canceled: &context.ct,
            peer: McpPeer::Rmcp(context.peer.clone()),
        }
    }

    /// Returns a value that the HTTP layer attached.
    pub(super) fn attached<T: Clone + Send + Sync + 'static>(&self) -> Option<&T> {
        self.http?.extensions.get()
    }
}

/// The way to an MCP client that waits for a response.
#[derive(Clone)]
pub(super) enum McpPeer {
    Rmcp(Peer<RoleServer>),
    /// The stream of the response, which takes messages as JSON.
    Stream(mpsc::Sender<String>),
}

impl McpPeer {
    /// Sends a progress notification. An error means that the MCP client has disconnected, which
    /// its request learns in another way.
    pub(super) async fn notify_progress(&self, param: ProgressNotificationParam) {
        let notification = ProgressNotification::new(param);
        self.notify(ServerNotification::ProgressNotification(notification)).await;
    }

    /// Sends a log message.
    pub(super) async fn notify_log(&self, param: LoggingMessageNotificationParam) {
        let notification = LoggingMessageNotification::new(param);
        self.notify(ServerNotification::LoggingMessageNotification(notification)).await;
    }

    async fn notify(&self, notification: ServerNotification) {
        match self {
            Self::Rmcp(peer) => drop(peer.send_notification(notification).await),
            Self::Stream(stream) => {
                let message = ServerJsonRpcMessage::notification(notification);
                if let Ok(message) = serde_json::to_string(&message) {
                    let _ = stream.send(message).await;
                }
            }
        }
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

/// The choices of an MCP client: the tools that it sees and their form. Over HTTP they are in the
/// URL.
#[derive(Debug, Clone, Default)]
pub struct McpViewOptions {
    /// The catalogue mode. If `None`, the number of tools decides.
    pub catalogue: Option<CatalogueMode>,
    /// The only source that the MCP client sees, under unprefixed names.
    pub source: Option<Arc<str>>,
    /// The form of the names of tools. If `None`, the key or the server decides.
    pub names: Option<ToolNameForm>,
    /// The time that `tools/call` waits for a result. If `None`, the key or the server decides.
    pub wait_ms: Option<u64>,
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
    /// The form of the names of tools that the request or its key chose.
    pub(super) names: Option<ToolNameForm>,
    /// The time to wait for a result that the request or its key chose.
    pub(super) wait_ms: Option<u64>,
}

impl CallerView {
    /// Returns the view of a caller with these choices. Those that the MCP client leaves open are
    /// the ones of its key.
    pub(super) fn new(
        engine: &Engine,
        caller: Caller,
        credentials: Option<RequestCredentials>,
        options: McpViewOptions,
    ) -> Self {
        let preferred = engine.registry().credentials().mcp_preferences(&caller);
        Self {
            caller,
            credentials,
            catalogue: options.catalogue,
            source: options.source,
            names: options.names.or(preferred.names),
            wait_ms: options.wait_ms.or(preferred.wait_ms),
        }
    }

    /// Returns the prefix that is removed from the names the caller sees.
    pub(super) fn prefix(&self) -> Option<String> {
        self.source.as_ref().map(|source| format!("{source}."))
    }

    /// Returns Toolcrib's name for a name of the MCP client.
    pub(super) fn qualified_name(&self, name: &str) -> String {
        match &self.source {
            Some(source) => format!("{source}.{name}"),
            None => name.to_owned(),
        }
    }
}

/// The level of log messages that a request asks for. The MCP server behind Toolcrib writes them.
const LOG_LEVEL: &str = "io.modelcontextprotocol/logLevel";

/// Returns the metadata of a request that is meant for the MCP server behind Toolcrib: all but what
/// the protocol and Toolcrib define for one connection.
pub(super) fn passthrough_meta(meta: &RequestMetaObject) -> Option<RequestMetaObject> {
    let is_own = |name: &str| {
        name.starts_with("io.modelcontextprotocol/") && name != LOG_LEVEL
            || name.starts_with("toolcrib/")
            || matches!(name, "progressToken" | "traceparent" | "tracestate")
    };
    let mut passed = meta.clone();
    passed.0.0.retain(|name, _| !is_own(name));
    (!passed.0.0.is_empty()).then_some(passed)
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
