//! Assembles an engine from its parts.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::{Engine, EngineParts};
use crate::approvals::Approvals;
use crate::calls::rejoin::Rejoin;
use crate::calls::target::ClientWorkLimiter;
use crate::calls::{Calls, Dispatcher};
use crate::clients::Clients;
use crate::clients::queue::ClientQueue;
use crate::domain::caller::Authenticator;
use crate::domain::fault::{Code, Error};
use crate::domain::id::IdGenerator;
use crate::domain::run::options::ModelRequestPolicy;
use crate::domain::tool::tool_mode::ToolModeSettings;
use crate::domain::tool::{Executor, check_tool_name, helper_name_conflict, is_mcp_helper_name};
use crate::maintenance;
use crate::ports::bus::{Bus, LocalBus};
use crate::ports::clock::{Clock, SystemClock};
use crate::ports::core::{ApprovalSettings, Core, EngineLimits, ExecutionPolicies};
use crate::ports::engine_metrics;
use crate::ports::fn_tool::{BuiltinSource, Tool};
use crate::ports::model::{ModelResolver, NoModels};
use crate::ports::observer::Observer;
use crate::ports::source::{CallerSource, Source};
use crate::ports::store::{MemoryStore, Store};
use crate::ports::webhook_sender::{DeliverySettings, WebhookSender};
use crate::registry::catalog::{Catalog, CatalogEntry, RESULT_READ, RUN_FINISH};
use crate::registry::{Admin, AgentRoster, OperatorCredential, Projects, Registry, Upstreams};
use crate::runs::agents::AgentSource;
use crate::runs::context::{ListenerResult, ResultListener, ToolCall, ToolResult};
use crate::runs::finish::run_finish_tool;
use crate::runs::handoff::HandoffSource;
use crate::runs::read_result::{self, RunsHandle};
use crate::runs::{CallResults, Conversations, RunContexts, RunStreams, RunTrees, Runs};
use crate::utp::delegation::{Delegation, DelegationHandle, DelegationSource, WorkerSource};
use crate::utp::trees::AgentTrees;
use crate::utp::wakeups::WebhookWakeups;
use crate::utp::{Boxes, Cards, DeadLetters, Outbox, Utp, WrittenReports};
use crate::webhooks::Webhooks;
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
    approval_settings: ApprovalSettings,
    retention_ms: Option<u64>,
    audit_retention_ms: Option<u64>,
    publishes_outbox: bool,
    has_result_read: bool,
    has_run_finish: bool,
    webhook_sender: Option<Arc<dyn WebhookSender>>,
    webhook_settings: DeliverySettings,
    observer: Option<Arc<dyn Observer>>,
    tool_names_in_metrics: Option<bool>,
    authenticator: Option<Arc<dyn Authenticator>>,
    operator: Option<OperatorCredential>,
    models: Option<Arc<dyn ModelResolver>>,
    summary_model: Option<String>,
    model_request_policy: ModelRequestPolicy,
    tool_modes: ToolModeSettings,
    result_listeners: Vec<ResultListener>,
}

impl EngineBuilder {
    /// Sets the store. The default keeps everything in memory.
    pub fn store(mut self, store: Arc<dyn Store>) -> Self {
        self.store = Some(store);
        self
    }

    /// Sets the bus that carries wakeups. The default works within this process.
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
    /// [`Registry::tools`] lists it for an agent only if a rule names it.
    pub fn with_result_read_tool(mut self) -> Self {
        self.has_result_read = true;
        self
    }

    /// Adds the tool `run.finish`, with which a model ends its run with an answer and typed result
    /// fields. No other tool can then have this name. Every stored run offers it, and every
    /// other agent loop with tools; no list of tools contains it.
    pub fn with_run_finish_tool(mut self) -> Self {
        self.has_run_finish = true;
        self
    }

    /// Adds a source.
    pub fn source(mut self, source: Arc<dyn Source>) -> Self {
        self.sources.push(source);
        self
    }

