//! Records of turns that one agent hands to another. Pure.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::ToolStatus;
use super::card::Card;
use crate::domain::fault::{Code, Fault};

/// The call that handed a turn to an agent. The deliverable of the turn becomes its result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TurnDelegation {
    /// Id of the call, `tc_…`.
    pub call_id: String,
    /// Number of the call's attempt that the turn executes.
    pub attempt: u32,
    /// Id of the agent that made the call.
    pub parent_agent_id: String,
    /// Id of the turn, or of the run, that made the call.
    pub parent_turn_id: String,
    /// Id of the card with the instruction.
    pub instruction_card_id: String,
    /// Time at which the call ends without a result, in Unix milliseconds.
    pub deadline_ms: u64,
    /// Number of leases of the turn that expired.
    #[serde(default)]
    pub lost_leases: u32,
    /// Status that the turn ended with; `None` until then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<ToolStatus>,
    /// Place of the turn in the tree of agents.
    #[serde(default)]
    pub lineage: TurnLineage,
    /// Number of tool calls that the turn has made.
    #[serde(default)]
    pub used_calls: u64,
    /// Number of tokens that the model of the worker has used for the turn, as the worker reports
    /// them.
    #[serde(default)]
    pub used_tokens: u64,
}

impl TurnDelegation {
    /// Records the total of tokens that a worker reports. A report that was overtaken by a later
    /// one changes nothing.
    pub fn report_tokens(&mut self, total: Option<u64>) {
        self.used_tokens = self.used_tokens.max(total.unwrap_or(0));
    }
}

/// The place of a turn in a tree of agents. The agents that it calls continue the tree.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TurnLineage {
    /// Agents that wait for the turn, from the first to its caller.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ancestors: Vec<String>,
    /// Largest depth that an agent below the turn may have; that of the protocol if `None`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_depth: Option<u32>,
    /// First run or turn of the tree; `None` if the turn begins it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub root_id: Option<String>,
    /// Run or turn that made the call; `None` if neither did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parent_id: Option<String>,
    /// Nearest run above the turn.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run_id: Option<String>,
    /// True if the turn continues when its caller ends.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub outlives_parent: bool,
    /// Number of tool calls that the turn reserves in the budget above it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub calls: Option<u64>,
    /// Number of tokens that the turn reserves in the budget above it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens: Option<u64>,
}

/// A message between agents, as the shared tables record it (`state.execution_edges`). A store
/// without such tables has the same facts in the turn ([`TurnDelegation`]).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExecutionEdge {
    /// Unique id, `edge_…`.
    pub edge_id: String,
    /// `enqueue` or `report`.
    pub primitive: &'static str,
    /// `request` or `response`.
    pub phase: &'static str,
    /// Agent, turn and step that the message comes from.
    pub source: (String, String, Option<String>),
    /// Agent and turn that the message goes to.
    pub target: (String, String),
    /// Id of the turn that the messages in both directions concern.
    pub correlation_id: String,
}

/// Returns the value that a deliverable card carries: the data, text or result in its content.
///
/// # Errors
///
/// Returns the fault of a `tool.result` that did not succeed.
pub fn deliverable_value(card: &Card) -> Result<Value, Fault> {
    let field = |name: &str| card.content.get(name).cloned().unwrap_or(Value::Null);
    match card.content_text("__type__").unwrap_or_default() {
        "JsonContent" => Ok(field("data")),
        "TextContent" => Ok(field("text")),
        "ToolResultContent" => match card.content_text("status") {
            Some("success" | "partial") => Ok(field("result")),
            _ => Err(card.outcome().1),
        },
        _ => {
            let content = card.content.iter().filter(|(name, _)| *name != "__type__");
            Ok(Value::Object(content.map(|(name, value)| (name.clone(), value.clone())).collect()))
        }
    }
}

/// Returns the fault of a chain of agents that is too deep.
pub fn depth_fault() -> Fault {
    let message = format!(
        "recursion_depth_exceeded: agents can hand work on {} levels deep; do this task yourself",
        super::MAX_DEPTH - 1
    );
    Fault::new(Code::ValidationError, message).without_side_effect()
}

/// Returns the content of a card with a text.
pub fn text_content(text: &str) -> Map<String, Value> {
    super::card::into_map(serde_json::json!({ "__type__": "TextContent", "text": text }))
}

/// Maximum number of tasks of one `fork_join`.
pub const MAX_JOIN_TASKS: usize = 8;
/// Time for the tasks of a join that names none, in seconds.
pub const DEFAULT_JOIN_SECONDS: u64 = 900;
/// Maximum time for the tasks of a join, in seconds.
pub const MAX_JOIN_SECONDS: u64 = 43_200;
/// Time that a join has after its deadline to end with the results that are in.
pub const JOIN_GRACE_MS: u64 = 30_000;

/// Returns the shortest timeout that a call of a tool may have: the call of a join must outlive the
/// deadline of its tasks, or their results would be lost.
pub fn min_timeout_ms(tool: &str, args: &Value) -> u64 {
    match tool {
        "fork_join" => join_ms(args["deadline_seconds"].as_f64()) + JOIN_GRACE_MS,
        _ => 0,
    }
}

/// Returns the time for the tasks of a join in milliseconds.
pub fn join_ms(deadline_seconds: Option<f64>) -> u64 {
    let seconds = deadline_seconds.filter(|seconds| *seconds > 0.0);
    let ms = seconds.map_or(DEFAULT_JOIN_SECONDS * 1_000, |seconds| (seconds * 1_000.0) as u64);
    ms.clamp(1, MAX_JOIN_SECONDS * 1_000)
}
