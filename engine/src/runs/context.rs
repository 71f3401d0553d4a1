//! `ToolCallContext`: the tools of one run, its calls, and their results.
//!
//! The context sits between a model and its tools. It holds the definitions that the model
//! receives, the calls that the model made, and their results, matched by `call_id`. Models repeat
//! their ids (`call_0` in each step), so a result answers the newest unanswered call with its id;
//! if a call has a ticket (`tool_call_id`), the ticket decides. A context can be saved and restored
//! with serde, and listeners receive every result.
//!
//! The context reads no clock and decides no status: the caller supplies all times.
//! [`crate::runs::RunContexts::context`] builds one from the stored state of a run, and
//! [`crate::runs::RunContexts::refresh_context`] keeps it up to date.
//!
//! ```
//! use toolcrib::Json;
//! use toolcrib::runs::context::{ToolCall, ToolCallContext, ToolResult};
//!
//! let mut context = ToolCallContext::new("run_1");
//! context.on_tool_call(|call, result| {
//!     println!("{} answered {}: {}", call.name, result.call_id, result.ok());
//!     Ok(())
//! });
//! context.set_tool_calls([ToolCall::new("call_0", "weather.query", Json::empty_object())]);
//! assert_eq!(context.pending_calls().count(), 1);
//! context.set_tool_call_result(ToolResult::new("call_0", Ok(Json::from_serialize("rain")?)))?;
//! assert_eq!(context.pending_calls().count(), 0);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod listeners;
mod messages;
mod pending;
mod prompt;
mod serialization;
mod text;

#[cfg(test)]
mod tests;
use std::collections::HashSet;
use std::sync::Arc;

use listeners::ResultListeners;
use serde::{Deserialize, Serialize};

use crate::domain::call::{Call, Status};
use crate::domain::fault::Fault;
use crate::domain::id::CallId;
use crate::domain::json::Json;
use crate::domain::tool::ToolDefinition;
pub(crate) use listeners::ResultListener;
pub use listeners::{ListenerError, ListenerResult};
pub use messages::ContextMessages;
pub use prompt::{ContextPrompt, DEFAULT_BUDGET_TOKENS, OmittedCounts};
pub(crate) use serialization::definitions;
pub(crate) use text::{first_line, truncate_to_tokens};

/// One tool call.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ToolCall {
    /// The caller's own id, which may repeat in another step; the ticket if the caller gave none.
    pub call_id: String,
    /// The ticket, if there is one. It is unique.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<CallId>,
    /// Name of the tool.
    pub name: String,
    /// Arguments as requested.
    pub args: Json,
    /// True if the call runs in the background, so that its result arrives later.
    #[serde(default, rename = "async")]
    pub background: bool,
    /// Current status of the call.
    #[serde(with = "serialization::status")]
    pub status: Status,
    /// True if the call waits for the approval of a person.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub awaits_approval: bool,
    /// Creation time, in Unix milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub created_ms: Option<u64>,
    /// Number of the call within the context, from 1. The context assigns it.
    #[serde(default)]
    number: u64,
    /// Number of the step that made the call, from 1. The context assigns it.
    #[serde(default)]
    #[serde(rename = "turn")]
    step: u64,
}

impl ToolCall {
    /// Creates a call that has no result yet.
    pub fn new(call_id: impl Into<String>, name: impl Into<String>, args: Json) -> Self {
        Self {
            call_id: call_id.into(),
            tool_call_id: None,
            name: name.into(),
            args,
            background: false,
            status: Status::Running,
            awaits_approval: false,
            created_ms: None,
            number: 0,
            step: 0,
        }
    }

    /// Sets the creation time.
    pub fn at_ms(self, created_ms: u64) -> Self {
        Self { created_ms: Some(created_ms), ..self }
    }

    /// Marks the call as a background call.
    pub fn background(self) -> Self {
        Self { background: true, ..self }
    }
}

impl From<&Call> for ToolCall {
    fn from(call: &Call) -> Self {
        Self {
            call_id: call.origin.caller_call_id.clone().unwrap_or_else(|| call.id.to_string()),
            tool_call_id: Some(call.id.clone()),
            name: call.tool_name.clone(),
            args: call.args.clone(),
            background: call.origin.background,
            status: call.status,
            awaits_approval: call.pending_approval().is_some(),
            created_ms: Some(call.created_ms),
            number: 0,
            step: 0,
        }
    }
}

