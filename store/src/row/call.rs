//! Calls as rows. A call is stored in three parts: columns that queries filter by, an envelope that
//! never changes, and a state that each commit replaces; the last two are JSON.
//!
//! A field that no query filters by goes into the envelope or the state, with `serde(default)` and
//! without a migration. A column also needs a migration and the SQL of both databases
//! (`sqlite/writer/call_inserts.rs`, `sqlite/calls.rs`, `postgres/calls.rs`):
//! `docs/ARCHITECTURE.md` has the steps under "Add a column to calls".

use std::borrow::Cow;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use toolcrib::domain::call::approval::CallApproval;
use toolcrib::domain::call::elicitation::Elicitation;
use toolcrib::domain::call::{
    Call, CallMetrics, FailedAttempt, Hold, Origin, Outcome, Status, Target,
};
use toolcrib::domain::caller::CallerAttributes;
use toolcrib::domain::fault::{Code, Fault, SideEffect};
use toolcrib::domain::json::Json;
use toolcrib::domain::retry::{Backoff, DEFAULT_INPUT_TIMEOUT_MS};
use toolcrib::domain::tool::{Effect, Executor, SourceTraits};
use toolcrib::domain::utp::{AfterExecution, Route};
use toolcrib::ports::store::StoreError;

use super::caller_identity::{self, StoredIdentity};
use super::{RowReader, columns, decode, encode, is_false};

columns! {
    /// The columns of `tool_calls` that [`read_call`] reads.
    CALL_COLUMNS, CallColumn {
        Position = "place",
        Id = "tool_call_id",
        Project = "project",
        RunId = "run_id",
        ToolName = "tool_name",
        Executor = "executor",
        Status = "status",
        Hold = "hold",
        CreatedMs = "created_ms",
        DeadlineMs = "deadline_ms",
        StartedMs = "started_ms",
        CompletedMs = "completed_ms",
        Version = "version",
        Args = "args",
        Result = "result",
        Error = "error",
        Envelope = "envelope",
        State = "state",
    }
}

/// The part of a call that never changes after the insert. Borrows its fields when it is written
/// and owns them when it is read.
#[derive(Serialize, Deserialize)]
struct StoredCallEnvelope<'a> {
    agent: Cow<'a, str>,
    /// True if the caller had a key without the admin role.
    #[serde(default, skip_serializing_if = "is_false")]
    subject_to_rules: bool,
    /// Absent if `subject_to_rules` implies it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    auth_method: Option<Cow<'a, str>>,
    /// Absent if `subject_to_rules` implies them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    roles: Option<Cow<'a, str>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    attributes: Option<Cow<'a, CallerAttributes>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    call_id: Option<Cow<'a, str>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    client_id: Option<Cow<'a, str>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    user_id: Option<Cow<'a, str>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    idempotency_key: Option<Cow<'a, str>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    traceparent: Option<Cow<'a, str>>,
    #[serde(default, skip_serializing_if = "is_false")]
    background: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    turn: Option<Cow<'a, Route>>,
    #[serde(default, skip_serializing_if = "is_zero")]
    depth: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    callback_url: Option<Cow<'a, str>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "after")]
    predecessor: Option<Cow<'a, str>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    replaces: Option<Cow<'a, str>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    meta: Option<Cow<'a, Json>>,
    max_retries: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    attempt_timeout_ms: Option<u64>,
    /// Omitted when it is the default.
    #[serde(default = "default_input_timeout", skip_serializing_if = "is_default_input_timeout")]
    input_timeout_ms: u64,
    /// Omitted when it is the default.
    #[serde(default, skip_serializing_if = "is_default_backoff")]
    backoff: Cow<'a, Backoff>,
}

impl<'a> StoredCallEnvelope<'a> {
    /// Returns an origin that has the identity of the requester only.
    fn take_identity(&mut self) -> Result<Origin, StoreError> {
        caller_identity::restore(StoredIdentity {
            subject_to_rules: self.subject_to_rules,
            auth_method: self.auth_method.take(),
            roles: self.roles.take(),
            attributes: self.attributes.take(),
        })
    }
}

fn is_zero(value: &u32) -> bool {
    *value == 0
}

