//! Notifies MCP clients of changes to their tool list and to passthrough resources and prompts.
//!
//! A `subscriptions/listen` stream receives the changes that it subscribed to; a legacy session
//! receives those that its revision defines. A caller is notified of a tool list change only if
//! that caller's own list differs from before.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use rmcp::model::{
    PromptListChangedNotification, ResourceListChangedNotification, ResourceUpdatedNotification,
    ResourceUpdatedNotificationParam, ServerNotification, SubscriptionFilter,
    ToolListChangedNotification,
};
use rmcp::service::{Peer, SubscriptionContext};
use rmcp::{ErrorData, RoleServer};

use crate::mcp::passthrough::{PassthroughChange, PassthroughChangeKind, PassthroughChangeStream};
use crate::mcp::request::CallerView;
use crate::mcp::state::{LegacySessionState, MAX_RESOURCE_SUBSCRIPTIONS, McpTransportState};
use crate::mcp::tool_list::CallerToolList;

/// Returns the part of a requested filter that is granted: all of it, up to the limit of resources.
pub(crate) fn accept_filter(params: &SubscriptionFilter) -> SubscriptionFilter {
    let mut accepted = params.clone();
    if let Some(followed) = &mut accepted.resource_subscriptions {
        followed.truncate(MAX_RESOURCE_SUBSCRIPTIONS);
    }
    accepted
}

/// A change that MCP clients may have to be notified of.
enum McpChangeEvent {
    /// Tools, API keys or access rules may have changed. Holds the new directory version.
    ToolsChanged(u64),
    PassthroughChanged(PassthroughChange),
    ServerStopping,
}

/// Listens for changes of the directory and of the passthrough.
struct McpChangeListener {
    shared: Arc<McpTransportState>,
    directory_version: u64,
    passthrough: Option<Box<dyn PassthroughChangeStream>>,
}

impl McpChangeListener {
    fn new(shared: &Arc<McpTransportState>) -> Self {
        let directory_version = shared.engine.registry().directory_version();
        Self {
            shared: shared.clone(),
            directory_version,
            passthrough: shared.passthrough.subscribe_changes(),
        }
    }

    async fn next(&mut self) -> McpChangeEvent {
        let registry = self.shared.engine.registry();
        let event = tokio::select! {
            changed = registry.wait_for_directory_change(self.directory_version) => match changed {
                Some(version) => McpChangeEvent::ToolsChanged(version),
                None => McpChangeEvent::ServerStopping,
            },
            changed = next_passthrough_change(&mut self.passthrough) => {
                McpChangeEvent::PassthroughChanged(changed)
            }
        };
        if let McpChangeEvent::ToolsChanged(version) = event {
            self.directory_version = version;
        }
        event
    }
}

async fn next_passthrough_change(
    passthrough: &mut Option<Box<dyn PassthroughChangeStream>>,
) -> PassthroughChange {
    match passthrough {
        Some(changes) => changes.next().await,
        None => std::future::pending().await,
    }
}

fn to_notification(changed: PassthroughChangeKind) -> ServerNotification {
    match changed {
        PassthroughChangeKind::PromptList => PromptListChangedNotification::default().into(),
        PassthroughChangeKind::ResourceList => ResourceListChangedNotification::default().into(),
        PassthroughChangeKind::ResourceContent(uri) => {
            ResourceUpdatedNotification::new(ResourceUpdatedNotificationParam::new(uri)).into()
        }
    }
}

/// Serves one stream until the MCP client disconnects, its credentials are revoked, or the server
/// stops.
pub(crate) async fn listen(
    shared: &Arc<McpTransportState>,
    view: &CallerView,
    subscription: SubscriptionContext,
) -> Result<(), ErrorData> {
    let mut following = McpChangeListener::new(shared);
    let mut last_list = shared.tool_lists.for_caller(&shared.engine, &view.caller);
    loop {
        let event = tokio::select! {
            () = subscription.cancelled() => return Ok(()),
            event = following.next() => event,
        };
        if !is_authorized(shared, view) {
            return Ok(());
        }
        let notification = match event {
            McpChangeEvent::ServerStopping => return Ok(()),
            McpChangeEvent::ToolsChanged(_)
                if !has_tool_list_changed(shared, view, &mut last_list) =>
            {
                continue;
            }
            McpChangeEvent::ToolsChanged(_) => ToolListChangedNotification::default().into(),
            McpChangeEvent::PassthroughChanged(change)
                if !can_see_change(shared, view, &change) =>
            {
                continue;
            }
            McpChangeEvent::PassthroughChanged(change) => to_notification(change.kind),
        };
        // The sink drops notifications that the MCP client did not subscribe to.
        let _ = subscription.sink().send(notification).await;
    }
}

