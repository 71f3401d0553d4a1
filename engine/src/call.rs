//! The call: one request to run a tool, the ticket, and how it ended. Pure.
//!
//! A call has attempts and ends exactly once. Which status follows which is decided in
//! [`crate::lifecycle`] alone.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::dialogue::Dialogue;
use crate::fault::Fault;
use crate::id::CallId;
use crate::json::Json;
use crate::retry::Backoff;
use crate::tool::{Effect, Executor};

/// Where a call stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Status {
    Pending,
    Running,
    Succeeded,
    Failed,
    Timeout,
    Canceled,
}

impl Status {
    /// Every status.
    pub const ALL: [Self; 6] = [
        Self::Pending,
        Self::Running,
        Self::Succeeded,
        Self::Failed,
        Self::Timeout,
        Self::Canceled,
    ];

    /// As stored, and as HTTP v1 writes it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "PENDING",
            Self::Running => "RUNNING",
            Self::Succeeded => "SUCCEEDED",
            Self::Failed => "FAILED",
            Self::Timeout => "TIMEOUT",
            Self::Canceled => "CANCELED",
        }
    }

    /// Whether the call has ended.
    pub fn is_terminal(self) -> bool {
        !matches!(self, Self::Pending | Self::Running)
    }
}

impl FromStr for Status {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        Self::ALL.into_iter().find(|status| status.as_str() == text).ok_or(())
    }
}

/// Why a PENDING call is not being executed yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hold {
    /// Waits for a free place.
    Queue,
    /// Waits for its next attempt.
    Retry { at_ms: u64 },
    /// Handed to whoever executes it, who has not taken it yet.
    Parked,
    /// Waits for answers to what its tool has asked.
    Input,
    /// Waits for the end of the call before it ([`Asked::after`]); then it has this long.
    After { timeout_ms: u64 },
}

impl Hold {
    /// As written on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Queue => "queue",
            Self::Retry { .. } => "retry",
            Self::Parked => "parked",
            Self::Input => "input",
            Self::After { .. } => "after",
        }
    }
}

/// What exactly is executed: the tool asked for, or the alternate that took its place.
#[derive(Debug, Clone, PartialEq)]
pub struct Target {
    pub tool: String,
    /// The definition's fingerprint at the time the call was accepted.
    pub version: String,
    pub executor: Executor,
    pub effect: Effect,
    pub args: Json,
}

/// Who asked, as far as the record keeps it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Asked {
    pub agent: String,
    /// The caller's own id for this call.
    pub call_id: Option<String>,
    /// The client this call is pinned to.
    pub client_id: Option<String>,
    /// A label the caller gave; never used to decide anything.
    pub user_id: Option<String>,
    pub idempotency_key: Option<String>,
    /// The trace it was asked in, as W3C's `traceparent`.
    pub traceparent: Option<String>,
    /// Nobody waits for it: its result arrives later.
    pub background: bool,
    /// The turn it was made in; boxed, because most calls have none.
    pub turn: Option<Box<crate::utp::Route>>,
    /// Where to tell that it has ended.
    pub callback_url: Option<String>,
    /// The call whose end it waited for before it got in line.
    pub after: Option<CallId>,
}

/// One request to run a tool.
#[derive(Debug, Clone, PartialEq)]
pub struct Call {
    pub id: CallId,
    pub project: String,
    pub run_id: String,
    /// The tool that was asked for.
    pub tool_name: String,
    /// The arguments it was asked with; those of an alternate are the target's.
    pub args: Json,
    pub asked: Asked,
    pub target: Target,
    /// What may still take the target's place, in order.
    pub alternates: Vec<Target>,
    pub max_retries: u32,
    pub backoff: Backoff,
    pub status: Status,
    /// Set exactly while PENDING.
    pub hold: Option<Hold>,
    /// The attempt under way, or the last one; 0 before the first.
    pub attempt: u32,
    /// Attempts on the present target.
    pub target_attempts: u32,
    /// Who took the attempt under way (a client's id).
    pub taken_by: Option<String>,
    /// What its tool has asked, and what it was answered.
    pub dialogue: Option<Box<Dialogue>>,
    /// The last attempt that was reported to have failed and was followed by another.
    pub failed: Option<Box<FailedAttempt>>,
    /// The process that is executing or has parked the attempt.
    pub node: Option<String>,
    pub created_ms: u64,
    pub deadline_ms: u64,
    /// When the first attempt began.
    pub started_ms: Option<u64>,
    /// When the attempt under way, or the last one, was given to whoever executes it.
    pub attempt_ms: Option<u64>,
    pub completed_ms: Option<u64>,
    pub outcome: Option<Outcome>,
    /// Counts the saved states, from 1.
    pub version: u64,
}

