//! Approvals in PostgreSQL. The statements of one commit are pipelined: five hundred decisions take
//! a few round trips.

use async_trait::async_trait;
use futures::future::try_join_all;
use tokio::sync::oneshot;
use tokio_postgres::types::ToSql;
use toolcrib::domain::call::approval::{Approval, ApprovalWebhook, StandingApproval};
use toolcrib::domain::directory::AuditEntry;
use toolcrib::domain::id::CallId;
use toolcrib::ports::store::approvals::{ApprovalCommit, ApprovalFilter, ApprovalStore};
use toolcrib::ports::store::{IdempotencyKey, SaveResult, StoreError};

use super::{EventColumns, insert_call, update_call};
use crate::postgres::change::{Change, ChangeFuture, WriterConnection};
use crate::postgres::directory::audit::insert_audit_entry;
use crate::postgres::session::{Session, SessionError, SqlParams};
use crate::postgres::writer_lease::SequenceCounters;
use crate::postgres::{PostgresStore, await_reply, deliveries, limit_param};
use crate::row::{
    APPROVAL_COLUMNS as COLUMNS, ApprovalChangeRow, ApprovalRow, CallRow, RowReader, decode,
    encode, encode_events, read_approval,
};

/// A commit in the form that the writer binds.
struct PipelinedCommit {
    row: CallRow,
    records: EventColumns,
    changes: Vec<ApprovalChangeRow>,
    replacement: Option<(CallRow, EventColumns, i64)>,
    standing: Option<(StandingApproval, String)>,
    audit: Vec<AuditEntry>,
}

impl PipelinedCommit {
    fn new(commit: ApprovalCommit) -> Result<Self, StoreError> {
        let ApprovalCommit { call, records, changes, replacement, standing, audit } = commit;
        let replacement = replacement.map(|new| {
            let records = EventColumns::new(encode_events(new.records)?);
            Ok::<_, StoreError>((CallRow::for_insert(new.call)?, records, 0))
        });
        let standing = standing.map(|standing| encode(&standing).map(|body| (standing, body)));
        Ok(Self {
            row: CallRow::for_update(call)?,
            records: EventColumns::new(encode_events(records)?),
            changes: changes
                .into_iter()
                .map(ApprovalChangeRow::new)
                .collect::<Result<_, StoreError>>()?,
            replacement: replacement.transpose()?,
            standing: standing.transpose()?,
            audit,
        })
    }

    /// Writes everything that depends on the call.
    async fn write_rest(&self, session: &Session) -> Result<(), SessionError> {
        try_join_all(self.changes.iter().map(|change| apply_change(session, change))).await?;
        if let Some((row, records, position)) = &self.replacement {
            insert_call(session, row, records, *position).await?;
            deliveries::insert_delivery(session, &row.call, *position).await?;
        }
        if let Some((standing, body)) = &self.standing {
            put_standing(session, standing, body).await?;
        }
        Ok(())
    }
}

/// Several commits, made in one transaction.
struct ApprovalCommits {
    rows: Vec<PipelinedCommit>,
    results: Vec<SaveResult>,
    reply: oneshot::Sender<Result<Vec<SaveResult>, StoreError>>,
}

impl ApprovalCommits {
    async fn write(&mut self, session: &Session) -> Result<(), SessionError> {
        let updates = self.rows.iter().map(|row| update_call(session, &row.row, &row.records));
        let saved = try_join_all(updates).await?;
        let stored = || self.rows.iter().zip(&saved).filter(|(_, saved)| **saved);
        try_join_all(stored().map(|(row, _)| row.write_rest(session))).await?;
        let audit = stored().flat_map(|(row, _)| &row.audit);
        try_join_all(audit.map(|entry| insert_audit_entry(session, entry))).await?;
        let result = |saved| if saved { SaveResult::Saved } else { SaveResult::Conflict };
        self.results = saved.into_iter().map(result).collect();
        Ok(())
    }
}

impl Change for ApprovalCommits {
    fn assign_numbers(&mut self, numbers: &mut SequenceCounters) {
        for row in &mut self.rows {
            row.records.assign_numbers(numbers);
            if let Some((_, records, position)) = &mut row.replacement {
                numbers.last_position += 1;
                *position = numbers.last_position;
                records.assign_numbers(numbers);
            }
        }
    }

