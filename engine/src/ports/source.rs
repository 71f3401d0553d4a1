//! The source port: executes tools of one kind.
//!
//! The engine tells a source to start an attempt. The source either returns the result or says that
//! an executor reports later. It never accesses the store, other sources or transports.

use std::sync::Arc;

use async_trait::async_trait;
use futures::future::BoxFuture;

use crate::domain::call::Call;
use crate::domain::elicitation::{Elicitation, ElicitationRequest};
use crate::domain::fault::Fault;
use crate::domain::id::CallId;
use crate::domain::json::Json;
use crate::domain::tool::{Effect, Executor, ToolDefinition};
use crate::domain::trace::TraceParent;
use crate::domain::utp::{Binding, Route};
use crate::ports::fn_tool::AttemptProgress;

/// One attempt to execute a call.
#[derive(Debug, Clone)]
pub struct Attempt {
    pub call_id: CallId,
    pub project: String,
    pub run_id: String,
    pub agent: String,
    pub number: u32,
    pub tool: String,
    pub effect: Effect,
    pub args: Json,
    pub deadline_ms: u64,
    /// The span of the attempt; everything it does is part of it.
    pub traceparent: Option<TraceParent>,
    /// The command for a tool service; only for tools that a tool service or an HTTP API executes.
    pub command: Option<Box<ToolCommand>>,
    /// The client the call is pinned to.
    pub client_id: Option<String>,
    /// The client that acknowledged this attempt before (the attempt is being redelivered).
    pub acknowledged_by: Option<String>,
    /// True if this attempt may have been delivered before.
    pub redelivered: bool,
    /// The elicitation of the previous attempt with its answers, or answers that were given in
    /// advance.
    pub elicitation: Option<Box<Elicitation>>,
}

/// The data that a tool service or an HTTP source needs to execute an attempt.
#[derive(Debug, Clone)]
pub struct ToolCommand {
    pub call: Arc<Call>,
    pub route: Route,
    pub binding: Binding,
    /// The card that holds the arguments.
    pub card_id: String,
    /// The trace that the tool service continues.
    pub traceparent: String,
}

/// Result of starting an attempt.
pub enum Started {
    /// The attempt has ended with this result.
    Finished(Result<Json, Fault>),
    /// An executor accepted the attempt and reports later.
    Accepted,
    /// The tool needs input first: this attempt has ended, and the next one receives the answers.
    NeedsInput(ElicitationRequest),
    /// The attempt continues at the executor under this handle. Once the handle is stored, the
    /// engine awaits `rest`; after a crash it starts the attempt again with the handle.
    Detached { handle: String, rest: BoxFuture<'static, Started> },
}

impl std::fmt::Debug for Started {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Finished(result) => f.debug_tuple("Done").field(result).finish(),
            Self::Accepted => f.write_str("Parked"),
            Self::NeedsInput(questions) => f.debug_tuple("Asks").field(questions).finish(),
            Self::Detached { handle, .. } => f.debug_tuple("GoesOn").field(handle).finish(),
        }
    }
}

/// Health of a dependency of a source.
#[derive(Debug, Clone)]
pub struct SourceHealth {
    pub name: &'static str,
    /// The problem, or `None` if the dependency is healthy.
    pub problem: Option<String>,
}

/// Receives an attempt's progress.
pub type ProgressSink = std::sync::Arc<dyn Fn(AttemptProgress) + Send + Sync>;

/// Executes tools of one kind.
#[async_trait]
pub trait Source: Send + Sync + 'static {
    /// Returns the executor whose tools this source runs.
    fn executor(&self) -> Executor;

    /// Returns the tools that the source itself defines, not those that others register.
    fn list(&self) -> Vec<ToolDefinition>;

    /// Starts an attempt.
    async fn start(&self, attempt: Attempt, progress: ProgressSink) -> Started;

    /// Stops an attempt, as far as possible.
    fn cancel(&self, call_id: &CallId, attempt: u32);

    /// Returns the health of the executor, if it is known.
    fn health(&self) -> Option<SourceHealth> {
        None
    }

    /// Releases the state of an attempt, which has ended in any way.
    fn release_attempt(&self, _call_id: &CallId, _attempt: u32) {}
}

/// The source of calls that callers execute themselves: it starts, stops and releases nothing; the
/// caller reports the result.
pub(crate) struct CallerSource;

#[async_trait]
impl Source for CallerSource {
    fn executor(&self) -> Executor {
        Executor::Caller
    }

    fn list(&self) -> Vec<ToolDefinition> {
        Vec::new()
    }

    async fn start(&self, _attempt: Attempt, _progress: ProgressSink) -> Started {
        Started::Accepted
    }

    fn cancel(&self, _call_id: &CallId, _attempt: u32) {}
}
