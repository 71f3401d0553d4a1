//! A stored run: a conversation with a model that survives a crash. Pure.
//!
//! [`Run`] holds the current state. The journal holds the history and every message of the
//! conversation; each [`JournalRecord`] is committed together with the state that it leads to.

pub mod handoff;
pub mod model_reply;
pub mod options;
pub mod progress;
use std::str::FromStr;
use std::sync::Arc;

use options::RunOptions;
use progress::{FinalAnswer, RunProgress};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::domain::agent::{OnParentEnd, ResultField};
use crate::domain::caller::{AuthMethod, Caller, CallerAttributes, Role, RoleSet};
use crate::domain::event::CallEvent;
use crate::domain::id::CallId;

pub use progress::RunError;

/// Status of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum RunStatus {
    /// The agent loop requests replies and executes their calls.
    Running,
    /// The run has nothing to do until late results arrive.
    Waiting,
    /// The run has its final answer.
    Succeeded,
    /// The run ended with an error; it can be resumed.
    Failed,
    /// The run was canceled; it can be resumed.
    Canceled,
}

impl RunStatus {
    /// All statuses.
    pub const ALL: [Self; 5] =
        [Self::Running, Self::Waiting, Self::Succeeded, Self::Failed, Self::Canceled];

    /// Returns the status as stored and as written on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Running => "RUNNING",
            Self::Waiting => "WAITING",
            Self::Succeeded => "SUCCEEDED",
            Self::Failed => "FAILED",
            Self::Canceled => "CANCELED",
        }
    }

    /// Returns whether the run has ended. An ended run can still be resumed.
    pub fn is_terminal(self) -> bool {
        !matches!(self, Self::Running | Self::Waiting)
    }
}

impl FromStr for RunStatus {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        Self::ALL.into_iter().find(|status| status.as_str() == text).ok_or(())
    }
}

/// The caller that a run acts for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunOwner {
    /// Agent name of the caller.
    pub agent: String,
    /// The caller's [`RoleSet`] as text.
    pub role: String,
    /// True if the caller was authenticated as local, without a key.
    pub local: bool,
    /// True if the caller was authenticated by a key that Toolcrib issued. The run acts for the
    /// caller only as long as that key exists.
    #[serde(default)]
    pub keyed: bool,
    /// The caller's attributes, with which the run acts.
    #[serde(default, skip_serializing_if = "CallerAttributes::is_empty")]
    pub attributes: CallerAttributes,
}

impl RunOwner {
    /// Returns whether this caller is the same, with the same permissions.
    pub fn matches(&self, caller: &Caller) -> bool {
        let mut other = Self { keyed: self.keyed, ..Self::from(caller) };
        // A rotated key, or another session token with the same rights, is the same caller.
        other.attributes.credential.clone_from(&self.attributes.credential);
        *self == other
    }

    /// Lets the run act with the credentials of the same caller that reopens it. Those that it
    /// began with may have ended.
    pub fn renew_credential(&mut self, caller: &Caller) {
        if self.keyed && caller.attributes.credential.is_some() && self.matches(caller) {
            self.attributes.credential.clone_from(&caller.attributes.credential);
        }
    }
}

impl From<&Caller> for RunOwner {
    fn from(caller: &Caller) -> Self {
        let (agent, role) = (caller.agent.clone(), caller.roles.to_string());
        let attributes = (*caller.attributes).clone();
        Self { agent, role, local: caller.spans_projects(), keyed: false, attributes }
    }
}

