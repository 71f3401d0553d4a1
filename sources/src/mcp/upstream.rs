//! One upstream MCP server: its state, its connection and the attempts that run on it.

pub(super) mod in_flight;
mod revision_choice;
pub(super) mod state;
mod supervisor;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use in_flight::SuspendedRequest;
use parking_lot::Mutex;
use revision_choice::RevisionChoice;
use state::{UpstreamPhase, UpstreamState};
use tokio::sync::{Notify, broadcast, watch};
use tokio_util::sync::CancellationToken;
use toolcrib::CallId;
use toolcrib::domain::fault::{Code, Fault};
use toolcrib::domain::tool::ToolDefinition;
use toolcrib::ports::source::Attempt;
use toolcrib_protocol::outbound::OutboundPolicy;
use toolcrib_protocol::secrets::redaction::SecretRedactor;

use super::connection::LiveConnection;
use super::now_ms;
use super::oauth::Authorizer;
use super::settings::McpServerSettings;
use crate::mcp::connection::child_process::StderrTail;
use crate::mcp::connection::followed_resources::FollowedResources;
use crate::mcp::connection::server_requests::UpstreamChange;
use crate::mcp::offered_tools::{OfferedTools, ToolChange};
use crate::mcp::settings::resolved::ResolvedSettings;

/// Maximum time a call waits for an upstream that is being connected.
const CONNECT_WAIT: Duration = Duration::from_secs(30);

/// Maximum number of tool changes that are kept in memory for display.
const MAX_CHANGES: usize = 50;

type AttemptKey = (CallId, u32);

/// A registered attempt, which [`UpstreamServer::cancel`] can cancel. Dropping it unregisters the
/// attempt.
pub(super) struct RunningAttempt {
    upstream: Arc<UpstreamServer>,
    key: AttemptKey,
    pub(super) token: CancellationToken,
    /// Latest progress message of the attempt.
    pub(super) last_message: Mutex<String>,
}

impl Drop for RunningAttempt {
    fn drop(&mut self) {
        self.upstream.running.lock().remove(&self.key);
    }
}

/// An upstream MCP server with its settings, its state and the tools that it offers. It outlives
/// its connections.
pub struct UpstreamServer {
    pub(super) settings: McpServerSettings,
    pub(super) state: Mutex<UpstreamState>,
    pub(super) stderr: StderrTail,
    pub(super) changes: broadcast::Sender<UpstreamChange>,
    pub(super) outbound: Arc<OutboundPolicy>,
    /// Supplies the OAuth tokens, if the upstream can require them.
    pub(super) authorizer: Option<Arc<Authorizer>>,
    pub(super) stop: CancellationToken,
    /// Signals that Toolcrib must connect at once, or refresh the tools if it is connected.
    pub(super) retry_now: Notify,
    /// Number of requested refreshes.
    pub(super) refreshes_requested: AtomicU64,
    /// Number of completed refreshes.
    pub(super) refreshes_completed: watch::Sender<u64>,
    /// Signals that Toolcrib must close the connection and connect again.
    pub(super) reconnect_requested: Notify,
    /// Tools that the upstream offers now, accepted or not.
    pub(super) offered: Mutex<OfferedTools>,
    /// Offered tools that the registry rejected, with the reasons. They are not submitted again.
    pub(super) rejected_tools: Mutex<BTreeMap<String, (ToolDefinition, String)>>,
    /// Requests that wait for answers to an elicitation of the upstream.
    pub(super) suspended: Mutex<HashMap<CallId, SuspendedRequest>>,
    /// MCP revision that Toolcrib uses with the upstream.
    pub(super) revision: RevisionChoice,
    /// Resources to which MCP clients have subscribed.
    pub(super) followed_resources: FollowedResources,
    connection: watch::Sender<Option<Arc<LiveConnection>>>,
    running: Mutex<HashMap<AttemptKey, CancellationToken>>,
    /// The settings with the values of their references, once they were resolved.
    resolved: Mutex<Option<Arc<ResolvedSettings>>>,
}

impl UpstreamServer {
    pub(super) fn new(
        settings: McpServerSettings,
        changes: broadcast::Sender<UpstreamChange>,
        outbound: Arc<OutboundPolicy>,
        authorizer: Option<Arc<Authorizer>>,
    ) -> Arc<Self> {
        let phase = if settings.enabled { UpstreamPhase::Starting } else { UpstreamPhase::Off };
        Arc::new(Self {
            settings,
            state: Mutex::new(UpstreamState::new(phase)),
            stderr: StderrTail::default(),
            changes,
            outbound,
            authorizer,
            stop: CancellationToken::new(),
            retry_now: Notify::new(),
            refreshes_requested: AtomicU64::new(0),
            refreshes_completed: watch::Sender::new(0),
            reconnect_requested: Notify::new(),
            offered: Mutex::default(),
            rejected_tools: Mutex::default(),
            suspended: Mutex::default(),
            revision: RevisionChoice::default(),
            followed_resources: FollowedResources::default(),
            connection: watch::Sender::new(None),
            running: Mutex::default(),
            resolved: Mutex::default(),
        })
    }

