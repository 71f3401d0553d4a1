//! Reconciles the connected MCP servers with the configuration and the tool registry, and records
//! the tools they offer. It connects the MCP source, which does not know the engine, with the
//! transports, which do not know any source.

mod api;
mod list_cache;
mod passthrough;
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;
use tokio::task::JoinHandle;
use toolcrib::domain::directory::Upstream;
use toolcrib::domain::tool::ToolDefinition;
use toolcrib::{Caller, Engine};
use toolcrib_protocol::outbound::OutboundPolicy;
use toolcrib_protocol::secrets::SecretPolicy;
use toolcrib_sources::mcp::{McpServerSettings, McpSource, UpstreamPhase, UpstreamRegistry};

use crate::config::McpServerAdmissionSettings;

pub use crate::mcp_servers::passthrough::UpstreamPassthrough;
pub use api::{find_desktop_servers, parse_servers_to_add, to_stored_settings};

/// The registry's kind of upstream that this module manages.
pub const MCP_UPSTREAM_KIND: &str = "mcp";

/// Maximum time that child processes have to exit when the server stops.
const CHILD_EXIT_TIMEOUT: Duration = Duration::from_secs(8);

/// Returns the policy that limits the addresses of upstreams added with an API key.
pub fn outbound_policy(settings: &McpServerAdmissionSettings) -> OutboundPolicy {
    OutboundPolicy::new("upstreams", settings.allow_private, &settings.allow_hosts)
}

/// The engine's tool registry, as the MCP source sees it.
struct EngineUpstreamRegistry(Engine);

#[async_trait]
impl UpstreamRegistry for EngineUpstreamRegistry {
    fn accepted_tools(&self, project: &str, upstream: &str) -> BTreeMap<String, ToolDefinition> {
        let tools = self.0.upstreams().tools(project, upstream);
        let tools = tools.iter().map(|entry| entry.definition.clone());
        tools.map(|tool| (tool.name.clone(), tool)).collect()
    }

    async fn set_tools(
        &self,
        project: &str,
        upstream: &str,
        tools: Vec<ToolDefinition>,
        reason: &str,
    ) -> Result<Vec<(String, String)>, String> {
        let stored = self.0.upstreams().set_tools(project, upstream, tools, reason).await;
        stored.map_err(|error| format!("its tools cannot be stored: {error}"))
    }

    async fn credential(&self, project: &str, upstream: &str) -> Result<Option<String>, String> {
        let found = self.0.upstreams().credential(project, upstream).await;
        found.map_err(|error| format!("its sign-in cannot be read: {error}"))
    }

    async fn set_credential(
        &self,
        project: &str,
        upstream: &str,
        grant: Option<String>,
    ) -> Result<(), String> {
        let stored = self.0.upstreams().set_credential(project, upstream, grant).await;
        stored.map_err(|error| format!("its sign-in cannot be stored: {error}"))
    }

    fn default_timeout_ms(&self, project: &str) -> u64 {
        self.0.registry().default_timeout_ms(&Caller::local(project))
    }
}

/// Keeps the MCP source in step with the configured and the registered upstreams.
pub struct McpServerReconciler {
    engine: Engine,
    upstreams: Arc<McpSource>,
    /// Upstreams from the configuration file.
    configured: Vec<McpServerSettings>,
    settings: McpServerAdmissionSettings,
    /// Secrets that the settings of a server may name.
    secrets: SecretPolicy,
    task: Mutex<Option<JoinHandle<()>>>,
}

