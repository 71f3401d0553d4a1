//! Renders the calls and results of a run as messages that can be appended to a conversation.
//!
//! Every call gets an answer, as the model APIs require: an unfinished call is answered with the
//! time it has been running. An id that was used before, or that an API would reject, is replaced
//! by the call's ticket, which is unique, or by its number if it has no ticket.

use std::collections::HashSet;

use serde::Serialize;

use super::prompt::render_result;
use super::text::{format_elapsed, truncate_to_tokens};
use super::{ToolCall, ToolCallContext, ToolResult};
use crate::domain::json::Json;
use crate::model_formats::{
    self, CallFormat, EntryAnswer, ToolFormat, data_content, fault_content,
};
use crate::registry::model_tool_names;
use crate::results::tokens;
use crate::results::tokens::divide_budget;

/// Calls and results in the format of a model API.
#[derive(Debug, Clone, PartialEq)]
pub struct ContextMessages {
    /// Assistant messages with calls, each followed by the messages that answer them.
    pub messages: Vec<Json>,
    /// The tools, described in the format of the same API.
    pub tools: Vec<Json>,
}

#[derive(Serialize)]
struct AssistantMessage<'a> {
    role: &'static str,
    /// Serialized as `null` because some servers require the field.
    content: Option<&'a str>,
    tool_calls: Vec<OpenAiToolCall<'a>>,
}

#[derive(Serialize)]
struct OpenAiToolCall<'a> {
    id: &'a str,
    #[serde(rename = "type")]
    kind: &'static str,
    function: OpenAiFunctionCall<'a>,
}

#[derive(Serialize)]
struct OpenAiFunctionCall<'a> {
    name: &'a str,
    arguments: &'a str,
}

#[derive(Serialize)]
struct AnthropicMessage {
    role: &'static str,
    content: Vec<Json>,
}

#[derive(Serialize)]
struct ToolUseBlock<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    id: &'a str,
    name: &'a str,
    input: Json,
}

/// A call with its result, and its id and name in the conversation.
struct ConversationCall<'a> {
    call: &'a ToolCall,
    result: Option<&'a ToolResult>,
    id: String,
    name: String,
}

impl ToolCallContext {
    /// Renders the calls and results as OpenAI chat messages, as of `now_ms`. With a budget, the
    /// answers have at most that many tokens together; long ones become digests.
    pub fn to_openai(&self, budget_tokens: Option<usize>, now_ms: u64) -> ContextMessages {
        let entries = self.conversation_calls();
        let mut contents = render_contents(&entries, budget_tokens, now_ms).into_iter();
        let mut messages = Vec::new();
        for step in entries.chunk_by(|a, b| a.call.step == b.call.step) {
            let tool_calls = step.iter().map(|entry| OpenAiToolCall {
                id: &entry.id,
                kind: "function",
                function: OpenAiFunctionCall {
                    name: &entry.name,
                    arguments: entry.call.args.text(),
                },
            });
            let tool_calls = tool_calls.collect();
            messages.push(to_json(&AssistantMessage {
                role: "assistant",
                content: None,
                tool_calls,
            }));
            let answers = step.iter().zip(&mut contents);
            messages.extend(answers.map(|(entry, text)| entry.message(CallFormat::OpenAi, &text)));
        }
        ContextMessages { messages, tools: self.describe_tools(ToolFormat::OpenAi) }
    }

    /// Renders the calls and results as Anthropic messages, with assistant and user messages
    /// alternating.
    pub fn to_anthropic(&self, budget_tokens: Option<usize>, now_ms: u64) -> ContextMessages {
        let entries = self.conversation_calls();
        let mut contents = render_contents(&entries, budget_tokens, now_ms).into_iter();
        let mut messages = Vec::new();
        for step in entries.chunk_by(|a, b| a.call.step == b.call.step) {
            let calls = step.iter().map(|entry| {
                // The Anthropic API accepts only objects as input.
                let object = entry.call.args.text().trim_start().starts_with('{');
                let input = if object { entry.call.args.clone() } else { Json::empty_object() };
                to_json(&ToolUseBlock { kind: "tool_use", id: &entry.id, name: &entry.name, input })
            });
            messages
                .push(to_json(&AnthropicMessage { role: "assistant", content: calls.collect() }));
            let answers = step.iter().zip(&mut contents);
            let answers = answers.map(|(entry, text)| entry.message(CallFormat::Anthropic, &text));
            messages.push(to_json(&AnthropicMessage { role: "user", content: answers.collect() }));
        }
        ContextMessages { messages, tools: self.describe_tools(ToolFormat::Anthropic) }
    }

