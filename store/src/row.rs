//! Converts calls and events to rows and back. The engine's types are not designed for storage. The
//! types in this module are: every later version of Toolcrib must be able to read them.

mod definition;
mod delivery;
mod directory;
mod fields;
mod implied;
mod looped;

use std::borrow::Cow;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use toolcrib::call::{Asked, Call, FailedAttempt, Hold, Metrics, Outcome, Status, Target};
use toolcrib::dialogue::Dialogue;
use toolcrib::event::{Kind, Record};
use toolcrib::fault::{Code, Fault, Happened};
use toolcrib::json::Json;
use toolcrib::retry::Backoff;
use toolcrib::store::StoreError;
use toolcrib::tool::{Effect, Executor};
use toolcrib::utp::Route;

pub(crate) use definition::{definition_text, read_definition};
pub(crate) use delivery::{DELIVERY_COLUMNS, read_delivery, read_try};
pub(crate) use directory::{
    read_audit, read_client, read_key, read_offer, read_project, read_rule, read_tool,
    read_upstream,
};
pub(crate) use fields::Fields;
pub(crate) use implied::{Facts, Implied};
pub(crate) use looped::{LoopRow, read_entry, read_run, run_of};

/// The columns of `calls` that [`read_call`] reads, in this order.
pub(crate) const CALL_COLUMNS: &str = "place, id, project, run_id, tool_name, executor, status, \
     hold, created_ms, deadline_ms, started_ms, completed_ms, version, args, result, error, \
     envelope, state";

/// The part of a call that never changes after the insert. Borrows its fields when it is written
/// and owns them when it is read.
#[derive(Serialize, Deserialize)]
struct Envelope<'a> {
    agent: Cow<'a, str>,
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
    #[serde(default, skip_serializing_if = "Option::is_none")]
    callback_url: Option<Cow<'a, str>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    after: Option<Cow<'a, str>>,
    max_retries: u32,
    /// Omitted when it is the default.
    #[serde(default, skip_serializing_if = "is_usual")]
    backoff: Cow<'a, Backoff>,
}

fn is_false(value: &bool) -> bool {
    !value
}

fn is_usual(backoff: &Backoff) -> bool {
    *backoff == Backoff::default()
}

#[derive(Serialize, Deserialize)]
struct State<'a> {
    attempt: u32,
    target_attempts: u32,
    target: StoredTarget<'a>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    alternates: Vec<StoredTarget<'a>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    retry_at_ms: Option<u64>,
    /// Timeout that starts when the predecessor ends. Set only while the call waits for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    after_timeout_ms: Option<u64>,
    /// Set only for a call with a predecessor: the `deadline_ms` column holds the deadline of the
    /// insert, which moves when the predecessor ends.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    deadline_ms: Option<u64>,
    /// Omitted when it equals `Call::implied_dispatch_ms`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    attempt_ms: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    taken_by: Option<Cow<'a, str>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    node: Option<Cow<'a, str>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    dialogue: Option<Cow<'a, Dialogue>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    failed: Option<Cow<'a, FailedAttempt>>,
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
    effect: Effect,
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
    not_happened: bool,
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

/// An event record in the form that the writer binds.
pub(crate) struct RecordRow {
    /// Set when the call's own row already contains this event, which then needs no row.
    pub(crate) implied: Option<Implied>,
    pub(crate) kind: &'static str,
    pub(crate) at_ms: i64,
    pub(crate) attempt: u32,
    pub(crate) data: String,
}

pub(crate) fn encode<T: Serialize>(value: &T) -> Result<String, StoreError> {
    // Most values fit into this capacity; a buffer that grows is copied.
    let mut text = Vec::with_capacity(192);
    let written = serde_json::to_writer(&mut text, value);
    written.map_err(|error| StoreError::Corrupt(error.to_string()))?;
    String::from_utf8(text).map_err(|error| StoreError::Corrupt(error.to_string()))
}

pub(crate) fn decode<'a, T: Deserialize<'a>>(text: &'a str) -> Result<T, StoreError> {
    serde_json::from_str(text).map_err(|error| StoreError::Corrupt(error.to_string()))
}

impl CallRow {
    /// Builds the row of a call that is stored for the first time; `args` are the requested
    /// arguments.
    pub(crate) fn first(call: Arc<Call>) -> Result<Self, StoreError> {
        let envelope = encode(&Envelope {
            agent: Cow::Borrowed(&call.asked.agent),
            call_id: call.asked.call_id.as_deref().map(Cow::Borrowed),
            client_id: call.asked.client_id.as_deref().map(Cow::Borrowed),
            user_id: call.asked.user_id.as_deref().map(Cow::Borrowed),
            idempotency_key: call.asked.idempotency_key.as_deref().map(Cow::Borrowed),
            traceparent: call.asked.traceparent.as_deref().map(Cow::Borrowed),
            background: call.asked.background,
            turn: call.asked.turn.as_deref().map(Cow::Borrowed),
            callback_url: call.asked.callback_url.as_deref().map(Cow::Borrowed),
            after: call.asked.after.as_ref().map(|id| Cow::Borrowed(id.as_str())),
            max_retries: call.max_retries,
            backoff: Cow::Borrowed(&call.backoff),
        })?;
        let mut row = Self::next(call)?;
        row.envelope = envelope;
        Ok(row)
    }

