//! The port to a language model: a conversation goes in, text or tool calls come out. Pure.
//!
//! Conversations use the chat format that most endpoints support (`role`, `content`, `tool_calls`,
//! `tool_call_id`); an adapter for another API translates. An implementation sends one request and
//! reports its result accurately. The agent loop decides about retries.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::domain::fault::Fault;
use crate::domain::json::Json;
use crate::domain::model_reply::ModelReply;

/// A request to a model.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ModelRequest {
    /// The model, as its endpoint names it.
    pub model: String,
    /// The conversation, in the chat format.
    pub messages: Vec<Value>,
    /// The tools that the model may call, in the chat format (`{type: "function", function: {…}}`).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tools: Vec<Json>,
    /// The tools among them that a tool search found. They are at the end of `tools`, so that the
    /// rest of the request stays the same. An API with deferred tools takes them from the result
    /// of the search, and its prompt cache holds.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub found_tools: Vec<FoundTool>,
    /// Name of the tool search among the tools, if the request has one. An API with a tool search
    /// of its own takes that one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_search: Option<String>,
    /// Guidance for the system prompt: the same in every request of a conversation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guidance: Option<String>,
    /// State of the pending calls: the last text of the request, because it differs each time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pending_state: Option<String>,
    /// Other fields that are passed through to the request: `temperature`, `max_tokens`,
    /// `tool_choice`, ….
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub settings: Map<String, Value>,
}

impl ModelRequest {
    /// Returns the messages with the guidance after the leading system messages, and the state of
    /// the pending calls at the end, both as system messages.
    pub fn chat_messages(&self) -> Vec<Value> {
        let system = |text: &String| serde_json::json!({ "role": "system", "content": text });
        let mut messages = self.messages.clone();
        if let Some(guidance) = &self.guidance {
            let is_system =
                |message: &Value| matches!(message["role"].as_str(), Some("system" | "developer"));
            let leading = messages.iter().take_while(|message| is_system(message)).count();
            messages.insert(leading, system(guidance));
        }
        messages.extend(self.pending_state.as_ref().map(system));
        messages
    }
}

/// A tool that a tool search of the model found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FoundTool {
    /// Model-facing name of the tool.
    pub name: String,
    /// The model's id of the call that searched for it.
    pub call_id: String,
}

/// One streamed part of a reply. Deltas are only for display: the loop acts on the complete
/// [`ModelReply`] alone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Delta {
    /// More text of the reply.
    Text(String),
    /// More of the call at this index of the reply. Id and name come with its first delta. An id
    /// that the endpoint sends later comes with that delta and replaces the earlier one.
    Call {
        /// Position of the call in the reply, from 0.
        index: usize,
        /// The model's own id of the call.
        id: Option<String>,
        /// Tool name as the model wrote it.
        name: Option<String>,
        /// Next part of the arguments' JSON text.
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
    /// reported completion is a [`ModelError`], regardless of what it delivered before.
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
    /// Provider of the model; `other` by default.
    pub provider: &'static str,
    /// Name of the model in metrics; `other` by default.
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
    /// Client of the endpoint that serves the model.
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
