//! The state that every part of the engine shares: the ports, the limits and the identity of this
//! process. A part adds what only it needs.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::bus::Bus;
use super::clock::Clock;
use super::observer::Observer;
use super::store::{Store, StoreError};
use super::webhook_sender::WebhookSender;
use crate::domain::call::approval::DEFAULT_EXPIRES_IN_MS;
use crate::domain::directory::usage_limits::ConfiguredLimit;
use crate::domain::fault::{Code, Error};
use crate::domain::id::IdGenerator;
use crate::domain::retry::{ExecutionPolicy, ExecutionPolicyPatch};
use crate::domain::tool::{Fallback, Risk, ToolDefinition};

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
    /// Maximum number of agents that one run may have called and that have not ended.
    pub max_child_runs: usize,
    /// Maximum number of stored boxes of cards of one project.
    pub max_boxes_per_project: usize,
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
            max_child_runs: 64,
            max_boxes_per_project: 100_000,
        }
    }
}

/// Execution policies set by the operator: global, per project and per tool.
#[derive(Debug, Clone, Default)]
pub struct ExecutionPolicies {
    /// Base policy of every call.
    pub global: ExecutionPolicy,
    /// Changes to the base policy, by project.
    pub projects: HashMap<String, ExecutionPolicyPatch>,
    /// Changes by tool name; they take precedence over the tool's definition.
    pub tools: HashMap<String, ToolOverride>,
    /// Usage limits that hold in every project, in addition to the stored ones.
    pub limits: Vec<ConfiguredLimit>,
}

impl ExecutionPolicies {
    /// Returns the policy of a tool's calls: the base policy with the changes of the project, of
    /// the definition and of the operator's settings for the tool, in this order.
    pub(crate) fn resolve(&self, project: &str, definition: &ToolDefinition) -> ExecutionPolicy {
        let mut policy = self.global.clone();
        if let Some(patch) = self.projects.get(project) {
            policy = policy.with_patch(patch);
        }
        policy = policy.with_patch(&definition.policy);
        if let Some(tool_override) = self.tools.get(&definition.name) {
            let tool_limit = policy.max_parallel;
            policy = policy.with_patch(&tool_override.policy);
            policy.max_parallel = policy.max_parallel.or(tool_limit);
        }
        policy
    }
}

/// Policy and fallback tools that the operator set for one tool.
#[derive(Debug, Clone, Default)]
pub struct ToolOverride {
    /// Settings that replace those of the definition and the project.
    pub policy: ExecutionPolicyPatch,
    /// Fallback tools, in order; an empty list leaves those of the definition.
    pub fallback: Vec<Fallback>,
    /// Risk in place of the definition's.
    pub risk: Option<Risk>,
}

/// Settings of approvals.
#[derive(Debug, Clone)]
pub struct ApprovalSettings {
    /// Time after which an approval expires without a decision, unless its rule sets another.
    pub expires_in_ms: u64,
    /// URL that receives a signed webhook for each requested approval.
    pub webhook_url: Option<String>,
    /// URL of this server as people reach it, for links to approvals.
    pub public_url: Option<String>,
}

impl Default for ApprovalSettings {
    fn default() -> Self {
        Self { expires_in_ms: DEFAULT_EXPIRES_IN_MS, webhook_url: None, public_url: None }
    }
}

impl ApprovalSettings {
    /// Returns the link to an approval: a URL if the server knows its own, otherwise the path.
    pub fn link(&self, approval_id: &str) -> String {
        let base = self.public_url.as_deref().unwrap_or_default().trim_end_matches('/');
        format!("{base}/v1/approvals/{approval_id}")
    }
}

/// Ports, limits and identity, shared by all parts of one engine.
pub(crate) struct Core {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) bus: Arc<dyn Bus>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) observer: Option<Arc<dyn Observer>>,
    /// Sends webhooks. Without it, callback URLs are refused.
    pub(crate) webhook_sender: Option<Arc<dyn WebhookSender>>,
    pub(crate) id_generator: IdGenerator,
    pub(crate) limits: EngineLimits,
    pub(crate) policies: ExecutionPolicies,
    pub(crate) approval_settings: ApprovalSettings,
    /// Id of this process. A restart gets a new one.
    pub(crate) node: String,
    pub(crate) draining: AtomicBool,
    pub(crate) shutdown: CancellationToken,
    /// Tasks of the reconcilers.
    pub(crate) tasks: TaskTracker,
}

impl Core {
    /// Returns the time that waits and leases use; see [`Clock::now_ms`].
    pub(crate) fn now_ms(&self) -> u64 {
        self.clock.now_ms()
    }

    /// Returns the time of day, in Unix milliseconds; see [`Clock::wall_ms`].
    pub(crate) fn wall_ms(&self) -> u64 {
        self.clock.wall_ms()
    }

    /// Returns true if the engine is shutting down and accepts no more calls.
    pub(crate) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }
}

/// Converts a store error. An unavailable store is logged and reported to the caller as
/// `overloaded`; corrupt data is an internal error.
pub(crate) fn from_store_error(error: StoreError) -> Error {
    match error {
        StoreError::Unavailable(reason) => {
            tracing::error!(why = %reason, "the store is not available");
            let message = "the store cannot be used now; nothing was done, a retry is safe";
            Error::retry_later(Code::Overloaded, message, 1_000)
        }
        StoreError::OutcomeUnknown(reason) => {
            tracing::error!(why = %reason, "it is unknown if a change was stored");
            let message = "the store failed while it wrote this request: it is unknown if it was \
                           accepted, and it may still be executed after a restart; a repeated \
                           request joins it then";
            Error::refused(Code::OutcomeUnknown, message)
        }
        corrupt @ StoreError::Corrupt(_) => Error::Internal(Box::new(corrupt)),
    }
}

/// Converts the failure of a blocking task into an internal error.
pub(crate) fn from_join_error(error: tokio::task::JoinError) -> Error {
    Error::Internal(Box::new(error))
}
