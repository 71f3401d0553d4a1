//! UTP's words: how a tool service is addressed, what a turn is, what waits where. Pure.
//!
//! UTP is the protocol of tools over NATS: a command points at a `tool.call` card, a tool service
//! writes a `tool.result` card and reports it. The types here are kept as JSON by the stores, so a
//! field that is added has a default.

pub mod card;
pub mod news;
pub mod subject;
pub mod trace;

use std::str::FromStr;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::call::{Call, Status};
use crate::json::Json;

pub use card::Card;

/// Names that belong to the protocol's own internal tools.
pub const RESERVED_NAMES: [&str; 5] =
    ["delegate_async", "launch_principal", "ask_expert", "fork_join", "provision_agent"];

/// The channel of what nobody gave one.
pub const DEFAULT_CHANNEL: &str = "public";

/// How deep agents may call agents.
pub const MAX_DEPTH: u32 = 20;

/// What becomes of the turn when the result is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AfterExecution {
    /// It goes on.
    #[default]
    Suspend,
    /// It ends.
    Terminate,
}

impl AfterExecution {
    /// As written on the wire.
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

/// How a project's own tool is executed: the part of its definition that no model sees.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Binding {
    /// Where its commands go, with `{project_id}` and `{channel_id}` still in it; none when the
    /// crib executes it itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target_subject: Option<String>,
    pub after_execution: AfterExecution,
    /// An object, kept as it was given: `args`, `envs`, `jina` and whatever a service looks for.
    #[serde(default = "Json::empty_object")]
    pub options: Json,
    /// The schema of all arguments, where a model is not shown all of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parameters: Option<Json>,
}

impl Binding {
    /// How long a call may take, where the options say so.
    pub fn timeout_ms(&self) -> Option<u64> {
        let options = self.options.value();
        let named = ["suspend_timeout_seconds", "timeout_seconds"];
        let seconds = named.iter().find_map(|name| options.get(*name).and_then(Value::as_f64))?;
        (seconds > 0.0).then_some((seconds * 1_000.0) as u64)
    }
}

/// How a tool service says that a call ended.
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

    /// As written on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Success => "success",
            Self::Failed => "failed",
            Self::Canceled => "canceled",
            Self::Timeout => "timeout",
            Self::Partial => "partial",
        }
    }

    /// How an ended call is called here; none while it is open.
    pub fn of(call: &Call) -> Option<Self> {
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

/// Whose call it is, in UTP's terms: what a report must name to be taken.
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
    /// The project it was made in, where another executes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub project: Option<String>,
}

impl Route {
    /// The route of a call. One that was not made in a turn has its run for a turn, of one epoch.
    pub fn of(call: &Call) -> Self {
        if let Some(turn) = &call.asked.turn {
            let mut route = turn.as_ref().clone();
            route.tool_call_id = numbered(&route.tool_call_id, call);
            return route;
        }
        let body = call.id.as_str().trim_start_matches(crate::id::CallId::PREFIX);
        Self {
            agent_id: call.asked.agent.clone(),
            turn_id: call.run_id.clone(),
            epoch: 1,
            step_id: format!("step_{body}"),
            tool_call_id: numbered(call.id.as_str(), call),
            channel: DEFAULT_CHANNEL.to_owned(),
            parent_step_id: None,
            tracestate: None,
            context_box_id: None,
            depth: 0,
            project: None,
        }
    }
}

/// A tool service answers a call it knows from memory, so an alternate needs an id of its own.
fn numbered(id: &str, call: &Call) -> String {
    match call.target.tool == call.tool_name {
        true => id.to_owned(),
        false => format!("{id}-a{}", call.attempt - call.target_attempts.min(call.attempt) + 1),
    }
}

/// Where a turn stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TurnStatus {
    /// Somebody has the lease and thinks.
    Running,
    /// Calls are out; it goes on when all of them are in.
    Suspended,
    Finished,
    Stopped,
    /// Its lease ran out and nobody renewed it.
    Expired,
}

