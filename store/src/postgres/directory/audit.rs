//! The audit log in PostgreSQL. One statement moves the head and appends its row: the lock on the
//! head orders the appends of the server and of administrative commands.

use async_trait::async_trait;
use tokio::sync::oneshot;
use toolcrib::domain::directory::AuditEntry;
use toolcrib::domain::directory::audit::{AuditChain, AuditLink, AuditRow, hashed_text};
use toolcrib::ports::store::StoreError;
use toolcrib::ports::store::audit::{AuditFilter, AuditOrder, AuditStore};

use crate::postgres::change::{Change, ChangeFuture, WriterConnection};
use crate::postgres::session::{Session, SessionError, SqlParams};
use crate::postgres::{PostgresStore, await_reply, limit_param};
use crate::row::{AUDIT_COLUMNS, RowReader, read_audit_row};

/// Rows that one statement inserts when a log is chained.
const ROWS_PER_INSERT: usize = 500;

#[async_trait]
impl AuditStore for PostgresStore {
    async fn audit_chain(&self) -> Result<AuditChain, StoreError> {
        let session = self.pool.acquire().await?;
        read_chain(&session).await.map_err(SessionError::into_store_error)
    }

    async fn audit_rows(&self, filter: AuditFilter) -> Result<Vec<AuditRow>, StoreError> {
        let session = self.pool.acquire().await?;
        list_rows(&session, &filter).await.map_err(SessionError::into_store_error)
    }

    async fn prune_audit_log(
        &self,
        before_ms: u64,
        now_ms: u64,
        limit: usize,
    ) -> Result<usize, StoreError> {
        let input = (before_ms, now_ms, limit);
        self.write(input, |writer, input| Box::pin(prune(writer, input))).await
    }
}

impl PostgresStore {
    /// Appends an entry in the writer's next transaction.
    pub(in crate::postgres) async fn append_audit(
        &self,
        entry: AuditEntry,
    ) -> Result<(), StoreError> {
        let (reply, answer) = oneshot::channel();
        self.writer.send(Box::new(AuditInsert { entry, reply }))?;
        await_reply(answer).await
    }
}

/// The insert of an entry, pipelined with other changes: many denials cost few round trips.
struct AuditInsert {
    entry: AuditEntry,
    reply: oneshot::Sender<Result<(), StoreError>>,
}

impl Change for AuditInsert {
    fn start_pipelined<'a>(
        &'a mut self,
        writer: &'a WriterConnection,
    ) -> Option<ChangeFuture<'a, ()>> {
        Some(Box::pin(insert_audit_entry(&writer.session, &self.entry)))
    }

    fn run_alone<'a>(&'a mut self, _: &'a mut WriterConnection) -> Option<ChangeFuture<'a, ()>> {
        None
    }

    fn reply(self: Box<Self>, committed: Result<(), StoreError>) {
        let _ = self.reply.send(committed);
    }
}

/// Appends a row and moves the head to it. A row that another program inserted does not make later
/// appends fail: the next number is above it.
pub(in crate::postgres) async fn insert_audit_entry(
    session: &Session,
    entry: &AuditEntry,
) -> Result<(), SessionError> {
    let sql = "WITH next AS (SELECT greatest(number, \
               (SELECT coalesce(max(number), 0) FROM audit)) + 1 AS number \
               FROM audit_chain WHERE name = 'head' FOR UPDATE), \
               head AS (UPDATE audit_chain SET number = next.number, entries = entries + 1, \
               hash = encode(sha256(convert_to(hash || E'\\n' || $1::text || next.number \
               || $2::text, 'UTF8')), 'hex') FROM next WHERE name = 'head' \
               RETURNING audit_chain.number, audit_chain.hash) \
               INSERT INTO audit (number, at_ms, project, agent, action, subject, reason, \"user\", \
               credential, transport, peer, request_id, hash) \
               SELECT number, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, hash FROM head";
    let entry = entry.clone().storable();
    let (start, end) = hashed_text(&entry);
    let params: SqlParams<'_> = &[
        &start,
        &end,
        &(entry.at_ms as i64),
        &entry.project,
        &entry.agent,
        &entry.action,
        &entry.subject,
        &entry.reason,
        &entry.user,
        &entry.credential,
        &entry.origin.transport,
        &entry.origin.peer,
        &entry.origin.request_id,
    ];
    session.execute(sql, params).await?;
    Ok(())
}

async fn read_chain(session: &Session) -> Result<AuditChain, SessionError> {
    // One statement, so that all values are of the same commit.
    let sql = "SELECT head.number, head.hash, head.entries, pruned.number, pruned.hash, \
               pruned.entries, (SELECT coalesce(max(number), 0) FROM audit) \
               FROM audit_chain head, audit_chain pruned \
               WHERE head.name = 'head' AND pruned.name = 'pruned'";
    let missing = || StoreError::Corrupt("the head of the audit log is missing".to_owned());
    let row = session.query_first(sql, &[]).await?.ok_or_else(missing)?;
    let link = |column| {
        let number = row.unsigned(column)?;
        let (hash, entries) = (row.text(column + 1)?, row.unsigned(column + 2)?);
        Ok::<_, StoreError>(AuditLink { number, hash, entries })
    };
    Ok(AuditChain { head: link(0)?, pruned: link(3)?, last_number: row.unsigned(6)? })
}

