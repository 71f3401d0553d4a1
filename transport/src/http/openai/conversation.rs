//! Answers one request for a model response, in either of OpenAI's formats: runs the agent loop
//! over Toolcrib's tools until there is a response for the caller.
//!
//! A caller sees none of the calls of Toolcrib's tools, so it cannot send them back. If the model
//! calls the caller's own tools after or together with Toolcrib's, Toolcrib saves the messages that
//! the caller does not see (a saved conversation) and puts its id into the call ids that it
//! returns:
//! `call_CONVERSATION_0`. When the caller returns the results, the saved messages replace the
//! caller's message with these calls.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::Request;
use parking_lot::Mutex;
use serde_json::{Value, json};
use toolcrib::calls::{BatchEntryResult, PendingDelivery};
use toolcrib::domain::fault::{Code, Error};
use toolcrib::domain::model_reply::{FinishReason, ToolCallRequest};
use toolcrib::domain::run::handoff::{ActiveAgent, Handoff};
use toolcrib::domain::run::options::RunOptions;
use toolcrib::domain::run::progress::{Conversation, FinalAnswer, RunProgress, TerminatingCall};
use toolcrib::ports::model::{Delta, ResolvedModel};
use toolcrib::runs::agent_loop::{
    AgentLoop, EventSink as LoopEventSink, LoopEvent, StepOutcome, check_messages,
    check_pinned_tools,
};
use toolcrib::runs::{
    ActiveConversation, ConversationCheckpoint, EndedConversation, SavedConversation,
    UndeliveredRequest,
};
use toolcrib::{Caller, Engine};

use super::super::HttpState;
use super::fields::{RequestFields, ToolcribOptions, check_tools};
use super::live::{
    ConversationEnd, ConversationError, ConversationResult, LiveConversation, LiveConversations,
    Requester, StreamEvent,
};
use crate::auth;
use crate::http::extract;
use crate::http::openai::error::{OpenAiError, invalid_field, model_not_found};

/// Default time to wait for late results.
const DEFAULT_WAIT_MS: u64 = 30_000;

/// Maximum number of saved conversations that are restored into one request: the newest ones.
const MAX_SAVED_CONVERSATIONS: usize = 256;

/// The caller and the fields of a request.
pub(super) struct ConversationRequest {
    pub(super) caller: Caller,
    pub(super) fields: RequestFields,
    traceparent: Option<String>,
    /// The name of the API, and the body as text. They identify a repeated request.
    api: &'static str,
    body: String,
}

impl ConversationRequest {
    /// Authenticates the caller and parses the body.
    pub(super) async fn from_request(
        state: &HttpState,
        request: Request,
        api: &'static str,
    ) -> Result<Self, OpenAiError> {
        let headers = request.headers();
        let (engine, origins) = (&state.engine, &state.settings.origins);
        let credentials =
            auth::authenticate_request(engine, origins, headers, request.extensions())?;
        let caller = credentials.caller().clone();
        let traceparent = extract::traceparent(headers).map(|trace| trace.to_string());
        let bytes = extract::read_body(request, state.settings.max_body_bytes).await?;
        let fields = RequestFields(extract::parse_json(&bytes)?);
        let body = String::from_utf8_lossy(&bytes).into_owned();
        Ok(Self { caller, fields, traceparent, api, body })
    }
}

/// The messages and the caller's own tools of a request, in the chat format.
pub(super) struct Input {
    /// The system message that comes first.
    pub(super) instructions: Option<String>,
    pub(super) messages: Vec<Value>,
    pub(super) tools: Vec<Value>,
}

/// A conversation that is ready to run.
struct OpenAiConversation {
    /// Prefix of the idempotency keys of its steps with a checkpoint.
    id: String,
    /// The request, if a repeated one may join the conversation.
    undelivered: Option<UndeliveredRequest>,
    /// Set if a repeated request continues the conversation from its checkpoint.
    resumed_delivery: Option<PendingDelivery>,
    /// Summaries of the calls so far.
    call_summaries: Vec<Value>,
    engine: Engine,
    caller: Caller,
    model: ResolvedModel,
    options: RunOptions,
    conversation: Conversation,
    /// Number of messages that the caller has or has seen.
    known_messages: usize,
    wait: Duration,
}

