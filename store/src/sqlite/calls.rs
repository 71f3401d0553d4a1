//! The SQL of each change to calls. This module knows nothing of change groups or flushes.

pub(crate) mod inserts;

use rusqlite::{Connection, OptionalExtension, params};
use toolcrib::domain::call::Call;
use toolcrib::domain::id::CallId;
use toolcrib::ports::store::{CreateCallResult, IdempotencyKey, PurgeResult, SaveResult};

use super::writer::WriterThread;
use crate::row::{CALL_COLUMNS, CallRow, EventRow, read_call};
use crate::sqlite::calls::inserts::format_event_refs;
use crate::sqlite::events::parse_event_refs;
use crate::sqlite::{run_tools, runs};

impl WriterThread {
    pub(super) fn create(
        &mut self,
        row: &CallRow,
        records: &[EventRow],
        key: Option<&IdempotencyKey>,
    ) -> rusqlite::Result<CreateCallResult> {
        let call = &row.call;
        if let Some(key) = key
            && let Some(known) = find_by_idempotency_key(&self.connection, &call.project, key)?
        {
            return Ok(known);
        }
        let place = self.insert_one(row, records)?;
        if let Some(key) = key {
            self.connection
                .prepare_cached("INSERT INTO idempotency_keys VALUES (?1, ?2, ?3, ?4, ?5)")?
                .execute(params![call.project, key.agent, key.key, key.fingerprint, place])?;
        }
        self.finish_insert(place, call, records)?;
        Ok(CreateCallResult::New)
    }

    /// Completes the insert of a call at this place: its events, task and delivery.
    pub(super) fn finish_insert(
        &mut self,
        place: i64,
        call: &Call,
        records: &[EventRow],
    ) -> rusqlite::Result<()> {
        if call.completed_ms.is_none() {
            self.opened_in_group.push((place, call.id.clone()));
            self.open_call_places.insert(call.id.clone(), (call.project.as_str().into(), place));
        }
        self.insert_events(place, records)?;
        self.insert_task_and_delivery(call, place)
    }

