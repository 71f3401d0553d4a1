//! Keeps the MCP servers behind the crib in step with the configuration and the directory, and
//! writes down what they offer. It is what lies between the source, which knows no engine, and the
//! doors, which know no source.

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

/// The kind of upstream that this is about.
pub const KIND: &str = "mcp";

/// How long programs may take to end when the server stops.
const ENDING: Duration = Duration::from_secs(8);

/// Where upstreams that a key has named may be.
pub fn outbound(settings: &UpstreamSettings) -> Outbound {
    Outbound::new("upstreams", settings.allow_private, &settings.allow_hosts)
}

/// The directory, as the source sees it.
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

/// What keeps upstreams in step.
pub struct Keeper {
    engine: Engine,
    upstreams: Arc<Upstreams>,
    /// Those of the configuration.
    configured: Vec<McpSettings>,
    settings: UpstreamSettings,
    task: Mutex<Option<JoinHandle<()>>>,
}

impl Keeper {
    /// Begins to keep these, and those of the directory. Costs nothing while there are none.
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

    /// Those that are wanted now. The configuration goes before the directory.
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

    /// Tools of upstreams that are in no configuration any more are nobody's.
    async fn forget_the_gone(&self) {
        let wanted = self.wanted();
        let mut places = self.engine.upstreams_with_tools();
        places.extend(self.engine.upstream_grants().await.unwrap_or_default());
        for (project, name) in places {
            let known = wanted.iter().any(|u| u.project == project && u.name == name);
            if !known && let Err(error) = self.engine.forget_upstream(&project, &name).await {
                tracing::warn!(upstream = name, %error, "its tools could not be removed");
            }
        }
    }

    /// After the engine has been shut down: waits until nothing of the upstreams is left.
    pub async fn close(&self) {
        let task = self.task.lock().take();
        if let Some(task) = task {
            let _ = tokio::time::timeout(ENDING, task).await;
        }
    }

    /// Whether one is there, once that is known or the time is over.
    pub async fn ready(&self, project: &str, name: &str, limit: Duration) -> bool {
        self.upstreams.known_by(project, name, tokio::time::Instant::now() + limit).await;
        self.upstreams.one(project, name).is_some_and(|shown| shown.state.phase == Phase::Ready)
    }

    /// What is wrong with one.
    pub fn problem(&self, project: &str, name: &str) -> Option<String> {
        self.upstreams.one(project, name)?.state.problem
    }

    /// A person's browser reaches the server here.
    pub fn set_base(&self, base: String) {
        self.upstreams.set_base(base);
    }

    /// What lies beside the tools of upstreams.
    pub fn shelf(&self) -> Arc<Beside> {
        Arc::new(Beside::new(self.engine.clone(), self.upstreams.clone()))
    }
}

/// The settings of a stored upstream.
fn read(known: Upstream) -> Option<McpSettings> {
    match serde_json::from_str::<McpSettings>(known.settings.text()) {
        Ok(settings) => Some(McpSettings { project: known.project, name: known.name, ..settings }),
        Err(error) => {
            tracing::warn!(upstream = known.name, %error, "its stored settings cannot be read");
            None
        }
    }
}
