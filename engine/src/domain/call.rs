//! The call: one request to run a tool, its ticket, and its outcome. Pure.
//!
//! A call has attempts and ends exactly once. Only [`crate::lifecycle`] decides which status
//! follows which.

pub mod approval;
pub mod elicitation;
use std::str::FromStr;
use std::sync::Arc;

use approval::CallApproval;
use elicitation::Elicitation;
use serde::{Deserialize, Serialize};

use crate::domain::caller::{AuthMethod, Caller, CallerAttributes, RoleSet};
use crate::domain::fault::{Fault, SideEffect};
use crate::domain::id::CallId;
use crate::domain::json::Json;
use crate::domain::retry::Backoff;
use crate::domain::tool::{Effect, Executor, SourceTraits};
use crate::domain::utp::{AfterExecution, Route};

/// Status of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Status {
    /// Accepted and not running; [`Call::hold`] has the reason.
    Pending,
    /// An attempt is running.
    Running,
    /// Ended with a result, which may be partial ([`Outcome::partial`]).
    Succeeded,
    /// Ended with a fault; no attempt follows.
    Failed,
    /// Ended without a result because its time ran out.
    Timeout,
    /// Ended by a cancellation.
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

    /// Returns the status as stored and as HTTP v1 writes it.
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

    /// Returns true if the call has ended.
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

/// The reason why a PENDING call is not running yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hold {
    /// Waits for a free slot.
    Queue,
    /// Waits for its next attempt.
    Retry {
        /// Time of the next attempt, in Unix milliseconds.
        at_ms: u64,
    },
    /// Handed to a remote executor that has not acknowledged it yet.
    Unacknowledged,
    /// Waits for answers to its tool's elicitation, until [`Call::deadline_ms`]; then has
    /// `remaining_ms` to finish.
    Input {
        /// Time of the call that was left when it began to wait, in milliseconds.
        remaining_ms: u64,
    },
    /// Waits for its predecessor to end ([`Origin::predecessor`]), then has `timeout_ms` to finish.
    Predecessor {
        /// Time to finish after the predecessor has ended, in milliseconds.
        timeout_ms: u64,
    },
    /// Waits for a person's decision ([`Call::approval`]), until [`Call::deadline_ms`]; then has
    /// `remaining_ms` to finish.
    Approval {
        /// Time of the call that was left when it began to wait, in milliseconds.
        remaining_ms: u64,
        /// Time at which the approval expires, in Unix milliseconds. It does not follow a change of
        /// the system time: no change extends it.
        expires_ms: u64,
    },
}

impl Hold {
    /// Returns the name used on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Queue => "queue",
            Self::Retry { .. } => "retry",
            Self::Unacknowledged => "parked",
            Self::Input { .. } => "input",
            Self::Predecessor { .. } => "after",
            Self::Approval { .. } => "approval",
        }
    }
}

/// The tool and arguments to execute: those of the request, or of the fallback in its place.
#[derive(Debug, Clone, PartialEq)]
pub struct Target {
    /// Name of the tool to execute.
    pub tool: String,
    /// Fingerprint of the definition at the time the call was accepted.
    pub version: String,
    /// The party that executes the tool.
    pub executor: Executor,
    /// Traits of the source at the time the call was accepted.
    pub traits: SourceTraits,
    /// Side effect of the tool; decides whether a failed attempt may be repeated.
    pub effect: Effect,
    /// Effect of a result on the run or turn that made the call, as the definition declares it.
    pub after_execution: Option<AfterExecution>,
    /// Arguments for the executor, after the argument rules of the definition.
    pub args: Json,
}

/// The requester of a call, and the data that came with the request.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Origin {
    /// Agent name of the caller.
    pub agent: String,
    /// Method that authenticated the caller.
    pub auth_method: AuthMethod,
    /// Roles of the caller.
    pub roles: RoleSet,
    /// Attributes of the caller. The access rules are evaluated with them until the call starts.
    pub attributes: Arc<CallerAttributes>,
    /// The caller's id for this call.
    pub caller_call_id: Option<String>,
    /// The client this call is pinned to.
    pub client_id: Option<String>,
    /// A label from the caller; it never affects a decision.
    pub user_id: Option<String>,
    /// Key under which a repeated request returns this call instead of a new one.
    pub idempotency_key: Option<String>,
    /// The trace of the request, as a W3C `traceparent`.
    pub traceparent: Option<String>,
    /// True for a background task: the caller does not wait, and the result arrives later.
    pub background: bool,
    /// The UTP turn that made the call; boxed, because most calls have none.
    pub route: Option<Box<Route>>,
    /// Number of agents above the caller in a chain of agents, if no route has it.
    pub depth: u32,
    /// The webhook URL to notify when the call has ended.
    pub callback_url: Option<String>,
    /// The call that has to end before this one is queued.
    pub predecessor: Option<CallId>,
    /// The call that this one replaces: a person approved it with other arguments.
    pub replaces: Option<CallId>,
    /// Metadata of the request for the tool's executor.
    pub meta: Option<Json>,
}

