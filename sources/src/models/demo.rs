//! `demo`: a scripted model that needs no key and no network, so that a new user can see the agent
//! loop. It understands arithmetic, the weather in a place, and `NAME {"some": "arguments"}` for
//! any tool it is offered. For any other question it shows one call of the calculator. It is not a
//! language model, and says so.

use async_trait::async_trait;
use serde_json::{Deserializer, Value, json};
use toolcrib::domain::model_reply::{FinishReason, ModelReply, TokenUsage, ToolCallRequest};
use toolcrib::ports::model::{Delta, DeltaListener, Model, ModelError, ModelRequest};
use toolcrib::registry::name_for_model;
use toolcrib::results::tokens;

use super::DEMO;

const CALCULATOR: &str = "calculation.eval";
const WEATHER: &str = "weather.query";

/// The expression to calculate if the question was not understood.
const EXAMPLE: &str = "6 * 7";

/// Maximum number of calls in one reply.
const MAX_CALLS: usize = 8;

/// The scripted model.
pub struct DemoModel;

#[async_trait]
impl Model for DemoModel {
    async fn reply(
        &self,
        prompt: &ModelRequest,
        listener: DeltaListener<'_>,
    ) -> Result<ModelReply, ModelError> {
        let question = last_user_message(&prompt.messages);
        let since = question.as_ref().map_or(0, |(question_index, _)| question_index + 1);
        let since = &prompt.messages[since..];
        let question_text = question.map(|(_, text)| text).unwrap_or_default();
        let tools: Vec<Value> = prompt.tools.iter().map(toolcrib::Json::to_value).collect();
        let (text, calls) = match collect_results(since) {
            found if !found.is_empty() => (summarize_results(&found, &question_text), Vec::new()),
            _ => plan_reply(&question_text, &offered_tool_names(&tools), prompt.messages.len()),
        };
        for word in text.split_inclusive(' ') {
            listener(Delta::Text(word.to_owned()));
            // Lets a subscriber show this word before the next one.
            tokio::task::yield_now().await;
        }
        for (index, call) in calls.iter().enumerate() {
            let (id, name) = (Some(call.id.clone()), Some(call.name.clone()));
            listener(Delta::Call { index, id, name, arguments: call.arguments.clone() });
        }
        let arguments: String = calls.iter().map(|call| call.arguments.as_str()).collect();
        let read: String = prompt.messages.iter().map(Value::to_string).collect();
        let usage = TokenUsage {
            prompt_tokens: tokens::count(&read) as u64,
            completion_tokens: tokens::count(&format!("{text}{arguments}")) as u64,
        };
        let finish_reason =
            if calls.is_empty() { FinishReason::Stop } else { FinishReason::ToolCalls };
        Ok(ModelReply { text, calls, finish_reason, usage, model: Some(DEMO.into()) })
    }
}

/// Returns the index and the text of the last user message.
fn last_user_message(messages: &[Value]) -> Option<(usize, String)> {
    let index = messages.iter().rposition(|message| message["role"] == "user")?;
    let text = match &messages[index]["content"] {
        Value::String(text) => text.clone(),
        Value::Array(parts) => {
            let texts = parts.iter().filter_map(|part| part["text"].as_str());
            texts.collect::<Vec<_>>().join(" ")
        }
        _ => String::new(),
    };
    Some((index, text))
}

/// Returns the names of the tools that may be called.
fn offered_tool_names(tools: &[Value]) -> Vec<&str> {
    tools.iter().filter_map(|tool| tool["function"]["name"].as_str()).collect()
}

/// Returns the first reply: a short text and calls, or only text.
fn plan_reply(
    question: &str,
    tools: &[&str],
    question_index: usize,
) -> (String, Vec<ToolCallRequest>) {
    let tool = |name: &str| {
        let model_name = name_for_model(name);
        tools.iter().find(|offered| **offered == model_name || **offered == name).copied()
    };
    let mut planned: Vec<(&str, Value)> = Vec::new();
    for name in tools {
        planned
            .extend(parse_explicit_arguments(question, name).into_iter().map(|args| (*name, args)));
    }
    if let (Some(name), true) = (tool(WEATHER), planned.is_empty())
        && question.to_lowercase().contains("weather")
    {
        let query: String = question.chars().take(500).collect();
        planned.push((name, json!({ "query": query })));
    }
    let calculator = tool(CALCULATOR);
    if let (Some(name), true) = (calculator, planned.is_empty()) {
        let found = find_expressions(question);
        planned.extend(found.into_iter().map(|found| (name, json!({ "expression": found }))));
    }
    let understood = !planned.is_empty();
    if let (Some(name), false) = (calculator, understood) {
        planned.push((name, json!({ "expression": EXAMPLE })));
    }
    planned.truncate(MAX_CALLS);
    let text = match (understood, planned.len()) {
        (_, 0) => "I am a scripted model without any tool to call, so I can only say this.",
        (true, 1) => "Let me ask a tool.",
        (true, _) => "Let me ask the tools.",
        (false, _) => "I am a scripted model and understood nothing of this. To show you a call:",
    };
    let calls = planned.into_iter().enumerate().map(|(n, (name, args))| ToolCallRequest {
        id: format!("call_{question_index}_{n}"),
        name: name.to_owned(),
        arguments: args.to_string(),
    });
    (text.to_owned(), calls.collect())
}

