//! Reads of calls. Each list uses the one index that fits it best.

use rusqlite::{Connection, OptionalExtension, Row, ToSql, params};
use toolcrib::domain::call::{Call, Status};
use toolcrib::domain::id::CallId;
use toolcrib::ports::store::{
    CallFilter, CreateCallResult, IdempotencyKey, OpenCallRow, StoreError,
};

use super::open_calls::OpenCalls;
use super::reader::{query_map, to_store_error};
use crate::row::{CALL_COLUMNS, read_call};

/// Limit up to which calls are counted.
pub(super) const COUNT_CAP: i64 = 5_000;

fn read_call_row(row: &Row<'_>) -> Result<Call, StoreError> {
    read_call(row).map(|(_, call)| call)
}

pub(super) fn find_call(
    connection: &Connection,
    project: &str,
    id: &CallId,
) -> Result<Option<Call>, StoreError> {
    let sql =
        format!("SELECT {CALL_COLUMNS} FROM tool_calls WHERE project = ?1 AND tool_call_id = ?2");
    Ok(query_map(connection, &sql, params![project, id.as_str()], read_call_row)?.pop())
}

/// Lists calls by the one index that fits the filter best; conditions outside that index are
/// checked row by row.
pub(super) fn list_calls(
    connection: &Connection,
    filter: &CallFilter,
    open: &OpenCalls,
) -> Result<Vec<Call>, StoreError> {
    if matches!(filter.status, Some(Status::Pending | Status::Running)) {
        return filter_open_calls(connection, filter, open);
    }
    if filter.background {
        return list_background_calls(connection, filter);
    }
    let not_ok = filter.status.is_some_and(|status| status != Status::Succeeded);
    let index = match (&filter.run_id, &filter.tool_name) {
        (Some(_), _) if not_ok => "tool_calls_not_ok_by_run",
        (Some(run_id), Some(tool)) => {
            let run =
                count_capped(connection, "tool_calls_by_run", "run_id", &filter.project, run_id)?;
            let tool =
                count_capped(connection, "tool_calls_by_tool", "tool_name", &filter.project, tool)?;
            if run <= tool { "tool_calls_by_run" } else { "tool_calls_by_tool" }
        }
        (Some(_), None) => "tool_calls_by_run",
        (None, Some(_)) if not_ok => "tool_calls_not_ok_by_tool",
        (None, None) if not_ok => "tool_calls_not_ok",
        (None, Some(_)) => "tool_calls_by_tool",
        (None, None) => "tool_calls_by_id",
    };
    let mut sql =
        format!("SELECT {CALL_COLUMNS} FROM tool_calls INDEXED BY {index} WHERE project = ?1");
    let mut bound: Vec<Box<dyn ToSql>> = vec![Box::new(filter.project.clone())];
    let mut and = |condition: &str, value: Box<dyn ToSql>| {
        bound.push(value);
        sql.push_str(&format!(" AND {condition} ?{}", bound.len()));
    };
    if let Some(before) = &filter.before {
        and("tool_call_id <", Box::new(before.as_str().to_owned()));
    }
    if let Some(run_id) = &filter.run_id {
        and("run_id =", Box::new(run_id.clone()));
    }
    if let Some(tool_name) = &filter.tool_name {
        and("tool_name =", Box::new(tool_name.clone()));
    }
    if let Some(since_ms) = filter.since_ms {
        // An id starts with the creation time of its call.
        let floor = CallId::min_at(since_ms.min((1 << 48) - 1));
        and("tool_call_id >=", Box::new(floor.as_str().to_owned()));
        and("created_ms >=", Box::new(since_ms as i64));
    }
    // SQLite uses a partial index only if its condition is a literal, so the status is not a
    // parameter.
    if let Some(status) = filter.status {
        sql.push_str(&format!(" AND status = '{}'", status.as_str()));
    }
    if not_ok {
        sql.push_str(" AND error IS NOT NULL");
    }
    let limit = i64::try_from(filter.limit).unwrap_or(i64::MAX);
    sql.push_str(&format!(" ORDER BY tool_call_id DESC LIMIT {limit}"));
    let bound: Vec<&dyn ToSql> = bound.iter().map(AsRef::as_ref).collect();
    read_page(connection, &sql, &bound, filter)
}

/// Counts the calls that an index has for a value, up to [`COUNT_CAP`].
pub(super) fn count_capped(
    connection: &Connection,
    index: &str,
    column: &str,
    project: &str,
    value: &str,
) -> Result<i64, StoreError> {
    let sql = format!(
        "SELECT count(*) FROM (SELECT 1 FROM tool_calls INDEXED BY {index} \
         WHERE project = ?1 AND {column} = ?2 LIMIT {COUNT_CAP})"
    );
    let broken = |error: rusqlite::Error| to_store_error(&error);
    let mut select = connection.prepare_cached(&sql).map_err(broken)?;
    select.query_row(params![project, value], |row| row.get(0)).map_err(broken)
}