fn default_input_timeout() -> u64 {
    DEFAULT_INPUT_TIMEOUT_MS
}

fn is_default_input_timeout(timeout_ms: &u64) -> bool {
    *timeout_ms == DEFAULT_INPUT_TIMEOUT_MS
}

fn is_default_backoff(backoff: &Backoff) -> bool {
    *backoff == Backoff::default()
}

#[derive(Serialize, Deserialize)]
struct StoredCallState<'a> {
    attempt: u32,
    target_attempts: u32,
    target: StoredTarget<'a>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    alternates: Vec<StoredTarget<'a>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    retry_at_ms: Option<u64>,
    /// Timeout that starts when the predecessor ends. Set only while the call waits for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "after_timeout_ms")]
    predecessor_timeout_ms: Option<u64>,
    /// Time of the call that was left when it began to wait for input. Set only while it waits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    input_remaining_ms: Option<u64>,
    /// Time of the call that was left when it began to wait for an approval, and the time at which
    /// that approval expires. Set only while it waits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    approval_wait: Option<(u64, u64)>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    approval: Option<Cow<'a, CallApproval>>,
    /// Set only for a call with a predecessor, an elicitation or an approval, whose deadline moves
    /// when the predecessor ends and while the call waits for a person. Older versions leave the
    /// `deadline_ms` column as it was inserted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    deadline_ms: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    attempt_deadline_ms: Option<u64>,
    /// Omitted when it equals `Call::implied_dispatch_ms`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    attempt_ms: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "taken_by")]
    acknowledged_by: Option<Cow<'a, str>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    node: Option<Cow<'a, str>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "dialogue")]
    elicitation: Option<Cow<'a, Elicitation>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "failed")]
    failed_attempt: Option<Cow<'a, FailedAttempt>>,
    #[serde(default, skip_serializing_if = "is_zero")]
    lost_attempts: u32,
    #[serde(default, skip_serializing_if = "is_false")]
    partial: bool,
}

/// A target without the fields that a column already stores. Rows are small because each commit
/// flushes them; for the same reason the metrics of an outcome are computed from its timestamps.
#[derive(Serialize, Deserialize)]
struct StoredTarget<'a> {
    /// Omitted when it is the requested tool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    tool: Option<Cow<'a, str>>,
    version: Cow<'a, str>,
    /// Set only for fallbacks; the executor of the call itself is a column.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    executor: Option<Executor>,
    /// Omitted when they are those of the executor.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    traits: Option<SourceTraits>,
    effect: Effect,
    /// Omitted when the definition declares none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    after_execution: Option<AfterExecution>,
    /// Omitted when they equal the arguments of the call.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    args: Option<Json>,
}

#[derive(Serialize, Deserialize)]
struct StoredFault {
    code: String,
    message: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    detail: Option<Value>,
    retryable: bool,
    #[serde(default)]
    #[serde(rename = "not_happened")]
    no_side_effect: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    raw: Option<Json>,
}

/// A call in the form that the writer binds. The caller's task builds it, so that the writer only
/// has to write.
pub(crate) struct CallRow {
    pub(crate) call: Arc<Call>,
    pub(crate) hold: Option<&'static str>,
    pub(crate) args: Json,
    pub(crate) result: Option<Json>,
    pub(crate) error: Option<String>,
    pub(crate) envelope: String,
    pub(crate) state: String,
}