/// The current state of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// Unique id, `run_…`; also the run id of its calls.
    pub id: String,
    /// Id of the project that the run belongs to.
    pub project: String,
    /// Caller that the run acts for.
    #[serde(rename = "asker")]
    pub owner: RunOwner,
    /// The model name from the request.
    pub model: String,
    /// Current status.
    pub status: RunStatus,
    /// Model, tools, limits and settings of the agent loop.
    #[serde(rename = "terms")]
    pub options: RunOptions,
    /// Usage, pending calls and limit counters so far.
    pub progress: RunProgress,
    /// Final answer; set while the run is SUCCEEDED.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answer: Option<FinalAnswer>,
    /// Reason of the failure; set while the run is FAILED.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<RunError>,
    /// Id of the card with the run's deliverable, once the run has ended with one: the result that
    /// terminated the run, or its answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deliverable_card_id: Option<String>,
    /// User messages that are not in the conversation yet.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[serde(rename = "said")]
    pub queued_messages: Vec<Value>,
    /// Time of creation, in Unix milliseconds.
    pub created_ms: u64,
    /// Time of the last saved state, in Unix milliseconds.
    pub updated_ms: u64,
    /// Time of the end, in Unix milliseconds; `None` while the run is open.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_ms: Option<u64>,
    /// Number of saved states, from 1.
    pub version: u64,
    /// Its place in a tree of agents, if a call of an agent started it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lineage: Option<Box<RunLineage>>,
    /// The box of cards that gives the run its context.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub context_box_id: Option<String>,
}

/// The parts of its caller's budget that a run has for itself and the agents that it calls. A part
/// that is `None` is shared with the caller.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RunBudget {
    /// Number of tool calls.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub calls: Option<u64>,
    /// Number of tokens of all requests and replies.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens: Option<u64>,
}

/// The place of a run in a tree of agents.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunLineage {
    /// Agent whose profile the run has.
    pub agent_id: String,
    /// Version of the agent.
    pub agent_version: u64,
    /// Call that the run answers: the end of the run is the outcome of the call.
    pub call_id: CallId,
    /// Number of the call's attempt.
    pub attempt: u32,
    /// Run that made the call; `None` if no run did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent_run_id: Option<String>,
    /// Turn that made the call, if a worker drives the calling agent. `parent_run_id` is then the
    /// nearest run above that turn.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent_turn_id: Option<String>,
    /// First run of the tree; the run itself if it begins one. If a turn of a worker begins the
    /// tree, that turn.
    pub root_run_id: String,
    /// Number of agents above the run.
    pub depth: u32,
    /// Largest depth that a run below this one may have.
    pub max_depth: u32,
    /// Agents above the run, from the first to its caller.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ancestors: Vec<String>,
    /// Fate of the run when its parent ends.
    #[serde(default)]
    pub on_parent_end: OnParentEnd,
    /// Reserved parts of the parent's budget.
    #[serde(default)]
    pub budget: RunBudget,
    /// Fields that the result must have.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub result_fields: Vec<ResultField>,
}

impl Run {
    /// Prefix of every run id.
    pub const PREFIX: &'static str = "run_";

    /// Returns the caller that the run acts for. A run calls tools and administers nothing, so one
    /// that was started without a key acts as an anonymous caller.
    pub fn caller(&self) -> Caller {
        let method = if self.owner.local { AuthMethod::Anonymous } else { AuthMethod::Key };
        let roles = self.owner.role.parse().unwrap_or(RoleSet::from(Role::Agent));
        let caller = Caller::new(&self.project, &self.owner.agent, roles, method);
        Caller { attributes: Arc::new(self.owner.attributes.clone()), ..caller }
    }

    /// Builds the run of a conversation of OpenAI's API at its start. Such a run has no task that
    /// drives it.
    pub fn for_conversation(
        caller: &Caller,
        keyed: bool,
        model: &str,
        options: &RunOptions,
        now_ms: u64,
    ) -> Self {
        let owner = RunOwner { keyed, ..RunOwner::from(caller) };
        let options = RunOptions { is_conversation: true, ..options.clone() };
        Self::start(&caller.project, owner, model.to_owned(), options, now_ms)
    }

    /// Builds a run at its start, outside of a tree of agents. Its id is that of the options.
    pub(crate) fn start(
        project: &str,
        owner: RunOwner,
        model: String,
        options: RunOptions,
        now_ms: u64,
    ) -> Self {
        Self {
            id: options.run_id.clone(),
            project: project.to_owned(),
            owner,
            model,
            status: RunStatus::Running,
            options,
            progress: RunProgress::default(),
            answer: None,
            error: None,
            deliverable_card_id: None,
            queued_messages: Vec::new(),
            created_ms: now_ms,
            updated_ms: now_ms,
            ended_ms: None,
            version: 1,
            lineage: None,
            context_box_id: None,
        }
    }

