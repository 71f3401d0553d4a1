//! The records of UTP: bindings, routes, turns, inbox items, outbox messages. Pure.
//!
//! UTP is a protocol for tools over NATS: a command points at a `tool.call` card; a tool service
//! writes a `tool.result` card and reports it. The stores hold these types as JSON, so a new field
//! needs a default.

pub mod card;
pub mod subject;
pub mod trace;
pub mod turn_event;

use std::str::FromStr;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::domain::call::{Call, Status};
use crate::domain::json::Json;

pub use card::Card;

/// Tool names reserved for the protocol.
pub const RESERVED_NAMES: [&str; 5] =
    ["delegate_async", "launch_principal", "ask_expert", "fork_join", "provision_agent"];

/// The channel used if none is given.
pub const DEFAULT_CHANNEL: &str = "public";

/// Maximum depth of agents that call agents.
pub const MAX_DEPTH: u32 = 20;

/// Effect of a tool's result on the turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AfterExecution {
    /// The turn continues.
    #[default]
    Suspend,
    /// The turn ends.
    Terminate,
}

impl AfterExecution {
    /// Returns the name used on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Suspend => "suspend",
            Self::Terminate => "terminate",
        }
    }
}

impl FromStr for AfterExecution {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        match text {
            "suspend" => Ok(Self::Suspend),
            "terminate" => Ok(Self::Terminate),
            _ => Err(()),
        }
    }
}

/// Execution settings of a project's tool: the part of its definition that no model sees.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Binding {
    /// Subject of its commands, with the placeholders `{project_id}` and `{channel_id}`; `None` if
    /// the server executes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target_subject: Option<String>,
    pub after_execution: AfterExecution,
    /// A JSON object, stored as given: `args`, `envs`, `jina` and any options of the service.
    #[serde(default = "Json::empty_object")]
    pub options: Json,
    /// The schema of all arguments, if models see only a part of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parameters: Option<Json>,
}

impl Binding {
    /// Returns the timeout of a call, if the options set one.
    pub fn timeout_ms(&self) -> Option<u64> {
        let options = self.options.to_value();
        let named = ["suspend_timeout_seconds", "timeout_seconds"];
        let seconds = named.iter().find_map(|name| options.get(*name).and_then(Value::as_f64))?;
        (seconds > 0.0).then_some((seconds * 1_000.0) as u64)
    }
}

/// The status of an ended call as a tool service reports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToolStatus {
    Success,
    Failed,
    Canceled,
    Timeout,
    Partial,
}

impl ToolStatus {
    /// Every status.
    pub const ALL: [Self; 5] =
        [Self::Success, Self::Failed, Self::Canceled, Self::Timeout, Self::Partial];

    /// Returns the name used on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Success => "success",
            Self::Failed => "failed",
            Self::Canceled => "canceled",
            Self::Timeout => "timeout",
            Self::Partial => "partial",
        }
    }

    /// Returns the status of an ended call; `None` while it is open.
    pub fn from_call(call: &Call) -> Option<Self> {
        let partial = call.outcome.as_ref().is_some_and(|outcome| outcome.partial);
        match call.status {
            Status::Succeeded if partial => Some(Self::Partial),
            Status::Succeeded => Some(Self::Success),
            Status::Failed => Some(Self::Failed),
            Status::Timeout => Some(Self::Timeout),
            Status::Canceled => Some(Self::Canceled),
            Status::Pending | Status::Running => None,
        }
    }
}

impl FromStr for ToolStatus {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        Self::ALL.into_iter().find(|status| status.as_str() == text).ok_or(())
    }
}

/// The identity of a call in UTP; a report must match it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Route {
    pub agent_id: String,
    pub turn_id: String,
    pub epoch: u64,
    pub step_id: String,
    pub tool_call_id: String,
    pub channel: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent_step_id: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tracestate: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub context_box_id: Option<String>,
    #[serde(default)]
    pub depth: u32,
    /// The project that made the call, if another project executes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub project: Option<String>,
}

impl Route {
    /// Returns the route of a call. A call outside any turn uses its run as the turn, with epoch 1.
    pub fn for_call(call: &Call) -> Self {
        if let Some(turn) = &call.origin.route {
            let mut route = turn.as_ref().clone();
            route.tool_call_id = id_for_target(&route.tool_call_id, call);
            return route;
        }
        let body = call.id.as_str().trim_start_matches(crate::domain::id::CallId::PREFIX);
        Self {
            agent_id: call.origin.agent.clone(),
            turn_id: call.run_id.clone(),
            epoch: 1,
            step_id: format!("step_{body}"),
            tool_call_id: id_for_target(call.id.as_str(), call),
            channel: DEFAULT_CHANNEL.to_owned(),
            parent_step_id: None,
            tracestate: None,
            context_box_id: None,
            depth: 0,
            project: None,
        }
    }
}

/// Returns the call id for the current target. A tool service answers a known id from memory, so a
/// fallback needs a separate id.
fn id_for_target(id: &str, call: &Call) -> String {
    match call.target.tool == call.tool_name {
        true => id.to_owned(),
        false => format!("{id}-a{}", call.attempt - call.target_attempts.min(call.attempt) + 1),
    }
}

