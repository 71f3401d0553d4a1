//! The agent loop: sends a request to the model, executes the tool calls of its reply and returns
//! their results to the model, until the model answers or a limit is reached.
//!
//! One step is one request to the model and the execution of all calls of its reply through
//! [`Engine::run_batch`]. [`Engine::run_agent_step`] runs one step, [`Engine::run_agent_loop`] as
//! many as needed; neither requires a server or a stored run. `limits` holds the decisions (limits,
//! repeated calls, messages to the model) and is pure; `request` sends the request with its
//! retries, `execute` runs the calls, and `tool_selection` selects the tools that the model sees.
//!
//! A [`Conversation`] is the complete state of an open conversation. It can be stored between any
//! two steps, and also between the model's reply and the execution of its calls.

mod driver;
mod execute;
mod limits;
mod request;
mod resume;
mod summary;
mod tool_selection;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::calls::batch::{BatchEntryResult, BatchMode};
use crate::domain::fault::Fault;
use crate::domain::id::CallId;
use crate::domain::retry::{Backoff, MAX_RETRIES_LIMIT, TIMEOUT_MS_RANGE};
use crate::ports::model::{Delta, FinishReason, ModelReply, TokenUsage, ToolCallRequest};

pub use driver::AgentLoop;
pub use limits::check_messages;
pub(crate) use limits::{call_fingerprint, replace_late_call_id, stop_reason_of};
pub use tool_selection::check_tool_patterns;

#[cfg(doc)]
use crate::engine::Engine;

/// Limits of an agent loop. If one of them is reached, the model gets one last request, without
/// tools, for the best answer it can give.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RunLimits {
    /// Maximum number of requests to the model, not counting the last one.
    pub steps: u32,
    /// Maximum number of tool calls.
    pub calls: u32,
    /// Maximum number of tool calls in one reply; calls beyond it are not executed, and the model
    /// is informed.
    pub calls_per_step: u32,
    /// Maximum number of tokens of all requests and replies together.
    pub tokens: u64,
    /// Maximum active time, not counting the time spent waiting for late results.
    pub time_ms: u64,
    /// Number of identical calls with identical results after which the call is not executed again.
    pub repeats: u32,
    /// Maximum number of consecutive steps in which every call failed.
    pub failures: u32,
}

impl Default for RunLimits {
    fn default() -> Self {
        Self {
            steps: 32,
            calls: 256,
            calls_per_step: 64,
            tokens: 1_000_000,
            time_ms: 600_000,
            repeats: 3,
            failures: 4,
        }
    }
}

impl RunLimits {
    /// Returns the first invalid field and its valid range.
    pub fn invalid_field(&self) -> Option<(&'static str, String)> {
        let ranges = [
            ("steps", u64::from(self.steps), 1, 10_000),
            ("calls", u64::from(self.calls), 0, 100_000),
            ("calls_per_step", u64::from(self.calls_per_step), 1, 256),
            ("tokens", self.tokens, 1, 1_000_000_000),
            ("time_ms", self.time_ms, 1, 604_800_000),
            ("repeats", u64::from(self.repeats), 0, 10_000),
            ("failures", u64::from(self.failures), 0, 10_000),
        ];
        let wrong =
            ranges.into_iter().find(|(_, value, least, most)| !(*least..=*most).contains(value));
        wrong.map(|(field, _, least, most)| (field, format!("must be from {least} to {most}")))
    }
}

/// Settings for requests to the model and their retries.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ModelRequestPolicy {
    /// Maximum number of retries after a transient error.
    pub retries: u32,
    pub backoff: Backoff,
    /// Maximum duration of one request.
    pub request_ms: u64,
    /// Maximum size of a reply.
    pub max_answer_bytes: usize,
}

impl Default for ModelRequestPolicy {
    fn default() -> Self {
        Self {
            retries: 4,
            backoff: Backoff { initial_ms: 500, factor: 2.0, max_ms: 30_000, jitter: 0.5 },
            request_ms: 300_000,
            max_answer_bytes: 4 << 20,
        }
    }
}

/// Settings for the execution of calls.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ExecutionOptions {
    /// Selects the calls of one reply that run concurrently; by default the read-only ones.
    pub mode: Concurrency,
    pub max_parallel: Option<usize>,
    /// Timeout of each call. Defaults to the tool's own.
    pub timeout_ms: Option<u64>,
    /// Maximum number of retries of each call. Defaults to the execution policies.
    pub max_retries: Option<u32>,
    /// Maximum time to wait for the calls of one reply. A call that has not ended by then
    /// continues, and its result arrives late.
    pub wait_ms: Option<u64>,
    /// Maximum number of tokens of the results of one reply together; long results become digests.
    pub result_tokens: Option<usize>,
}