impl CallRow {
    /// Builds the row of a call that is stored for the first time; `args` are the requested
    /// arguments.
    pub(crate) fn for_insert(call: Arc<Call>) -> Result<Self, StoreError> {
        let identity = caller_identity::to_stored(&call.origin);
        let envelope = encode(&StoredCallEnvelope {
            agent: Cow::Borrowed(&call.origin.agent),
            subject_to_rules: identity.subject_to_rules,
            auth_method: identity.auth_method,
            roles: identity.roles,
            attributes: identity.attributes,
            call_id: call.origin.caller_call_id.as_deref().map(Cow::Borrowed),
            client_id: call.origin.client_id.as_deref().map(Cow::Borrowed),
            user_id: call.origin.user_id.as_deref().map(Cow::Borrowed),
            idempotency_key: call.origin.idempotency_key.as_deref().map(Cow::Borrowed),
            traceparent: call.origin.traceparent.as_deref().map(Cow::Borrowed),
            background: call.origin.background,
            turn: call.origin.route.as_deref().map(Cow::Borrowed),
            depth: call.origin.depth,
            callback_url: call.origin.callback_url.as_deref().map(Cow::Borrowed),
            predecessor: call.origin.predecessor.as_ref().map(|id| Cow::Borrowed(id.as_str())),
            replaces: call.origin.replaces.as_ref().map(|id| Cow::Borrowed(id.as_str())),
            meta: call.origin.meta.as_ref().map(Cow::Borrowed),
            max_retries: call.max_retries,
            attempt_timeout_ms: call.attempt_timeout_ms,
            input_timeout_ms: call.input_timeout_ms,
            backoff: Cow::Borrowed(&call.backoff),
        })?;
        let mut row = Self::for_update(call)?;
        row.envelope = envelope;
        Ok(row)
    }

    /// Builds the row of a call that is already stored. Its envelope and arguments do not change.
    pub(crate) fn for_update(call: Arc<Call>) -> Result<Self, StoreError> {
        let replaced = call.target.args != call.args;
        let outcome = call.outcome.as_ref();
        let error = outcome.and_then(|outcome| outcome.error.as_ref());
        let error = error.map(|fault| {
            encode(&StoredFault {
                code: fault.code.as_str().to_owned(),
                message: fault.message.clone(),
                detail: fault.detail.clone(),
                retryable: fault.retryable,
                no_side_effect: fault.side_effect == SideEffect::None,
                raw: fault.raw.clone(),
            })
        });
        let state = StoredCallState {
            attempt: call.attempt,
            target_attempts: call.target_attempts,
            target: encode_target(&call, &call.target, replaced),
            alternates: call.fallbacks.iter().map(|t| encode_target(&call, t, true)).collect(),
            retry_at_ms: match call.hold {
                Some(Hold::Retry { at_ms }) => Some(at_ms),
                _ => None,
            },
            predecessor_timeout_ms: match call.hold {
                Some(Hold::Predecessor { timeout_ms }) => Some(timeout_ms),
                _ => None,
            },
            input_remaining_ms: match call.hold {
                Some(Hold::Input { remaining_ms }) => Some(remaining_ms),
                _ => None,
            },
            approval_wait: match call.hold {
                Some(Hold::Approval { remaining_ms, expires_ms }) => {
                    Some((remaining_ms, expires_ms))
                }
                _ => None,
            },
            approval: call.approval.as_deref().map(Cow::Borrowed),
            deadline_ms: has_moving_deadline(&call).then_some(call.deadline_ms),
            attempt_deadline_ms: call.attempt_deadline_ms,
            attempt_ms: call
                .attempt_dispatched_ms
                .filter(|_| call.attempt_dispatched_ms != call.implied_dispatch_ms()),
            acknowledged_by: call.acknowledged_by.as_deref().map(Cow::Borrowed),
            node: call.node.as_deref().map(Cow::Borrowed),
            elicitation: call.elicitation.as_deref().map(Cow::Borrowed),
            failed_attempt: call.failed_attempt.as_deref().map(Cow::Borrowed),
            lost_attempts: call.lost_attempts,
            partial: outcome.is_some_and(|outcome| outcome.partial),
        };
        let state = encode(&state)?;
        Ok(Self {
            hold: call.hold.map(Hold::as_str),
            args: call.args.clone(),
            result: outcome.and_then(|outcome| outcome.data.clone()),
            error: error.transpose()?,
            envelope: String::new(),
            state,
            call,
        })
    }
}

/// Returns true if the deadline of a call may differ from that of its insert.
fn has_moving_deadline(call: &Call) -> bool {
    call.origin.predecessor.is_some() || call.elicitation.is_some() || call.approval.is_some()
}

fn encode_target<'a>(call: &Call, target: &'a Target, with_args: bool) -> StoredTarget<'a> {
    StoredTarget {
        tool: (target.tool != call.tool_name).then_some(Cow::Borrowed(target.tool.as_str())),
        version: Cow::Borrowed(&target.version),
        executor: (target.executor != call.target.executor).then_some(target.executor),
        traits: (target.traits != target.executor.traits()).then_some(target.traits),
        effect: target.effect,
        after_execution: target.after_execution,
        args: with_args.then(|| target.args.clone()),
    }
}