async fn list_rows(session: &Session, filter: &AuditFilter) -> Result<Vec<AuditRow>, SessionError> {
    let (comparison, from) = match filter.order {
        AuditOrder::NewestFirst { before } => ("number < $2 ORDER BY number DESC", before),
        AuditOrder::OldestFirst { after } => ("number > $2 ORDER BY number", after),
    };
    let sql = format!(
        "SELECT {AUDIT_COLUMNS} FROM audit WHERE ($1::text IS NULL OR project = $1) \
         AND {comparison} LIMIT $3"
    );
    let from = i64::try_from(from).unwrap_or(i64::MAX);
    let params: SqlParams<'_> = &[&filter.project, &from, &limit_param(filter.limit)];
    session.query_map(&sql, params, read_audit_row).await
}

async fn prune(
    writer: &mut WriterConnection,
    (before_ms, now_ms, limit): &(u64, u64, usize),
) -> Result<usize, SessionError> {
    let session = &writer.session;
    let time = |ms: u64| i64::try_from(ms).unwrap_or(i64::MAX);
    // Moves the checkpoint to the last old row before the first one that is to stay, so that the
    // rest of the chain has no gap.
    let sql = "WITH old AS (SELECT number, hash FROM audit WHERE number <= (SELECT max(number) \
               FROM audit WHERE at_ms < $1 AND number < coalesce((SELECT min(number) FROM audit \
               WHERE at_ms >= $1 AND at_ms <= $2), 9223372036854775807)) \
               ORDER BY number LIMIT $3), last AS (SELECT number, hash, \
               (SELECT count(*) FROM old) AS entries FROM old ORDER BY number DESC LIMIT 1) \
               UPDATE audit_chain SET number = last.number, hash = last.hash, \
               entries = audit_chain.entries + last.entries FROM last WHERE name = 'pruned'";
    let params: SqlParams<'_> = &[&time(*before_ms), &time(*now_ms), &limit_param(*limit)];
    if session.execute(sql, params).await? == 0 {
        return Ok(0);
    }
    let sql = "DELETE FROM audit WHERE number <= \
               (SELECT number FROM audit_chain WHERE name = 'pruned')";
    Ok(session.execute(sql, &[]).await? as usize)
}

/// Moves the rows of a log without a chain into the chain, with their numbers.
pub(in crate::postgres) async fn chain_existing_rows(
    session: &Session,
) -> Result<(), SessionError> {
    let mut head = AuditLink::first();
    let select = "SELECT number, at_ms, project, agent, action, subject, reason \
                  FROM toolcrib.audit_unchained WHERE number > $1 ORDER BY number LIMIT $2";
    loop {
        let (after, limit) = (head.number as i64, limit_param(ROWS_PER_INSERT));
        let entries = session.query_map(select, &[&after, &limit], read_unchained).await?;
        if entries.is_empty() {
            break;
        }
        let mut rows = Vec::with_capacity(entries.len());
        for (number, entry) in entries {
            let row = AuditRow::following(&head, number, entry);
            head.advance(&row);
            rows.push(row);
        }
        insert_rows(session, &rows).await?;
    }
    let sql = "UPDATE toolcrib.audit_chain SET number = $1, hash = $2, entries = $3 \
               WHERE name = 'head'";
    session.execute(sql, &[&(head.number as i64), &head.hash, &(head.entries as i64)]).await?;
    session.batch_execute("DROP TABLE toolcrib.audit_unchained").await
}

fn read_unchained(row: &tokio_postgres::Row) -> Result<(u64, AuditEntry), StoreError> {
    let entry = AuditEntry {
        at_ms: row.unsigned(1)?,
        project: row.text(2)?,
        agent: row.text(3)?,
        action: row.text(4)?,
        subject: row.text(5)?,
        reason: row.text(6)?,
        ..AuditEntry::default()
    };
    Ok((row.unsigned(0)?, entry))
}

async fn insert_rows(session: &Session, rows: &[AuditRow]) -> Result<(), SessionError> {
    let integers = |read: fn(&AuditRow) -> u64| -> Vec<i64> {
        rows.iter().map(|row| read(row) as i64).collect()
    };
    let texts = |read: fn(&AuditRow) -> &String| -> Vec<String> {
        rows.iter().map(|row| read(row).clone()).collect()
    };
    let sql = "INSERT INTO toolcrib.audit (number, at_ms, project, agent, action, subject, reason, \
               hash) SELECT * FROM unnest($1::bigint[], $2::bigint[], $3::text[], $4::text[], \
               $5::text[], $6::text[], $7::text[], $8::text[])";
    let params: SqlParams<'_> = &[
        &integers(|row| row.number),
        &integers(|row| row.entry.at_ms),
        &texts(|row| &row.entry.project),
        &texts(|row| &row.entry.agent),
        &texts(|row| &row.entry.action),
        &texts(|row| &row.entry.subject),
        &texts(|row| &row.entry.reason),
        &texts(|row| &row.hash),
    ];
    session.execute(sql, params).await?;
    Ok(())
}
