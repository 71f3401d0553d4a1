//! The SQL of calls. Inserts and updates of calls are pipelined.

mod approvals;
mod usage;
use approvals::insert_approval;
use futures::StreamExt;
use tokio::sync::oneshot;
use toolcrib::domain::call::{Call, Status};
use toolcrib::domain::directory::AuditEntry;
use toolcrib::domain::id::CallId;
use toolcrib::ports::store::undelivered::UndeliveredRequest;
use toolcrib::ports::store::{
    CallFilter, CreateCallResult, IdempotencyKey, OpenCallRow, PurgeResult, SaveResult, StoreError,
};

use super::change::{Change, ChangeFuture, WriterConnection};
use super::directory::audit::insert_audit_entry;
use super::writer_lease::SequenceCounters;
use super::{deliveries, limit_param};
use crate::postgres::session::{Session, SessionError, SqlParams};
use crate::postgres::undelivered::insert_undelivered;
use crate::row::{ApprovalRow, CALL_COLUMNS, CallColumn, CallRow, EventRow, RowReader, read_call};

/// The events of one call as columns, for one statement.
#[derive(Default)]
pub(super) struct EventColumns {
    numbers: Vec<i64>,
    kinds: Vec<&'static str>,
    times: Vec<i64>,
    attempts: Vec<i64>,
    data: Vec<String>,
}

impl EventColumns {
    pub(super) fn new(records: Vec<EventRow>) -> Self {
        let mut all = Self::default();
        for record in records {
            all.kinds.push(record.kind);
            all.times.push(record.at_ms);
            all.attempts.push(i64::from(record.attempt));
            all.data.push(record.data);
        }
        all
    }

    pub(super) fn assign_numbers(&mut self, numbers: &mut SequenceCounters) {
        let first = numbers.last_event + 1;
        numbers.last_event += self.kinds.len() as i64;
        self.numbers = (first..=numbers.last_event).collect();
    }
}

/// The insert of a new call.
pub(super) struct CallInsert {
    pub(super) row: Box<CallRow>,
    pub(super) records: EventColumns,
    pub(super) key: Option<IdempotencyKey>,
    pub(super) undelivered: Option<UndeliveredRequest>,
    pub(super) approval: Option<(ApprovalRow, AuditEntry)>,
    pub(super) reply: oneshot::Sender<Result<CreateCallResult, StoreError>>,
    pub(super) position: i64,
    /// Set when the idempotency key is already in use; `existing` then holds the call it created.
    pub(super) is_key_taken: bool,
    pub(super) existing: Option<CreateCallResult>,
}

const INSERT_CALL_SQL: &str = "WITH made AS (INSERT INTO tool_calls (place, tool_call_id, \
     project, run_id, tool_name, executor, source, status, hold, created_ms, created_at, \
     deadline_ms, started_ms, completed_ms, completed_at, version, background, args, result, \
     error, envelope, state) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, \
     to_timestamp($10::bigint::float8 / 1000), $11, $12, $13, \
     to_timestamp($13::bigint::float8 / 1000), $14, $15, $16, $17, $18, $19, $20)) \
     INSERT INTO events (number, place, project, kind, at_ms, attempt, data) \
     SELECT e.n, $1, $3, e.k, e.a, e.t, e.d FROM unnest($21::bigint[], $22::text[], \
     $23::bigint[], $24::bigint[], $25::text[]) AS e (n, k, a, t, d)";

impl CallInsert {
    async fn insert(&mut self, session: &Session) -> Result<(), SessionError> {
        let call = &self.row.call;
        if let Some(key) = &self.key {
            let sql = "INSERT INTO idempotency_keys VALUES ($1, $2, $3, $4, $5) \
                       ON CONFLICT DO NOTHING";
            let params: SqlParams<'_> =
                &[&call.project, &key.agent, &key.key, &key.fingerprint, &self.position];
            self.is_key_taken = session.execute(sql, params).await? == 0;
            if self.is_key_taken {
                return Ok(());
            }
        }
        insert_call(session, &self.row, &self.records, self.position).await?;
        if let Some(request) = &self.undelivered {
            insert_undelivered(session, request).await?;
        }
        if let Some((approval, audit)) = &self.approval {
            insert_approval(session, approval).await?;
            insert_audit_entry(session, audit).await?;
        }
        deliveries::insert_delivery(session, call, self.position).await
    }
}

