//! State behind the operations: of the whole transport, of a legacy session, and of one request.

// Logging belongs to the legacy revisions, whose clients still use it.
#![allow(deprecated)]
use std::collections::HashSet;
use std::sync::Arc;

use parking_lot::Mutex;
use rmcp::model::LoggingLevel;
use toolcrib::Engine;
use toolcrib::domain::directory::credential::ToolNameForm;
use toolcrib::registry::{RESULT_READ, name_for_model};

use super::call_stream::StreamWaiters;
use super::events::subscriptions::EventSubscriptions;
use super::passthrough::PassthroughProvider;
use super::request::{CallerView, CatalogueMode, McpClientInfo, McpRequest};
use super::settings::McpTransportSettings;
use super::tool_list::ToolListCache;

/// The name under which Toolcrib introduces itself, as an MCP server and as an MCP client.
pub(super) const SERVER_NAME: &str = "toolcrib";

/// Maximum number of resources that one MCP client may subscribe to.
pub(super) const MAX_RESOURCE_SUBSCRIPTIONS: usize = 1_000;

/// State that all requests of one transport share.
pub(super) struct McpTransportState {
    pub(super) engine: Engine,
    pub(super) settings: McpTransportSettings,
    pub(super) tool_lists: ToolListCache,
    pub(super) passthrough: Arc<dyn PassthroughProvider>,
    pub(super) stream_waiters: Arc<StreamWaiters>,
    pub(super) events: Arc<EventSubscriptions>,
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

    /// Returns the form in which this caller sees the names of tools. Another Toolcrib, whose own
    /// rules name the tools that it finds here, declares that it expects dotted names. The client
    /// name in a request does not identify it, because agent frameworks send as their client name
    /// the name that their user gave to this server.
    pub(super) fn name_form(
        &self,
        view: &CallerView,
        client: Option<&McpClientInfo>,
    ) -> ToolNameForm {
        let expects_dots = client.is_some_and(McpClientInfo::expects_dotted_names);
        let default = if expects_dots { ToolNameForm::Dotted } else { self.settings.names };
        view.names.unwrap_or(default)
    }

    /// Returns Toolcrib's name for a tool name of the MCP client. The tool that reads long results
    /// belongs to Toolcrib and has no prefix, regardless of the source.
    pub(super) fn qualified_tool_name(&self, view: &CallerView, name: &str) -> String {
        let Some(prefix) = view.prefix() else { return name.to_owned() };
        if name == RESULT_READ || name == name_for_model(RESULT_READ) {
            return RESULT_READ.to_owned();
        }
        let list = self.tool_lists.for_caller(&self.engine, &view.caller);
        list.find_in_source(&prefix, name).unwrap_or_else(|| view.qualified_name(name))
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
    pub(super) request: &'a McpRequest<'a>,
}

impl RequestScope<'_> {
    /// Returns the form in which the MCP client of this request sees the names of tools.
    pub(super) fn name_form(&self) -> ToolNameForm {
        self.shared.name_form(self.view, Some(&self.request.client))
    }
}
