//! Runs and their journals in SQLite. Journal entries take their numbers from the same sequence as
//! call events, so a subscriber of a run sees both in commit order.

use async_trait::async_trait;
use rusqlite::{Connection, OptionalExtension, params};
use toolcrib::domain::run::{JournalEntry, JournalRecord, Run, RunEvent};
use toolcrib::ports::store::runs::{CreateRunResult, RunFilter, RunStore};
use toolcrib::ports::store::undelivered::UndeliveredRequest;
use toolcrib::ports::store::{EventScope, IdempotencyKey, SaveResult, StoreError};

use super::SqliteStore;
use super::calls::undelivered::insert_undelivered;
use super::reader::query_map;
use super::writer::WriterConnection;
use crate::row::{RunRow, decode_run, read_journal_entry, read_run};
use crate::sqlite::events;

/// Stores a new run. If its idempotency key already created one, returns the body and the
/// fingerprint of that run instead.
fn create_run(
    writer: &mut WriterConnection,
    row: &RunRow,
) -> rusqlite::Result<Option<(String, String)>> {
    let run = &row.run;
    if let Some(key) = &row.key {
        let existing = writer
            .connection()?
            .prepare_cached(
                "SELECT body, fingerprint FROM loops \
                 WHERE project = ?1 AND agent = ?2 AND key = ?3",
            )?
            .query_row(params![run.project, key.agent, key.key], |row| {
                Ok((row.get(0)?, row.get(1)?))
            })
            .optional()?;
        if existing.is_some() {
            return Ok(existing);
        }
    }
    writer
        .connection()?
        .prepare_cached("INSERT INTO loops VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11)")?
        .execute(params![
            run.project,
            run.id,
            run.status.as_str(),
            run.model,
            run.created_ms as i64,
            run.ended_ms.map(|ms| ms as i64),
            run.version as i64,
            row.key.as_ref().map_or(run.owner.agent.as_str(), |key| key.agent.as_str()),
            row.key.as_ref().map(|key| key.key.as_str()),
            row.key.as_ref().map(|key| key.fingerprint.as_str()),
            row.body,
        ])?;
    if let Some(lineage) = &run.lineage {
        writer
            .connection()?
            .prepare_cached("INSERT INTO run_tree VALUES (?1, ?2, ?3)")?
            .execute(params![run.project, lineage.root_run_id, run.id])?;
    }
    append_journal(writer, row)?;
    if let Some(request) = &row.undelivered {
        insert_undelivered(writer.connection()?, request)?;
    }
    Ok(None)
}

fn save_run(writer: &mut WriterConnection, row: &RunRow) -> rusqlite::Result<SaveResult> {
    let run = &row.run;
    let changed = writer
        .connection()?
        .prepare_cached(
            "UPDATE loops SET status = ?1, ended_ms = ?2, version = ?3, body = ?4 \
             WHERE project = ?5 AND run_id = ?6 AND version = ?3 - 1",
        )?
        .execute(params![
            run.status.as_str(),
            run.ended_ms.map(|ms| ms as i64),
            run.version as i64,
            row.body,
            run.project,
            run.id,
        ])?;
    if changed == 0 {
        return Ok(SaveResult::Conflict);
    }
    append_journal(writer, row)?;
    Ok(SaveResult::Saved)
}

fn append_journal(writer: &mut WriterConnection, row: &RunRow) -> rusqlite::Result<()> {
    for entry in &row.entries {
        let number = writer.next_event_number()?;
        writer
            .connection()?
            .prepare_cached("INSERT INTO loop_entries VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)")?
            .execute(params![
                number,
                row.run.project,
                row.run.id,
                entry.kind,
                entry.at_ms,
                entry.data,
                entry.messages,
            ])?;
    }
    Ok(())
}

/// Deletes runs that ended before this time, oldest first, with their journals.
pub(super) fn purge_runs(
    connection: &Connection,
    before_ms: i64,
    limit: usize,
) -> rusqlite::Result<usize> {
    let mut select = connection.prepare_cached(
        "SELECT project, run_id FROM loops WHERE ended_ms < ?1 ORDER BY ended_ms LIMIT ?2",
    )?;
    let mut rows = select.query(params![before_ms, limit as i64])?;
    let mut old: Vec<(String, String)> = Vec::new();
    while let Some(row) = rows.next()? {
        old.push((row.get(0)?, row.get(1)?));
    }
    let count = old.len();
    for (project, run_id) in old {
        for sql in [
            "DELETE FROM loop_entries WHERE project = ?1 AND run_id = ?2",
            "DELETE FROM run_tree WHERE project = ?1 AND run_id = ?2",
            "DELETE FROM loops WHERE project = ?1 AND run_id = ?2",
        ] {
            connection.prepare_cached(sql)?.execute(params![project, run_id])?;
        }
    }
    Ok(count)
}