/// Receives the events of a conversation.
type EventSink<'a> = &'a (dyn Fn(StreamEvent) + Send + Sync);

/// Starts the conversation of a request, or joins that of an earlier request with the same body
/// whose answer was not delivered.
pub(super) async fn open_conversation(
    state: &HttpState,
    request: ConversationRequest,
    model: &str,
    before: SavedConversation,
    input: Input,
    extras: ToolcribOptions,
) -> Result<Requester, OpenAiError> {
    let (engine, caller) = (state.engine.clone(), request.caller.clone());
    let conversations = engine.runs().conversations();
    let id = format!("chat_{}", ulid::Ulid::generate());
    let undelivered = match extras.rejoin {
        Some(false) => None,
        _ => conversations.undelivered_request(&caller, &id, request.api, &request.body),
    };
    let joined_delivery = undelivered.as_ref().and_then(|own| conversations.take_over(&own.digest));
    let mut resumed = None;
    if let Some(delivery) = joined_delivery {
        if let Some(live) = state.conversations.get(delivery.id()) {
            delivery.record_join();
            return Ok(live.take_over(delivery));
        }
        match conversations.load_checkpoint(&caller, delivery.id()).await? {
            Some(checkpoint) => resumed = Some((delivery, checkpoint)),
            None => delivery.mark_delivered(),
        }
    }
    let mut conversation =
        OpenAiConversation::new(state, request, model, before, input, extras).await?;
    // The steps without a checkpoint: a conversation that continues from its checkpoint requests
    // them from the model again, so each attempt has keys of its own.
    conversation.options.idempotency_prefix = Some(format!("{id}/unsaved"));
    conversation.id = id;
    conversation.undelivered = undelivered;
    if let Some((delivery, checkpoint)) = resumed {
        delivery.record_join();
        conversation.resume(delivery, checkpoint);
    }
    conversation.start(&state.conversations).await
}

impl OpenAiConversation {
    /// Builds a conversation from the saved messages (`before`) and those of the request. The tools
    /// of the request are the caller's own.
    async fn new(
        state: &HttpState,
        request: ConversationRequest,
        model: &str,
        before: SavedConversation,
        input: Input,
        extras: ToolcribOptions,
    ) -> Result<Self, OpenAiError> {
        let ConversationRequest { caller, fields, traceparent, .. } = request;
        let engine = state.engine.clone();
        let found = engine.runs().models().find(model);
        let chosen =
            found.ok_or_else(|| model_not_found(model, &engine.runs().models().names()))?;
        if let Some((field, reason)) = extras.limits.invalid_field() {
            return Err(invalid_field(&format!("toolcrib.limits.{field}"), reason));
        }
        let (parallel, wait_ms) = (engine.limits().max_batch_parallel, engine.limits().max_wait_ms);
        if let Some((field, reason)) = extras.policy.invalid_field(parallel, wait_ms) {
            return Err(invalid_field(&format!("toolcrib.policy.{field}"), reason));
        }
        check_pinned_tools(extras.tool_mode, extras.pinned_tools.as_deref())
            .map_err(prefix_pointer)?;
        let Input { instructions, messages, tools } = input;
        check_tools(&tools)?;
        check_messages(&messages)?;
        let SavedConversation { mut messages, pending_calls } =
            restore_unseen_messages(&engine, &caller, before, messages).await?;
        if let Some(text) = instructions {
            messages.insert(0, json!({ "role": "system", "content": text }));
        }
        let run_id = extras.run_id.unwrap_or_else(|| format!("run_{}", ulid::Ulid::generate()));
        let options = RunOptions {
            tools: extras.tools,
            tool_mode: extras.tool_mode,
            pinned_tools: extras.pinned_tools,
            caller_tools: tools,
            settings: fields.0,
            limits: extras.limits,
            model_request_policy: engine.runs().model_request_policy().clone(),
            execution_options: extras.policy,
            traceparent,
            ..RunOptions::new(chosen.name.clone(), run_id)
        };
        let wait_ms = extras.wait_ms.unwrap_or(DEFAULT_WAIT_MS).min(engine.limits().max_wait_ms);
        let mut conversation = Conversation::new(messages);
        conversation.progress.pending_calls = pending_calls;
        let (known_messages, wait) = (conversation.messages.len(), Duration::from_millis(wait_ms));
        Ok(Self {
            id: String::new(),
            undelivered: None,
            resumed_delivery: None,
            call_summaries: Vec::new(),
            engine,
            caller,
            model: chosen,
            options,
            conversation,
            known_messages,
            wait,
        })
    }

