//! What the loop decides: when it is enough, which calls are made, what the model is told. Pure.

use std::collections::{HashMap, HashSet};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::{Awaited, Closing, Limits, Progress, Seen};
use crate::dialect::fault_content;
use crate::fault::{Code, Fault};
use crate::json::Json;
use crate::model::{Reply, Stopped, Usage, Wanted};
use crate::names;

/// How many steps of nothing but repeated calls are enough.
const STUBBORN: u32 = 2;

/// The limit that is reached, if any.
pub(super) fn due(limits: &Limits, progress: &Progress) -> Option<Closing> {
    let (now, since) = (progress.spent(), progress.since);
    let reached = [
        (now.steps.saturating_sub(since.steps) >= limits.steps, Closing::Steps),
        (now.calls.saturating_sub(since.calls) >= limits.calls, Closing::Calls),
        (now.tokens.saturating_sub(since.tokens) >= limits.tokens, Closing::Tokens),
        (now.spent_ms.saturating_sub(since.spent_ms) >= limits.time_ms, Closing::Time),
        (progress.stubborn >= STUBBORN, Closing::Repeats),
        (limits.failures > 0 && progress.failures >= limits.failures, Closing::Failures),
    ];
    reached.into_iter().find(|(reached, _)| *reached).map(|(_, closing)| closing)
}

/// How long it may still work.
pub(super) fn left_ms(limits: &Limits, progress: &Progress) -> u64 {
    let spent_ms = progress.spent_ms.saturating_sub(progress.since.spent_ms);
    limits.time_ms.saturating_sub(spent_ms)
}

/// How many calls may still be made.
pub(super) fn left_calls(limits: &Limits, progress: &Progress) -> u32 {
    limits.calls.saturating_sub(progress.calls.saturating_sub(progress.since.calls))
}

/// What the model is told when it is asked for the last time.
pub(super) fn closing_message(closing: Closing, limits: &Limits) -> Value {
    let why = match closing {
        Closing::Steps => format!("The limit of {} steps is reached.", limits.steps),
        Closing::Calls => format!("The limit of {} tool calls is reached.", limits.calls),
        Closing::Tokens => format!("The limit of {} tokens is reached.", limits.tokens),
        Closing::Time => format!("The time of {} ms is over.", limits.time_ms),
        Closing::Repeats => "The same tool calls were repeated again and again.".to_owned(),
        Closing::Failures => "Tool calls have failed again and again.".to_owned(),
    };
    let text = format!(
        "{why} No more tools can be called. Give your final answer now, with what you know, and \
         say plainly what could not be done."
    );
    json!({ "role": "user", "content": text })
}

/// The limit that a message of `closing_message` is about.
pub fn closing_of(message: &Value, limits: &Limits) -> Option<Closing> {
    Closing::ALL.into_iter().find(|closing| closing_message(*closing, limits) == *message)
}

/// What is answered where the model says nothing even then.
pub(super) fn stand_in(closing: Closing, progress: &Progress) -> String {
    let why = match closing {
        Closing::Steps => "the limit of steps was reached",
        Closing::Calls => "the limit of tool calls was reached",
        Closing::Tokens => "the limit of tokens was reached",
        Closing::Time => "the time was over",
        Closing::Repeats => "the same tool calls were repeated again and again",
        Closing::Failures => "tool calls failed again and again",
    };
    format!(
        "There is no complete answer: {why} before there was one. {} tool calls were made, of \
         which {} failed.",
        progress.calls, progress.failed_calls
    )
}