impl TurnStatus {
    /// As written on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Suspended => "suspended",
            Self::Finished => "finished",
            Self::Stopped => "stopped",
            Self::Expired => "expired",
        }
    }

    /// Whether it can never go on.
    pub fn is_over(self) -> bool {
        matches!(self, Self::Finished | Self::Stopped)
    }
}

/// One activation of an agent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Turn {
    pub project: String,
    pub agent_id: String,
    pub turn_id: String,
    /// Rises with every lease, resume and stop: what names an older one is refused.
    pub epoch: u64,
    pub status: TurnStatus,
    pub channel: String,
    /// The step whose calls are out, or were last.
    #[serde(default)]
    pub step_id: Option<String>,
    /// The steps that were dispatched in this epoch and not gone on from: it waits for all of them.
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
    /// While running: until when the lease holds.
    pub lease_until_ms: u64,
    pub lease_ms: u64,
    /// While suspended: when the last of its calls must be in.
    #[serde(default)]
    pub resume_deadline_ms: Option<u64>,
    pub created_ms: u64,
    pub updated_ms: u64,
    /// Why it ended.
    #[serde(default)]
    pub reason: Option<String>,
    /// Counts the saved states, from 1.
    pub version: u64,
}

impl Turn {
    /// The steps whose calls are out, or were last.
    pub fn last_steps(&self) -> &[String] {
        match self.steps.is_empty() {
            true => self.step_id.as_slice(),
            false => &self.steps,
        }
    }
}

/// One call of a step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Waiting {
    pub project: String,
    pub agent_id: String,
    pub turn_id: String,
    pub epoch: u64,
    pub step_id: String,
    pub tool_call_id: String,
    pub tool_name: String,
    /// The call; none when it was refused before there could be one.
    #[serde(default)]
    pub call_id: Option<String>,
    /// The card of its result, once it is in.
    #[serde(default)]
    pub result_card_id: Option<String>,
    #[serde(default)]
    pub inbox_id: Option<String>,
}

/// Something that waits for an agent until it has taken it.
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
    /// As UTP writes it.
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

/// A message that is to be published, after the commit that it follows from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Letter {
    /// Also the message's id at the broker, which drops what it has seen.
    pub id: String,
    /// What comes after `cg.<version>.`.
    pub subject: String,
    pub headers: Vec<(String, String)>,
    pub payload: Value,
    /// When nobody needs it any more.
    pub expires_ms: u64,
}

/// A message that could not be taken.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DeadLetter {
    /// `dl_…`
    pub id: String,
    pub project: String,
    /// `report`, `command` or `letter`: a wakeup or an event.
    pub kind: String,
    /// One word: `malformed`, `orphan`, `wrong_turn`, `wrong_epoch`, …
    pub reason: String,
    pub message: String,
    pub subject: String,
    #[serde(default)]
    pub headers: Map<String, Value>,
    /// As it came, cut to a readable length.
    pub payload: String,
    /// Whether something was cut off: then it cannot be tried again.
    #[serde(default)]
    pub cut: bool,
    pub created_ms: u64,
    #[serde(default)]
    pub redriven_ms: Option<u64>,
    /// What the last try came to.
    #[serde(default)]
    pub last_try: Option<String>,
}

/// An agent that can be woken.
#[derive(Debug, Clone, PartialEq)]
pub struct Member {
    pub project: String,
    pub agent_id: String,
    /// Where its wakeups go: `cmd.agent.<worker_target>.wakeup`.
    pub worker_target: String,
    pub profile: Option<Json>,
    /// The tools it may call in a turn; none = all that the rules allow it.
    pub allowed_tools: Option<Vec<String>>,
    pub updated_ms: u64,
}

/// Whether a text can stand between the dots of a subject.
pub fn is_token(text: &str) -> bool {
    let plain = |c: char| c.is_ascii_graphic() && !matches!(c, '.' | '*' | '>');
    (1..=128).contains(&text.len()) && text.chars().all(plain)
}