impl Origin {
    /// Returns the origin of a call by this caller.
    pub fn from_caller(caller: &Caller) -> Self {
        Self {
            agent: caller.agent.clone(),
            auth_method: caller.auth_method,
            roles: caller.roles,
            attributes: caller.attributes.clone(),
            ..Self::default()
        }
    }
}

/// One request to run a tool.
#[derive(Debug, Clone, PartialEq)]
pub struct Call {
    /// Unique id, `tc_…`; also the ticket that the caller waits with.
    pub id: CallId,
    /// Id of the project that the call belongs to.
    pub project: String,
    /// Id of the run that groups this call with others.
    pub run_id: String,
    /// The requested tool.
    pub tool_name: String,
    /// The requested arguments; those of a fallback are in `target`.
    pub args: Json,
    /// Requester of the call, and the data that came with the request.
    pub origin: Origin,
    /// Tool and arguments of the current attempt: the requested ones or those of a fallback.
    pub target: Target,
    /// The remaining fallbacks for the target, in order.
    pub fallbacks: Vec<Target>,
    /// Maximum number of attempts after the first, per target.
    pub max_retries: u32,
    /// Delays between attempts.
    pub backoff: Backoff,
    /// Time limit of each attempt; `None` divides the remaining time by the remaining attempts.
    pub attempt_timeout_ms: Option<u64>,
    /// Time that the call waits for the answers to its tool's elicitation.
    pub input_timeout_ms: u64,
    /// Current status.
    pub status: Status,
    /// Set exactly while PENDING.
    pub hold: Option<Hold>,
    /// Number of the attempt in flight, or of the last one; 0 before the first.
    pub attempt: u32,
    /// Attempts on the current target.
    pub target_attempts: u32,
    /// Id of the client that acknowledged the attempt in flight.
    pub acknowledged_by: Option<String>,
    /// The tool's elicitation: its questions and the answers so far.
    pub elicitation: Option<Box<Elicitation>>,
    /// The approval that the call waits for, or that released it.
    pub approval: Option<Box<CallApproval>>,
    /// The last attempt whose reported failure led to another attempt.
    pub failed_attempt: Option<Box<FailedAttempt>>,
    /// Number of attempts that ended with the process that ran them.
    pub lost_attempts: u32,
    /// The process that executes the attempt or handed it to a remote executor.
    pub node: Option<String>,
    /// Time of acceptance, in Unix milliseconds.
    pub created_ms: u64,
    /// Time at which an open call ends with a timeout, in Unix milliseconds. While the call waits
    /// for input, the end of that wait.
    pub deadline_ms: u64,
    /// Time at which the attempt in flight ends, in Unix milliseconds; `None` if that is the
    /// deadline.
    pub attempt_deadline_ms: Option<u64>,
    /// Time when the first attempt started, in Unix milliseconds.
    pub started_ms: Option<u64>,
    /// Time when the attempt in flight, or the last one, was given to its executor, in Unix
    /// milliseconds.
    pub attempt_dispatched_ms: Option<u64>,
    /// Time of the outcome, in Unix milliseconds; set exactly when the call has ended.
    pub completed_ms: Option<u64>,
    /// Result or fault; set exactly when the call has ended.
    pub outcome: Option<Outcome>,
    /// Counts the saved states, from 1.
    pub version: u64,
}

/// A failure that did not end its call. It is stored so that a duplicate report, sent because the
/// reply was lost, gets the same reply as the first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailedAttempt {
    /// Number of the failed attempt, from 1.
    pub attempt: u32,
    /// Code of the fault; `message` is its message.
    pub code: String,
    /// Message of the fault.
    pub message: String,
    /// True if neither this attempt nor one before it can have had an effect.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_harmless: bool,
}

impl FailedAttempt {
    /// Creates the record of the first attempt that failed, with this fault.
    pub fn new(attempt: u32, fault: &Fault) -> Self {
        let (code, message) = (fault.code.as_str().to_owned(), fault.message.clone());
        Self { attempt, code, message, is_harmless: fault.side_effect == SideEffect::None }
    }

    /// Returns true if a report on this attempt has the same fault.
    pub fn matches_report(&self, attempt: u32, fault: &Fault) -> bool {
        self.attempt == attempt && self.code == fault.code.as_str() && self.message == fault.message
    }
}

impl Call {
    /// Returns the caller that requested the call.
    pub fn caller(&self) -> Caller {
        Caller {
            project: self.project.clone(),
            agent: self.origin.agent.clone(),
            roles: self.origin.roles,
            auth_method: self.origin.auth_method,
            attributes: self.origin.attributes.clone(),
        }
    }

    /// Returns the approximate size of the serialized call: its arguments, its result and the
    /// detail of its fault.
    pub fn estimated_bytes(&self) -> usize {
        let outcome = self.outcome.as_ref();
        let data = outcome.and_then(|outcome| outcome.data.as_ref());
        let detail = outcome.and_then(|outcome| outcome.error.as_ref()?.detail.as_ref());
        let data = data.map_or(0, |data| data.text().len());
        let detail = detail.map_or(0, |detail| detail.to_string().len());
        self.args.text().len() + data + detail
    }