/// Gives every call an id that the conversation can use: the model's own where it is one, another
/// where it is missing, taken, or of a form that model APIs refuse.
pub(super) fn with_usable_ids(mut reply: Reply, step: u32, awaited: &[Awaited]) -> Reply {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b == b'_' || b == b'-';
    let mut used: HashSet<String> = awaited.iter().map(|call| call.call_id.clone()).collect();
    for (index, call) in reply.calls.iter_mut().enumerate() {
        let fits = (1..=64).contains(&call.id.len()) && call.id.bytes().all(plain);
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

/// An answer of the model, as a message of the conversation.
pub(super) fn assistant_message(reply: &Reply, with_calls: bool) -> Value {
    // Said also when there is none, because some servers insist on it.
    let content = if reply.text.is_empty() { Value::Null } else { reply.text.as_str().into() };
    if !with_calls || reply.calls.is_empty() {
        return json!({ "role": "assistant", "content": content });
    }
    let calls: Vec<Value> = reply.calls.iter().map(call_value).collect();
    json!({ "role": "assistant", "content": content, "tool_calls": calls })
}

fn call_value(call: &Wanted) -> Value {
    let function = json!({ "name": call.name, "arguments": call.arguments });
    json!({ "id": call.id, "type": "function", "function": function })
}

/// An answer to a call.
pub(super) fn tool_message(call_id: &str, content: &str) -> Value {
    json!({ "role": "tool", "tool_call_id": call_id, "content": content })
}

/// A result that came late. The call itself was answered before, with its ticket.
pub(super) fn late_message(call: &Awaited, content: &str) -> Value {
    let Awaited { name, call_id, .. } = call;
    let text = format!("The result of {name}, which you called as {call_id}, has come:\n{content}");
    json!({ "role": "user", "content": text })
}

/// A message that `late_message` made, for a call that has another id now.
pub fn readdressed(message: &Value, ids: &HashMap<String, String>) -> Value {
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

/// What makes two calls the same: the tool, and the arguments in whatever order they are written.
pub fn same_call(call: &Wanted) -> String {
    let args = match Json::parse(&call.arguments) {
        Ok(args) => args.canonical(),
        Err(_) => call.arguments.clone(),
    };
    let mut hash = Sha256::new();
    hash.update(call.name.as_bytes());
    hash.update([0]);
    hash.update(args.as_bytes());
    crate::tool::hex(&hash.finalize()[..8])
}

/// A hash of what the model was told of a call.
pub(super) fn told_hash(content: &str) -> u64 {
    let hash = Sha256::digest(content.as_bytes());
    hash.iter().take(8).fold(0, |number, byte| (number << 8) | u64::from(*byte))
}

/// Notes what a call came to. The same as before counts on; something new begins to count.
pub(super) fn note(progress: &mut Progress, fingerprint: String, told: u64) {
    let seen = progress.seen.entry(fingerprint).or_default();
    *seen = if seen.told == told && seen.times > 0 {
        Seen { times: seen.times + 1, told }
    } else {
        Seen { times: 1, told }
    };
}

/// Whether this call was made often enough already.
pub(super) fn is_repeated(progress: &Progress, limits: &Limits, fingerprint: &str) -> bool {
    let seen = progress.seen.get(fingerprint);
    limits.repeats > 0 && seen.is_some_and(|seen| seen.times >= limits.repeats)
}

/// What the model is told instead of a call that it made often enough.
pub(super) fn repeated(call: &Wanted, limits: &Limits) -> String {
    let message = format!(
        "not done: {} was called with exactly these arguments {} times, with the same result each \
         time, which you have. Use that result, change the arguments, or do something else",
        call.name, limits.repeats
    );
    fault_content(&Fault::new(Code::Conflict, message).not_happened())
}

/// What the model is told of calls that are too many.
pub(super) fn too_many(limits: &Limits, left: u32) -> String {
    let message = if left < limits.calls_per_step {
        format!("not done: the limit of {} tool calls is reached", limits.calls)
    } else {
        let most = limits.calls_per_step;
        format!(
            "not done: at most {most} tools can be called in one answer, and this call was beyond \
             that. Call it again if it is still needed"
        )
    };
    fault_content(&Fault::new(Code::RateLimited, message).not_happened())
}

/// What the model is told of a tool it was not offered.
pub(super) fn unknown<'n>(name: &str, offered: impl Iterator<Item = &'n str>) -> String {
    let shown: String = name.chars().take(100).collect();
    let near = names::nearest(name, offered);
    let message = match near.first() {
        Some(best) => format!("there is no tool \"{shown}\"; did you mean \"{best}\"?"),
        None => format!("there is no tool \"{shown}\"; use only the tools you were given"),
    };
    let fault = Fault::new(Code::ToolNotFound, message).not_happened();
    fault_content(&fault.with_detail(json!({ "nearest": near })))
}

/// What the model is told of a call whose arguments were cut off with its answer.
pub(super) fn cut_off(reply: &Reply, call: &Wanted) -> Option<String> {
    let whole = serde_json::from_str::<serde::de::IgnoredAny>(&call.arguments).is_ok();
    if whole || reply.stopped != Stopped::Length {
        return None;
    }
    let message = "not done: the answer reached its limit of tokens in the middle of these \
                   arguments. Call it again with shorter arguments";
    Some(fault_content(&Fault::new(Code::ValidationError, message).not_happened()))
}

/// What the model is told of a call that its run was canceled before.
pub(super) fn canceled() -> String {
    let message = "not done: the run was canceled before this call was made";
    fault_content(&Fault::new(Code::Canceled, message).not_happened())
}

/// Tokens where the endpoint does not say: about four bytes each.
pub(super) fn usage_or_guess(reply: &Reply, prompt_bytes: usize) -> Usage {
    if reply.usage != Usage::default() {
        return reply.usage;
    }
    let calls: usize = reply.calls.iter().map(|call| call.name.len() + call.arguments.len()).sum();
    Usage {
        prompt_tokens: (prompt_bytes / 4) as u64,
        completion_tokens: ((reply.text.len() + calls).div_ceil(4)) as u64,
    }
}

/// Whether these can be the messages of a conversation.
pub fn check_messages(messages: &[Value]) -> Result<(), Fault> {
    let refused = |pointer: String, message: &str| {
        let message = format!("{}: {message}", pointer.trim_start_matches('/'));
        let fault = Fault::new(Code::ValidationError, message).not_happened();
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
            let known = "role must be system, developer, user, assistant or tool";
            return refused(format!("/messages/{n}/role"), known);
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
            return refused(pointer, "a message of a tool says which call it answers");
        }
    }
    Ok(())
}