    /// Builds the row of a call that is already stored. Its envelope and arguments do not change.
    pub(crate) fn next(call: Arc<Call>) -> Result<Self, StoreError> {
        let replaced = call.target.args != call.args;
        let outcome = call.outcome.as_ref();
        let error = outcome.and_then(|outcome| outcome.error.as_ref());
        let error = error.map(|fault| {
            encode(&StoredFault {
                code: fault.code.as_str().to_owned(),
                message: fault.message.clone(),
                detail: fault.detail.clone(),
                retryable: fault.retryable,
                not_happened: fault.happened == Happened::No,
                raw: fault.raw.clone(),
            })
        });
        let state = State {
            attempt: call.attempt,
            target_attempts: call.target_attempts,
            target: stored_target(&call, &call.target, replaced),
            alternates: call.alternates.iter().map(|t| stored_target(&call, t, true)).collect(),
            retry_at_ms: match call.hold {
                Some(Hold::Retry { at_ms }) => Some(at_ms),
                _ => None,
            },
            after_timeout_ms: match call.hold {
                Some(Hold::After { timeout_ms }) => Some(timeout_ms),
                _ => None,
            },
            deadline_ms: call.asked.after.is_some().then_some(call.deadline_ms),
            attempt_ms: call.attempt_ms.filter(|_| call.attempt_ms != call.usual_attempt_ms()),
            taken_by: call.taken_by.as_deref().map(Cow::Borrowed),
            node: call.node.as_deref().map(Cow::Borrowed),
            dialogue: call.dialogue.as_deref().map(Cow::Borrowed),
            failed: call.failed.as_deref().map(Cow::Borrowed),
            partial: outcome.is_some_and(|outcome| outcome.partial),
        };
        let state = encode(&state)?;
        Ok(Self {
            // The `hold` column has no value for some holds; fields of the state distinguish them.
            hold: call.hold.map(|hold| match hold {
                Hold::Input | Hold::After { .. } => Hold::Queue.as_str(),
                hold => hold.as_str(),
            }),
            args: call.args.clone(),
            result: outcome.and_then(|outcome| outcome.data.clone()),
            error: error.transpose()?,
            envelope: String::new(),
            state,
            call,
        })
    }
}

fn stored_target<'a>(call: &Call, target: &'a Target, with_args: bool) -> StoredTarget<'a> {
    StoredTarget {
        tool: (target.tool != call.tool_name).then_some(Cow::Borrowed(target.tool.as_str())),
        version: Cow::Borrowed(&target.version),
        executor: (target.executor != call.target.executor).then_some(target.executor),
        effect: target.effect,
        args: with_args.then(|| target.args.clone()),
    }
}

fn target_of(stored: StoredTarget<'_>, tool_name: &str, executor: Executor, args: &Json) -> Target {
    Target {
        tool: stored.tool.map_or_else(|| tool_name.to_owned(), Cow::into_owned),
        version: stored.version.into_owned(),
        executor: stored.executor.unwrap_or(executor),
        effect: stored.effect,
        args: stored.args.unwrap_or_else(|| args.clone()),
    }
}

/// Returns the id by which the caller knows a call, from the call's envelope.
pub(crate) fn asked_as(envelope: &str) -> Result<Option<String>, StoreError> {
    let envelope: Envelope<'_> = decode(envelope)?;
    Ok(envelope.call_id.map(Cow::into_owned))
}

