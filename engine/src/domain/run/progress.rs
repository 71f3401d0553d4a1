//! The progress of a run: its conversation, its usage, the calls that it waits for, and its final
//! answer. Pure.
//!
//! A [`Conversation`] is the complete state of an open conversation. It can be stored between any
//! two steps, and also between the model's reply and the execution of its calls.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::domain::fault::{Code, Fault};
use crate::domain::id::CallId;
use crate::domain::model_reply::{FinishReason, ModelReply, TokenUsage};

/// A call whose result arrives late.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PendingCall {
    /// Id of the stored call, `tc_…`.
    pub tool_call_id: CallId,
    /// The model's own id of the call.
    pub call_id: String,
    /// The tool's model-facing name.
    pub name: String,
    /// True if no request to the model is sent before the call has ended.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub suspends: bool,
    /// True if the run may end before the call has ended.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_detached: bool,
}

/// Counts consecutive identical calls with the same result.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RepeatCounter {
    /// Number of consecutive identical results.
    pub times: u32,
    /// Hash of the content that the model received.
    #[serde(rename = "told")]
    pub content_hash: u64,
}

/// The reason why the next request to the model is the last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StopReason {
    /// The limit on requests to the model was reached.
    Steps,
    /// The limit on tool calls was reached.
    Calls,
    /// The limit on tokens was reached.
    Tokens,
    /// The limit on active time was reached.
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
    /// Number of replies of the model.
    pub steps: u32,
    /// Number of tool calls.
    pub calls: u32,
    /// Number of tokens of all requests and replies.
    pub tokens: u64,
    /// Active time, in milliseconds.
    #[serde(rename = "spent_ms")]
    pub active_ms: u64,
    /// Number of tool calls that failed.
    #[serde(default)]
    pub failed_calls: u32,
}

/// The description of the tool search that a run's requests have.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToolSearchText {
    /// The selection of tools that the description is about.
    pub scope: String,
    /// The description.
    pub text: String,
}

fn is_zero(count: &u32) -> bool {
    *count == 0
}

/// Progress of a conversation, apart from its messages.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RunProgress {
    /// Number of replies of the model so far.
    pub steps: u32,
    /// Number of tool calls made so far.
    pub calls: u32,
    /// Number of those calls that failed.
    pub failed_calls: u32,
    /// Tokens that all replies cost so far.
    pub usage: TokenUsage,
    /// Active time so far.
    #[serde(rename = "spent_ms")]
    pub active_ms: u64,
    /// Usage from which the limits count.
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
    /// Counters of identical results, by fingerprint of tool and arguments.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    #[serde(rename = "seen")]
    pub repeat_counters: BTreeMap<String, RepeatCounter>,
    /// Number of consecutive steps that contained nothing but repeated calls.
    #[serde(rename = "stubborn")]
    pub repeated_steps: u32,
    /// Number of consecutive steps in which every call failed.
    #[serde(rename = "failures")]
    pub failed_steps: u32,
    /// Reached limit; once set, the next request to the model is the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[serde(rename = "closing")]
    pub stop_reason: Option<StopReason>,
    /// Tool and error of the last call that failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_failure: Option<String>,
    /// True if a call since the last user message was canceled or not permitted: its tool did not
    /// fail.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub has_withheld_call: bool,
    /// The answer of a result that terminates the run; once set, no request to the model follows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ending: Option<Box<FinalAnswer>>,
    /// The call of a handoff whose result arrived late; once set, another agent continues.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub late_handoff: Option<CallId>,
    /// Number of calls since the last user message that were refused before they became a tool
    /// call, such as those of unknown tools.
    #[serde(skip_serializing_if = "is_zero")]
    pub refused_calls: u32,
    /// Number of calls that certainly changed nothing: those of tools that only read, and those
    /// that were refused before they took effect.
    #[serde(skip_serializing_if = "is_zero")]
    pub harmless_calls: u32,
    /// Description of the tool search in the requests of the run. It stays the same while tools
    /// come and go, because the text is at the beginning of every prompt.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool_search: Option<ToolSearchText>,
    /// The budget, shared with the agents of the tree, that is used up.
    #[serde(skip)]
    pub exhausted_budget: Option<StopReason>,
}

impl RunProgress {
    /// Returns the usage so far.
    pub fn usage_so_far(&self) -> UsageBaseline {
        UsageBaseline {
            steps: self.steps,
            calls: self.calls,
            tokens: self.usage.prompt_tokens.saturating_add(self.usage.completion_tokens),
            active_ms: self.active_ms,
            failed_calls: self.failed_calls,
        }
    }

