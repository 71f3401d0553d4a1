//! The engine: what every door calls and what drives every source.
//!
//! One call, one path: a door makes a [`Caller`](crate::Caller) and an [`Invocation`];
//! [`Engine::invoke`] checks, commits and answers with a ticket; the attempt is started at its
//! source; its report goes through [`crate::lifecycle::step`] in `advance`, the only writer of
//! calls; waiters are woken. The store is the truth, and everything kept in memory here can be made
//! again from it.

mod admin;
mod advance;
mod ahead;
mod arguments;
mod attempt;
mod behind;
mod builder;
mod cards;
mod catalog;
mod contexts;
mod counts;
mod envelope;
mod gate;
mod inbox;
mod ingest;
mod ingress;
mod invoke;
mod live;
mod loops;
pub(crate) mod measure;
mod notices;
mod observing;
mod offered;
mod permit;
mod projects;
mod record;
mod recover;
mod report;
mod result;
mod search;
mod surely;
mod target;
mod threads;
mod turns;
mod upstreams;
mod wait;
mod written;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::RwLock;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::bus::Bus;
use crate::caller::Recognise;
use crate::clock::Clock;
use crate::desk::Desk;
use crate::fault::{Code, Error};
use crate::id::Minter;
use crate::model::Models;
use crate::observe::Observer;
use crate::retry::{ExecutionPolicy, PolicyPatch};
use crate::source::Source;
use crate::store::{Store, StoreError};
use crate::tool::{Alternate, Executor};
use crate::turn::Asking;

pub use crate::store::utp::{Judged, WrittenReport};
pub use admin::{NewKey, ShownKey};
pub use builder::Builder;
pub use catalog::{Catalog, Entry as CatalogEntry, Registration};
pub use contexts::{CONTEXT_CALLS, RunTools, Style};
pub use ingest::{Ingested, Rejected, ToolReport, Unreadable};
pub use ingress::Connecting;
pub(crate) use invoke::Among;
pub use invoke::{Invocation, Ticket};
pub use loops::{Difference, LiveNote, NewRun, Replayed, RunNews, RunPage, RunQuery, StartedRun};
pub use notices::{DeliveryPage, DeliveryQuery};
pub use projects::{DEFAULT_PROJECT, check_arrays};
pub use record::{MAX_RECORDED, OwnCall, OwnResult};
pub use report::Report;
pub use result::{Given, RESULT_READ};
pub use search::Found;
pub use threads::Thread;
pub use turns::{Dispatch, Dispatched, Lease, Resumed, StepCall, StepResult};
pub use wait::{CallPage, CallQuery, EventQuery};

use behind::Behind;
use gate::Gate;
use live::Live;
use notices::Notices;
pub(crate) use notices::{Entered, Lane};
use search::Indexes;

/// A limit on everything that could grow.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Arguments of one call.
    pub max_args_bytes: usize,
    /// Result of one call.
    pub max_result_bytes: usize,
    /// Calls that have not ended, of all projects together.
    pub max_open_calls: usize,
    /// Calls that have not ended, of one project.
    pub max_open_calls_per_project: usize,
    /// The longest a request may wait for an outcome.
    pub max_wait_ms: u64,
    /// Progress events that are kept of one call.
    pub max_progress_events: u32,
    /// Tools in one registration.
    pub max_tools_per_registration: usize,
    /// Tools of one project.
    pub max_tools_per_project: usize,
    /// Clients of one project that have ever registered.
    pub max_clients_per_project: usize,
    /// Entries of one batch.
    pub max_batch_entries: usize,
    /// Entries of one batch that are under way at the same time.
    pub max_batch_parallel: usize,
    /// Results of one batch, together; what is over it is fetched by its ticket.
    pub max_batch_bytes: usize,
    /// Runs that are not over.
    pub max_open_runs: usize,
}

