//! The driver of the agent loop: runs step after step over one conversation.

mod run_state;

use std::sync::Arc;

use serde_json::json;

use super::{EventSink, LoopEvent, StepOutcome, ending, ignore_events};
use crate::domain::agent::AgentDefinition;
use crate::domain::call::Call;
use crate::domain::caller::Caller;
use crate::domain::fault::{Code, Error};
use crate::domain::json::Json;
use crate::domain::model_reply::{ModelReply, ToolCallRequest};
use crate::domain::run::RunLineage;
use crate::domain::run::handoff::{ActiveAgent, Handoff};
use crate::domain::run::options::{DEFAULT_RESULT_TOKENS, RunOptions};
use crate::domain::run::progress::{Conversation, FinalAnswer};
use crate::domain::tool::Effect;
use crate::domain::utp::AfterExecution;
use crate::ports::bus::Topic;
use crate::ports::engine_metrics;
use crate::ports::model::{Model, ModelRequest};
use crate::registry::name_for_model;
use crate::runs::Runs;
use crate::runs::agent_loop::execute::{ExecutedStep, ExecutionPlan, is_harmless_late_call};
use crate::runs::agent_loop::late_results::LateResult;
use crate::runs::agent_loop::limits;
use crate::runs::agent_loop::request::ModelRequester;
use crate::runs::agent_loop::resume::PriorResults;
use crate::runs::agent_loop::tool_selection::{RequestTools, ToolSelection};
use crate::runs::handoff::{hand_off, is_handoff, late_handoff_positions};
use run_state::{RecordedCalls, RunState};

/// Extra time for the last request after the time limit.
const FINAL_REQUEST_GRACE_MS: u64 = 60_000;

/// Polling interval while the loop waits for late results, in case a wakeup is missed.
const LATE_RESULT_POLL_MS: u64 = 2_000;

/// An agent loop over one conversation. [`Runs::run_agent_loop`] runs it as a whole; a program
/// that stores the conversation in between alternates [`AgentLoop::request_reply`] and
/// [`AgentLoop::execute_reply`].
pub struct AgentLoop<'a> {
    engine: &'a Arc<Runs>,
    caller: &'a Caller,
    model: &'a dyn Model,
    options: &'a RunOptions,
    event_sink: EventSink<'a>,
    tool_selection: ToolSelection,
    /// True if the pending reply existed before this loop requested one, so that its calls may
    /// already have been made.
    is_reply_resumed: bool,
    /// True if an empty reply is acceptable even if no late results are pending.
    pub(crate) allows_empty_reply: bool,
    /// The options with the idempotency prefix of [`AgentLoop::set_idempotency_prefix`].
    keyed_options: Option<Box<RunOptions>>,
    /// The run's context, and the tools that were set for the run.
    run_state: RunState,
    /// The place of the run among the agents of its tree, if it is that of an agent's call.
    pub(crate) lineage: Option<&'a RunLineage>,
}

impl Runs {
    /// Runs one step: sends a request to the model and executes every call of its reply. The
    /// results are then in the conversation, except those of caller tools.
    ///
    /// If the model gives no reply after its retries, this returns an error with the code
    /// `UPSTREAM_UNAVAILABLE`. The conversation then has the late results that had arrived and no
    /// reply; the step can be repeated.
    pub async fn run_agent_step(
        self: &Arc<Self>,
        caller: &Caller,
        model: &dyn Model,
        options: &RunOptions,
        conversation: &mut Conversation,
    ) -> Result<StepOutcome, Error> {
        AgentLoop::new(self, caller, model, options, &ignore_events)?.run_step(conversation).await
    }

