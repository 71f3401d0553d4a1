//! The source of handoffs, and the change of the agent that a handoff makes.

use async_trait::async_trait;
use serde_json::{Value, json};

use crate::domain::agent::{AgentDefinition, AgentDriver, result_guidance};
use crate::domain::call::Call;
use crate::domain::id::CallId;
use crate::domain::json::Json;
use crate::domain::run::RunLineage;
use crate::domain::run::handoff::{ActiveAgent, HANDOFF_TOOL_PREFIX, Handoff, HandoffRequest};
use crate::domain::run::options::RunOptions;
use crate::domain::run::progress::Conversation;
use crate::domain::tool::{Executor, SourceTraits, ToolDefinition};
use crate::ports::source::{Attempt, ProgressSink, Source, StartResult};
use crate::runs::Runs;

/// Executes handoffs. A call only records the request: the agent loop that made it hands the run
/// off when the call has succeeded, so rules, approvals and limits apply as to every call.
pub(crate) struct HandoffSource;

#[async_trait]
impl Source for HandoffSource {
    fn executor(&self) -> Executor {
        Executor::HANDOFF
    }

    fn traits(&self) -> SourceTraits {
        SourceTraits { in_process: true, ..Executor::HANDOFF.traits() }
    }

    fn list(&self) -> Vec<ToolDefinition> {
        Vec::new()
    }

    async fn start(&self, attempt: Attempt, _progress: ProgressSink) -> StartResult {
        let agent_id = attempt.tool.trim_start_matches(HANDOFF_TOOL_PREFIX);
        // The answer of OpenAI's Agents SDK to a transfer.
        StartResult::Finished(Ok(Json::from_value(&json!({ "assistant": agent_id }))))
    }

    fn cancel(&self, _call_id: &CallId, _attempt: u32) {}
}

/// Returns true if the call hands its run off.
pub(crate) fn is_handoff(call: &Call) -> bool {
    let has_succeeded = call.outcome.as_ref().is_some_and(|outcome| outcome.ok);
    call.target.executor == Executor::HANDOFF && has_succeeded
}

impl Runs {
    /// Returns the agent that a call hands its run off to; `None` if it no longer exists, or if a
    /// worker drives it.
    pub(crate) fn handoff_target(&self, call: &Call) -> Option<AgentDefinition> {
        let agent_id = call.target.tool.strip_prefix(HANDOFF_TOOL_PREFIX)?;
        let definition = self.registry.find_agent_entry(&call.project, agent_id)?.definition?;
        (definition.driver == AgentDriver::Loop).then_some(*definition)
    }
}

/// Hands a conversation off to an agent as this call says, and adds the message with which the
/// agent begins. `before` is the number of messages before the step that made the call, `until`
/// that before the last step. The answer of the run keeps the form that its own agent promises, so
/// the instructions of the other agent name the fields of the result.
pub(crate) fn hand_off(
    (options, lineage): (&RunOptions, Option<&RunLineage>),
    conversation: &mut Conversation,
    (call, target): (&Call, AgentDefinition),
    (before, until): (usize, usize),
) -> (Handoff, ActiveAgent) {
    let request: HandoffRequest = serde_json::from_str(call.target.args.text()).unwrap_or_default();
    let active = options.active_agent.as_deref();
    let first_agent = lineage.map_or(&call.origin.agent, |lineage| &lineage.agent_id);
    let from = active.map_or(first_agent, |active| &active.agent_id).clone();
    let visible_from = active.map_or(0, |active| active.first_message);
    let first = request.first_message(&conversation.messages, before).max(visible_from);
    let handoff = Handoff {
        from,
        to: target.agent_id.clone(),
        version: target.version,
        reason: request.reason.filter(|reason| !reason.trim().is_empty()),
        messages: request.messages,
        passed: until.saturating_sub(first),
        tool_call_id: call.id.clone(),
    };
    conversation.messages.push(handoff.to_message());
    let agent = ActiveAgent {
        agent_id: target.agent_id,
        version: target.version,
        instructions: instructions_in_run(target.profile.instructions, lineage),
        model: target.profile.model,
        tools: target.profile.tools,
        tool_mode: target.profile.tool_mode,
        pinned_tools: target.profile.pinned_tools,
        first_message: first,
    };
    (handoff, agent)
}

/// Returns the instructions of an agent in a run that it was handed: its own, and the fields of the
/// result that the agent of the run promises.
pub(crate) fn instructions_in_run(own: String, lineage: Option<&RunLineage>) -> String {
    match lineage {
        Some(lineage) if !lineage.result_fields.is_empty() => {
            let text = own + &result_guidance(&lineage.result_fields);
            text.trim_start().to_owned()
        }
        _ => own,
    }
}

/// Returns the number of messages before the step that made a call whose result arrived late, and
/// the number of those before the last step.
pub(crate) fn late_handoff_positions(conversation: &Conversation, call: &Call) -> (usize, usize) {
    let messages = &conversation.messages;
    let until = messages.iter().rposition(|message| message["role"] == "assistant");
    let until = until.unwrap_or(messages.len());
    let Some(id) = call.origin.caller_call_id.as_deref() else { return (until, until) };
    let makes_call = |message: &Value| {
        message["tool_calls"].as_array().is_some_and(|calls| calls.iter().any(|c| c["id"] == id))
    };
    (messages.iter().rposition(makes_call).unwrap_or(until), until)
}