/// The result of one call.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ToolResult {
    /// Id of the call that this result answers.
    pub call_id: String,
    /// Ticket of the call that this result answers, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<CallId>,
    /// Result data of a success, or the fault of a failure.
    #[serde(with = "serialization::outcome")]
    pub outcome: Result<Json, Fault>,
    /// Completion time, in Unix milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completed_ms: Option<u64>,
    /// Number of the call that this result answers.
    #[serde(default)]
    number: u64,
}

impl ToolResult {
    /// Creates the result of the call with this id.
    pub fn new(call_id: impl Into<String>, outcome: Result<Json, Fault>) -> Self {
        let call_id = call_id.into();
        Self { call_id, tool_call_id: None, outcome, completed_ms: None, number: 0 }
    }

    /// Sets the completion time.
    pub fn at_ms(self, completed_ms: u64) -> Self {
        Self { completed_ms: Some(completed_ms), ..self }
    }

    /// Returns whether the call succeeded.
    pub fn ok(&self) -> bool {
        self.outcome.is_ok()
    }

    /// Returns the result of a call, or `None` if it has not ended.
    pub fn from_call(call: &Call) -> Option<Self> {
        let outcome = call.outcome.as_ref()?;
        let result = match &outcome.error {
            // The raw output of a tool whose result was rejected is meant for operators only.
            Some(fault) => Err(Fault { raw: None, ..fault.clone() }),
            None => Ok(outcome.data.clone().unwrap_or_else(Json::null)),
        };
        Some(Self {
            call_id: call.origin.caller_call_id.clone().unwrap_or_else(|| call.id.to_string()),
            tool_call_id: Some(call.id.clone()),
            outcome: result,
            completed_ms: call.completed_ms,
            number: 0,
        })
    }
}

/// The reason why a result was not recorded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ResultMatchError {
    /// The context has no call with this id.
    #[error("there is no call \"{0}\" in this context; set_tool_calls records it first")]
    UnknownCall(String),
    /// Every call with this id already has a different result.
    #[error("call \"{0}\" has another result already")]
    AlreadyAnswered(String),
}

/// The tools of one run, its calls, and their results.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct ToolCallContext {
    run_id: String,
    #[serde(with = "serialization::definitions")]
    tool_definitions: Vec<ToolDefinition>,
    tool_calls: Vec<ToolCall>,
    tool_results: Vec<ToolResult>,
    /// True if older calls of the run were omitted.
    #[serde(default)]
    truncated: bool,
    /// Number of the newest call.
    #[serde(default)]
    #[serde(rename = "numbers")]
    last_call_number: u64,
    /// Number of the newest step.
    #[serde(default)]
    #[serde(rename = "turns")]
    last_step: u64,
    #[serde(skip)]
    listeners: ResultListeners,
}

impl ToolCallContext {
    /// Creates an empty context of this run.
    pub fn new(run_id: impl Into<String>) -> Self {
        Self { run_id: run_id.into(), ..Self::default() }
    }

    /// Returns the id of the run.
    pub fn run_id(&self) -> &str {
        &self.run_id
    }

    /// Returns the tools that the model receives, in the order they were set.
    pub fn tool_definitions(&self) -> &[ToolDefinition] {
        &self.tool_definitions
    }

    /// Returns the calls, in the order they were made.
    pub fn tool_calls(&self) -> &[ToolCall] {
        &self.tool_calls
    }

    /// Returns the results, in the order they arrived.
    pub fn tool_results(&self) -> &[ToolResult] {
        &self.tool_results
    }

    /// Returns whether older calls of the run were omitted.
    pub fn truncated(&self) -> bool {
        self.truncated
    }

    pub(crate) fn set_truncated(&mut self, truncated: bool) {
        self.truncated = truncated;
    }

    /// Replaces the tools that the model receives.
    pub fn set_tool_definitions(&mut self, tools: impl IntoIterator<Item = ToolDefinition>) {
        self.tool_definitions = tools.into_iter().collect();
    }

    /// Records the calls of one model step, after those of earlier steps. Every entry is a new
    /// call, even under an id that was used before. The exception is a ticket that the context
    /// already holds: it stays one call, and its status is updated.
    pub fn set_tool_calls(&mut self, calls: impl IntoIterator<Item = ToolCall>) {
        self.last_step += 1;
        for mut call in calls {
            let is_same = |existing: &&mut ToolCall| {
                call.tool_call_id.is_some() && existing.tool_call_id == call.tool_call_id
            };
            if let Some(existing) = self.tool_calls.iter_mut().find(is_same) {
                if !existing.status.is_terminal() {
                    existing.status = call.status;
                    existing.awaits_approval = call.awaits_approval;
                }
                continue;
            }
            self.last_call_number += 1;
            call.number = self.last_call_number;
            call.step = self.last_step;
            self.tool_calls.push(call);
        }
    }