    /// Runs steps until the model gives its final answer, also at a limit, calls a caller tool, or
    /// hands the conversation off. Waits while there is nothing to do before late results arrive.
    /// Returns [`StepOutcome::Answered`], [`StepOutcome::CallerToolCalls`] or
    /// [`StepOutcome::HandedOff`].
    ///
    /// ```
    /// use async_trait::async_trait;
    /// use toolcrib::ports::model::{DeltaListener, Model, ModelError, ModelRequest};
    /// use toolcrib::domain::model_reply::{ModelReply, ToolCallRequest};
    /// use toolcrib::domain::run::options::RunOptions;
    /// use toolcrib::domain::run::progress::Conversation;
    /// use toolcrib::runs::agent_loop::StepOutcome;
    /// use toolcrib::{Caller, Engine, FnTool};
    ///
    /// /// Calls a tool and then reports its result. A real model sends requests to an endpoint.
    /// struct Adder;
    ///
    /// #[async_trait]
    /// impl Model for Adder {
    ///     async fn reply(
    ///         &self,
    ///         prompt: &ModelRequest,
    ///         _: DeltaListener<'_>,
    ///     ) -> Result<ModelReply, ModelError> {
    ///         let last = &prompt.messages[prompt.messages.len() - 1];
    ///         if last["role"] == "tool" {
    ///             let text = format!("It is {}.", last["content"].as_str().unwrap_or("?"));
    ///             return Ok(ModelReply { text, ..ModelReply::default() });
    ///         }
    ///         let (id, name) = ("call_0".to_owned(), "calc__add".to_owned());
    ///         let call = ToolCallRequest { id, name, arguments: r#"{"a":20,"b":22}"#.to_owned() };
    ///         Ok(ModelReply { calls: vec![call], ..ModelReply::default() })
    ///     }
    /// }
    ///
    /// #[derive(serde::Deserialize, schemars::JsonSchema)]
    /// struct Add { a: i64, b: i64 }
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let add = FnTool::new("calc.add", "Adds two integers", |args: Add| async move {
    ///     Ok::<i64, String>(args.a + args.b)
    /// });
    /// let engine = Engine::builder().tool(add).start().await?;
    /// let mut conversation = Conversation::from_user_text("What is 20 + 22?");
    /// let options = RunOptions::new("adder", "run_1");
    /// let caller = Caller::local("default");
    /// let outcome =
    ///     engine.runs().run_agent_loop(&caller, &Adder, &options, &mut conversation).await?;
    /// let StepOutcome::Answered(answer) = outcome else { panic!("{outcome:?}") };
    /// assert_eq!(answer.text, "It is 42.");
    /// # Ok(()) }
    /// ```
    pub async fn run_agent_loop(
        self: &Arc<Self>,
        caller: &Caller,
        model: &dyn Model,
        options: &RunOptions,
        conversation: &mut Conversation,
    ) -> Result<StepOutcome, Error> {
        AgentLoop::new(self, caller, model, options, &ignore_events)?.run(conversation).await
    }
}

impl<'a> AgentLoop<'a> {
    /// Returns the id of the agent that the run was handed off to.
    pub(crate) fn active_agent(&self) -> Option<&'a str> {
        self.options.active_agent.as_ref().map(|agent| agent.agent_id.as_str())
    }

    /// Hands the conversation off as a call says. See [`hand_off`].
    fn hand_off(
        &self,
        conversation: &mut Conversation,
        parts: (&Call, AgentDefinition),
        positions: (usize, usize),
    ) -> (Handoff, ActiveAgent) {
        hand_off((self.options, self.lineage), conversation, parts, positions)
    }

    /// Creates a loop that reports its events to `event_sink`. Refuses invalid options.
    pub fn new(
        engine: &'a Arc<Runs>,
        caller: &'a Caller,
        model: &'a dyn Model,
        options: &'a RunOptions,
        event_sink: EventSink<'a>,
    ) -> Result<Self, Error> {
        require_run_permission(caller)?;
        let selection = ToolSelection::validated(engine, caller, options)?;
        Ok(Self::with_tool_selection(engine, caller, model, options, event_sink, selection))
    }

    /// Creates a loop with options that were validated before: tools that no longer exist are
    /// skipped.
    pub fn with_available_tools(
        engine: &'a Arc<Runs>,
        caller: &'a Caller,
        model: &'a dyn Model,
        options: &'a RunOptions,
        event_sink: EventSink<'a>,
    ) -> Result<Self, Error> {
        require_run_permission(caller)?;
        let patterns = options.offered_tools();
        let selection = ToolSelection::new(engine, caller, options, patterns, None);
        Ok(Self::with_tool_selection(engine, caller, model, options, event_sink, selection))
    }

    fn with_tool_selection(
        engine: &'a Arc<Runs>,
        caller: &'a Caller,
        model: &'a dyn Model,
        options: &'a RunOptions,
        event_sink: EventSink<'a>,
        tool_selection: ToolSelection,
    ) -> Self {
        Self {
            engine,
            caller,
            model,
            options,
            event_sink,
            tool_selection,
            is_reply_resumed: false,
            allows_empty_reply: false,
            keyed_options: None,
            run_state: RunState::new(engine, &options.run_id),
            lineage: None,
        }
    }

    /// Runs steps until there is a final answer, a call of a caller tool or a handoff.
    pub async fn run(&mut self, conversation: &mut Conversation) -> Result<StepOutcome, Error> {
        loop {
            match self.run_step(conversation).await? {
                StepOutcome::Continue => {}
                StepOutcome::AwaitingResults | StepOutcome::Suspended => {
                    self.wait_for_late_result(conversation).await?
                }
                next => return Ok(next),
            }
        }
    }

    /// Runs one step.
    pub async fn run_step(
        &mut self,
        conversation: &mut Conversation,
    ) -> Result<StepOutcome, Error> {
        self.request_reply(conversation).await?;
        self.execute_reply(conversation).await
    }

    /// Sends a request to the model, unless a reply is already pending. Late results that have
    /// arrived are part of the request. The reply is then in `RunProgress::pending_reply`. There is
    /// none if a late result has ended the run or hands it off.
    pub async fn request_reply(&mut self, conversation: &mut Conversation) -> Result<(), Error> {
        if conversation.progress.pending_reply.is_some() {
            self.is_reply_resumed = true;
            return Ok(());
        }
        self.engine.registry.catalog().check_caller_is_on(self.caller)?;
        self.refresh_run().await?;
        self.add_late_results(conversation).await?;
        if conversation.progress.ending.is_some() || conversation.progress.late_handoff.is_some() {
            return Ok(());
        }
        let limits = &self.options.limits;
        if conversation.progress.stop_reason.is_none()
            && let Some(stop_reason) = limits::reached_limit(limits, &conversation.progress)
        {
            conversation.progress.stop_reason = Some(stop_reason);
            conversation.messages.push(limits::stop_message(stop_reason, limits));
        }
        let (step, last) =
            (conversation.progress.steps + 1, conversation.progress.stop_reason.is_some());
        self.tool_selection.keep_search_text(&mut conversation.progress.tool_search);
        let prompt = self.build_request(conversation, last);
        let clock = self.engine.core.clock.as_ref();
        let began_ms = clock.now_ms();
        let grace_ms = if last { FINAL_REQUEST_GRACE_MS } else { 0 };
        let remaining_ms = limits::remaining_ms(limits, &conversation.progress);
        (self.event_sink)(LoopEvent::ModelRequested { step, last });
        let request = ModelRequester {
            model: self.model,
            prompt: &prompt,
            policy: &self.options.model_request_policy,
            clock,
            step,
            until_ms: began_ms.saturating_add(remaining_ms.max(grace_ms)),
            allows_empty_reply: last
                || self.allows_empty_reply
                || !conversation.progress.pending_calls.is_empty(),
            event_sink: self.event_sink,
        };
        let answer = request.request_reply().await;
        let progress = &mut conversation.progress;
        progress.active_ms += clock.now_ms().saturating_sub(began_ms);
        let reply = match answer {
            Ok(reply) => reply,
            // The time limit passed during a request: that is a limit, not a failure.
            Err(request_error) if request_error.out_of_time && !last => {
                progress.stop_reason = Some(crate::domain::run::progress::StopReason::Time);
                conversation.messages.push(limits::stop_message(
                    crate::domain::run::progress::StopReason::Time,
                    limits,
                ));
                return Box::pin(self.request_reply(conversation)).await;
            }
            Err(request_error) => return Err(Error::from(request_error.error.fault)),
        };
        let request_size: usize =
            if reply.usage == Default::default() { request_bytes(&prompt) } else { 0 };
        progress.steps = step;
        let usage = limits::usage_or_estimate(&reply, request_size);
        engine_metrics::count_model_tokens(self.model.usage_label(), &usage);
        progress.usage += usage;
        let reply = limits::assign_call_ids(reply, step, &progress.pending_calls);
        (self.event_sink)(LoopEvent::ModelReplied { step, reply: &reply });
        progress.pending_reply = Some(reply);
        Ok(())
    }

    /// Returns true if the pending reply calls a tool whose effect is not `read` and whose policy
    /// lets a repeated request join its calls.
    pub fn has_side_effects(&self, conversation: &Conversation) -> bool {
        let calls = conversation.progress.pending_reply.iter().flat_map(|reply| &reply.calls);
        let mut tools = calls.filter_map(|call| self.tool_selection.tool(&call.name));
        tools.any(|tool| {
            let found = self.engine.registry.tool(self.caller, tool);
            found.is_ok_and(|tool| {
                let project = &self.caller.project;
                tool.definition.effect != Effect::Read
                    && self.engine.core.policies.resolve(project, &tool.definition).rejoin
            })
        })
    }

    /// Sets the prefix of the idempotency keys of the calls that follow; `None` restores that of
    /// the options.
    pub fn set_idempotency_prefix(&mut self, prefix: Option<String>) {
        self.keyed_options = prefix.map(|prefix| {
            Box::new(RunOptions { idempotency_prefix: Some(prefix), ..self.options.clone() })
        });
    }

    /// Executes the calls of the pending reply. A step repeated with the same idempotency prefix
    /// executes no call twice.
    pub async fn execute_reply(
        &mut self,
        conversation: &mut Conversation,
    ) -> Result<StepOutcome, Error> {
        if let Some(outcome) = self.conclude_by_late_result(conversation).await? {
            return Ok(outcome);
        }
        let Some(reply) = conversation.progress.pending_reply.clone() else {
            return Ok(StepOutcome::Continue);
        };
        if let Some(stop_reason) = conversation.progress.stop_reason {
            return Ok(StepOutcome::Answered(self.finish_at_limit(
                conversation,
                reply,
                stop_reason,
            )));
        }
        self.engine.registry.catalog().check_caller_is_on(self.caller)?;
        if reply.calls.is_empty() {
            conversation.progress.pending_reply = None;
            if !reply.text.is_empty() {
                conversation.messages.push(limits::assistant_message(&reply, false));
            }
            if conversation.progress.pending_calls.iter().any(|call| !call.is_detached) {
                return Ok(StepOutcome::AwaitingResults);
            }
            return Ok(StepOutcome::Answered(model_answer(reply)));
        }
        self.refresh_run().await?;
        self.save_tool_selection().await?;
        let began_ms = self.engine.core.now_ms();
        let max_entries = self.engine.core.limits.max_batch_entries;
        let step = conversation.progress.steps;
        let is_resumed = std::mem::take(&mut self.is_reply_resumed);
        let options = self.keyed_options.as_deref().unwrap_or(self.options);
        let (progress, searches) = (&conversation.progress, self.search_tools(&reply, step).await?);
        let prior_results = match is_resumed {
            true => PriorResults::load(self.engine, self.caller, options, progress).await?,
            false => PriorResults::default(),
        };
        let prior_results = PriorResults { searches, ..prior_results };
        let plan = ExecutionPlan::new(
            &reply,
            &self.tool_selection,
            options,
            (&conversation.progress, &prior_results),
            max_entries,
        );
        let caller_calls = plan.caller_calls();
        // Work on a copy, so that a failure midway leaves the conversation unchanged.
        let mut progress = conversation.progress.clone();
        let before = conversation.messages.len();
        let recorded = RecordedCalls::default();
        let event_sink = |event: LoopEvent<'_>| {
            recorded.push(&event);
            (self.event_sink)(event);
        };
        let ExecutedStep { messages: mut results, terminating, handoff, refused } =
            plan.execute(self.engine, self.caller, options, &mut progress, &event_sink).await?;
        let ending = match ending::select_terminating(&terminating) {
            Some(call) => Some(self.engine.terminating_answer(self.caller, call).await?),
            None => None,
        };
        let caller_calls = match ending.is_none() && handoff.is_none() {
            true => {
                self.record_caller_calls(caller_calls, &reply, &mut progress, &mut results).await?
            }
            false => caller_calls,
        };
        self.record_results(recorded, &refused, &mut progress);
        (progress.pending_reply, progress.canceled) = (None, false);
        progress.active_ms += self.engine.core.now_ms().saturating_sub(began_ms);
        conversation.progress = progress;
        conversation.messages.push(limits::assistant_message(&reply, true));
        conversation.messages.extend(results);
        let step = StepEnd { before, caller_calls, ending, handoff };
        Ok(self.conclude_step(conversation, step))
    }