/// Status of a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TurnStatus {
    /// A worker holds the lease.
    Running,
    /// Calls are in flight; the turn resumes when all results are in.
    Suspended,
    Finished,
    Stopped,
    /// The lease expired without renewal.
    Expired,
}

impl TurnStatus {
    /// Returns the name used on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Suspended => "suspended",
            Self::Finished => "finished",
            Self::Stopped => "stopped",
            Self::Expired => "expired",
        }
    }

    /// Returns true if the turn can never continue.
    pub fn is_terminal(self) -> bool {
        matches!(self, Self::Finished | Self::Stopped)
    }
}

/// One activation of an agent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Turn {
    pub project: String,
    pub agent_id: String,
    pub turn_id: String,
    /// Increases with every lease, resume and stop; messages with an older epoch are rejected.
    pub epoch: u64,
    pub status: TurnStatus,
    pub channel: String,
    /// The step whose calls are in flight, or the last one.
    #[serde(default)]
    pub step_id: Option<String>,
    /// The steps dispatched in this epoch and not resumed yet: the turn waits for all of them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub steps: Vec<String>,
    #[serde(default)]
    pub parent_step_id: Option<String>,
    #[serde(default)]
    pub traceparent: Option<String>,
    #[serde(default)]
    pub tracestate: Option<String>,
    #[serde(default)]
    pub context_box_id: Option<String>,
    #[serde(default)]
    pub depth: u32,
    /// While running: expiry of the lease.
    pub lease_until_ms: u64,
    pub lease_ms: u64,
    /// While suspended: deadline for the last of its results.
    #[serde(default)]
    pub resume_deadline_ms: Option<u64>,
    pub created_ms: u64,
    pub updated_ms: u64,
    /// The reason why the turn ended.
    #[serde(default)]
    pub reason: Option<String>,
    /// Counts the saved states, from 1.
    pub version: u64,
}

impl Turn {
    /// Returns the steps whose calls are in flight, or the last ones.
    pub fn last_steps(&self) -> &[String] {
        match self.steps.is_empty() {
            true => self.step_id.as_slice(),
            false => &self.steps,
        }
    }
}

/// One call of a step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepCall {
    pub project: String,
    pub agent_id: String,
    pub turn_id: String,
    pub epoch: u64,
    pub step_id: String,
    pub tool_call_id: String,
    pub tool_name: String,
    /// The call; `None` if it was refused before it was created.
    #[serde(default)]
    pub call_id: Option<String>,
    /// The card of its result, once it is in.
    #[serde(default)]
    pub result_card_id: Option<String>,
    #[serde(default)]
    pub inbox_id: Option<String>,
}

/// An item in an agent's inbox, until the agent acknowledges it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct InboxItem {
    /// `inbox_…`
    pub inbox_id: String,
    pub project: String,
    pub agent_id: String,
    /// `tool_result`, `timeout` or `stop`.
    pub message_type: String,
    pub turn_id: String,
    pub tool_call_id: String,
    /// The payload as UTP writes it.
    pub payload: Map<String, Value>,
    pub traceparent: String,
    #[serde(default)]
    pub tracestate: Option<String>,
    #[serde(default)]
    pub parent_step_id: Option<String>,
    #[serde(default)]
    pub source_agent_id: Option<String>,
    #[serde(default)]
    pub depth: u32,
    pub created_ms: u64,
}

/// A message to publish after the commit of the change that it announces.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OutboxMessage {
    /// Also the message id at the broker, which drops duplicates.
    pub id: String,
    /// The subject without the prefix `cg.<version>.`.
    pub subject: String,
    pub headers: Vec<(String, String)>,
    pub payload: Value,
    /// Time after which the message is obsolete.
    pub expires_ms: u64,
}

/// A message that could not be processed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DeadLetter {
    /// `dl_…`
    pub id: String,
    pub project: String,
    /// `report`, `command` or `letter` (a wakeup or an event).
    pub kind: String,
    /// One word: `malformed`, `orphan`, `wrong_turn`, `wrong_epoch`, …
    pub reason: String,
    pub message: String,
    pub subject: String,
    #[serde(default)]
    pub headers: Map<String, Value>,
    /// The payload as received, truncated to a readable length.
    pub payload: String,
    /// True if the payload was truncated; such a message cannot be redriven.
    #[serde(default)]
    #[serde(rename = "cut")]
    pub truncated: bool,
    pub created_ms: u64,
    #[serde(default)]
    pub redriven_ms: Option<u64>,
    /// Result of the last redrive.
    #[serde(default)]
    #[serde(rename = "last_try")]
    pub last_redrive_result: Option<String>,
}

/// An agent that Toolcrib can wake.
#[derive(Debug, Clone, PartialEq)]
pub struct AgentEntry {
    pub project: String,
    pub agent_id: String,
    /// Target of its wakeups: `cmd.agent.<worker_target>.wakeup`.
    pub worker_target: String,
    pub profile: Option<Json>,
    /// The tools it may call in a turn; `None` for every tool that the rules allow.
    pub allowed_tools: Option<Vec<String>>,
    pub updated_ms: u64,
}

/// Returns true if a text is a valid token of a subject.
pub fn is_token(text: &str) -> bool {
    let plain = |c: char| c.is_ascii_graphic() && !matches!(c, '.' | '*' | '>');
    (1..=128).contains(&text.len()) && text.chars().all(plain)
}