    fn describe_tools(&self, format: ToolFormat) -> Vec<Json> {
        let names = model_tool_names::names_for_model(
            self.tool_definitions.iter().map(|tool| tool.name.as_str()),
        );
        let tools = self.tool_definitions.iter().zip(&names);
        let tools = tools.filter(|(tool, _)| model_formats::accepts_object(tool));
        tools.map(|(tool, name)| model_formats::describe_tool(format, name, tool)).collect()
    }

    fn conversation_calls(&self) -> Vec<ConversationCall<'_>> {
        let names = model_tool_names::names_for_model(
            self.tool_definitions.iter().map(|tool| tool.name.as_str()),
        );
        let mut used = HashSet::new();
        let calls = self.tool_calls.iter();
        calls
            .map(|call| {
                let position = self.tool_definitions.iter().position(|tool| tool.name == call.name);
                let name = position.map_or_else(
                    || model_tool_names::name_for_model(&call.name),
                    |at| names[at].clone(),
                );
                ConversationCall {
                    call,
                    result: self.result_of(call),
                    id: usable_call_id(call, &mut used),
                    name,
                }
            })
            .collect()
    }
}

/// Returns the call's own id if the APIs accept it and it is unused, otherwise its ticket, or an id
/// made from its number.
fn usable_call_id<'a>(call: &'a ToolCall, used: &mut HashSet<&'a str>) -> String {
    let is_allowed = |b: u8| b.is_ascii_alphanumeric() || b == b'_' || b == b'-';
    let id = call.call_id.as_str();
    let fits = (1..=64).contains(&id.len()) && id.bytes().all(is_allowed);
    if fits && used.insert(id) {
        return id.to_owned();
    }
    match &call.tool_call_id {
        Some(ticket) => ticket.to_string(),
        None => format!("call_n{}", call.number),
    }
}

impl ConversationCall<'_> {
    /// Returns the full answer as a text for a model.
    fn content(&self, now_ms: u64) -> String {
        match self.result.map(|result| &result.outcome) {
            Some(Ok(data)) => data_content(data),
            Some(Err(fault)) => fault_content(fault),
            None => {
                let mode = if self.call.background { " in the background" } else { "" };
                let since = self.call.created_ms.map(|at_ms| format_elapsed(at_ms, now_ms));
                let since = since.map(|span| format!(" for {span} now")).unwrap_or_default();
                format!(
                    "still running{mode}{since}; its result follows when it has ended, do not call \
                     it again for it"
                )
            }
        }
    }

    /// Returns the most useful text within `budget` tokens.
    fn shorten(&self, content: &str, budget: usize) -> String {
        match self.result.map(|result| &result.outcome) {
            Some(Ok(data)) => render_result(self.call, &self.name, data, budget),
            Some(Err(fault)) => truncate_to_tokens(&format!("failed: {fault}"), budget),
            None => truncate_to_tokens(content, budget),
        }
    }

    fn message(&self, format: CallFormat, content: &str) -> Json {
        let ok = self.result.map(ToolResult::ok);
        let (data, error, metrics, pending) = (None, None, None, None);
        let answer = EntryAnswer { ok, content, data, error, metrics, pending, media: &[] };
        model_formats::answer_message(format, Some(&self.id), &answer)
    }
}

/// Renders the text of each answer, together in at most `budget_tokens` tokens.
fn render_contents(
    entries: &[ConversationCall<'_>],
    budget_tokens: Option<usize>,
    now_ms: u64,
) -> Vec<String> {
    let mut contents: Vec<String> = entries.iter().map(|entry| entry.content(now_ms)).collect();
    let bytes: usize = contents.iter().map(String::len).sum();
    // Every token has at least one byte.
    let Some(budget) = budget_tokens.filter(|budget| bytes > *budget) else { return contents };
    let need = |content: &String| {
        if tokens::exceeds(content, budget) { budget + 1 } else { tokens::count(content) }
    };
    let needs: Vec<usize> = contents.iter().map(need).collect();
    let shares = divide_budget(budget, &needs);
    for (at, entry) in entries.iter().enumerate().filter(|(at, _)| needs[*at] > shares[*at]) {
        contents[at] = entry.shorten(&contents[at], shares[at]);
    }
    contents
}

fn to_json<T: Serialize>(value: &T) -> Json {
    Json::from_serialize(value).unwrap_or_else(|_| Json::null())
}
