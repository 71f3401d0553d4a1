//! Assembles an engine from its parts.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use parking_lot::RwLock;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::behind::Behind;
use super::catalog::{Catalog, Entry};
use super::gate::Gate;
use super::live::Live;
use super::notices::Notices;
use super::result::{self, Handle, RESULT_READ};
use super::{Engine, Inner, Limits, Policies, measure};
use crate::bus::{Bus, LocalBus};
use crate::caller::Recognise;
use crate::clock::{Clock, SystemClock};
use crate::desk::Desk;
use crate::fault::{Code, Error};
use crate::function::{Functions, Tool};
use crate::id::Minter;
use crate::model::{Models, NoModels};
use crate::notify::{Notifier, Notifying};
use crate::observe::Observer;
use crate::source::{Callers, Source};
use crate::store::{MemoryStore, Store};
use crate::task;
use crate::tool::{Executor, check_name};
use crate::turn::Asking;

/// Collects the parts of an engine. Every part has a default that needs no external service.
#[derive(Default)]
pub struct Builder {
    store: Option<Arc<dyn Store>>,
    bus: Option<Arc<dyn Bus>>,
    clock: Option<Arc<dyn Clock>>,
    tools: Vec<Arc<dyn Tool>>,
    sources: Vec<Arc<dyn Source>>,
    limits: Limits,
    policies: Policies,
    retention_ms: Option<u64>,
    publishes: bool,
    reads_results: bool,
    notifier: Option<Arc<dyn Notifier>>,
    notifying: Notifying,
    observer: Option<Arc<dyn Observer>>,
    tool_names: Option<bool>,
    recognise: Option<Arc<dyn Recognise>>,
    models: Option<Arc<dyn Models>>,
    summaries: Option<String>,
    asking: Asking,
}

impl Builder {
    /// Sets the store. The default keeps everything in memory.
    pub fn store(mut self, store: Arc<dyn Store>) -> Self {
        self.store = Some(store);
        self
    }

    /// Sets the bus that carries wake-ups. The default works within this process.
    pub fn bus(mut self, bus: Arc<dyn Bus>) -> Self {
        self.bus = Some(bus);
        self
    }

