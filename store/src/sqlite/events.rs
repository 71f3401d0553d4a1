//! Reads events. A call's row lists the numbers of its events and implies some of them.

use rusqlite::{Connection, OptionalExtension, Row, params};
use toolcrib::domain::event::{CallEvent, EventKind, EventRecord};
use toolcrib::domain::id::CallId;
use toolcrib::ports::store::{EventScope, StoreError};

use super::call_queries::{COUNT_CAP, count_capped};
use super::event_numbers::{EventRef, newest_event_number, parse_event_refs};
use super::reader::{query_map, to_store_error};
use crate::row::{CallEventFacts, RowReader, columns, read_record};

columns! {
    /// The columns that [`CallHistory`] reads.
    HISTORY_COLUMNS, HistoryColumn {
        Id = "tool_call_id",
        EventList = "events",
        ToolName = "tool_name",
        ArgsBytes = "octet_length(args)",
        CreatedMs = "created_ms",
        StartedMs = "started_ms",
        Project = "project",
        RunId = "run_id",
        CallerCallId = "envelope ->> 'call_id'",
        CompletedMs = "completed_ms",
        ResultBytes = "octet_length(result)",
    }
}

/// The facts about a call's events in its row.
struct CallHistory {
    id: CallId,
    run_id: String,
    caller_call_id: Option<String>,
    event_list: String,
    tool_name: String,
    args_bytes: usize,
    created_ms: u64,
    started_ms: Option<u64>,
    completed_ms: Option<u64>,
    result_bytes: Option<usize>,
}

impl CallHistory {
    fn read(row: &Row<'_>) -> Result<Self, StoreError> {
        Ok(Self {
            id: row.call_id(HistoryColumn::Id as usize)?,
            run_id: row.text(HistoryColumn::RunId as usize)?,
            caller_call_id: row.optional_text(HistoryColumn::CallerCallId as usize)?,
            event_list: row.text(HistoryColumn::EventList as usize)?,
            tool_name: row.text(HistoryColumn::ToolName as usize)?,
            args_bytes: row.integer(HistoryColumn::ArgsBytes as usize)? as usize,
            created_ms: row.unsigned(HistoryColumn::CreatedMs as usize)?,
            started_ms: row.optional_unsigned(HistoryColumn::StartedMs as usize)?,
            completed_ms: row.optional_unsigned(HistoryColumn::CompletedMs as usize)?,
            result_bytes: row
                .optional_integer(HistoryColumn::ResultBytes as usize)?
                .map(|n| n as usize),
        })
    }

    fn to_event(&self, event_ref: EventRef, record: EventRecord) -> CallEvent {
        CallEvent {
            number: event_ref.number,
            call_id: self.id.clone(),
            run_id: self.run_id.clone(),
            caller_call_id: self.caller_call_id.clone(),
            record,
        }
    }

    fn build_implied_record(&self, event_ref: EventRef) -> Option<EventRecord> {
        let facts = CallEventFacts {
            tool_name: &self.tool_name,
            args_bytes: self.args_bytes,
            created_ms: self.created_ms,
            started_ms: self.started_ms,
            completed_ms: self.completed_ms,
            result_bytes: self.result_bytes,
        };
        facts.build_record(event_ref.implied_event()?)
    }
}

pub(super) fn list_events(
    connection: &Connection,
    scope: &EventScope,
    after: u64,
    limit: usize,
) -> Result<Vec<CallEvent>, StoreError> {
    match scope {
        EventScope::Call { project, id } => {
            let sql = format!(
                "SELECT {HISTORY_COLUMNS} FROM tool_calls WHERE project = ?1 AND tool_call_id = ?2"
            );
            let bound = params![project, id.as_str()];
            list_events_of_calls(
                connection,
                &query_map(connection, &sql, bound, CallHistory::read)?,
                after,
                limit,
            )
        }
        EventScope::Run { project, run_id } if !is_small_run(connection, project, run_id)? => {
            list_events_by_number(connection, (project, Some(run_id)), after, limit)
        }
        EventScope::Run { project, run_id } => {
            let sql = format!(
                "SELECT {HISTORY_COLUMNS} FROM tool_calls WHERE project = ?1 AND run_id = ?2"
            );
            let bound = params![project, run_id];
            list_events_of_calls(
                connection,
                &query_map(connection, &sql, bound, CallHistory::read)?,
                after,
                limit,
            )
        }
        EventScope::Project(project) => {
            list_events_by_number(connection, (project, None), after, limit)
        }
    }
}

