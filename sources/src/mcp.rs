//! The source of tools that MCP servers execute: child processes started by Toolcrib, and servers
//! reached over streamable HTTP.
//!
//! Each upstream has a task that keeps it connected, so that a slow, broken or missing upstream
//! does not affect the others. Its tools are registered as `NAME.tool` through the
//! [`UpstreamRegistry`]. Without an upstream nothing runs here.

mod attempt;
mod connection;
mod oauth;
mod offered_tools;
pub mod pagination;
mod raw_tool_list;
mod registry;
mod settings;
mod upstream;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, LazyLock, OnceLock};

use async_trait::async_trait;
use metrics::Counter;
use parking_lot::Mutex;
use rmcp::service::Peer;
use rmcp::{RoleClient, ServiceError};
use serde_json::Value;
use tokio::sync::broadcast;
use tokio_util::task::TaskTracker;
use toolcrib::CallId;
use toolcrib::domain::fault::{Code, Fault};
use toolcrib::domain::tool::{Executor, ToolDefinition};
use toolcrib::ports::source::{Attempt, AttemptProgress, ProgressSink, Source, StartResult};

pub use crate::mcp::connection::server_requests::UpstreamChange;
pub use crate::mcp::offered_tools::ToolChange;
pub use oauth::{AuthorizationStatus, SignInLink};
pub use registry::UpstreamRegistry;
pub use settings::oauth::{GrantKind, McpOauthSettings, SigningAlgorithm};
pub use settings::{
    McpServerSettings, McpSettingsError, McpToolSettings, parse_desktop_config, redact_url,
};
pub use upstream::state::{UpstreamPhase, UpstreamState, UpstreamStatus};

use crate::mcp::attempt::UpstreamAttempt;
use crate::mcp::connection::log_messages;
use crate::mcp::connection::subscriptions::subscribe_resource;
use oauth::{Authorizer, SharedPublicBaseUrl};
use upstream::UpstreamServer;

use toolcrib_protocol::outbound::OutboundPolicy;
use toolcrib_protocol::secrets::redaction::StreamRedactor;

/// Capacity of the channel of changes to resources and prompts.
const CHANGE_CHANNEL_CAPACITY: usize = 256;

type UpstreamKey = (String, String);

/// All upstreams, as a source of tools.
pub struct McpSource {
    servers: Mutex<HashMap<UpstreamKey, Arc<UpstreamServer>>>,
    registry: OnceLock<Arc<dyn UpstreamRegistry>>,
    changes: broadcast::Sender<(UpstreamKey, UpstreamChange)>,
    tasks: TaskTracker,
    outbound: Arc<OutboundPolicy>,
    public_base_url: SharedPublicBaseUrl,
}

impl McpSource {
    /// Creates a source without upstreams. `outbound` limits the addresses of upstreams that were
    /// added with an API key; `base` is the URL at which a person's browser reaches the server.
    pub fn new(outbound: OutboundPolicy, base: String) -> Self {
        let (servers, registry) = Default::default();
        let (changes, tasks) =
            (broadcast::Sender::new(CHANGE_CHANNEL_CAPACITY), TaskTracker::new());
        Self {
            servers,
            registry,
            changes,
            tasks,
            outbound: Arc::new(outbound),
            public_base_url: SharedPublicBaseUrl::new(base.into()),
        }
    }

    /// Sets the URL at which a person's browser reaches the server.
    pub fn set_public_base_url(&self, base: String) {
        *self.public_base_url.write() = base;
    }

    /// Returns the URL at which a person's browser reaches the server.
    pub fn public_base_url(&self) -> String {
        self.public_base_url.read().clone()
    }

    /// Sets the registry that records the offered tools. Only the first call has an effect.
    pub fn set_registry(&self, registry: Arc<dyn UpstreamRegistry>) {
        let _ = self.registry.set(registry);
    }

    /// Sets the desired upstreams: connects to new ones, shuts down removed ones, and restarts
    /// those whose settings changed.
    pub fn set_servers(&self, desired: Vec<McpServerSettings>) {
        let Some(registry) = self.registry.get() else { return };
        let mut current = self.servers.lock();
        let mut next: HashMap<UpstreamKey, McpServerSettings> = HashMap::new();
        for settings in desired {
            next.insert((settings.project.clone(), settings.name.clone()), settings);
        }
        current.retain(|key, upstream| {
            let stays = next.get(key).is_some_and(|settings| *settings == upstream.settings);
            if !stays {
                upstream.stop.cancel();
            }
            stays
        });
        for (key, settings) in next {
            if current.contains_key(&key) {
                continue;
            }
            let changes = broadcast::Sender::new(CHANGE_CHANNEL_CAPACITY);
            let change_events = changes.subscribe();
            let outbound = &self.outbound;
            let authorizer =
                Authorizer::for_server(&settings, registry, outbound, &self.public_base_url);
            let upstream = UpstreamServer::new(settings, changes, outbound.clone(), authorizer);
            self.tasks.spawn(forward_changes(key.clone(), change_events, self.changes.clone()));
            self.tasks.spawn(upstream.clone().supervise(registry.clone()));
            current.insert(key, upstream);
        }
    }

