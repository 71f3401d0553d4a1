//! Reads events. A call's row lists the numbers of its events; a code after a number marks an event
//! that the row itself implies and that has no row in `events`.

use rusqlite::{Connection, OptionalExtension, Row, params};
use toolcrib::event::{Event, Kind, Record};
use toolcrib::id::CallId;
use toolcrib::store::{EventScope, StoreError};

use super::reader::{MANY, collect, counted, failed};
use crate::row::{Facts, Implied, read_record};

/// The columns that [`CallHistory`] reads, in this order.
const COLUMNS: &str = "id, events, tool_name, octet_length(args), created_ms, started_ms, project, \
     run_id, envelope ->> 'call_id', completed_ms, octet_length(result)";

/// One entry of a call's event list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Mark {
    pub(super) number: u64,
    letter: Option<char>,
}

impl Mark {
    fn implied(self) -> Option<Implied> {
        Implied::ALL.into_iter().find(|implied| Some(implied.letter()) == self.letter)
    }
}

/// Parses a call's event list, such as `12r,13s,40,`.
pub(super) fn marks(list: &str) -> impl Iterator<Item = Mark> {
    list.split(',').filter(|entry| !entry.is_empty()).filter_map(|entry| {
        let digits = entry.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let letter = entry[digits.len()..].chars().next();
        Some(Mark { number: digits.parse().ok()?, letter })
    })
}

/// The facts about a call's events in its row.
struct History {
    id: CallId,
    run_id: String,
    asked_as: Option<String>,
    list: String,
    tool_name: String,
    args_bytes: usize,
    created_ms: u64,
    started_ms: Option<u64>,
    completed_ms: Option<u64>,
    result_bytes: Option<usize>,
}

impl History {
    fn read(row: &Row<'_>) -> Result<Self, StoreError> {
        let unreadable = |error: rusqlite::Error| StoreError::Corrupt(error.to_string());
        let id: String = row.get(0).map_err(unreadable)?;
        Ok(Self {
            id: id.parse().map_err(|_| StoreError::Corrupt(format!("call id {id}")))?,
            run_id: row.get(7).map_err(unreadable)?,
            asked_as: row.get(8).map_err(unreadable)?,
            list: row.get(1).map_err(unreadable)?,
            tool_name: row.get(2).map_err(unreadable)?,
            args_bytes: row.get::<_, i64>(3).map_err(unreadable)? as usize,
            created_ms: row.get::<_, i64>(4).map_err(unreadable)? as u64,
            started_ms: row.get::<_, Option<i64>>(5).map_err(unreadable)?.map(|ms| ms as u64),
            completed_ms: row.get::<_, Option<i64>>(9).map_err(unreadable)?.map(|ms| ms as u64),
            result_bytes: row.get::<_, Option<i64>>(10).map_err(unreadable)?.map(|n| n as usize),
        })
    }

    fn event(&self, mark: Mark, record: Record) -> Event {
        Event {
            number: mark.number,
            call_id: self.id.clone(),
            run_id: self.run_id.clone(),
            asked_as: self.asked_as.clone(),
            record,
        }
    }

    fn implied(&self, mark: Mark) -> Option<Record> {
        let facts = Facts {
            tool_name: &self.tool_name,
            args_bytes: self.args_bytes,
            created_ms: self.created_ms,
            started_ms: self.started_ms,
            completed_ms: self.completed_ms,
            result_bytes: self.result_bytes,
        };
        facts.record(mark.implied()?)
    }
}

pub(super) fn events(
    connection: &Connection,
    scope: &EventScope,
    after: u64,
    limit: usize,
) -> Result<Vec<Event>, StoreError> {
    match scope {
        EventScope::Call { project, id } => {
            let sql = format!("SELECT {COLUMNS} FROM calls WHERE project = ?1 AND id = ?2");
            let bound = params![project, id.as_str()];
            of_calls(connection, &collect(connection, &sql, bound, History::read)?, after, limit)
        }
        EventScope::Run { project, run_id } if !is_small(connection, project, run_id)? => {
            in_order(connection, (project, Some(run_id)), after, limit)
        }
        EventScope::Run { project, run_id } => {
            let sql = format!("SELECT {COLUMNS} FROM calls WHERE project = ?1 AND run_id = ?2");
            let bound = params![project, run_id];
            of_calls(connection, &collect(connection, &sql, bound, History::read)?, after, limit)
        }
        EventScope::Project(project) => in_order(connection, (project, None), after, limit),
    }
}

