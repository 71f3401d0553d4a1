//! Reads events. Every event has a row, numbered in commit order.

use tokio_postgres::Row;
use toolcrib::domain::event::{CallEvent, EventKind, EventRecord};
use toolcrib::domain::id::CallId;
use toolcrib::ports::store::{EventScope, StoreError};

use super::limit_param;
use crate::postgres::session::{Session, SessionError, SqlParams};
use crate::row::{RowReader, decode_caller_call_id, read_record};

const SELECT_EVENTS_SQL: &str = "SELECT e.kind, e.at_ms, e.attempt, e.data, e.number, c.tool_call_id, c.run_id, \
     c.envelope FROM events e JOIN tool_calls c ON c.place = e.place WHERE e.number > $1 AND";

fn read_event(row: &Row) -> Result<CallEvent, StoreError> {
    Ok(CallEvent {
        number: row.unsigned(4)?,
        call_id: row.call_id(5)?,
        run_id: row.text(6)?,
        caller_call_id: decode_caller_call_id(&row.text(7)?)?,
        record: read_record(row)?,
    })
}

pub(super) async fn list_events(
    session: &Session,
    scope: &EventScope,
    after: u64,
    limit: usize,
) -> Result<Vec<CallEvent>, SessionError> {
    let (after, limit) = (i64::try_from(after).unwrap_or(i64::MAX), limit_param(limit));
    let page = |condition: &str, n: usize| {
        format!("{SELECT_EVENTS_SQL} {condition} ORDER BY e.number LIMIT ${n}")
    };
    let (sql, params): (String, SqlParams<'_>) = match scope {
        EventScope::Call { project, id } => (
            page("c.project = $2 AND c.tool_call_id = $3", 4),
            &[&after, project, &id.as_str(), &limit],
        ),
        EventScope::Run { project, run_id } => {
            (page("c.project = $2 AND c.run_id = $3", 4), &[&after, project, run_id, &limit])
        }
        EventScope::Project(project) => (page("e.project = $2", 3), &[&after, project, &limit]),
    };
    session.query_map(&sql, params, read_event).await
}

pub(super) async fn last_event_number(
    session: &Session,
    scope: &EventScope,
) -> Result<u64, SessionError> {
    const NEWEST_EVENT_SQL: &str = "SELECT coalesce(max(e.number), 0) FROM tool_calls c JOIN events e \
                      ON e.place = c.place WHERE c.project = $1 AND";
    let (sql, params): (String, SqlParams<'_>) = match scope {
        EventScope::Call { project, id } => {
            (format!("{NEWEST_EVENT_SQL} c.tool_call_id = $2"), &[project, &id.as_str()])
        }
        EventScope::Run { project, run_id } => {
            (format!("{NEWEST_EVENT_SQL} c.run_id = $2"), &[project, run_id])
        }
        // The newest event of the whole store: a subscriber that starts from it sees everything
        // that comes later.
        EventScope::Project(_) => (
            "SELECT greatest((SELECT max(number) FROM events), \
             (SELECT max(number) FROM loop_entries), 0::bigint)"
                .to_owned(),
            &[],
        ),
    };
    let row = session.query_first(&sql, params).await?;
    Ok(row.map(|row| row.unsigned(0)).transpose()?.unwrap_or(0))
}

/// Returns the newest record of a kind in a call's history.
pub(super) async fn newest_record(
    session: &Session,
    project: &str,
    id: &CallId,
    kind: EventKind,
) -> Result<Option<EventRecord>, SessionError> {
    let sql = "SELECT e.kind, e.at_ms, e.attempt, e.data FROM tool_calls c JOIN events e \
               ON e.place = c.place WHERE c.project = $1 AND c.tool_call_id = $2 AND e.kind = $3 \
               ORDER BY e.number DESC LIMIT 1";
    let found = session.query_first(sql, &[&project, &id.as_str(), &kind.as_str()]).await?;
    Ok(found.map(|row| read_record(&row)).transpose()?)
}