/// Returns true if the events of a run are found call by call. Those of a larger run are found by
/// number: it may contain every call in the database.
fn is_small_run(connection: &Connection, project: &str, run_id: &str) -> Result<bool, StoreError> {
    Ok(count_capped(connection, "tool_calls_by_run", "run_id", project, run_id)? < COUNT_CAP)
}

/// Returns the first `limit` events of these calls after a number.
fn list_events_of_calls(
    connection: &Connection,
    calls: &[CallHistory],
    after: u64,
    limit: usize,
) -> Result<Vec<CallEvent>, StoreError> {
    let mut found: Vec<(EventRef, &CallHistory)> = calls
        .iter()
        .flat_map(|call| parse_event_refs(&call.event_list).map(move |event_ref| (event_ref, call)))
        .filter(|(event_ref, _)| event_ref.number > after)
        .collect();
    found.sort_by_key(|(event_ref, _)| event_ref.number);
    found.truncate(limit);
    let mut events = Vec::with_capacity(found.len());
    for (event_ref, call) in found {
        let record = match call.build_implied_record(event_ref) {
            Some(record) => Some(record),
            None => read_event_record(connection, event_ref.number)?,
        };
        events.extend(record.map(|record| call.to_event(event_ref, record)));
    }
    Ok(events)
}

fn read_event_record(
    connection: &Connection,
    number: u64,
) -> Result<Option<EventRecord>, StoreError> {
    let sql = "SELECT kind, at_ms, attempt, data FROM events WHERE number = ?1";
    Ok(query_map(connection, sql, params![number as i64], |row| read_record(row))?.pop())
}

/// Returns the newest record of a kind in a call's history. Searches from the end.
pub(super) fn newest_record(
    connection: &Connection,
    project: &str,
    id: &CallId,
    kind: EventKind,
) -> Result<Option<EventRecord>, StoreError> {
    let sql = format!(
        "SELECT {HISTORY_COLUMNS} FROM tool_calls WHERE project = ?1 AND tool_call_id = ?2"
    );
    let found =
        query_map(connection, &sql, params![project, id.as_str()], CallHistory::read)?.pop();
    let Some(call) = found else { return Ok(None) };
    let mut newest_first: Vec<EventRef> = parse_event_refs(&call.event_list).collect();
    newest_first.sort_by_key(|event_ref| std::cmp::Reverse(event_ref.number));
    for event_ref in newest_first {
        let record = match call.build_implied_record(event_ref) {
            Some(record) => Some(record),
            None => read_event_record(connection, event_ref.number)?,
        };
        if record.as_ref().is_some_and(|record| record.kind == kind) {
            return Ok(record);
        }
    }
    Ok(None)
}

/// A project, and optionally one run in it.
type ProjectRunFilter<'a> = (&'a str, Option<&'a str>);

/// Merges two sorted lists: events that have rows, and events that new calls imply. Positions
/// follow the order of the calls' first event numbers, so a binary search finds the position to
/// start from.
fn list_events_by_number(
    connection: &Connection,
    within: ProjectRunFilter<'_>,
    after: u64,
    limit: usize,
) -> Result<Vec<CallEvent>, StoreError> {
    let (sql_after, sql_limit) =
        (i64::try_from(after).unwrap_or(i64::MAX), i64::try_from(limit).unwrap_or(i64::MAX));
    let sql = "SELECT e.kind, e.at_ms, e.attempt, e.data, e.number, c.tool_call_id, c.run_id, \
               c.envelope ->> 'call_id' \
               FROM events e CROSS JOIN tool_calls c ON c.place = e.place \
               WHERE e.number > ?2 AND c.project = ?1 AND (?4 IS NULL OR c.run_id = ?4) \
               ORDER BY e.number LIMIT ?3";
    let bound = params![within.0, sql_after, sql_limit, within.1];
    let mut all = query_map(connection, sql, bound, |row| {
        let unreadable = |error: rusqlite::Error| StoreError::Corrupt(error.to_string());
        let id: String = row.get(5).map_err(unreadable)?;
        Ok(CallEvent {
            number: row.get::<_, i64>(4).map_err(unreadable)? as u64,
            call_id: id.parse().map_err(|_| StoreError::Corrupt(format!("call id {id}")))?,
            run_id: row.get(6).map_err(unreadable)?,
            caller_call_id: row.get(7).map_err(unreadable)?,
            record: read_record(row)?,
        })
    })?;
    // When the page is full, no event after its last one can be part of it.
    let until = all.last().filter(|_| all.len() >= limit).map_or(u64::MAX, |last| last.number);
    all.extend(list_implied_events(connection, within, (after, until), limit)?);
    all.sort_by_key(|event| event.number);
    all.truncate(limit);
    Ok(all)
}

