//! Executes the calls of a reply and builds the messages that answer them.

use std::sync::Arc;

use serde_json::{Value, json};

use super::{EventSink, LoopEvent, ending, summary};
use crate::calls::batch::{Batch, BatchEntryResult, BatchEntryState};
use crate::domain::agent::OnParentEnd;
use crate::domain::call::Call;
use crate::domain::caller::Caller;
use crate::domain::fault::{Error, Fault, SideEffect};
use crate::domain::json::Json;
use crate::domain::model_reply::{ModelReply, ToolCallRequest};
use crate::domain::run::options::{DEFAULT_RESULT_TOKENS, RunOptions};
use crate::domain::run::progress::{PendingCall, RunProgress};
use crate::domain::tool::{Effect, Executor};
use crate::model_formats::fault_content;
use crate::runs::Runs;
use crate::runs::agent_loop::limits;
use crate::runs::agent_loop::limits::idempotency_key;
use crate::runs::agent_loop::resume::PriorResults;
use crate::runs::agent_loop::tool_selection::ToolSelection;
use crate::runs::handoff::is_handoff;

/// The disposition of one call.
enum CallDisposition {
    /// Execute it; holds its index in the batch.
    Execute(usize),
    /// The caller executes it.
    CallerExecuted,
    /// It was a tool search; answer the model with this content.
    Found(String),
    /// Do not execute it; answer the model with this content. `repeated` is true if the call was
    /// made too often; `earlier` is the call if it was made before and has ended.
    Reject { content: String, repeated: bool, earlier: Option<Arc<Call>> },
    /// It names no tool, or its arguments are not complete; answer the model with this fault.
    Refuse(Box<Fault>),
}

/// The answers to the calls of one reply.
pub(super) struct ExecutedStep {
    /// The messages for the model, in the order of the calls, and then those with media.
    pub(super) messages: Vec<Value>,
    /// The calls whose results end the run.
    pub(super) terminating: Vec<Arc<Call>>,
    /// The first call that hands the run off.
    pub(super) handoff: Option<Arc<Call>>,
    /// The calls that never became a tool call, with their names and faults.
    pub(super) refused: Vec<(String, Fault)>,
}

/// The calls of one reply with their dispositions.
pub(super) struct ExecutionPlan<'a> {
    reply: &'a ModelReply,
    fates: Vec<CallDisposition>,
    fingerprints: Vec<String>,
    entries: Vec<Json>,
    /// Index of each batch entry within the reply.
    indexes: Vec<usize>,
}

impl<'a> ExecutionPlan<'a> {
    pub(super) fn new(
        reply: &'a ModelReply,
        offer: &ToolSelection,
        options: &RunOptions,
        (progress, before): (&RunProgress, &PriorResults),
        max_entries: usize,
    ) -> Self {
        let (limits, mut entries, mut indexes) = (&options.limits, Vec::new(), Vec::new());
        let remaining = limits::remaining_calls(limits, progress);
        let max_calls = (limits.calls_per_step.min(remaining) as usize).min(max_entries);
        let fingerprints: Vec<String> = reply.calls.iter().map(limits::call_fingerprint).collect();
        let mut fates = Vec::with_capacity(reply.calls.len());
        for (index, (call, fingerprint)) in reply.calls.iter().zip(&fingerprints).enumerate() {
            let reject =
                |content| CallDisposition::Reject { content, repeated: false, earlier: None };
            let has_capacity = entries.len() < max_calls;
            let mut execute = |tool: &str| {
                entries.push(batch_entry(call, tool));
                indexes.push(index);
                CallDisposition::Execute(entries.len() - 1)
            };
            let fate = if offer.caller_tools.contains(&call.name) {
                CallDisposition::CallerExecuted
            } else if let Some(earlier) = before.results.get(&index) {
                // The call was made before: its idempotency key leads to it again. If its tool no
                // longer exists, the model receives the earlier content.
                let report = || CallDisposition::Reject {
                    content: earlier.content.clone(),
                    repeated: false,
                    earlier: earlier.call.clone(),
                };
                offer.tool(&call.name).map_or_else(report, &mut execute)
            } else if progress.canceled {
                reject(limits::canceled_call_content())
            } else if let Some(fault) = limits::truncated_arguments_fault(reply, call) {
                CallDisposition::Refuse(Box::new(fault))
            } else if limits::is_repeated(progress, limits, fingerprint) {
                CallDisposition::Reject {
                    content: limits::repeated_call_content(call, limits),
                    repeated: true,
                    earlier: None,
                }
            } else if let Some(content) = before.searches.get(&index) {
                CallDisposition::Found(content.clone())
            } else if let Some(tool) = offer.tool(&call.name) {
                match has_capacity {
                    true => execute(tool),
                    false => reject(limits::too_many_calls_content(limits, remaining)),
                }
            } else {
                // Searching for similar names is costly, so a reply may trigger only a bounded
                // number of searches.
                let compared = if index < limits.calls_per_step as usize { usize::MAX } else { 0 };
                let names = offer.names().take(compared);
                CallDisposition::Refuse(Box::new(limits::unknown_tool_fault(&call.name, names)))
            };
            fates.push(fate);
        }
        Self { reply, fates, fingerprints, entries, indexes }
    }