    fn start_pipelined<'a>(&'a mut self, _: &'a WriterConnection) -> Option<ChangeFuture<'a, ()>> {
        None
    }

    fn run_alone<'a>(
        &'a mut self,
        writer: &'a mut WriterConnection,
    ) -> Option<ChangeFuture<'a, ()>> {
        Some(Box::pin(async move {
            writer.require_lease()?;
            self.write(&writer.session).await
        }))
    }

    fn reply(self: Box<Self>, committed: Result<(), StoreError>) {
        let results = self.results;
        let _ = self.reply.send(committed.map(|()| results));
    }
}

/// Inserts a new approval.
pub(super) async fn insert_approval(
    session: &Session,
    row: &ApprovalRow,
) -> Result<(), SessionError> {
    let approval = &row.approval;
    let sql = "INSERT INTO approvals (approval_id, project, tool_call_id, agent, tool_name, \
               status, created_ms, expires_ms, request, webhook_ms, webhook_tries) \
               VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)";
    let params: SqlParams<'_> = &[
        &approval.id,
        &approval.project,
        &approval.call_id.as_str(),
        &approval.request.requester.agent,
        &approval.request.tool,
        &approval.status.as_str(),
        &(approval.created_ms as i64),
        &(approval.expires_ms as i64),
        &row.request,
        &approval.webhook.due_ms.map(|ms| ms as i64),
        &i64::from(approval.webhook.tries),
    ];
    session.execute(sql, params).await.map(|_| ())
}

async fn apply_change(session: &Session, change: &ApprovalChangeRow) -> Result<(), SessionError> {
    let (id, status, decided_ms, decision) = match change {
        ApprovalChangeRow::Request(row) => return insert_approval(session, row).await,
        ApprovalChangeRow::End { id, status, decided_ms, decision } => {
            (id, status.as_str(), decided_ms, decision)
        }
    };
    let sql = "UPDATE approvals SET status = $2, decided_ms = coalesce(decided_ms, $3), \
               decision = coalesce(decision, $4) \
               WHERE approval_id = $1 AND (status = 'pending' OR $2 = 'superseded')";
    session.execute(sql, &[id, &status, decided_ms, decision]).await.map(|_| ())
}

async fn put_standing(
    session: &Session,
    standing: &StandingApproval,
    body: &str,
) -> Result<(), SessionError> {
    let sql = "INSERT INTO standing_approvals VALUES ($1, $2, $3, $4) ON CONFLICT (standing_id) \
               DO UPDATE SET expires_ms = excluded.expires_ms, body = excluded.body";
    let params: SqlParams<'_> =
        &[&standing.id, &standing.project, &(standing.expires_ms as i64), &body];
    session.execute(sql, params).await.map(|_| ())
}

async fn list(session: &Session, filter: &ApprovalFilter) -> Result<Vec<Approval>, SessionError> {
    let mut sql = format!("SELECT {COLUMNS} FROM approvals WHERE project = $1");
    let limit = limit_param(filter.limit);
    let mut params: Vec<&(dyn ToSql + Sync)> = vec![&filter.project];
    if let Some(status) = filter.status {
        // A literal, so that PostgreSQL can choose the partial index.
        sql.push_str(&format!(" AND status = '{}'", status.as_str()));
    }
    let texts = [
        ("agent =", &filter.agent),
        ("tool_name =", &filter.tool),
        ("approval_id <", &filter.before),
    ];
    for (condition, text) in texts {
        if let Some(text) = text {
            params.push(text);
            sql.push_str(&format!(" AND {condition} ${}", params.len()));
        }
    }
    params.push(&limit);
    sql.push_str(&format!(" ORDER BY approval_id DESC LIMIT ${}", params.len()));
    session.query_map(&sql, &params, read_approval).await
}

impl PostgresStore {
    async fn read_approvals(
        &self,
        condition: &str,
        params: SqlParams<'_>,
    ) -> Result<Vec<Approval>, StoreError> {
        let sql = format!("SELECT {COLUMNS} FROM approvals WHERE {condition}");
        let session = self.pool.acquire().await?;
        let found = session.query_map(&sql, params, read_approval).await;
        found.map_err(SessionError::into_store_error)
    }
}