    pub(super) fn save(
        &mut self,
        row: &CallRow,
        records: &[EventRow],
    ) -> rusqlite::Result<SaveResult> {
        let call = &row.call;
        let before = call.version as i64 - 1;
        let Some(place) = self.find_place(&call.project, &call.id)? else {
            return Ok(SaveResult::Conflict);
        };
        let saved = self
            .connection
            .prepare_cached(
                "UPDATE calls SET executor = ?1, status = ?2, hold = ?3, started_ms = ?4, \
                 completed_ms = ?5, version = ?6, result = ?7, error = ?8, state = ?9, \
                 events = events || ?10 WHERE place = ?11 AND version = ?12",
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
                format_event_refs(self.last_event_number, records),
                place,
                before,
            ])?;
        if saved == 0 {
            return Ok(SaveResult::Conflict);
        }
        if let Some(ended_ms) = call.completed_ms {
            self.ended_in_group.push((place, call.id.clone()));
            if call.origin.callback_url.is_some() {
                self.mark_delivery_due(place, ended_ms)?;
            }
        }
        self.insert_events(place, records)?;
        Ok(SaveResult::Saved)
    }

    pub(super) fn append(
        &mut self,
        project: &str,
        id: &CallId,
        records: &[EventRow],
    ) -> rusqlite::Result<()> {
        let Some(place) = self.find_place(project, id)? else { return Ok(()) };
        self.connection
            .prepare_cached("UPDATE calls SET events = events || ?1 WHERE place = ?2")?
            .execute(params![format_event_refs(self.last_event_number, records), place])?;
        self.insert_events(place, records)
    }

    /// Writes a value that has no reader.
    pub(super) fn write_probe(&self) -> rusqlite::Result<()> {
        self.connection
            .prepare_cached(
                "INSERT INTO counters VALUES ('checks', 1) \
                 ON CONFLICT (name) DO UPDATE SET value = value + 1",
            )?
            .execute([])
            .map(|_| ())
    }

    /// Finds the place of a call. The places of open calls that this writer inserted are in memory.
    fn find_place(&self, project: &str, id: &CallId) -> rusqlite::Result<Option<i64>> {
        if let Some((owner, place)) = self.open_call_places.get(id)
            && **owner == *project
        {
            return Ok(Some(*place));
        }
        self.connection
            .prepare_cached("SELECT place FROM calls WHERE project = ?1 AND id = ?2")?
            .query_row(params![project, id.as_str()], |row| row.get(0))
            .optional()
    }

    /// Assigns numbers to the events, and inserts those that their call's row does not imply.
    fn insert_events(&mut self, place: i64, records: &[EventRow]) -> rusqlite::Result<()> {
        for record in records {
            self.last_event_number += 1;
            if record.implied.is_some() {
                continue;
            }
            self.connection
                .prepare_cached("INSERT INTO events VALUES (?1, ?2, ?3, ?4, ?5, ?6)")?
                .execute(params![
                self.last_event_number,
                place,
                record.kind,
                record.at_ms,
                record.attempt,
                record.data
            ])?;
        }
        Ok(())
    }

    /// Deletes ended calls. Scans the calls in insertion order up to the first that is too young: a
    /// call that ended before a time was also created before it.
    pub(super) fn purge(
        &mut self,
        ended_before_ms: u64,
        limit: usize,
    ) -> rusqlite::Result<PurgeResult> {
        let before_ms = i64::try_from(ended_before_ms).unwrap_or(i64::MAX);
        let mut places = Vec::new();
        {
            let mut select = self.connection.prepare_cached(
                "SELECT place, created_ms, completed_ms FROM calls ORDER BY place",
            )?;
            let mut rows = select.query([])?;
            while let Some(row) = rows.next()? {
                let (created_ms, ended_ms): (i64, Option<i64>) = (row.get(1)?, row.get(2)?);
                if created_ms >= before_ms || places.len() == limit {
                    break;
                }
                if ended_ms.is_some_and(|ended_ms| ended_ms < before_ms) {
                    places.push(row.get::<_, i64>(0)?);
                }
            }
        }
        for place in &places {
            let list: String = self
                .connection
                .prepare_cached("SELECT events FROM calls WHERE place = ?1")?
                .query_row([place], |row| row.get(0))?;
            for mark in parse_event_refs(&list) {
                self.connection
                    .prepare_cached("DELETE FROM events WHERE number = ?1")?
                    .execute([mark.number as i64])?;
            }
            for sql in [
                "DELETE FROM idempotency_keys WHERE place = ?1",
                "DELETE FROM tries WHERE place = ?1",
                "DELETE FROM deliveries WHERE place = ?1",
                "DELETE FROM tasks WHERE (project, call_id) IN \
                 (SELECT project, id FROM calls WHERE place = ?1)",
                "DELETE FROM calls WHERE place = ?1",
            ] {
                self.connection.prepare_cached(sql)?.execute([place])?;
            }
        }
        self.connection
            .prepare_cached("INSERT OR REPLACE INTO counters VALUES ('last_event', ?1)")?
            .execute([self.last_event_number])?;
        let audited = self
            .connection
            .prepare_cached(
                "DELETE FROM audit WHERE number IN (SELECT number FROM audit \
                 WHERE at_ms < ?1 ORDER BY number LIMIT ?2)",
            )?
            .execute(params![before_ms, limit as i64])?;
        let runs = run_tools::purge_run_tools(&self.connection, before_ms, limit)?;
        let loops = runs::purge_runs(&self.connection, before_ms, limit)?;
        // SQLite reuses the places of the newest calls after they are purged: the low watermark
        // must not be ahead of them.
        self.connection
            .prepare_cached(
                "UPDATE counters SET value = min(value, \
                 (SELECT coalesce(max(place), 0) + 1 FROM calls)) WHERE name = 'first_open'",
            )?
            .execute([])?;
        let calls = places.len();
        let more = [calls, audited, runs, loops].contains(&limit);
        Ok(PurgeResult { calls, has_more: more })
    }
}

/// Returns the call that was created with this idempotency key, if there is one.
pub(super) fn find_by_idempotency_key(
    connection: &Connection,
    project: &str,
    key: &IdempotencyKey,
) -> rusqlite::Result<Option<CreateCallResult>> {
    let used: Option<(String, i64)> = connection
        .prepare_cached(
            "SELECT fingerprint, place FROM idempotency_keys \
             WHERE project = ?1 AND agent = ?2 AND key = ?3",
        )?
        .query_row(params![project, key.agent, key.key], |row| Ok((row.get(0)?, row.get(1)?)))
        .optional()?;
    let Some((fingerprint, place)) = used else { return Ok(None) };
    let sql = format!("SELECT {CALL_COLUMNS} FROM calls WHERE place = ?1");
    let mut select = connection.prepare_cached(&sql)?;
    let mut rows = select.query([place])?;
    let row = rows.next()?.ok_or(rusqlite::Error::QueryReturnedNoRows)?;
    let (_, call) = read_call(row).map_err(|_| rusqlite::Error::InvalidQuery)?;
    if fingerprint != key.fingerprint {
        return Ok(Some(CreateCallResult::Mismatch(call.id)));
    }
    Ok(Some(CreateCallResult::Replayed(Box::new(call))))
}
