//! The audit log in SQLite. Rows are appended in the writer's transaction. No other process writes
//! during it, so the stored head is the row that a new row follows.

use async_trait::async_trait;
use rusqlite::{Connection, params};
use toolcrib::domain::directory::AuditEntry;
use toolcrib::domain::directory::audit::{AuditChain, AuditLink, AuditRow};
use toolcrib::ports::store::StoreError;
use toolcrib::ports::store::audit::{AuditFilter, AuditOrder, AuditStore};

use crate::row::{AUDIT_COLUMNS, RowReader, read_audit_row};
use crate::sqlite::SqliteStore;
use crate::sqlite::reader::query_map;

#[async_trait]
impl AuditStore for SqliteStore {
    async fn audit_chain(&self) -> Result<AuditChain, StoreError> {
        self.read(read_chain).await
    }

    async fn audit_rows(&self, filter: AuditFilter) -> Result<Vec<AuditRow>, StoreError> {
        self.read(move |connection| list_rows(connection, &filter)).await
    }

    async fn prune_audit_log(
        &self,
        before_ms: u64,
        now_ms: u64,
        limit: usize,
    ) -> Result<usize, StoreError> {
        self.write(move |writer| prune(writer.connection()?, before_ms, now_ms, limit)).await
    }
}

/// Appends a row and moves the head to it.
pub(in crate::sqlite) fn insert_audit_entry(
    connection: &Connection,
    entry: &AuditEntry,
) -> rusqlite::Result<()> {
    let mut head = read_link(connection, "head")?;
    // A row that another program inserted must not make every later append fail.
    let last: i64 = connection
        .prepare_cached("SELECT coalesce(max(number), 0) FROM audit")?
        .query_row([], |row| row.get(0))?;
    let number = head.number.max(last as u64) + 1;
    let row = AuditRow::following(&head, number, entry.clone());
    insert_row(connection, &row)?;
    head.advance(&row);
    write_link(connection, "head", &head)
}

fn insert_row(connection: &Connection, row: &AuditRow) -> rusqlite::Result<()> {
    let AuditRow { number, entry, hash } = row;
    connection
        .prepare_cached(
            "INSERT INTO audit (number, at_ms, project, agent, action, subject, reason, user, \
             credential, transport, peer, request_id, hash) \
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13)",
        )?
        .execute(params![
            *number as i64,
            entry.at_ms as i64,
            entry.project,
            entry.agent,
            entry.action,
            entry.subject,
            entry.reason,
            entry.user,
            entry.credential,
            entry.origin.transport,
            entry.origin.peer,
            entry.origin.request_id,
            hash,
        ])?;
    Ok(())
}

fn read_link(connection: &Connection, name: &str) -> rusqlite::Result<AuditLink> {
    connection
        .prepare_cached("SELECT number, hash, entries FROM audit_chain WHERE name = ?1")?
        .query_row([name], |row| {
            let (number, entries): (i64, i64) = (row.get(0)?, row.get(2)?);
            Ok(AuditLink { number: number as u64, hash: row.get(1)?, entries: entries as u64 })
        })
}

fn write_link(connection: &Connection, name: &str, link: &AuditLink) -> rusqlite::Result<()> {
    connection
        .prepare_cached(
            "UPDATE audit_chain SET number = ?2, hash = ?3, entries = ?4 WHERE name = ?1",
        )?
        .execute(params![name, link.number as i64, link.hash, link.entries as i64])?;
    Ok(())
}

fn read_chain(connection: &Connection) -> Result<AuditChain, StoreError> {
    let sql = "SELECT head.number, head.hash, head.entries, pruned.number, pruned.hash, \
               pruned.entries, (SELECT coalesce(max(number), 0) FROM audit) \
               FROM audit_chain head, audit_chain pruned \
               WHERE head.name = 'head' AND pruned.name = 'pruned'";
    let rows = query_map(connection, sql, &[], |row| {
        let link = |column| {
            let number = row.unsigned(column)?;
            let (hash, entries) = (row.text(column + 1)?, row.unsigned(column + 2)?);
            Ok::<_, StoreError>(AuditLink { number, hash, entries })
        };
        Ok(AuditChain { head: link(0)?, pruned: link(3)?, last_number: row.unsigned(6)? })
    })?;
    let missing = || StoreError::Corrupt("the head of the audit log is missing".to_owned());
    rows.into_iter().next().ok_or_else(missing)
}

fn list_rows(connection: &Connection, filter: &AuditFilter) -> Result<Vec<AuditRow>, StoreError> {
    let (comparison, from) = match filter.order {
        AuditOrder::NewestFirst { before } => ("number < ?2 ORDER BY number DESC", before),
        AuditOrder::OldestFirst { after } => ("number > ?2 ORDER BY number", after),
    };
    let sql = format!(
        "SELECT {AUDIT_COLUMNS} FROM audit WHERE (?1 IS NULL OR project = ?1) AND {comparison} \
         LIMIT ?3"
    );
    let from = i64::try_from(from).unwrap_or(i64::MAX);
    let limit = i64::try_from(filter.limit).unwrap_or(i64::MAX);
    query_map(connection, &sql, params![filter.project, from, limit], |row| read_audit_row(row))
}

fn prune(
    connection: &Connection,
    before_ms: u64,
    now_ms: u64,
    limit: usize,
) -> rusqlite::Result<usize> {
    let time = |ms: u64| i64::try_from(ms).unwrap_or(i64::MAX);
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    // Selects up to the last old row before the first one that is to stay, so that the rest of the
    // chain has no gap.
    let mut select = connection.prepare_cached(
        "SELECT number, hash FROM audit WHERE number <= (SELECT max(number) FROM audit \
         WHERE at_ms < ?1 AND number < coalesce((SELECT min(number) FROM audit \
         WHERE at_ms >= ?1 AND at_ms <= ?2), 9223372036854775807)) ORDER BY number LIMIT ?3",
    )?;
    let rows = select.query_map(params![time(before_ms), time(now_ms), limit], |row| {
        Ok((row.get::<_, i64>(0)?, row.get::<_, String>(1)?))
    })?;
    let rows: Vec<(i64, String)> = rows.collect::<rusqlite::Result<_>>()?;
    let Some((last, hash)) = rows.last().cloned() else { return Ok(0) };
    let pruned = read_link(connection, "pruned")?;
    let entries = pruned.entries + rows.len() as u64;
    write_link(connection, "pruned", &AuditLink { number: last as u64, hash, entries })?;
    connection.prepare_cached("DELETE FROM audit WHERE number <= ?1")?.execute([last])
}

/// Moves the rows of a log without a chain into the chain, with their numbers.
pub(in crate::sqlite) fn chain_existing_rows(connection: &Connection) -> rusqlite::Result<()> {
    let mut head = AuditLink::first();
    let mut select = connection.prepare(
        "SELECT number, at_ms, project, agent, action, subject, reason FROM audit_unchained \
         ORDER BY number",
    )?;
    let mut rows = select.query([])?;
    while let Some(row) = rows.next()? {
        let (number, at_ms): (i64, i64) = (row.get(0)?, row.get(1)?);
        let entry = AuditEntry {
            at_ms: at_ms as u64,
            project: row.get(2)?,
            agent: row.get(3)?,
            action: row.get(4)?,
            subject: row.get(5)?,
            reason: row.get(6)?,
            ..AuditEntry::default()
        };
        let row = AuditRow::following(&head, number as u64, entry);
        insert_row(connection, &row)?;
        head.advance(&row);
    }
    write_link(connection, "head", &head)?;
    drop(rows);
    drop(select);
    connection.execute_batch("DROP TABLE audit_unchained")
}
