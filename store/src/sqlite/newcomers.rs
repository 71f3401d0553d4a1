//! Inserts new calls, several per statement.
//!
//! Setting up a statement and searching each index costs about as much as writing the row. Within
//! one statement SQLite continues from the position of the previous row, so the writer buffers
//! calls that arrive together and inserts a few at a time.

use std::sync::LazyLock;

use rusqlite::Statement;
use toolcrib::store::Created;

use super::op::{Op, Reply, Told};
use super::writer::Desk;
use crate::row::{CallRow, Implied, RecordRow};

/// Numbers of rows per statement; a remainder uses the next smaller size.
const SIZES: [usize; 3] = [8, 2, 1];

const COLUMNS: usize = 18;

static INSERTS: LazyLock<[String; 3]> = LazyLock::new(|| SIZES.map(insert));

fn insert(rows: usize) -> String {
    let row = format!("({})", vec!["?"; COLUMNS].join(", "));
    format!(
        "INSERT INTO calls (id, project, run_id, tool_name, executor, status, hold, created_ms, \
         deadline_ms, started_ms, completed_ms, version, args, result, error, envelope, state, \
         events) VALUES {}",
        vec![row; rows].join(", ")
    )
}

/// A call that the current group has not written yet.
pub(super) struct Newcomer {
    pub(super) row: Box<CallRow>,
    pub(super) records: Vec<RecordRow>,
    pub(super) reply: Reply<Created>,
}

impl From<Newcomer> for Op {
    fn from(new: Newcomer) -> Self {
        let Newcomer { row, records, reply } = new;
        Self::Create { row, records, key: None, together: None, reply }
    }
}

impl Desk {
    /// Buffers a new call; writes the buffer once it is full.
    pub(super) fn collect(&mut self, new: Newcomer, told: &mut Vec<Told>) -> rusqlite::Result<()> {
        self.newcomers.push(new);
        if self.newcomers.len() < SIZES[0] { Ok(()) } else { self.write_newcomers(told) }
    }

    /// Writes the buffered calls. After a failure, calls without a reply stay in the buffer.
    pub(super) fn write_newcomers(&mut self, told: &mut Vec<Told>) -> rusqlite::Result<()> {
        // In the order of their ids, each row follows the previous one in the index.
        self.newcomers.sort_unstable_by(|one, other| one.row.call.id.cmp(&other.row.call.id));
        for (size, sql) in SIZES.into_iter().zip(&*INSERTS) {
            while self.newcomers.len() >= size {
                let rows = self.newcomers[..size].iter().map(|new| (&*new.row, &*new.records));
                let first = self.insert(rows, sql)?;
                for place in first..first + size as i64 {
                    let new = self.newcomers.remove(0);
                    if let Err(error) = self.created(place, &new.row.call, &new.records) {
                        self.newcomers.push(new);
                        return Err(error);
                    }
                    told.push(Told::Created(new.reply, Created::New));
                }
            }
        }
        Ok(())
    }

    /// Inserts one call and returns its place.
    pub(super) fn insert_one(&self, row: &CallRow, records: &[RecordRow]) -> rusqlite::Result<i64> {
        self.insert([(row, records)].into_iter(), &INSERTS[SIZES.len() - 1])
    }

    /// Inserts all rows with one statement and returns the place of the first; the others follow it
    /// consecutively.
    fn insert<'a>(
        &self,
        rows: impl ExactSizeIterator<Item = (&'a CallRow, &'a [RecordRow])>,
        sql: &str,
    ) -> rusqlite::Result<i64> {
        let mut statement = self.connection.prepare_cached(sql)?;
        let (count, mut number) = (rows.len() as i64, self.last_number);
        for (n, (row, records)) in rows.enumerate() {
            bind(&mut statement, n * COLUMNS, row, &numbers(number, records))?;
            number += records.len() as i64;
        }
        statement.raw_execute()?;
        Ok(self.connection.last_insert_rowid() - count + 1)
    }
}

fn bind(
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
pub(super) fn numbers(last: i64, records: &[RecordRow]) -> String {
    use std::fmt::Write;
    let mut list = String::with_capacity(records.len() * 12);
    for (number, record) in (last + 1..).zip(records) {
        let _ = write!(list, "{number}");
        list.extend(record.implied.map(Implied::letter));
        list.push(',');
    }
    list
}
