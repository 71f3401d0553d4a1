//! Runs and their journals in PostgreSQL. Journal entries take their numbers from the same sequence
//! as call events, so a subscriber of a run sees both in commit order.

use async_trait::async_trait;
use toolcrib::domain::run::{JournalEntry, JournalRecord, Run, RunEvent};
use toolcrib::ports::store::runs::{CreateRunResult, RunFilter, RunStore};
use toolcrib::ports::store::undelivered::UndeliveredRequest;
use toolcrib::ports::store::{EventScope, IdempotencyKey, SaveResult, StoreError};

use super::change::WriterConnection;
use super::{PostgresStore, limit_param};
use crate::postgres::events;
use crate::postgres::session::{Session, SessionError, SqlParams};
use crate::postgres::undelivered::insert_undelivered;
use crate::row::{RowReader, RunRow, decode_run, read_journal_entry, read_run};

/// Stores a new run. If its idempotency key already created one, returns the body and the
/// fingerprint of that run instead.
async fn create_run(
    writer: &mut WriterConnection,
    row: &RunRow,
) -> Result<Option<(String, String)>, SessionError> {
    let run = &row.run;
    if let Some(key) = &row.key {
        let sql = "SELECT body, fingerprint FROM loops \
                   WHERE project = $1 AND agent = $2 AND key = $3";
        let existing =
            writer.session.query_first(sql, &[&run.project, &key.agent, &key.key]).await?;
        if let Some(existing) = existing {
            return Ok(Some((existing.text(0)?, existing.text(1)?)));
        }
    }
    let key = row.key.as_ref();
    let sql = "INSERT INTO loops VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)";
    let params: SqlParams<'_> = &[
        &run.project,
        &run.id,
        &run.status.as_str(),
        &run.model,
        &(run.created_ms as i64),
        &run.ended_ms.map(|ms| ms as i64),
        &(run.version as i64),
        &key.map_or(run.owner.agent.as_str(), |key| key.agent.as_str()),
        &key.map(|key| key.key.as_str()),
        &key.map(|key| key.fingerprint.as_str()),
        &row.body,
    ];
    writer.session.execute(sql, params).await?;
    if let Some(lineage) = &run.lineage {
        let sql = "INSERT INTO run_tree VALUES ($1, $2, $3)";
        writer.session.execute(sql, &[&run.project, &lineage.root_run_id, &run.id]).await?;
    }
    append_journal(writer, row).await?;
    if let Some(request) = &row.undelivered {
        insert_undelivered(&writer.session, request).await?;
    }
    Ok(None)
}

async fn save_run(writer: &mut WriterConnection, row: &RunRow) -> Result<SaveResult, SessionError> {
    let run = &row.run;
    let sql = "UPDATE loops SET status = $1, ended_ms = $2, version = $3, body = $4 \
               WHERE project = $5 AND run_id = $6 AND version = $3::bigint - 1";
    let params: SqlParams<'_> = &[
        &run.status.as_str(),
        &run.ended_ms.map(|ms| ms as i64),
        &(run.version as i64),
        &row.body,
        &run.project,
        &run.id,
    ];
    if writer.session.execute(sql, params).await? == 0 {
        return Ok(SaveResult::Conflict);
    }
    append_journal(writer, row).await?;
    Ok(SaveResult::Saved)
}

async fn append_journal(writer: &mut WriterConnection, row: &RunRow) -> Result<(), SessionError> {
    writer.require_lease()?;
    for entry in &row.entries {
        writer.counters.last_event += 1;
        let sql = "INSERT INTO loop_entries VALUES ($1, $2, $3, $4, $5, $6, $7)";
        let params: SqlParams<'_> = &[
            &writer.counters.last_event,
            &row.run.project,
            &row.run.id,
            &entry.kind,
            &entry.at_ms,
            &entry.data,
            &entry.messages,
        ];
        writer.session.execute(sql, params).await?;
    }
    Ok(())
}

