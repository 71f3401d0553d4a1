//! The changes of calls.

pub(super) mod approvals;
pub(super) mod undelivered;
mod usage;
use rusqlite::params;
use tokio::sync::oneshot;
use toolcrib::domain::directory::AuditEntry;
use toolcrib::domain::id::CallId;
use toolcrib::ports::store::undelivered::UndeliveredRequest;
use toolcrib::ports::store::{
    CommitGroup, CreateCallResult, IdempotencyKey, SaveResult, StoreError,
};

use super::call_queries::find_by_idempotency_key;
use super::deliveries::mark_delivery_due;
use super::directory::audit::insert_audit_entry;
use super::event_numbers::format_event_refs;
use super::writer::{Change, NewCallRow, WriterConnection};
use crate::row::{ApprovalRow, CallRow, EventRow};

/// The insert of a new call.
pub(super) struct CallInsert {
    /// Taken when the change is applied.
    pub(super) new: Option<NewCallRow>,
    pub(super) key: Option<IdempotencyKey>,
    pub(super) undelivered: Option<UndeliveredRequest>,
    pub(super) approval: Option<(ApprovalRow, AuditEntry)>,
    pub(super) group: Option<CommitGroup>,
    pub(super) result: CreateCallResult,
    pub(super) reply: oneshot::Sender<Result<CreateCallResult, StoreError>>,
}

impl Change for CallInsert {
    fn commit_group(&self) -> Option<&CommitGroup> {
        self.group.as_ref()
    }

    fn apply(&mut self, writer: &mut WriterConnection) -> rusqlite::Result<()> {
        let Some(new) = self.new.take() else { return Ok(()) };
        match &self.key {
            None => writer.insert_call(new)?,
            Some(key) => self.result = create_with_key(writer, new, key)?,
        }
        if let Some(request) = &self.undelivered {
            undelivered::insert_undelivered(writer.connection()?, request)?;
        }
        // The key of a repeated request leads to the call that it made, with its own approval.
        let is_new = matches!(self.result, CreateCallResult::New);
        if let Some((approval, audit)) = self.approval.as_ref().filter(|_| is_new) {
            approvals::insert_approval(writer.connection()?, approval)?;
            insert_audit_entry(writer.connection()?, audit)?;
        }
        Ok(())
    }

    fn reply(self: Box<Self>, committed: Result<(), StoreError>) {
        let result = self.result;
        let _ = self.reply.send(committed.map(|()| result));
    }
}

fn create_with_key(
    writer: &mut WriterConnection,
    new: NewCallRow,
    key: &IdempotencyKey,
) -> rusqlite::Result<CreateCallResult> {
    let project = new.row.call.project.clone();
    if let Some(existing) = find_by_idempotency_key(writer.connection()?, &project, key)? {
        return Ok(existing);
    }
    let position = writer.insert_call_now(new)?;
    writer
        .connection()?
        .prepare_cached("INSERT INTO idempotency_keys VALUES (?1, ?2, ?3, ?4, ?5)")?
        .execute(params![project, key.agent, key.key, key.fingerprint, position])?;
    Ok(CreateCallResult::New)
}

/// Saves the next version of a call, with its new events.
pub(super) fn save_call(
    writer: &mut WriterConnection,
    row: &CallRow,
    records: &[EventRow],
) -> rusqlite::Result<SaveResult> {
    let call = &row.call;
    let Some(position) = writer.find_position(&call.project, &call.id)? else {
        return Ok(SaveResult::Conflict);
    };
    let events = format_event_refs(writer.last_event_number()?, records);
    let saved = writer
        .connection()?
        .prepare_cached(
            "UPDATE tool_calls SET executor = ?1, status = ?2, hold = ?3, started_ms = ?4, \
             completed_ms = ?5, version = ?6, result = ?7, error = ?8, state = ?9, \
             events = events || ?10, deadline_ms = ?13 WHERE place = ?11 AND version = ?12",
        )?
        .execute(params![
            call.target.executor.as_str(),
            call.status.as_str(),
            row.hold,
            call.started_ms.map(|ms| ms as i64),
            call.completed_ms.map(|ms| ms as i64),
            call.version as i64,
            row.result.as_ref().map(|result| result.text()),
            row.error,
            row.state,
            events,
            position,
            call.version as i64 - 1,
            call.deadline_ms as i64,
        ])?;
    if saved == 0 {
        return Ok(SaveResult::Conflict);
    }
    if let Some(ended_ms) = call.completed_ms {
        writer.note_ended(position, &call.id);
        if call.origin.callback_url.is_some() {
            mark_delivery_due(writer.connection()?, position, ended_ms)?;
        }
    }
    writer.insert_events(position, records)?;
    Ok(SaveResult::Saved)
}

/// Appends events to a stored call.
pub(super) fn append_events(
    writer: &mut WriterConnection,
    project: &str,
    id: &CallId,
    records: &[EventRow],
) -> rusqlite::Result<()> {
    let Some(position) = writer.find_position(project, id)? else { return Ok(()) };
    let events = format_event_refs(writer.last_event_number()?, records);
    writer
        .connection()?
        .prepare_cached("UPDATE tool_calls SET events = events || ?1 WHERE place = ?2")?
        .execute(params![events, position])?;
    writer.insert_events(position, records)
}