    /// Continues from a checkpoint.
    fn resume(&mut self, delivery: PendingDelivery, checkpoint: ConversationCheckpoint) {
        self.id = delivery.id().to_owned();
        if let Some(undelivered) = &mut self.undelivered {
            undelivered.id.clone_from(&self.id);
        }
        self.options.run_id = checkpoint.run_id;
        self.conversation = checkpoint.conversation;
        self.known_messages = checkpoint.known_messages;
        self.call_summaries = checkpoint.call_summaries;
        if let Some(agent) = checkpoint.active_agent {
            // If the model of this agent no longer exists, the model of the request continues the
            // conversation.
            let _ = self.set_active_agent(*agent);
        }
        self.resumed_delivery = Some(delivery);
    }

    /// Starts the conversation in a task of its own. Returns its first requester.
    async fn start(mut self, conversations: &LiveConversations) -> Result<Requester, OpenAiError> {
        let streams = self.engine.runs().streams();
        let active = streams
            .register_conversation(&self.caller, &self.model.name, &self.options)
            .await
            .map_err(point_at_run_id)?;
        let live = LiveConversation::new(
            self.id.clone(),
            self.options.run_id.clone(),
            self.engine.clone(),
            self.caller.clone(),
            conversations,
        );
        let resumed = self.resumed_delivery.take();
        Ok(live.start(resumed, active, |live, active| self.run(live, active)))
    }

    /// Runs the agent loop until there is a response for the caller, or the run is canceled or
    /// switched off.
    async fn run(
        mut self,
        live: Arc<LiveConversation>,
        active: Arc<ActiveConversation>,
    ) -> ConversationEnd {
        let steps = StepRecord {
            call_summaries: Mutex::new(std::mem::take(&mut self.call_summaries)),
            ..StepRecord::default()
        };
        let sink = |event: StreamEvent| live.push(event);
        self.replay_texts(&sink);
        let started_ms = jiff::Timestamp::now().as_millisecond() as u64;
        active.update(&self.conversation.progress, &self.options);
        let ending = tokio::select! {
            biased;
            stop = active.wait_for_stop() => Err(stop),
            ending = self.drive((&live, &active), &sink, &steps) => ending,
        };
        let calls_made = !steps.call_summaries.lock().is_empty();
        // A continued run finds the calls of the interrupted step by their keys.
        if let Some(prefix) = steps.checkpoint_prefix.into_inner() {
            self.options.idempotency_prefix = Some(prefix);
        }
        match ending {
            Ok((result, progress, answer)) => {
                let messages = &result.conversation.messages;
                self.record_run(messages, &progress, started_ms, Ok(answer)).await;
                Ok(result)
            }
            Err(error) => {
                let Conversation { messages, progress, .. } = &self.conversation;
                self.record_run(messages, progress, started_ms, Err(&error)).await;
                Err(ConversationError { error, calls_made })
            }
        }
    }