    pub(super) fn set_connection(&self, live: Option<Arc<LiveConnection>>) {
        self.connection.send_replace(live);
    }

    pub(super) fn set_resolved(&self, resolved: Arc<ResolvedSettings>) {
        *self.resolved.lock() = Some(resolved);
    }

    /// Redacts the OAuth tokens and the secrets of the settings from a text.
    pub(super) fn redact(&self, text: &str) -> String {
        let text = match &*self.resolved.lock() {
            Some(resolved) => resolved.redact(text),
            None => text.to_owned(),
        };
        let text =
            self.authorizer.as_ref().map_or(text.clone(), |authorizer| authorizer.redact(&text));
        self.result_secrets().redact(&text)
    }

    /// Returns the secrets to redact from results in every encoding: those of the settings, and the
    /// OAuth tokens.
    pub(super) fn result_secrets(&self) -> SecretRedactor {
        let resolved = self.resolved.lock().clone();
        let mut secrets =
            resolved.map(|resolved| resolved.result_secrets().clone()).unwrap_or_default();
        if let Some(authorizer) = &self.authorizer {
            authorizer.tokens().iter().for_each(|token| secrets.add(token));
        }
        secrets
    }

    /// Returns the connection, if there is one.
    pub(super) fn current_connection(&self) -> Option<Arc<LiveConnection>> {
        self.connection.borrow().clone().filter(|live| !live.peer.is_transport_closed())
    }

    /// Waits until the current connection attempt has succeeded or failed.
    pub(super) async fn wait_until_known(&self) {
        let mut connection = self.connection.subscribe();
        while self.state.lock().phase == UpstreamPhase::Starting {
            if connection.changed().await.is_err() {
                return;
            }
        }
    }

    /// Requests a reconnection or a refresh, and waits until it is done.
    pub(super) async fn request_refresh(&self) {
        if !self.settings.enabled {
            return;
        }
        let number = self.refreshes_requested.fetch_add(1, Ordering::AcqRel) + 1;
        self.retry_now.notify_one();
        let mut completed = self.refreshes_completed.subscribe();
        tokio::select! {
            _ = completed.wait_for(|completed| *completed >= number) => {}
            () = self.stop.cancelled() => {}
        }
    }

    /// Waits for the connection and returns it.
    ///
    /// # Errors
    /// Returns a fault when the upstream is known to be unavailable, or the wait times out or is
    /// canceled.
    pub(super) async fn wait_connected(
        &self,
        deadline_ms: u64,
        token: &CancellationToken,
    ) -> Result<Arc<LiveConnection>, Fault> {
        if let Some(live) = self.current_connection() {
            return Ok(live);
        }
        let remaining = Duration::from_millis(deadline_ms.saturating_sub(now_ms()));
        let mut connection = self.connection.subscribe();
        let waiting = async {
            loop {
                let found = connection.borrow_and_update().clone();
                if let Some(live) = found.filter(|live| !live.peer.is_transport_closed()) {
                    return Some(live);
                }
                // A call does not wait for an upstream that will not connect soon.
                if self.state.lock().is_unavailable() {
                    return None;
                }
                if connection.changed().await.is_err() {
                    return None;
                }
            }
        };
        tokio::select! {
            found = waiting => found.ok_or_else(|| self.unavailable_fault()),
            () = tokio::time::sleep(remaining.min(CONNECT_WAIT)) => Err(self.unavailable_fault()),
            () = self.stop.cancelled() => Err(self.unavailable_fault()),
            () = token.cancelled() => Err(Fault::new(Code::Canceled, "canceled")),
        }
    }

    /// Returns the fault that says why the upstream cannot be used now.
    pub(super) fn unavailable_fault(&self) -> Fault {
        let name = &self.settings.name;
        let state = self.state.lock();
        let reason = match (&state.problem, state.phase) {
            (Some(problem), _) => problem.clone(),
            (None, UpstreamPhase::Off) => "it is switched off".to_owned(),
            (None, _) => "it has not answered yet".to_owned(),
        };
        let message = format!("the MCP server {name} is not available: {reason}");
        // A retry cannot succeed before a person acts.
        let needs_person = matches!(state.phase, UpstreamPhase::Off | UpstreamPhase::NeedsSignIn);
        Fault::unreachable(message).retryable(!needs_person)
    }

