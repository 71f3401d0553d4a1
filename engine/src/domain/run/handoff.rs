//! Handoffs: another agent continues a run, under the same run, permission and budget. Pure.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::domain::id::CallId;
use crate::domain::tool::tool_mode::ToolMode;

/// Prefix of the tools that hand a run off: `handoff.to_a` to the agent `a`.
pub const HANDOFF_TOOL_PREFIX: &str = "handoff.to_";

/// Prefix of the names under which models know these tools: that of OpenAI's Agents SDK.
pub const TRANSFER_PREFIX: &str = "transfer_to_";

/// Number of messages that `last_n` passes on if the handoff names none.
pub const DEFAULT_LAST_N: usize = 10;

/// Returns the name of the tool that hands a run off to an agent.
pub fn handoff_tool_name(agent_id: &str) -> String {
    format!("{HANDOFF_TOOL_PREFIX}{agent_id}")
}

/// Returns the name under which models know the tool that hands a run off to an agent.
pub fn transfer_name(agent_id: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    let plain: String = agent_id.chars().map(|c| if is_plain(c) { c } else { '_' }).collect();
    format!("{TRANSFER_PREFIX}{plain}")
}

/// Returns true if a model means the handoff to this agent by a name. The Agents SDK writes names
/// in lower case, with `_` for every other character.
pub fn is_handoff_name(name: &str, agent_id: &str) -> bool {
    let normalize = |text: &str| -> String {
        let lower = text.chars().map(|c| c.to_ascii_lowercase());
        lower.map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect()
    };
    let rest = [TRANSFER_PREFIX, HANDOFF_TOOL_PREFIX, "handoff__to_"];
    let rest = rest.iter().find_map(|prefix| name.strip_prefix(prefix));
    rest.is_some_and(|rest| normalize(rest) == normalize(agent_id))
}

/// Selects the messages of the conversation that a handoff passes on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PassedMessages {
    /// All of them.
    #[default]
    All,
    /// The last ones.
    LastN,
    /// None: the next agent sees the reason only.
    None,
}

/// The arguments of a handoff.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct HandoffRequest {
    /// Reason, for the next agent and for people.
    pub reason: Option<String>,
    /// Messages to pass on.
    pub messages: PassedMessages,
    /// Number of messages of [`PassedMessages::LastN`].
    pub n: Option<usize>,
}

impl HandoffRequest {
    /// Returns the position of the first message that the next agent sees. `before` is the number
    /// of messages before the step that hands off.
    pub fn first_message(&self, messages: &[Value], before: usize) -> usize {
        match self.messages {
            PassedMessages::All => 0,
            PassedMessages::None => messages.len(),
            PassedMessages::LastN => {
                let mut first = before.saturating_sub(self.n.unwrap_or(DEFAULT_LAST_N));
                // Model APIs refuse the answer to a call without the call.
                let is_answer = |at: usize| messages.get(at).is_some_and(|m| m["role"] == "tool");
                while first > 0 && is_answer(first) {
                    first -= 1;
                }
                first
            }
        }
    }
}

/// The agent that continues a run after a handoff.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ActiveAgent {
    /// Id of the agent.
    pub agent_id: String,
    /// Version of the agent.
    pub version: u64,
    /// Its system prompt, in place of the run's.
    pub instructions: String,
    /// Name of its model; `None` keeps the run's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// Names and patterns of its tools; `None` keeps the run's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tools: Option<Vec<String>>,
    /// Selects the definitions that its model receives; `None` means the setting of its name, or
    /// else that of the run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool_mode: Option<ToolMode>,
    /// Names and patterns of its pinned tools; `None` means those of its name, or else of the run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pinned_tools: Option<Vec<String>>,
    /// Position of the first message of the conversation that it sees.
    pub first_message: usize,
}

impl ActiveAgent {
    /// Returns the messages that the agent's model receives: its own instructions, and those of the
    /// conversation that were passed on or came later.
    pub fn visible_messages(&self, messages: &[Value]) -> Vec<Value> {
        let instructions = (!self.instructions.is_empty())
            .then(|| json!({ "role": "system", "content": self.instructions }));
        let passed = messages.iter().skip(self.first_message);
        let is_system =
            |message: &&Value| matches!(message["role"].as_str(), Some("system" | "developer"));
        let passed = passed.filter(|message| !is_system(message)).cloned();
        instructions.into_iter().chain(passed).collect()
    }
}

/// The record of a handoff: who handed what to whom, and why.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Handoff {
    /// Agent that handed the run off.
    pub from: String,
    /// Agent that continues it.
    pub to: String,
    /// Version of that agent.
    pub version: u64,
    /// Reason, if the model gave one.
    pub reason: Option<String>,
    /// Selection of the messages that were passed on.
    pub messages: PassedMessages,
    /// Number of messages that were passed on.
    pub passed: usize,
    /// The call that handed the run off.
    pub tool_call_id: CallId,
}

impl Handoff {
    /// Returns the message with which the next agent begins.
    pub fn to_message(&self) -> Value {
        let Self { from, to, .. } = self;
        let reason = self.reason.as_deref().map(|reason| format!(" Reason: {reason}"));
        let reason = reason.unwrap_or_default();
        let text = format!("{from} hands this conversation over to you, {to}.{reason}");
        json!({ "role": "user", "content": text })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn roles(roles: &[&str]) -> Vec<Value> {
        roles.iter().map(|role| json!({ "role": role, "content": role })).collect()
    }

    #[test]
    fn names_of_both_conventions_are_recognized() {
        for name in
            ["transfer_to_billing_desk", "handoff.to_Billing-Desk", "handoff__to_billing-desk"]
        {
            assert!(is_handoff_name(name, "Billing-Desk"), "{name}");
        }
        assert!(!is_handoff_name("transfer_to_billing", "Billing-Desk"));
        assert_eq!(transfer_name("billing.desk"), "transfer_to_billing_desk");
    }

    #[test]
    fn the_selected_messages_are_visible() {
        let messages = roles(&["system", "user", "assistant", "tool", "user", "assistant", "tool"]);
        let first = |messages_kind, n| {
            let request = HandoffRequest { messages: messages_kind, n, ..Default::default() };
            request.first_message(&messages, 5)
        };
        assert_eq!(first(PassedMessages::All, None), 0);
        assert_eq!(first(PassedMessages::LastN, Some(1)), 4);
        assert_eq!(first(PassedMessages::LastN, Some(2)), 2, "not an answer without its call");
        assert_eq!(first(PassedMessages::LastN, None), 0);
        assert_eq!(first(PassedMessages::None, None), 7);
        let agent = ActiveAgent { instructions: "Be brief".into(), ..ActiveAgent::default() };
        let visible = agent.visible_messages(&messages);
        assert_eq!((visible.len(), &visible[0]["content"]), (7, &json!("Be brief")));
    }
}