#[async_trait]
impl ApprovalStore for PostgresStore {
    async fn commit_approvals(
        &self,
        commits: Vec<ApprovalCommit>,
    ) -> Result<Vec<SaveResult>, StoreError> {
        let rows = commits.into_iter().map(PipelinedCommit::new).collect::<Result<_, _>>()?;
        let (reply, answer) = oneshot::channel();
        self.writer.send(Box::new(ApprovalCommits { rows, results: Vec::new(), reply }))?;
        await_reply(answer).await
    }

    async fn add_idempotency_key(
        &self,
        project: &str,
        key: IdempotencyKey,
        call_id: &CallId,
    ) -> Result<bool, StoreError> {
        let input = (project.to_owned(), key, call_id.clone());
        self.write(input, |writer, (project, key, call_id)| {
            Box::pin(async move {
                let sql = "INSERT INTO idempotency_keys SELECT $1, $2, $3, $4, place \
                           FROM tool_calls WHERE project = $1 AND tool_call_id = $5 \
                           ON CONFLICT DO NOTHING";
                let params: SqlParams<'_> =
                    &[project, &key.agent, &key.key, &key.fingerprint, &call_id.as_str()];
                Ok(writer.session.execute(sql, params).await? > 0)
            })
        })
        .await
    }

    async fn approval(&self, project: &str, id: &str) -> Result<Option<Approval>, StoreError> {
        let condition = "approval_id = $1 AND project = $2";
        Ok(self.read_approvals(condition, &[&id, &project]).await?.pop())
    }

    async fn approvals_by_id(
        &self,
        project: &str,
        ids: Vec<String>,
    ) -> Result<Vec<Approval>, StoreError> {
        self.read_approvals("approval_id = ANY ($1::text[]) AND project = $2", &[&ids, &project])
            .await
    }

    async fn list_approvals(&self, filter: ApprovalFilter) -> Result<Vec<Approval>, StoreError> {
        let session = self.pool.acquire().await?;
        list(&session, &filter).await.map_err(SessionError::into_store_error)
    }

    async fn last_approved(
        &self,
        project: &str,
        tool: &str,
    ) -> Result<Option<Approval>, StoreError> {
        let condition = "project = $1 AND tool_name = $2 AND status = 'approved' \
                         ORDER BY decided_ms DESC LIMIT 1";
        Ok(self.read_approvals(condition, &[&project, &tool]).await?.pop())
    }

    async fn put_standing_approval(
        &self,
        standing: StandingApproval,
        audit: AuditEntry,
    ) -> Result<(), StoreError> {
        let body = encode(&standing)?;
        self.write((standing, body, audit), |writer, (standing, body, audit)| {
            Box::pin(async move {
                put_standing(&writer.session, standing, body).await?;
                insert_audit_entry(&writer.session, audit).await
            })
        })
        .await
    }

    async fn standing_approvals(&self, after_ms: u64) -> Result<Vec<StandingApproval>, StoreError> {
        let after_ms = i64::try_from(after_ms).unwrap_or(i64::MAX);
        let sql = "SELECT body FROM standing_approvals WHERE expires_ms > $1 ORDER BY standing_id";
        let session = self.pool.acquire().await?;
        let read = |row: &tokio_postgres::Row| decode(&row.text(0)?);
        let listed = session.query_map(sql, &[&after_ms], read).await;
        listed.map_err(SessionError::into_store_error)
    }

    async fn due_approval_webhooks(
        &self,
        now_ms: u64,
        limit: usize,
    ) -> Result<Vec<Approval>, StoreError> {
        let now_ms = i64::try_from(now_ms).unwrap_or(i64::MAX);
        let condition = "webhook_ms IS NOT NULL AND webhook_ms <= $1 ORDER BY webhook_ms LIMIT $2";
        self.read_approvals(condition, &[&now_ms, &limit_param(limit)]).await
    }

    async fn set_approval_webhook(
        &self,
        id: &str,
        webhook: ApprovalWebhook,
    ) -> Result<(), StoreError> {
        self.write((id.to_owned(), webhook), |writer, (id, webhook)| {
            Box::pin(async move {
                let sql = "UPDATE approvals SET webhook_ms = $2, webhook_tries = $3 \
                           WHERE approval_id = $1";
                let due_ms = webhook.due_ms.map(|ms| ms as i64);
                let tries = i64::from(webhook.tries);
                writer.session.execute(sql, &[id, &due_ms, &tries]).await.map(|_| ())
            })
        })
        .await
    }
}
