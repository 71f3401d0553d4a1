//! The port to a language model: a conversation goes in, text or tool calls come out. Pure.
//!
//! Conversations are kept in the chat form that most endpoints speak (`role`, `content`,
//! `tool_calls`, `tool_call_id`); a model of another kind translates at its own door. An
//! implementation asks once and says honestly how it went. Who asks again, and when, is the
//! loop's to decide.

use std::{fmt, sync::Arc, time::Duration};

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::fault::Fault;

/// What a model is asked.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Prompt {
    /// The model, as its endpoint names it.
    pub model: String,
    /// The conversation, in the chat form.
    pub messages: Vec<Value>,
    /// The tools it may call, in the chat form (`{type: "function", function: {…}}`).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tools: Vec<Value>,
    /// What else goes into the request as it is: `temperature`, `max_tokens`, `tool_choice`, ….
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub settings: Map<String, Value>,
}

/// A call that a model asks for. The arguments are its own text, which need not be JSON.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wanted {
    pub id: String,
    pub name: String,
    pub arguments: String,
}

/// Why a model stopped.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stopped {
    #[default]
    Stop,
    ToolCalls,
    /// It reached a limit of tokens.
    Length,
    ContentFilter,
}

/// The tokens that an answer cost.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    pub prompt_tokens: u64,
    pub completion_tokens: u64,
}

impl std::ops::AddAssign for Usage {
    fn add_assign(&mut self, more: Self) {
        self.prompt_tokens = self.prompt_tokens.saturating_add(more.prompt_tokens);
        self.completion_tokens = self.completion_tokens.saturating_add(more.completion_tokens);
    }
}

/// A whole answer of a model.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Reply {
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub text: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub calls: Vec<Wanted>,
    pub stopped: Stopped,
    #[serde(default)]
    pub usage: Usage,
    /// The model that answered, where the endpoint says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
}

/// A piece of an answer, told while it comes. What is told is for people to watch: only the whole
/// [`Reply`] is acted on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Piece {
    Text(String),
    /// More of the call at this place in the answer. Id and name come with its first piece; an id
    /// that the endpoint gives only later comes with that piece, and stands.
    Call {
        index: usize,
        id: Option<String>,
        name: Option<String>,
        arguments: String,
    },
}

/// Who listens while an answer comes.
pub type Listener<'a> = &'a (dyn Fn(Piece) + Send + Sync);

/// Why there is no answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Silence {
    /// In words, without any secret.
    pub fault: Fault,
    /// Whether to ask again may help: 429, 5xx, a time-out, a stream that was cut.
    pub passing: bool,
    /// How long the endpoint asked to be left alone.
    pub retry_after: Option<Duration>,
}

impl fmt::Display for Silence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.fault.message.fmt(f)
    }
}

impl std::error::Error for Silence {}

/// A language model.
#[async_trait]
pub trait Model: Send + Sync + 'static {
    /// Asks once. Dropping the future ends the request. A stream that ends before the model said
    /// that it was done is a [`Silence`], whatever came before.
    async fn reply(&self, prompt: &Prompt, listener: Listener<'_>) -> Result<Reply, Silence>;

    /// What it is counted as.
    fn counted_as(&self) -> CountedAs<'_> {
        CountedAs::default()
    }
}

/// The labels under which the tokens of a model are counted: few, and never what an asker wrote.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CountedAs<'a> {
    pub provider: &'static str,
    pub model: &'a str,
}

impl Default for CountedAs<'_> {
    fn default() -> Self {
        Self { provider: "other", model: "other" }
    }
}

/// A model that a name stands for.
#[derive(Clone)]
pub struct Chosen {
    pub model: Arc<dyn Model>,
    /// What its endpoint calls it: goes into [`Prompt::model`].
    pub name: String,
}

/// The models there are, by the names that askers use.
pub trait Models: Send + Sync + 'static {
    /// The model of this name; none when there is no such model.
    fn find(&self, name: &str) -> Option<Chosen>;

    /// The names there are, the one to use where nobody names any first.
    fn names(&self) -> Vec<String>;
}

/// No models at all.
#[derive(Debug, Default)]
pub struct NoModels;

impl Models for NoModels {
    fn find(&self, _name: &str) -> Option<Chosen> {
        None
    }

    fn names(&self) -> Vec<String> {
        Vec::new()
    }
}