/// Returns the implied events between two numbers: the first `limit`, and possibly a few more.
fn list_implied_events(
    connection: &Connection,
    (project, run_id): ProjectRunFilter<'_>,
    (after, until): (u64, u64),
    limit: usize,
) -> Result<Vec<CallEvent>, StoreError> {
    let broken = |error: rusqlite::Error| to_store_error(&error);
    let first = find_start_position(connection, after).map_err(broken)?;
    let sql = format!("SELECT {HISTORY_COLUMNS} FROM tool_calls WHERE place >= ?1 ORDER BY place");
    let mut select = connection.prepare_cached(&sql).map_err(broken)?;
    let mut rows = select.query([first]).map_err(broken)?;
    let mut found = Vec::new();
    while let Some(row) = rows.next().map_err(broken)? {
        let text =
            |column: HistoryColumn| Ok(row.get_ref(column as usize).map_err(broken)?.as_str().ok());
        let begins = text(HistoryColumn::EventList)?.and_then(|list| parse_event_refs(list).next());
        if begins.is_some_and(|event_ref| event_ref.number > until) || found.len() >= limit {
            break;
        }
        if text(HistoryColumn::Project)? != Some(project)
            || run_id.is_some() && text(HistoryColumn::RunId)? != run_id
        {
            continue;
        }
        let call = CallHistory::read(row)?;
        for event_ref in
            parse_event_refs(&call.event_list).filter(|event_ref| event_ref.number > after)
        {
            found.extend(
                call.build_implied_record(event_ref).map(|record| call.to_event(event_ref, record)),
            );
        }
    }
    Ok(found)
}

/// Returns the position of the last call whose first event number is at most `after`, or the first
/// position.
fn find_start_position(connection: &Connection, after: u64) -> rusqlite::Result<i64> {
    let ends = "SELECT coalesce(min(place), 0), coalesce(max(place), 0) FROM tool_calls";
    let (mut low, mut high): (i64, i64) =
        connection.query_row(ends, [], |row| Ok((row.get(0)?, row.get(1)?)))?;
    let mut select = connection.prepare_cached(
        "SELECT place, events FROM tool_calls WHERE place <= ?1 ORDER BY place DESC",
    )?;
    while low < high {
        let middle = low + (high - low + 1) / 2;
        let found: Option<(i64, String)> =
            select.query_row([middle], |row| Ok((row.get(0)?, row.get(1)?))).optional()?;
        let Some((position, list)) = found else { break };
        match parse_event_refs(&list).next() {
            Some(event_ref) if event_ref.number > after => high = position.min(middle) - 1,
            _ => low = middle,
        }
    }
    Ok(low)
}

pub(super) fn last_event_number(
    connection: &Connection,
    scope: &EventScope,
) -> Result<u64, StoreError> {
    if let EventScope::Call { .. } | EventScope::Run { .. } = scope {
        let all = list_events(connection, scope, 0, usize::MAX >> 1)?;
        return Ok(all.last().map_or(0, |event| event.number));
    }
    // The newest event of the whole store: a subscriber that starts from it sees everything that
    // comes later.
    newest_event_number(connection)
        .map(|number| number as u64)
        .map_err(|error| to_store_error(&error))
}