    /// Returns the id of the agent that the run was handed off to.
    pub fn active_agent_id(&self) -> Option<&str> {
        self.options.active_agent.as_ref().map(|agent| agent.agent_id.as_str())
    }
}

/// The kind of a journal record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum JournalKind {
    /// The run was created, with its first messages.
    Created,
    /// The model replied.
    Replied,
    /// The calls of the reply were executed.
    ToolResults,
    /// A late result arrived.
    LateResult,
    /// The run waits for late results.
    Waiting,
    /// The user sent a message.
    UserMessage,
    /// Another agent continues the run.
    HandedOff,
    /// A failed or canceled run was resumed.
    Resumed,
    /// The run ended with its final answer.
    Finished,
    /// The run ended with an error.
    Failed,
    /// The run was canceled.
    Canceled,
}

impl JournalKind {
    /// All kinds.
    pub const ALL: [Self; 11] = [
        Self::Created,
        Self::Replied,
        Self::ToolResults,
        Self::LateResult,
        Self::Waiting,
        Self::UserMessage,
        Self::HandedOff,
        Self::Resumed,
        Self::Finished,
        Self::Failed,
        Self::Canceled,
    ];

    /// Returns the kind as stored and streamed.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Created => "run.created",
            Self::Replied => "run.replied",
            Self::ToolResults => "run.results",
            Self::LateResult => "run.late",
            Self::Waiting => "run.waiting",
            Self::UserMessage => "run.said",
            Self::HandedOff => "run.handoff",
            Self::Resumed => "run.resumed",
            Self::Finished => "run.finished",
            Self::Failed => "run.failed",
            Self::Canceled => "run.canceled",
        }
    }
}

impl FromStr for JournalKind {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        Self::ALL.into_iter().find(|kind| kind.as_str() == text).ok_or(())
    }
}

/// One record of a run's journal.
#[derive(Debug, Clone, PartialEq)]
pub struct JournalRecord {
    /// Kind of the record.
    pub kind: JournalKind,
    /// Time of the recorded change, in Unix milliseconds.
    pub at_ms: u64,
    /// JSON object with further fields, which depend on the kind.
    pub data: Value,
    /// The messages that it added to the conversation.
    pub messages: Vec<Value>,
}

impl JournalRecord {
    /// Creates a record that adds nothing to the conversation.
    pub fn new(kind: JournalKind, at_ms: u64, data: Value) -> Self {
        Self { kind, at_ms, data, messages: Vec::new() }
    }

    /// Adds messages to the record.
    pub fn with_messages(self, messages: Vec<Value>) -> Self {
        Self { messages, ..self }
    }
}

/// A journal record with its run and its number, which is unique among all events.
#[derive(Debug, Clone, PartialEq)]
pub struct JournalEntry {
    /// Position in the order of all events of runs and calls.
    pub number: u64,
    /// Id of the run.
    pub run_id: String,
    /// The record itself.
    pub record: JournalRecord,
}

/// Removes duplicate replies from a journal. Older servers recorded a reply again when they resumed
/// it after a crash.
pub fn dedup_replies(mut journal: Vec<JournalEntry>) -> Vec<JournalEntry> {
    let mut last = None;
    journal.retain(|JournalEntry { record: entry, .. }| {
        if entry.kind != JournalKind::Replied {
            return true;
        }
        let step = entry.data.get("step").and_then(Value::as_u64);
        let before = std::mem::replace(&mut last, step);
        step.is_none() || before != step || !entry.messages.is_empty()
    });
    journal
}

/// An event of a run: of the run itself or of one of its calls.
#[derive(Debug, Clone, PartialEq)]
pub enum RunEvent {
    /// A journal entry of the run itself.
    Run(JournalEntry),
    /// An event of one of the run's calls.
    Call(CallEvent),
}

impl RunEvent {
    /// Returns the event's position among all events.
    pub fn number(&self) -> u64 {
        match self {
            Self::Run(entry) => entry.number,
            Self::Call(event) => event.number,
        }
    }
}
