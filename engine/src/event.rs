//! The history of a call: its records, and the events they become once stored. Pure.

mod facts;

use serde_json::Value;

use crate::call::Call;
use crate::id::CallId;
pub use facts::Facts;

/// Kind of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    Requested,
    Started,
    Taken,
    Progress,
    Retrying,
    Fallback,
    /// The tool requests input before it continues.
    Asked,
    Answered,
    Recovered,
    Finished,
    Failed,
    Timeout,
    Canceled,
    /// A report that was late, repeated or from the wrong executor, and had no effect.
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

    /// Returns the name as stored and streamed.
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

    /// Returns the kind with this name.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.as_str() == name)
    }

    /// Returns true if this kind ends the call.
    pub fn is_terminal(self) -> bool {
        matches!(self, Self::Finished | Self::Failed | Self::Timeout | Self::Canceled)
    }
}

/// One line of a call's history, before it has a number.
#[derive(Debug, Clone, PartialEq)]
pub struct Record {
    pub kind: Kind,
    pub at_ms: u64,
    pub attempt: u32,
    pub data: Facts,
}

impl Record {
    /// Creates a record without data.
    pub fn new(kind: Kind, at_ms: u64, attempt: u32) -> Self {
        Self { kind, at_ms, attempt, data: Facts::default() }
    }

    /// Adds one data field.
    pub fn with(mut self, name: &'static str, value: impl Into<Value>) -> Self {
        self.data.insert(name, value.into());
        self
    }

    /// Adds the ids of a background task if the call is one. A subscriber of a run sees the events
    /// of many calls and matches later results by these ids.
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

/// A stored record. The store numbers all events in commit order.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    pub number: u64,
    pub call_id: CallId,
    /// The run that the call belongs to.
    pub run_id: String,
    /// The caller's id for the call.
    pub asked_as: Option<String>,
    pub record: Record,
}