fn list_journal_entries(
    connection: &Connection,
    project: &str,
    run_id: &str,
    after: u64,
    limit: usize,
) -> Result<Vec<JournalEntry>, StoreError> {
    let sql = "SELECT number, run_id, kind, at_ms, data, messages FROM loop_entries \
               WHERE project = ?1 AND run_id = ?2 AND number > ?3 ORDER BY number LIMIT ?4";
    let (after, limit) =
        (i64::try_from(after).unwrap_or(i64::MAX), i64::try_from(limit).unwrap_or(i64::MAX));
    query_map(connection, sql, params![project, run_id, after, limit], |row| {
        read_journal_entry(row)
    })
}

fn list_runs(connection: &Connection, filter: &RunFilter) -> Result<Vec<Run>, StoreError> {
    let sql = "SELECT body FROM loops WHERE project = ?1 AND run_id < ?2 \
               AND (?3 IS NULL OR status = ?3) AND (?4 IS NULL OR model = ?4) \
               AND created_ms >= ?5 ORDER BY run_id DESC LIMIT ?6";
    // Every id sorts before this: callers name the runs of their conversations as they like.
    let before = filter.before.as_deref().unwrap_or("\u{10FFFF}");
    let since_ms = i64::try_from(filter.since_ms.unwrap_or(0)).unwrap_or(i64::MAX);
    let limit = i64::try_from(filter.limit).unwrap_or(i64::MAX);
    let status = filter.status.map(|status| status.as_str());
    let bound = params![filter.project, before, status, filter.model, since_ms, limit];
    query_map(connection, sql, bound, |row| read_run(row))
}

#[async_trait]
impl RunStore for SqliteStore {
    async fn create_run(
        &self,
        run: Run,
        key: Option<IdempotencyKey>,
        entries: Vec<JournalRecord>,
        undelivered: Option<UndeliveredRequest>,
    ) -> Result<CreateRunResult, StoreError> {
        let fingerprint = key.as_ref().map(|key| key.fingerprint.clone());
        let mut row = RunRow::new(run, key, entries)?;
        row.undelivered = undelivered;
        let Some((body, used_for)) = self.write(move |writer| create_run(writer, &row)).await?
        else {
            return Ok(CreateRunResult::New);
        };
        let run = decode_run(&body)?;
        Ok(match Some(used_for) == fingerprint {
            true => CreateRunResult::Replayed(Box::new(run)),
            false => CreateRunResult::Mismatch(run.id),
        })
    }

    async fn save_run(
        &self,
        run: Run,
        entries: Vec<JournalRecord>,
    ) -> Result<SaveResult, StoreError> {
        let row = RunRow::new(run, None, entries)?;
        self.write(move |writer| save_run(writer, &row)).await
    }

    async fn run(&self, project: &str, run_id: &str) -> Result<Option<Run>, StoreError> {
        let (project, run_id) = (project.to_owned(), run_id.to_owned());
        self.read(move |connection| {
            let sql = "SELECT body FROM loops WHERE project = ?1 AND run_id = ?2";
            Ok(query_map(connection, sql, params![project, run_id], |row| read_run(row))?.pop())
        })
        .await
    }

    async fn list_runs(&self, filter: RunFilter) -> Result<Vec<Run>, StoreError> {
        self.read(move |connection| list_runs(connection, &filter)).await
    }

    async fn list_open_runs(
        &self,
        after: Option<(String, String)>,
        limit: usize,
    ) -> Result<Vec<Run>, StoreError> {
        self.read(move |connection| {
            let (project, run_id) = after.unwrap_or_default();
            let sql = "SELECT body FROM loops WHERE ended_ms IS NULL \
                       AND (project, run_id) > (?1, ?2) ORDER BY project, run_id LIMIT ?3";
            query_map(connection, sql, params![project, run_id, limit as i64], |row| read_run(row))
        })
        .await
    }

    async fn journal(&self, project: &str, run_id: &str) -> Result<Vec<JournalEntry>, StoreError> {
        let (project, run_id) = (project.to_owned(), run_id.to_owned());
        self.read(move |connection| {
            list_journal_entries(connection, &project, &run_id, 0, usize::MAX)
        })
        .await
    }

    async fn run_events(
        &self,
        project: &str,
        run_id: &str,
        after: u64,
        limit: usize,
    ) -> Result<Vec<RunEvent>, StoreError> {
        let (project, run_id) = (project.to_owned(), run_id.to_owned());
        self.read(move |connection| {
            let entries = list_journal_entries(connection, &project, &run_id, after, limit)?;
            let scope = EventScope::Run { project, run_id };
            let events = events::list_events(connection, &scope, after, limit)?;
            let mut all: Vec<RunEvent> = entries.into_iter().map(RunEvent::Run).collect();
            all.extend(events.into_iter().map(RunEvent::Call));
            all.sort_by_key(RunEvent::number);
            all.truncate(limit);
            Ok(all)
        })
        .await
    }
}