    /// Repeats the texts of the steps before the checkpoint for the new requester.
    fn replay_texts(&self, sink: EventSink<'_>) {
        let messages = &self.conversation.messages[self.known_messages..];
        let replies = messages.iter().filter(|message| message["role"] == "assistant");
        let mut texts: Vec<&str> =
            replies.filter_map(|message| message["content"].as_str()).collect();
        texts.extend(self.conversation.progress.pending_reply.iter().map(|r| r.text.as_str()));
        for text in texts.into_iter().filter(|text| !text.is_empty()) {
            (sink)(StreamEvent::StepStarted);
            (sink)(StreamEvent::TextDelta(text.to_owned()));
            (sink)(StreamEvent::ModelReplied);
        }
    }

    async fn drive(
        &mut self,
        (live, active): (&Arc<LiveConversation>, &ActiveConversation),
        sink: EventSink<'_>,
        steps: &StepRecord,
    ) -> Result<(ConversationResult, RunProgress, FinalAnswer), Error> {
        let deduplicator = Mutex::new(TextDeduplicator {
            sink,
            received: String::new(),
            discarded: String::new(),
        });
        let finish_reason = Mutex::new(FinishReason::ToolCalls);
        let event_sink = |event: LoopEvent<'_>| {
            active.publish(&event);
            match event {
                LoopEvent::ModelRequested { .. } => deduplicator.lock().start_step(),
                LoopEvent::ReplyDelta { piece: Delta::Text(text), .. } => {
                    deduplicator.lock().push_text(&text)
                }
                LoopEvent::ModelRetryScheduled { .. } => deduplicator.lock().restart_reply(),
                LoopEvent::ModelReplied { reply, .. } => {
                    *finish_reason.lock() = reply.finish_reason;
                    (sink)(StreamEvent::ModelReplied);
                }
                LoopEvent::CallAnswered { result, .. } => {
                    steps.call_summaries.lock().push(call_summary(result))
                }
                _ => {}
            }
        };
        let parts = (live, active);
        let (next, handoffs) = self.run_agents(parts, &event_sink, steps).await?;
        let mut metadata = json!({ "run_id": self.options.run_id, "limit_reached": null });
        let (mut terminated_by, mut stop_reason) = (None, None);
        let (text, calls, finish_reason) = match next {
            StepOutcome::Answered(answer) => {
                let answer = self.complete_answer(answer, &mut metadata);
                (terminated_by, stop_reason) = (answer.terminated_by, answer.stop_reason);
                (answer.text, Vec::new(), answer.finish_reason)
            }
            StepOutcome::CallerToolCalls(calls) => {
                let calls = self.save_unseen_messages(calls).await?;
                let text = last_assistant_text(&self.conversation.messages[self.known_messages..]);
                // A response that was cut off may contain calls with incomplete arguments.
                let finish_reason = *finish_reason.lock();
                (text, calls, finish_reason)
            }
            StepOutcome::AwaitingResults
            | StepOutcome::Suspended
            | StepOutcome::HandedOff(_)
            | StepOutcome::Continue => {
                let text = last_assistant_text(&self.conversation.messages[self.known_messages..]);
                let still_running = || "It continues in the background.".to_owned();
                let text = Some(text).filter(|text| !text.is_empty()).unwrap_or_else(still_running);
                (text, Vec::new(), FinishReason::Stop)
            }
        };
        // An answer that comes from the result of a call is separate from the text that the model
        // may have written before the call.
        deduplicator.lock().finish(&text, terminated_by.is_some());
        let texts = assistant_texts(&self.conversation.messages[self.known_messages..], &text);
        let progress = std::mem::take(&mut self.conversation.progress);
        metadata["steps"] = progress.steps.into();
        metadata["tool_calls"] = steps.call_summaries.lock().clone().into();
        add_ending(&mut metadata, terminated_by.clone());
        if !handoffs.is_empty() {
            metadata["handoffs"] = json!(handoffs);
        }
        let messages = std::mem::take(&mut self.conversation.messages);
        let answer = FinalAnswer { text: text.clone(), finish_reason, stop_reason, terminated_by };
        let pending_calls = progress.pending_calls.clone();
        let conversation = SavedConversation { messages, pending_calls };
        let usage = progress.usage;
        let result =
            ConversationResult { text, texts, calls, finish_reason, usage, metadata, conversation };
        Ok((result, progress, answer))
    }

    /// Stores the conversation as a run. The response does not depend on it.
    async fn record_run(
        &self,
        messages: &[Value],
        progress: &RunProgress,
        started_ms: u64,
        outcome: Result<FinalAnswer, &Error>,
    ) {
        let ended = EndedConversation {
            model: &self.model.name,
            options: &self.options,
            progress,
            messages,
            known_messages: self.known_messages,
            started_ms,
            outcome,
        };
        let conversations = self.engine.runs().conversations();
        if let Err(error) = conversations.record_run(&self.caller, ended).await {
            tracing::warn!(run_id = self.options.run_id, %error, "a conversation is not listed");
        }
    }

    /// Adds a note to the final answer if all calls failed. The metadata say so too, and name the
    /// limit that was reached.
    fn complete_answer(&self, mut answer: FinalAnswer, metadata: &mut Value) -> FinalAnswer {
        if let Some(limit) = answer.stop_reason {
            metadata["limit_reached"] = limit.as_str().into();
        }
        let failure = self.conversation.progress.describe_total_failure();
        if let Some(failure) = failure.filter(|_| answer.terminated_by.is_none()) {
            answer.append_note(&failure, &self.options.settings);
            metadata["failure"] = failure.into();
        }
        answer
    }

    /// Runs the agent loop, with another agent after each handoff, until it has an outcome for the
    /// caller.
    async fn run_agents(
        &mut self,
        (live, active): (&Arc<LiveConversation>, &ActiveConversation),
        event_sink: LoopEventSink<'_>,
        steps: &StepRecord,
    ) -> Result<(StepOutcome, Vec<Handoff>), Error> {
        let mut handoffs = Vec::new();
        loop {
            let (runs, caller) = (self.engine.runs(), &self.caller);
            let (model, options) = (self.model.model.clone(), &self.options);
            let mut agent_loop = match &options.active_agent {
                None => AgentLoop::new(runs, caller, &*model, options, event_sink)
                    .map_err(prefix_pointer)?,
                Some(_) => {
                    AgentLoop::with_available_tools(runs, caller, &*model, options, event_sink)?
                }
            };
            let checkpoints = Checkpoints {
                live,
                active,
                options,
                undelivered: self.undelivered.as_ref(),
                known_messages: self.known_messages,
                steps,
            };
            let (conversation, wait) = (&mut self.conversation, self.wait);
            let next = run_steps(&mut agent_loop, conversation, wait, &checkpoints).await?;
            drop(agent_loop);
            let StepOutcome::HandedOff(handoff) = next else { return Ok((next, handoffs)) };
            let (handoff, agent) = *handoff;
            handoffs.push(handoff);
            self.set_active_agent(agent)?;
            active.update(&self.conversation.progress, &self.options);
        }
    }

    /// Lets another agent continue the conversation.
    fn set_active_agent(&mut self, agent: ActiveAgent) -> Result<(), Error> {
        if let Some(name) = &agent.model {
            let found = self.engine.runs().models().find(name).ok_or_else(|| {
                let (id, version) = (&agent.agent_id, agent.version);
                let message = format!(
                    "there is no model \"{name}\", which agent {id} (version {version}) uses"
                );
                Error::refused(Code::UpstreamUnavailable, message)
            })?;
            self.options.model.clone_from(&found.name);
            self.model = found;
        }
        self.options.active_agent = Some(Box::new(agent));
        Ok(())
    }

    /// Saves the messages that the caller does not see, if there are any, and gives the returned
    /// calls ids that refer to them.
    async fn save_unseen_messages(
        &mut self,
        mut calls: Vec<ToolCallRequest>,
    ) -> Result<Vec<ToolCallRequest>, Error> {
        let unseen = self.conversation.messages.len() - self.known_messages;
        if unseen < 2 && self.conversation.progress.pending_calls.is_empty() {
            return Ok(calls);
        }
        let id = ulid::Ulid::generate().to_string();
        let tail = &mut self.conversation.messages[self.known_messages..];
        let step = tail.iter_mut().rev().find(|message| message["role"] == "assistant");
        let tool_calls = step.and_then(|message| message["tool_calls"].as_array_mut());
        for tool_call in tool_calls.into_iter().flatten() {
            let index = calls.iter().position(|call| tool_call["id"] == call.id.as_str());
            if let Some(index) = index {
                tool_call["id"] = format!("call_{id}_{index}").into();
            }
        }
        for (index, call) in calls.iter_mut().enumerate() {
            call.id = format!("call_{id}_{index}");
        }
        let (messages, pending_calls) =
            (tail.to_vec(), self.conversation.progress.pending_calls.clone());
        self.engine
            .runs()
            .conversations()
            .save(&self.caller, &id, &SavedConversation { messages, pending_calls })
            .await?;
        Ok(calls)
    }
}

