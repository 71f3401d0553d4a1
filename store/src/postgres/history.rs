//! Reads events. Every event has a row, numbered in commit order.

use tokio_postgres::Row;
use toolcrib::event::{Event, Kind, Record};
use toolcrib::id::CallId;
use toolcrib::store::{EventScope, StoreError};

use super::limited;
use super::link::{Bound, Broke, Session};
use crate::row::{Fields, asked_as, read_record};

const SELECT: &str = "SELECT e.kind, e.at_ms, e.attempt, e.data, e.number, c.id, c.run_id, \
     c.envelope FROM events e JOIN calls c ON c.place = e.place WHERE e.number > $1 AND";

fn read(row: &Row) -> Result<Event, StoreError> {
    Ok(Event {
        number: row.whole(4)?,
        call_id: row.call_id(5)?,
        run_id: row.text(6)?,
        asked_as: asked_as(&row.text(7)?)?,
        record: read_record(row)?,
    })
}

pub(super) async fn events(
    session: &Session,
    scope: &EventScope,
    after: u64,
    limit: usize,
) -> Result<Vec<Event>, Broke> {
    let (after, limit) = (i64::try_from(after).unwrap_or(i64::MAX), limited(limit));
    let page =
        |condition: &str, n: usize| format!("{SELECT} {condition} ORDER BY e.number LIMIT ${n}");
    let (sql, bound): (String, Bound<'_>) = match scope {
        EventScope::Call { project, id } => {
            (page("c.project = $2 AND c.id = $3", 4), &[&after, project, &id.as_str(), &limit])
        }
        EventScope::Run { project, run_id } => {
            (page("c.project = $2 AND c.run_id = $3", 4), &[&after, project, run_id, &limit])
        }
        EventScope::Project(project) => (page("e.project = $2", 3), &[&after, project, &limit]),
    };
    session.collect(&sql, bound, read).await
}

pub(super) async fn newest_event(session: &Session, scope: &EventScope) -> Result<u64, Broke> {
    const OF: &str = "SELECT coalesce(max(e.number), 0) FROM calls c JOIN events e \
                      ON e.place = c.place WHERE c.project = $1 AND";
    let (sql, bound): (String, Bound<'_>) = match scope {
        EventScope::Call { project, id } => (format!("{OF} c.id = $2"), &[project, &id.as_str()]),
        EventScope::Run { project, run_id } => (format!("{OF} c.run_id = $2"), &[project, run_id]),
        // The newest event of the whole store: a subscriber that starts from it sees everything
        // that comes later.
        EventScope::Project(_) => (
            "SELECT greatest((SELECT max(number) FROM events), \
             (SELECT max(number) FROM loop_entries), 0::bigint)"
                .to_owned(),
            &[],
        ),
    };
    let row = session.row(&sql, bound).await?;
    Ok(row.map(|row| row.whole(0)).transpose()?.unwrap_or(0))
}

/// Returns the newest record of a kind in a call's history.
pub(super) async fn newest_record(
    session: &Session,
    project: &str,
    id: &CallId,
    kind: Kind,
) -> Result<Option<Record>, Broke> {
    let sql = "SELECT e.kind, e.at_ms, e.attempt, e.data FROM calls c JOIN events e \
               ON e.place = c.place WHERE c.project = $1 AND c.id = $2 AND e.kind = $3 \
               ORDER BY e.number DESC LIMIT 1";
    let found = session.row(sql, &[&project, &id.as_str(), &kind.as_str()]).await?;
    Ok(found.map(|row| read_record(&row)).transpose()?)
}
