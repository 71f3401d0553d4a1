//! The records of UTP: bindings, routes, turns, inbox items, outbox messages. Pure.
//!
//! UTP is a protocol for tools over NATS: a command points at a `tool.call` card; a tool service
//! writes a `tool.result` card and reports it. The stores hold these types as JSON, so a new field
//! needs a default.

pub mod card;
pub mod delegation;
pub mod subject;
pub mod trace;
pub mod turn_event;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::domain::json::Json;

pub use card::Card;
pub use delegation::{ExecutionEdge, TurnDelegation, TurnLineage};

/// Tool names reserved for the protocol.
pub const RESERVED_NAMES: [&str; 5] =
    ["delegate_async", "launch_principal", "ask_expert", "fork_join", "provision_agent"];

/// The channel used if none is given.
pub const DEFAULT_CHANNEL: &str = "public";

/// Maximum depth of agents that call agents.
pub const MAX_DEPTH: u32 = 20;

/// Effect of a tool's result on the turn or run that made the call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AfterExecution {
    /// The turn or run waits for the result and continues with it.
    #[default]
    Suspend,
    /// The result ends the turn or run.
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

    /// Returns the value of a result's own control field, `__cg_control.after_execution`; `None` if
    /// the result has none or another word.
    pub fn from_control(result: &Value) -> Option<Self> {
        result.get(CONTROL_FIELD)?.get("after_execution")?.as_str()?.trim().parse().ok()
    }
}

/// The field of a result that is reserved for the protocol: it controls the turn or run that made
/// the call, and is no part of the answer.
pub const CONTROL_FIELD: &str = "__cg_control";

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
    /// Effect of a result on the turn that made the call.
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
        let names = ["suspend_timeout_seconds", "timeout_seconds"];
        let seconds = names.iter().find_map(|name| options.get(*name).and_then(Value::as_f64))?;
        (seconds > 0.0).then_some((seconds * 1_000.0) as u64)
    }
}

/// The status of an ended call as a tool service reports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToolStatus {
    /// The tool succeeded.
    Success,
    /// The tool failed.
    Failed,
    /// The call was canceled.
    Canceled,
    /// The call's time ran out.
    Timeout,
    /// The tool succeeded in part: its result may be incomplete.
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
    /// Id of the agent that made the call.
    pub agent_id: String,
    /// Id of the turn that made the call; the run id outside a turn.
    pub turn_id: String,
    /// Epoch of the turn at the time of the call.
    pub epoch: u64,
    /// Id of the step that the call belongs to.
    pub step_id: String,
    /// The model's id for the call; derived from the call's id outside a turn.
    pub tool_call_id: String,
    /// Channel of the turn: the fourth part of its subjects.
    pub channel: String,
    /// Id of the step that started the turn, if the agent names one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent_step_id: Option<String>,
    /// W3C `tracestate` of the turn's trace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tracestate: Option<String>,
    /// Id of a context that the agent names; passed to the tool service unchanged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub context_box_id: Option<String>,
    /// Number of agents above this one in a chain of agents that call agents.
    #[serde(default)]
    pub depth: u32,
    /// The project that made the call, if another project executes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub project: Option<String>,
    /// Id of the call that joins this one, or of the run that continues meanwhile: it receives the
    /// outcome, and the agent's inbox does not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub joined_by: Option<String>,
    /// True if the agent continues without the outcome, which arrives in its inbox later.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_detached: bool,
}

/// Status of a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TurnStatus {
    /// The turn was handed to the agent, and no worker has leased it yet.
    Dispatched,
    /// A worker holds the lease.
    Running,
    /// Calls are in flight; the turn resumes when all results are in.
    Suspended,
    /// The agent finished the turn, or a result terminated it.
    Finished,
    /// The turn was stopped on request, and its open calls were canceled.
    Stopped,
    /// The lease expired without renewal.
    Expired,
}

impl TurnStatus {
    /// Returns the name used on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Dispatched => "dispatched",
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
    /// Id of the project that the turn belongs to.
    pub project: String,
    /// Id of the agent.
    pub agent_id: String,
    /// Id of the turn; unique in the project.
    pub turn_id: String,
    /// Increases with every lease, resume and stop; messages with an older epoch are rejected.
    pub epoch: u64,
    /// Current status.
    pub status: TurnStatus,
    /// Channel of its messages: the fourth part of their subjects.
    pub channel: String,
    /// The step whose calls are in flight, or the last one.
    #[serde(default)]
    pub step_id: Option<String>,
    /// The steps dispatched in this epoch and not resumed yet: the turn waits for all of them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub steps: Vec<String>,
    /// Id of the step that started the turn, if the agent names one.
    #[serde(default)]
    pub parent_step_id: Option<String>,
    /// W3C `traceparent` that the trace of its calls and messages continues.
    #[serde(default)]
    pub traceparent: Option<String>,
    /// W3C `tracestate` of that trace.
    #[serde(default)]
    pub tracestate: Option<String>,
    /// Id of a context that the agent names; passed to tool services unchanged.
    #[serde(default)]
    pub context_box_id: Option<String>,
    /// Number of agents above this one in a chain of agents that call agents.
    #[serde(default)]
    pub depth: u32,
    /// While running: expiry of the lease, in Unix milliseconds.
    pub lease_until_ms: u64,
    /// Duration of the lease from each renewal or resume, in milliseconds.
    pub lease_ms: u64,
    /// While suspended: deadline for the last of its results, in Unix milliseconds.
    #[serde(default)]
    pub resume_deadline_ms: Option<u64>,
    /// Time of the first lease, in Unix milliseconds.
    pub created_ms: u64,
    /// Time of the last saved state, in Unix milliseconds.
    pub updated_ms: u64,
    /// The reason why the turn ended.
    #[serde(default)]
    pub reason: Option<String>,
    /// Id of the card with the turn's deliverable, once the turn has ended with one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deliverable_card_id: Option<String>,
    /// The call that handed the turn to the agent, if one did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delegation: Option<Box<TurnDelegation>>,
    /// The last lease or resume, if its request had an id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_request: Option<TurnRequest>,
    /// Counts the saved states, from 1.
    pub version: u64,
}

