//! The port to a language model: a conversation goes in, text or tool calls come out. Pure.
//!
//! Conversations use the chat format that most endpoints support (`role`, `content`, `tool_calls`,
//! `tool_call_id`); an adapter for another API translates. An implementation sends one request and
//! reports its result accurately. The agent loop decides about retries.

use std::{fmt, sync::Arc, time::Duration};

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::domain::fault::Fault;

/// A request to a model.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ModelRequest {
    /// The model, as its endpoint names it.
    pub model: String,
    /// The conversation, in the chat format.
    pub messages: Vec<Value>,
    /// The tools that the model may call, in the chat format (`{type: "function", function: {…}}`).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tools: Vec<Value>,
    /// Other fields that are passed through to the request: `temperature`, `max_tokens`,
    /// `tool_choice`, ….
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub settings: Map<String, Value>,
}

/// A tool call that a model requests. The arguments are the model's own text, which need not be
/// JSON.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToolCallRequest {
    pub id: String,
    pub name: String,
    pub arguments: String,
}

/// The reason why a model stopped.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    #[default]
    Stop,
    ToolCalls,
    /// The model reached a token limit.
    Length,
    ContentFilter,
}

/// The tokens that a reply cost.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenUsage {
    pub prompt_tokens: u64,
    pub completion_tokens: u64,
}

impl std::ops::AddAssign for TokenUsage {
    fn add_assign(&mut self, more: Self) {
        self.prompt_tokens = self.prompt_tokens.saturating_add(more.prompt_tokens);
        self.completion_tokens = self.completion_tokens.saturating_add(more.completion_tokens);
    }
}

/// A complete reply of a model.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ModelReply {
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub text: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub calls: Vec<ToolCallRequest>,
    #[serde(rename = "stopped")]
    pub finish_reason: FinishReason,
    #[serde(default)]
    pub usage: TokenUsage,
    /// The model that replied, if the endpoint reports it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
}

/// One streamed part of a reply. Deltas are only for display: the loop acts on the complete
/// [`ModelReply`] alone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Delta {
    Text(String),
    /// More of the call at this index of the reply. Id and name come with its first delta. An id
    /// that the endpoint sends later comes with that delta and replaces the earlier one.
    Call {
        index: usize,
        id: Option<String>,
        name: Option<String>,
        arguments: String,
    },
}

/// Receives the deltas of a reply while it is streamed.
pub type DeltaListener<'a> = &'a (dyn Fn(Delta) + Send + Sync);

/// The reason why there is no reply.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelError {
    /// Description of the failure, without any secret.
    pub fault: Fault,
    /// True if a retry may help: status 429 or 5xx, a timeout, an interrupted stream.
    pub is_transient: bool,
    /// Delay that the endpoint requested before the next attempt.
    pub retry_after: Option<Duration>,
}

impl fmt::Display for ModelError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.fault.message.fmt(f)
    }
}

impl std::error::Error for ModelError {}

/// A language model.
#[async_trait]
pub trait Model: Send + Sync + 'static {
    /// Sends one request. Dropping the future cancels it. A stream that ends before the model
    /// reported completion is a [`ModelError`], whatever it delivered before.
    async fn reply(
        &self,
        prompt: &ModelRequest,
        listener: DeltaListener<'_>,
    ) -> Result<ModelReply, ModelError>;

    /// Returns the labels for usage metrics.
    fn usage_label(&self) -> UsageLabel<'_> {
        UsageLabel::default()
    }
}

/// Labels of a model's token usage in metrics: low in cardinality, and never text from a caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UsageLabel<'a> {
    pub provider: &'static str,
    pub model: &'a str,
}

impl Default for UsageLabel<'_> {
    fn default() -> Self {
        Self { provider: "other", model: "other" }
    }
}

/// A model found by its name.
#[derive(Clone)]
pub struct ResolvedModel {
    pub model: Arc<dyn Model>,
    /// Name of the model at its endpoint, for [`ModelRequest::model`].
    pub name: String,
}

/// The available models, by the names that callers use.
pub trait ModelResolver: Send + Sync + 'static {
    /// Returns the model with this name, or `None` if there is none.
    fn find(&self, name: &str) -> Option<ResolvedModel>;

    /// Returns the available names; the first is the default.
    fn names(&self) -> Vec<String>;
}

/// A resolver without any models.
#[derive(Debug, Default)]
pub struct NoModels;

impl ModelResolver for NoModels {
    fn find(&self, _name: &str) -> Option<ResolvedModel> {
        None
    }

    fn names(&self) -> Vec<String> {
        Vec::new()
    }
}
