//! The state of the run that an agent loop keeps: the `ToolCallContext` with the run's tools, calls
//! and results, its listeners, and the tools that were set for the run.
//!
//! The tools of the run are those of its context. The stored selection is read before every
//! request, so that a change of it reaches the model with the next one.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

use super::AgentLoop;
use crate::calls::Until;
use crate::calls::batch;
use crate::calls::request::CallRequest;
use crate::domain::call::Call;
use crate::domain::fault::{Code, Error, Fault};
use crate::domain::id::CallId;
use crate::domain::json::Json;
use crate::domain::model_reply::{ModelReply, ToolCallRequest};
use crate::domain::run::options::DEFAULT_RESULT_TOKENS;
use crate::domain::run::progress::{PendingCall, RunProgress};
use crate::lifecycle::{MAY_HAVE_HAPPENED, split_warning};
use crate::model_formats::{fault_content, pending_content};
use crate::ports::core::from_store_error;
use crate::runs::agent_loop::late_results::late_entry_result;
use crate::runs::agent_loop::tool_search;
use crate::runs::agent_loop::tool_selection::ToolSelection;
use crate::runs::agent_loop::{LoopEvent, limits};
use crate::runs::caller_executed::ReportedCall;
use crate::runs::context::{
    ListenerResult, ResultListener, ToolCall, ToolCallContext, ToolResult, truncate_to_tokens,
};
use crate::runs::run_context::{CONTEXT_CALL_LIMITS, add_calls};
use crate::runs::{RunToolSelection, Runs};

/// Maximum tokens of the state of the pending calls in a request.
const PENDING_STATE_TOKENS: usize = 400;

/// Maximum number of calls, and bytes of their results, in the context of a loop.
const MAX_CONTEXT: (usize, usize) = (200, 4 << 20);

/// Maximum number of pending calls whose state is read before a request.
const MAX_REFRESHED_CALLS: usize = 200;

/// Maximum tokens of the description of a failure.
const FAILURE_TOKENS: usize = 80;

/// The party that a loop works for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LoopOwner {
    /// A caller that waits for the outcome of the loop and executes its own tools.
    Caller,
    /// A stored run. Calls of caller tools are recorded, and the loop waits for their results.
    StoredRun,
    /// A replay, which executes and reads nothing.
    Replay,
}

/// The context of a loop's run, and the tools that were set for the run.
pub(super) struct RunState {
    owner: LoopOwner,
    context: ToolCallContext,
    /// False until the earlier calls of the run were added.
    is_loaded: bool,
    /// Listeners that join the context when the earlier calls were added.
    listeners: Vec<ResultListener>,
    selection: Option<RunToolSelection>,
}

impl RunState {
    pub(super) fn new(engine: &Runs, run_id: &str) -> Self {
        Self {
            owner: LoopOwner::Caller,
            context: ToolCallContext::new(run_id),
            is_loaded: false,
            listeners: engine.result_listeners.clone(),
            selection: None,
        }
    }
}

/// The calls of a step that were answered, in the order of their answers.
#[derive(Default)]
pub(super) struct RecordedCalls(Mutex<Vec<(ToolCall, Option<ToolResult>)>>);

impl RecordedCalls {
    /// Records the call of an event that answers one.
    pub(super) fn push(&self, event: &LoopEvent<'_>) {
        let LoopEvent::CallAnswered { result, .. } = event else { return };
        let recorded = match result.call() {
            Some(call) => (ToolCall::from(&**call), ToolResult::from_call(call)),
            None => {
                let id = result.call_id.clone().unwrap_or_default();
                let name = result.name.clone().unwrap_or_default();
                let refused = || Fault::new(Code::Internal, "the call was refused");
                let fault = result.error().cloned().unwrap_or_else(refused);
                let call = ToolCall::new(id.clone(), name, Json::empty_object());
                (call, Some(ToolResult::new(id, Err(fault))))
            }
        };
        self.0.lock().push(recorded);
    }
}