/// A request that gave a turn to a worker. The same request again gets the same response, in case
/// the first one was lost.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TurnRequest {
    /// Id that the worker gave the request.
    pub request_id: String,
    /// Epoch that the request began.
    pub epoch: u64,
    /// Steps whose results the response had.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub steps: Vec<String>,
}

impl TurnRequest {
    /// Returns the record of a request that has an id.
    pub fn new(request_id: Option<String>, epoch: u64, steps: Vec<String>) -> Option<Self> {
        request_id.map(|request_id| Self { request_id, epoch, steps })
    }
}

impl Turn {
    /// Returns the first run or turn of the tree of agents that the turn was handed over in; `None`
    /// if it begins a tree itself.
    pub fn tree_root_id(&self) -> Option<&str> {
        self.delegation.as_ref()?.lineage.root_id.as_deref()
    }

    /// Returns true if the turn is in the state that the request with this id led to.
    pub fn is_answer_to(&self, request_id: Option<&str>) -> bool {
        let last = self.last_request.as_ref().filter(|request| request.epoch == self.epoch);
        last.is_some_and(|request| Some(request.request_id.as_str()) == request_id)
    }

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
    /// Id of the project that the turn belongs to.
    pub project: String,
    /// Id of the agent.
    pub agent_id: String,
    /// Id of the turn.
    pub turn_id: String,
    /// Epoch of the turn in which the step was dispatched.
    pub epoch: u64,
    /// Id of the step.
    pub step_id: String,
    /// The model's id for the call; unique in the turn.
    pub tool_call_id: String,
    /// Name of the requested tool.
    pub tool_name: String,
    /// The call; `None` if it was refused before it was created.
    #[serde(default)]
    pub call_id: Option<String>,
    /// The card of its result, once it is in.
    #[serde(default)]
    pub result_card_id: Option<String>,
    /// Id of the inbox item with its result; `None` until the result is in.
    #[serde(default)]
    pub inbox_id: Option<String>,
}

/// An item in an agent's inbox, until the agent acknowledges it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct InboxItem {
    /// `inbox_…`
    pub inbox_id: String,
    /// Id of the agent's project.
    pub project: String,
    /// Id of the agent that receives it.
    pub agent_id: String,
    /// `turn`, `tool_result`, `timeout` or `stop`.
    pub message_type: String,
    /// Id of the turn that it concerns.
    pub turn_id: String,
    /// The model's id for the call, `stop:<turn_id>` for a stop, `turn:<turn_epoch>` for a turn.
    pub tool_call_id: String,
    /// The payload as UTP writes it.
    pub payload: Map<String, Value>,
    /// W3C `traceparent` with a span of its own.
    pub traceparent: String,
    /// W3C `tracestate` of that trace.
    #[serde(default)]
    pub tracestate: Option<String>,
    /// Id of the step that it concerns.
    #[serde(default)]
    pub parent_step_id: Option<String>,
    /// Author of the result's card; `None` for a stop.
    #[serde(default)]
    pub source_agent_id: Option<String>,
    /// Depth of the turn in a chain of agents that call agents.
    #[serde(default)]
    pub depth: u32,
    /// Time of creation, in Unix milliseconds.
    pub created_ms: u64,
}

/// A message to publish after the commit of the change that it announces.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OutboxMessage {
    /// Also the message id at the broker, which drops duplicates.
    pub id: String,
    /// The subject without the prefix `cg.<version>.`.
    pub subject: String,
    /// NATS headers, as names and values.
    pub headers: Vec<(String, String)>,
    /// JSON body of the message.
    pub payload: Value,
    /// Time after which the message is obsolete, in Unix milliseconds.
    pub expires_ms: u64,
}

/// A message that could not be processed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DeadLetter {
    /// `dl_…`
    pub id: String,
    /// Id of the project that the message was sent to.
    pub project: String,
    /// `report`, `command` or `letter` (a wakeup or an event).
    pub kind: String,
    /// One word: `malformed`, `orphan`, `wrong_turn`, `wrong_epoch`, …
    pub reason: String,
    /// Reason in words.
    pub message: String,
    /// Origin of the message: its NATS subject, HTTP path or table.
    pub subject: String,
    /// Headers of the message, up to a size limit.
    #[serde(default)]
    pub headers: Map<String, Value>,
    /// The payload as received, truncated to 256 KiB.
    pub payload: String,
    /// True if the payload was truncated; such a message cannot be redriven.
    #[serde(default)]
    #[serde(rename = "cut")]
    pub truncated: bool,
    /// Time when it was stored, in Unix milliseconds.
    pub created_ms: u64,
    /// Time of the last redrive, in Unix milliseconds.
    #[serde(default)]
    pub redriven_ms: Option<u64>,
    /// Result of the last redrive.
    #[serde(default)]
    #[serde(rename = "last_try")]
    pub last_redrive_result: Option<String>,
}

/// Returns true if a text is a valid token of a subject.
pub fn is_token(text: &str) -> bool {
    let is_allowed = |c: char| c.is_ascii_graphic() && !matches!(c, '.' | '*' | '>');
    (1..=128).contains(&text.len()) && text.chars().all(is_allowed)
}
