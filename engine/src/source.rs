//! The source port: whoever executes tools.
//!
//! A source is told to start an attempt and either answers with how it went, or says that somebody
//! else will report later. It knows nothing of the store, of other sources or of doors.

use std::sync::Arc;

use async_trait::async_trait;
use futures::future::BoxFuture;

use crate::call::Call;
use crate::dialogue::{Dialogue, Questions};
use crate::fault::Fault;
use crate::function::Progress;
use crate::id::CallId;
use crate::json::Json;
use crate::tool::{Definition, Effect, Executor};
use crate::trace::TraceParent;
use crate::utp::{Binding, Route};

/// One try at executing a call.
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
    /// The span that it is: what it does is part of that.
    pub traceparent: Option<TraceParent>,
    /// What a tool service is told; only of tools that it or an HTTP API executes.
    pub command: Option<Box<Command>>,
    /// The client the call is pinned to.
    pub client_id: Option<String>,
    /// The client that has taken this very attempt before (it is being handed over again).
    pub taken_by: Option<String>,
    /// Whether this attempt may have been handed over before.
    pub again: bool,
    /// What the attempt before this one asked, with the answers; or answers that were given before
    /// anything was asked.
    pub dialogue: Option<Box<Dialogue>>,
}

/// What a tool service, or who asks an HTTP API, must know to execute an attempt.
#[derive(Debug, Clone)]
pub struct Command {
    pub call: Arc<Call>,
    pub route: Route,
    pub binding: Binding,
    /// The card that has the arguments.
    pub card_id: String,
    /// The trace that the tool service goes on with.
    pub traceparent: String,
}

/// What starting an attempt came to.
pub enum Started {
    /// It was executed; this is how it went.
    Done(Result<Json, Fault>),
    /// Somebody reports later.
    Parked,
    /// It has to know something first: it is over, and the next one gets the answers.
    Asks(Questions),
    /// It goes on elsewhere, under this name. Once the name is stored, what is left of it is waited
    /// for; and after a crash the attempt is started again with it.
    GoesOn { handle: String, rest: BoxFuture<'static, Started> },
}

impl std::fmt::Debug for Started {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Done(result) => f.debug_tuple("Done").field(result).finish(),
            Self::Parked => f.write_str("Parked"),
            Self::Asks(questions) => f.debug_tuple("Asks").field(questions).finish(),
            Self::GoesOn { handle, .. } => f.debug_tuple("GoesOn").field(handle).finish(),
        }
    }
}

/// How something that a source depends on is.
#[derive(Debug, Clone)]
pub struct Health {
    pub name: &'static str,
    /// None when it is well.
    pub trouble: Option<String>,
}

/// Where an attempt's progress goes.
pub type ProgressSink = std::sync::Arc<dyn Fn(Progress) + Send + Sync>;

/// Executes tools of one kind.
#[async_trait]
pub trait Source: Send + Sync + 'static {
    /// Which executor's tools this is for.
    fn executor(&self) -> Executor;

    /// The tools it brings along itself; those that others register are not listed here.
    fn list(&self) -> Vec<Definition>;

    /// Starts an attempt.
    async fn start(&self, attempt: Attempt, progress: ProgressSink) -> Started;

    /// Stops an attempt, as far as that is possible.
    fn cancel(&self, call_id: &CallId, attempt: u32);

    /// How whoever executes them is, where that can be known.
    fn health(&self) -> Option<Health> {
        None
    }

    /// The attempt is over, whichever way: nothing need be kept for it.
    fn settled(&self, _call_id: &CallId, _attempt: u32) {}
}

/// The source of what callers run themselves: there is nothing to start, to stop or to forget, and
/// the caller reports how it went.
pub(crate) struct Callers;

#[async_trait]
impl Source for Callers {
    fn executor(&self) -> Executor {
        Executor::Caller
    }

    fn list(&self) -> Vec<Definition> {
        Vec::new()
    }

    async fn start(&self, _attempt: Attempt, _progress: ProgressSink) -> Started {
        Started::Parked
    }

    fn cancel(&self, _call_id: &CallId, _attempt: u32) {}
}