    /// Shuts down all upstreams and waits until none of their tasks is left.
    pub async fn close(&self) {
        self.servers.lock().drain().for_each(|(_, upstream)| upstream.stop.cancel());
        self.tasks.close();
        self.tasks.wait().await;
    }

    fn find(&self, project: &str, name: &str) -> Option<Arc<UpstreamServer>> {
        self.servers.lock().get(&(project.to_owned(), name.to_owned())).cloned()
    }

    fn find_by_tool(&self, project: &str, tool: &str) -> Option<Arc<UpstreamServer>> {
        self.find(project, tool.split_once('.')?.0)
    }

    /// Returns the status of each upstream of a project, sorted by name.
    pub fn statuses(&self, project: &str) -> Vec<UpstreamStatus> {
        let servers = self.servers.lock();
        let project_servers = servers.iter().filter(|((owner, _), _)| owner == project);
        let mut all: Vec<UpstreamStatus> =
            project_servers.map(|(_, upstream)| status_of(upstream)).collect();
        all.sort_by(|a, b| a.settings.name.cmp(&b.settings.name));
        all
    }

    /// Returns `true` if an upstream with this name exists.
    pub fn has(&self, project: &str, name: &str) -> bool {
        self.find(project, name).is_some()
    }

    /// Counts the upstreams of all projects by phase.
    pub fn count_by_phase(&self) -> [(&'static str, usize); 5] {
        let servers = self.servers.lock();
        let phases: Vec<UpstreamPhase> =
            servers.values().map(|server| server.state.lock().phase).collect();
        UpstreamPhase::ALL
            .map(|phase| (phase.as_str(), phases.iter().filter(|other| **other == phase).count()))
    }

    /// Returns the status of one upstream.
    pub fn status(&self, project: &str, name: &str) -> Option<UpstreamStatus> {
        self.find(project, name).map(|upstream| status_of(&upstream))
    }

    /// Accepts the current definitions of the given tools, or of all tools, of one upstream.
    pub async fn accept(
        &self,
        project: &str,
        name: &str,
        tool_names: Option<&[String]>,
    ) -> Result<Vec<ToolChange>, String> {
        let (Some(upstream), Some(registry)) = (self.find(project, name), self.registry.get())
        else {
            return Ok(Vec::new());
        };
        upstream.accept(&**registry, tool_names).await
    }

    /// Reconnects an upstream at once, or refreshes its tool list if it is connected, and waits
    /// until that is done or the time is over.
    pub async fn refresh(&self, project: &str, name: &str, until: tokio::time::Instant) {
        if let Some(upstream) = self.find(project, name) {
            let _ = tokio::time::timeout_at(until, upstream.request_refresh()).await;
        }
    }

    /// Waits until an upstream is known to be available or unavailable, or the time is over.
    pub async fn wait_until_known(&self, project: &str, name: &str, until: tokio::time::Instant) {
        if let Some(upstream) = self.find(project, name) {
            let _ = tokio::time::timeout_at(until, upstream.wait_until_known()).await;
        }
    }

    /// Starts a sign-in by a person.
    pub async fn sign_in(&self, project: &str, name: &str) -> Result<(), String> {
        let upstream = self.find(project, name);
        let authorizer = upstream.as_ref().and_then(|upstream| upstream.authorizer.as_ref());
        let authorizer =
            authorizer.ok_or_else(|| "it has no sign-in: it does not use OAuth".to_owned())?;
        authorizer.restart_sign_in().await
    }

    /// Deletes the upstream's tokens and reconnects without them.
    pub async fn sign_out(&self, project: &str, name: &str) -> Result<(), String> {
        let Some(upstream) = self.find(project, name) else { return Ok(()) };
        if let Some(authorizer) = &upstream.authorizer {
            authorizer.sign_out().await?;
        }
        upstream.reconnect_requested.notify_one();
        Ok(())
    }

    /// Completes a sign-in after the browser was redirected back from the issuer. Returns the
    /// project and name of the upstream it was for, or `None` if no upstream expects this sign-in.
    pub async fn complete_sign_in(
        &self,
        state: &str,
        code: Result<&str, &str>,
        issuer: Option<&str>,
    ) -> Option<(String, String, Result<(), String>)> {
        let waits = |upstream: &&Arc<UpstreamServer>| {
            upstream.authorizer.as_ref().is_some_and(|authorizer| authorizer.expects_state(state))
        };
        let upstream = self.servers.lock().values().find(waits).cloned()?;
        let authorizer = upstream.authorizer.as_ref()?;
        let (project, name) = (upstream.settings.project.clone(), upstream.settings.name.clone());
        let finished = match code {
            Ok(code) => authorizer.complete_sign_in(state, code, issuer).await,
            Err(reason) => {
                authorizer.decline_sign_in(state, reason).await;
                Err(reason.to_owned())
            }
        };
        upstream.retry_now.notify_one();
        Some((project, name, finished))
    }

    /// Returns the usable connections of a project, by the names of their upstreams.
    pub fn peers(&self, project: &str) -> BTreeMap<String, Peer<RoleClient>> {
        let servers = self.servers.lock();
        let project_servers = servers.iter().filter(|((owner, _), _)| owner == project);
        let peers = project_servers.filter_map(|((_, name), upstream)| {
            Some((name.clone(), upstream.current_connection()?.peer.clone()))
        });
        peers.collect()
    }

    /// Asks the upstreams with these names for log messages of this level. They arrive at
    /// [`McpSource::subscribe_changes`].
    pub async fn include_logs(&self, project: &str, names: &[String], level: &Value) {
        let Some(level) = log_messages::parse_level(level) else { return };
        let connections = names.iter().filter_map(|name| {
            let upstream = self.find(project, name)?;
            upstream.current_connection()
        });
        let requests = connections.map(|live| async move {
            live.handler.log_level.include(&live.peer, level).await;
        });
        futures::future::join_all(requests).await;
    }

    /// Subscribes to the changes of a resource of an upstream. They arrive at
    /// [`McpSource::subscribe_changes`], also after a reconnect.
    ///
    /// # Errors
    /// The upstream refuses the subscription, or does not respond.
    pub async fn follow_resource(
        &self,
        project: &str,
        name: &str,
        uri: &str,
    ) -> Result<(), ServiceError> {
        let Some(upstream) = self.find(project, name) else { return Ok(()) };
        upstream.followed_resources.add(uri);
        let Some(live) = upstream.current_connection() else { return Ok(()) };
        let info = live.peer.peer_info();
        match info.is_some_and(|info| info.protocol_version.has_initialize()) {
            true => subscribe_resource(&live.peer, uri).await,
            false => Ok(()),
        }
    }

    /// Redacts the secrets of an upstream's settings and tokens from a text.
    pub fn redact(&self, project: &str, name: &str, text: &str) -> String {
        self.find(project, name).map_or_else(|| text.to_owned(), |upstream| upstream.redact(text))
    }

    /// Records a problem of an upstream that does not concern its tools, unless one is already
    /// recorded.
    pub fn report_problem(&self, project: &str, name: &str, reason: &str) {
        if let Some(upstream) = self.find(project, name) {
            upstream.state.lock().problem.get_or_insert_with(|| reason.to_owned());
        }
    }

    /// Clears a problem that was recorded with `report_problem`.
    pub fn clear_problem(&self, project: &str, name: &str, reason: &str) {
        if let Some(upstream) = self.find(project, name) {
            let mut state = upstream.state.lock();
            state.problem = state.problem.take().filter(|current| current != reason);
        }
    }

    /// Subscribes to changes of resources and prompts, each with its project and upstream.
    pub fn subscribe_changes(&self) -> broadcast::Receiver<(UpstreamKey, UpstreamChange)> {
        self.changes.subscribe()
    }
}

async fn forward_changes(
    key: UpstreamKey,
    mut changes: broadcast::Receiver<UpstreamChange>,
    all: broadcast::Sender<(UpstreamKey, UpstreamChange)>,
) {
    loop {
        match changes.recv().await {
            Ok(change) => drop(all.send((key.clone(), change))),
            Err(broadcast::error::RecvError::Lagged(_)) => {}
            Err(broadcast::error::RecvError::Closed) => return,
        }
    }
}

fn status_of(upstream: &UpstreamServer) -> UpstreamStatus {
    UpstreamStatus {
        settings: upstream.settings.clone(),
        state: upstream.state.lock().clone(),
        stderr: upstream.stderr.lines(),
        authorization: upstream.authorizer.as_ref().map(|authorizer| authorizer.status()),
    }
}

/// Redacts the secrets of an upstream in the progress of an attempt, also if one is split between
/// two messages.
fn redact_progress(progress: ProgressSink, upstream: &Arc<UpstreamServer>) -> ProgressSink {
    let (upstream, stream) = (upstream.clone(), Mutex::new(StreamRedactor::default()));
    Arc::new(move |mut report: AttemptProgress| {
        let secrets = upstream.result_secrets();
        if !secrets.is_empty() {
            if let Some(message) = &mut report.message {
                *message = stream.lock().redact_part(&secrets, message);
            }
            if let Some(data) = &mut report.data {
                secrets.redact_json(data);
            }
        }
        progress(report);
    })
}

/// Redacts the secrets of an upstream in everything that an attempt returns.
fn redact_result(started: StartResult, upstream: Arc<UpstreamServer>) -> StartResult {
    match started {
        StartResult::Finished(result) => {
            let secrets = upstream.result_secrets();
            StartResult::Finished(match result {
                Ok(document) => Ok(secrets.redact_document(document)),
                Err(fault) => Err(secrets.redact_fault(fault)),
            })
        }
        StartResult::NeedsInput(mut request) => {
            let secrets = upstream.result_secrets();
            for question in request.questions.values_mut() {
                secrets.redact_json(question);
            }
            StartResult::NeedsInput(request)
        }
        StartResult::Detached { handle, rest } => {
            let rest = Box::pin(async move { redact_result(rest.await, upstream) });
            StartResult::Detached { handle, rest }
        }
        StartResult::Accepted => StartResult::Accepted,
    }
}

#[async_trait]
impl Source for McpSource {
    fn executor(&self) -> Executor {
        Executor::MCP
    }