async fn list_journal_entries(
    session: &Session,
    project: &str,
    run_id: &str,
    after: u64,
    limit: usize,
) -> Result<Vec<JournalEntry>, SessionError> {
    let sql = "SELECT number, run_id, kind, at_ms, data, messages FROM loop_entries \
               WHERE project = $1 AND run_id = $2 AND number > $3 ORDER BY number LIMIT $4";
    let after = i64::try_from(after).unwrap_or(i64::MAX);
    let params: SqlParams<'_> = &[&project, &run_id, &after, &limit_param(limit)];
    session.query_map(sql, params, read_journal_entry).await
}

async fn list_runs(session: &Session, filter: &RunFilter) -> Result<Vec<Run>, SessionError> {
    let sql = "SELECT body FROM loops WHERE project = $1 AND run_id < $2 \
               AND ($3::text IS NULL OR status = $3) AND ($4::text IS NULL OR model = $4) \
               AND created_ms >= $5 ORDER BY run_id DESC LIMIT $6";
    // Every id sorts before this: callers name the runs of their conversations as they like.
    let before = filter.before.as_deref().unwrap_or("\u{10FFFF}");
    let since_ms = i64::try_from(filter.since_ms.unwrap_or(0)).unwrap_or(i64::MAX);
    let status = filter.status.map(|status| status.as_str());
    let limit = limit_param(filter.limit);
    let params: SqlParams<'_> =
        &[&filter.project, &before, &status, &filter.model, &since_ms, &limit];
    session.query_map(sql, params, read_run).await
}

#[async_trait]
impl RunStore for PostgresStore {
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
        let existing = self.write(*row, |writer, row| Box::pin(create_run(writer, row))).await?;
        let Some((body, used_for)) = existing else { return Ok(CreateRunResult::New) };
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
        self.write(*row, |writer, row| Box::pin(save_run(writer, row))).await
    }

    async fn run(&self, project: &str, run_id: &str) -> Result<Option<Run>, StoreError> {
        let sql = "SELECT body FROM loops WHERE project = $1 AND run_id = $2";
        let session = self.pool.acquire().await?;
        let found = session.query_map(sql, &[&project, &run_id], read_run).await;
        Ok(found.map_err(SessionError::into_store_error)?.pop())
    }

    async fn list_runs(&self, filter: RunFilter) -> Result<Vec<Run>, StoreError> {
        let session = self.pool.acquire().await?;
        list_runs(&session, &filter).await.map_err(SessionError::into_store_error)
    }

    async fn list_open_runs(
        &self,
        after: Option<(String, String)>,
        limit: usize,
    ) -> Result<Vec<Run>, StoreError> {
        let (project, run_id) = after.unwrap_or_default();
        let sql = "SELECT body FROM loops WHERE ended_ms IS NULL \
                   AND (project, run_id) > ($1, $2) ORDER BY project, run_id LIMIT $3";
        let session = self.pool.acquire().await?;
        let params: SqlParams<'_> = &[&project, &run_id, &limit_param(limit)];
        session.query_map(sql, params, read_run).await.map_err(SessionError::into_store_error)
    }

    async fn journal(&self, project: &str, run_id: &str) -> Result<Vec<JournalEntry>, StoreError> {
        let session = self.pool.acquire().await?;
        list_journal_entries(&session, project, run_id, 0, usize::MAX)
            .await
            .map_err(SessionError::into_store_error)
    }

    async fn run_events(
        &self,
        project: &str,
        run_id: &str,
        after: u64,
        limit: usize,
    ) -> Result<Vec<RunEvent>, StoreError> {
        let mut session = self.pool.acquire().await?;
        let both = async {
            // Both reads use one snapshot: otherwise an entry committed between them could be
            // skipped.
            session.begin_snapshot().await?;
            let entries = list_journal_entries(&session, project, run_id, after, limit).await?;
            let (project, run_id) = (project.to_owned(), run_id.to_owned());
            let scope = EventScope::Run { project, run_id };
            let events = events::list_events(&session, &scope, after, limit).await?;
            session.end_snapshot().await?;
            Ok::<_, SessionError>((entries, events))
        };
        let (entries, events) = both.await.map_err(SessionError::into_store_error)?;
        let mut all: Vec<RunEvent> = entries.into_iter().map(RunEvent::Run).collect();
        all.extend(events.into_iter().map(RunEvent::Call));
        all.sort_by_key(RunEvent::number);
        all.truncate(limit);
        Ok(all)
    }
}
