//! The engine: the API that every transport calls and that drives every source.
//!
//! Every call takes the same path. A transport builds a [`Caller`](crate::Caller) and a
//! [`CallRequest`]; [`Engine::invoke`] validates and commits the call and returns a ticket; the
//! engine starts the attempt at its source; the attempt's report goes through
//! [`crate::lifecycle::step`] in `advance`, the only writer of calls; then waiters are woken. The
//! store is the source of truth: everything held in memory here can be rebuilt from it.

mod builder;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::RwLock;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::clients::queue::ClientQueue;
use crate::domain::caller::Authenticator;
use crate::domain::fault::{Code, Error};
use crate::domain::id::IdGenerator;
use crate::domain::retry::{ExecutionPolicy, ExecutionPolicyPatch};
use crate::domain::tool::{Executor, Fallback};
use crate::ports::bus::Bus;
use crate::ports::clock::Clock;
use crate::ports::model::ModelResolver;
use crate::ports::observer::Observer;
use crate::ports::source::Source;
use crate::ports::store::{Store, StoreError};
use crate::runs::agent_loop::ModelRequestPolicy;

pub(crate) use crate::calls::accept::BatchMembership;
pub use crate::calls::accept::{CallRequest, Ticket};
pub use crate::calls::report::AttemptReport;
pub use crate::calls::wait::{CallPage, CallQuery, EventQuery};
pub use crate::clients::connections::ConnectOptions;
pub use crate::ports::store::utp::{ReportDisposition, SharedTableReport};
pub use crate::registry::catalog::{Catalog, CatalogEntry, ClientRegistration};
pub use crate::registry::keys::{CreatedKey, NewKey};
pub use crate::registry::projects::{DEFAULT_PROJECT, check_array_items};
pub use crate::registry::search::ToolMatch;
pub use crate::runs::caller_executed::{MAX_RECORDED, ReportedCall, ReportedResult};
pub use crate::runs::lifecycle::{
    ReplayDifference, ReplayReport, RunDelta, RunPage, RunQuery, RunRequest, RunSubscription,
    StartedRun,
};
pub use crate::runs::read_result::{RESULT_READ, ResultForModel};
pub use crate::runs::run_context::{CONTEXT_CALL_LIMITS, MessageFormat, RunToolSelection};
pub use crate::runs::saved_conversation::SavedConversation;
pub use crate::utp::reports::{
    ReportReceipt, ReportRejection, ToolServiceReport, UnprocessableMessage,
};
pub use crate::utp::turns::{
    DispatchRequest, DispatchedStep, ResumedTurn, StepCallRequest, StepResult, TurnLeaseRequest,
};
pub use crate::webhooks::queue::{DeliveryPage, DeliveryQuery};
pub use builder::EngineBuilder;

use crate::calls::dependents::Dependents;
use crate::calls::limiter::ConcurrencyLimiter;
use crate::calls::open_calls::OpenCalls;
use crate::registry::search::SearchIndexes;
use crate::webhooks::queue::WebhookQueue;
pub(crate) use crate::webhooks::queue::{DeliveryAdmission, DeliverySlot};

/// Limits on everything that can grow without bound.
#[derive(Debug, Clone)]
pub struct EngineLimits {
    /// Maximum size of the arguments of one call.
    pub max_args_bytes: usize,
    /// Maximum size of the result of one call.
    pub max_result_bytes: usize,
    /// Maximum number of calls without an outcome, over all projects.
    pub max_open_calls: usize,
    /// Maximum number of calls without an outcome, per project.
    pub max_open_calls_per_project: usize,
    /// Maximum time a request waits for an outcome.
    pub max_wait_ms: u64,
    /// Maximum number of progress events stored for one call.
    pub max_progress_events: u32,
    /// Maximum number of tools in one registration.
    pub max_tools_per_registration: usize,
    /// Maximum number of tools of one project.
    pub max_tools_per_project: usize,
    /// Maximum number of registered clients of one project, connected or not.
    pub max_clients_per_project: usize,
    /// Maximum number of entries in one batch.
    pub max_batch_entries: usize,
    /// Maximum number of entries of one batch that run at the same time.
    pub max_batch_parallel: usize,
    /// Maximum total size of the results in one batch's response. Results beyond it are omitted and
    /// can be fetched by their ticket.
    pub max_batch_bytes: usize,
    /// Maximum number of runs that have not ended.
    pub max_open_runs: usize,
}