    /// Returns the calls that the caller executes itself.
    pub(super) fn caller_calls(&self) -> Vec<ToolCallRequest> {
        let calls = self.reply.calls.iter().zip(&self.fates);
        let caller_executed =
            calls.filter(|(_, fate)| matches!(fate, CallDisposition::CallerExecuted));
        caller_executed.map(|(call, _)| call.clone()).collect()
    }

    /// Executes the calls and returns the messages for the model.
    pub(super) async fn execute(
        self,
        engine: &Arc<Runs>,
        caller: &Caller,
        options: &RunOptions,
        progress: &mut RunProgress,
        event_sink: EventSink<'_>,
    ) -> Result<ExecutedStep, Error> {
        let step = progress.steps;
        let (mut results, mut answers) = (Vec::new(), Vec::new());
        if !self.entries.is_empty() {
            let keys =
                self.indexes.iter().filter_map(|index| idempotency_key(options, progress, *index));
            let max_wait_ms = engine.core.limits.max_wait_ms;
            let batch = build_batch(options, progress, self.entries, max_wait_ms);
            let batch = Batch { entry_keys: keys.collect(), ..batch };
            let answer = engine.calls.run_batch(caller, batch).await?;
            (results, answers) = (answer.results, answer.messages);
        }
        let (mut summaries, cost) = summary::summarize_messages(engine, &results, &answers).await;
        progress.usage += cost;
        let mut messages = Vec::with_capacity(self.fates.len());
        let (mut failed, mut repeated, mut terminating) = (0, 0, Vec::new());
        let (mut handoff, mut refused): (Option<Arc<Call>>, Vec<(String, Fault)>) =
            Default::default();
        let planned = self.reply.calls.iter().zip(self.fates).zip(self.fingerprints);
        for ((call, fate), fingerprint) in planned {
            let message = match fate {
                CallDisposition::CallerExecuted => continue,
                CallDisposition::Found(content) => {
                    limits::count_repeat(progress, fingerprint, limits::content_hash(&content));
                    limits::tool_message(&call.id, &content)
                }
                CallDisposition::Reject { content, repeated: again, earlier } => {
                    failed += 1;
                    handoff = handoff.or_else(|| earlier.clone().filter(|call| is_handoff(call)));
                    terminating.extend(earlier.filter(|call| ending::is_terminating(call)));
                    repeated += usize::from(again);
                    if !again {
                        limits::count_repeat(progress, fingerprint, limits::content_hash(&content));
                    }
                    limits::tool_message(&call.id, &content)
                }
                CallDisposition::Refuse(fault) => {
                    failed += 1;
                    refuse_call(progress, (call, fingerprint), *fault, &mut refused)
                }
                CallDisposition::Execute(entry) => {
                    let (result, message) = (&results[entry], answers[entry].to_value());
                    failed += usize::from(result.ok() == Some(false));
                    let stored = result.call().filter(|call| ending::is_terminating(call));
                    terminating.extend(stored.cloned());
                    let suspends = options.execution_options.wait_ms.is_none();
                    record_call(progress, (call, fingerprint), result, &message, suspends);
                    let child = result.call().and_then(|ended| engine.delegated_call(ended, call));
                    progress.pending_calls.extend(child);
                    let mut message = summaries.remove(&entry).unwrap_or(message);
                    if let Some(other) = result.call().filter(|call| is_handoff(call)) {
                        match &handoff {
                            Some(first) => {
                                message["content"] = limits::second_handoff_content(first).into()
                            }
                            None => handoff = Some(other.clone()),
                        }
                    }
                    event_sink(LoopEvent::CallAnswered { step, result, message: &message });
                    message
                }
            };
            messages.push(message);
        }
        let all = messages.len();
        // Images and other media of the results follow as messages of their own.
        messages.extend(answers.iter().skip(results.len()).map(Json::to_value));
        progress.failed_steps =
            if all > 0 && failed == all { progress.failed_steps + 1 } else { 0 };
        progress.repeated_steps =
            if all > 0 && repeated == all { progress.repeated_steps + 1 } else { 0 };
        Ok(ExecutedStep { messages, terminating, handoff, refused })
    }
}