    /// Returns a sentence that says that every tool call since the last user message failed, or
    /// `None` if one succeeded or none was made.
    pub fn describe_total_failure(&self) -> Option<String> {
        let calls = self.calls.saturating_sub(self.baseline.calls);
        let failed = self.failed_calls.saturating_sub(self.baseline.failed_calls);
        let all = calls.saturating_add(self.refused_calls);
        if all == 0 || failed != calls || self.has_withheld_call {
            return None;
        }
        let subject = match all {
            1 => "The only tool call failed".to_owned(),
            all => format!("All {all} tool calls failed"),
        };
        Some(match &self.last_failure {
            Some(reason) if all == 1 => format!("{subject}: {reason}"),
            Some(reason) => format!("{subject}, the last one with: {reason}"),
            None => subject,
        })
    }

    /// Returns true if no call of the run can have taken effect. A reply with calls that is not
    /// worked off counts: its calls may have been made.
    pub fn is_harmless(&self) -> bool {
        let has_calls = self.pending_reply.as_ref().is_some_and(|reply| !reply.calls.is_empty());
        self.harmless_calls >= self.calls && self.pending_calls.is_empty() && !has_calls
    }

    /// Returns the innermost failure in a text that [`Self::describe_total_failure`] wrote,
    /// directly or through a chain of agents; `None` for any other text.
    pub(crate) fn innermost_failure(text: &str) -> Option<&str> {
        let ends = ["tool call failed: ", "the last one with: "]
            .into_iter()
            .filter_map(|words| Some(text.rfind(words)? + words.len()));
        let cause = &text[ends.max()?..];
        Some(cause.rsplit(": … ").next().unwrap_or(cause))
    }

    /// Resets the counters of the limits when the conversation is resumed.
    pub(crate) fn reset_baseline(&mut self) {
        self.baseline = self.usage_so_far();
        (self.repeated_steps, self.failed_steps) = (0, 0);
        (self.last_failure, self.has_withheld_call) = (None, false);
        (self.ending, self.refused_calls) = (None, 0);
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
    /// Progress apart from the messages.
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
            late_handoff: before.late_handoff,
            harmless_calls: before.harmless_calls,
            tool_search: before.tool_search,
            ..RunProgress::default()
        };
    }
}

/// The final answer of a run: the model's, or a result that terminates the run.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct FinalAnswer {
    /// Text of the answer.
    pub text: String,
    /// Reason why the model stopped.
    #[serde(rename = "stopped")]
    pub finish_reason: FinishReason,
    /// The limit that triggered the last request, if one did.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[serde(rename = "closing")]
    pub stop_reason: Option<StopReason>,
    /// The call whose result terminated the run, if one did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub terminated_by: Option<TerminatingCall>,
}

/// A call whose result terminated a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TerminatingCall {
    /// Id of the stored call, `tc_…`.
    pub tool_call_id: CallId,
    /// Name of the tool.
    pub name: String,
    /// Id of the card with the result: the deliverable of the run.
    pub card_id: String,
    /// Typed fields of the result, if the tool `run.finish` set them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub result_fields: Option<Value>,
    /// The fault, if the call failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<RunError>,
}

/// A fault in its stored form.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunError {
    /// Wire name of the fault's [`Code`].
    pub code: String,
    /// Text for people and models.
    pub message: String,
    /// Structured data of the fault.
    #[serde(default)]
    pub detail: Option<Value>,
    /// True if the same request can succeed later.
    pub retryable: bool,
}

impl From<&Fault> for RunError {
    fn from(fault: &Fault) -> Self {
        let (message, detail) = (fault.message.clone(), fault.detail.clone());
        let (code, retryable) = (fault.code.as_str().to_owned(), fault.retryable);
        Self { code, message, detail, retryable }
    }
}

impl From<RunError> for Fault {
    fn from(error: RunError) -> Self {
        let code = Code::parse(&error.code).unwrap_or(Code::Internal);
        let fault = Self::new(code, error.message).retryable(error.retryable);
        Self { detail: error.detail, ..fault }
    }
}

impl FinalAnswer {
    /// Appends a note on a line of its own, unless the request determines the format of the answer:
    /// a note would break a JSON document.
    pub fn append_note(&mut self, note: &str, settings: &Map<String, Value>) {
        if settings.get("response_format").is_none_or(|format| format["type"] == "text") {
            let separator = if self.text.is_empty() { "" } else { "\n\n" };
            self.text.push_str(&format!("{separator}[{note}]"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::model_reply::ToolCallRequest;

    #[test]
    fn a_run_with_a_reply_in_flight_is_not_harmless() {
        let mut progress = RunProgress::default();
        assert!(progress.is_harmless());
        progress.pending_reply = Some(ModelReply::default());
        assert!(progress.is_harmless(), "a reply without calls changes nothing");
        let reply = ModelReply { calls: vec![ToolCallRequest::default()], ..ModelReply::default() };
        progress.pending_reply = Some(reply);
        assert!(!progress.is_harmless(), "its call may have been made");
        (progress.pending_reply, progress.calls) = (None, 1);
        assert!(!progress.is_harmless());
        progress.harmless_calls = 1;
        assert!(progress.is_harmless());
    }
}
