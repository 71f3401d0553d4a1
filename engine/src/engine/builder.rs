//! Assembles an engine from its parts.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use parking_lot::RwLock;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::{Core, Engine, EngineLimits, ExecutionPolicies};
use crate::calls::dependents::Dependents;
use crate::calls::limiter::ConcurrencyLimiter;
use crate::calls::open_calls::OpenCalls;
use crate::clients::queue::ClientQueue;
use crate::domain::caller::Authenticator;
use crate::domain::fault::{Code, Error};
use crate::domain::id::IdGenerator;
use crate::domain::tool::{Executor, check_tool_name};
use crate::maintenance;
use crate::ports::bus::{Bus, LocalBus};
use crate::ports::clock::{Clock, SystemClock};
use crate::ports::fn_tool::{BuiltinSource, Tool};
use crate::ports::model::{ModelResolver, NoModels};
use crate::ports::observer::Observer;
use crate::ports::source::{CallerSource, Source};
use crate::ports::store::{MemoryStore, Store};
use crate::ports::webhook_sender::{DeliverySettings, WebhookSender};
use crate::registry::catalog::{Catalog, CatalogEntry};
use crate::runs::agent_loop::ModelRequestPolicy;
use crate::runs::read_result::{self, EngineHandle, RESULT_READ};
use crate::telemetry::engine_metrics;
use crate::webhooks::queue::WebhookQueue;

/// Collects the parts of an engine. Every part has a default that needs no external service.
#[derive(Default)]
pub struct EngineBuilder {
    store: Option<Arc<dyn Store>>,
    bus: Option<Arc<dyn Bus>>,
    clock: Option<Arc<dyn Clock>>,
    tools: Vec<Arc<dyn Tool>>,
    sources: Vec<Arc<dyn Source>>,
    limits: EngineLimits,
    policies: ExecutionPolicies,
    retention_ms: Option<u64>,
    publishes_outbox: bool,
    has_result_read: bool,
    webhook_sender: Option<Arc<dyn WebhookSender>>,
    webhook_settings: DeliverySettings,
    observer: Option<Arc<dyn Observer>>,
    tool_names_in_metrics: Option<bool>,
    authenticator: Option<Arc<dyn Authenticator>>,
    models: Option<Arc<dyn ModelResolver>>,
    summary_model: Option<String>,
    model_request_policy: ModelRequestPolicy,
}

impl EngineBuilder {
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
    pub fn with_result_read_tool(mut self) -> Self {
        self.has_result_read = true;
        self
    }

    /// Adds a source.
    pub fn source(mut self, source: Arc<dyn Source>) -> Self {
        self.sources.push(source);
        self
    }

    /// Sets the authenticator for callers without an API key. Every caller then needs a key or a
    /// token.
    pub fn authenticator(mut self, recognise: Arc<dyn Authenticator>) -> Self {
        self.authenticator = Some(recognise);
        self
    }

    /// Sets the name of the model that summarizes long results for other models.
    pub fn summary_model(mut self, model: impl Into<String>) -> Self {
        self.summary_model = Some(model.into());
        self
    }

    /// Sets the language models that runs can use.
    pub fn models(mut self, models: Arc<dyn ModelResolver>) -> Self {
        self.models = Some(models);
        self
    }

    /// Sets the default policy for model requests and their retries.
    pub fn model_request_policy(mut self, asking: ModelRequestPolicy) -> Self {
        self.model_request_policy = asking;
        self
    }

    /// Replaces the default limits.
    pub fn limits(mut self, limits: EngineLimits) -> Self {
        self.limits = limits;
        self
    }

    /// Replaces the default policies.
    pub fn policies(mut self, policies: ExecutionPolicies) -> Self {
        self.policies = policies;
        self
    }

    /// Sets the sender of webhooks. Without one, the engine refuses requests with a callback URL.
    pub fn webhook_sender(
        mut self,
        notifier: Arc<dyn WebhookSender>,
        notifying: DeliverySettings,
    ) -> Self {
        (self.webhook_sender, self.webhook_settings) = (Some(notifier), notifying);
        self
    }

    /// Sets the time after which finished calls are deleted. By default they are never deleted.
    pub fn retention_ms(mut self, retention_ms: u64) -> Self {
        self.retention_ms = Some(retention_ms);
        self
    }

