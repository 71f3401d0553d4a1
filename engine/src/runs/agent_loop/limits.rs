//! Decisions of the agent loop: limits, repeated calls, and the messages to the model. Pure.

use std::collections::{HashMap, HashSet};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::domain::call::Call;
use crate::domain::fault::{Code, Fault};
use crate::domain::json::Json;
use crate::domain::model_reply::{FinishReason, ModelReply, TokenUsage, ToolCallRequest};
use crate::domain::run::options::{RunLimits, RunOptions};
use crate::domain::run::progress::{PendingCall, RepeatCounter, RunProgress, StopReason};
use crate::model_formats::fault_content;
use crate::registry::model_tool_names;
use crate::utp::trees::too_many_calls_fault;

/// Maximum number of consecutive steps with nothing but repeated calls.
const MAX_REPEATED_STEPS: u32 = 2;

/// Returns the limit that is reached, if any.
pub(super) fn reached_limit(limits: &RunLimits, progress: &RunProgress) -> Option<StopReason> {
    let (now, since) = (progress.usage_so_far(), progress.baseline);
    let reached = [
        (now.steps.saturating_sub(since.steps) >= limits.steps, StopReason::Steps),
        (now.calls.saturating_sub(since.calls) >= limits.calls, StopReason::Calls),
        (now.tokens.saturating_sub(since.tokens) >= limits.tokens, StopReason::Tokens),
        (now.active_ms.saturating_sub(since.active_ms) >= limits.time_ms, StopReason::Time),
        (progress.repeated_steps >= MAX_REPEATED_STEPS, StopReason::Repeats),
        (limits.failures > 0 && progress.failed_steps >= limits.failures, StopReason::Failures),
    ];
    let own = reached.into_iter().find(|(reached, _)| *reached);
    own.map(|(_, stop_reason)| stop_reason).or(progress.exhausted_budget)
}

/// Returns the idempotency key of a call, which is the same however often the step is repeated.
pub(super) fn idempotency_key(
    options: &RunOptions,
    progress: &RunProgress,
    index: usize,
) -> Option<String> {
    options.idempotency_prefix.as_ref().map(|key| format!("{key}/{}/{index}", progress.steps))
}

/// Returns the remaining active time.
pub(super) fn remaining_ms(limits: &RunLimits, progress: &RunProgress) -> u64 {
    let spent_ms = progress.active_ms.saturating_sub(progress.baseline.active_ms);
    limits.time_ms.saturating_sub(spent_ms)
}

/// Returns the number of calls that may still be made.
pub(super) fn remaining_calls(limits: &RunLimits, progress: &RunProgress) -> u32 {
    limits.calls.saturating_sub(progress.calls.saturating_sub(progress.baseline.calls))
}

/// Returns the message that announces the last request to the model.
pub(super) fn stop_message(stop_reason: StopReason, limits: &RunLimits) -> Value {
    let reason = match stop_reason {
        StopReason::Steps => format!("The limit of {} steps is reached.", limits.steps),
        StopReason::Calls => format!("The limit of {} tool calls is reached.", limits.calls),
        StopReason::Tokens => format!("The limit of {} tokens is reached.", limits.tokens),
        StopReason::Time => format!("The time of {} ms is over.", limits.time_ms),
        StopReason::Repeats => "The same tool calls were repeated again and again.".to_owned(),
        StopReason::Failures => "Tool calls have failed again and again.".to_owned(),
    };
    let text = format!(
        "{reason} No more tools can be called. Give your final answer now, with what you know, and \
         say plainly what could not be done."
    );
    json!({ "role": "user", "content": text })
}

/// Returns the limit that a stop message is about.
pub fn stop_reason_of(message: &Value, limits: &RunLimits) -> Option<StopReason> {
    StopReason::ALL.into_iter().find(|stop_reason| stop_message(*stop_reason, limits) == *message)
}

/// Returns the final answer if the model's last reply is empty.
pub(super) fn fallback_answer(stop_reason: StopReason, progress: &RunProgress) -> String {
    let reason = match stop_reason {
        StopReason::Steps => "the limit of steps was reached",
        StopReason::Calls => "the limit of tool calls was reached",
        StopReason::Tokens => "the limit of tokens was reached",
        StopReason::Time => "the time limit was reached",
        StopReason::Repeats => "the same tool calls were repeated again and again",
        StopReason::Failures => "tool calls failed again and again",
    };
    format!(
        "There is no complete answer: {reason} before there was one. {} tool calls were made, of \
         which {} failed.",
        progress.calls, progress.failed_calls
    )
}

