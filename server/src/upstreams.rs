//! Reconciles the connected MCP servers with the configuration and the tool registry, and records
//! the tools they offer. It connects the MCP source, which does not know the engine, with the
//! transports, which do not know any source.

mod api;
mod lists;
mod shelf;

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;
use tokio::task::JoinHandle;
use toolcrib::directory::Upstream;
use toolcrib::tool::Definition;
use toolcrib::{Caller, Engine};

use crate::config::UpstreamSettings;
use crate::outbound::Outbound;
use crate::sources::mcp::{Ledger, McpSettings, Phase, Upstreams};

pub use api::{imported, stored, to_add};
pub use shelf::Beside;

/// The registry's kind of upstream that this module manages.
pub const KIND: &str = "mcp";

/// Maximum time that child processes have to exit when the server stops.
const ENDING: Duration = Duration::from_secs(8);

/// Returns the policy that limits the addresses of upstreams added with an API key.
pub fn outbound(settings: &UpstreamSettings) -> Outbound {
    Outbound::new("upstreams", settings.allow_private, &settings.allow_hosts)
}

/// The engine's tool registry, as the MCP source sees it.
struct Book(Engine);

#[async_trait]
impl Ledger for Book {
    fn known(&self, project: &str, upstream: &str) -> BTreeMap<String, Definition> {
        let tools = self.0.upstream_tools(project, upstream);
        let tools = tools.iter().map(|entry| entry.definition.clone());
        tools.map(|tool| (tool.name.clone(), tool)).collect()
    }

    async fn keep(
        &self,
        project: &str,
        upstream: &str,
        tools: Vec<Definition>,
        why: &str,
    ) -> Result<Vec<(String, String)>, String> {
        let kept = self.0.set_upstream_tools(project, upstream, tools, why).await;
        kept.map_err(|error| format!("its tools cannot be stored: {error}"))
    }

    async fn grant(&self, project: &str, upstream: &str) -> Result<Option<String>, String> {
        let found = self.0.upstream_grant(project, upstream).await;
        found.map_err(|error| format!("its sign-in cannot be read: {error}"))
    }

    async fn keep_grant(
        &self,
        project: &str,
        upstream: &str,
        grant: Option<String>,
    ) -> Result<(), String> {
        let kept = self.0.keep_upstream_grant(project, upstream, grant).await;
        kept.map_err(|error| format!("its sign-in cannot be stored: {error}"))
    }

    fn default_timeout_ms(&self, project: &str) -> u64 {
        self.0.default_timeout_ms(&Caller::local(project))
    }
}

/// Keeps the MCP source in step with the configured and the registered upstreams.
pub struct Keeper {
    engine: Engine,
    upstreams: Arc<Upstreams>,
    /// Upstreams from the configuration file.
    configured: Vec<McpSettings>,
    settings: UpstreamSettings,
    task: Mutex<Option<JoinHandle<()>>>,
}

impl Keeper {
    /// Starts to reconcile the configured upstreams and those in the registry. Costs nothing while
    /// there are none.
    pub fn start(
        engine: Engine,
        upstreams: Arc<Upstreams>,
        configured: Vec<McpSettings>,
        settings: UpstreamSettings,
    ) -> Arc<Self> {
        upstreams.open(Arc::new(Book(engine.clone())));
        let task = Mutex::default();
        let keeper = Arc::new(Self { engine, upstreams, configured, settings, task });
        let following = Arc::downgrade(&keeper);
        let (engine, upstreams) = (keeper.engine.clone(), keeper.upstreams.clone());
        keeper.look();
        *keeper.task.lock() = Some(tokio::spawn(async move {
            if let Some(keeper) = following.upgrade() {
                keeper.forget_the_gone().await;
            }
            let mut seen = 0;
            while let Some(version) = engine.directory_changed(seen).await {
                seen = version;
                match following.upgrade() {
                    Some(keeper) => keeper.look(),
                    None => break,
                }
            }
            upstreams.close().await;
        }));
        keeper
    }

    /// Returns the upstreams that should be connected. The configuration takes precedence over the
    /// registry.
    fn wanted(&self) -> Vec<McpSettings> {
        let mut wanted = self.configured.clone();
        let ours = |u: &McpSettings| (u.project.clone(), u.name.clone());
        let taken: HashSet<_> = wanted.iter().map(ours).collect();
        let stored = self.engine.upstreams().into_iter().filter(|known| known.kind == KIND);
        wanted.extend(stored.filter_map(read).filter(|settings| !taken.contains(&ours(settings))));
        wanted
    }

    fn look(&self) {
        self.upstreams.set(self.wanted());
    }

    /// Removes the tools and credentials of upstreams that are neither configured nor registered
    /// any more.
    async fn forget_the_gone(&self) {
        let wanted = self.wanted();
        let mut places = self.engine.upstreams_with_tools();
        places.extend(self.engine.upstream_grants().await.unwrap_or_default());
        for (project, name) in places {
            let known = wanted.iter().any(|u| u.project == project && u.name == name);
            if !known && let Err(error) = self.engine.forget_upstream(&project, &name).await {
                tracing::warn!(upstream = name, %error, "cannot remove its tools");
            }
        }
    }

    /// Waits until all upstreams are shut down. Call it after the engine has been shut down.
    pub async fn close(&self) {
        let task = self.task.lock().take();
        if let Some(task) = task {
            let _ = tokio::time::timeout(ENDING, task).await;
        }
    }

    /// Returns `true` if the upstream is ready, once its state is known or `limit` has passed.
    pub async fn ready(&self, project: &str, name: &str, limit: Duration) -> bool {
        self.upstreams.known_by(project, name, tokio::time::Instant::now() + limit).await;
        self.upstreams.one(project, name).is_some_and(|shown| shown.state.phase == Phase::Ready)
    }

    /// Returns the current problem of an upstream, if any.
    pub fn problem(&self, project: &str, name: &str) -> Option<String> {
        self.upstreams.one(project, name)?.state.problem
    }

    /// Sets the URL at which a person's browser reaches the server.
    pub fn set_base(&self, base: String) {
        self.upstreams.set_base(base);
    }

    /// Returns the passthrough of resources, prompts and completions of upstreams.
    pub fn shelf(&self) -> Arc<Beside> {
        Arc::new(Beside::new(self.engine.clone(), self.upstreams.clone()))
    }
}

/// Parses the settings of a stored upstream.
fn read(known: Upstream) -> Option<McpSettings> {
    match serde_json::from_str::<McpSettings>(known.settings.text()) {
        Ok(settings) => Some(McpSettings { project: known.project, name: known.name, ..settings }),
        Err(error) => {
            tracing::warn!(upstream = known.name, %error, "cannot read its stored settings");
            None
        }
    }
}
