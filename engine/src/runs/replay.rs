//! Replays a recorded run: the model gets its requests again, its tool calls are answered with
//! recorded results, and nothing is executed. The report lists the steps at which the model acted
//! differently.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde::Deserialize;
use serde_json::{Value, json};

use crate::domain::caller::Caller;
use crate::domain::fault::{Code, Error, Fault};
use crate::domain::model_reply::{ModelReply, ToolCallRequest};
use crate::domain::run::handoff::{ActiveAgent, PassedMessages};
use crate::domain::run::options::{RunLimits, RunOptions};
use crate::domain::run::progress::{Conversation, FinalAnswer, StopReason};
use crate::domain::run::{JournalEntry, JournalKind, Run};
use crate::ports::core::from_store_error;
use crate::runs::Runs;
use crate::runs::agent_loop::{self, EventSink, RecordedCallAnswer, StepOutcome};
use crate::runs::handoff::instructions_in_run;

/// Maximum number of an agent's versions to search for the one that a handoff named.
const MAX_VERSIONS: usize = 1_000;

/// A step at which the model acted differently.
#[derive(Debug, Clone, PartialEq)]
pub struct ReplayDifference {
    /// Number of the step, from 1.
    pub step: u32,
    /// The recorded reply; `None` if the recording has no such step.
    pub recorded: Option<ModelReply>,
    /// The reply in the replay; `None` if the replay has no such step.
    pub now: Option<ModelReply>,
}

/// Result of a replay.
#[derive(Debug, Clone, PartialEq)]
pub struct ReplayReport {
    /// Text of the final answer in the replay.
    pub answer: String,
    /// Text of the recorded final answer; `None` if the run has none.
    pub recorded_answer: Option<String>,
    /// Steps at which the replay differs, in order.
    pub differences: Vec<ReplayDifference>,
    /// Number of steps in the replay.
    pub steps: u32,
    /// Tokens that the replay used.
    pub usage: crate::domain::model_reply::TokenUsage,
    /// Number of calls without a recorded result. The model received an error for each.
    pub unrecorded_calls: u32,
}

impl Runs {
    /// Checks that the run exists and that the caller may replay it.
    pub async fn check_replay(
        self: &Arc<Self>,
        caller: &Caller,
        run_id: &str,
    ) -> Result<(), Error> {
        crate::runs::manage::require_run_access(caller)?;
        self.check_run_capacity()?;
        self.find_run(caller, run_id).await?;
        self.require_no_conversation(caller, run_id)
    }

    /// Replays a run against its recording. Nothing is stored or executed.
    pub async fn replay_run(
        self: &Arc<Self>,
        caller: &Caller,
        run_id: &str,
        model: Option<&str>,
        event_sink: EventSink<'_>,
    ) -> Result<ReplayReport, Error> {
        crate::runs::manage::require_run_access(caller)?;
        self.check_run_capacity()?;
        let _counted = ReplayCountGuard::new(&self.active_runs.replays);
        let replay = self.run_replay(caller, run_id, model, event_sink);
        tokio::select! {
            report = replay => report,
            () = self.core.shutdown.cancelled() => {
                let message = "the server is shutting down; nothing was done, a retry is safe";
                Err(Error::retry_later(Code::Overloaded, message, 1_000))
            }
        }
    }

    async fn run_replay(
        self: &Arc<Self>,
        caller: &Caller,
        run_id: &str,
        model: Option<&str>,
        event_sink: EventSink<'_>,
    ) -> Result<ReplayReport, Error> {
        let run = self.find_run(caller, run_id).await?;
        self.require_no_conversation(caller, run_id)?;
        let journal = self.streams.journal(caller, run_id).await?;
        let mut recording = Recording::from_journal(&journal, &run.options.limits);
        let initial_messages = std::mem::take(&mut recording.initial_messages);
        let mut replay = Replay {
            recording,
            conversation: Conversation::new(initial_messages),
            differences: Vec::new(),
            index: 0,
            is_beyond: false,
        };
        // The replay begins with the first agent.
        let mut active_agent: Option<Box<ActiveAgent>> = None;
        loop {
            let of_agent = active_agent.as_ref().and_then(|agent| agent.model.as_deref());
            let name = model.or(of_agent).unwrap_or(&run.model);
            let chosen = self.models().find(name).ok_or_else(|| {
                let message = format!("there is no model \"{name}\"");
                Error::refused(Code::UpstreamUnavailable, message)
            })?;
            let options = RunOptions {
                model: chosen.name,
                idempotency_prefix: None,
                active_agent,
                ..run.options.clone()
            };
            let mut agent_loop = agent_loop::AgentLoop::with_available_tools(
                self,
                caller,
                chosen.model.as_ref(),
                &options,
                event_sink,
            )?
            .for_replay();
            // A step that waited for late results can have an empty reply in the recording.
            agent_loop.allows_empty_reply = true;
            match replay.run_agent(&mut agent_loop).await? {
                AgentEnd::HandedOff(handoff, first_message) => {
                    let agent = self.load_handed_to(&run, &handoff, first_message).await?;
                    active_agent = Some(Box::new(agent));
                }
                AgentEnd::Answered(answer) => {
                    return Ok(ReplayReport {
                        answer: answer.text,
                        recorded_answer: run.answer.map(|answer| answer.text),
                        differences: replay.differences,
                        steps: replay.conversation.progress.steps,
                        usage: replay.conversation.progress.usage,
                        unrecorded_calls: replay.recording.unrecorded_calls,
                    });
                }
            }
        }
    }

