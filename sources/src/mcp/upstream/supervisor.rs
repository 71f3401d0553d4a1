//! Supervises one upstream: reconnects with exponential backoff when the connection ends, and
//! fetches the tool list whenever it may have changed.

use std::collections::{BTreeMap, HashMap};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use futures::FutureExt;
use rmcp::model::ErrorCode;
use rmcp::service::Peer;
use rmcp::{RoleClient, ServiceError};
use toolcrib::domain::tool::ToolDefinition;

use super::state::UpstreamPhase;
use crate::mcp::connection::http_error::was_never_sent;
use crate::mcp::connection::server_requests::McpClientHandler;
use crate::mcp::connection::subscriptions::follow_changes;
use crate::mcp::connection::{UpstreamConnectOptions, UpstreamConnection};
use crate::mcp::offered_tools::{
    OfferedTools, ToolChange, diff_tools, is_of_legacy_server, mark_legacy_server,
};
use crate::mcp::pagination::UpstreamToolEntry;
use crate::mcp::raw_tool_list::ToolListCapture;
use crate::mcp::registry::UpstreamRegistry;
use crate::mcp::settings::resolved::ResolvedSettings;
use crate::mcp::upstream::UpstreamServer;
use crate::mcp::{now_ms, pagination};

/// Bounds of the backoff between connection attempts.
const FIRST_WAIT: Duration = Duration::from_millis(500);
const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// A connection that lasted this long resets the backoff.
const BACKOFF_RESET_AFTER: Duration = Duration::from_secs(60);

/// Maximum time for any answer after an upstream failed to return its tool list.
const LIVENESS_TIMEOUT: Duration = Duration::from_secs(10);

/// Minimum pause between two refreshes, however often the list changes.
const PAUSE: Duration = Duration::from_millis(500);

/// Reasons for which Toolcrib closes a connection.
const SIGNED_OUT: &str = "it was signed out";
const OTHER_REVISION: &str = "it can request input in revision 2025-11-25 only";
const AMBIGUOUS_ELICITATION: &str =
    "it requested input that may belong to a call that was given up";

impl UpstreamServer {
    /// Runs until `stop` is canceled.
    pub(in crate::mcp) async fn supervise(self: Arc<Self>, registry: Arc<dyn UpstreamRegistry>) {
        if !self.settings.enabled {
            return;
        }
        let (mut failures, mut older) = (0_u32, false);
        loop {
            let began = Instant::now();
            let requested = self.refreshes_requested.load(Ordering::Acquire);
            // A panic in Toolcrib must not leave the upstream disconnected for good. Unwinding
            // drops everything the attempt held.
            let tried =
                AssertUnwindSafe(self.run_connection(&*registry, older)).catch_unwind().await;
            let (reached, reason) = tried.unwrap_or_else(|_| {
                tracing::error!(upstream = self.settings.name, "the supervisor panicked");
                (false, "an internal error of Toolcrib; see the server's log".to_owned())
            });
            self.set_connection(None);
            if self.stop.is_cancelled() {
                return;
            }
            if self.authorizer.as_ref().is_some_and(|authorizer| authorizer.needs_sign_in()) {
                self.wait_for_sign_in(requested).await;
                if self.stop.is_cancelled() {
                    return;
                }
                (failures, older) = (0, false);
                continue;
            }
            failures =
                if began.elapsed() > BACKOFF_RESET_AFTER && reached { 0 } else { failures + 1 };
            if !reached {
                self.revision.record_refusal();
            }
            // Some servers crash on a request that they do not know: try the legacy handshake next.
            older = !reached && !older && self.settings.command.is_some();
            let name = &self.settings.name;
            let wait =
                (FIRST_WAIT * 2_u32.pow(failures.min(8) - failures.min(1))).min(LONGEST_WAIT);
            tracing::warn!(
                upstream = name,
                problem = reason,
                ?wait,
                "an MCP server is unavailable"
            );
            self.back_off(reason, wait, requested).await;
            if self.stop.is_cancelled() {
                return;
            }
            self.state.lock().enter(UpstreamPhase::Starting);
            self.set_connection(None);
        }
    }