    fn list(&self) -> Vec<ToolDefinition> {
        Vec::new()
    }

    async fn start(&self, attempt: Attempt, progress: ProgressSink) -> StartResult {
        let Some(upstream) = self.find_by_tool(&attempt.project, &attempt.tool) else {
            let message = format!("the MCP server of {} no longer exists", attempt.tool);
            let fault = Fault::new(Code::UpstreamUnavailable, message).without_side_effect();
            return StartResult::Finished(Err(fault.retryable(false)));
        };
        let running = upstream.register_attempt(&attempt);
        let progress = redact_progress(progress, &upstream);
        let server = upstream.clone();
        let started = UpstreamAttempt { upstream, attempt, progress, running }.run().await;
        CALLS.count(&started);
        redact_result(started, server)
    }

    fn unavailable_reason(&self, project: &str, tool: &str) -> Option<String> {
        match self.find_by_tool(project, tool) {
            Some(upstream) => {
                let is_ready = upstream.state.lock().phase == UpstreamPhase::Ready;
                (!is_ready).then(|| upstream.unavailable_fault().message)
            }
            None => Some("its MCP server is no longer configured".to_owned()),
        }
    }

    fn cancel(&self, call_id: &CallId, attempt: u32) {
        self.for_each_server(|upstream| upstream.cancel(call_id, attempt));
    }