impl Default for EngineLimits {
    fn default() -> Self {
        Self {
            max_args_bytes: 1 << 20,
            max_result_bytes: 8 << 20,
            max_open_calls: 50_000,
            max_open_calls_per_project: 20_000,
            max_wait_ms: 60_000,
            max_progress_events: 1_000,
            max_tools_per_registration: 1_000,
            max_tools_per_project: 10_000,
            max_clients_per_project: 20_000,
            max_batch_entries: 256,
            max_batch_parallel: 128,
            max_batch_bytes: 32 << 20,
            max_open_runs: 10_000,
        }
    }
}

/// Execution policies set by the operator: global, per project and per tool.
#[derive(Debug, Clone, Default)]
pub struct ExecutionPolicies {
    pub global: ExecutionPolicy,
    pub projects: HashMap<String, ExecutionPolicyPatch>,
    pub tools: HashMap<String, ToolOverride>,
}

/// Policy and fallback tools that the operator set for one tool.
#[derive(Debug, Clone, Default)]
pub struct ToolOverride {
    pub policy: ExecutionPolicyPatch,
    pub fallback: Vec<Fallback>,
}

/// The engine. Cloning is cheap; all clones share one state.
#[derive(Clone)]
pub struct Engine {
    pub(crate) core: Arc<Core>,
}

pub(crate) struct Core {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) bus: Arc<dyn Bus>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) sources: HashMap<Executor, Arc<dyn Source>>,
    pub(crate) client_queue: Arc<ClientQueue>,
    pub(crate) catalog: RwLock<Arc<Catalog>>,
    pub(crate) search_indexes: SearchIndexes,
    /// Authenticates callers that have no API key.
    pub(crate) authenticator: Option<Arc<dyn Authenticator>>,
    pub(crate) models: Arc<dyn ModelResolver>,
    /// Name of the model that summarizes long results.
    pub(crate) summary_model: Option<String>,
    pub(crate) model_request_policy: ModelRequestPolicy,
    /// Serializes directory changes made by this process.
    pub(crate) directory_lock: tokio::sync::Mutex<()>,
    pub(crate) open_calls: OpenCalls,
    pub(crate) dependents: Dependents,
    pub(crate) active_runs: crate::runs::lifecycle::ActiveRuns,
    pub(crate) limiter: Arc<ConcurrencyLimiter>,
    pub(crate) webhook_queue: Arc<WebhookQueue>,
    pub(crate) id_generator: IdGenerator,
    pub(crate) limits: EngineLimits,
    pub(crate) policies: ExecutionPolicies,
    /// Id of this process. A restart gets a new one.
    pub(crate) node: String,
    /// True if a publisher drains the outbox.
    pub(crate) publishes_outbox: bool,
    /// Trace contexts of the reports that are being processed, by call.
    pub(crate) report_traceparents: parking_lot::Mutex<HashMap<crate::domain::id::CallId, String>>,
    /// Set if metrics must, or must not, carry the names of projects' tools. By default they do as
    /// long as no API key exists.
    pub(crate) tool_names_in_metrics: Option<bool>,
    pub(crate) observer: Option<Arc<dyn Observer>>,
    pub(crate) draining: AtomicBool,
    pub(crate) recovered: AtomicBool,
    pub(crate) shutdown: CancellationToken,
    /// Tasks of the attempts that run in this process.
    pub(crate) attempts: TaskTracker,
    /// Tasks of the reconcilers.
    pub(crate) tasks: TaskTracker,
}