fn decode_target(
    stored: StoredTarget<'_>,
    tool_name: &str,
    executor: Executor,
    args: &Json,
) -> Target {
    let executor = stored.executor.unwrap_or(executor);
    Target {
        tool: stored.tool.map_or_else(|| tool_name.to_owned(), Cow::into_owned),
        version: stored.version.into_owned(),
        executor,
        traits: stored.traits.unwrap_or_else(|| executor.traits()),
        effect: stored.effect,
        after_execution: stored.after_execution,
        args: stored.args.unwrap_or_else(|| args.clone()),
    }
}

/// Returns the id by which the caller knows a call, from the call's envelope.
pub(crate) fn decode_caller_call_id(envelope: &str) -> Result<Option<String>, StoreError> {
    let envelope: StoredCallEnvelope<'_> = decode(envelope)?;
    Ok(envelope.call_id.map(Cow::into_owned))
}

/// Returns the agent and the user of a call, from the call's envelope.
pub(crate) fn decode_agent_and_user(
    envelope: &str,
) -> Result<(String, Option<String>), StoreError> {
    let envelope: StoredCallEnvelope<'_> = decode(envelope)?;
    let user = envelope.attributes.and_then(|attributes| attributes.user.clone());
    Ok((envelope.agent.into_owned(), user))
}

/// Reads a call and its position.
pub(crate) fn read_call(row: &impl RowReader) -> Result<(u64, Call), StoreError> {
    let text = |column: CallColumn| row.text(column as usize);
    let optional_text = |column: CallColumn| row.optional_text(column as usize);
    let number = |column: CallColumn| row.unsigned(column as usize);
    let optional_number = |column: CallColumn| row.optional_unsigned(column as usize);
    let parse =
        |text: &str| Json::from_stored(text).map_err(|e| StoreError::Corrupt(e.to_string()));
    let envelope: StoredCallEnvelope<'_> = decode(&text(CallColumn::Envelope)?)?;
    let state: StoredCallState<'_> = decode(&text(CallColumn::State)?)?;
    let args = parse(&text(CallColumn::Args)?)?;
    let status_text = text(CallColumn::Status)?;
    let status: Status =
        status_text.parse().map_err(|()| StoreError::Corrupt(format!("status {status_text}")))?;
    let deadline_ms = state.deadline_ms.map_or_else(|| number(CallColumn::DeadlineMs), Ok)?;
    let timeout_ms = deadline_ms.saturating_sub(number(CallColumn::CreatedMs)?);
    let hold = decode_hold(optional_text(CallColumn::Hold)?.as_deref(), &state, timeout_ms);
    let data = optional_text(CallColumn::Result)?.map(|text| parse(&text)).transpose()?;
    let error = optional_text(CallColumn::Error)?.map(|text| read_fault(&text)).transpose()?;
    let (created_ms, started_ms) =
        (number(CallColumn::CreatedMs)?, optional_number(CallColumn::StartedMs)?);
    let completed_ms = optional_number(CallColumn::CompletedMs)?;
    let outcome = completed_ms.map(|completed_ms| Outcome {
        ok: status == Status::Succeeded,
        partial: state.partial,
        data,
        error,
        metrics: CallMetrics::from_timestamps(created_ms, started_ms, completed_ms, state.attempt),
    });
    let (tool_name, executor) = (text(CallColumn::ToolName)?, text(CallColumn::Executor)?);
    let executor: Executor =
        executor.parse().map_err(|()| StoreError::Corrupt(format!("executor {executor}")))?;
    let target = |stored| decode_target(stored, &tool_name, executor, &args);
    let id = text(CallColumn::Id)?;
    let (max_retries, backoff) = (envelope.max_retries, envelope.backoff.clone().into_owned());
    let (attempt_timeout_ms, input_timeout_ms) =
        (envelope.attempt_timeout_ms, envelope.input_timeout_ms);
    let mut call = Call {
        id: id.parse().map_err(|_| StoreError::Corrupt(format!("call id {id}")))?,
        project: text(CallColumn::Project)?,
        run_id: text(CallColumn::RunId)?,
        tool_name: tool_name.clone(),
        args: args.clone(),
        origin: decode_origin(envelope)?,
        target: target(state.target),
        fallbacks: state.alternates.into_iter().map(target).collect(),
        max_retries,
        attempt_timeout_ms,
        input_timeout_ms,
        backoff,
        status,
        hold,
        attempt: state.attempt,
        target_attempts: state.target_attempts,
        acknowledged_by: state.acknowledged_by.map(Cow::into_owned),
        node: state.node.map(Cow::into_owned),
        elicitation: state.elicitation.map(|dialogue| Box::new(dialogue.into_owned())),
        approval: state.approval.map(|approval| Box::new(approval.into_owned())),
        failed_attempt: state.failed_attempt.map(|failed| Box::new(failed.into_owned())),
        lost_attempts: state.lost_attempts,
        created_ms,
        deadline_ms,
        attempt_deadline_ms: state.attempt_deadline_ms,
        started_ms,
        attempt_dispatched_ms: state.attempt_ms,
        completed_ms,
        outcome,
        version: number(CallColumn::Version)?,
    };
    call.attempt_dispatched_ms = call.attempt_dispatched_ms.or_else(|| call.implied_dispatch_ms());
    Ok((number(CallColumn::Position)?, call))
}

