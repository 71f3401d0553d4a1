//! What is written down about a call as it goes along. Pure.

mod facts;

use serde_json::Value;

use crate::call::Call;
use crate::id::CallId;
pub use facts::Facts;

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    Requested,
    Started,
    Taken,
    Progress,
    Retrying,
    Fallback,
    /// The tool wants to know something before it goes on.
    Asked,
    Answered,
    Recovered,
    Finished,
    Failed,
    Timeout,
    Canceled,
    /// A report that came too late, twice, or from the wrong side; it changed nothing.
    Late,
}

impl Kind {
    /// Every kind.
    pub const ALL: [Self; 14] = [
        Self::Requested,
        Self::Started,
        Self::Taken,
        Self::Progress,
        Self::Retrying,
        Self::Fallback,
        Self::Asked,
        Self::Answered,
        Self::Recovered,
        Self::Finished,
        Self::Failed,
        Self::Timeout,
        Self::Canceled,
        Self::Late,
    ];

    /// As stored and streamed.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Requested => "tool.call.requested",
            Self::Started => "tool.call.started",
            Self::Taken => "tool.call.taken",
            Self::Progress => "tool.call.progress",
            Self::Retrying => "tool.call.retrying",
            Self::Fallback => "tool.call.fallback",
            Self::Asked => "tool.call.asked",
            Self::Answered => "tool.call.answered",
            Self::Recovered => "tool.call.recovered",
            Self::Finished => "tool.call.finished",
            Self::Failed => "tool.call.failed",
            Self::Timeout => "tool.call.timeout",
            Self::Canceled => "tool.call.canceled",
            Self::Late => "tool.call.late",
        }
    }

    /// The kind with this name.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.as_str() == name)
    }

    /// Whether the call ended with it.
    pub fn is_terminal(self) -> bool {
        matches!(self, Self::Finished | Self::Failed | Self::Timeout | Self::Canceled)
    }
}

/// One line of a call's history, before it has its number.
#[derive(Debug, Clone, PartialEq)]
pub struct Record {
    pub kind: Kind,
    pub at_ms: u64,
    pub attempt: u32,
    pub data: Facts,
}

impl Record {
    /// A record without further facts.
    pub fn new(kind: Kind, at_ms: u64, attempt: u32) -> Self {
        Self { kind, at_ms, attempt, data: Facts::default() }
    }

    /// The same with one more fact.
    pub fn with(mut self, name: &'static str, value: impl Into<Value>) -> Self {
        self.data.insert(name, value.into());
        self
    }

    /// The same with what a background task is known by, if the call is one: who follows a run
    /// hears of many calls, and matches what arrives later by these.
    pub fn about_task(self, call: &Call) -> Self {
        if !call.asked.background {
            return self;
        }
        let named = self.with("task_id", call.id.as_str());
        match &call.asked.call_id {
            Some(call_id) => named.with("call_id", call_id.as_str()),
            None => named,
        }
    }
}

/// A stored record: numbered over the whole store, in the order of the commits.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    pub number: u64,
    pub call_id: CallId,
    /// The run that the call belongs to.
    pub run_id: String,
    /// The caller's own id for the call.
    pub asked_as: Option<String>,
    pub record: Record,
}