fn is_authorized(shared: &McpTransportState, view: &CallerView) -> bool {
    view.credentials
        .as_ref()
        .is_none_or(|credentials| credentials.revalidate(&shared.engine).is_ok())
}

/// Returns whether the caller may learn of a passthrough change.
fn can_see_change(
    shared: &McpTransportState,
    view: &CallerView,
    change: &PassthroughChange,
) -> bool {
    shared.passthrough.can_see_change(&view.caller, view.source.as_deref(), change)
}

fn has_tool_list_changed(
    shared: &McpTransportState,
    view: &CallerView,
    last_list: &mut Arc<CallerToolList>,
) -> bool {
    let now = shared.tool_lists.for_caller(&shared.engine, &view.caller);
    let differs = !now.is_same_as(last_list);
    *last_list = now;
    differs
}

/// The legacy sessions, which receive notifications without a subscription.
pub(crate) struct LegacySessions {
    shared: Arc<McpTransportState>,
    /// By session id, or by the address of the session state where there is no id.
    sessions: Mutex<HashMap<String, LegacySession>>,
    listener_started: AtomicBool,
}

struct LegacySession {
    peer: Peer<RoleServer>,
    view: CallerView,
    session: Arc<LegacySessionState>,
    last_tool_list: Arc<CallerToolList>,
}

impl LegacySessions {
    pub(crate) fn new(shared: Arc<McpTransportState>) -> Self {
        Self { shared, sessions: Mutex::default(), listener_started: AtomicBool::new(false) }
    }

    /// Adds a session. Sessions whose connection has closed are removed here and before each
    /// notification.
    pub(crate) fn add(
        self: &Arc<Self>,
        id: Option<String>,
        session: Arc<LegacySessionState>,
        view: CallerView,
        peer: Peer<RoleServer>,
    ) {
        let shared = &self.shared;
        let tool_list = shared.tool_lists.for_caller(&shared.engine, &view.caller);
        let id = id.unwrap_or_else(|| format!("{:p}", Arc::as_ptr(&session)));
        {
            let mut sessions = self.sessions.lock();
            sessions.retain(|_, session| !session.peer.is_transport_closed());
            sessions.insert(id, LegacySession { peer, view, session, last_tool_list: tool_list });
        }
        if !self.listener_started.swap(true, Ordering::AcqRel) {
            tokio::spawn(notify_sessions(self.clone(), McpChangeListener::new(shared)));
        }
    }

    /// Replaces the credentials of a session: a later request of the MCP client may carry another
    /// token.
    pub(crate) fn update_credentials(&self, id: &str, view: &CallerView) {
        if let Some(session) = self.sessions.lock().get_mut(id) {
            session.view.credentials.clone_from(&view.credentials);
        }
    }

    /// Returns the sessions to notify, each with its notification. A session whose token is no
    /// longer valid is skipped but stays, because the MCP client may present another token.
    fn notifications_for(
        &self,
        event: &McpChangeEvent,
    ) -> Vec<(Peer<RoleServer>, ServerNotification)> {
        let shared = &self.shared;
        let mut sessions = self.sessions.lock();
        sessions.retain(|_, session| !session.peer.is_transport_closed());
        let credentials =
            sessions.values_mut().filter(|session| is_authorized(shared, &session.view));
        let concerned = credentials.filter_map(|session| {
            let notification = match event {
                McpChangeEvent::ServerStopping => return None,
                McpChangeEvent::ToolsChanged(_) => {
                    has_tool_list_changed(shared, &session.view, &mut session.last_tool_list)
                        .then(|| ToolListChangedNotification::default().into())
                }
                McpChangeEvent::PassthroughChanged(change)
                    if !can_see_change(shared, &session.view, change) =>
                {
                    None
                }
                McpChangeEvent::PassthroughChanged(PassthroughChange {
                    kind: PassthroughChangeKind::ResourceContent(uri),
                    ..
                }) if !session.session.is_subscribed(uri) => None,
                McpChangeEvent::PassthroughChanged(change) => {
                    Some(to_notification(change.kind.clone()))
                }
            };
            notification.map(|notification| (session.peer.clone(), notification))
        });
        concerned.collect()
    }
}

/// Notifies all legacy sessions for as long as the engine runs.
async fn notify_sessions(sessions: Arc<LegacySessions>, mut following: McpChangeListener) {
    loop {
        let event = following.next().await;
        if matches!(event, McpChangeEvent::ServerStopping) {
            return;
        }
        for (peer, notification) in sessions.notifications_for(&event) {
            // Sent in a task per session, so that a slow session does not delay the others.
            tokio::spawn(async move { drop(peer.send_notification(notification).await) });
        }
    }
}