/// Returns true if the events of a run are found call by call. Those of a larger run are found by
/// number: it may contain every call in the database.
fn is_small(connection: &Connection, project: &str, run_id: &str) -> Result<bool, StoreError> {
    Ok(counted(connection, "calls_by_run", "run_id", project, run_id)? < MANY)
}

/// Returns the first `limit` events of these calls after a number.
fn of_calls(
    connection: &Connection,
    calls: &[History],
    after: u64,
    limit: usize,
) -> Result<Vec<Event>, StoreError> {
    let mut found: Vec<(Mark, &History)> = calls
        .iter()
        .flat_map(|call| marks(&call.list).map(move |mark| (mark, call)))
        .filter(|(mark, _)| mark.number > after)
        .collect();
    found.sort_by_key(|(mark, _)| mark.number);
    found.truncate(limit);
    let mut events = Vec::with_capacity(found.len());
    for (mark, call) in found {
        let record = match call.implied(mark) {
            Some(record) => Some(record),
            None => row(connection, mark.number)?,
        };
        events.extend(record.map(|record| call.event(mark, record)));
    }
    Ok(events)
}

fn row(connection: &Connection, number: u64) -> Result<Option<Record>, StoreError> {
    let sql = "SELECT kind, at_ms, attempt, data FROM events WHERE number = ?1";
    Ok(collect(connection, sql, params![number as i64], |row| read_record(row))?.pop())
}

/// Returns the newest record of a kind in a call's history. Searches from the end.
pub(super) fn newest_record(
    connection: &Connection,
    project: &str,
    id: &CallId,
    kind: Kind,
) -> Result<Option<Record>, StoreError> {
    let sql = format!("SELECT {COLUMNS} FROM calls WHERE project = ?1 AND id = ?2");
    let found = collect(connection, &sql, params![project, id.as_str()], History::read)?.pop();
    let Some(call) = found else { return Ok(None) };
    let mut newest_first: Vec<Mark> = marks(&call.list).collect();
    newest_first.sort_by_key(|mark| std::cmp::Reverse(mark.number));
    for mark in newest_first {
        let record = match call.implied(mark) {
            Some(record) => Some(record),
            None => row(connection, mark.number)?,
        };
        if record.as_ref().is_some_and(|record| record.kind == kind) {
            return Ok(record);
        }
    }
    Ok(None)
}

/// A project, and optionally one run in it.
type Within<'a> = (&'a str, Option<&'a str>);

/// Merges two sorted lists: events that have rows, and events that new calls imply. Places follow
/// the order of the calls' first event numbers, so a binary search finds the place to start from.
fn in_order(
    connection: &Connection,
    within: Within<'_>,
    after: u64,
    limit: usize,
) -> Result<Vec<Event>, StoreError> {
    let (sql_after, sql_limit) =
        (i64::try_from(after).unwrap_or(i64::MAX), i64::try_from(limit).unwrap_or(i64::MAX));
    let sql = "SELECT e.kind, e.at_ms, e.attempt, e.data, e.number, c.id, c.run_id, \
               c.envelope ->> 'call_id' \
               FROM events e CROSS JOIN calls c ON c.place = e.place \
               WHERE e.number > ?2 AND c.project = ?1 AND (?4 IS NULL OR c.run_id = ?4) \
               ORDER BY e.number LIMIT ?3";
    let bound = params![within.0, sql_after, sql_limit, within.1];
    let mut all = collect(connection, sql, bound, |row| {
        let unreadable = |error: rusqlite::Error| StoreError::Corrupt(error.to_string());
        let id: String = row.get(5).map_err(unreadable)?;
        Ok(Event {
            number: row.get::<_, i64>(4).map_err(unreadable)? as u64,
            call_id: id.parse().map_err(|_| StoreError::Corrupt(format!("call id {id}")))?,
            run_id: row.get(6).map_err(unreadable)?,
            asked_as: row.get(7).map_err(unreadable)?,
            record: read_record(row)?,
        })
    })?;
    // When the page is full, no event after its last one can be part of it.
    let until = all.last().filter(|_| all.len() >= limit).map_or(u64::MAX, |last| last.number);
    all.extend(implied_in(connection, within, (after, until), limit)?);
    all.sort_by_key(|event| event.number);
    all.truncate(limit);
    Ok(all)
}