impl Runs {
    /// Returns the call of the agent that an ended call handed a task to without waiting. The
    /// result of that call arrives late, and the run waits for it, unless the agent continues after
    /// the end of the run.
    fn delegated_call(&self, ended: &Call, call: &ToolCallRequest) -> Option<PendingCall> {
        if ended.target.executor != Executor::INTERNAL {
            return None;
        }
        let outcome = ended.outcome.as_ref().filter(|outcome| outcome.ok)?;
        let result = outcome.data.as_ref()?.to_value();
        let accepted = (result["status"] == "accepted").then_some(&result)?;
        let tool_call_id = accepted["call_id"].as_str()?.parse().ok()?;
        let agent_id = accepted["agent_id"].as_str()?;
        let agent = self.registry.find_agent_definition(&ended.project, agent_id)?;
        Some(PendingCall {
            tool_call_id,
            call_id: call.id.clone(),
            name: call.name.clone(),
            suspends: false,
            is_detached: agent.on_parent_end == OnParentEnd::Detach,
        })
    }
}

/// Builds the batch entry of a call, under the tool's own name.
fn batch_entry(call: &ToolCallRequest, tool: &str) -> Json {
    // Some models send nothing if there are no arguments.
    let arguments = if call.arguments.trim().is_empty() { "{}" } else { &call.arguments };
    let function = json!({ "name": tool, "arguments": arguments });
    Json::from_value(&json!({ "id": call.id, "type": "function", "function": function }))
}

fn build_batch(
    options: &RunOptions,
    progress: &RunProgress,
    entries: Vec<Json>,
    max_wait_ms: u64,
) -> Batch {
    let execution = &options.execution_options;
    let remaining_ms = limits::remaining_ms(&options.limits, progress);
    let wait_ms = execution.wait_ms.unwrap_or(max_wait_ms).min(max_wait_ms);
    Batch {
        mode: execution.mode.into(),
        max_parallel: execution.max_parallel,
        budget_tokens: Some(execution.result_tokens.unwrap_or(DEFAULT_RESULT_TOKENS)),
        wait_ms: Some(wait_ms.min(remaining_ms)),
        // A rate limit delays the run; it is not the model's failure.
        limit_wait_ms: Some(remaining_ms),
        // If the wait lasts until the time limit of the run, calls that have not started by then
        // never start.
        defer_unstarted: wait_ms < remaining_ms,
        timeout_ms: execution.timeout_ms,
        attempt_timeout_ms: execution.attempt_timeout_ms,
        retry: execution.max_retries,
        user_id: options.user_id.clone(),
        traceparent: options.traceparent.clone(),
        depth: options.depth,
        ..Batch::new(options.run_id.clone(), entries)
    }
}

/// Records a call that never became a tool call, and returns the message that answers it.
fn refuse_call(
    progress: &mut RunProgress,
    (call, fingerprint): (&ToolCallRequest, String),
    fault: Fault,
    refused: &mut Vec<(String, Fault)>,
) -> Value {
    progress.refused_calls += 1;
    let content = fault_content(&fault);
    limits::count_repeat(progress, fingerprint, limits::content_hash(&content));
    refused.push((call.name.chars().take(100).collect(), fault));
    limits::tool_message(&call.id, &content)
}

/// Returns true if an ended call certainly changed nothing.
fn is_harmless(call: &Call) -> bool {
    let fault = call.outcome.as_ref().and_then(|outcome| outcome.error.as_ref());
    call.target.effect == Effect::Read
        || fault.is_some_and(|fault| fault.side_effect == SideEffect::None)
}

/// Returns true if the call of a late result certainly changed nothing. The result of an agent may
/// belong to a call that another tool made, which has itself taken effect.
pub(super) fn is_harmless_late_call(call: &Call) -> bool {
    call.target.executor != Executor::AGENT && is_harmless(call)
}

/// Records a call that was made. `may_suspend` is true if the run waits for the result of an open
/// call whose tool declares that results suspend or end the run.
fn record_call(
    progress: &mut RunProgress,
    (call, fingerprint): (&ToolCallRequest, String),
    result: &BatchEntryResult,
    message: &Value,
    may_suspend: bool,
) {
    progress.calls += 1;
    progress.failed_calls += u32::from(result.ok() == Some(false));
    let is_harmless = match result.call() {
        Some(call) => call.outcome.is_some() && is_harmless(call),
        // The call was refused, or it is unknown if it was accepted.
        None => result.error().is_none_or(|fault| !fault.code.leaves_outcome_open()),
    };
    progress.harmless_calls += u32::from(is_harmless);
    let content_hash = match &result.state {
        // The ticket differs each time and carries no new information.
        BatchEntryState::Open(open) => {
            progress.pending_calls.push(PendingCall {
                tool_call_id: open.id.clone(),
                call_id: call.id.clone(),
                name: call.name.clone(),
                suspends: may_suspend
                    && open.target.after_execution.is_some()
                    && !open.origin.background,
                is_detached: false,
            });
            limits::content_hash("")
        }
        _ => limits::content_hash(message["content"].as_str().unwrap_or_default()),
    };
    limits::count_repeat(progress, fingerprint, content_hash);
}