    /// Waits until a person has signed in. Replaces the sign-in link when it expires, so that the
    /// status shows a link that works.
    async fn wait_for_sign_in(&self, requested: u64) {
        let Some(authorizer) = &self.authorizer else { return };
        let name = &self.settings.name;
        tracing::warn!(upstream = name, "an MCP server needs a person to sign in");
        {
            let mut state = self.state.lock();
            state.enter(UpstreamPhase::NeedsSignIn);
            (state.process, state.next_try_ms) = (None, None);
            let failed =
                authorizer.problem().map(|reason| format!("{reason}; ")).unwrap_or_default();
            state.problem =
                Some(format!("{failed}a person must sign in: toolcrib mcp sign-in {name}"));
        }
        self.set_connection(None);
        self.complete_refreshes(requested);
        while authorizer.needs_sign_in() {
            let remaining_ms = authorizer
                .pending_sign_in()
                .map_or(0, |link| link.expires_ms.saturating_sub(now_ms()));
            tokio::select! {
                () = tokio::time::sleep(Duration::from_millis(remaining_ms).max(FIRST_WAIT)) => {
                    authorizer.renew_sign_in_link().await;
                }
                () = self.retry_now.notified() => break,
                () = self.stop.cancelled() => return,
            }
        }
        self.state.lock().enter(UpstreamPhase::Starting);
        self.set_connection(None);
    }