/// Gives every call an id that the conversation can use: the model's own, or another one if that is
/// missing, already used, or in a format that model APIs reject.
pub(super) fn assign_call_ids(
    mut reply: ModelReply,
    step: u32,
    pending: &[PendingCall],
) -> ModelReply {
    let is_allowed_byte = |b: u8| b.is_ascii_alphanumeric() || b == b'_' || b == b'-';
    let mut used: HashSet<String> = pending.iter().map(|call| call.call_id.clone()).collect();
    for (index, call) in reply.calls.iter_mut().enumerate() {
        let fits = (1..=64).contains(&call.id.len()) && call.id.bytes().all(is_allowed_byte);
        if !fits || used.contains(&call.id) {
            let mut other = (0..).map(|n| match n {
                0 => format!("call_{step}_{index}"),
                n => format!("call_{step}_{index}_{n}"),
            });
            call.id = other.find(|id| !used.contains(id)).unwrap_or_default();
        }
        used.insert(call.id.clone());
    }
    reply
}

/// Formats a reply of the model as a message of the conversation.
pub(super) fn assistant_message(reply: &ModelReply, with_calls: bool) -> Value {
    // Set to `null` if there is no text, because some servers require the field.
    let content = if reply.text.is_empty() { Value::Null } else { reply.text.as_str().into() };
    if !with_calls || reply.calls.is_empty() {
        return json!({ "role": "assistant", "content": content });
    }
    let calls: Vec<Value> = reply.calls.iter().map(call_value).collect();
    json!({ "role": "assistant", "content": content, "tool_calls": calls })
}

fn call_value(call: &ToolCallRequest) -> Value {
    let function = json!({ "name": call.name, "arguments": call.arguments });
    json!({ "id": call.id, "type": "function", "function": function })
}

/// Formats the answer to a call.
pub(super) fn tool_message(call_id: &str, content: &str) -> Value {
    json!({ "role": "tool", "tool_call_id": call_id, "content": content })
}

/// Formats a late result. The call itself was answered before, with its ticket.
pub(super) fn late_message(call: &PendingCall, content: &str) -> Value {
    let PendingCall { name, call_id, .. } = call;
    let text = format!("The result of {name}, which you called as {call_id}, has come:\n{content}");
    json!({ "role": "user", "content": text })
}

/// Replaces the call id in a late-result message, for a call that has another id now.
pub fn replace_late_call_id(message: &Value, ids: &HashMap<String, String>) -> Value {
    let text = message["content"].as_str().and_then(|text| {
        let (head, content) = text.split_once(", has come:\n")?;
        let (head, id) = head.rsplit_once(", which you called as ")?;
        let now = ids.get(id)?;
        Some(format!("{head}, which you called as {now}, has come:\n{content}"))
    });
    let mut message = message.clone();
    if let Some(text) = text {
        message["content"] = text.into();
    }
    message
}

/// Returns the fingerprint of a call: a hash of the tool's name and the canonical arguments.
pub fn call_fingerprint(call: &ToolCallRequest) -> String {
    let args = match Json::parse(&call.arguments) {
        Ok(args) => args.canonical_text(),
        Err(_) => call.arguments.clone(),
    };
    let mut hash = Sha256::new();
    hash.update(call.name.as_bytes());
    hash.update([0]);
    hash.update(args.as_bytes());
    crate::domain::id::hex(&hash.finalize()[..8])
}

/// Returns a hash of the content that the model received for a call.
pub(super) fn content_hash(content: &str) -> u64 {
    let hash = Sha256::digest(content.as_bytes());
    hash.iter().take(8).fold(0, |number, byte| (number << 8) | u64::from(*byte))
}

/// Counts a result of a call: an identical result increments the counter, a new one restarts it.
pub(super) fn count_repeat(progress: &mut RunProgress, fingerprint: String, content_hash: u64) {
    let counter = progress.repeat_counters.entry(fingerprint).or_default();
    *counter = if counter.content_hash == content_hash && counter.times > 0 {
        RepeatCounter { times: counter.times + 1, content_hash }
    } else {
        RepeatCounter { times: 1, content_hash }
    };
}

/// Returns whether this call has reached the limit of identical repetitions.
pub(super) fn is_repeated(progress: &RunProgress, limits: &RunLimits, fingerprint: &str) -> bool {
    let counter = progress.repeat_counters.get(fingerprint);
    limits.repeats > 0 && counter.is_some_and(|counter| counter.times >= limits.repeats)
}

/// Returns the content for a call that was repeated too often.
pub(super) fn repeated_call_content(call: &ToolCallRequest, limits: &RunLimits) -> String {
    let message = format!(
        "not done: {} was called with exactly these arguments {} times, with the same result each \
         time, which you have. Use that result, change the arguments, or do something else",
        call.name, limits.repeats
    );
    fault_content(&Fault::new(Code::Conflict, message).without_side_effect())
}

/// Returns the content for a call beyond the limits.
pub(super) fn too_many_calls_content(limits: &RunLimits, remaining: u32) -> String {
    if remaining < limits.calls_per_step {
        return fault_content(&too_many_calls_fault(limits.calls.into(), "calls"));
    }
    let max = limits.calls_per_step;
    let message = format!(
        "not done: at most {max} tools can be called in one answer, and this call was beyond that. \
         Call it again if it is still needed"
    );
    fault_content(&Fault::new(Code::RateLimited, message).without_side_effect())
}

