//! Approvals in SQLite.

use async_trait::async_trait;
use rusqlite::{Connection, ToSql, params};
use toolcrib::domain::call::approval::{
    Approval, ApprovalStatus, ApprovalWebhook, StandingApproval,
};
use toolcrib::domain::directory::AuditEntry;
use toolcrib::domain::id::CallId;
use toolcrib::ports::store::approvals::{ApprovalCommit, ApprovalFilter, ApprovalStore};
use toolcrib::ports::store::{IdempotencyKey, SaveResult, StoreError};

use super::save_call;
use crate::row::{
    APPROVAL_COLUMNS as COLUMNS, ApprovalChangeRow, ApprovalRow, CallRow, EventRow, decode, encode,
    encode_events, encode_new_call_events, read_approval,
};
use crate::sqlite::SqliteStore;
use crate::sqlite::directory::audit::insert_audit_entry;
use crate::sqlite::reader::query_map;
use crate::sqlite::writer::{NewCallRow, WriterConnection};

/// A commit in the form that the writer binds.
struct ApprovalCommitRow {
    row: CallRow,
    records: Vec<EventRow>,
    changes: Vec<ApprovalChangeRow>,
    /// Taken when the commit is applied.
    replacement: Option<NewCallRow>,
    standing: Option<(StandingApproval, String)>,
    audit: Vec<AuditEntry>,
}

impl ApprovalCommitRow {
    fn new(commit: ApprovalCommit) -> Result<Self, StoreError> {
        let ApprovalCommit { call, records, changes, replacement, standing, audit } = commit;
        let replacement = replacement.map(|new| {
            let records = encode_new_call_events(&new.call, new.records)?;
            Ok::<_, StoreError>(NewCallRow { row: CallRow::for_insert(new.call)?, records })
        });
        let standing = standing.map(|standing| encode(&standing).map(|body| (standing, body)));
        Ok(Self {
            row: CallRow::for_update(call)?,
            records: encode_events(records)?,
            changes: changes
                .into_iter()
                .map(ApprovalChangeRow::new)
                .collect::<Result<_, StoreError>>()?,
            replacement: replacement.transpose()?,
            standing: standing.transpose()?,
            audit,
        })
    }

    fn apply(&mut self, writer: &mut WriterConnection) -> rusqlite::Result<SaveResult> {
        if save_call(writer, &self.row, &self.records)? == SaveResult::Conflict {
            return Ok(SaveResult::Conflict);
        }
        if let Some(new) = self.replacement.take() {
            writer.insert_call_now(new)?;
        }
        let connection = writer.connection()?;
        self.changes.iter().try_for_each(|change| apply_change(connection, change))?;
        if let Some((standing, body)) = &self.standing {
            put_standing(connection, standing, body)?;
        }
        self.audit.iter().try_for_each(|entry| insert_audit_entry(connection, entry))?;
        Ok(SaveResult::Saved)
    }
}

/// Inserts a new approval.
pub(crate) fn insert_approval(connection: &Connection, row: &ApprovalRow) -> rusqlite::Result<()> {
    let approval = &row.approval;
    connection
        .prepare_cached(
            "INSERT INTO approvals (approval_id, project, tool_call_id, agent, tool_name, status, \
             created_ms, expires_ms, request, webhook_ms, webhook_tries) \
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11)",
        )?
        .execute(params![
            approval.id,
            approval.project,
            approval.call_id.as_str(),
            approval.request.requester.agent,
            approval.request.tool,
            approval.status.as_str(),
            approval.created_ms as i64,
            approval.expires_ms as i64,
            row.request,
            approval.webhook.due_ms.map(|ms| ms as i64),
            approval.webhook.tries,
        ])
        .map(|_| ())
}