impl Engine {
    /// Returns a builder for an engine.
    pub fn builder() -> EngineBuilder {
        EngineBuilder::default()
    }

    /// Returns the language models that are configured.
    pub fn models(&self) -> &Arc<dyn ModelResolver> {
        &self.core.models
    }

    /// Returns the default policy for model requests and their retries.
    pub fn model_request_policy(&self) -> &ModelRequestPolicy {
        &self.core.model_request_policy
    }

    /// Returns the limits in force.
    pub fn limits(&self) -> &EngineLimits {
        &self.core.limits
    }

    /// Returns the time of the engine's clock, in Unix milliseconds.
    pub fn now_ms(&self) -> u64 {
        self.core.clock.now_ms()
    }

    /// Returns true once the engine has adopted every call that was open at startup.
    pub fn is_recovered(&self) -> bool {
        self.core.recovered.load(Ordering::Acquire)
    }

    /// Returns true if the engine is shutting down and accepts no more calls.
    pub fn is_draining(&self) -> bool {
        self.core.draining.load(Ordering::Acquire)
    }

    /// Checks that the store can be read and written.
    pub async fn check_store(&self) -> Result<(), Error> {
        self.core.store.check_health().await.map_err(from_store_error)
    }

    /// Returns the health of each source's dependencies, ordered by name.
    pub fn sources_health(&self) -> Vec<crate::ports::source::SourceHealth> {
        let mut all: Vec<_> = self.core.sources.values().filter_map(|s| s.health()).collect();
        all.sort_by_key(|health| health.name);
        all
    }

    /// Returns the size of the store.
    pub async fn store_size_bytes(&self) -> Result<u64, Error> {
        self.core.store.size_bytes().await.map_err(from_store_error)
    }

    /// Returns the number of calls without an outcome.
    pub fn open_call_count(&self) -> usize {
        self.core.open_calls.len()
    }

    /// Returns the number of calls without an outcome, by state.
    pub fn open_calls_by_state(&self) -> [(&'static str, usize); 6] {
        self.core.open_calls.count_by_state()
    }

    /// Returns the number of calls queued for a free slot.
    pub fn queued_call_count(&self) -> usize {
        self.core.limiter.queued_count()
    }

    /// Returns the age of the oldest open call, or 0 if no call is open.
    pub fn oldest_open_call_age_ms(&self) -> u64 {
        let now_ms = self.core.clock.now_ms();
        self.core
            .open_calls
            .oldest_created_ms()
            .map_or(0, |oldest_ms| now_ms.saturating_sub(oldest_ms))
    }

    /// Stops accepting work and waits, at most `limit`, for attempts that run in this process. The
    /// next start finds and settles the calls that have not finished by then.
    pub async fn shut_down(&self, limit: std::time::Duration) {
        self.core.draining.store(true, Ordering::Release);
        self.core.attempts.close();
        let _ = tokio::time::timeout(limit, self.core.attempts.wait()).await;
        self.core.shutdown.cancel();
        self.core.client_queue.close();
        self.core.tasks.close();
        self.core.tasks.wait().await;
    }
}

/// Converts a store error. An unavailable store is logged and reported to the caller as
/// `overloaded`; corrupt data is an internal error.
pub(crate) fn from_store_error(error: StoreError) -> Error {
    match error {
        StoreError::Unavailable(why) => {
            tracing::error!(%why, "the store is not available");
            let message = "the store cannot be used now; nothing was done, a retry is safe";
            Error::retry_later(Code::Overloaded, message, 1_000)
        }
        corrupt @ StoreError::Corrupt(_) => Error::Internal(Box::new(corrupt)),
    }
}

/// Converts the failure of a blocking task into an internal error.
pub(crate) fn from_join_error(error: tokio::task::JoinError) -> Error {
    Error::Internal(Box::new(error))
}
