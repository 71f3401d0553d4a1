//! The tools that call agents: `agent.ID` for each agent of the roster that has a definition.

use serde_json::json;

use crate::domain::agent::{AgentDefinition, AgentDriver, agent_tool_name, result_schema};
use crate::domain::json::Json;
use crate::domain::retry::ExecutionPolicyPatch;
use crate::domain::run::handoff::handoff_tool_name;
use crate::domain::tool::{Effect, Executor, Risk, ToolDefinition};
use crate::domain::utp::{AfterExecution, Binding};

/// Time for a call of an agent whose profile sets none.
const DEFAULT_TIMEOUT_MS: u64 = 600_000;

/// Number of characters of the instructions that describe an agent without a description.
const DESCRIPTION_CHARS: usize = 300;

/// Maximum number of characters about an agent in the description of a handoff to it. A request
/// may offer a handoff to every agent.
const HANDOFF_DESCRIPTION_CHARS: usize = 120;

/// Returns the tool that calls an agent.
pub(super) fn agent_tool(project: &str, agent: &AgentDefinition) -> ToolDefinition {
    let profile = &agent.profile;
    let description = profile.description.clone().unwrap_or_else(|| {
        let text: String = profile.instructions.chars().take(DESCRIPTION_CHARS).collect();
        format!("Gives work to the agent {}. Its instructions: {text}", agent.agent_id)
    });
    let input_schema = json!({
        "type": "object",
        "properties": {
            "instruction": {
                "type": "string",
                "minLength": 1,
                "description": "The task, complete: the agent sees nothing of this conversation",
            },
            "context": {
                "description": "Data that the agent needs for the task: text or JSON",
            },
            "context_box_id": {
                "type": "string",
                "description": "A box of cards that the agent reads; default: that of the caller",
            },
        },
        "required": ["instruction"],
        "additionalProperties": false,
    });
    // The title names the version: an approval of a call counts for one version only.
    let title = format!("Agent {} (version {})", agent.agent_id, agent.version);
    let about = json!({ "agent_id": agent.agent_id, "version": agent.version,
        "driver": agent.driver.as_str() });
    ToolDefinition {
        project: Some(project.to_owned()),
        name: agent_tool_name(&agent.agent_id),
        description,
        executor: Executor::AGENT,
        input_schema: Json::from_value(&input_schema),
        output_schema: result_schema(&profile.result_fields)
            .map(|schema| Json::from_value(&schema)),
        timeout_ms: profile.limits.ms.unwrap_or(DEFAULT_TIMEOUT_MS),
        background: false,
        effect: Effect::Irreversible,
        risk: Risk::Medium,
        policy: ExecutionPolicyPatch::default(),
        fallback: Vec::new(),
        metadata: Some(Json::from_value(&json!({ "title": title, "agent": about }))),
        // A run or turn that called an agent waits for its result.
        binding: Some(Binding {
            target_subject: None,
            after_execution: AfterExecution::Suspend,
            options: Json::empty_object(),
            parameters: None,
        }),
    }
}

/// Returns the tool that hands a run off to an agent. A worker drives its own turns and cannot
/// continue a run of the loop.
pub(super) fn handoff_tool(project: &str, agent: &AgentDefinition) -> Option<ToolDefinition> {
    if agent.driver != AgentDriver::Loop {
        return None;
    }
    let call = agent_tool(project, agent);
    let profile = &agent.profile;
    let about = profile.description.as_deref().unwrap_or(&profile.instructions);
    let description = format!(
        "Transfers this conversation to the agent {}, which continues it in your place. {}",
        agent.agent_id,
        first_sentence(about, HANDOFF_DESCRIPTION_CHARS)
    );
    let input_schema = json!({
        "type": "object",
        "properties": {
            "reason": { "type": "string", "description": "Why, and what is left to do" },
            "messages": {
                "type": "string",
                "enum": ["all", "last_n", "none"],
                "description": "Messages that the agent sees; default: all",
            },
            "n": { "type": "integer", "minimum": 1, "description": "For last_n; default: 10" },
        },
        "additionalProperties": false,
    });
    Some(ToolDefinition {
        name: handoff_tool_name(&agent.agent_id),
        description,
        executor: Executor::HANDOFF,
        input_schema: Json::from_value(&input_schema),
        output_schema: None,
        timeout_ms: 10_000,
        effect: Effect::Idempotent,
        ..call
    })
}

/// Returns the first sentence of a text, cut at `max_chars`.
fn first_sentence(text: &str, max_chars: usize) -> String {
    let line = text.trim().lines().next().unwrap_or_default();
    let end = line.char_indices().zip(line.chars().skip(1)).find_map(|((at, c), next)| {
        // `。` ends a sentence without a space after it.
        let ends = matches!(c, '。' | '！' | '？') || matches!(c, '.' | '!' | '?') && next == ' ';
        ends.then_some(at + c.len_utf8())
    });
    let sentence = &line[..end.unwrap_or(line.len())];
    match sentence.chars().count() <= max_chars {
        true => sentence.to_owned(),
        false => sentence.chars().take(max_chars - 1).chain(['…']).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_description_is_one_short_sentence() {
        let cases = [
            ("You bill. You refund.", "You bill."),
            ("  Version 1.2 of the desk\nMore", "Version 1.2 of the desk"),
            ("你负责账单。你不退款。", "你负责账单。"),
            ("", ""),
        ];
        for (text, expected) in cases {
            assert_eq!(first_sentence(text, 40), expected);
        }
        assert_eq!(first_sentence("abcdef", 4), "abc…");
    }
}