    /// Sets the clock.
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = Some(clock);
        self
    }

    /// Adds a tool that runs in this process.
    pub fn tool(self, tool: impl Tool) -> Self {
        self.tools([Arc::new(tool) as Arc<dyn Tool>])
    }

    /// Adds tools that run in this process.
    pub fn tools(mut self, tools: impl IntoIterator<Item = Arc<dyn Tool>>) -> Self {
        self.tools.extend(tools);
        self
    }

    /// Adds the tool `result.read`, with which a model reads the parts of a result that a digest
    /// omitted. No other tool can then have this name. A caller that may call any tool may call
    /// this one unless a rule denies it, because it returns only what that caller can read anyway.
    /// [`Engine::tools`] lists it for an agent only if a rule names it.
    pub fn result_read(mut self) -> Self {
        self.reads_results = true;
        self
    }

    /// Adds a source.
    pub fn source(mut self, source: Arc<dyn Source>) -> Self {
        self.sources.push(source);
        self
    }

    /// Sets the authenticator for callers without an API key. Every caller then needs a key or a
    /// token.
    pub fn recognise(mut self, recognise: Arc<dyn Recognise>) -> Self {
        self.recognise = Some(recognise);
        self
    }

    /// Sets the name of the model that summarizes long results for other models.
    pub fn summaries(mut self, model: impl Into<String>) -> Self {
        self.summaries = Some(model.into());
        self
    }

    /// Sets the language models that runs can use.
    pub fn models(mut self, models: Arc<dyn Models>) -> Self {
        self.models = Some(models);
        self
    }

    /// Sets the default policy for model requests and their retries.
    pub fn asking(mut self, asking: Asking) -> Self {
        self.asking = asking;
        self
    }

    /// Replaces the default limits.
    pub fn limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// Replaces the default policies.
    pub fn policies(mut self, policies: Policies) -> Self {
        self.policies = policies;
        self
    }

    /// Sets the sender of webhooks. Without one, the engine refuses requests with a callback URL.
    pub fn notifier(mut self, notifier: Arc<dyn Notifier>, notifying: Notifying) -> Self {
        (self.notifier, self.notifying) = (Some(notifier), notifying);
        self
    }

    /// Sets the time after which finished calls are deleted. By default they are never deleted.
    pub fn retention_ms(mut self, retention_ms: u64) -> Self {
        self.retention_ms = Some(retention_ms);
        self
    }

    /// Declares that a publisher drains the outbox. Only then are wake-ups written to it.
    pub fn publishes(mut self, publishes: bool) -> Self {
        self.publishes = publishes;
        self
    }

    /// Sets the observer of attempts and calls. Without one, observation costs nothing.
    pub fn observer(mut self, observer: Arc<dyn Observer>) -> Self {
        self.observer = Some(observer);
        self
    }

    /// Sets whether metrics carry the names of projects' tools. By default they do as long as no
    /// API key exists.
    pub fn tool_names_in_metrics(mut self, named: bool) -> Self {
        self.tool_names = Some(named);
        self
    }

    /// Builds an engine that adopts the store's open calls and runs its reconcilers.
    pub async fn start(self) -> Result<Engine, Error> {
        let retention_ms = self.retention_ms;
        measure::ready();
        let engine = self.idle().await?;
        engine.inner.gate.begin_counting();
        task::spawn_all(&engine, retention_ms);
        Ok(engine)
    }

    /// Builds an engine without background work: for commands that only read or change the
    /// directory, and for tests that run the reconcilers by hand.
    pub async fn idle(self) -> Result<Engine, Error> {
        let clock = self.clock.unwrap_or_else(|| Arc::new(SystemClock::default()));
        let desk = Arc::new(Desk::new(clock.clone()));
        let own_handle = Handle::default();
        let mut tools = self.tools;
        if self.reads_results {
            tools.push(Arc::new(result::tool(own_handle.clone())));
        }
        check_unique(&tools)?;
        let functions: Arc<dyn Source> = Arc::new(Functions::new(tools));
        let mut sources: HashMap<Executor, Arc<dyn Source>> = HashMap::new();
        let own = [functions, desk.clone() as Arc<dyn Source>, Arc::new(Callers)];
        for source in own.into_iter().chain(self.sources) {
            sources.insert(source.executor(), source);
        }
        let mut shared = HashMap::new();
        for definition in sources.values().flat_map(|source| source.list()) {
            check_name(&definition.name)
                .map_err(|error| Error::refused(Code::ValidationError, error.to_string()))?;
            let name = definition.name.clone();
            let entry = Arc::new(Entry::compile(definition)?);
            if shared.insert(name.clone(), entry).is_some() {
                return Err(named_twice(&name));
            }
        }
        let minter = Minter::default();
        let node = minter.text("node_", clock.now_ms());
        let inner = Arc::new(Inner {
            store: self.store.unwrap_or_else(|| Arc::new(MemoryStore::default())),
            bus: self.bus.unwrap_or_else(|| Arc::new(LocalBus::default())),
            clock,
            sources,
            desk,
            catalog: RwLock::new(Arc::new(Catalog::new(shared))),
            indexes: Default::default(),
            recognise: self.recognise,
            models: self.models.unwrap_or_else(|| Arc::new(NoModels)),
            summaries: self.summaries,
            asking: self.asking,
            changing: tokio::sync::Mutex::new(()),
            live: Live::default(),
            behind: Behind::default(),
            loops: Default::default(),
            gate: Arc::new(Gate::default()),
            notices: Arc::new(Notices::new(self.notifier, self.notifying)),
            minter,
            limits: self.limits,
            policies: self.policies,
            node,
            publishes: self.publishes,
            inbound: parking_lot::Mutex::default(),
            tool_names: self.tool_names,
            observer: self.observer,
            draining: AtomicBool::new(false),
            recovered: AtomicBool::new(false),
            stopping: CancellationToken::new(),
            attempts: TaskTracker::new(),
            tasks: TaskTracker::new(),
        });
        // The handle was created above, so this is its only `set`.
        let _ = own_handle.set(Arc::downgrade(&inner));
        inner.renew_catalog().await?;
        Ok(Engine { inner })
    }
}

/// Rejects two in-process tools with one name: the second would silently replace the first.
fn check_unique(tools: &[Arc<dyn Tool>]) -> Result<(), Error> {
    let mut names = HashSet::new();
    for tool in tools {
        let name = tool.definition().name;
        if names.contains(&name) {
            return Err(named_twice(&name));
        }
        names.insert(name);
    }
    Ok(())
}

fn named_twice(name: &str) -> Error {
    let mut message = format!("there are two built-in tools named \"{name}\"");
    if name == RESULT_READ {
        message.push_str("; one is the engine's own: rename yours, or build without result_read()");
    }
    Error::refused(Code::Conflict, message)
}