impl<'a> AgentLoop<'a> {
    /// Lets the loop record calls of caller tools of the run's context, because a stored run has no
    /// caller that could execute them at once, and offer the tool that ends a run.
    pub(crate) fn for_stored_run(mut self) -> Self {
        self.run_state.owner = LoopOwner::StoredRun;
        self.tool_selection.add_finish(self.engine, self.caller);
        self
    }

    /// Lets the loop neither read nor change the state of its run.
    pub(crate) fn for_replay(mut self) -> Self {
        self.run_state.owner = LoopOwner::Replay;
        self.tool_selection.add_finish(self.engine, self.caller);
        self
    }

    /// Returns the context of the run: its tools, its calls and their results.
    pub fn context(&self) -> &ToolCallContext {
        &self.run_state.context
    }

    /// Adds a listener that receives the result of every later call of the run, also if it arrives
    /// late. If a listener fails or panics, the error is logged and the others still run.
    pub fn on_tool_call<F>(&mut self, listener: F)
    where
        F: Fn(&ToolCall, &ToolResult) -> ListenerResult + Send + Sync + 'static,
    {
        let listener: ResultListener = Arc::new(listener);
        match self.run_state.is_loaded {
            true => self.run_state.context.add_listener(listener),
            false => self.run_state.listeners.push(listener),
        }
    }

    /// Reads the tools that were set for the run and, the first time, its earlier calls; selects
    /// the tools again if they or the directory have changed.
    pub(super) async fn refresh_run(&mut self) -> Result<(), Error> {
        let (project, run_id) = (&self.caller.project, self.options.run_id.as_str());
        let is_replay = self.run_state.owner == LoopOwner::Replay;
        let selection = match is_replay {
            true => None,
            false => self.engine.contexts.find_tool_selection(project, run_id).await?,
        };
        let is_same = selection == self.run_state.selection
            && self.tool_selection.version == self.engine.registry.directory_version();
        if !is_same {
            let set = selection.as_ref().and_then(|set| set.toolcrib_tools.as_deref());
            let given = self.options.offered_tools();
            // The later selection takes precedence. The tools of a stored run are set after its
            // start; a request or a handoff selects its tools after that.
            let patterns = match self.run_state.owner {
                LoopOwner::StoredRun if self.options.active_agent.is_none() => set.or(given),
                _ => given.or(set),
            };
            self.tool_selection = ToolSelection::new(
                self.engine,
                self.caller,
                self.options,
                patterns,
                selection.as_ref(),
            );
            if self.run_state.owner != LoopOwner::Caller {
                self.tool_selection.add_finish(self.engine, self.caller);
            }
            self.run_state.selection = selection;
        }
        if !is_same || !self.run_state.is_loaded {
            let definitions = self.tool_selection.definitions().to_vec();
            self.run_state.context.set_tool_definitions(definitions);
        }
        if !self.run_state.is_loaded && !is_replay {
            let limit = CONTEXT_CALL_LIMITS.0;
            let (calls, truncated) =
                self.engine.contexts.load_run_calls(self.caller, run_id, limit).await?;
            let state = &mut self.run_state;
            state.context.set_truncated(truncated);
            add_calls(&mut state.context, &calls);
            for listener in state.listeners.drain(..) {
                state.context.add_listener(listener);
            }
        }
        self.run_state.is_loaded = true;
        Ok(())
    }

    /// Stores the tools that a request selected for its run, so that the run's context has them.
    /// The selection of a stored run is its own.
    pub(super) async fn save_tool_selection(&mut self) -> Result<(), Error> {
        if self.run_state.owner != LoopOwner::Caller || self.options.tools.is_none() {
            return Ok(());
        }
        let names = self.tool_selection.toolcrib_names();
        let mut selection = self.run_state.selection.clone().unwrap_or_default();
        if selection.toolcrib_tools.as_ref() == Some(&names) {
            return Ok(());
        }
        let (project, run_id) = (&self.caller.project, self.options.run_id.as_str());
        let run = self.engine.core.store.runs().run(project, run_id).await;
        if run.map_err(from_store_error)?.is_some() {
            return Ok(());
        }
        selection.toolcrib_tools = Some(names);
        self.engine.contexts.store_tool_selection(project, run_id, &selection).await?;
        self.run_state.selection = Some(selection);
        Ok(())
    }