/// Returns the fault of a call of a tool that the model did not receive.
pub(super) fn unknown_tool_fault<'n>(name: &str, offered: impl Iterator<Item = &'n str>) -> Fault {
    let excerpt: String = name.chars().take(100).collect();
    let candidates = model_tool_names::suggest_similar(name, offered);
    let message = match candidates.first() {
        Some(best) => format!("there is no tool \"{excerpt}\"; did you mean \"{best}\"?"),
        None => format!("there is no tool \"{excerpt}\"; use only the tools you were given"),
    };
    let fault = Fault::new(Code::ToolNotFound, message).without_side_effect();
    fault.with_detail(json!({ "nearest": candidates }))
}

/// Returns the fault of a call whose arguments were truncated together with the reply.
pub(super) fn truncated_arguments_fault(
    reply: &ModelReply,
    call: &ToolCallRequest,
) -> Option<Fault> {
    let whole = serde_json::from_str::<serde::de::IgnoredAny>(&call.arguments).is_ok();
    if whole || reply.finish_reason != FinishReason::Length {
        return None;
    }
    let message = "not done: the answer reached its limit of tokens in the middle of these \
                   arguments. Call it again with shorter arguments";
    Some(Fault::new(Code::ValidationError, message).without_side_effect())
}

/// Returns the content for a call that was not made before the run was canceled.
pub(super) fn canceled_call_content() -> String {
    let message = "not done: the run was canceled before this call was made";
    fault_content(&Fault::new(Code::Canceled, message).without_side_effect())
}

/// Returns the content for a handoff beside another one.
pub(super) fn second_handoff_content(first: &Call) -> String {
    let name = model_tool_names::name_for_model(&first.tool_name);
    let message = format!("not done: {name} of the same answer hands the conversation off");
    fault_content(&Fault::new(Code::Conflict, message).without_side_effect())
}

/// Returns the content for a handoff whose result arrives after that of another one.
pub(super) fn late_handoff_content(call: &Call) -> String {
    let name = model_tool_names::name_for_model(&call.tool_name);
    let message = format!("not done: another result came before that of {name}");
    fault_content(&Fault::new(Code::Conflict, message).without_side_effect())
}

/// Returns the content for a call of the caller's tools that is not returned to the caller.
pub(super) fn unneeded_call_content(why: &str) -> String {
    fault_content(&Fault::new(Code::Canceled, format!("not done: {why}")).without_side_effect())
}

/// Returns the reported usage, or an estimate of four bytes per token if the endpoint reports none.
pub(super) fn usage_or_estimate(reply: &ModelReply, prompt_bytes: usize) -> TokenUsage {
    if reply.usage != TokenUsage::default() {
        return reply.usage;
    }
    let calls: usize = reply.calls.iter().map(|call| call.name.len() + call.arguments.len()).sum();
    TokenUsage {
        prompt_tokens: (prompt_bytes / 4) as u64,
        completion_tokens: ((reply.text.len() + calls).div_ceil(4)) as u64,
    }
}

/// Checks the messages of a conversation.
pub fn check_messages(messages: &[Value]) -> Result<(), Fault> {
    let refused = |pointer: String, message: &str| {
        let message = format!("{}: {message}", pointer.trim_start_matches('/'));
        let fault = Fault::new(Code::ValidationError, message).without_side_effect();
        Err(fault.with_detail(json!({ "pointer": pointer })))
    };
    if messages.is_empty() {
        return refused("/messages".into(), "there must be at least one message");
    }
    const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];
    for (n, message) in messages.iter().enumerate() {
        let Some(message) = message.as_object() else {
            return refused(format!("/messages/{n}"), "a message is an object");
        };
        let role = message.get("role").and_then(Value::as_str);
        if !role.is_some_and(|role| ROLES.contains(&role)) {
            let problem = "role must be system, developer, user, assistant or tool";
            return refused(format!("/messages/{n}/role"), problem);
        }
        let content = message.get("content").unwrap_or(&Value::Null);
        let calls = message.get("tool_calls").is_some_and(|calls| !calls.is_null());
        let has_none = content.is_null() && !(role == Some("assistant") && calls);
        if has_none || !(content.is_string() || content.is_array() || content.is_null()) {
            let pointer = format!("/messages/{n}/content");
            return refused(pointer, "content must be a text or a list of parts");
        }
        if role == Some("tool") && !message.get("tool_call_id").is_some_and(Value::is_string) {
            let pointer = format!("/messages/{n}/tool_call_id");
            return refused(
                pointer,
                "a tool message needs the tool_call_id of the call it answers",
            );
        }
    }
    Ok(())
}
