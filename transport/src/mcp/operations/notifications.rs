//! Notifies MCP clients of changes to their tool list and to passthrough resources and prompts.
//!
//! A `subscriptions/listen` stream receives the changes that it subscribed to, and the states of
//! the tasks that it names; a legacy session receives those that its revision defines. A caller is
//! notified of a tool list change only if that caller's own list differs from before.

// Logging belongs to the legacy revisions, whose clients still use it.
#![allow(deprecated)]
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures::FutureExt;
use futures::future::join_all;
use parking_lot::Mutex;
use rmcp::model::{
    ClientCapabilities, LoggingLevel, LoggingMessageNotification, NotificationMetaObject,
    PromptListChangedNotification, ResourceListChangedNotification, ResourceUpdatedNotification,
    ResourceUpdatedNotificationParam, ServerNotification, SubscriptionFilter,
    TaskStatusNotification, TaskStatusNotificationParams, ToolListChangedNotification,
};
use rmcp::service::{Peer, SubscriptionContext};
use rmcp::{ErrorData, RoleServer};
use serde_json::Value;
use toolcrib::CallId;
use toolcrib::calls::Until;

use super::tasks;
use crate::mcp::passthrough::{PassthroughChange, PassthroughChangeKind, PassthroughChangeStream};
use crate::mcp::request::{CallerView, McpClientInfo, http_parts};
use crate::mcp::state::{LegacySessionState, MAX_RESOURCE_SUBSCRIPTIONS, McpTransportState};
use crate::mcp::task_subscription::TaskSubscription;
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

/// Returns the notification of a change, or `None` for one that cannot be written.
fn to_notification(changed: PassthroughChangeKind) -> Option<ServerNotification> {
    Some(match changed {
        PassthroughChangeKind::Log(message) => {
            LoggingMessageNotification::new(serde_json::from_value(message).ok()?).into()
        }
        PassthroughChangeKind::PromptList => PromptListChangedNotification::default().into(),
        PassthroughChangeKind::ResourceList => ResourceListChangedNotification::default().into(),
        PassthroughChangeKind::ResourceContent(uri) => {
            ResourceUpdatedNotification::new(ResourceUpdatedNotificationParam::new(uri)).into()
        }
    })
}

/// Returns whether a session that set this level receives a log message.
fn passes_level(message: &Value, level: Option<LoggingLevel>) -> bool {
    let written = message.get("level").cloned().map(serde_json::from_value::<LoggingLevel>);
    match (written, level) {
        (Some(Ok(written)), Some(level)) => written as u8 >= level as u8,
        _ => false,
    }
}

/// Serves one stream until the MCP client disconnects, its credentials are revoked, or the server
/// stops.
pub(crate) async fn listen(
    shared: &Arc<McpTransportState>,
    view: &CallerView,
    subscription: SubscriptionContext,
) -> Result<(), ErrorData> {
    let tasks = http_parts(&subscription.request_context().extensions)
        .and_then(|parts| parts.extensions.get::<TaskSubscription>())
        .cloned();
    let client = McpClientInfo::from_context(subscription.request_context());
    if tasks.is_some() && !client.capabilities.supports_tasks() {
        let needed = ClientCapabilities::builder().enable_tasks().build();
        return Err(ErrorData::missing_required_client_capability(needed));
    }
    let resources = subscription.accepted().resource_subscriptions.clone().unwrap_or_default();
    let source = view.source.as_deref();
    let subscribing = resources
        .iter()
        .map(|uri| shared.passthrough.subscribe_resource(&view.caller, source, uri));
    // An MCP server that refuses sends no updates of this resource.
    drop(join_all(subscribing).await);
    let following_tasks = follow_tasks(shared, view, &subscription, &client, tasks);
    let mut following_tasks = std::pin::pin!(following_tasks.fuse());
    let mut following = McpChangeListener::new(shared);
    let mut last_list = shared.tool_lists.for_caller(&shared.engine, &view.caller);
    loop {
        let event = tokio::select! {
            () = subscription.cancelled() => return Ok(()),
            () = &mut following_tasks => continue,
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
            McpChangeEvent::PassthroughChanged(change) => match to_notification(change.kind) {
                Some(notification) => notification,
                None => continue,
            },
        };
        // The sink drops notifications that the MCP client did not subscribe to.
        let _ = subscription.sink().send(notification).await;
    }
}

/// Sends the state of each task of a subscription, now and whenever it changes, until the task has
/// ended.
async fn follow_tasks(
    shared: &Arc<McpTransportState>,
    view: &CallerView,
    subscription: &SubscriptionContext,
    client: &McpClientInfo,
    tasks: Option<TaskSubscription>,
) {
    let ids = tasks.iter().flat_map(|tasks| tasks.0.iter());
    join_all(ids.map(|id| follow_task(shared, view, subscription, client, id))).await;
}

async fn follow_task(
    shared: &Arc<McpTransportState>,
    view: &CallerView,
    subscription: &SubscriptionContext,
    client: &McpClientInfo,
    id: &str,
) {
    let context = subscription.request_context();
    // A task that the caller cannot see has no state to send.
    let Ok(call_id) = id.parse::<CallId>() else { return };
    let mut last_sent = None;
    loop {
        let Ok(call) = shared.engine.calls().call(&view.caller, &call_id).await else { return };
        let Ok(task) = tasks::get_task(shared, view, client, id).await else { return };
        if !is_authorized(shared, view) {
            return;
        }
        if last_sent.as_ref() != Some(&task) {
            let params = TaskStatusNotificationParams::new(task.clone());
            let mut notification = TaskStatusNotification::new(params);
            let mut meta = NotificationMetaObject::new();
            meta.set_subscription_id(context.id.clone());
            notification.extensions.insert(meta);
            let notification = ServerNotification::TaskStatusNotification(notification);
            if context.peer.send_notification(notification).await.is_err() {
                return;
            }
            last_sent = Some(task);
        }
        if call.status.is_terminal() || shared.engine.is_draining() {
            return;
        }
        let until = Until::ChangedSince { version: call.version, within_ms: u64::MAX };
        if shared.engine.calls().wait(&view.caller, &call_id, until).await.is_err() {
            return;
        }
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
                McpChangeEvent::PassthroughChanged(PassthroughChange {
                    kind: PassthroughChangeKind::Log(message),
                    ..
                }) if !passes_level(message, session.session.level()) => None,
                McpChangeEvent::PassthroughChanged(change) => to_notification(change.kind.clone()),
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