    /// Records a result and notifies the listeners.
    ///
    /// The result answers the call with its ticket, or else the newest unanswered call with its id.
    /// Recording the same result again has no effect and notifies no listener; a different result
    /// is refused.
    pub fn set_tool_call_result(&mut self, mut result: ToolResult) -> Result<(), ResultMatchError> {
        let Some(at) = self.find_unanswered_call(&result)? else { return Ok(()) };
        let call = &mut self.tool_calls[at];
        result.number = call.number;
        result.tool_call_id = call.tool_call_id.clone();
        // A call that timed out or was canceled already has its final status.
        if !call.status.is_terminal() {
            call.status = if result.ok() { Status::Succeeded } else { Status::Failed };
        }
        self.tool_results.push(result);
        if let Some(result) = self.tool_results.last() {
            self.listeners.notify(&self.tool_calls[at], result);
        }
        Ok(())
    }

    /// Returns the index of the call that a result answers, or `None` if that call already has this
    /// result.
    fn find_unanswered_call(&self, result: &ToolResult) -> Result<Option<usize>, ResultMatchError> {
        let is_match = |call: &ToolCall| match (&result.tool_call_id, &call.tool_call_id) {
            (Some(ticket), id) => Some(ticket) == id.as_ref(),
            (None, _) => call.call_id == result.call_id,
        };
        let mut answered = None;
        for (at, call) in self.tool_calls.iter().enumerate().rev().filter(|(_, c)| is_match(c)) {
            match self.result_of(call) {
                None => return Ok(Some(at)),
                Some(other) => answered = answered.or(Some(other)),
            }
        }
        match answered {
            None => Err(ResultMatchError::UnknownCall(result.call_id.clone())),
            Some(other) if other.outcome == result.outcome => Ok(None),
            Some(_) => Err(ResultMatchError::AlreadyAnswered(result.call_id.clone())),
        }
    }

    /// Returns the result of one of this context's calls.
    pub fn result_of(&self, call: &ToolCall) -> Option<&ToolResult> {
        self.tool_results.iter().rev().find(|result| result.number == call.number)
    }

    /// Returns the calls that have no result yet, oldest first.
    pub fn pending_calls(&self) -> impl Iterator<Item = &ToolCall> {
        let results = self.tool_results.iter();
        let answered: HashSet<u64> = results.map(|result| result.number).collect();
        self.tool_calls.iter().filter(move |call| !answered.contains(&call.number))
    }

    /// Returns the calls that have a result, in the order the results arrived.
    pub fn finished_calls(&self) -> impl DoubleEndedIterator<Item = (&ToolCall, &ToolResult)> {
        self.tool_results.iter().filter_map(|result| {
            let at = self.tool_calls.binary_search_by_key(&result.number, |call| call.number);
            Some((self.tool_calls.get(at.ok()?)?, result))
        })
    }

    /// Adds a listener that receives every later result after it was recorded. Listeners run in the
    /// order they were added.
    ///
    /// If a listener fails or panics, the error is logged, the result stays recorded and the other
    /// listeners still run. Listeners run synchronously, so a slow one delays the code that records
    /// the result; in async code, hand long work to a task or a channel.
    pub fn on_tool_call<F>(&mut self, listener: F)
    where
        F: Fn(&ToolCall, &ToolResult) -> ListenerResult + Send + Sync + 'static,
    {
        self.listeners.add(Arc::new(listener));
    }

    /// Adds a shared listener after those that were added before.
    pub(crate) fn add_listener(&mut self, listener: ResultListener) {
        self.listeners.add(listener);
    }

    /// Drops the oldest calls that have a result until at most `max_calls` calls are left, and
    /// their results together have at most `max_bytes`. Calls without a result stay.
    pub(crate) fn trim(&mut self, max_calls: usize, max_bytes: usize) {
        let size = |result: &ToolResult| match &result.outcome {
            Ok(data) => data.text().len(),
            Err(fault) => fault.message.len(),
        };
        let mut bytes: usize = self.tool_results.iter().map(size).sum();
        let mut excess = self.tool_calls.len().saturating_sub(max_calls);
        let mut dropped = HashSet::new();
        for result in &self.tool_results {
            if excess == 0 && bytes <= max_bytes {
                break;
            }
            bytes -= size(result);
            excess = excess.saturating_sub(1);
            dropped.insert(result.number);
        }
        if !dropped.is_empty() {
            self.truncated = true;
            self.tool_calls.retain(|call| !dropped.contains(&call.number));
            self.tool_results.retain(|result| !dropped.contains(&result.number));
        }
    }
}