    /// Returns the agent that a recorded handoff passed the conversation to, in the version of
    /// that time.
    async fn load_handed_to(
        &self,
        run: &Run,
        handoff: &RecordedHandoff,
        first_message: usize,
    ) -> Result<ActiveAgent, Error> {
        let agents = self.core.store.agents();
        let versions = agents.agent_versions(&run.project, &handoff.to, MAX_VERSIONS).await;
        let versions = versions.map_err(from_store_error)?;
        let mut definitions = versions.into_iter().map(|version| version.definition);
        let profile = definitions.find(|agent| agent.version == handoff.version);
        let profile = profile.map(|agent| agent.profile).unwrap_or_default();
        Ok(ActiveAgent {
            agent_id: handoff.to.clone(),
            version: handoff.version,
            instructions: instructions_in_run(profile.instructions, run.lineage.as_deref()),
            model: profile.model,
            tools: profile.tools,
            tool_mode: profile.tool_mode,
            pinned_tools: profile.pinned_tools,
            first_message,
        })
    }
}

/// A replay in progress.
struct Replay {
    recording: Recording,
    conversation: Conversation,
    differences: Vec<ReplayDifference>,
    /// Position in the recording.
    index: usize,
    /// True while the model continues past a step that was final in the recording.
    is_beyond: bool,
}

/// The reason why the replay of one agent ended.
enum AgentEnd {
    /// Another agent continues; it sees the messages from this position on.
    HandedOff(RecordedHandoff, usize),
    Answered(FinalAnswer),
}

impl Replay {
    /// Replays the steps of one agent.
    async fn run_agent(
        &mut self,
        agent_loop: &mut agent_loop::AgentLoop<'_>,
    ) -> Result<AgentEnd, Error> {
        loop {
            if !self.is_beyond {
                self.recording.replay_inputs(self.index, &mut self.conversation);
            }
            agent_loop.request_reply(&mut self.conversation).await?;
            let before = self.conversation.messages.len();
            let (is_final, handoff) = self.compare_reply();
            let recording = &mut self.recording;
            let next = agent_loop
                .answer_calls_with(&mut self.conversation, |call| recording.next_result(call));
            self.index += usize::from(!self.is_beyond);
            self.is_beyond |= is_final;
            // A handoff by a late result may follow a reply without calls.
            let has_answered = matches!(next, StepOutcome::Answered(_));
            if let Some(handoff) = handoff.filter(|_| is_final || !has_answered) {
                let first_message = match handoff.messages {
                    PassedMessages::None => self.conversation.messages.len(),
                    _ => before.saturating_sub(handoff.passed),
                };
                self.is_beyond = false;
                return Ok(AgentEnd::HandedOff(handoff, first_message));
            }
            let StepOutcome::Answered(answer) = next else { continue };
            self.skip_missing_steps();
            if self.index >= self.recording.steps.len() {
                return Ok(AgentEnd::Answered(answer));
            }
        }
    }

    /// Compares the pending reply with the recorded one. Returns true if the recorded reply is
    /// final or there is none, and the recorded handoff that followed.
    fn compare_reply(&mut self) -> (bool, Option<RecordedHandoff>) {
        let progress = &mut self.conversation.progress;
        let reply = progress.pending_reply.clone().unwrap_or_default();
        let recorded = self.recording.steps.get(self.index).filter(|_| !self.is_beyond);
        if !recorded.is_some_and(|recorded| have_same_actions(&recorded.reply, &reply)) {
            let step = recorded.map_or(progress.steps, |_| step_number(self.index));
            let recorded = recorded.map(|recorded| recorded.reply.clone());
            self.differences.push(ReplayDifference { step, recorded, now: Some(reply) });
        }
        if recorded.is_some_and(|recorded| recorded.was_resumed) {
            progress.reset_baseline();
        }
        let is_final = recorded.is_none_or(|recorded| recorded.is_final);
        (is_final, recorded.and_then(|recorded| recorded.handoff.clone()))
    }