/// A failure that did not end its call. It is kept so that who reports it again, because the
/// answer was lost, is answered as the first time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailedAttempt {
    pub attempt: u32,
    /// The code and the message of the fault.
    pub code: String,
    pub message: String,
}

impl FailedAttempt {
    pub fn new(attempt: u32, fault: &Fault) -> Self {
        let (code, message) = (fault.code.as_str().to_owned(), fault.message.clone());
        Self { attempt, code, message }
    }

    /// Whether a report on this attempt says the same.
    pub fn is_same(&self, attempt: u32, fault: &Fault) -> bool {
        self.attempt == attempt && self.code == fault.code.as_str() && self.message == fault.message
    }
}

impl Call {
    /// About how much it takes to show it.
    pub fn bytes(&self) -> usize {
        let outcome = self.outcome.as_ref();
        let data = outcome.and_then(|outcome| outcome.data.as_ref());
        let detail = outcome.and_then(|outcome| outcome.error.as_ref()?.detail.as_ref());
        let data = data.map_or(0, |data| data.text().len());
        let detail = detail.map_or(0, |detail| detail.to_string().len());
        self.args.text().len() + data + detail
    }

    /// Whether an attempt is out: being executed, or parked with somebody.
    pub fn attempt_is_out(&self) -> bool {
        self.status == Status::Running || self.hold == Some(Hold::Parked)
    }

    /// Whether the attempt goes on when the process that started it is gone.
    pub fn goes_on_elsewhere(&self) -> bool {
        let handed = self.dialogue.as_ref().is_some_and(|dialogue| dialogue.handle.is_some());
        self.attempt_is_out() && (self.target.executor.parks() || handed)
    }

    /// When the attempt under way was given to its executor where nothing unusual happened; a store
    /// need not keep what this says already.
    pub fn usual_attempt_ms(&self) -> Option<u64> {
        let parks = self.target.executor.parks();
        let given_ms = if parks { Some(self.created_ms) } else { self.started_ms };
        given_ms.filter(|_| self.attempt == 1)
    }

    /// When the clock alone must act on this call; none once it ended.
    pub fn due_ms(&self) -> Option<u64> {
        match (self.status.is_terminal(), self.hold) {
            (true, _) => None,
            (false, Some(Hold::Retry { at_ms })) => Some(at_ms.min(self.deadline_ms)),
            (false, _) => Some(self.deadline_ms),
        }
    }
}

/// How a call ended.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    pub ok: bool,
    /// It worked, but not all of it: there could be more in `data`.
    pub partial: bool,
    pub data: Option<Json>,
    pub error: Option<Fault>,
    pub metrics: Metrics,
}

/// What it took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Metrics {
    /// From being accepted to the outcome.
    pub latency_ms: u64,
    /// From being accepted to the first attempt.
    pub queue_ms: u64,
    pub attempts: u32,
    pub retries: u32,
}

impl Metrics {
    /// What it took, from a call's timestamps.
    pub fn of(created_ms: u64, started_ms: Option<u64>, completed_ms: u64, attempts: u32) -> Self {
        Self {
            latency_ms: completed_ms.saturating_sub(created_ms),
            queue_ms: started_ms.unwrap_or(completed_ms).saturating_sub(created_ms),
            attempts,
            retries: attempts.saturating_sub(1),
        }
    }
}