    /// Sets the authenticator for callers without an API key. Every caller then needs a key or a
    /// token.
    pub fn authenticator(mut self, authenticator: Arc<dyn Authenticator>) -> Self {
        self.authenticator = Some(authenticator);
        self
    }

    /// Sets the operator token: its bearer may administer the server, with or without API keys.
    pub fn operator_credential(mut self, operator: OperatorCredential) -> Self {
        self.operator = Some(operator);
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
    pub fn model_request_policy(mut self, policy: ModelRequestPolicy) -> Self {
        self.model_request_policy = policy;
        self
    }

    /// Sets which tool definitions models receive.
    pub fn tool_modes(mut self, settings: ToolModeSettings) -> Self {
        self.tool_modes = settings;
        self
    }

    /// Adds a listener that receives the result of every tool call of the agent loops, also if it
    /// arrives late. If a listener fails or panics, the error is logged and the others still run.
    pub fn on_tool_call<F>(mut self, listener: F) -> Self
    where
        F: Fn(&ToolCall, &ToolResult) -> ListenerResult + Send + Sync + 'static,
    {
        self.result_listeners.push(Arc::new(listener));
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

    /// Replaces the default settings of approvals.
    pub fn approval_settings(mut self, settings: ApprovalSettings) -> Self {
        self.approval_settings = settings;
        self
    }

    /// Sets the sender of webhooks. Without one, the engine refuses requests with a callback URL.
    pub fn webhook_sender(
        mut self,
        notifier: Arc<dyn WebhookSender>,
        settings: DeliverySettings,
    ) -> Self {
        (self.webhook_sender, self.webhook_settings) = (Some(notifier), settings);
        self
    }

    /// Sets the time after which finished calls are deleted. By default they are never deleted.
    pub fn retention_ms(mut self, retention_ms: u64) -> Self {
        self.retention_ms = Some(retention_ms);
        self
    }

    /// Sets the time after which audit entries are deleted. By default they are never deleted.
    pub fn audit_retention_ms(mut self, retention_ms: u64) -> Self {
        self.audit_retention_ms = Some(retention_ms);
        self
    }

    /// Declares that a publisher drains the outbox. Only then are wakeups written to it.
    pub fn publishes_outbox(mut self, publishes: bool) -> Self {
        self.publishes_outbox = publishes;
        self
    }

    /// Sets the observer of attempts and calls. Without one, observation costs nothing.
    pub fn observer(mut self, observer: Arc<dyn Observer>) -> Self {
        self.observer = Some(observer);
        self
    }

    /// Sets whether metrics carry the names of projects' tools. By default they are recorded, and
    /// shown to the operator and to admin keys.
    pub fn tool_names_in_metrics(mut self, enabled: bool) -> Self {
        self.tool_names_in_metrics = Some(enabled);
        self
    }

    /// Builds an engine that adopts the store's open calls and runs its reconcilers.
    pub async fn start(self) -> Result<Engine, Error> {
        let (retention_ms, audit_retention_ms) = (self.retention_ms, self.audit_retention_ms);
        engine_metrics::register_counters();
        let engine = self.build_idle().await?;
        // Load before the first request: it may repeat one that an earlier process received.
        engine.parts.calls.rejoin.load().await?;
        engine.parts.calls.restore_rates().await?;
        engine.parts.approvals.load().await?;
        engine.parts.calls.dispatcher.limiter.begin_recovery();
        engine.parts.calls.dispatcher.is_recovering.store(true, Ordering::Release);
        spawn_reconcilers(&engine, retention_ms);
        if let Some(retention_ms) = audit_retention_ms {
            let pruning =
                maintenance::audit_retention::run(engine.parts.core.clone(), retention_ms);
            engine.parts.core.tasks.spawn(pruning);
        }
        Ok(engine)
    }

    /// Builds an engine without background work: for commands that only read or change the
    /// directory, and for tests that run the reconcilers by hand.
    pub async fn build_idle(mut self) -> Result<Engine, Error> {
        let core = self.build_core();
        let client_queue = Arc::new(ClientQueue::new(core.clock.clone()));
        let runs_handle = RunsHandle::default();
        let mut tools = self.tools;
        add_engine_tools(&mut tools, &runs_handle, self.has_result_read, self.has_run_finish);
        let agent_sources = AgentSources::default();
        let sources = collect_sources(tools, &client_queue, &agent_sources, self.sources)?;
        let shared_tools = collect_shared_tools(&sources)?;
        let core = Arc::new(core);
        let (operator, tool_names) = (self.operator, self.tool_names_in_metrics);
        let registry =
            Registry::new(core.clone(), shared_tools, self.authenticator, operator, tool_names);
        let registry = Arc::new(registry);
        let clients = Arc::new(Clients {
            core: core.clone(),
            registry: registry.clone(),
            client_queue: client_queue.clone(),
        });
        let dispatcher =
            Dispatcher::new(core.clone(), registry.clone(), client_queue.clone(), sources);
        let (dispatcher, calls, approvals) = build_calls(Arc::new(dispatcher));
        let webhook_queue = WebhookQueue::new(self.webhook_sender, self.webhook_settings);
        let (utp, webhooks) =
            build_ended_listeners(&calls, self.publishes_outbox, Arc::new(webhook_queue));
        let streams = Arc::new(RunStreams::new(&calls));
        let runs = Arc::new(Runs {
            core: core.clone(),
            registry: registry.clone(),
            dispatcher: dispatcher.clone(),
            calls: calls.clone(),
            models: self.models.unwrap_or_else(|| Arc::new(NoModels)),
            summary_model: self.summary_model,
            model_request_policy: self.model_request_policy,
            tool_modes: self.tool_modes,
            result_listeners: self.result_listeners,
            active_runs: streams.active_runs.clone(),
            trees: RunTrees::new(&registry, &streams, &utp),
            streams,
            utp: utp.clone(),
            contexts: Arc::new(RunContexts::new(&calls)),
            results: CallResults { calls: calls.clone() },
            conversations: Conversations::new(&core, &registry, &calls),
        });
        let delegation = agent_sources.connect(&runs);
        // The handle was created above, so this is its only `set`.
        let _ = runs_handle.set(Arc::downgrade(&runs));
        let (projects, upstreams, admin) = build_directory_parts(&registry);
        let roster = AgentRoster { core: core.clone(), registry: registry.clone() };
        let parts = EngineParts {
            core,
            registry,
            projects,
            roster: Arc::new(roster),
            upstreams,
            admin,
            clients,
            calls,
            approvals,
            utp,
            webhooks,
            runs,
            delegation,
        };
        let engine = Engine { parts: Arc::new(parts) };
        connect_listeners(&engine, client_queue);
        engine.parts.registry.reload_catalog().await?;
        dispatcher.apply_limit_changes();
        Ok(engine)
    }
}

impl EngineBuilder {
    /// Builds the state that the parts share.
    fn build_core(&mut self) -> Core {
        let clock = self.clock.take().unwrap_or_else(|| Arc::new(SystemClock::default()));
        let id_generator = IdGenerator::default();
        Core {
            store: self.store.take().unwrap_or_else(|| Arc::new(MemoryStore::default())),
            bus: self.bus.take().unwrap_or_else(|| Arc::new(LocalBus::default())),
            observer: self.observer.take(),
            webhook_sender: self.webhook_sender.clone(),
            node: id_generator.next_id("node_", clock.now_ms()),
            clock,
            id_generator,
            limits: std::mem::take(&mut self.limits),
            policies: std::mem::take(&mut self.policies),
            approval_settings: std::mem::take(&mut self.approval_settings),
            draining: AtomicBool::new(false),
            shutdown: CancellationToken::new(),
            tasks: TaskTracker::new(),
        }
    }
}

/// Registers the parts that follow changes of others.
fn connect_listeners(engine: &Engine, client_queue: Arc<ClientQueue>) {
    let dispatcher = &engine.parts.calls.dispatcher;
    let limiter = ClientWorkLimiter { dispatcher: Arc::downgrade(dispatcher) };
    client_queue.set_limiter(Arc::new(limiter));
    engine.parts.registry.set_listeners(vec![client_queue, dispatcher.clone()]);
}

/// The sources of agents and of the tools that hand work to them. They act through parts that are
/// built after the sources.
#[derive(Default)]
struct AgentSources {
    agents: Arc<AgentSource>,
    delegation: DelegationHandle,
}

impl AgentSources {
    /// Connects the sources with the parts that they act through.
    fn connect(self, runs: &Arc<Runs>) -> Arc<Delegation> {
        self.agents.set_runs(runs);
        self.agents.set_workers(WorkerSource::new(&runs.utp));
        let delegation = Arc::new(Delegation::new(&runs.utp));
        // The handle was created with this value, so this is its only `set`.
        let _ = self.delegation.set(Arc::downgrade(&delegation));
        delegation
    }
}

/// Builds the parts that change the directory.
fn build_directory_parts(registry: &Arc<Registry>) -> (Arc<Projects>, Arc<Upstreams>, Arc<Admin>) {
    let (core, registry) = (|| registry.core.clone(), || registry.clone());
    let projects = Projects { core: core(), registry: registry() };
    let upstreams = Upstreams { core: core(), registry: registry() };
    let admin = Admin { core: core(), registry: registry() };
    (Arc::new(projects), Arc::new(upstreams), Arc::new(admin))
}

/// Builds the parts that accept calls and decide about those that wait.
fn build_calls(dispatcher: Arc<Dispatcher>) -> (Arc<Dispatcher>, Arc<Calls>, Arc<Approvals>) {
    let (core, registry) = (dispatcher.core.clone(), dispatcher.registry.clone());
    let calls = Arc::new(Calls {
        core: core.clone(),
        registry: registry.clone(),
        dispatcher: dispatcher.clone(),
        rejoin: Arc::new(Rejoin::new(core.clone())),
    });
    let approvals =
        Approvals { core, registry, dispatcher: dispatcher.clone(), calls: calls.clone() };
    (dispatcher, calls, Arc::new(approvals))
}

/// Builds the parts that listen to ended calls, and connects them with the dispatcher.
fn build_ended_listeners(
    calls: &Arc<Calls>,
    publishes_outbox: bool,
    webhook_queue: Arc<WebhookQueue>,
) -> (Arc<Utp>, Arc<Webhooks>) {
    let cards = Arc::new(Cards::new(calls));
    let utp = Arc::new(Utp {
        core: calls.core.clone(),
        registry: calls.registry.clone(),
        dispatcher: calls.dispatcher.clone(),
        calls: calls.clone(),
        boxes: Boxes::new(&calls.core, &cards),
        cards,
        dead_letters: DeadLetters { core: calls.core.clone(), registry: calls.registry.clone() },
        outbox: Outbox { core: calls.core.clone(), registry: calls.registry.clone() },
        written_reports: WrittenReports { core: calls.core.clone() },
        publishes_outbox,
        trees: AgentTrees::new(&calls.core),
        wakeups: WebhookWakeups::new(calls.core.clone(), calls.registry.clone()),
        report_traceparents: Default::default(),
    });
    let webhooks =
        Arc::new(Webhooks { core: calls.core.clone(), calls: calls.clone(), webhook_queue });
    calls.dispatcher.set_ended_listeners(vec![utp.clone(), webhooks.clone()]);
    (utp, webhooks)
}

/// Adds the tools of the engine itself.
fn add_engine_tools(
    tools: &mut Vec<Arc<dyn Tool>>,
    handle: &RunsHandle,
    has_result_read: bool,
    has_run_finish: bool,
) {
    if has_result_read {
        tools.push(Arc::new(read_result::result_read_tool(handle.clone())));
    }
    if has_run_finish {
        tools.push(Arc::new(run_finish_tool(handle.clone())));
    }
}

/// Collects the engine's own sources and the given ones by executor; a given source replaces one of
/// the engine's.
fn collect_sources(
    tools: Vec<Arc<dyn Tool>>,
    client_queue: &Arc<ClientQueue>,
    agent_sources: &AgentSources,
    provided: Vec<Arc<dyn Source>>,
) -> Result<HashMap<Executor, Arc<dyn Source>>, Error> {
    check_unique_names(&tools)?;
    let functions: Arc<dyn Source> = Arc::new(BuiltinSource::new(tools));
    let builtin: [Arc<dyn Source>; 6] = [
        functions,
        client_queue.clone(),
        Arc::new(CallerSource),
        agent_sources.agents.clone(),
        Arc::new(DelegationSource::new(agent_sources.delegation.clone())),
        Arc::new(HandoffSource),
    ];
    Ok(builtin.into_iter().chain(provided).map(|source| (source.executor(), source)).collect())
}

/// Compiles the tools that the sources offer to every project.
fn collect_shared_tools(sources: &HashMap<Executor, Arc<dyn Source>>) -> Result<Catalog, Error> {
    let mut shared = HashMap::new();
    for definition in sources.values().flat_map(|source| source.list()) {
        check_tool_name(&definition.name)
            .map_err(|error| Error::refused(Code::ValidationError, error.to_string()))?;
        if is_mcp_helper_name(&definition.name) {
            return Err(Error::refused(Code::Conflict, helper_name_conflict(&definition.name)));
        }
        let name = definition.name.clone();
        let entry = Arc::new(CatalogEntry::compile(definition)?);
        if shared.insert(name.clone(), entry).is_some() {
            return Err(duplicate_name(&name));
        }
    }
    Ok(Catalog::new(shared))
}

/// Starts all reconcilers; they end when the engine shuts down.
fn spawn_reconcilers(engine: &Engine, retention_ms: Option<u64>) {
    let tasks = &engine.parts.core.tasks;
    tasks.spawn(maintenance::claim_queued::run(engine.parts.calls.clone()));
    tasks.spawn(maintenance::deadlines::run(engine.parts.calls.clone()));
    tasks.spawn(maintenance::client_leases::run(engine.parts.clients.clone()));
    tasks.spawn(maintenance::directory_refresh::run(engine.parts.registry.clone()));
    tasks.spawn(maintenance::credential_expiry::run(engine.parts.admin.clone()));
    tasks.spawn(maintenance::repeated_denials::run(engine.parts.registry.clone()));
    tasks.spawn(maintenance::standing_approvals::run(engine.parts.approvals.clone()));
    tasks.spawn(maintenance::turn_watchdog::run(engine.parts.utp.clone()));
    tasks.spawn(maintenance::orphaned_tasks::run(engine.parts.delegation.clone()));
    tasks.spawn(maintenance::wakeup_webhooks::run(engine.parts.utp.clone()));
    tasks.spawn(maintenance::revocations::run(engine.parts.calls.clone()));
    tasks.spawn(maintenance::switches::run(engine.parts.calls.clone(), engine.parts.runs.clone()));
    if engine.parts.core.webhook_sender.is_some() {
        tasks.spawn(crate::approvals::webhook::run(engine.parts.approvals.clone()));
        tasks.spawn(crate::webhooks::dispatcher::run(engine.parts.webhooks.clone()));
    }
    if let Some(retention_ms) = retention_ms {
        tasks.spawn(maintenance::purge::run(engine.parts.calls.clone(), retention_ms));
    }
    let (calls, runs) = (engine.parts.calls.clone(), engine.parts.runs.clone());
    tasks.spawn(async move { maintenance::recover_until_done(&calls, &runs).await });
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
    let option = match name {
        RESULT_READ => Some("with_result_read_tool()"),
        RUN_FINISH => Some("with_run_finish_tool()"),
        _ => None,
    };
    if let Some(option) = option {
        let hint = format!("; one is the engine's own: rename yours, or build without {option}");
        message.push_str(&hint);
    }
    Error::refused(Code::Conflict, message)
}
