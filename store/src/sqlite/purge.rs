//! Deletes ended calls and what belongs to them, and old runs.

use rusqlite::Connection;
use toolcrib::ports::store::PurgeResult;

use super::calls::approvals::{DELETE_APPROVALS_SQL, purge_standing};
use super::event_numbers::parse_event_refs;
use super::writer::WriterConnection;
use super::{run_tools, runs};

/// Deletes up to `limit` calls and runs that ended before a time.
pub(super) fn purge(
    writer: &mut WriterConnection,
    ended_before_ms: u64,
    limit: usize,
) -> rusqlite::Result<PurgeResult> {
    let before_ms = i64::try_from(ended_before_ms).unwrap_or(i64::MAX);
    let last_event_number = writer.last_event_number()?;
    let connection = writer.connection()?;
    let positions = find_ended_calls(connection, before_ms, limit)?;
    positions.iter().try_for_each(|position| delete_call(connection, *position))?;
    connection
        .prepare_cached("INSERT OR REPLACE INTO counters VALUES ('last_event', ?1)")?
        .execute([last_event_number])?;
    let run_tools = run_tools::purge_run_tools(connection, before_ms, limit)?;
    let runs = runs::purge_runs(connection, before_ms, limit)?;
    let standing = purge_standing(connection, before_ms, limit)?;
    let boxes = connection
        .prepare_cached(
            "DELETE FROM card_boxes WHERE (project, box_id) IN (SELECT project, box_id \
             FROM card_boxes WHERE created_ms < ?1 ORDER BY created_ms LIMIT ?2)",
        )?
        .execute([before_ms, i64::try_from(limit).unwrap_or(i64::MAX)])?;
    // SQLite reuses the positions of the newest calls after they are purged: the low watermark must
    // not be ahead of them.
    connection
        .prepare_cached(
            "UPDATE counters SET value = min(value, \
             (SELECT coalesce(max(place), 0) + 1 FROM tool_calls)) WHERE name = 'first_open'",
        )?
        .execute([])?;
    let calls = positions.len();
    let has_more = [calls, run_tools, runs, standing, boxes].contains(&limit);
    Ok(PurgeResult { calls, has_more })
}

/// Returns the positions of calls that ended before a time. Scans the calls in insertion order up
/// to the first that is too young: a call that ended before a time was also created before it.
fn find_ended_calls(
    connection: &Connection,
    before_ms: i64,
    limit: usize,
) -> rusqlite::Result<Vec<i64>> {
    let mut select = connection
        .prepare_cached("SELECT place, created_ms, completed_ms FROM tool_calls ORDER BY place")?;
    let mut rows = select.query([])?;
    let mut positions = Vec::new();
    while let Some(row) = rows.next()? {
        let (created_ms, ended_ms): (i64, Option<i64>) = (row.get(1)?, row.get(2)?);
        if created_ms >= before_ms || positions.len() == limit {
            break;
        }
        if ended_ms.is_some_and(|ended_ms| ended_ms < before_ms) {
            positions.push(row.get(0)?);
        }
    }
    Ok(positions)
}

fn delete_call(connection: &Connection, position: i64) -> rusqlite::Result<()> {
    let list: String = connection
        .prepare_cached("SELECT events FROM tool_calls WHERE place = ?1")?
        .query_row([position], |row| row.get(0))?;
    for event in parse_event_refs(&list) {
        connection
            .prepare_cached("DELETE FROM events WHERE number = ?1")?
            .execute([event.number as i64])?;
    }
    for sql in [
        "DELETE FROM idempotency_keys WHERE place = ?1",
        "DELETE FROM tries WHERE place = ?1",
        "DELETE FROM deliveries WHERE place = ?1",
        "DELETE FROM tasks WHERE (project, call_id) IN \
         (SELECT project, tool_call_id FROM tool_calls WHERE place = ?1)",
        DELETE_APPROVALS_SQL,
        "DELETE FROM tool_calls WHERE place = ?1",
    ] {
        connection.prepare_cached(sql)?.execute([position])?;
    }
    Ok(())
}
