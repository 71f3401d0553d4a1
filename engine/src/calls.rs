//! The life of a call: accepting, validating, committing, attempting, reporting, waiting.
//!
//! `accept` takes a call in, `commit` is the only writer of calls after that, and
//! [`crate::lifecycle::step`] is the only place that decides a status.

pub(crate) mod accept;
pub(crate) mod attempt;
pub mod batch;
pub(crate) mod commit;
pub(crate) mod dependents;
pub(crate) mod detach_on_drop;
pub(crate) mod limiter;
pub(crate) mod observer;
pub(crate) mod open_calls;
pub(crate) mod recover;
pub(crate) mod rejoin;
pub(crate) mod report;
pub(crate) mod request;
pub(crate) mod speculative_read;
pub(crate) mod target;
pub(crate) mod wait;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, OnceLock};

use commit::approval_index::ApprovalIndex;
use dependents::Dependents;
use futures::future::BoxFuture;
use limiter::ConcurrencyLimiter;
use observer::CallTelemetry;
use open_calls::OpenCalls;
use rejoin::Rejoin;
use target::{SlotLimits, TargetBuilder};
use tokio::sync::Notify;
use tokio_util::task::TaskTracker;

use crate::clients::queue::ClientQueue;
use crate::domain::call::{Call, Hold, Status};
use crate::domain::tool::availability::{ToolAvailability, last_seen_text};
use crate::domain::tool::{Executor, ToolDefinition};
use crate::ports::core::Core;
use crate::ports::source::Source;
use crate::registry::catalog::Catalog;
use crate::registry::{DirectoryListener, Registry};

pub use accept::Ticket;
pub use batch::{Batch, BatchAnswer, BatchEntryResult, BatchEntryState, BatchMode};
pub use open_calls::LimitStatus;
pub use rejoin::PendingDelivery;
pub use report::AttemptReport;
pub use request::{CallRequest, duplicate_key_error};
pub use wait::{CallEventPage, CallPage, CallQuery, CallRef, EventQuery, Until};

/// Accepts, reports, cancels, reads and waits for calls.
pub struct Calls {
    pub(crate) core: Arc<Core>,
    pub(crate) registry: Arc<Registry>,
    pub(crate) dispatcher: Arc<Dispatcher>,
    pub(crate) rejoin: Arc<Rejoin>,
}

/// Applies events to calls, commits them, and performs the actions that follow: the one path of an
/// accepted call to its outcome.
pub struct Dispatcher {
    pub(crate) core: Arc<Core>,
    pub(crate) registry: Arc<Registry>,
    pub(crate) client_queue: Arc<ClientQueue>,
    pub(crate) sources: Arc<HashMap<Executor, Arc<dyn Source>>>,
    pub(crate) targets: TargetBuilder,
    pub(crate) slot_limits: SlotLimits,
    pub(crate) telemetry: CallTelemetry,
    pub(crate) open_calls: OpenCalls,
    pub(crate) dependents: Dependents,
    pub(crate) limiter: Arc<ConcurrencyLimiter>,
    /// Tasks of the attempts that run in this process.
    pub(crate) attempts: TaskTracker,
    /// True once recovery has decided about every call that was open at startup.
    pub(crate) recovered: AtomicBool,
    /// The clock's `wall_offset_ms`, as last recorded.
    pub(crate) wall_offset_ms: AtomicI64,
    /// True from the start until the open calls of the store are in memory.
    pub(crate) is_recovering: AtomicBool,
    pub(crate) approval_index: ApprovalIndex,
    /// Notified when a call has begun to wait for an approval.
    pub(crate) approval_requested: Notify,
    /// Set once, when the parts that follow ended calls exist.
    ended_listeners: OnceLock<Vec<Arc<dyn EndedCallListener>>>,
}

/// A part of the engine that acts when a call has ended. The outcome is committed; if the process
/// stops before a listener is done, that part's reconciler does the work later.
pub(crate) trait EndedCallListener: Send + Sync {
    /// Returns the work to do for this call, or `None`, as for most calls.
    fn call_ended<'a>(&'a self, call: &'a Arc<Call>) -> Option<BoxFuture<'a, ()>>;
}

impl Dispatcher {
    pub(crate) fn new(
        core: Arc<Core>,
        registry: Arc<Registry>,
        client_queue: Arc<ClientQueue>,
        sources: HashMap<Executor, Arc<dyn Source>>,
    ) -> Self {
        let wall_offset_ms = AtomicI64::new(core.clock.wall_offset_ms());
        let sources = Arc::new(sources);
        Self {
            targets: TargetBuilder { core: core.clone(), sources: sources.clone() },
            slot_limits: SlotLimits { core: core.clone(), registry: registry.clone() },
            telemetry: CallTelemetry { core: core.clone(), registry: registry.clone() },
            core,
            registry,
            client_queue,
            sources,
            open_calls: OpenCalls::default(),
            dependents: Dependents::default(),
            limiter: Arc::new(ConcurrencyLimiter::default()),
            attempts: TaskTracker::new(),
            recovered: AtomicBool::new(false),
            wall_offset_ms,
            is_recovering: AtomicBool::new(false),
            approval_index: ApprovalIndex::default(),
            approval_requested: Notify::new(),
            ended_listeners: OnceLock::new(),
        }
    }