/// Returns the implied events between two numbers: the first `limit`, and possibly a few more.
fn implied_in(
    connection: &Connection,
    (project, run_id): Within<'_>,
    (after, until): (u64, u64),
    limit: usize,
) -> Result<Vec<Event>, StoreError> {
    let broken = |error: rusqlite::Error| failed(&error);
    let first = first_place(connection, after).map_err(broken)?;
    let sql = format!("SELECT {COLUMNS} FROM calls WHERE place >= ?1 ORDER BY place");
    let mut select = connection.prepare_cached(&sql).map_err(broken)?;
    let mut rows = select.query([first]).map_err(broken)?;
    let mut found = Vec::new();
    while let Some(row) = rows.next().map_err(broken)? {
        let text = |column: usize| Ok(row.get_ref(column).map_err(broken)?.as_str().ok());
        let begins = text(1)?.and_then(|list| marks(list).next());
        if begins.is_some_and(|mark| mark.number > until) || found.len() >= limit {
            break;
        }
        if text(6)? != Some(project) || run_id.is_some() && text(7)? != run_id {
            continue;
        }
        let call = History::read(row)?;
        for mark in marks(&call.list).filter(|mark| mark.number > after) {
            found.extend(call.implied(mark).map(|record| call.event(mark, record)));
        }
    }
    Ok(found)
}

/// Returns the place of the last call whose first event number is at most `after`, or the first
/// place.
fn first_place(connection: &Connection, after: u64) -> rusqlite::Result<i64> {
    let ends = "SELECT coalesce(min(place), 0), coalesce(max(place), 0) FROM calls";
    let (mut low, mut high): (i64, i64) =
        connection.query_row(ends, [], |row| Ok((row.get(0)?, row.get(1)?)))?;
    let mut select = connection
        .prepare_cached("SELECT place, events FROM calls WHERE place <= ?1 ORDER BY place DESC")?;
    while low < high {
        let middle = low + (high - low + 1) / 2;
        let found: Option<(i64, String)> =
            select.query_row([middle], |row| Ok((row.get(0)?, row.get(1)?))).optional()?;
        let Some((place, list)) = found else { break };
        match marks(&list).next() {
            Some(mark) if mark.number > after => high = place.min(middle) - 1,
            _ => low = middle,
        }
    }
    Ok(low)
}

pub(super) fn newest_event(connection: &Connection, scope: &EventScope) -> Result<u64, StoreError> {
    if let EventScope::Call { .. } | EventScope::Run { .. } = scope {
        let all = events(connection, scope, 0, usize::MAX >> 1)?;
        return Ok(all.last().map_or(0, |event| event.number));
    }
    // The newest event of the whole store: a subscriber that starts from it sees everything that
    // comes later.
    newest_number(connection).map(|number| number as u64).map_err(|error| failed(&error))
}

/// Returns the highest event number in use, in a row or in the newest call.
pub(super) fn newest_number(connection: &Connection) -> rusqlite::Result<i64> {
    let row: Option<i64> =
        connection.query_row("SELECT max(number) FROM events", [], |row| row.get(0))?;
    let newest = "SELECT events FROM calls ORDER BY place DESC LIMIT 1";
    let list: Option<String> = connection.query_row(newest, [], |row| row.get(0)).optional()?;
    let implied = list.and_then(|list| marks(&list).map(|mark| mark.number as i64).max());
    let noted = super::loops::newest_number(connection)?;
    Ok(row.unwrap_or(0).max(implied.unwrap_or(0)).max(noted))
}