    /// Declares that a publisher drains the outbox. Only then are wake-ups written to it.
    pub fn publishes_outbox(mut self, publishes: bool) -> Self {
        self.publishes_outbox = publishes;
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
        self.tool_names_in_metrics = Some(named);
        self
    }

    /// Builds an engine that adopts the store's open calls and runs its reconcilers.
    pub async fn start(self) -> Result<Engine, Error> {
        let retention_ms = self.retention_ms;
        engine_metrics::register_counters();
        let engine = self.build_idle().await?;
        engine.core.limiter.begin_recovery();
        maintenance::spawn_all(&engine, retention_ms);
        Ok(engine)
    }

    /// Builds an engine without background work: for commands that only read or change the
    /// directory, and for tests that run the reconcilers by hand.
    pub async fn build_idle(self) -> Result<Engine, Error> {
        let clock = self.clock.unwrap_or_else(|| Arc::new(SystemClock::default()));
        let desk = Arc::new(ClientQueue::new(clock.clone()));
        let own_handle = EngineHandle::default();
        let mut tools = self.tools;
        if self.has_result_read {
            tools.push(Arc::new(read_result::result_read_tool(own_handle.clone())));
        }
        check_unique_names(&tools)?;
        let functions: Arc<dyn Source> = Arc::new(BuiltinSource::new(tools));
        let mut sources: HashMap<Executor, Arc<dyn Source>> = HashMap::new();
        let own = [functions, desk.clone() as Arc<dyn Source>, Arc::new(CallerSource)];
        for source in own.into_iter().chain(self.sources) {
            sources.insert(source.executor(), source);
        }
        let mut shared = HashMap::new();
        for definition in sources.values().flat_map(|source| source.list()) {
            check_tool_name(&definition.name)
                .map_err(|error| Error::refused(Code::ValidationError, error.to_string()))?;
            let name = definition.name.clone();
            let entry = Arc::new(CatalogEntry::compile(definition)?);
            if shared.insert(name.clone(), entry).is_some() {
                return Err(duplicate_name(&name));
            }
        }
        let minter = IdGenerator::default();
        let node = minter.next_id("node_", clock.now_ms());
        let inner = Arc::new(Core {
            store: self.store.unwrap_or_else(|| Arc::new(MemoryStore::default())),
            bus: self.bus.unwrap_or_else(|| Arc::new(LocalBus::default())),
            clock,
            sources,
            client_queue: desk,
            catalog: RwLock::new(Arc::new(Catalog::new(shared))),
            search_indexes: Default::default(),
            authenticator: self.authenticator,
            models: self.models.unwrap_or_else(|| Arc::new(NoModels)),
            summary_model: self.summary_model,
            model_request_policy: self.model_request_policy,
            directory_lock: tokio::sync::Mutex::new(()),
            open_calls: OpenCalls::default(),
            dependents: Dependents::default(),
            active_runs: Default::default(),
            limiter: Arc::new(ConcurrencyLimiter::default()),
            webhook_queue: Arc::new(WebhookQueue::new(self.webhook_sender, self.webhook_settings)),
            id_generator: minter,
            limits: self.limits,
            policies: self.policies,
            node,
            publishes_outbox: self.publishes_outbox,
            report_traceparents: parking_lot::Mutex::default(),
            tool_names_in_metrics: self.tool_names_in_metrics,
            observer: self.observer,
            draining: AtomicBool::new(false),
            recovered: AtomicBool::new(false),
            shutdown: CancellationToken::new(),
            attempts: TaskTracker::new(),
            tasks: TaskTracker::new(),
        });
        // The handle was created above, so this is its only `set`.
        let _ = own_handle.set(Arc::downgrade(&inner));
        inner.reload_catalog().await?;
        Ok(Engine { core: inner })
    }
}

/// Rejects two in-process tools with one name: the second would silently replace the first.
fn check_unique_names(tools: &[Arc<dyn Tool>]) -> Result<(), Error> {
    let mut names = HashSet::new();
    for tool in tools {
        let name = tool.definition().name;
        if names.contains(&name) {
            return Err(duplicate_name(&name));
        }
        names.insert(name);
    }
    Ok(())
}

fn duplicate_name(name: &str) -> Error {
    let mut message = format!("there are two built-in tools named \"{name}\"");
    if name == RESULT_READ {
        message.push_str("; one is the engine's own: rename yours, or build without result_read()");
    }
    Error::refused(Code::Conflict, message)
}