    /// Returns the outcome of a step whose calls were executed, with the messages that it needs.
    fn conclude_step(&self, conversation: &mut Conversation, step: StepEnd) -> StepOutcome {
        let StepEnd { before, caller_calls, ending, handoff } = step;
        if let Some(answer) = ending {
            let by = answer.terminated_by.as_ref().map(|call| name_for_model(&call.name));
            let by = by.as_deref().unwrap_or("another call");
            let reason = format!("the result of {by} ended the run");
            answer_unneeded_calls(conversation, &caller_calls, &reason);
            return StepOutcome::Answered(end_by_result(conversation, answer));
        }
        let target = handoff.as_ref().and_then(|call| self.engine.handoff_target(call));
        if let (Some(call), Some(target)) = (handoff, target) {
            let reason = format!("the conversation was handed off to {}", target.agent_id);
            answer_unneeded_calls(conversation, &caller_calls, &reason);
            let parts = (&*call, target);
            let handed_off = self.hand_off(conversation, parts, (before, before));
            return StepOutcome::HandedOff(Box::new(handed_off));
        }
        let is_suspended = conversation.progress.pending_calls.iter().any(|call| call.suspends);
        match caller_calls.is_empty() {
            false => StepOutcome::CallerToolCalls(caller_calls),
            true if is_suspended => StepOutcome::Suspended,
            true => StepOutcome::Continue,
        }
    }

