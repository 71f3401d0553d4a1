//! Inserts new calls, several per statement.
//!
//! Setting up a statement and searching each index costs about as much as writing the row. Within
//! one statement SQLite continues from the position of the previous row, so the writer buffers
//! calls that arrive together and inserts a few at a time.

use std::sync::LazyLock;

use rusqlite::Statement;
use toolcrib::ports::store::CreateCallResult;

use crate::row::{CallRow, EventRow, ImpliedEvent};
use crate::sqlite::change::{PendingReply, Reply, SqliteChange};
use crate::sqlite::writer::WriterThread;

/// Numbers of rows per statement; a remainder uses the next smaller size.
const ROWS_PER_INSERT: [usize; 3] = [8, 2, 1];

const COLUMN_COUNT: usize = 18;

static INSERT_STATEMENTS: LazyLock<[String; 3]> = LazyLock::new(|| ROWS_PER_INSERT.map(insert_sql));

fn insert_sql(rows: usize) -> String {
    let row = format!("({})", vec!["?"; COLUMN_COUNT].join(", "));
    format!(
        "INSERT INTO calls (id, project, run_id, tool_name, executor, status, hold, created_ms, \
         deadline_ms, started_ms, completed_ms, version, args, result, error, envelope, state, \
         events) VALUES {}",
        vec![row; rows].join(", ")
    )
}

/// A call that the current group has not written yet.
pub(crate) struct PendingInsert {
    pub(crate) row: Box<CallRow>,
    pub(crate) records: Vec<EventRow>,
    pub(crate) reply: Reply<CreateCallResult>,
}

impl From<PendingInsert> for SqliteChange {
    fn from(new: PendingInsert) -> Self {
        let PendingInsert { row, records, reply } = new;
        Self::CreateCall { row, records, key: None, group: None, reply }
    }
}

impl WriterThread {
    /// Buffers a new call; writes the buffer once it is full.
    pub(crate) fn buffer_insert(
        &mut self,
        new: PendingInsert,
        told: &mut Vec<PendingReply>,
    ) -> rusqlite::Result<()> {
        self.pending_inserts.push(new);
        if self.pending_inserts.len() < ROWS_PER_INSERT[0] {
            Ok(())
        } else {
            self.flush_inserts(told)
        }
    }

    /// Writes the buffered calls. After a failure, calls without a reply stay in the buffer.
    pub(crate) fn flush_inserts(&mut self, told: &mut Vec<PendingReply>) -> rusqlite::Result<()> {
        // In the order of their ids, each row follows the previous one in the index.
        self.pending_inserts.sort_unstable_by(|one, other| one.row.call.id.cmp(&other.row.call.id));
        for (size, sql) in ROWS_PER_INSERT.into_iter().zip(&*INSERT_STATEMENTS) {
            while self.pending_inserts.len() >= size {
                let rows =
                    self.pending_inserts[..size].iter().map(|new| (&*new.row, &*new.records));
                let first = self.insert_rows(rows, sql)?;
                for place in first..first + size as i64 {
                    let new = self.pending_inserts.remove(0);
                    if let Err(error) = self.finish_insert(place, &new.row.call, &new.records) {
                        self.pending_inserts.push(new);
                        return Err(error);
                    }
                    told.push(PendingReply::Created(new.reply, CreateCallResult::New));
                }
            }
        }
        Ok(())
    }

    /// Inserts one call and returns its place.
    pub(crate) fn insert_one(&self, row: &CallRow, records: &[EventRow]) -> rusqlite::Result<i64> {
        self.insert_rows(
            [(row, records)].into_iter(),
            &INSERT_STATEMENTS[ROWS_PER_INSERT.len() - 1],
        )
    }

    /// Inserts all rows with one statement and returns the place of the first; the others follow it
    /// consecutively.
    fn insert_rows<'a>(
        &self,
        rows: impl ExactSizeIterator<Item = (&'a CallRow, &'a [EventRow])>,
        sql: &str,
    ) -> rusqlite::Result<i64> {
        let mut statement = self.connection.prepare_cached(sql)?;
        let (count, mut number) = (rows.len() as i64, self.last_event_number);
        for (n, (row, records)) in rows.enumerate() {
            bind_call(&mut statement, n * COLUMN_COUNT, row, &format_event_refs(number, records))?;
            number += records.len() as i64;
        }
        statement.raw_execute()?;
        Ok(self.connection.last_insert_rowid() - count + 1)
    }
}

fn bind_call(
    statement: &mut Statement<'_>,
    before: usize,
    row: &CallRow,
    events: &str,
) -> rusqlite::Result<()> {
    let call = &row.call;
    let mut at = before;
    let mut next = || {
        at += 1;
        at
    };
    let ms = |ms: Option<u64>| ms.map(|ms| ms as i64);
    statement.raw_bind_parameter(next(), call.id.as_str())?;
    statement.raw_bind_parameter(next(), call.project.as_str())?;
    statement.raw_bind_parameter(next(), call.run_id.as_str())?;
    statement.raw_bind_parameter(next(), call.tool_name.as_str())?;
    statement.raw_bind_parameter(next(), call.target.executor.as_str())?;
    statement.raw_bind_parameter(next(), call.status.as_str())?;
    statement.raw_bind_parameter(next(), row.hold)?;
    statement.raw_bind_parameter(next(), call.created_ms as i64)?;
    statement.raw_bind_parameter(next(), call.deadline_ms as i64)?;
    statement.raw_bind_parameter(next(), ms(call.started_ms))?;
    statement.raw_bind_parameter(next(), ms(call.completed_ms))?;
    statement.raw_bind_parameter(next(), call.version as i64)?;
    statement.raw_bind_parameter(next(), row.args.text())?;
    statement.raw_bind_parameter(next(), row.result.as_ref().map(|result| result.text()))?;
    statement.raw_bind_parameter(next(), row.error.as_deref())?;
    statement.raw_bind_parameter(next(), row.envelope.as_str())?;
    statement.raw_bind_parameter(next(), row.state.as_str())?;
    statement.raw_bind_parameter(next(), events)
}

/// Formats the numbers that these events get after `last`, as the call's event list stores them.
pub(crate) fn format_event_refs(last: i64, records: &[EventRow]) -> String {
    use std::fmt::Write;
    let mut list = String::with_capacity(records.len() * 12);
    for (number, record) in (last + 1..).zip(records) {
        let _ = write!(list, "{number}");
        list.extend(record.implied.map(ImpliedEvent::code));
        list.push(',');
    }
    list
}