/// Reads calls until the page is full.
fn read_page(
    connection: &Connection,
    sql: &str,
    bound: &[&dyn ToSql],
    filter: &CallFilter,
) -> Result<Vec<Call>, StoreError> {
    let broken = |error: rusqlite::Error| to_store_error(&error);
    let mut select = connection.prepare_cached(sql).map_err(broken)?;
    let mut rows = select.query(bound).map_err(broken)?;
    let (mut calls, mut bytes) = (Vec::new(), 0);
    while !filter.is_page_full(bytes) {
        let Some(row) = rows.next().map_err(broken)? else { break };
        let call = read_call_row(row)?;
        bytes += call.estimated_bytes();
        calls.push(call);
    }
    Ok(calls)
}

/// Lists background calls. They have a table of their own; all other conditions are checked row by
/// row.
fn list_background_calls(
    connection: &Connection,
    filter: &CallFilter,
) -> Result<Vec<Call>, StoreError> {
    let sql = format!(
        "SELECT {CALL_COLUMNS} FROM \
         (SELECT call_id, place AS at FROM tasks WHERE project = ?1 AND call_id < ?2) \
         CROSS JOIN tool_calls ON place = at \
         WHERE (?3 IS NULL OR run_id = ?3) AND (?4 IS NULL OR tool_name = ?4) \
         AND (?5 IS NULL OR status = ?5) AND created_ms >= ?6 \
         ORDER BY call_id DESC LIMIT ?7"
    );
    // Every id sorts before this.
    let before = filter.before.as_ref().map_or("u", CallId::as_str);
    let since_ms = i64::try_from(filter.since_ms.unwrap_or(0)).unwrap_or(i64::MAX);
    let limit = i64::try_from(filter.limit).unwrap_or(i64::MAX);
    let status = filter.status.map(Status::as_str);
    let bound =
        params![filter.project, before, filter.run_id, filter.tool_name, status, since_ms, limit];
    read_page(connection, &sql, bound, filter)
}

/// Lists open calls. They are few, and their positions are in memory.
fn filter_open_calls(
    connection: &Connection,
    filter: &CallFilter,
    open: &OpenCalls,
) -> Result<Vec<Call>, StoreError> {
    let fits = |call: &Call| {
        call.project == filter.project
            && Some(call.status) == filter.status
            && filter.run_id.as_ref().is_none_or(|run_id| *run_id == call.run_id)
            && filter.tool_name.as_ref().is_none_or(|tool| *tool == call.tool_name)
            && filter.since_ms.is_none_or(|since_ms| call.created_ms >= since_ms)
            && (!filter.background || call.origin.background)
            && filter.before.as_ref().is_none_or(|before| call.id < *before)
    };
    let mut page = Vec::new();
    for position in open.newest_first() {
        page.extend(find_call_at(connection, position)?.map(|open| open.call).filter(fits));
        // Ids and positions have nearly the same order; reading slightly more than a page and
        // sorting it gives the right one.
        if page.len() >= filter.limit.saturating_add(64) {
            break;
        }
    }
    page.sort_by(|a, b| b.id.cmp(&a.id));
    page.truncate(filter.limit);
    Ok(page)
}

fn find_call_at(connection: &Connection, position: i64) -> Result<Option<OpenCallRow>, StoreError> {
    let sql = format!("SELECT {CALL_COLUMNS} FROM tool_calls WHERE place = ?1");
    let found = query_map(connection, &sql, params![position], |row| {
        read_call(row).map(|(position, call)| OpenCallRow { position, call })
    })?;
    Ok(found.into_iter().next())
}

/// Returns a page of open calls. Calls that ended after their position was looked up are omitted;
/// an empty page means that there are no more.
pub(super) fn list_open_calls(
    connection: &Connection,
    open: &OpenCalls,
    mut after: u64,
    limit: usize,
) -> Result<Vec<OpenCallRow>, StoreError> {
    let mut page = Vec::new();
    loop {
        let positions = open.page_after(after, limit);
        let Some(last) = positions.last() else { return Ok(page) };
        after = *last as u64;
        for position in positions {
            let found = find_call_at(connection, position)?;
            page.extend(found.filter(|open| !open.call.status.is_terminal()));
        }
        if !page.is_empty() {
            return Ok(page);
        }
    }
}

/// Returns the call that was created with this idempotency key, if there is one.
pub(super) fn find_by_idempotency_key(
    connection: &Connection,
    project: &str,
    key: &IdempotencyKey,
) -> rusqlite::Result<Option<CreateCallResult>> {
    let used: Option<(String, i64)> = connection
        .prepare_cached(
            "SELECT fingerprint, place FROM idempotency_keys \
             WHERE project = ?1 AND agent = ?2 AND key = ?3",
        )?
        .query_row(params![project, key.agent, key.key], |row| Ok((row.get(0)?, row.get(1)?)))
        .optional()?;
    let Some((fingerprint, position)) = used else { return Ok(None) };
    let sql = format!("SELECT {CALL_COLUMNS} FROM tool_calls WHERE place = ?1");
    let mut select = connection.prepare_cached(&sql)?;
    let mut rows = select.query([position])?;
    let row = rows.next()?.ok_or(rusqlite::Error::QueryReturnedNoRows)?;
    let (_, call) = read_call(row).map_err(|_| rusqlite::Error::InvalidQuery)?;
    if fingerprint != key.fingerprint {
        return Ok(Some(CreateCallResult::Mismatch(call.id)));
    }
    Ok(Some(CreateCallResult::Replayed(Box::new(call))))
}