    /// Returns the outcome of a late result that ends the run or hands it off, if there is one.
    async fn conclude_by_late_result(
        &self,
        conversation: &mut Conversation,
    ) -> Result<Option<StepOutcome>, Error> {
        if let Some(answer) = conversation.progress.ending.take() {
            let answer = end_by_result(conversation, *answer);
            return Ok(Some(StepOutcome::Answered(answer)));
        }
        let Some(id) = conversation.progress.late_handoff.clone() else { return Ok(None) };
        let call = self.engine.calls.call(self.caller, &id).await?;
        conversation.progress.late_handoff = None;
        let target = self.engine.handoff_target(&call);
        Ok(target.map(|target| {
            let positions = late_handoff_positions(conversation, &call);
            let handed_off = self.hand_off(conversation, (&call, target), positions);
            StepOutcome::HandedOff(Box::new(handed_off))
        }))
    }

    /// Answers the calls of the pending reply without executing anything.
    pub(crate) fn answer_calls_with(
        &self,
        conversation: &mut Conversation,
        mut answer_call: impl FnMut(&ToolCallRequest) -> RecordedCallAnswer,
    ) -> StepOutcome {
        let Some(reply) = conversation.progress.pending_reply.take() else {
            return StepOutcome::Continue;
        };
        if let Some(stop_reason) = conversation.progress.stop_reason {
            return StepOutcome::Answered(self.finish_at_limit(conversation, reply, stop_reason));
        }
        conversation.messages.push(limits::assistant_message(&reply, true));
        if reply.calls.is_empty() {
            return StepOutcome::Answered(model_answer(reply));
        }
        let mut ending = None;
        for call in &reply.calls {
            let RecordedCallAnswer { content, is_executed, ends_run } = answer_call(call);
            conversation.progress.calls += u32::from(is_executed);
            conversation.messages.push(limits::tool_message(&call.id, &content));
            if ends_run && ending.is_none() {
                let tool = self.tool_selection.tool(&call.name).unwrap_or(&call.name);
                let data =
                    Json::parse(&content).unwrap_or_else(|_| Json::from_value(&json!(content)));
                ending = Some(ending::answer_text(tool, &data, false));
            }
        }
        match ending {
            Some(text) => StepOutcome::Answered(FinalAnswer { text, ..FinalAnswer::default() }),
            None => StepOutcome::Continue,
        }
    }

