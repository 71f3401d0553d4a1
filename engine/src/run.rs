//! A run that is kept: a conversation with a model that goes on after a crash. Pure.
//!
//! What a run is now is in [`Run`]; what happened in it, and every message of its conversation, is
//! in its journal, of which each [`Entry`] is committed together with the state it led to.

use std::str::FromStr;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::caller::{Caller, Role, Trust};
use crate::event::Event;
use crate::fault::{Code, Fault};
use crate::turn::{FinalAnswer, Progress, Terms};

/// Where a run stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum RunStatus {
    Running,
    /// It has nothing to do until results come that are late.
    Waiting,
    /// It has its final answer.
    Succeeded,
    Failed,
    Canceled,
}

impl RunStatus {
    /// Every status.
    pub const ALL: [Self; 5] =
        [Self::Running, Self::Waiting, Self::Succeeded, Self::Failed, Self::Canceled];

    /// As stored and as written on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Running => "RUNNING",
            Self::Waiting => "WAITING",
            Self::Succeeded => "SUCCEEDED",
            Self::Failed => "FAILED",
            Self::Canceled => "CANCELED",
        }
    }

    /// Whether it is over, unless somebody takes it up again.
    pub fn is_over(self) -> bool {
        !matches!(self, Self::Running | Self::Waiting)
    }
}

impl FromStr for RunStatus {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        Self::ALL.into_iter().find(|status| status.as_str() == text).ok_or(())
    }
}

/// Who a run acts for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Asker {
    pub agent: String,
    pub role: String,
    /// Recognised without a key.
    pub local: bool,
    /// Recognised by a key of the crib's: the run acts for it as long as there is such a key.
    #[serde(default)]
    pub keyed: bool,
}

impl Asker {
    /// Whether this caller is the same, with the same rights.
    pub fn is(&self, caller: &Caller) -> bool {
        let other = Self { keyed: self.keyed, ..Self::from(caller) };
        *self == other
    }
}

impl From<&Caller> for Asker {
    fn from(caller: &Caller) -> Self {
        let (agent, role) = (caller.agent.clone(), caller.role.as_str().to_owned());
        Self { agent, role, local: caller.trust == Trust::Local, keyed: false }
    }
}

/// A fault, as it is written down.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Trouble {
    pub code: String,
    pub message: String,
    #[serde(default)]
    pub detail: Option<Value>,
    pub retryable: bool,
}

impl From<&Fault> for Trouble {
    fn from(fault: &Fault) -> Self {
        let (message, detail) = (fault.message.clone(), fault.detail.clone());
        let (code, retryable) = (fault.code.as_str().to_owned(), fault.retryable);
        Self { code, message, detail, retryable }
    }
}

impl From<Trouble> for Fault {
    fn from(trouble: Trouble) -> Self {
        let code = Code::parse(&trouble.code).unwrap_or(Code::Internal);
        let fault = Fault::new(code, trouble.message).retryable(trouble.retryable);
        Self { detail: trouble.detail, ..fault }
    }
}

/// A run, as it is now.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Run {
    pub id: String,
    pub project: String,
    pub asker: Asker,
    /// The model, as it was asked for.
    pub model: String,
    pub status: RunStatus,
    pub terms: Terms,
    pub progress: Progress,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answer: Option<FinalAnswer>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<Trouble>,
    /// What the user said and is not in the conversation yet.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub said: Vec<Value>,
    pub created_ms: u64,
    pub updated_ms: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_ms: Option<u64>,
    /// Counts the saved states, from 1.
    pub version: u64,
}

impl Run {
    /// What every id begins with.
    pub const PREFIX: &'static str = "run_";

    /// Who it acts for.
    pub fn caller(&self) -> Caller {
        Caller {
            project: self.project.clone(),
            agent: self.asker.agent.clone(),
            role: self.asker.role.parse().unwrap_or(Role::Agent),
            trust: if self.asker.local { Trust::Local } else { Trust::Key },
        }
    }
}

/// What happened in a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EntryKind {
    Created,
    /// The model has answered.
    Replied,
    /// What it called has been executed.
    Results,
    /// A result has come late.
    Late,
    Waiting,
    /// The user has spoken.
    Said,
    Resumed,
    Finished,
    Failed,
    Canceled,
}

impl EntryKind {
    /// Every kind.
    pub const ALL: [Self; 10] = [
        Self::Created,
        Self::Replied,
        Self::Results,
        Self::Late,
        Self::Waiting,
        Self::Said,
        Self::Resumed,
        Self::Finished,
        Self::Failed,
        Self::Canceled,
    ];

    /// As stored and streamed.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Created => "run.created",
            Self::Replied => "run.replied",
            Self::Results => "run.results",
            Self::Late => "run.late",
            Self::Waiting => "run.waiting",
            Self::Said => "run.said",
            Self::Resumed => "run.resumed",
            Self::Finished => "run.finished",
            Self::Failed => "run.failed",
            Self::Canceled => "run.canceled",
        }
    }
}

impl FromStr for EntryKind {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        Self::ALL.into_iter().find(|kind| kind.as_str() == text).ok_or(())
    }
}

/// One thing that happened.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    pub kind: EntryKind,
    pub at_ms: u64,
    pub data: Value,
    /// What it added to the conversation.
    pub messages: Vec<Value>,
}

impl Entry {
    /// An entry that adds nothing to the conversation.
    pub fn new(kind: EntryKind, at_ms: u64, data: Value) -> Self {
        Self { kind, at_ms, data, messages: Vec::new() }
    }

    /// The same with messages.
    pub fn adding(self, messages: Vec<Value>) -> Self {
        Self { messages, ..self }
    }
}

/// An entry with its number, which it shares with nothing else that happened.
#[derive(Debug, Clone, PartialEq)]
pub struct Noted {
    pub number: u64,
    pub run_id: String,
    pub entry: Entry,
}

/// A journal with every answer once. Older servers wrote an answer down again when it was taken up
/// after a crash.
pub fn without_doubles(mut journal: Vec<Noted>) -> Vec<Noted> {
    let mut last = None;
    journal.retain(|Noted { entry, .. }| {
        if entry.kind != EntryKind::Replied {
            return true;
        }
        let step = entry.data.get("step").and_then(Value::as_u64);
        let before = std::mem::replace(&mut last, step);
        step.is_none() || before != step || !entry.messages.is_empty()
    });
    journal
}

/// Anything that happened in a run: to itself or to one of its calls.
#[derive(Debug, Clone, PartialEq)]
pub enum Happened {
    Run(Noted),
    Call(Event),
}

impl Happened {
    /// Its place among everything that happened.
    pub fn number(&self) -> u64 {
        match self {
            Self::Run(noted) => noted.number,
            Self::Call(event) => event.number,
        }
    }
}