    fn release_attempt(&self, call_id: &CallId, attempt: u32) {
        self.for_each_server(|upstream| upstream.release_attempt(call_id, attempt));
    }
}

impl McpSource {
    /// Calls `act` for each upstream. There are few, and only one of them knows the call.
    fn for_each_server(&self, mut act: impl FnMut(&Arc<UpstreamServer>)) {
        self.servers.lock().values().for_each(&mut act);
    }
}

/// Counters of attempts by outcome.
struct AttemptCounters {
    ok: Counter,
    failed: Counter,
    needs_input: Counter,
    task: Counter,
}

impl AttemptCounters {
    fn count(&self, started: &StartResult) {
        match started {
            StartResult::Finished(Ok(_)) => self.ok.increment(1),
            StartResult::NeedsInput(_) => self.needs_input.increment(1),
            StartResult::Detached { .. } => self.task.increment(1),
            _ => self.failed.increment(1),
        }
    }
}

static CALLS: LazyLock<AttemptCounters> = LazyLock::new(|| {
    let register_counter = |outcome: &'static str| metrics::counter!("toolcrib_upstream_calls_total", "outcome" => outcome);
    AttemptCounters {
        ok: register_counter("ok"),
        failed: register_counter("failed"),
        needs_input: register_counter("asked"),
        task: register_counter("task"),
    }
});

/// Returns the current time in milliseconds since 1970.
fn now_ms() -> u64 {
    u64::try_from(jiff::Timestamp::now().as_millisecond()).unwrap_or_default()
}
