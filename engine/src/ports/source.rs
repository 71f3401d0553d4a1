//! The source port: executes tools of one kind.
//!
//! The engine tells a source to start an attempt. The source either returns the result or says that
//! an executor reports later. It never accesses the store, other sources or transports.

use std::sync::Arc;

use async_trait::async_trait;
use futures::future::BoxFuture;
use serde_json::Value;

use crate::domain::call::Call;
use crate::domain::call::elicitation::{Elicitation, ElicitationRequest};
use crate::domain::caller::{AuthMethod, CallerAttributes};
use crate::domain::event::{EventKind, EventRecord};
use crate::domain::fault::Fault;
use crate::domain::id::CallId;
use crate::domain::json::Json;
use crate::domain::tool::{Effect, Executor, SourceTraits, ToolDefinition};
use crate::domain::trace::TraceParent;
use crate::domain::utp::{Binding, Route};

/// One attempt to execute a call.
#[derive(Debug, Clone)]
pub struct Attempt {
    /// Id of the call being executed.
    pub call_id: CallId,
    /// Project that the call belongs to.
    pub project: String,
    /// Run that the call belongs to.
    pub run_id: String,
    /// Agent that made the call.
    pub agent: String,
    /// Method that authenticated the agent.
    pub auth_method: AuthMethod,
    /// Attributes of the agent.
    pub attributes: Arc<CallerAttributes>,
    /// Number of the attempt within the call, from 1.
    pub number: u32,
    /// Name of the tool to execute: the requested one or a fallback.
    pub tool: String,
    /// Side effect of the tool.
    pub effect: Effect,
    /// Arguments to execute the tool with.
    pub args: Json,
    /// Time at which the attempt, or its call, is given up, in Unix milliseconds.
    pub deadline_ms: u64,
    /// Time until which the source waits for an executor that it cannot reach, in Unix
    /// milliseconds. It then reports a fault without a side effect, so that a retry or a fallback
    /// can follow.
    pub connect_deadline_ms: u64,
    /// Time that the call waits for answers if this attempt ends with questions, in milliseconds.
    pub input_timeout_ms: u64,
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
    /// Metadata of the caller's request for the executor, an object.
    pub meta: Option<Json>,
}

/// The data that a tool service or an HTTP source needs to execute an attempt.
#[derive(Debug, Clone)]
pub struct ToolCommand {
    /// The call that the attempt belongs to.
    pub call: Arc<Call>,
    /// Identity of the call in UTP.
    pub route: Route,
    /// Execution settings of the tool.
    pub binding: Binding,
    /// The card that holds the arguments.
    pub card_id: String,
    /// The trace that the tool service continues.
    pub traceparent: String,
}

/// Result of starting an attempt.
pub enum StartResult {
    /// The attempt has ended with this result.
    Finished(Result<Json, Fault>),
    /// An executor accepted the attempt and reports later.
    Accepted,
    /// The tool needs input first: this attempt has ended, and the next one receives the answers.
    NeedsInput(ElicitationRequest),
    /// The attempt continues at the executor under this handle. Once the handle is stored, the
    /// engine awaits `rest`; after a crash it starts the attempt again with the handle.
    Detached {
        /// The executor's own id of the attempt.
        handle: String,
        /// Future of the attempt's result.
        rest: BoxFuture<'static, StartResult>,
    },
}

impl std::fmt::Debug for StartResult {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Finished(result) => f.debug_tuple("Finished").field(result).finish(),
            Self::Accepted => f.write_str("Accepted"),
            Self::NeedsInput(questions) => f.debug_tuple("NeedsInput").field(questions).finish(),
            Self::Detached { handle, .. } => f.debug_tuple("Detached").field(handle).finish(),
        }
    }
}

/// Health of a dependency of a source.
#[derive(Debug, Clone)]
pub struct SourceHealth {
    /// Name of the dependency, for example `nats`.
    pub name: &'static str,
    /// The problem, or `None` if the dependency is healthy.
    pub problem: Option<String>,
}

/// Progress of an attempt.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct AttemptProgress {
    /// From 0 to 100.
    pub percent: Option<f64>,
    /// Text for display; cut after 2,000 characters.
    pub message: Option<String>,
    /// Structured data of the tool; dropped if its JSON text exceeds 64 KiB.
    pub data: Option<Value>,
}

impl AttemptProgress {
    /// Converts the progress to a record; cuts a long message and drops oversized data.
    pub(crate) fn into_record(self, now_ms: u64, attempt: u32) -> EventRecord {
        let mut record = EventRecord::new(EventKind::Progress, now_ms, attempt);
        if let Some(percent) = self.percent {
            record = record.with("percent", percent.clamp(0.0, 100.0));
        }
        if let Some(message) = self.message {
            record = record.with("message", message.chars().take(2_000).collect::<String>());
        }
        if let Some(data) = self.data.filter(|data| data.to_string().len() <= 65_536) {
            record = record.with("data", data);
        }
        record
    }
}

/// Receives an attempt's progress.
pub type ProgressSink = std::sync::Arc<dyn Fn(AttemptProgress) + Send + Sync>;

/// Executes tools of one kind.
#[async_trait]
pub trait Source: Send + Sync + 'static {
    /// Returns the executor whose tools this source runs.
    fn executor(&self) -> Executor;

    /// Returns the traits of the executor, which the targets of its calls store.
    fn traits(&self) -> SourceTraits {
        self.executor().traits()
    }

    /// Returns the tools that the source itself defines, not those that others register.
    fn list(&self) -> Vec<ToolDefinition>;

    /// Starts an attempt.
    async fn start(&self, attempt: Attempt, progress: ProgressSink) -> StartResult;

    /// Stops an attempt, as far as possible.
    fn cancel(&self, call_id: &CallId, attempt: u32);

    /// Returns the health of the executor, if it is known.
    fn health(&self) -> Option<SourceHealth> {
        None
    }

    /// Returns the reason why no executor can take a call of this tool now, if one is known.
    fn unavailable_reason(&self, _project: &str, _tool: &str) -> Option<String> {
        let health = self.health()?;
        health.problem.map(|problem| format!("{}: {problem}", health.name))
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
        Executor::CALLER
    }

    fn list(&self) -> Vec<ToolDefinition> {
        Vec::new()
    }

    async fn start(&self, _attempt: Attempt, _progress: ProgressSink) -> StartResult {
        StartResult::Accepted
    }

    fn cancel(&self, _call_id: &CallId, _attempt: u32) {}
}