impl ExecutionOptions {
    /// Returns the first invalid field and its valid range.
    pub fn invalid_field(
        &self,
        limits: &crate::engine::EngineLimits,
    ) -> Option<(&'static str, String)> {
        let number = |value: Option<usize>| value.map(|value| value as u64);
        let ranges = [
            ("max_parallel", number(self.max_parallel), 1, limits.max_batch_parallel as u64),
            ("timeout_ms", self.timeout_ms, 1, *TIMEOUT_MS_RANGE.end()),
            ("max_retries", self.max_retries.map(u64::from), 0, u64::from(MAX_RETRIES_LIMIT)),
            ("wait_ms", self.wait_ms, 0, limits.max_wait_ms),
            ("result_tokens", number(self.result_tokens), 1, 1_000_000),
        ];
        let wrong = ranges.into_iter().find(|(_, value, least, most)| {
            value.is_some_and(|value| !(*least..=*most).contains(&value))
        });
        wrong.map(|(field, _, least, most)| (field, format!("must be from {least} to {most}")))
    }
}

/// Default for the number of tokens of the results of one reply together.
pub const DEFAULT_RESULT_TOKENS: usize = 8_000;

/// Serializable form of [`BatchMode`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Concurrency {
    Serial,
    #[default]
    Parallel,
    Unordered,
}

impl From<Concurrency> for BatchMode {
    fn from(side: Concurrency) -> Self {
        match side {
            Concurrency::Serial => Self::Serial,
            Concurrency::Parallel => Self::Parallel,
            Concurrency::Unordered => Self::Unordered,
        }
    }
}

/// Options of a conversation.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RunOptions {
    /// The model, as its endpoint names it.
    pub model: String,
    /// Id that groups the calls of the conversation.
    pub run_id: String,
    /// Names and patterns (`weather.*`) of the Toolcrib tools that the model sees; `None` means all
    /// tools that the caller may call.
    pub tools: Option<Vec<String>>,
    /// Tools that the caller executes itself, in the chat format. The loop returns their calls to
    /// the caller.
    #[serde(rename = "own_tools")]
    pub caller_tools: Vec<Value>,
    /// Other fields of each request to the model: `temperature`, `max_tokens`, ….
    pub settings: Map<String, Value>,
    pub limits: RunLimits,
    #[serde(rename = "asking")]
    pub model_request_policy: ModelRequestPolicy,
    #[serde(rename = "acting")]
    pub execution_options: ExecutionOptions,
    /// Prefix of the calls' idempotency keys, followed by the step and the call's index, so that a
    /// step repeated after a crash executes no call twice. Must be unique to one conversation.
    #[serde(rename = "key")]
    pub idempotency_prefix: Option<String>,
    /// A label of the calls; never used for a decision.
    pub user_id: Option<String>,
    /// W3C `traceparent` of the trace that the calls belong to.
    pub traceparent: Option<String>,
}

impl RunOptions {
    /// Creates options for this model, with all tools that the caller may call.
    pub fn new(model: impl Into<String>, run_id: impl Into<String>) -> Self {
        Self { model: model.into(), run_id: run_id.into(), ..Self::default() }
    }
}

/// A call whose result arrives late.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PendingCall {
    pub tool_call_id: CallId,
    /// The model's own id of the call.
    pub call_id: String,
    /// The tool's model-facing name.
    pub name: String,
}

/// Counts consecutive identical calls with the same result.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RepeatCounter {
    pub times: u32,
    /// Hash of the content that the model received.
    #[serde(rename = "told")]
    pub content_hash: u64,
}

/// The reason why the next request to the model is the last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StopReason {
    Steps,
    Calls,
    Tokens,
    Time,
    /// The model keeps making the same calls.
    Repeats,
    /// The model's calls keep failing.
    Failures,
}

impl StopReason {
    /// All reasons.
    pub const ALL: [Self; 6] =
        [Self::Steps, Self::Calls, Self::Tokens, Self::Time, Self::Repeats, Self::Failures];

    /// Returns the reason's name on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Steps => "steps",
            Self::Calls => "calls",
            Self::Tokens => "tokens",
            Self::Time => "time",
            Self::Repeats => "repeats",
            Self::Failures => "failures",
        }
    }
}

/// Usage at the time of the last user message: limits count from there.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsageBaseline {
    pub steps: u32,
    pub calls: u32,
    pub tokens: u64,
    #[serde(rename = "spent_ms")]
    pub active_ms: u64,
}