/// Restores the messages that the caller does not have into the conversation.
async fn restore_unseen_messages(
    engine: &Engine,
    caller: &Caller,
    before: SavedConversation,
    messages: Vec<Value>,
) -> Result<SavedConversation, OpenAiError> {
    let mut all = before;
    let start = all.messages.len();
    let mut newest: Vec<String> = Vec::new();
    for id in messages.iter().rev().filter_map(saved_conversation_id) {
        if newest.len() < MAX_SAVED_CONVERSATIONS && !newest.contains(&id) {
            newest.push(id);
        }
    }
    let mut restored: HashSet<String> = HashSet::new();
    let last_message = messages.iter().rfind(|message| message["role"] != "tool");
    let goes_on_from = last_message.and_then(saved_conversation_id);
    for message in messages {
        let id = saved_conversation_id(&message).filter(|id| newest.contains(id));
        // Calls of one step that return in several messages still belong to one step.
        if id.as_ref().is_some_and(|id| restored.contains(id)) {
            continue;
        }
        let saved = match &id {
            Some(id) => engine.runs().conversations().load(caller, id).await?,
            None => None,
        };
        match (saved, id) {
            (Some(conversation), Some(id)) => {
                drop_repeated_messages(&mut all.messages, start, &conversation.messages);
                all.messages.extend(conversation.messages);
                // For earlier saved conversations, late results were delivered and answered when
                // the caller continued from there.
                if goes_on_from.as_ref() == Some(&id) {
                    all.pending_calls.extend(conversation.pending_calls);
                }
                restored.insert(id);
            }
            _ => all.messages.push(message),
        }
    }
    Ok(all)
}