fn decode_origin(mut envelope: StoredCallEnvelope<'_>) -> Result<Origin, StoreError> {
    let identity = envelope.take_identity()?;
    Ok(Origin {
        agent: envelope.agent.into_owned(),
        caller_call_id: envelope.call_id.map(Cow::into_owned),
        client_id: envelope.client_id.map(Cow::into_owned),
        user_id: envelope.user_id.map(Cow::into_owned),
        idempotency_key: envelope.idempotency_key.map(Cow::into_owned),
        traceparent: envelope.traceparent.map(Cow::into_owned),
        background: envelope.background,
        route: envelope.turn.map(|turn| Box::new(turn.into_owned())),
        depth: envelope.depth,
        callback_url: envelope.callback_url.map(Cow::into_owned),
        predecessor: envelope.predecessor.and_then(|id| id.parse().ok()),
        replaces: envelope.replaces.and_then(|id| id.parse().ok()),
        meta: envelope.meta.map(Cow::into_owned),
        ..identity
    })
}

/// Decodes a hold. Earlier versions stored `input` and `after` as `queue`, so the state decides
/// between the three: it has open questions, or the timeout of a call that has a predecessor. A
/// call that waits for input without a stored remaining time gets its whole timeout.
fn decode_hold(column: Option<&str>, state: &StoredCallState<'_>, timeout_ms: u64) -> Option<Hold> {
    let asks = state.elicitation.as_ref().is_some_and(|dialogue| !dialogue.unanswered.is_empty());
    match (column?, state.predecessor_timeout_ms) {
        ("queue" | "input", _) if asks => {
            Some(Hold::Input { remaining_ms: state.input_remaining_ms.unwrap_or(timeout_ms) })
        }
        ("queue" | "after", Some(timeout_ms)) => Some(Hold::Predecessor { timeout_ms }),
        ("queue" | "input" | "after", _) => Some(Hold::Queue),
        ("parked", _) => Some(Hold::Unacknowledged),
        ("approval", _) => {
            let (remaining_ms, expires_ms) = state.approval_wait.unwrap_or_default();
            Some(Hold::Approval { remaining_ms, expires_ms })
        }
        ("retry", _) => Some(Hold::Retry { at_ms: state.retry_at_ms.unwrap_or_default() }),
        _ => None,
    }
}

fn read_fault(text: &str) -> Result<Fault, StoreError> {
    let stored: StoredFault = decode(text)?;
    let happened = if stored.no_side_effect { SideEffect::None } else { SideEffect::Possible };
    Ok(Fault {
        code: Code::parse(&stored.code).unwrap_or(Code::Internal),
        message: stored.message,
        detail: stored.detail,
        retryable: stored.retryable,
        side_effect: happened,
        raw: stored.raw,
    })
}
