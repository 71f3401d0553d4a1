//! Converts the engine's records to rows and back, for both databases. The engine's types are not
//! designed for storage. The types in this module are: every later version of Toolcrib must be able
//! to read them. `call` has calls; events are in this file.

mod approval;
mod call;
mod caller_identity;
mod columns_macro;
mod definition;
mod delivery;
mod directory;
mod implied_event;
mod row_reader;
mod run;
mod undelivered;
use serde::{Deserialize, Serialize};
use toolcrib::domain::call::Call;
use toolcrib::domain::event::{EventKind, EventRecord};
use toolcrib::ports::store::StoreError;

pub(crate) use approval::{APPROVAL_COLUMNS, ApprovalChangeRow, ApprovalRow, read_approval};
pub(crate) use call::{CALL_COLUMNS, CallColumn, CallRow, decode_caller_call_id, read_call};
pub(crate) use columns_macro::columns;
pub(crate) use definition::{decode_definition, encode_definition};
pub(crate) use delivery::{DELIVERY_COLUMNS, DeliveryColumn, read_delivery, read_try};
pub(crate) use directory::{
    AUDIT_COLUMNS, KEY_COLUMNS, SESSION_TOKEN_COLUMNS, read_accepted_call, read_agent_version,
    read_audit_row, read_client, read_key, read_limit, read_offer, read_project, read_rule,
    read_rule_version, read_session_token, read_switch, read_tool, read_upstream,
};
pub(crate) use implied_event::{CallEventFacts, ImpliedEvent};
pub(crate) use row_reader::RowReader;
pub(crate) use run::{RunRow, decode_run, read_journal_entry, read_run};
pub(crate) use undelivered::read_undelivered;

/// An event record in the form that the writer binds.
pub(crate) struct EventRow {
    /// Set when the call's own row already contains this event, which then needs no row.
    pub(crate) implied: Option<ImpliedEvent>,
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

/// Returns true for the default of a flag, which is not written.
fn is_false(value: &bool) -> bool {
    !value
}

/// Encodes the events of a new call. Events that the call's row implies are marked and need no row.
pub(crate) fn encode_new_call_events(
    call: &Call,
    records: Vec<EventRecord>,
) -> Result<Vec<EventRow>, StoreError> {
    let result = call.outcome.as_ref().and_then(|outcome| outcome.data.as_ref());
    let facts = CallEventFacts {
        tool_name: &call.tool_name,
        args_bytes: call.args.text().len(),
        created_ms: call.created_ms,
        started_ms: call.started_ms,
        completed_ms: call.completed_ms,
        result_bytes: result.map(|result| result.text().len()),
    };
    let mut rows = Vec::with_capacity(records.len());
    for record in records {
        let implied = facts.find_implied(&record);
        let data = if implied.is_some() { String::new() } else { encode(&record.data)? };
        rows.push(EventRow {
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
pub(crate) fn encode_events(records: Vec<EventRecord>) -> Result<Vec<EventRow>, StoreError> {
    let rows = records.into_iter().map(|record| {
        Ok(EventRow {
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
pub(crate) fn read_record(row: &impl RowReader) -> Result<EventRecord, StoreError> {
    let kind = row.text(0)?;
    Ok(EventRecord {
        kind: EventKind::parse(&kind).ok_or_else(|| StoreError::Corrupt(format!("kind {kind}")))?,
        at_ms: row.unsigned(1)?,
        attempt: row.count(2)?,
        data: decode(&row.text(3)?)?,
    })
}