    async fn back_off(&self, reason: String, wait: Duration, requested: u64) {
        {
            let mut state = self.state.lock();
            state.enter(UpstreamPhase::Waiting);
            state.restarts += 1;
            metrics::counter!("toolcrib_upstream_restarts_total").increment(1);
            state.process = None;
            state.next_try_ms = Some(now_ms() + wait.as_millis() as u64);
            let last = self.stderr.last();
            state.problem = Some(match last.filter(|_| self.settings.command.is_some()) {
                Some(line) => format!("{reason}; its last output: {line}"),
                None => reason,
            });
        }
        // Wakes the waiting calls, which then find the upstream unavailable.
        self.set_connection(None);
        self.complete_refreshes(requested);
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            () = self.retry_now.notified() => {}
            () = self.stop.cancelled() => {}
        }
    }

    /// Connects once and serves the connection until it ends. Returns whether the connection was
    /// established, and why it ended.
    async fn run_connection(&self, registry: &dyn UpstreamRegistry, older: bool) -> (bool, String) {
        let accepted = registry.accepted_tools(&self.settings.project, &self.settings.name);
        self.revision.restore(accepted.values().any(is_of_legacy_server));
        let resolved = match ResolvedSettings::resolve(&self.settings) {
            Ok(resolved) => Arc::new(resolved),
            Err(reason) => return (false, reason),
        };
        self.set_resolved(resolved.clone());
        if let Some(authorizer) =
            self.authorizer.as_ref().filter(|authorizer| !authorizer.needs_sign_in())
        {
            authorizer.clear_failure();
        }
        let handler = McpClientHandler::new(&self.settings.name, self.changes.clone());
        let options = UpstreamConnectOptions {
            settings: &self.settings,
            resolved,
            stderr: &self.stderr,
            handler,
            outbound: &self.outbound,
            authorizer: self.authorizer.clone(),
            legacy_handshake: older || self.settings.older || self.revision.requires_legacy(),
            limit: self.connect_timeout(),
        };
        // Only a connection attempt may be dropped at any point. An established connection is shut
        // down in an orderly way.
        let connected = tokio::select! {
            connected = UpstreamConnection::connect(options) => connected,
            () = self.stop.cancelled() => return (false, "it was removed".to_owned()),
        };
        let mut connection = match connected {
            Ok(connection) => connection,
            Err(reason) => return (false, self.authorization_problem().unwrap_or(reason)),
        };
        let reason = tokio::select! {
            reason = self.serve_connection(registry, &mut connection) => reason,
            () = self.stop.cancelled() => "it was removed".to_owned(),
        };
        let reason =
            connection.problem().or_else(|| self.authorization_problem()).unwrap_or(reason);
        {
            let mut state = self.state.lock();
            state.enter(UpstreamPhase::Waiting);
            state.problem = Some(reason.clone());
            state.next_try_ms = Some(now_ms() + FIRST_WAIT.as_millis() as u64);
        }
        self.set_connection(None);
        connection.shut_down().await;
        (true, reason)
    }

    async fn serve_connection(
        &self,
        registry: &dyn UpstreamRegistry,
        connection: &mut UpstreamConnection,
    ) -> String {
        let (peer, handler) = (connection.peer.clone(), connection.handler.clone());
        let modern = connection.is_stateless();
        let (process, capture) = (connection.process, connection.capture());
        let live = Arc::new(connection.live());
        let mut closed = std::pin::pin!(connection.wait_closed());
        let mut requested = self.refreshes_requested.load(Ordering::Acquire);
        let first = tokio::select! {
            first = self.refresh_tools(registry, &peer, &capture) => first,
            reason = &mut closed => return reason,
        };
        if let Err(reason) = first {
            return reason;
        }
        self.mark_ready(&peer, process);
        self.set_connection(Some(live));
        self.complete_refreshes(requested);
        let mut listening =
            std::pin::pin!(follow_changes(&peer, &handler, &self.followed_resources, modern,));
        loop {
            tokio::select! {
                reason = &mut closed => return reason,
                () = handler.tools_changed.notified() => {}
                never = &mut listening => match never {},
                // An operator who requests a refresh may have made room for rejected tools.
                () = self.retry_now.notified() => {
                    requested = self.refreshes_requested.load(Ordering::Acquire);
                    self.rejected_tools.lock().clear();
                }
                () = self.reconnect_requested.notified() => return SIGNED_OUT.to_owned(),
                () = handler.wait_until_unattributable() => return AMBIGUOUS_ELICITATION.to_owned(),
                () = self.wait_for_other_revision(&handler), if modern => {
                    return OTHER_REVISION.to_owned();
                }
            }
            // The end of the connection is noticed even while a refresh takes long.
            let refreshed = tokio::select! {
                refreshed = self.refresh_and_record(registry, &peer, &capture) => refreshed,
                reason = &mut closed => return reason,
                () = self.reconnect_requested.notified() => return SIGNED_OUT.to_owned(),
            };
            if let Err(reason) = refreshed {
                return reason;
            }
            self.complete_refreshes(requested);
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Waits until Toolcrib has to use another revision with the upstream, and no call is in
    /// flight.
    async fn wait_for_other_revision(&self, handler: &McpClientHandler) {
        self.revision.wait_until_legacy().await;
        handler.wait_until_idle().await;
    }

    /// Marks the refreshes that were requested so far as completed.
    fn complete_refreshes(&self, requested: u64) {
        self.refreshes_completed.send_modify(|completed| *completed = requested.max(*completed));
    }

    /// Refreshes the tool list and records the result. Returns an error if the upstream cannot be
    /// used.
    async fn refresh_and_record(
        &self,
        registry: &dyn UpstreamRegistry,
        peer: &Peer<RoleClient>,
        capture: &ToolListCapture,
    ) -> Result<(), String> {
        let Err(reason) = self.refresh_tools(registry, peer, capture).await else {
            let problem = self.tool_limit_problem();
            self.state.lock().problem = problem;
            return Ok(());
        };
        self.state.lock().problem = Some(reason.clone());
        let is_signed_out =
            self.authorizer.as_ref().is_some_and(|authorizer| authorizer.needs_sign_in());
        match is_signed_out || peer.is_transport_closed() || !self.is_responsive(peer).await {
            true => Err(reason),
            false => Ok(()),
        }
    }

    /// Returns the authorization problem that makes the upstream unavailable, if there is one.
    fn authorization_problem(&self) -> Option<String> {
        self.authorizer.as_ref().and_then(|authorizer| authorizer.problem())
    }

    fn mark_ready(&self, peer: &Peer<RoleClient>, process: Option<u32>) {
        let info = peer.peer_info();
        let problem = self.tool_limit_problem();
        let mut state = self.state.lock();
        state.enter(UpstreamPhase::Ready);
        state.problem = problem;
        state.next_try_ms = None;
        state.process = process;
        state.protocol = info.as_ref().map(|info| info.protocol_version.to_string());
        state.server = info.and_then(|info| {
            let server = info.server_info.as_ref()?;
            let short = |text: &str| text.chars().take(200).collect::<String>();
            Some((short(&server.name), short(&server.version)))
        });
    }

    /// Returns the problem of an upstream that offers more tools than its limit.
    fn tool_limit_problem(&self) -> Option<String> {
        let offered = self.offered.lock();
        let limit_exceeded =
            offered.skipped.iter().find(|(_, reason)| reason.contains("max_tools"));
        limit_exceeded.map(|(_, reason)| reason.clone())
    }

    /// Returns `true` if the upstream responds in time. An error response counts as a response.
    async fn is_responsive(&self, peer: &Peer<RoleClient>) -> bool {
        match tokio::time::timeout(
            self.connect_timeout().min(LIVENESS_TIMEOUT),
            peer.list_tools(None),
        )
        .await
        {
            Ok(Ok(_) | Err(ServiceError::McpError(_))) => true,
            Ok(Err(error)) => !was_never_sent(&error) && !peer.is_transport_closed(),
            Err(_) => false,
        }
    }

    /// Maximum time for the initial handshake, and for the tool list.
    fn connect_timeout(&self) -> Duration {
        Duration::from_millis(self.settings.connect_timeout_ms)
    }

    /// Fetches the offered tools and registers them, or records the changes to be accepted if the
    /// upstream is pinned.
    async fn refresh_tools(
        &self,
        registry: &dyn UpstreamRegistry,
        peer: &Peer<RoleClient>,
        capture: &ToolListCapture,
    ) -> Result<(), String> {
        peer.clear_response_cache().await;
        let limit = self.connect_timeout();
        let listing = tokio::time::timeout(limit, list_tools(peer, capture)).await;
        let list = listing
            .map_err(|_| format!("it sent no tool list within {limit:?}"))?
            .map_err(|reason| self.redact(&reason))?;
        let (project, name) = (&self.settings.project, &self.settings.name);
        let (mut readable, mut unreadable) = (Vec::new(), Vec::new());
        for listed in list {
            match listed {
                UpstreamToolEntry::Tool(tool) => readable.push(*tool),
                UpstreamToolEntry::Unreadable(name, reason) => {
                    unreadable.push((name, self.redact(&reason)))
                }
            }
        }
        let timeout_ms = registry.default_timeout_ms(project);
        let mut offered = OfferedTools::from_list(&self.settings, readable, unreadable, timeout_ms);
        if self.revision.requires_legacy() {
            offered.tools.values_mut().for_each(mark_legacy_server);
        }
        let mut skipped = offered.skipped.clone();
        skipped.extend(self.previously_rejected(&offered.tools));
        *self.offered.lock() = offered.clone();
        let accepted = registry.accepted_tools(project, name);
        let usable = self.without_rejected(&offered.tools);
        let found = diff_tools(&accepted, &usable, now_ms());
        if self.settings.pin && !accepted.is_empty() {
            let mut state = self.state.lock();
            state.pending = found;
            state.tools = accepted.len();
            (state.flagged, state.skipped) = (offered.flagged, skipped);
            return Ok(());
        }
        skipped.extend(self.apply_tools(registry, &accepted, usable, found).await?);
        let mut state = self.state.lock();
        (state.flagged, state.skipped) = (offered.flagged, skipped);
        Ok(())
    }

    /// Returns the offered tools without those that the registry has rejected in the same form.
    fn without_rejected(
        &self,
        offered: &BTreeMap<String, ToolDefinition>,
    ) -> BTreeMap<String, ToolDefinition> {
        let unusable = self.rejected_tools.lock();
        let is_rejected = |name: &str, tool: &ToolDefinition| {
            unusable.get(name).is_some_and(|(refused, _)| refused == tool)
        };
        let acceptable = offered.iter().filter(|(name, tool)| !is_rejected(name, tool));
        acceptable.map(|(name, tool)| (name.clone(), tool.clone())).collect()
    }

    /// Returns the tools that the registry has rejected and that are still offered in the same
    /// form, with the reasons.
    fn previously_rejected(
        &self,
        offered: &BTreeMap<String, ToolDefinition>,
    ) -> Vec<(String, String)> {
        let unusable = self.rejected_tools.lock();
        let is_same = unusable.iter().filter(|(name, (tool, _))| offered.get(*name) == Some(tool));
        is_same.map(|(name, (_, reason))| (name.clone(), reason.clone())).collect()
    }

    /// Registers these tools. Returns those that the registry rejected, with the reasons.
    async fn apply_tools(
        &self,
        registry: &dyn UpstreamRegistry,
        accepted: &BTreeMap<String, ToolDefinition>,
        tools: BTreeMap<String, ToolDefinition>,
        found: Vec<ToolChange>,
    ) -> Result<Vec<(String, String)>, String> {
        let mut refusals = Vec::new();
        let (project, name) = (&self.settings.project, &self.settings.name);
        if !found.is_empty() || *accepted != tools {
            let reason = describe_changes(&found);
            let list: Vec<ToolDefinition> = tools.values().cloned().collect();
            let refused: HashMap<String, String> =
                registry.set_tools(project, name, list, &reason).await?.into_iter().collect();
            let mut unusable = self.rejected_tools.lock();
            // A changed definition may be accepted this time.
            unusable.retain(|name, _| !tools.contains_key(name));
            for (tool, reason) in refused {
                if let Some(definition) = tools.get(&tool) {
                    unusable.insert(tool.clone(), (definition.clone(), reason.clone()));
                }
                refusals.push((tool, reason));
            }
            drop(unusable);
            if !accepted.is_empty() {
                tracing::info!(upstream = name, changes = reason, "an MCP server's tools changed");
                self.record_changes(found);
            }
        }
        let mut state = self.state.lock();
        state.tools = tools.len() - tools.keys().filter(|n| self.is_rejected(n)).count();
        state.pending.clear();
        Ok(refusals)
    }

    fn is_rejected(&self, name: &str) -> bool {
        self.rejected_tools.lock().contains_key(name)
    }

    /// Accepts the current definitions of the given tools, or of all. Returns the accepted changes.
    pub(in crate::mcp) async fn accept(
        &self,
        registry: &dyn UpstreamRegistry,
        tool_names: Option<&[String]>,
    ) -> Result<Vec<ToolChange>, String> {
        let (project, name) = (&self.settings.project, &self.settings.name);
        let current = registry.accepted_tools(project, name);
        let offered = self.without_rejected(&self.offered.lock().tools);
        let found = diff_tools(&current, &offered, now_ms());
        let is_selected =
            |change: &ToolChange| tool_names.is_none_or(|list| list.contains(&change.tool));
        let (accepted, remaining): (Vec<_>, Vec<_>) = found.into_iter().partition(is_selected);
        if accepted.is_empty() {
            return Ok(accepted);
        }
        let mut next = current.clone();
        for change in &accepted {
            match offered.get(&change.tool) {
                Some(tool) => drop(next.insert(change.tool.clone(), tool.clone())),
                None => drop(next.remove(&change.tool)),
            }
        }
        let refused = self.apply_tools(registry, &current, next, accepted.clone()).await?;
        let mut state = self.state.lock();
        state.pending = remaining;
        state.skipped.extend(refused);
        Ok(accepted)
    }
}

fn describe_changes(found: &[ToolChange]) -> String {
    let listed = found.iter().take(10).map(|change| format!("{} {}", change.tool, change.change));
    let mut words: Vec<String> = listed.collect();
    if found.len() > 10 {
        words.push(format!("and {} more", found.len() - 10));
    }
    words.join(", ")
}

/// Fetches the complete tool list.
async fn list_tools(
    peer: &Peer<RoleClient>,
    capture: &ToolListCapture,
) -> Result<Vec<UpstreamToolEntry>, String> {
    match pagination::tools(peer, capture).await {
        Err(ServiceError::McpError(error)) if error.code == ErrorCode::METHOD_NOT_FOUND => {
            Ok(Vec::new())
        }
        listed => listed.map_err(|error| format!("cannot get its tool list: {error}")),
    }
}