    /// Records the steps that the replay does not have, because its model answered earlier.
    fn skip_missing_steps(&mut self) {
        while let Some(missing) = self.recording.steps.get(self.index).filter(|_| !self.is_beyond) {
            let (step, recorded) = (step_number(self.index), Some(missing.reply.clone()));
            self.differences.push(ReplayDifference { step, recorded, now: None });
            self.is_beyond = missing.is_final;
            self.recording.replay_inputs(self.index, &mut self.conversation);
            self.index += 1;
        }
        self.is_beyond = false;
    }
}

/// Increments a counter for as long as the guard lives.
struct ReplayCountGuard<'a>(&'a AtomicUsize);

impl<'a> ReplayCountGuard<'a> {
    fn new(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(count)
    }
}

impl Drop for ReplayCountGuard<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Returns the number of the step at this index. Steps are numbered from 1.
fn step_number(index: usize) -> u32 {
    u32::try_from(index + 1).unwrap_or(u32::MAX)
}

fn unrecorded_result(call: &ToolCallRequest) -> String {
    let message = format!(
        "not done: this is a replay, and there is no recorded result of {} with these arguments",
        call.name
    );
    crate::model_formats::fault_content(&Fault::new(Code::NotFound, message).without_side_effect())
}

/// The journal of a run, arranged for a replay.
#[derive(Default)]
struct Recording {
    initial_messages: Vec<Value>,
    steps: Vec<RecordedStep>,
    /// Recorded results, by call (name and arguments).
    results: HashMap<String, VecDeque<RecordedResult>>,
    /// Call ids of this replay by their recorded ids.
    current_ids: HashMap<String, String>,
    unrecorded_calls: u32,
}

/// A recorded result of a call, as the model received it.
#[derive(Clone)]
struct RecordedResult {
    /// The call's id in the recording.
    id: String,
    content: String,
    /// True if the call was executed and counted; false if it was only answered.
    was_executed: bool,
    /// True if the result ended the run.
    ended_run: bool,
}

/// A recorded reply of the model, with the inputs it received since the previous reply, other than
/// tool results.
struct RecordedStep {
    inputs: Vec<RecordedInput>,
    reply: ModelReply,
    /// True if the reply ended the exchange: a final answer, or a pause until late results arrived.
    is_final: bool,
    /// True if the run was resumed before the reply's calls were executed.
    was_resumed: bool,
    /// The handoff that one of the reply's calls made.
    handoff: Option<RecordedHandoff>,
}

/// A recorded handoff.
#[derive(Clone, Deserialize)]
struct RecordedHandoff {
    to: String,
    version: u64,
    messages: PassedMessages,
    /// Number of messages that were passed on.
    passed: usize,
}

enum RecordedInput {
    /// A message of the user.
    UserMessage(Value),
    /// The notice that a limit is reached.
    LimitNotice(StopReason, Value),
    /// The notice of a late result.
    LateResult(Value),
    /// No message: the run was resumed.
    Resumed,
}

impl Recording {
    fn from_journal(journal: &[JournalEntry], limits: &RunLimits) -> Self {
        let mut recording = Self::default();
        let mut inputs = Vec::new();
        let mut user_messages: VecDeque<Value> = VecDeque::new();
        let mut acted = true;
        for JournalEntry { record: entry, .. } in journal {
            match entry.kind {
                JournalKind::Created => {
                    recording.initial_messages.extend(entry.messages.iter().cloned());
                    continue;
                }
                JournalKind::UserMessage => user_messages
                    .extend(entry.data["messages"].as_array().cloned().unwrap_or_default()),
                JournalKind::ToolResults => {
                    recording.add_results(&entry.messages, &entry.data["calls"]);
                    acted = true;
                }
                JournalKind::HandedOff => {
                    if let Some(step) = recording.steps.last_mut() {
                        step.handoff = serde_json::from_value(entry.data.clone()).ok();
                    }
                }
                JournalKind::Resumed => match recording.steps.last_mut().filter(|_| !acted) {
                    Some(step) => step.was_resumed = true,
                    None => inputs.push(RecordedInput::Resumed),
                },
                _ => {}
            }
            for message in entry.messages.iter().filter(|message| is_input(message)) {
                inputs.push(match agent_loop::stop_reason_of(message, limits) {
                    _ if user_messages.front() == Some(message) => {
                        user_messages.pop_front();
                        RecordedInput::UserMessage(message.clone())
                    }
                    Some(stop_reason) => RecordedInput::LimitNotice(stop_reason, message.clone()),
                    None => RecordedInput::LateResult(message.clone()),
                });
            }
            if entry.kind == JournalKind::Replied
                && let Ok(reply) = serde_json::from_value::<ModelReply>(entry.data.clone())
            {
                let has_limit_notice =
                    inputs.iter().any(|input| matches!(input, RecordedInput::LimitNotice(..)));
                let answers = has_limit_notice || reply.calls.is_empty();
                acted = answers;
                let inputs = std::mem::take(&mut inputs);
                recording.steps.push(RecordedStep {
                    inputs,
                    reply,
                    is_final: answers,
                    was_resumed: false,
                    handoff: None,
                });
            }
        }
        recording
    }

