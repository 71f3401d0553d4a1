//! The agent loop: sends a request to the model, executes the tool calls of its reply and returns
//! their results to the model, until the model answers or a limit is reached.
//!
//! One step is one request to the model and the execution of all calls of its reply through
//! [`Calls::run_batch`]. [`Runs::run_agent_step`] runs one step, [`Runs::run_agent_loop`] as
//! many as needed; neither requires a server or a stored run. `limits` holds the decisions (limits,
//! repeated calls, messages to the model) and is pure; `request` sends the request with its
//! retries, `execute` runs the calls, `tool_selection` selects the tools that the model sees, and
//! `tool_search` finds the others. `driver::run_state` keeps the run's context.

#[cfg(doc)]
use crate::calls::Calls;
#[cfg(doc)]
use crate::runs::Runs;

mod driver;
mod ending;
mod execute;
mod late_results;
mod limits;
mod request;
mod resume;
mod summary;
mod tool_search;
mod tool_selection;

use serde_json::Value;

use crate::calls::batch::{BatchEntryResult, BatchMode};
use crate::domain::fault::Fault;
use crate::domain::model_reply::{ModelReply, ToolCallRequest};
use crate::domain::run::handoff::{ActiveAgent, Handoff};
use crate::domain::run::options::Concurrency;
#[cfg(doc)]
use crate::domain::run::options::RunOptions;
use crate::domain::run::progress::{FinalAnswer, PendingCall};
use crate::domain::utp::AfterExecution;
use crate::ports::model::Delta;

pub use driver::AgentLoop;
pub(crate) use driver::RecordedCallAnswer;
pub use limits::check_messages;
pub(crate) use limits::{call_fingerprint, replace_late_call_id, stop_reason_of};
pub use tool_selection::{check_pinned_tools, check_tool_patterns};

impl From<Concurrency> for BatchMode {
    fn from(side: Concurrency) -> Self {
        match side {
            Concurrency::Serial => Self::Serial,
            Concurrency::Parallel => Self::Parallel,
            Concurrency::Unordered => Self::Unordered,
        }
    }
}

/// The outcome of a step.
#[derive(Debug, Clone, PartialEq)]
pub enum StepOutcome {
    /// The calls were executed and their results are in the conversation: the next request can
    /// follow.
    Continue,
    /// There is a final answer: the model's, or a result that ends the run
    /// ([`FinalAnswer::terminated_by`]).
    Answered(FinalAnswer),
    /// The model called caller tools. The Toolcrib calls of the same reply have been executed and
    /// answered in the conversation; these calls await messages from the caller.
    CallerToolCalls(Vec<ToolCallRequest>),
    /// The model has nothing to do until late results arrive. Any text of its reply is in the
    /// conversation.
    AwaitingResults,
    /// The model handed the conversation off: the next request goes to another agent, whose
    /// instructions, model and tools [`RunOptions::active_agent`] gives the loop.
    HandedOff(Box<(Handoff, ActiveAgent)>),
    /// Calls of tools that suspend the run have not ended. The next request follows when all of
    /// them have.
    Suspended,
}

/// An event of the agent loop, emitted as it happens.
#[derive(Debug)]
#[non_exhaustive]
pub enum LoopEvent<'a> {
    /// A request is sent to the model.
    ModelRequested {
        /// Number of the step, from 1.
        step: u32,
        /// True if a limit is reached, so that this is the final request.
        last: bool,
    },
    /// A delta of the reply.
    ReplyDelta {
        /// Number of the step, from 1.
        step: u32,
        /// Part of the reply, for display only.
        piece: Delta,
    },
    /// The request failed and is retried after a wait. Deltas emitted so far are void.
    ModelRetryScheduled {
        /// Number of the step, from 1.
        step: u32,
        /// Number of the retry within the step, from 1.
        retry: u32,
        /// Time until the retry, in milliseconds.
        wait_ms: u64,
        /// Fault of the failed request.
        why: &'a Fault,
    },
    /// The complete reply. None of its calls has been executed.
    ModelReplied {
        /// Number of the step, from 1.
        step: u32,
        /// The reply with an id for each of its calls.
        reply: &'a ModelReply,
    },
    /// A call ended, continues in the background, or was refused.
    CallAnswered {
        /// Number of the step, from 1.
        step: u32,
        /// Result of the call as the batch answered it.
        result: &'a BatchEntryResult,
        /// Message that answers the call in the conversation.
        message: &'a Value,
    },
    /// The model searched for tools, which the next request offers.
    ToolsFound {
        /// Number of the step, from 1.
        step: u32,
        /// The call that searched.
        call: &'a ToolCallRequest,
        /// Model-facing names of the tools that were found.
        tools: &'a [String],
    },
    /// A late result was added to the conversation.
    LateResult {
        /// The call that the result belongs to.
        call: &'a PendingCall,
        /// Message that adds the result to the conversation.
        message: &'a Value,
        /// Effect of the result on the run.
        after_execution: Option<AfterExecution>,
    },
}

/// Receives the events of an agent loop.
pub type EventSink<'a> = &'a (dyn Fn(LoopEvent<'_>) + Send + Sync);

/// Discards an event.
pub fn ignore_events(_: LoopEvent<'_>) {}