    /// Waits until a late result arrives, and adds it to the conversation. If calls suspend the
    /// run, waits until all of them have ended.
    pub async fn wait_for_late_result(
        &mut self,
        conversation: &mut Conversation,
    ) -> Result<(), Error> {
        let runs = self.engine.clone();
        let topic = Topic::Run {
            project: self.caller.project.clone(),
            run_id: self.options.run_id.clone(),
        };
        let mut listener = runs.core.bus.listen(topic);
        let mut has_arrived = false;
        loop {
            has_arrived |= self.add_late_results(conversation).await? > 0;
            let pending = &conversation.progress.pending_calls;
            let is_suspended = pending.iter().any(|call| call.suspends);
            if conversation.progress.ending.is_some()
                || (!is_suspended && (has_arrived || pending.is_empty()))
            {
                return Ok(());
            }
            if runs.core.shutdown.is_cancelled() {
                let message = "the engine has been shut down";
                return Err(Error::refused(Code::Overloaded, message));
            }
            let next_poll_ms = runs.core.now_ms() + LATE_RESULT_POLL_MS;
            tokio::select! {
                () = listener.wait_for_wake() => {}
                () = runs.core.clock.sleep_until(next_poll_ms) => {}
                () = runs.core.shutdown.cancelled() => {}
            }
        }
    }

