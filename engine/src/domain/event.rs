//! The history of a call: its records, and the events they become once stored. Pure.

mod data;
use serde_json::Value;

use crate::domain::call::Call;
use crate::domain::id::CallId;
pub use data::EventData;

/// Kind of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EventKind {
    /// The call was accepted.
    Requested,
    /// An attempt started.
    Started,
    /// A remote executor acknowledged the attempt, or returned a handle to resume it with.
    Acknowledged,
    /// The executor reported progress of the attempt.
    Progress,
    /// An attempt failed, and another one on the same tool is scheduled.
    Retrying,
    /// An attempt failed, and a fallback tool replaces the tool.
    Fallback,
    /// The tool requests input before it continues.
    InputRequired,
    /// Answers to the tool's questions were accepted.
    InputProvided,
    /// The call waits for a person's approval.
    ApprovalRequested,
    /// An approval was decided, or ended without a decision.
    ApprovalDecided,
    /// A process took over the call because the previous owner was gone.
    Recovered,
    /// The call succeeded.
    Finished,
    /// The call failed, and no attempt follows.
    Failed,
    /// The call's time ran out.
    Timeout,
    /// The call was canceled.
    Canceled,
    /// A report that was late, repeated or from the wrong executor, and had no effect.
    ReportIgnored,
}

impl EventKind {
    /// Every kind.
    pub const ALL: [Self; 16] = [
        Self::Requested,
        Self::Started,
        Self::Acknowledged,
        Self::Progress,
        Self::Retrying,
        Self::Fallback,
        Self::InputRequired,
        Self::InputProvided,
        Self::ApprovalRequested,
        Self::ApprovalDecided,
        Self::Recovered,
        Self::Finished,
        Self::Failed,
        Self::Timeout,
        Self::Canceled,
        Self::ReportIgnored,
    ];

    /// Returns the name as stored and streamed.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Requested => "tool.call.requested",
            Self::Started => "tool.call.started",
            Self::Acknowledged => "tool.call.taken",
            Self::Progress => "tool.call.progress",
            Self::Retrying => "tool.call.retrying",
            Self::Fallback => "tool.call.fallback",
            Self::InputRequired => "tool.call.asked",
            Self::InputProvided => "tool.call.answered",
            Self::ApprovalRequested => "approval.requested",
            Self::ApprovalDecided => "approval.decided",
            Self::Recovered => "tool.call.recovered",
            Self::Finished => "tool.call.finished",
            Self::Failed => "tool.call.failed",
            Self::Timeout => "tool.call.timeout",
            Self::Canceled => "tool.call.canceled",
            Self::ReportIgnored => "tool.call.late",
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
pub struct EventRecord {
    /// Kind of the record.
    pub kind: EventKind,
    /// Time of the recorded change, in Unix milliseconds.
    pub at_ms: u64,
    /// Number of the attempt that it concerns; 0 before the first.
    pub attempt: u32,
    /// Further fields, which depend on the kind.
    pub data: EventData,
}

impl EventRecord {
    /// Creates a record without data.
    pub fn new(kind: EventKind, at_ms: u64, attempt: u32) -> Self {
        Self { kind, at_ms, attempt, data: EventData::default() }
    }

    /// Adds one data field.
    pub fn with(mut self, name: &'static str, value: impl Into<Value>) -> Self {
        self.data.insert(name, value.into());
        self
    }

    /// Adds the ids of a background task if the call is one. A subscriber of a run sees the events
    /// of many calls and matches later results by these ids.
    pub fn with_task_ids(self, call: &Call) -> Self {
        if !call.origin.background {
            return self;
        }
        let record = self.with("task_id", call.id.as_str());
        match &call.origin.caller_call_id {
            Some(call_id) => record.with("call_id", call_id.as_str()),
            None => record,
        }
    }
}

/// A stored record. The store numbers all events in commit order.
#[derive(Debug, Clone, PartialEq)]
pub struct CallEvent {
    /// Position in the order of all stored events; a reader resumes after it.
    pub number: u64,
    /// Id of the call that it concerns.
    pub call_id: CallId,
    /// The run that the call belongs to.
    pub run_id: String,
    /// The caller's id for the call.
    pub caller_call_id: Option<String>,
    /// The record as the lifecycle wrote it.
    pub record: EventRecord,
}