/// Drops trailing messages that the saved conversation contains as well: in the Responses format,
/// the text before a call of Toolcrib's tools is a separate message, and callers send it back as
/// one.
fn drop_repeated_messages(messages: &mut Vec<Value>, start: usize, saved: &[Value]) {
    let contents = saved.iter().rev().filter(|message| message["role"] == "assistant");
    let mut contents = contents.map(|message| &message["content"]);
    while messages.len() > start
        && let Some(last) = messages.last()
        && last["role"] == "assistant"
        && last.get("tool_calls").is_none_or(Value::is_null)
        && contents.any(|content| *content == last["content"])
    {
        messages.pop();
    }
}

/// Returns the id of the saved conversation that the calls of a message refer to.
fn saved_conversation_id(message: &Value) -> Option<String> {
    let calls = message.get("tool_calls")?.as_array()?;
    let lead = |call: &Value| {
        let (id, index) = call.get("id")?.as_str()?.strip_prefix("call_")?.split_once('_')?;
        let is_saved_id = ulid::Ulid::from_string(id).is_ok() && index.parse::<usize>().is_ok();
        is_saved_id.then(|| id.to_owned())
    };
    calls.iter().find_map(lead)
}

fn last_assistant_text(messages: &[Value]) -> String {
    let last = messages.iter().rev().find(|message| message["role"] == "assistant");
    last.and_then(|message| message["content"].as_str()).unwrap_or_default().to_owned()
}

