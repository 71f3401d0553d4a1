//! Runs and their journals in PostgreSQL. Journal entries take their numbers from the same sequence
//! as call events, so a subscriber of a run sees both in commit order.

use async_trait::async_trait;
use toolcrib::run::{Entry, Happened, Noted, Run};
use toolcrib::store::loops::{LoopStore, RunCreated, RunFilter};
use toolcrib::store::{EventScope, IdempotencyKey, Saved, StoreError};

use super::link::{Bound, Broke, Session};
use super::writer::Desk;
use super::{PostgresStore, history, limited};
use crate::row::{Fields, LoopRow, read_entry, read_run, run_of};

/// Stores a new run. If its idempotency key already created one, returns the body and the
/// fingerprint of that run instead.
async fn create(desk: &mut Desk, row: &LoopRow) -> Result<Option<(String, String)>, Broke> {
    let run = &row.run;
    if let Some(key) = &row.key {
        let sql = "SELECT body, fingerprint FROM loops \
                   WHERE project = $1 AND agent = $2 AND key = $3";
        let known = desk.session.row(sql, &[&run.project, &key.agent, &key.key]).await?;
        if let Some(known) = known {
            return Ok(Some((known.text(0)?, known.text(1)?)));
        }
    }
    let key = row.key.as_ref();
    let sql = "INSERT INTO loops VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)";
    let bound: Bound<'_> = &[
        &run.project,
        &run.id,
        &run.status.as_str(),
        &run.model,
        &(run.created_ms as i64),
        &run.ended_ms.map(|ms| ms as i64),
        &(run.version as i64),
        &key.map_or(run.asker.agent.as_str(), |key| key.agent.as_str()),
        &key.map(|key| key.key.as_str()),
        &key.map(|key| key.fingerprint.as_str()),
        &row.body,
    ];
    desk.session.execute(sql, bound).await?;
    note(desk, row).await?;
    Ok(None)
}

async fn save(desk: &mut Desk, row: &LoopRow) -> Result<Saved, Broke> {
    let run = &row.run;
    let sql = "UPDATE loops SET status = $1, ended_ms = $2, version = $3, body = $4 \
               WHERE project = $5 AND run_id = $6 AND version = $3::bigint - 1";
    let bound: Bound<'_> = &[
        &run.status.as_str(),
        &run.ended_ms.map(|ms| ms as i64),
        &(run.version as i64),
        &row.body,
        &run.project,
        &run.id,
    ];
    if desk.session.execute(sql, bound).await? == 0 {
        return Ok(Saved::Stale);
    }
    note(desk, row).await?;
    Ok(Saved::Yes)
}

async fn note(desk: &mut Desk, row: &LoopRow) -> Result<(), Broke> {
    desk.may_number()?;
    for entry in &row.entries {
        desk.numbers.event += 1;
        let sql = "INSERT INTO loop_entries VALUES ($1, $2, $3, $4, $5, $6, $7)";
        let bound: Bound<'_> = &[
            &desk.numbers.event,
            &row.run.project,
            &row.run.id,
            &entry.kind,
            &entry.at_ms,
            &entry.data,
            &entry.messages,
        ];
        desk.session.execute(sql, bound).await?;
    }
    Ok(())
}

async fn entries(
    session: &Session,
    project: &str,
    run_id: &str,
    after: u64,
    limit: usize,
) -> Result<Vec<Noted>, Broke> {
    let sql = "SELECT number, run_id, kind, at_ms, data, messages FROM loop_entries \
               WHERE project = $1 AND run_id = $2 AND number > $3 ORDER BY number LIMIT $4";
    let after = i64::try_from(after).unwrap_or(i64::MAX);
    let bound: Bound<'_> = &[&project, &run_id, &after, &limited(limit)];
    session.collect(sql, bound, read_entry).await
}