    /// Reads the state of the pending calls. Results that have arrived go to the listeners.
    pub(super) async fn refresh_pending_calls(
        &mut self,
        progress: &RunProgress,
    ) -> Result<(), Error> {
        if self.run_state.owner == LoopOwner::Replay {
            return Ok(());
        }
        let pending = self.run_state.context.pending_calls();
        let mut ids: Vec<CallId> = pending.filter_map(|call| call.tool_call_id.clone()).collect();
        for call in &progress.pending_calls {
            if !ids.contains(&call.tool_call_id) {
                ids.push(call.tool_call_id.clone());
            }
        }
        for id in ids.into_iter().take(MAX_REFRESHED_CALLS) {
            match self.engine.calls.call(self.caller, &id).await {
                Ok(call) => self.record_call(&call),
                // Purged in the meantime.
                Err(error) if error.code() == Code::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn record_call(&mut self, call: &Call) {
        let context = &mut self.run_state.context;
        context.set_tool_calls([ToolCall::from(call)]);
        if let Some(result) = ToolResult::from_call(call) {
            // The call is in the context, and an outcome never changes.
            let _ = context.set_tool_call_result(result);
        }
    }

    /// Adds the calls of one step and their results to the context, and notes its failures, also
    /// those of calls that were refused.
    pub(super) fn record_results(
        &mut self,
        recorded: RecordedCalls,
        refused: &[(String, Fault)],
        progress: &mut RunProgress,
    ) {
        for (name, fault) in refused {
            note_failure(progress, name, fault);
        }
        let context = &mut self.run_state.context;
        let recorded = recorded.0.into_inner();
        if recorded.is_empty() {
            return;
        }
        context.set_tool_calls(recorded.iter().map(|(call, _)| call.clone()));
        for (call, result) in recorded {
            let Some(result) = result else { continue };
            if let Err(fault) = &result.outcome {
                note_failure(progress, &call.name, fault);
            }
            let _ = context.set_tool_call_result(result);
        }
        context.trim(MAX_CONTEXT.0, MAX_CONTEXT.1);
    }

    /// Counts a late result that is a failure.
    pub(super) fn count_late_failure(&self, call: &PendingCall, progress: &mut RunProgress) {
        let results = self.run_state.context.tool_results();
        let ticket = Some(&call.tool_call_id);
        let result = results.iter().rev().find(|result| result.tool_call_id.as_ref() == ticket);
        if let Some(Err(fault)) = result.map(|result| &result.outcome) {
            progress.failed_calls += 1;
            note_failure(progress, &call.name, fault);
        }
    }

    /// Renders the state of the pending calls for a request.
    pub(super) fn pending_state(&self, progress: &RunProgress) -> Option<String> {
        let late: Vec<CallId> =
            progress.pending_calls.iter().map(|call| call.tool_call_id.clone()).collect();
        let now_ms = self.engine.core.wall_ms();
        self.run_state.context.pending_state(&late, PENDING_STATE_TOKENS, now_ms)
    }

    /// Executes the tool searches of a reply. Returns the contents of their answers by the index of
    /// the call.
    pub(super) async fn search_tools(
        &self,
        reply: &ModelReply,
        step: u32,
    ) -> Result<HashMap<usize, String>, Error> {
        if !self.tool_selection.has_search {
            return Ok(HashMap::new());
        }
        let (engine, names) = (self.engine, &self.tool_selection.tool_names);
        let answers = tool_search::execute_searches(engine, self.caller, names, reply).await?;
        let contents = answers.into_iter().map(|(index, answer)| {
            if let Some(tools) = &answer.tools {
                let call = &reply.calls[index];
                (self.event_sink)(LoopEvent::ToolsFound { step, call, tools });
            }
            (index, answer.content)
        });
        Ok(contents.collect())
    }

    /// Records the calls of caller tools if the loop drives a stored run, and adds the messages
    /// that answer them: their results, or notices that these come later. Returns the calls that
    /// are left for the caller.
    pub(super) async fn record_caller_calls(
        &mut self,
        calls: Vec<ToolCallRequest>,
        reply: &ModelReply,
        progress: &mut RunProgress,
        messages: &mut Vec<serde_json::Value>,
    ) -> Result<Vec<ToolCallRequest>, Error> {
        if self.run_state.owner != LoopOwner::StoredRun {
            return Ok(calls);
        }
        for call in &calls {
            let index = reply.calls.iter().position(|other| other.id == call.id);
            let key =
                index.and_then(|index| limits::idempotency_key(self.options, progress, index));
            progress.calls += 1;
            let content = match self.record_caller_call(call, key, progress).await {
                Ok(content) => content,
                Err(Error::Refused { fault, .. }) => {
                    progress.failed_calls += 1;
                    note_failure(progress, &call.name, &fault);
                    fault_content(&fault)
                }
                Err(error) => return Err(error),
            };
            messages.push(limits::tool_message(&call.id, &content));
        }
        Ok(Vec::new())
    }

    /// Records a call that an agent outside of the loop executes, and waits for its result unless
    /// its tool is asynchronous. Returns the content of the answer.
    async fn record_caller_call(
        &mut self,
        call: &ToolCallRequest,
        key: Option<String>,
        progress: &mut RunProgress,
    ) -> Result<String, Error> {
        let definition = self.tool_selection.context_tool(&call.name);
        let name = definition.map_or(call.name.as_str(), |tool| tool.name.as_str());
        let is_async = definition.is_some_and(|tool| tool.background);
        let arguments = if call.arguments.trim().is_empty() { "{}" } else { &call.arguments };
        let request = CallRequest::new(name, arguments).map_err(|error| {
            Error::refused(Code::ValidationError, format!("the arguments are not JSON: {error}"))
        })?;
        let request = CallRequest {
            call_id: Some(call.id.clone()),
            idempotency_key: key,
            user_id: self.options.user_id.clone(),
            traceparent: self.options.traceparent.clone(),
            ..request
        };
        let reported = ReportedCall { request, background: Some(is_async), result: None };
        let (engine, run_id) = (self.engine, self.options.run_id.as_str());
        let recorded = engine.contexts.record_calls(self.caller, run_id, vec![reported]).await?;
        let Some(mut ticket) = recorded.into_iter().next() else { return Ok(String::new()) };
        if !is_async {
            let remaining_ms = limits::remaining_ms(&self.options.limits, progress);
            let wait_ms = self.options.execution_options.wait_ms.unwrap_or(u64::MAX);
            let until = Until::EndedWithin(wait_ms.min(remaining_ms));
            ticket = engine.calls.wait(self.caller, &ticket.id, until).await?;
        }
        self.record_call(&ticket);
        let pending = PendingCall {
            tool_call_id: ticket.id.clone(),
            call_id: call.id.clone(),
            name: call.name.clone(),
            suspends: false,
            is_detached: false,
        };
        if ticket.outcome.is_none() {
            let content = pending_content(&batch::pending_notice(&ticket));
            progress.pending_calls.push(pending);
            return Ok(content);
        }
        self.count_late_failure(&pending, progress);
        let options = &self.options.execution_options;
        let budget = options.result_tokens.unwrap_or(DEFAULT_RESULT_TOKENS);
        let results = vec![late_entry_result(&pending, ticket)];
        let (_, contents) = batch::render_within_budget(budget, results).await?;
        Ok(contents.into_iter().next().unwrap_or_default())
    }
}

fn note_failure(progress: &mut RunProgress, tool: &str, fault: &Fault) {
    progress.has_withheld_call |= matches!(fault.code, Code::Canceled | Code::PermissionDenied);
    let fault = fault.to_string();
    let (fault, is_warned) = split_warning(&fault);
    let failure = match RunProgress::innermost_failure(fault) {
        // Keep only the innermost cause: otherwise each agent would repeat the failures of all
        // agents below it.
        Some(cause) => format!("{tool}: … {cause}"),
        None => format!("{tool}: {fault}"),
    };
    let failure = truncate_to_tokens(&failure, FAILURE_TOKENS);
    progress.last_failure = Some(match is_warned {
        true => format!("{failure}; {MAY_HAVE_HAPPENED}"),
        false => failure,
    });
}