/// Inserts a new call with its events.
pub(super) async fn insert_call(
    session: &Session,
    row: &CallRow,
    records: &EventColumns,
    position: i64,
) -> Result<(), SessionError> {
    let call = &row.call;
    let params: SqlParams<'_> = &[
        &position,
        &call.id.as_str(),
        &call.project,
        &call.run_id,
        &call.tool_name,
        &call.target.executor.as_str(),
        &call.target.executor.source(),
        &call.status.as_str(),
        &row.hold,
        &(call.created_ms as i64),
        &(call.deadline_ms as i64),
        &call.started_ms.map(|ms| ms as i64),
        &call.completed_ms.map(|ms| ms as i64),
        &(call.version as i64),
        &call.origin.background,
        &row.args.text(),
        &row.result.as_ref().map(|result| result.text()),
        &row.error,
        &row.envelope,
        &row.state,
        &records.numbers,
        &records.kinds,
        &records.times,
        &records.attempts,
        &records.data,
    ];
    session.execute(INSERT_CALL_SQL, params).await.map(|_| ())
}

impl Change for CallInsert {
    fn assign_numbers(&mut self, numbers: &mut SequenceCounters) {
        numbers.last_position += 1;
        self.position = numbers.last_position;
        self.records.assign_numbers(numbers);
        (self.is_key_taken, self.existing) = (false, None);
    }

    fn start_pipelined<'a>(
        &'a mut self,
        writer: &'a WriterConnection,
    ) -> Option<ChangeFuture<'a, ()>> {
        Some(Box::pin(async move {
            writer.require_lease()?;
            self.insert(&writer.session).await
        }))
    }

    fn run_alone<'a>(
        &'a mut self,
        writer: &'a mut WriterConnection,
    ) -> Option<ChangeFuture<'a, ()>> {
        let key = self.key.as_ref().filter(|_| self.is_key_taken)?;
        let (existing, project) = (&mut self.existing, &self.row.call.project);
        Some(Box::pin(async move {
            *existing = find_by_idempotency_key(&writer.session, project, key).await?;
            Ok(())
        }))
    }

    fn reply(self: Box<Self>, committed: Result<(), StoreError>) {
        let existing = self.existing.unwrap_or(CreateCallResult::New);
        let _ = self.reply.send(committed.map(|()| existing));
    }
}

/// The update of a stored call, with its new events.
pub(super) struct CallUpdate {
    pub(super) row: Box<CallRow>,
    pub(super) records: EventColumns,
    pub(super) reply: oneshot::Sender<Result<SaveResult, StoreError>>,
    pub(super) saved: bool,
}

const UPDATE_CALL_SQL: &str = "WITH saved AS (UPDATE tool_calls SET executor = $3, source = $17, \
     status = $4, hold = $5, started_ms = $6, completed_ms = $7, \
     completed_at = to_timestamp($7::bigint::float8 / 1000), version = $8, result = $9, \
     error = $10, state = $11, deadline_ms = $18 \
     WHERE project = $1 AND tool_call_id = $2 AND version = $8::bigint - 1 RETURNING place), \
     noted AS (INSERT INTO events (number, place, project, kind, at_ms, attempt, data) \
     SELECT e.n, saved.place, $1, e.k, e.a, e.t, e.d FROM saved, unnest($12::bigint[], \
     $13::text[], $14::bigint[], $15::bigint[], $16::text[]) AS e (n, k, a, t, d))";
const MARK_DELIVERY_DUE_SQL: &str = ", due AS (UPDATE deliveries SET status = 'pending', due_ms = $7, \
     version = deliveries.version + 1 FROM saved WHERE deliveries.place = saved.place \
     AND deliveries.status = 'waiting' AND $7 IS NOT NULL)";

/// Replaces a call whose stored version is exactly one lower, with its new events. Returns false
/// if it is not.
pub(super) async fn update_call(
    session: &Session,
    row: &CallRow,
    records: &EventColumns,
) -> Result<bool, SessionError> {
    let call = &row.call;
    let due = if call.origin.callback_url.is_some() { MARK_DELIVERY_DUE_SQL } else { "" };
    let sql = format!("{UPDATE_CALL_SQL}{due} SELECT place FROM saved");
    let params: SqlParams<'_> = &[
        &call.project,
        &call.id.as_str(),
        &call.target.executor.as_str(),
        &call.status.as_str(),
        &row.hold,
        &call.started_ms.map(|ms| ms as i64),
        &call.completed_ms.map(|ms| ms as i64),
        &(call.version as i64),
        &row.result.as_ref().map(|result| result.text()),
        &row.error,
        &row.state,
        &records.numbers,
        &records.kinds,
        &records.times,
        &records.attempts,
        &records.data,
        &call.target.executor.source(),
        &(call.deadline_ms as i64),
    ];
    Ok(session.query_first(&sql, params).await?.is_some())
}

impl Change for CallUpdate {
    fn assign_numbers(&mut self, numbers: &mut SequenceCounters) {
        self.records.assign_numbers(numbers);
    }