fn apply_change(connection: &Connection, change: &ApprovalChangeRow) -> rusqlite::Result<()> {
    match change {
        ApprovalChangeRow::Request(row) => insert_approval(connection, row),
        ApprovalChangeRow::End { id, status, decided_ms, decision } => connection
            .prepare_cached(
                "UPDATE approvals SET status = ?2, decided_ms = coalesce(decided_ms, ?3), \
                 decision = coalesce(decision, ?4) \
                 WHERE approval_id = ?1 AND (status = 'pending' OR ?2 = 'superseded')",
            )?
            .execute(params![id, status.as_str(), decided_ms, decision])
            .map(|_| ()),
    }
}

fn put_standing(
    connection: &Connection,
    standing: &StandingApproval,
    body: &str,
) -> rusqlite::Result<()> {
    connection
        .prepare_cached("INSERT OR REPLACE INTO standing_approvals VALUES (?1, ?2, ?3, ?4)")?
        .execute(params![standing.id, standing.project, standing.expires_ms as i64, body])
        .map(|_| ())
}

/// Deletes the approvals of a call that is purged.
pub(crate) const DELETE_APPROVALS_SQL: &str = "DELETE FROM approvals WHERE (project, tool_call_id) \
     IN (SELECT project, tool_call_id FROM tool_calls WHERE place = ?1)";

/// Deletes standing approvals that expired before this time.
pub(crate) fn purge_standing(
    connection: &Connection,
    before_ms: i64,
    limit: usize,
) -> rusqlite::Result<usize> {
    connection
        .prepare_cached(
            "DELETE FROM standing_approvals WHERE standing_id IN (SELECT standing_id \
             FROM standing_approvals WHERE expires_ms < ?1 LIMIT ?2)",
        )?
        .execute(params![before_ms, limit as i64])
}

fn list(connection: &Connection, filter: &ApprovalFilter) -> Result<Vec<Approval>, StoreError> {
    let mut sql = format!("SELECT {COLUMNS} FROM approvals WHERE project = ?1");
    let mut bound: Vec<&dyn ToSql> = vec![&filter.project];
    if let Some(status) = filter.status {
        // A literal, so that SQLite can choose the partial index.
        sql.push_str(&format!(" AND status = '{}'", status.as_str()));
    }
    let texts = [("agent =", &filter.agent), ("tool_name =", &filter.tool)];
    for (condition, text) in texts.into_iter().chain([("approval_id <", &filter.before)]) {
        if let Some(text) = text {
            bound.push(text);
            sql.push_str(&format!(" AND {condition} ?{}", bound.len()));
        }
    }
    let limit = i64::try_from(filter.limit).unwrap_or(i64::MAX);
    sql.push_str(&format!(" ORDER BY approval_id DESC LIMIT {limit}"));
    query_map(connection, &sql, bound.as_slice(), |row| read_approval(row))
}

fn find(connection: &Connection, project: &str, id: &str) -> Result<Option<Approval>, StoreError> {
    let sql = format!("SELECT {COLUMNS} FROM approvals WHERE approval_id = ?1 AND project = ?2");
    Ok(query_map(connection, &sql, params![id, project], |row| read_approval(row))?.pop())
}

#[async_trait]
impl ApprovalStore for SqliteStore {
    async fn commit_approvals(
        &self,
        commits: Vec<ApprovalCommit>,
    ) -> Result<Vec<SaveResult>, StoreError> {
        let rows: Result<Vec<ApprovalCommitRow>, _> =
            commits.into_iter().map(ApprovalCommitRow::new).collect();
        let mut rows = rows?;
        self.write(move |writer| rows.iter_mut().map(|row| row.apply(writer)).collect()).await
    }