    /// Returns the upstream's own name for one of its registered tools.
    pub(super) fn upstream_tool_name(&self, tool: &str) -> Result<String, Fault> {
        let found = self.offered.lock().upstream_names.get(tool).cloned();
        found.ok_or_else(|| {
            let name = &self.settings.name;
            let message = format!("the MCP server {name} no longer offers {tool}");
            Fault::new(Code::ToolNotFound, message).without_side_effect()
        })
    }

    /// Returns `true` if arguments of the tool are repeated in HTTP headers.
    pub(super) fn mirrors_args_in_headers(&self, tool: &str) -> bool {
        self.offered.lock().header_mirrored.contains(tool)
    }

    /// Refuses a tool of a pinned upstream if a change of its definition is not accepted.
    pub(super) fn check_pin(&self, tool: &str) -> Result<(), Fault> {
        if !self.settings.pin {
            return Ok(());
        }
        let state = self.state.lock();
        let Some(pending) = state.pending.iter().find(|pending| pending.tool == tool) else {
            return Ok(());
        };
        let name = &self.settings.name;
        let difference = match pending.fields.as_slice() {
            [] => pending.change.to_owned(),
            fields => format!("{} ({})", pending.change, fields.join(", ")),
        };
        let message = format!(
            "{tool} is not what was accepted: the MCP server {name} is pinned, and the tool was \
             {difference}; an operator can accept it (toolcrib mcp accept {name})"
        );
        Err(Fault::new(Code::Conflict, message).without_side_effect().retryable(false))
    }

    /// Registers an attempt, so that it can be canceled.
    pub(super) fn register_attempt(self: &Arc<Self>, attempt: &Attempt) -> RunningAttempt {
        let (token, key) = (CancellationToken::new(), (attempt.call_id.clone(), attempt.number));
        self.running.lock().insert(key.clone(), token.clone());
        RunningAttempt { upstream: self.clone(), key, token, last_message: Mutex::default() }
    }

    /// Cancels an attempt, and the suspended request of its call.
    pub(super) fn cancel(&self, call_id: &CallId, attempt: u32) {
        if let Some(token) = self.running.lock().get(&(call_id.clone(), attempt)) {
            token.cancel();
        }
        self.abandon(call_id);
    }

    /// Records that the engine has released an attempt. The engine releases an attempt that sent an
    /// elicitation twice: when its call begins to wait for input, and when the call ends. After the
    /// second release no answer will come, so the suspended request is abandoned.
    pub(super) fn release_attempt(&self, call_id: &CallId, attempt: u32) {
        let has_call_ended = {
            let mut suspended = self.suspended.lock();
            match suspended.get_mut(call_id).filter(|request| request.attempt == attempt) {
                Some(request) => std::mem::replace(&mut request.released, true),
                None => false,
            }
        };
        if has_call_ended {
            self.abandon(call_id);
        }
    }

    /// Abandons the suspended request of a call, if there is one.
    fn abandon(&self, call_id: &CallId) {
        if let Some(suspended) = self.suspended.lock().remove(call_id) {
            tokio::spawn(suspended.abandon());
        }
    }

    /// Keeps a request that waits for an answer, until the call no longer waits for input.
    pub(super) fn suspend(self: &Arc<Self>, attempt: &Attempt, suspended: SuspendedRequest) {
        let (call_id, number) = (attempt.call_id.clone(), attempt.number);
        self.suspended.lock().insert(call_id.clone(), suspended);
        let input_timeout = Duration::from_millis(attempt.input_timeout_ms);
        let upstream = Arc::downgrade(self);
        tokio::spawn(async move {
            tokio::time::sleep(input_timeout).await;
            let Some(upstream) = upstream.upgrade() else { return };
            let is_same_attempt = |request: &SuspendedRequest| request.attempt == number;
            let is_suspended = upstream.suspended.lock().get(&call_id).is_some_and(is_same_attempt);
            if is_suspended {
                upstream.abandon(&call_id);
            }
        });
    }

    /// Adds changes of tools to those that are shown, and drops the oldest beyond the maximum.
    pub(super) fn record_changes(&self, changes: Vec<ToolChange>) {
        let mut state = self.state.lock();
        let recorded: &mut VecDeque<ToolChange> = &mut state.changes;
        recorded.extend(changes);
        let excess = recorded.len().saturating_sub(MAX_CHANGES);
        recorded.drain(..excess);
    }
}