impl Default for Limits {
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

/// What the operator configured about execution.
#[derive(Debug, Clone, Default)]
pub struct Policies {
    pub global: ExecutionPolicy,
    pub projects: HashMap<String, PolicyPatch>,
    pub tools: HashMap<String, ToolOverride>,
}

/// What the operator configured about one tool.
#[derive(Debug, Clone, Default)]
pub struct ToolOverride {
    pub policy: PolicyPatch,
    pub fallback: Vec<Alternate>,
}

/// The engine. Cheap to clone; all clones are the same engine.
#[derive(Clone)]
pub struct Engine {
    pub(crate) inner: Arc<Inner>,
}

pub(crate) struct Inner {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) bus: Arc<dyn Bus>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) sources: HashMap<Executor, Arc<dyn Source>>,
    pub(crate) desk: Arc<Desk>,
    pub(crate) catalog: RwLock<Arc<Catalog>>,
    pub(crate) indexes: Indexes,
    /// Who knows callers that have no key.
    pub(crate) recognise: Option<Arc<dyn Recognise>>,
    pub(crate) models: Arc<dyn Models>,
    /// The model that summarises long results.
    pub(crate) summaries: Option<String>,
    pub(crate) asking: Asking,
    /// One change to the directory at a time from this process.
    pub(crate) changing: tokio::sync::Mutex<()>,
    pub(crate) live: Live,
    pub(crate) behind: Behind,
    pub(crate) loops: loops::Loops,
    pub(crate) gate: Arc<Gate>,
    pub(crate) notices: Arc<Notices>,
    pub(crate) minter: Minter,
    pub(crate) limits: Limits,
    pub(crate) policies: Policies,
    /// This process, told apart from the one before a restart.
    pub(crate) node: String,
    /// Whether somebody publishes what is in the outbox.
    pub(crate) publishes: bool,
    /// The traces that reports under way come out of.
    pub(crate) inbound: parking_lot::Mutex<HashMap<crate::id::CallId, String>>,
    /// Whether the metrics name projects' tools; unless said, while there are no keys.
    pub(crate) tool_names: Option<bool>,
    pub(crate) observer: Option<Arc<dyn Observer>>,
    pub(crate) draining: AtomicBool,
    pub(crate) recovered: AtomicBool,
    pub(crate) stopping: CancellationToken,
    /// Attempts that run in this process.
    pub(crate) attempts: TaskTracker,
    /// Reconcilers.
    pub(crate) tasks: TaskTracker,
}

impl Engine {
    /// Puts an engine together.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// The language models there are.
    pub fn models(&self) -> &Arc<dyn Models> {
        &self.inner.models
    }

    /// How models are asked, and asked again, where nobody says otherwise.
    pub fn asking(&self) -> &Asking {
        &self.inner.asking
    }

    /// The limits in force.
    pub fn limits(&self) -> &Limits {
        &self.inner.limits
    }

    /// Unix milliseconds, by the engine's clock.
    pub fn now_ms(&self) -> u64 {
        self.inner.clock.now_ms()
    }

    /// Whether everything found open at the start is in hand again.
    pub fn recovered(&self) -> bool {
        self.inner.recovered.load(Ordering::Acquire)
    }

    /// Whether no more calls are taken because the engine is being shut down.
    pub fn is_draining(&self) -> bool {
        self.inner.draining.load(Ordering::Acquire)
    }

    /// Whether the store can be read and written now.
    pub async fn check_store(&self) -> Result<(), Error> {
        self.inner.store.check().await.map_err(unavailable)
    }

    /// How that is which the sources depend on.
    pub fn sources_health(&self) -> Vec<crate::source::Health> {
        let mut all: Vec<_> = self.inner.sources.values().filter_map(|s| s.health()).collect();
        all.sort_by_key(|health| health.name);
        all
    }

    /// How much room the store takes.
    pub async fn store_size_bytes(&self) -> Result<u64, Error> {
        self.inner.store.size_bytes().await.map_err(unavailable)
    }

    /// Calls that have not ended.
    pub fn open_calls(&self) -> usize {
        self.inner.live.len()
    }

    /// Calls that have not ended, by what they are doing.
    pub fn open_calls_by_state(&self) -> [(&'static str, usize); 6] {
        self.inner.live.states()
    }

    /// Calls that wait for a free place.
    pub fn waiting_calls(&self) -> usize {
        self.inner.gate.waiting()
    }

    /// How long the oldest open call has been open.
    pub fn oldest_open_call_age_ms(&self) -> u64 {
        let now_ms = self.inner.clock.now_ms();
        self.inner.live.oldest_ms().map_or(0, |oldest_ms| now_ms.saturating_sub(oldest_ms))
    }

    /// Takes no more work, and waits for what runs in this process, but not longer than this.
    /// What is not finished then is found and settled by the next start.
    pub async fn shut_down(&self, limit: std::time::Duration) {
        self.inner.draining.store(true, Ordering::Release);
        self.inner.attempts.close();
        let _ = tokio::time::timeout(limit, self.inner.attempts.wait()).await;
        self.inner.stopping.cancel();
        self.inner.desk.close();
        self.inner.tasks.close();
        self.inner.tasks.wait().await;
    }
}

/// A store that cannot be used now is the caller's to know and ours to log.
pub(crate) fn unavailable(error: StoreError) -> Error {
    match error {
        StoreError::Unavailable(why) => {
            tracing::error!(%why, "the store is not available");
            let message = "the store cannot be used now; nothing was done, a retry is safe";
            Error::later(Code::Overloaded, message, 1_000)
        }
        corrupt @ StoreError::Corrupt(_) => Error::Internal(Box::new(corrupt)),
    }
}

/// A thread that broke down is ours to log.
pub(crate) fn unavailable_thread(error: tokio::task::JoinError) -> Error {
    Error::Internal(Box::new(error))
}