    async fn add_idempotency_key(
        &self,
        project: &str,
        key: IdempotencyKey,
        call_id: &CallId,
    ) -> Result<bool, StoreError> {
        let (project, call_id) = (project.to_owned(), call_id.clone());
        self.write(move |writer| {
            let Some(position) = writer.find_position(&project, &call_id)? else {
                return Ok(false);
            };
            let added = writer
                .connection()?
                .prepare_cached(
                    "INSERT OR IGNORE INTO idempotency_keys VALUES (?1, ?2, ?3, ?4, ?5)",
                )?
                .execute(params![project, key.agent, key.key, key.fingerprint, position])?;
            Ok(added > 0)
        })
        .await
    }

    async fn approval(&self, project: &str, id: &str) -> Result<Option<Approval>, StoreError> {
        let (project, id) = (project.to_owned(), id.to_owned());
        self.read(move |connection| find(connection, &project, &id)).await
    }

    async fn approvals_by_id(
        &self,
        project: &str,
        ids: Vec<String>,
    ) -> Result<Vec<Approval>, StoreError> {
        let project = project.to_owned();
        self.read(move |connection| {
            let found = ids.iter().map(|id| find(connection, &project, id));
            Ok(found.collect::<Result<Vec<_>, _>>()?.into_iter().flatten().collect())
        })
        .await
    }

    async fn list_approvals(&self, filter: ApprovalFilter) -> Result<Vec<Approval>, StoreError> {
        self.read(move |connection| list(connection, &filter)).await
    }

    async fn last_approved(
        &self,
        project: &str,
        tool: &str,
    ) -> Result<Option<Approval>, StoreError> {
        let (project, tool) = (project.to_owned(), tool.to_owned());
        self.read(move |connection| {
            let sql = format!(
                "SELECT {COLUMNS} FROM approvals WHERE project = ?1 AND tool_name = ?2 \
                 AND status = '{}' ORDER BY decided_ms DESC LIMIT 1",
                ApprovalStatus::Approved.as_str()
            );
            let found =
                query_map(connection, &sql, params![project, tool], |row| read_approval(row));
            Ok(found?.pop())
        })
        .await
    }

    async fn put_standing_approval(
        &self,
        standing: StandingApproval,
        audit: AuditEntry,
    ) -> Result<(), StoreError> {
        let body = encode(&standing)?;
        self.write(move |writer| {
            let connection = writer.connection()?;
            put_standing(connection, &standing, &body)?;
            insert_audit_entry(connection, &audit)
        })
        .await
    }

    async fn standing_approvals(&self, after_ms: u64) -> Result<Vec<StandingApproval>, StoreError> {
        let after_ms = i64::try_from(after_ms).unwrap_or(i64::MAX);
        self.read(move |connection| {
            let sql = "SELECT body FROM standing_approvals WHERE expires_ms > ?1 \
                       ORDER BY standing_id";
            query_map(connection, sql, params![after_ms], |row| {
                decode(&crate::row::RowReader::text(row, 0)?)
            })
        })
        .await
    }

    async fn due_approval_webhooks(
        &self,
        now_ms: u64,
        limit: usize,
    ) -> Result<Vec<Approval>, StoreError> {
        let now_ms = i64::try_from(now_ms).unwrap_or(i64::MAX);
        self.read(move |connection| {
            let sql = format!(
                "SELECT {COLUMNS} FROM approvals WHERE webhook_ms IS NOT NULL \
                 AND webhook_ms <= ?1 ORDER BY webhook_ms LIMIT ?2"
            );
            query_map(connection, &sql, params![now_ms, limit as i64], |row| read_approval(row))
        })
        .await
    }

    async fn set_approval_webhook(
        &self,
        id: &str,
        webhook: ApprovalWebhook,
    ) -> Result<(), StoreError> {
        let id = id.to_owned();
        self.write(move |writer| {
            writer
                .connection()?
                .prepare_cached(
                    "UPDATE approvals SET webhook_ms = ?2, webhook_tries = ?3 \
                     WHERE approval_id = ?1",
                )?
                .execute(params![id, webhook.due_ms.map(|ms| ms as i64), webhook.tries])
                .map(|_| ())
        })
        .await
    }
}