    /// Returns true if an attempt is in flight: running, or handed to a remote executor.
    pub fn has_attempt_in_flight(&self) -> bool {
        self.status == Status::Running || self.hold == Some(Hold::Unacknowledged)
    }

    /// Returns true if the call waits for answers to its tool's elicitation.
    pub fn waits_for_input(&self) -> bool {
        matches!(self.hold, Some(Hold::Input { .. }))
    }

    /// Returns true if the current attempt may have had an effect: it runs, a tool service may have
    /// its command, or its tool stopped in it to ask. Clients acknowledge an attempt before they
    /// start it, tool services need not.
    pub fn may_have_begun(&self) -> bool {
        let commanded = self.target.traits.needs_command;
        let is_out = self.hold == Some(Hold::Unacknowledged) && commanded;
        self.status == Status::Running || is_out || self.is_interrupted()
    }

    /// Returns true if the tool stopped in its work to request input and has not continued yet: the
    /// call waits for the answers, or has them and waits for its next attempt.
    pub fn is_interrupted(&self) -> bool {
        self.hold.is_some_and(|hold| hold != Hold::Unacknowledged) && self.has_asked()
    }

    /// Returns true if the tool began its work and stopped in it to request input, now or before
    /// the present attempt.
    pub fn has_asked(&self) -> bool {
        let has_answers = || self.elicitation.as_ref().is_some_and(|e| !e.answers.is_empty());
        self.waits_for_input() || has_answers()
    }

    /// Returns true if the call may have had an effect before the present attempt.
    pub fn may_have_acted_before(&self) -> bool {
        let earlier = self.failed_attempt.as_ref().is_some_and(|failed| !failed.is_harmless);
        earlier || (self.target.effect != Effect::Read && self.has_asked())
    }

    /// Returns true if the call may have had an effect: in the present attempt or before it.
    pub fn may_have_acted(&self) -> bool {
        let begun = self.target.effect != Effect::Read && self.may_have_begun();
        begun || self.may_have_acted_before()
    }

    /// Returns true if the attempt continues when the process that started it is gone.
    pub fn survives_node_loss(&self) -> bool {
        let handed =
            self.elicitation.as_ref().is_some_and(|elicitation| elicitation.handle.is_some());
        self.has_attempt_in_flight() && (self.target.traits.reports_later || handed)
    }

    /// Returns the dispatch time that the other timestamps imply in the normal case. A store need
    /// not persist a dispatch time that equals this value.
    pub fn implied_dispatch_ms(&self) -> Option<u64> {
        let dispatched_ms =
            if self.target.traits.reports_later { Some(self.created_ms) } else { self.started_ms };
        dispatched_ms.filter(|_| self.attempt == 1)
    }

    /// Returns the time at which the clock alone must act on this call; `None` once it has ended.
    pub fn due_ms(&self) -> Option<u64> {
        match (self.status.is_terminal(), self.hold) {
            (true, _) => None,
            (false, Some(Hold::Retry { at_ms })) => Some(at_ms.min(self.deadline_ms)),
            (false, _) => Some(self.attempt_deadline_ms.unwrap_or(u64::MAX).min(self.deadline_ms)),
        }
    }

    /// Moves the times at which the clock must act, after the time of day has changed by this much:
    /// the call has as much time left as before. Times in the past stay.
    pub fn shift_schedule(&mut self, by_ms: i64) {
        self.deadline_ms = self.deadline_ms.saturating_add_signed(by_ms);
        let attempt_ms = self.attempt_deadline_ms.map(|ms| ms.saturating_add_signed(by_ms));
        self.attempt_deadline_ms = attempt_ms;
        if let Some(Hold::Retry { at_ms }) = &mut self.hold {
            *at_ms = at_ms.saturating_add_signed(by_ms);
        }
    }
}

/// The outcome of a call.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    /// True if the call succeeded, at least in part.
    pub ok: bool,
    /// True when the tool succeeded only in part: `data` may be incomplete.
    pub partial: bool,
    /// Result of the tool; set if the call succeeded.
    pub data: Option<Json>,
    /// Reason of the failure, timeout or cancellation; set if the call did not succeed.
    pub error: Option<Fault>,
    /// Timing and attempt counts.
    pub metrics: CallMetrics,
}

/// Timing and attempt counts of an ended call.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CallMetrics {
    /// Time from acceptance to the outcome.
    pub latency_ms: u64,
    /// Time from acceptance to the first attempt.
    pub queue_ms: u64,
    /// Number of attempts on all targets together.
    pub attempts: u32,
    /// Number of attempts after the first.
    pub retries: u32,
}

impl CallMetrics {
    /// Computes the metrics from a call's timestamps.
    pub fn from_timestamps(
        created_ms: u64,
        started_ms: Option<u64>,
        completed_ms: u64,
        attempts: u32,
    ) -> Self {
        Self {
            latency_ms: completed_ms.saturating_sub(created_ms),
            queue_ms: started_ms.unwrap_or(completed_ms).saturating_sub(created_ms),
            attempts,
            retries: attempts.saturating_sub(1),
        }
    }
}