    /// Adds late results that have arrived to the conversation and returns their number.
    pub async fn add_late_results(
        &mut self,
        conversation: &mut Conversation,
    ) -> Result<usize, Error> {
        let budget = self.options.execution_options.result_tokens.unwrap_or(DEFAULT_RESULT_TOKENS);
        let pending = &conversation.progress.pending_calls;
        let (ended, cost) = self.engine.render_late_results(self.caller, pending, budget).await?;
        // Read the states after the results above, so that the context has all of those results.
        self.refresh_pending_calls(&conversation.progress).await?;
        let calls = ended.iter().filter_map(|result| result.call.clone());
        let terminating: Vec<_> = calls.filter(|call| ending::is_terminating(call)).collect();
        let ending = match ending::select_terminating(&terminating) {
            Some(call) => Some(self.engine.terminating_answer(self.caller, call).await?),
            None => None,
        };
        conversation.progress.usage += cost;
        let count = ended.len();
        for LateResult { pending: call, mut content, call: stored } in ended {
            if let Some(other) = stored.as_ref().filter(|call| is_handoff(call)) {
                match conversation.progress.late_handoff.is_some() || ending.is_some() {
                    true => content = limits::late_handoff_content(other),
                    false if self.engine.handoff_target(other).is_none() => {}
                    false => conversation.progress.late_handoff = Some(other.id.clone()),
                }
            }
            let message = limits::late_message(&call, &content);
            let after_execution = stored.as_deref().and_then(AfterExecution::from_call);
            let event = LoopEvent::LateResult { call: &call, message: &message, after_execution };
            (self.event_sink)(event);
            conversation.messages.push(message);
            self.count_late_failure(&call, &mut conversation.progress);
            let is_harmless = stored.as_deref().is_some_and(is_harmless_late_call);
            conversation.progress.harmless_calls += u32::from(is_harmless);
            conversation
                .progress
                .pending_calls
                .retain(|other| other.tool_call_id != call.tool_call_id);
        }
        if let Some(answer) = ending {
            conversation.progress.ending = Some(Box::new(answer));
        }
        Ok(count)
    }