/// Returns arguments that are written after a tool's name: `report.make {"pages": 7}`.
fn parse_explicit_arguments(question: &str, name: &str) -> Vec<Value> {
    let dotted = name.replace("--", "/").replace("__", ".");
    let mut found = Vec::new();
    for spelling in [name, dotted.as_str()] {
        for (offset, _) in question.match_indices(spelling) {
            let rest = question[offset + spelling.len()..].trim_start();
            let args = Deserializer::from_str(rest).into_iter::<Value>().next();
            found.extend(args.and_then(Result::ok).filter(|_| rest.starts_with('{')));
        }
        if !found.is_empty() {
            break;
        }
    }
    found
}

/// Returns the parts of a sentence that are arithmetic: they contain a digit and an operator.
fn find_expressions(question: &str) -> Vec<String> {
    let words = [(" plus ", "+"), (" minus ", "-"), (" times ", "*"), (" divided by ", "/")];
    let mut text = question.replace(['×', '·'], "*").replace('÷', "/");
    for (word, sign) in words {
        text = text.replace(word, sign);
    }
    let arithmetic = |c: char| c.is_ascii_digit() || "+-*/^%(). ".contains(c);
    let mut found = Vec::new();
    for candidate in text.split(|c| !arithmetic(c)) {
        let candidate = candidate.trim().trim_end_matches(['.', ' ']);
        let inside = candidate.trim_start_matches(['-', ' ', '(', '.']);
        if inside.contains(|c: char| "+-*/^%".contains(c))
            && candidate.contains(|c: char| c.is_ascii_digit())
        {
            found.push(candidate.to_owned());
        }
    }
    found
}

/// Returns the calls since the question, each with its result.
fn collect_results(since: &[Value]) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for message in since.iter().filter(|message| message["role"] == "tool") {
        let id = &message["tool_call_id"];
        let calls = since.iter().filter_map(|message| message["tool_calls"].as_array()).flatten();
        let call = calls.into_iter().find(|call| call["id"] == *id);
        let function = call.map(|call| &call["function"]).unwrap_or(&Value::Null);
        let name = function["name"].as_str().unwrap_or("a tool").replace("__", ".");
        let args: Value = function["arguments"]
            .as_str()
            .and_then(|text| serde_json::from_str(text).ok())
            .unwrap_or_default();
        let subject = match args["expression"].as_str() {
            Some(expression) => expression.to_owned(),
            None => name,
        };
        found.push((subject, message["content"].as_str().unwrap_or_default().to_owned()));
    }
    found
}

fn summarize_results(found: &[(String, String)], question: &str) -> String {
    let mut lines = Vec::new();
    for (subject, content) in found {
        let value: Value = serde_json::from_str(content).unwrap_or_default();
        lines.push(match (&value["error"]["message"], &value["text"]) {
            (Value::String(reason), _) => format!("{subject} could not be done: {reason}"),
            (_, Value::String(text)) => format!("{subject} = {text}"),
            _ => {
                let short: String = content.chars().take(400).collect();
                format!("{subject} answered: {short}")
            }
        });
    }
    let understood =
        found.len() > 1 || found.first().is_some_and(|(subject, _)| subject != EXAMPLE);
    if !understood && !question.contains(EXAMPLE) {
        lines.push("Ask me to calculate something, such as 12 * 7 and 2 ^ 10.".to_owned());
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arithmetic_expressions_are_found_in_text() {
        let found = |text: &str| find_expressions(text);
        assert_eq!(found("What is 12*7, and 2 ^ 10?"), ["12*7", "2 ^ 10"]);
        assert_eq!(found("6 times 7."), ["6*7"]);
        assert_eq!(found("(1 + 2) * 3"), ["(1 + 2) * 3"]);
        for nothing in ["", "hello", "in 2024", "1. first", "-5", "a-b", "3.14"] {
            assert_eq!(found(nothing), Vec::<String>::new(), "{nothing}");
        }
    }

    #[test]
    fn arguments_are_parsed_after_a_tool_name() {
        let found = parse_explicit_arguments("call report.make {\"pages\": 7} now", "report__make");
        assert_eq!(found, [json!({ "pages": 7 })]);
        assert!(parse_explicit_arguments("report.make seven", "report__make").is_empty());
    }

    #[tokio::test]
    async fn the_demo_model_calls_tools_and_then_reports_their_results() {
        let function = json!({ "name": "calculation__eval", "parameters": {} });
        let tool = json!({ "type": "function", "function": function });
        let tools = vec![toolcrib::Json::from_value(&tool)];
        let user = json!({ "role": "user", "content": "12*7 and 1/0" });
        let mut prompt = ModelRequest { messages: vec![user], tools, ..ModelRequest::default() };
        let first = DemoModel.reply(&prompt, &|_| {}).await.unwrap();
        assert_eq!(first.finish_reason, FinishReason::ToolCalls);
        let arguments_sent: Vec<&str> =
            first.calls.iter().map(|call| call.arguments.as_str()).collect();
        assert_eq!(arguments_sent, [r#"{"expression":"12*7"}"#, r#"{"expression":"1/0"}"#]);
        let calls: Vec<Value> = first
            .calls
            .iter()
            .map(|call| {
                json!({ "id": call.id, "type": "function",
                "function": { "name": call.name, "arguments": call.arguments } })
            })
            .collect();
        prompt.messages.push(json!({ "role": "assistant", "tool_calls": calls }));
        for (call, content) in first.calls.iter().zip([
            r#"{"result":84,"text":"84"}"#,
            r#"{"error":{"code":"VALIDATION_ERROR","message":"division by zero"}}"#,
        ]) {
            prompt
                .messages
                .push(json!({ "role": "tool", "tool_call_id": call.id, "content": content }));
        }
        let last = DemoModel.reply(&prompt, &|_| {}).await.unwrap();
        assert!(last.calls.is_empty());
        assert_eq!(last.text, "12*7 = 84\n1/0 could not be done: division by zero");
    }
}