    fn start_pipelined<'a>(
        &'a mut self,
        writer: &'a WriterConnection,
    ) -> Option<ChangeFuture<'a, ()>> {
        Some(Box::pin(async move {
            writer.require_lease()?;
            self.saved = update_call(&writer.session, &self.row, &self.records).await?;
            Ok(())
        }))
    }

    fn run_alone<'a>(&'a mut self, _: &'a mut WriterConnection) -> Option<ChangeFuture<'a, ()>> {
        None
    }

    fn reply(self: Box<Self>, committed: Result<(), StoreError>) {
        let saved = if self.saved { SaveResult::Saved } else { SaveResult::Conflict };
        let _ = self.reply.send(committed.map(|()| saved));
    }
}

/// More events of a stored call.
pub(super) struct EventInsert {
    pub(super) project: String,
    pub(super) id: CallId,
    pub(super) records: EventColumns,
    pub(super) reply: oneshot::Sender<Result<(), StoreError>>,
}

impl Change for EventInsert {
    fn assign_numbers(&mut self, numbers: &mut SequenceCounters) {
        self.records.assign_numbers(numbers);
    }

    fn start_pipelined<'a>(
        &'a mut self,
        writer: &'a WriterConnection,
    ) -> Option<ChangeFuture<'a, ()>> {
        let sql = "INSERT INTO events (number, place, project, kind, at_ms, attempt, data) \
                   SELECT e.n, c.place, $1, e.k, e.a, e.t, e.d FROM tool_calls c, \
                   unnest($3::bigint[], $4::text[], $5::bigint[], $6::bigint[], $7::text[]) \
                   AS e (n, k, a, t, d) WHERE c.project = $1 AND c.tool_call_id = $2";
        Some(Box::pin(async move {
            writer.require_lease()?;
            let (id, records) = (self.id.as_str(), &self.records);
            let params: SqlParams<'_> = &[
                &self.project,
                &id,
                &records.numbers,
                &records.kinds,
                &records.times,
                &records.attempts,
                &records.data,
            ];
            writer.session.execute(sql, params).await?;
            Ok(())
        }))
    }

    fn run_alone<'a>(&'a mut self, _: &'a mut WriterConnection) -> Option<ChangeFuture<'a, ()>> {
        None
    }

    fn reply(self: Box<Self>, committed: Result<(), StoreError>) {
        let _ = self.reply.send(committed);
    }
}

/// Returns the call that was created with this idempotency key, if there is one.
pub(super) async fn find_by_idempotency_key(
    session: &Session,
    project: &str,
    key: &IdempotencyKey,
) -> Result<Option<CreateCallResult>, SessionError> {
    let sql = format!(
        "SELECT {CALL_COLUMNS}, fingerprint FROM tool_calls JOIN \
         (SELECT fingerprint, place AS at FROM idempotency_keys \
         WHERE project = $1 AND agent = $2 AND key = $3) k ON k.at = tool_calls.place"
    );
    let found = session.query_first(&sql, &[&project, &key.agent, &key.key]).await?;
    let Some(row) = found else { return Ok(None) };
    let (_, call) = read_call(&row)?;
    if row.text(CallColumn::COUNT)? != key.fingerprint {
        return Ok(Some(CreateCallResult::Mismatch(call.id)));
    }
    Ok(Some(CreateCallResult::Replayed(Box::new(call))))
}

pub(super) async fn find_call(
    session: &Session,
    project: &str,
    id: &CallId,
) -> Result<Option<Call>, SessionError> {
    let sql =
        format!("SELECT {CALL_COLUMNS} FROM tool_calls WHERE project = $1 AND tool_call_id = $2");
    let found = session.query_first(&sql, &[&project, &id.as_str()]).await?;
    Ok(found.map(|row| read_call(&row)).transpose()?.map(|(_, call)| call))
}

