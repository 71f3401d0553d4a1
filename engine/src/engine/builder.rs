//! Putting an engine together.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use parking_lot::RwLock;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::catalog::{Catalog, Entry};
use super::gate::Gate;
use super::live::Live;
use super::{Engine, Inner, Limits, Policies};
use crate::bus::{Bus, LocalBus};
use crate::clock::{Clock, SystemClock};
use crate::desk::Desk;
use crate::fault::{Code, Error};
use crate::function::{Functions, Tool};
use crate::id::Minter;
use crate::source::Source;
use crate::store::{MemoryStore, Store};
use crate::task;
use crate::tool::{Executor, check_name};

/// Collects the parts of an engine; what is not given has a default that needs nothing.
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
}

impl Builder {
    /// Where tickets are kept; in memory unless said otherwise.
    pub fn store(mut self, store: Arc<dyn Store>) -> Self {
        self.store = Some(store);
        self
    }

    /// How wakes travel; within the process unless said otherwise.
    pub fn bus(mut self, bus: Arc<dyn Bus>) -> Self {
        self.bus = Some(bus);
        self
    }

    /// What tells the time.
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = Some(clock);
        self
    }

    /// One more tool that runs in this process.
    pub fn tool(self, tool: impl Tool) -> Self {
        self.tools([Arc::new(tool) as Arc<dyn Tool>])
    }

    /// More tools that run in this process.
    pub fn tools(mut self, tools: impl IntoIterator<Item = Arc<dyn Tool>>) -> Self {
        self.tools.extend(tools);
        self
    }

    /// One more source.
    pub fn source(mut self, source: Arc<dyn Source>) -> Self {
        self.sources.push(source);
        self
    }

    /// Limits other than the default.
    pub fn limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// Policies other than the default.
    pub fn policies(mut self, policies: Policies) -> Self {
        self.policies = policies;
        self
    }

    /// How long finished calls are kept; for ever unless said.
    pub fn retention_ms(mut self, retention_ms: u64) -> Self {
        self.retention_ms = Some(retention_ms);
        self
    }

    /// Somebody publishes what is in the outbox: wakeups are put there.
    pub fn publishes(mut self, publishes: bool) -> Self {
        self.publishes = publishes;
        self
    }

    /// An engine that takes up what the store has open, and runs its reconcilers.
    pub async fn start(self) -> Result<Engine, Error> {
        let retention_ms = self.retention_ms;
        let engine = self.idle().await?;
        task::spawn_all(&engine, retention_ms);
        Ok(engine)
    }

    /// An engine that does nothing by itself: for tools that only look at or change the
    /// directory, and for tests that run the reconcilers by hand.
    pub async fn idle(self) -> Result<Engine, Error> {
        let clock = self.clock.unwrap_or_else(|| Arc::new(SystemClock::default()));
        let desk = Arc::new(Desk::new(clock.clone()));
        let functions: Arc<dyn Source> = Arc::new(Functions::new(self.tools));
        let mut sources: HashMap<Executor, Arc<dyn Source>> = HashMap::new();
        let own = [functions, desk.clone() as Arc<dyn Source>];
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
                let message = format!("there are two built-in tools named \"{name}\"");
                return Err(Error::refused(Code::Conflict, message));
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
            changing: tokio::sync::Mutex::new(()),
            live: Live::default(),
            gate: Arc::new(Gate::default()),
            minter,
            limits: self.limits,
            policies: self.policies,
            node,
            publishes: self.publishes,
            inbound: parking_lot::Mutex::default(),
            draining: AtomicBool::new(false),
            recovered: AtomicBool::new(false),
            stopping: CancellationToken::new(),
            attempts: TaskTracker::new(),
            tasks: TaskTracker::new(),
        });
        inner.renew_catalog().await?;
        Ok(Engine { inner })
    }
}