impl McpServerReconciler {
    /// Starts to reconcile the configured upstreams and those in the registry. Costs nothing while
    /// there are none.
    pub fn start(
        engine: Engine,
        upstreams: Arc<McpSource>,
        configured: Vec<McpServerSettings>,
        settings: McpServerAdmissionSettings,
        secrets: SecretPolicy,
    ) -> Arc<Self> {
        upstreams.set_registry(Arc::new(EngineUpstreamRegistry(engine.clone())));
        let task = Mutex::default();
        let reconciler = Arc::new(Self { engine, upstreams, configured, settings, secrets, task });
        let following = Arc::downgrade(&reconciler);
        let (engine, upstreams) = (reconciler.engine.clone(), reconciler.upstreams.clone());
        reconciler.reconcile();
        *reconciler.task.lock() = Some(tokio::spawn(async move {
            if let Some(reconciler) = following.upgrade() {
                reconciler.forget_removed_servers().await;
            }
            let mut seen = 0;
            while let Some(version) = engine.registry().wait_for_directory_change(seen).await {
                seen = version;
                match following.upgrade() {
                    Some(reconciler) => reconciler.reconcile(),
                    None => break,
                }
            }
            upstreams.close().await;
        }));
        reconciler
    }

    /// Returns the upstreams that should be connected. The configuration takes precedence over the
    /// registry.
    fn desired_servers(&self) -> Vec<McpServerSettings> {
        let mut desired = self.configured.clone();
        let key_of = |u: &McpServerSettings| (u.project.clone(), u.name.clone());
        let configured: HashSet<_> = desired.iter().map(key_of).collect();
        let stored = self
            .engine
            .upstreams()
            .list_all()
            .into_iter()
            .filter(|upstream| upstream.kind == MCP_UPSTREAM_KIND);
        desired.extend(
            stored
                .filter_map(parse_stored_settings)
                .filter(|settings| !configured.contains(&key_of(settings))),
        );
        desired
    }

    fn reconcile(&self) {
        self.upstreams.set_servers(self.desired_servers());
    }

    /// Removes the tools and credentials of upstreams that are neither configured nor registered
    /// any more.
    async fn forget_removed_servers(&self) {
        let desired = self.desired_servers();
        let mut keys = self.engine.upstreams().list_with_tools();
        keys.extend(self.engine.upstreams().list_with_credentials().await.unwrap_or_default());
        for (project, name) in keys {
            let is_desired = desired.iter().any(|u| u.project == project && u.name == name);
            if !is_desired
                && let Err(error) = self.engine.upstreams().remove_tools(&project, &name).await
            {
                tracing::warn!(upstream = name, %error, "cannot remove its tools");
            }
        }
    }

    /// Waits until all upstreams are shut down. Call it after the engine has been shut down.
    pub async fn close(&self) {
        let task = self.task.lock().take();
        if let Some(task) = task {
            let _ = tokio::time::timeout(CHILD_EXIT_TIMEOUT, task).await;
        }
    }

    /// Returns `true` if the upstream is ready, once its state is known or `limit` has passed.
    pub async fn wait_until_ready(&self, project: &str, name: &str, limit: Duration) -> bool {
        self.upstreams.wait_until_known(project, name, tokio::time::Instant::now() + limit).await;
        self.upstreams
            .status(project, name)
            .is_some_and(|status| status.state.phase == UpstreamPhase::Ready)
    }

    /// Returns the current problem of an upstream, if any.
    pub fn problem(&self, project: &str, name: &str) -> Option<String> {
        self.upstreams.status(project, name)?.state.problem
    }

    /// Sets the URL at which a person's browser reaches the server.
    pub fn set_public_base_url(&self, base: String) {
        self.upstreams.set_public_base_url(base);
    }

    /// Returns the passthrough of resources, prompts and completions of upstreams.
    pub fn passthrough(&self) -> Arc<UpstreamPassthrough> {
        Arc::new(UpstreamPassthrough::new(self.engine.clone(), self.upstreams.clone()))
    }
}

/// Parses the settings of a stored upstream.
fn parse_stored_settings(stored: Upstream) -> Option<McpServerSettings> {
    match serde_json::from_str::<McpServerSettings>(stored.settings.text()) {
        Ok(settings) => {
            Some(McpServerSettings { project: stored.project, name: stored.name, ..settings })
        }
        Err(error) => {
            tracing::warn!(upstream = stored.name, %error, "cannot read its stored settings");
            None
        }
    }
}
