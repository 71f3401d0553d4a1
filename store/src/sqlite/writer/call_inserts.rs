//! The SQL that inserts new calls with their events, tasks and deliveries, several calls per
//! statement.
//!
//! Setting up a statement and searching each index costs about as much as writing the row. Within
//! one statement SQLite continues from the position of the previous row.

use std::sync::LazyLock;

use rusqlite::{Connection, Statement, params};
use toolcrib::domain::call::Call;
use toolcrib::domain::delivery::Delivery;

use crate::row::{CallRow, DELIVERY_COLUMNS, EventRow};
use crate::sqlite::event_numbers::format_event_refs;

/// Numbers of rows per statement; a remainder uses the next smaller size.
const ROWS_PER_INSERT: [usize; 3] = [8, 2, 1];

/// Maximum number of rows that one statement inserts.
pub(super) const MAX_ROWS_PER_INSERT: usize = ROWS_PER_INSERT[0];

/// The columns that a new call sets, in the order in which [`bind_call`] binds them.
const INSERT_COLUMNS: &[&str] = &[
    "tool_call_id",
    "project",
    "run_id",
    "tool_name",
    "executor",
    "status",
    "hold",
    "created_ms",
    "deadline_ms",
    "started_ms",
    "completed_ms",
    "version",
    "args",
    "result",
    "error",
    "envelope",
    "state",
    "events",
];

static INSERT_STATEMENTS: LazyLock<[String; 3]> = LazyLock::new(|| ROWS_PER_INSERT.map(insert_sql));

fn insert_sql(rows: usize) -> String {
    let row = format!("({})", vec!["?"; INSERT_COLUMNS.len()].join(", "));
    format!(
        "INSERT INTO tool_calls ({}) VALUES {}",
        INSERT_COLUMNS.join(", "),
        vec![row; rows].join(", ")
    )
}

/// A call that is stored for the first time, with its events.
pub(crate) struct NewCallRow {
    pub(crate) row: CallRow,
    pub(crate) records: Vec<EventRow>,
}

/// Inserts the first of these calls with one statement: as many as a statement takes. Their events
/// get the numbers after `last_event_number`. Returns the position of the first call and the number
/// of calls; their positions are consecutive.
pub(super) fn insert_some(
    connection: &Connection,
    calls: &[NewCallRow],
    last_event_number: i64,
) -> rusqlite::Result<(i64, usize)> {
    let sizes = ROWS_PER_INSERT.into_iter().zip(&*INSERT_STATEMENTS);
    let Some((size, sql)) = sizes.into_iter().find(|(size, _)| *size <= calls.len()) else {
        return Ok((0, 0));
    };
    let mut statement = connection.prepare_cached(sql)?;
    let mut number = last_event_number;
    for (n, new) in calls.iter().take(size).enumerate() {
        let events = format_event_refs(number, &new.records);
        bind_call(&mut statement, n * INSERT_COLUMNS.len(), &new.row, &events)?;
        number += new.records.len() as i64;
    }
    statement.raw_execute()?;
    Ok((connection.last_insert_rowid() - size as i64 + 1, size))
}

fn bind_call(
    statement: &mut Statement<'_>,
    before: usize,
    row: &CallRow,
    events: &str,
) -> rusqlite::Result<()> {
    let call = &row.call;
    let mut index = before;
    let mut next = || {
        index += 1;
        index
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

/// Inserts an event.
pub(super) fn insert_event(
    connection: &Connection,
    number: i64,
    position: i64,
    record: &EventRow,
) -> rusqlite::Result<()> {
    connection
        .prepare_cached("INSERT INTO events VALUES (?1, ?2, ?3, ?4, ?5, ?6)")?
        .execute(params![number, position, record.kind, record.at_ms, record.attempt, record.data])
        .map(|_| ())
}

/// Inserts the task and the delivery that belong to a new call: of a background call, and of a call
/// with a callback URL.
pub(super) fn insert_task_and_delivery(
    connection: &Connection,
    call: &Call,
    position: i64,
) -> rusqlite::Result<()> {
    if call.origin.background {
        connection.prepare_cached("INSERT INTO tasks VALUES (?1, ?2, ?3)")?.execute(params![
            call.project,
            call.id.as_str(),
            position
        ])?;
    }
    let Some(delivery) = Delivery::for_call(call) else { return Ok(()) };
    let sql = format!(
        "INSERT INTO deliveries ({DELIVERY_COLUMNS}, place) \
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)"
    );
    connection.prepare_cached(&sql)?.execute(params![
        delivery.project,
        delivery.call_id.as_str(),
        delivery.url,
        delivery.status.as_str(),
        delivery.due_ms.map(|ms| ms as i64),
        delivery.attempts,
        delivery.failures,
        delivery.last_error,
        delivery.version as i64,
        position,
    ])?;
    Ok(())
}