    /// Returns the final answer at a limit: the text of the last reply, or a fallback text if that
    /// reply has none. Calls of that reply are not executed.
    fn finish_at_limit(
        &self,
        conversation: &mut Conversation,
        reply: crate::domain::model_reply::ModelReply,
        stop_reason: crate::domain::run::progress::StopReason,
    ) -> FinalAnswer {
        conversation.progress.pending_reply = None;
        let has_text = !reply.text.trim().is_empty();
        let text = if has_text {
            reply.text
        } else {
            limits::fallback_answer(stop_reason, &conversation.progress)
        };
        let final_reply =
            crate::domain::model_reply::ModelReply { text: text.clone(), ..Default::default() };
        conversation.messages.push(limits::assistant_message(&final_reply, false));
        let (finish_reason, stop_reason) = (reply.finish_reason, Some(stop_reason));
        FinalAnswer { text, finish_reason, stop_reason, terminated_by: None }
    }

    fn build_request(&self, conversation: &Conversation, last: bool) -> ModelRequest {
        let mut settings = self.options.settings.clone();
        let forced = settings.get("tool_choice").is_some_and(|choice| choice != "none");
        // A permanently forced tool choice would keep the model from ever giving a final answer.
        if last || (forced && conversation.progress.steps > conversation.progress.baseline.steps) {
            settings.remove("tool_choice");
        }
        let messages = match &self.options.active_agent {
            Some(agent) => agent.visible_messages(&conversation.messages),
            None => conversation.messages.clone(),
        };
        let RequestTools { tools, found_tools, tool_search, guidance } = match last {
            true => RequestTools::default(),
            false => self.tool_selection.request_tools(&messages),
        };
        if tools.is_empty() {
            settings.remove("tool_choice");
            settings.remove("parallel_tool_calls");
        }
        let pending_state = self.pending_state(&conversation.progress);
        ModelRequest {
            model: self.options.model.clone(),
            messages,
            tools,
            found_tools,
            tool_search,
            guidance,
            pending_state,
            settings,
        }
    }
}

/// The end of a step whose calls were executed.
struct StepEnd {
    /// Number of messages before the step.
    before: usize,
    /// Calls that the caller executes.
    caller_calls: Vec<ToolCallRequest>,
    /// The answer of a result that ends the run.
    ending: Option<FinalAnswer>,
    /// The call that hands the run off.
    handoff: Option<Arc<Call>>,
}

/// The recorded answer to a call, for a replay.
pub(crate) struct RecordedCallAnswer {
    /// The content that the model received.
    pub(crate) content: String,
    /// True if the call counts as made.
    pub(crate) is_executed: bool,
    /// True if the result ended the run.
    pub(crate) ends_run: bool,
}

/// Returns the answer of a reply without calls.
fn model_answer(reply: ModelReply) -> FinalAnswer {
    let (text, finish_reason) = (reply.text, reply.finish_reason);
    FinalAnswer { text, finish_reason, ..FinalAnswer::default() }
}

/// Ends the conversation with the answer that a result makes. A failure is no message of the model:
/// if the conversation is resumed, the model reads it as the result of its call.
fn end_by_result(conversation: &mut Conversation, answer: FinalAnswer) -> FinalAnswer {
    if answer.terminated_by.as_ref().is_none_or(|call| call.error.is_none()) {
        let text = ending::message_text(&answer);
        let last_message = ModelReply { text, ..ModelReply::default() };
        conversation.messages.push(limits::assistant_message(&last_message, false));
    }
    answer
}

/// Answers calls of the caller's tools that are not returned to it: every call of a reply needs an
/// answer before the conversation can continue.
fn answer_unneeded_calls(conversation: &mut Conversation, calls: &[ToolCallRequest], why: &str) {
    let answers = calls
        .iter()
        .map(|call| limits::tool_message(&call.id, &limits::unneeded_call_content(why)));
    conversation.messages.extend(answers);
}

fn require_run_permission(caller: &Caller) -> Result<(), Error> {
    if caller.may_invoke() {
        return Ok(());
    }
    let message = format!("a key with the role {} has no runs", caller.roles);
    Err(Error::refused(Code::PermissionDenied, message))
}

/// Returns the size of a request's tools and messages as JSON text.
fn request_bytes(prompt: &ModelRequest) -> usize {
    let tools = serde_json::to_string(&prompt.tools).map_or(0, |text| text.len());
    tools + serde_json::to_string(&prompt.messages).map_or(0, |text| text.len())
}
