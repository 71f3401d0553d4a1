//! The reply of a language model: its text, the tool calls that it requests, and their cost. Pure.

use serde::{Deserialize, Serialize};

/// A tool call that a model requests. The arguments are the model's own text, which need not be
/// JSON.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToolCallRequest {
    /// The model's id for the call; the answer to the call repeats it.
    pub id: String,
    /// Model-facing name of the tool.
    pub name: String,
    /// Arguments as the model wrote them: JSON if the model made no mistake.
    pub arguments: String,
}

/// The reason why a model stopped.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// The model completed its reply.
    #[default]
    Stop,
    /// The model waits for the results of its tool calls.
    ToolCalls,
    /// The model reached a token limit.
    Length,
    /// A content filter of the endpoint stopped the reply.
    ContentFilter,
}

/// The tokens that a reply cost.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenUsage {
    /// Number of tokens of the request.
    pub prompt_tokens: u64,
    /// Number of tokens of the reply.
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
    /// Text of the reply; empty if the model only calls tools.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub text: String,
    /// Requested tool calls, in the model's order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub calls: Vec<ToolCallRequest>,
    /// Reason why the model stopped.
    #[serde(rename = "stopped")]
    pub finish_reason: FinishReason,
    /// Tokens that the request and the reply cost.
    #[serde(default)]
    pub usage: TokenUsage,
    /// The model that replied, if the endpoint reports it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
}