    fn add_results(&mut self, messages: &[Value], executed: &Value) {
        let Some(step) = self.steps.last_mut() else { return };
        let executed: HashMap<&str, bool> = executed
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|call| {
                Some((call["call_id"].as_str()?, call["after_execution"] == "terminate"))
            })
            .collect();
        step.is_final |= executed.values().any(|ended_run| *ended_run);
        for call in &step.reply.calls {
            let answer =
                messages.iter().find(|message| message["tool_call_id"] == call.id.as_str());
            let content = answer.and_then(|message| message["content"].as_str());
            let recorded = self.results.entry(agent_loop::call_fingerprint(call)).or_default();
            recorded.extend(content.map(|content| RecordedResult {
                id: call.id.clone(),
                content: content.to_owned(),
                was_executed: executed.contains_key(call.id.as_str()),
                ended_run: executed.get(call.id.as_str()) == Some(&true),
            }));
        }
    }

    /// Adds the inputs that preceded this recorded reply to the conversation.
    fn replay_inputs(&self, index: usize, conversation: &mut Conversation) {
        for input in self.steps.get(index).into_iter().flat_map(|step| &step.inputs) {
            match input {
                RecordedInput::UserMessage(message) => {
                    conversation.add_user_messages(vec![message.clone()])
                }
                RecordedInput::LimitNotice(stop_reason, message) => {
                    conversation.progress.stop_reason = Some(*stop_reason);
                    conversation.messages.push(message.clone());
                }
                RecordedInput::LateResult(message) => conversation
                    .messages
                    .push(agent_loop::replace_late_call_id(message, &self.current_ids)),
                RecordedInput::Resumed => conversation.progress.reset_baseline(),
            }
        }
    }

    /// Returns the next recorded result of this call, in order. The last result repeats for all
    /// further calls.
    fn next_result(&mut self, call: &ToolCallRequest) -> RecordedCallAnswer {
        let recorded = self.results.get_mut(&agent_loop::call_fingerprint(call));
        let next = recorded.and_then(|recorded| match recorded.len() {
            0 | 1 => recorded.front().cloned(),
            _ => recorded.pop_front(),
        });
        let Some(RecordedResult { id, content, was_executed, ended_run }) = next else {
            self.unrecorded_calls += 1;
            let content = unrecorded_result(call);
            return RecordedCallAnswer { content, is_executed: true, ends_run: false };
        };
        self.current_ids.insert(id, call.id.clone());
        RecordedCallAnswer { content, is_executed: was_executed, ends_run: ended_run }
    }
}

/// Returns true if the message is an input to the model, neither its reply nor a tool result.
fn is_input(message: &Value) -> bool {
    message["role"] != "assistant" && message["role"] != "tool"
}

/// Returns true if the model acts the same: equal calls, regardless of the text. Replies
/// without calls must have equal text.
fn have_same_actions(recorded: &ModelReply, now: &ModelReply) -> bool {
    let calls = |reply: &ModelReply| -> Vec<String> {
        let mut calls: Vec<String> = reply.calls.iter().map(agent_loop::call_fingerprint).collect();
        calls.sort();
        calls
    };
    let text_differs = recorded.calls.is_empty() && recorded.text.trim() != now.text.trim();
    calls(recorded) == calls(now) && !text_differs
}

/// JSON form, for clients that stream a replay.
impl From<&ReplayDifference> for Value {
    fn from(difference: &ReplayDifference) -> Self {
        let ReplayDifference { step, recorded, now } = difference;
        json!({ "step": step, "recorded": recorded, "now": now })
    }
}