fn assistant_texts(messages: &[Value], last: &str) -> Vec<String> {
    let texts = messages.iter().filter(|message| message["role"] == "assistant");
    let texts = texts.filter_map(|message| message["content"].as_str());
    let mut texts: Vec<String> = texts.filter(|t| !t.is_empty()).map(str::to_owned).collect();
    // The last text may have a note at its end that the conversation does not have.
    if texts.last().is_some_and(|text| last.starts_with(text.as_str())) {
        texts.pop();
    }
    if !last.is_empty() {
        texts.push(last.to_owned());
    }
    texts
}

/// Adds the call whose result ended the run, if one did.
fn add_ending(metadata: &mut Value, terminated_by: Option<TerminatingCall>) {
    if let Some(call) = terminated_by {
        metadata["deliverable_card_id"] = call.card_id.into();
        metadata["terminated_by"] = json!({ "tool_call_id": call.tool_call_id,
            "name": call.name, "result_fields": call.result_fields, "error": call.error });
    }
}

fn call_summary(result: &BatchEntryResult) -> Value {
    let id = result.call().map(|call| call.id.as_str());
    let mut summary = json!({ "tool_call_id": id, "name": result.name, "ok": result.ok() });
    if let Some(approval_id) = result.call().and_then(|call| call.pending_approval()) {
        summary["approval_id"] = approval_id.into();
    }
    if let Some(after_execution) = result.after_execution() {
        summary["after_execution"] = after_execution.as_str().into();
    }
    summary
}

/// Prefixes the pointers of the loop's validation errors: the loop's options are under `toolcrib`
/// here.
fn prefix_pointer(error: Error) -> Error {
    let Error::Refused { mut fault, retry_after_ms } = error else { return error };
    let pointer = fault.detail.as_ref().and_then(|detail| detail["pointer"].as_str());
    if let (Code::ValidationError, Some(pointer)) = (fault.code, pointer) {
        fault.detail = Some(json!({ "pointer": format!("/toolcrib{pointer}") }));
        fault.message = format!("toolcrib.{}", fault.message);
    }
    Error::Refused { fault, retry_after_ms }
}

/// Points a refusal of the requested run at the field `toolcrib.run_id`.
fn point_at_run_id(error: Error) -> Error {
    let Error::Refused { mut fault, retry_after_ms } = error else { return error };
    if fault.code == Code::PermissionDenied {
        fault.detail = Some(json!({ "pointer": "/toolcrib/run_id" }));
    }
    Error::Refused { fault, retry_after_ms }
}

/// Forwards the text of the current step without repetition. After a response was cut off, the loop
/// requests it again; text that was already forwarded is not forwarded a second time, as far as the
/// model repeats it.
struct TextDeduplicator<'a> {
    sink: EventSink<'a>,
    received: String,
    /// Text that was forwarded of a discarded response.
    discarded: String,
}