async fn page(session: &Session, filter: &RunFilter) -> Result<Vec<Run>, Broke> {
    let sql = "SELECT body FROM loops WHERE project = $1 AND run_id < $2 \
               AND ($3::text IS NULL OR status = $3) AND ($4::text IS NULL OR model = $4) \
               AND created_ms >= $5 ORDER BY run_id DESC LIMIT $6";
    // Every id sorts before this.
    let before = filter.before.as_deref().unwrap_or("s");
    let since_ms = i64::try_from(filter.since_ms.unwrap_or(0)).unwrap_or(i64::MAX);
    let status = filter.status.map(|status| status.as_str());
    let limit = limited(filter.limit);
    let bound: Bound<'_> = &[&filter.project, &before, &status, &filter.model, &since_ms, &limit];
    session.collect(sql, bound, read_run).await
}

#[async_trait]
impl LoopStore for PostgresStore {
    async fn create_loop(
        &self,
        run: Run,
        key: Option<IdempotencyKey>,
        entries: Vec<Entry>,
    ) -> Result<RunCreated, StoreError> {
        let fingerprint = key.as_ref().map(|key| key.fingerprint.clone());
        let row = LoopRow::new(run, key, entries)?;
        let known = self.write(*row, |desk, row| Box::pin(create(desk, row))).await?;
        let Some((body, used_for)) = known else { return Ok(RunCreated::New) };
        let run = run_of(&body)?;
        Ok(match Some(used_for) == fingerprint {
            true => RunCreated::Replayed(Box::new(run)),
            false => RunCreated::Mismatch(run.id),
        })
    }

    async fn save_loop(&self, run: Run, entries: Vec<Entry>) -> Result<Saved, StoreError> {
        let row = LoopRow::new(run, None, entries)?;
        self.write(*row, |desk, row| Box::pin(save(desk, row))).await
    }

    async fn loop_run(&self, project: &str, run_id: &str) -> Result<Option<Run>, StoreError> {
        let sql = "SELECT body FROM loops WHERE project = $1 AND run_id = $2";
        let lent = self.pool.lend().await?;
        let found = lent.collect(sql, &[&project, &run_id], read_run).await;
        Ok(found.map_err(Broke::into_error)?.pop())
    }

    async fn loop_runs(&self, filter: RunFilter) -> Result<Vec<Run>, StoreError> {
        let lent = self.pool.lend().await?;
        page(&lent, &filter).await.map_err(Broke::into_error)
    }

    async fn open_loops(
        &self,
        after: Option<(String, String)>,
        limit: usize,
    ) -> Result<Vec<Run>, StoreError> {
        let (project, run_id) = after.unwrap_or_default();
        let sql = "SELECT body FROM loops WHERE ended_ms IS NULL \
                   AND (project, run_id) > ($1, $2) ORDER BY project, run_id LIMIT $3";
        let lent = self.pool.lend().await?;
        let bound: Bound<'_> = &[&project, &run_id, &limited(limit)];
        lent.collect(sql, bound, read_run).await.map_err(Broke::into_error)
    }

    async fn journal(&self, project: &str, run_id: &str) -> Result<Vec<Noted>, StoreError> {
        let lent = self.pool.lend().await?;
        entries(&lent, project, run_id, 0, usize::MAX).await.map_err(Broke::into_error)
    }

    async fn happened(
        &self,
        project: &str,
        run_id: &str,
        after: u64,
        limit: usize,
    ) -> Result<Vec<Happened>, StoreError> {
        let mut lent = self.pool.lend().await?;
        let both = async {
            // Both reads use one snapshot: otherwise an entry committed between them could be
            // skipped.
            lent.begin().await?;
            let noted = entries(&lent, project, run_id, after, limit).await?;
            let (project, run_id) = (project.to_owned(), run_id.to_owned());
            let scope = EventScope::Run { project, run_id };
            let events = history::events(&lent, &scope, after, limit).await?;
            lent.end().await?;
            Ok::<_, Broke>((noted, events))
        };
        let (noted, events) = both.await.map_err(Broke::into_error)?;
        let mut all: Vec<Happened> = noted.into_iter().map(Happened::Run).collect();
        all.extend(events.into_iter().map(Happened::Call));
        all.sort_by_key(Happened::number);
        all.truncate(limit);
        Ok(all)
    }
}
