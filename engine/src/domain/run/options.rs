//! The options of a run: its model, tools and limits. Pure.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::domain::retry::{Backoff, MAX_RETRIES_LIMIT, TIMEOUT_MS_RANGE};
use crate::domain::run::handoff::ActiveAgent;
use crate::domain::tool::tool_mode::{ToolMode, ToolModeSettings};

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
    /// Selects the definitions that the model receives; `None` means the setting of the agent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool_mode: Option<ToolMode>,
    /// Names and patterns of the tools that every request offers in the modes `search` and
    /// `pinned`; `None` means those of the agent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pinned_tools: Option<Vec<String>>,
    /// Tools that the caller executes itself, in the chat format. The loop returns their calls to
    /// the caller.
    #[serde(rename = "own_tools")]
    pub caller_tools: Vec<Value>,
    /// Other fields of each request to the model: `temperature`, `max_tokens`, ….
    pub settings: Map<String, Value>,
    /// Limits of the agent loop.
    pub limits: RunLimits,
    /// Duration, size and retries of requests to the model.
    #[serde(rename = "asking")]
    pub model_request_policy: ModelRequestPolicy,
    /// Concurrency, timeouts and result budget of the calls.
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
    /// Number of agents above the run in a chain of agents that call agents.
    #[serde(skip_serializing_if = "is_zero")]
    pub depth: u32,
    /// The agent that continues the conversation after a handoff: its instructions, model and
    /// tools take the place of these options.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub active_agent: Option<Box<ActiveAgent>>,
    /// True if the run is a conversation of OpenAI's API, which exists only while its request does.
    #[serde(rename = "conversation", skip_serializing_if = "std::ops::Not::not")]
    pub is_conversation: bool,
}

fn is_zero(depth: &u32) -> bool {
    *depth == 0
}

impl RunOptions {
    /// Creates options for this model, with all tools that the caller may call.
    pub fn new(model: impl Into<String>, run_id: impl Into<String>) -> Self {
        Self { model: model.into(), run_id: run_id.into(), ..Self::default() }
    }

    /// Returns the names and patterns of the tools that the model sees; `None` means all tools that
    /// the caller may call.
    pub fn offered_tools(&self) -> Option<&[String]> {
        let active = self.active_agent.as_ref().and_then(|agent| agent.tools.as_deref());
        active.or(self.tools.as_deref())
    }

    /// Returns the mode and the pinned tools for the next request. The agent that the run was
    /// handed off to brings its own settings; those that it lacks are the run's, and then those of
    /// `agent`, the caller.
    pub fn resolve_tool_mode<'s>(
        &'s self,
        settings: &'s ToolModeSettings,
        agent: &str,
    ) -> (ToolMode, &'s [String]) {
        let active = self.active_agent.as_deref();
        let named = active.and_then(|active| settings.agents.get(&active.agent_id));
        let own_mode = active.and_then(|active| active.tool_mode).or_else(|| named?.mode);
        let own_pinned = active.and_then(|active| active.pinned_tools.as_deref());
        let own_pinned = own_pinned.or_else(|| named?.pinned_tools.as_deref());
        settings.resolve(
            agent,
            own_mode.or(self.tool_mode),
            own_pinned.or(self.pinned_tools.as_deref()),
        )
    }
}

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
        let invalid =
            ranges.into_iter().find(|(_, value, min, max)| !(*min..=*max).contains(value));
        invalid.map(|(field, _, min, max)| (field, format!("must be from {min} to {max}")))
    }
}

/// Settings for requests to the model and their retries.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ModelRequestPolicy {
    /// Maximum number of retries after a transient error.
    pub retries: u32,
    /// Delays between retries.
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
    /// Selects the calls of one reply that run concurrently; by default those of read-only tools
    /// and of agents.
    pub mode: Concurrency,
    /// Maximum number of concurrent calls of one reply. Defaults to the engine's limit.
    pub max_parallel: Option<usize>,
    /// Timeout of each call. Defaults to the tool's own.
    pub timeout_ms: Option<u64>,
    /// Time limit of each attempt of a call. Defaults to the execution policies.
    pub attempt_timeout_ms: Option<u64>,
    /// Maximum number of retries of each call, where the tool's executor permits retries. Defaults
    /// to the execution policies.
    pub max_retries: Option<u32>,
    /// Maximum time to wait for the calls of one reply. A call that has not ended by then
    /// continues, and its result arrives late.
    pub wait_ms: Option<u64>,
    /// Maximum number of tokens of the results of one reply together; long results become digests.
    pub result_tokens: Option<usize>,
}

impl ExecutionOptions {
    /// Returns the first invalid field and its valid range, given the engine's limits on
    /// `max_parallel` and `wait_ms`.
    pub fn invalid_field(
        &self,
        max_parallel: usize,
        max_wait_ms: u64,
    ) -> Option<(&'static str, String)> {
        let number = |value: Option<usize>| value.map(|value| value as u64);
        let ranges = [
            ("max_parallel", number(self.max_parallel), 1, max_parallel as u64),
            ("timeout_ms", self.timeout_ms, 1, *TIMEOUT_MS_RANGE.end()),
            ("attempt_timeout_ms", self.attempt_timeout_ms, 1, *TIMEOUT_MS_RANGE.end()),
            ("max_retries", self.max_retries.map(u64::from), 0, u64::from(MAX_RETRIES_LIMIT)),
            ("wait_ms", self.wait_ms, 0, max_wait_ms),
            ("result_tokens", number(self.result_tokens), 1, 1_000_000),
        ];
        let invalid = ranges.into_iter().find(|(_, value, min, max)| {
            value.is_some_and(|value| !(*min..=*max).contains(&value))
        });
        invalid.map(|(field, _, min, max)| (field, format!("must be from {min} to {max}")))
    }
}

/// Default for the number of tokens of the results of one reply together.
pub const DEFAULT_RESULT_TOKENS: usize = 8_000;

/// Selects the calls of one reply that run concurrently.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Concurrency {
    /// The calls run one after another, in the model's order.
    Serial,
    /// Calls of read-only tools and of agents run concurrently; the others run in order, alongside
    /// them.
    #[default]
    Parallel,
    /// All calls run concurrently, in no particular order.
    Unordered,
}