/// Reads a call and its place.
pub(crate) fn read_call(row: &impl Fields) -> Result<(u64, Call), StoreError> {
    let text = |n: usize| row.text(n);
    let number = |n: usize| row.number(n);
    let time = |n: usize| row.maybe_number(n);
    let maybe = |n: usize| row.maybe_text(n);
    let parse = |text: &str| Json::kept(text).map_err(|e| StoreError::Corrupt(e.to_string()));
    let envelope: Envelope<'_> = decode(&text(16)?)?;
    let state: State<'_> = decode(&text(17)?)?;
    let args = parse(&text(13)?)?;
    let status_text = text(6)?;
    let status: Status =
        status_text.parse().map_err(|()| StoreError::Corrupt(format!("status {status_text}")))?;
    let hold = hold_of(maybe(7)?.as_deref(), &state);
    let data = maybe(14)?.map(|text| parse(&text)).transpose()?;
    let error = maybe(15)?.map(|text| read_fault(&text)).transpose()?;
    let (created_ms, started_ms) = (number(8)? as u64, time(10)?.map(|ms| ms as u64));
    let completed_ms = time(11)?.map(|ms| ms as u64);
    let outcome = completed_ms.map(|completed_ms| Outcome {
        ok: status == Status::Succeeded,
        partial: state.partial,
        data,
        error,
        metrics: Metrics::of(created_ms, started_ms, completed_ms, state.attempt),
    });
    let (tool_name, executor) = (text(4)?, text(5)?);
    let executor: Executor =
        executor.parse().map_err(|()| StoreError::Corrupt(format!("executor {executor}")))?;
    let target = |stored| target_of(stored, &tool_name, executor, &args);
    let id = text(1)?;
    let mut call = Call {
        id: id.parse().map_err(|_| StoreError::Corrupt(format!("call id {id}")))?,
        project: text(2)?,
        run_id: text(3)?,
        tool_name: tool_name.clone(),
        args: args.clone(),
        asked: Asked {
            agent: envelope.agent.into_owned(),
            call_id: envelope.call_id.map(Cow::into_owned),
            client_id: envelope.client_id.map(Cow::into_owned),
            user_id: envelope.user_id.map(Cow::into_owned),
            idempotency_key: envelope.idempotency_key.map(Cow::into_owned),
            traceparent: envelope.traceparent.map(Cow::into_owned),
            background: envelope.background,
            turn: envelope.turn.map(|turn| Box::new(turn.into_owned())),
            callback_url: envelope.callback_url.map(Cow::into_owned),
            after: envelope.after.and_then(|id| id.parse().ok()),
        },
        target: target(state.target),
        alternates: state.alternates.into_iter().map(target).collect(),
        max_retries: envelope.max_retries,
        backoff: envelope.backoff.into_owned(),
        status,
        hold,
        attempt: state.attempt,
        target_attempts: state.target_attempts,
        taken_by: state.taken_by.map(Cow::into_owned),
        node: state.node.map(Cow::into_owned),
        dialogue: state.dialogue.map(|dialogue| Box::new(dialogue.into_owned())),
        failed: state.failed.map(|failed| Box::new(failed.into_owned())),
        created_ms,
        deadline_ms: state.deadline_ms.map_or_else(|| number(9).map(|ms| ms as u64), Ok)?,
        started_ms,
        attempt_ms: state.attempt_ms,
        completed_ms,
        outcome,
        version: number(12)? as u64,
    };
    call.attempt_ms = call.attempt_ms.or_else(|| call.usual_attempt_ms());
    Ok((number(0)? as u64, call))
}

fn hold_of(column: Option<&str>, state: &State<'_>) -> Option<Hold> {
    let asks = state.dialogue.as_ref().is_some_and(|dialogue| !dialogue.open.is_empty());
    match (column?, state.after_timeout_ms) {
        ("queue", _) if asks => Some(Hold::Input),
        ("queue", Some(timeout_ms)) => Some(Hold::After { timeout_ms }),
        ("queue", None) => Some(Hold::Queue),
        ("parked", _) => Some(Hold::Parked),
        ("retry", _) => Some(Hold::Retry { at_ms: state.retry_at_ms.unwrap_or_default() }),
        _ => None,
    }
}

fn read_fault(text: &str) -> Result<Fault, StoreError> {
    let stored: StoredFault = decode(text)?;
    let happened = if stored.not_happened { Happened::No } else { Happened::Maybe };
    Ok(Fault {
        code: Code::parse(&stored.code).unwrap_or(Code::Internal),
        message: stored.message,
        detail: stored.detail,
        retryable: stored.retryable,
        happened,
        raw: stored.raw,
    })
}

/// Encodes the events of a new call. Events that the call's row implies are marked and need no row.
pub(crate) fn first_records(
    call: &Call,
    records: Vec<Record>,
) -> Result<Vec<RecordRow>, StoreError> {
    let result = call.outcome.as_ref().and_then(|outcome| outcome.data.as_ref());
    let facts = Facts {
        tool_name: &call.tool_name,
        args_bytes: call.args.text().len(),
        created_ms: call.created_ms,
        started_ms: call.started_ms,
        completed_ms: call.completed_ms,
        result_bytes: result.map(|result| result.text().len()),
    };
    let mut rows = Vec::with_capacity(records.len());
    for record in records {
        let implied = facts.implies(&record);
        let data = if implied.is_some() { String::new() } else { encode(&record.data)? };
        rows.push(RecordRow {
            implied,
            kind: record.kind.as_str(),
            at_ms: record.at_ms as i64,
            attempt: record.attempt,
            data,
        });
    }
    Ok(rows)
}

/// Encodes events for binding.
pub(crate) fn record_rows(records: Vec<Record>) -> Result<Vec<RecordRow>, StoreError> {
    let rows = records.into_iter().map(|record| {
        Ok(RecordRow {
            implied: None,
            kind: record.kind.as_str(),
            at_ms: record.at_ms as i64,
            attempt: record.attempt,
            data: encode(&record.data)?,
        })
    });
    rows.collect()
}

/// Reads `kind, at_ms, attempt, data`.
pub(crate) fn read_record(row: &impl Fields) -> Result<Record, StoreError> {
    let kind = row.text(0)?;
    Ok(Record {
        kind: Kind::parse(&kind).ok_or_else(|| StoreError::Corrupt(format!("kind {kind}")))?,
        at_ms: row.whole(1)?,
        attempt: row.count(2)?,
        data: decode(&row.text(3)?)?,
    })
}
