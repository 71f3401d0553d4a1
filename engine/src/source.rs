//! The source port: whoever executes tools.
//!
//! A source is told to start an attempt and either answers with how it went, or says that somebody
//! else will report later. It knows nothing of the store, of other sources or of doors.

use async_trait::async_trait;

use crate::dialogue::{Dialogue, Questions};
use crate::fault::Fault;
use crate::function::Progress;
use crate::id::CallId;
use crate::json::Json;
use crate::tool::{Definition, Effect, Executor};
use crate::trace::TraceParent;

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

/// What starting an attempt came to.
#[derive(Debug)]
pub enum Started {
    /// It was executed; this is how it went.
    Done(Result<Json, Fault>),
    /// Somebody reports later.
    Parked,
    /// It has to know something first: it is over, and the next one gets the answers.
    Asks(Questions),
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