/// Progress of a conversation, apart from its messages.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RunProgress {
    /// Number of replies of the model so far.
    pub steps: u32,
    pub calls: u32,
    pub failed_calls: u32,
    pub usage: TokenUsage,
    /// Active time so far.
    #[serde(rename = "spent_ms")]
    pub active_ms: u64,
    #[serde(rename = "since")]
    pub baseline: UsageBaseline,
    /// A reply whose calls have not been executed yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[serde(rename = "reply")]
    pub pending_reply: Option<ModelReply>,
    /// True if the calls of that reply were canceled: calls that have not started are not executed.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub canceled: bool,
    /// Calls whose results arrive late.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[serde(rename = "awaited")]
    pub pending_calls: Vec<PendingCall>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    #[serde(rename = "seen")]
    pub repeat_counters: BTreeMap<String, RepeatCounter>,
    /// Number of consecutive steps that contained nothing but repeated calls.
    #[serde(rename = "stubborn")]
    pub repeated_steps: u32,
    /// Number of consecutive steps in which every call failed.
    #[serde(rename = "failures")]
    pub failed_steps: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[serde(rename = "closing")]
    pub stop_reason: Option<StopReason>,
}

impl RunProgress {
    /// Returns the usage so far.
    pub fn usage_so_far(&self) -> UsageBaseline {
        let tokens = self.usage.prompt_tokens.saturating_add(self.usage.completion_tokens);
        UsageBaseline { steps: self.steps, calls: self.calls, tokens, active_ms: self.active_ms }
    }

    /// Resets the counters of the limits when the conversation is resumed.
    pub(crate) fn reset_baseline(&mut self) {
        self.baseline = self.usage_so_far();
        (self.repeated_steps, self.failed_steps) = (0, 0);
        if self.pending_reply.is_none() {
            self.stop_reason = None;
        }
    }
}

/// An open conversation.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Conversation {
    /// The messages, in the chat format.
    pub messages: Vec<Value>,
    #[serde(default)]
    pub progress: RunProgress,
}

impl Conversation {
    /// Creates a conversation that begins with these messages.
    pub fn new(messages: Vec<Value>) -> Self {
        Self { messages, progress: RunProgress::default() }
    }

    /// Creates a conversation that begins with a user message.
    pub fn from_user_text(text: &str) -> Self {
        Self::new(vec![serde_json::json!({ "role": "user", "content": text })])
    }

    /// Adds user messages and resets the counters of the limits.
    pub fn add_user_messages(&mut self, messages: Vec<Value>) {
        self.messages.extend(messages);
        let before = std::mem::take(&mut self.progress);
        self.progress = RunProgress {
            // Step numbers are part of the calls' idempotency keys and are never reused.
            steps: before.steps,
            calls: before.calls,
            failed_calls: before.failed_calls,
            usage: before.usage,
            active_ms: before.active_ms,
            baseline: before.usage_so_far(),
            pending_calls: before.pending_calls,
            pending_reply: before.pending_reply,
            ..RunProgress::default()
        };
    }
}

/// The final answer of the model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FinalAnswer {
    pub text: String,
    #[serde(rename = "stopped")]
    pub finish_reason: FinishReason,
    /// The limit that triggered the last request, if one did.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[serde(rename = "closing")]
    pub stop_reason: Option<StopReason>,
}

/// The outcome of a step.
#[derive(Debug, Clone, PartialEq)]
pub enum StepOutcome {
    /// The calls were executed and their results are in the conversation: the next request can
    /// follow.
    Continue,
    /// The model gave its final answer.
    Answered(FinalAnswer),
    /// The model called caller tools. The Toolcrib calls of the same reply have been executed and
    /// answered in the conversation; these calls await messages from the caller.
    CallerToolCalls(Vec<ToolCallRequest>),
    /// The model has nothing to do until late results arrive. Any text of its reply is in the
    /// conversation.
    AwaitingResults,
}

/// An event of the agent loop, emitted as it happens.
#[derive(Debug)]
#[non_exhaustive]
pub enum LoopEvent<'a> {
    /// A request is sent to the model.
    ModelRequested { step: u32, last: bool },
    /// A delta of the reply.
    ReplyDelta { step: u32, piece: Delta },
    /// The request failed and is retried after a wait. Deltas emitted so far are void.
    ModelRetryScheduled { step: u32, retry: u32, wait_ms: u64, why: &'a Fault },
    /// The complete reply. None of its calls has been executed.
    ModelReplied { step: u32, reply: &'a ModelReply },
    /// A call ended, continues in the background, or was refused.
    CallAnswered { step: u32, settled: &'a BatchEntryResult, message: &'a Value },
    /// A late result was added to the conversation.
    LateResult { call: &'a PendingCall, message: &'a Value },
}

/// Receives the events of an agent loop.
pub type EventSink<'a> = &'a (dyn Fn(LoopEvent<'_>) + Send + Sync);

/// Discards an event.
pub fn ignore_events(_: LoopEvent<'_>) {}
