//! State behind the operations: of the whole transport, of a legacy session, and of one request.

// Logging belongs to the legacy revisions, whose clients still use it.
#![allow(deprecated)]
use std::collections::HashSet;
use std::sync::Arc;

use parking_lot::Mutex;
use rmcp::RoleServer;
use rmcp::model::LoggingLevel;
use rmcp::service::RequestContext;
use toolcrib::Engine;

use super::call_stream::StreamWaiters;
use super::passthrough::PassthroughProvider;
use super::request::{CallerView, CatalogueMode};
use super::settings::McpTransportSettings;
use super::tool_list::ToolListCache;

/// Maximum number of resources that one MCP client may subscribe to.
pub(super) const MAX_RESOURCE_SUBSCRIPTIONS: usize = 1_000;

/// State that all requests of one transport share.
pub(super) struct McpTransportState {
    pub(super) engine: Engine,
    pub(super) settings: McpTransportSettings,
    pub(super) tool_lists: ToolListCache,
    pub(super) passthrough: Arc<dyn PassthroughProvider>,
    pub(super) stream_waiters: Arc<StreamWaiters>,
}

impl McpTransportState {
    /// Returns whether this caller sees the catalogue in place of the full list.
    pub(super) fn uses_search_catalogue(&self, view: &CallerView) -> bool {
        match view.catalogue {
            Some(catalogue) => catalogue == CatalogueMode::Search && view.caller.may_invoke(),
            None if view.source.is_some() => false,
            None => {
                self.tool_lists.for_caller(&self.engine, &view.caller).len()
                    > self.settings.catalogue_threshold
            }
        }
    }
}

/// Settings that a legacy MCP client made in its session.
#[derive(Default)]
pub(super) struct LegacySessionState {
    level: Mutex<Option<LoggingLevel>>,
    subscribed_resources: Mutex<HashSet<String>>,
}

impl LegacySessionState {
    /// Returns the minimum level of log messages that the MCP client receives.
    pub(super) fn level(&self) -> Option<LoggingLevel> {
        *self.level.lock()
    }

    /// Sets the minimum level of log messages that the MCP client receives.
    pub(super) fn set_level(&self, level: LoggingLevel) {
        *self.level.lock() = Some(level);
    }

    /// Returns whether the MCP client subscribed to this resource.
    pub(super) fn is_subscribed(&self, uri: &str) -> bool {
        self.subscribed_resources.lock().contains(uri)
    }

    /// Subscribes to a resource. Returns `false` at the limit.
    pub(super) fn subscribe(&self, uri: String) -> bool {
        let mut subscribed = self.subscribed_resources.lock();
        if subscribed.len() >= MAX_RESOURCE_SUBSCRIPTIONS {
            return false;
        }
        subscribed.insert(uri);
        true
    }

    /// Removes the subscription to a resource.
    pub(super) fn unsubscribe(&self, uri: &str) {
        self.subscribed_resources.lock().remove(uri);
    }
}

/// One request, with the state that serves it.
#[derive(Clone, Copy)]
pub(super) struct RequestScope<'a> {
    pub(super) shared: &'a McpTransportState,
    pub(super) session: &'a LegacySessionState,
    pub(super) view: &'a CallerView,
    pub(super) context: &'a RequestContext<RoleServer>,
}