/// Lists a page of calls. The statement contains only the conditions that the filter sets, so that
/// PostgreSQL can choose an index for them.
pub(super) async fn list_calls(
    session: &Session,
    filter: &CallFilter,
) -> Result<Vec<Call>, SessionError> {
    let mut sql = format!("SELECT {CALL_COLUMNS} FROM tool_calls WHERE project = $1");
    // Every id sorts before this.
    let before = filter.before.as_ref().map_or("u", CallId::as_str);
    // An id starts with the creation time of its call.
    let since_ms = filter.since_ms.unwrap_or(0);
    let floor = CallId::min_at(since_ms.min((1 << 48) - 1));
    let since = i64::try_from(since_ms).unwrap_or(i64::MAX);
    let limit = limit_param(filter.limit);
    sql.push_str(" AND tool_call_id < $2 AND tool_call_id >= $3 AND created_ms >= $4");
    let mut params: Vec<&(dyn tokio_postgres::types::ToSql + Sync)> =
        vec![&filter.project, &before];
    let floor = floor.as_str();
    params.extend([&floor as &(dyn tokio_postgres::types::ToSql + Sync), &since]);
    if let Some(run_id) = &filter.run_id {
        params.push(run_id);
        sql.push_str(&format!(" AND run_id = ${}", params.len()));
    }
    if let Some(tool_name) = &filter.tool_name {
        params.push(tool_name);
        sql.push_str(&format!(" AND tool_name = ${}", params.len()));
    }
    // The status is a literal, because PostgreSQL uses a partial index only if its condition is
    // known when it plans the query.
    if let Some(status) = filter.status {
        sql.push_str(&format!(" AND status = '{}'", status.as_str()));
        sql.push_str(match status {
            Status::Pending | Status::Running => " AND completed_ms IS NULL",
            Status::Succeeded => "",
            Status::Failed | Status::Timeout | Status::Canceled => " AND error IS NOT NULL",
        });
    }
    if filter.background {
        sql.push_str(" AND background");
    }
    params.push(&limit);
    sql.push_str(&format!(" ORDER BY tool_call_id DESC LIMIT ${}", params.len()));
    let mut rows = std::pin::pin!(session.query_stream(&sql, &params).await?);
    let (mut calls, mut bytes) = (Vec::new(), 0);
    while !filter.is_page_full(bytes) {
        let Some(row) = rows.next().await else { break };
        let call = read_call(&row?)?.1;
        bytes += call.estimated_bytes();
        calls.push(call);
    }
    Ok(calls)
}

pub(super) async fn list_open_calls(
    session: &Session,
    after: u64,
    limit: usize,
) -> Result<Vec<OpenCallRow>, SessionError> {
    let sql = format!(
        "SELECT {CALL_COLUMNS} FROM tool_calls WHERE completed_ms IS NULL AND place > $1 \
         ORDER BY place LIMIT $2"
    );
    let after = i64::try_from(after).unwrap_or(i64::MAX);
    let read = |row: &tokio_postgres::Row| {
        read_call(row).map(|(position, call)| OpenCallRow { position, call })
    };
    session.query_map(&sql, &[&after, &limit_param(limit)], read).await
}

/// Deletes calls that ended before this time, with everything that belongs to them, and old runs.
pub(super) async fn purge(
    writer: &mut WriterConnection,
    (before, limit): &(u64, usize),
) -> Result<PurgeResult, SessionError> {
    let session = &writer.session;
    let before = i64::try_from(*before).unwrap_or(i64::MAX);
    let limit = limit_param(*limit);
    let sql = "SELECT place FROM tool_calls WHERE completed_ms < $1 ORDER BY completed_ms LIMIT $2";
    let positions = session.query_map(sql, &[&before, &limit], |row| row.integer(0)).await?;
    let mut more = positions.len() as i64 == limit;
    if !positions.is_empty() {
        let sql = "DELETE FROM approvals a USING tool_calls c WHERE c.place = ANY($1) \
                   AND a.project = c.project AND a.tool_call_id = c.tool_call_id";
        session.execute(sql, &[&positions]).await?;
        for table in ["events", "idempotency_keys", "tries", "deliveries", "tool_calls"] {
            let sql = format!("DELETE FROM {table} WHERE place = ANY($1)");
            session.execute(&sql, &[&positions]).await?;
        }
    }
    for sql in [
        "DELETE FROM runs WHERE (project, run_id) IN (SELECT project, run_id FROM runs r \
         WHERE updated_ms < $1 AND NOT EXISTS (SELECT 1 FROM tool_calls c \
         WHERE c.project = r.project AND c.run_id = r.run_id) ORDER BY updated_ms LIMIT $2)",
        "WITH old AS (SELECT project, run_id FROM loops WHERE ended_ms < $1 \
         ORDER BY ended_ms LIMIT $2), entries AS (DELETE FROM loop_entries e USING old \
         WHERE e.project = old.project AND e.run_id = old.run_id), \
         tree AS (DELETE FROM run_tree t USING old \
         WHERE t.project = old.project AND t.run_id = old.run_id) \
         DELETE FROM loops USING old \
         WHERE loops.project = old.project AND loops.run_id = old.run_id",
        "DELETE FROM standing_approvals WHERE standing_id IN (SELECT standing_id \
         FROM standing_approvals WHERE expires_ms < $1 LIMIT $2)",
        "DELETE FROM card_boxes WHERE (project, box_id) IN (SELECT project, box_id \
         FROM card_boxes WHERE created_ms < $1 ORDER BY created_ms LIMIT $2)",
    ] {
        more |= session.execute(sql, &[&before, &limit]).await? == limit as u64;
    }
    Ok(PurgeResult { calls: positions.len(), has_more: more })
}