impl TextDeduplicator<'_> {
    fn start_step(&mut self) {
        (self.received, self.discarded) = (String::new(), String::new());
        (self.sink)(StreamEvent::StepStarted);
    }

    fn restart_reply(&mut self) {
        if self.discarded.len() < self.received.len() {
            self.discarded = std::mem::take(&mut self.received);
        }
        self.received.clear();
    }

    fn push_text(&mut self, text: &str) {
        self.received.push_str(text);
        if self.discarded.is_empty() {
            (self.sink)(StreamEvent::TextDelta(text.to_owned()));
        } else if self.discarded.starts_with(&self.received) {
            // Already forwarded.
        } else if let Some(more) = self.received.strip_prefix(&self.discarded) {
            // The new response continues where the discarded one was cut off.
            (self.sink)(StreamEvent::TextDelta(more.to_owned()));
            self.discarded.clear();
        } else {
            (self.sink)(StreamEvent::TextDelta(format!("\n\n{}", self.received)));
            self.discarded.clear();
        }
    }

    /// Forwards the rest of the text, including text that arrived without deltas. A text that is
    /// not the model's (`is_new_step`) becomes a step of its own.
    fn finish(&mut self, text: &str, is_new_step: bool) {
        if is_new_step {
            self.start_step();
        }
        let missing = text.strip_prefix(self.received.as_str()).unwrap_or(text);
        if !missing.is_empty() && self.received != text {
            self.push_text(missing);
        }
    }
}

/// The calls of a conversation. They are known also if the conversation is stopped during a step.
#[derive(Default)]
struct StepRecord {
    call_summaries: Mutex<Vec<Value>>,
    /// Prefix of the idempotency keys of the last step, if it has a checkpoint.
    checkpoint_prefix: Mutex<Option<String>>,
}

/// The checkpoints of a conversation. One is stored before each step that has side effects.
struct Checkpoints<'a> {
    live: &'a Arc<LiveConversation>,
    active: &'a ActiveConversation,
    options: &'a RunOptions,
    undelivered: Option<&'a UndeliveredRequest>,
    known_messages: usize,
    steps: &'a StepRecord,
}

impl Checkpoints<'_> {
    /// Prepares the execution of the pending reply. If it has side effects, a repeated request
    /// finds its calls from here on.
    async fn prepare_step(
        &self,
        agent_loop: &mut AgentLoop<'_>,
        conversation: &Conversation,
    ) -> Result<(), Error> {
        self.active.update(&conversation.progress, self.options);
        let Some(request) = self.undelivered else { return Ok(()) };
        if !agent_loop.has_side_effects(conversation) {
            agent_loop.set_idempotency_prefix(None);
            *self.steps.checkpoint_prefix.lock() = None;
            return Ok(());
        }
        let checkpoint = ConversationCheckpoint {
            run_id: self.live.run_id.clone(),
            conversation: conversation.clone(),
            known_messages: self.known_messages,
            call_summaries: self.steps.call_summaries.lock().clone(),
            active_agent: self.options.active_agent.clone(),
        };
        let conversations = self.live.engine.runs().conversations();
        conversations.save_checkpoint(&self.live.caller, request, &checkpoint).await?;
        agent_loop.set_idempotency_prefix(Some(request.id.clone()));
        *self.steps.checkpoint_prefix.lock() = Some(request.id.clone());
        let is_first = !self.live.has_checkpoint();
        if is_first && !self.live.set_delivery(conversations.start_delivery(request.clone())) {
            let message = "the requester has disconnected; nothing more is done";
            return Err(Error::refused(Code::Canceled, message));
        }
        Ok(())
    }
}

/// Runs steps until the loop has an outcome for the caller, or late results take longer than
/// `wait`.
async fn run_steps(
    agent_loop: &mut AgentLoop<'_>,
    conversation: &mut Conversation,
    wait: Duration,
    checkpoints: &Checkpoints<'_>,
) -> Result<StepOutcome, Error> {
    loop {
        agent_loop.request_reply(conversation).await?;
        checkpoints.prepare_step(agent_loop, conversation).await?;
        match agent_loop.execute_reply(conversation).await? {
            StepOutcome::Continue => {}
            StepOutcome::AwaitingResults | StepOutcome::Suspended => {
                let late = agent_loop.wait_for_late_result(conversation);
                match tokio::time::timeout(wait, late).await {
                    Ok(arrived) => arrived?,
                    Err(_) => return Ok(StepOutcome::AwaitingResults),
                }
            }
            outcome => return Ok(outcome),
        }
    }
}