    /// Registers the parts that follow ended calls. Later calls have no effect.
    pub(crate) fn set_ended_listeners(&self, listeners: Vec<Arc<dyn EndedCallListener>>) {
        let _ = self.ended_listeners.set(listeners);
    }

    fn ended_listeners(&self) -> &[Arc<dyn EndedCallListener>] {
        self.ended_listeners.get().map_or(&[], Vec::as_slice)
    }
}

impl DirectoryListener for Dispatcher {
    fn directory_changed(&self) {
        self.apply_limit_changes();
        self.limiter.recheck_queues();
    }
}

impl Calls {
    /// Returns true once recovery has decided about every call that was open at startup.
    pub fn is_recovered(&self) -> bool {
        self.dispatcher.recovered.load(Ordering::Acquire)
    }

    /// Returns the number of calls without an outcome.
    pub fn open_call_count(&self) -> usize {
        self.dispatcher.open_calls.len()
    }

    /// Returns the number of calls without an outcome, by state.
    pub fn open_calls_by_state(&self) -> [(&'static str, usize); 7] {
        self.dispatcher.open_calls.count_by_state()
    }

    /// Returns the number of calls queued for a free slot.
    pub fn queued_call_count(&self) -> usize {
        self.dispatcher.limiter.queued_count()
    }

    /// Returns the age of the oldest open call, or 0 if no call is open.
    pub fn oldest_open_call_age_ms(&self) -> u64 {
        let oldest_ms = self.dispatcher.open_calls.oldest_created_ms();
        oldest_ms.map_or(0, |oldest_ms| self.core.wall_ms().saturating_sub(oldest_ms))
    }

    /// Returns whether a tool of this project can be executed now, and by which clients.
    pub fn tool_availability(&self, project: &str, tool: &ToolDefinition) -> ToolAvailability {
        self.availability(project, &tool.name, tool.executor)
    }

    /// Describes what a call waits for: the approval of a person, or an executor that is absent, is
    /// switched off or has not acknowledged the call. Returns `None` if the call waits for neither.
    pub fn describe_hold(&self, call: &Call) -> Option<String> {
        if let Some(id) = call.pending_approval() {
            return Some(format!(
                "waiting for a person's approval: POST /v1/approvals/decide, or on the command \
                 line: toolcrib approvals approve {id}"
            ));
        }
        let is_untaken = matches!(call.hold, Some(Hold::Queue | Hold::Unacknowledged));
        if call.status != Status::Pending || !is_untaken {
            return None;
        }
        let (tool, executor) = (&call.target.tool, call.target.executor);
        if let (Some(client_id), Executor::CLIENT) = (&call.origin.client_id, executor) {
            let client = self.dispatcher.client_queue.tool_client(&call.project, client_id);
            return Some(match client.is_connected {
                true => format!("waiting for client {client_id} to take {tool}"),
                false => {
                    let seen = last_seen_text(&client, self.core.now_ms());
                    format!("waiting for client {client_id}, which is not connected; {seen}")
                }
            });
        }
        let availability = self.availability(&call.project, tool, executor);
        match (availability.problem, call.hold) {
            (Some(problem), _) => Some(format!("waiting: {problem}")),
            (None, Some(Hold::Unacknowledged)) => {
                Some(format!("waiting for an executor of {tool} to take the call"))
            }
            (None, _) => None,
        }
    }

    fn availability(&self, project: &str, tool: &str, executor: Executor) -> ToolAvailability {
        let catalog = self.registry.catalog();
        if let Some(switch) = catalog.switches().find_for_tool(project, tool, executor) {
            let problem = Some(switch.describe());
            return ToolAvailability {
                problem,
                ..self.executor_availability(&catalog, project, tool, executor)
            };
        }
        self.executor_availability(&catalog, project, tool, executor)
    }

    /// Returns whether an executor of a tool can take a call, regardless of switches.
    fn executor_availability(
        &self,
        catalog: &Catalog,
        project: &str,
        tool: &str,
        executor: Executor,
    ) -> ToolAvailability {
        if executor == Executor::CLIENT {
            let clients = catalog.offered_by(project, tool).iter();
            let clients = clients.map(|id| self.dispatcher.client_queue.tool_client(project, id));
            return ToolAvailability::of_clients(tool, clients.collect(), self.core.now_ms());
        }
        let source = self.dispatcher.sources.get(&executor);
        let problem = source.and_then(|source| source.unavailable_reason(project, tool));
        ToolAvailability { problem, clients: Vec::new() }
    }
}
