//! Webhook deliveries. Only calls with a callback URL have one.

use rusqlite::{Connection, OptionalExtension, ToSql, params};
use toolcrib::domain::delivery::{Delivery, DeliveryAttempt, MAX_STORED_ATTEMPTS};
use toolcrib::domain::id::CallId;
use toolcrib::ports::store::{DeliveryFilter, SaveResult, StoreError};

use super::reader::query_map;
use crate::row::{DELIVERY_COLUMNS as COLUMNS, read_delivery as read, read_try};

/// Marks the delivery of the call at this position as due: the call has ended.
pub(super) fn mark_delivery_due(
    connection: &Connection,
    position: i64,
    at_ms: u64,
) -> rusqlite::Result<()> {
    connection
        .prepare_cached(
            "UPDATE deliveries SET status = 'pending', due_ms = ?1, version = version + 1 \
             WHERE place = ?2 AND status = 'waiting'",
        )?
        .execute(params![at_ms as i64, position])
        .map(|_| ())
}

pub(super) fn save_delivery(
    connection: &Connection,
    delivery: &Delivery,
    tried: Option<&DeliveryAttempt>,
) -> rusqlite::Result<SaveResult> {
    let position: Option<i64> = connection
        .prepare_cached(
            "UPDATE deliveries SET status = ?1, due_ms = ?2, tries = ?3, failures = ?4, \
             last_error = ?5, version = ?6 \
             WHERE project = ?7 AND call_id = ?8 AND version = ?6 - 1 RETURNING place",
        )?
        .query_row(
            params![
                delivery.status.as_str(),
                delivery.due_ms.map(|ms| ms as i64),
                delivery.attempts,
                delivery.failures,
                delivery.last_error,
                delivery.version as i64,
                delivery.project,
                delivery.call_id.as_str(),
            ],
            |row| row.get(0),
        )
        .optional()?;
    let Some(position) = position else { return Ok(SaveResult::Conflict) };
    if let Some(tried) = tried {
        connection.prepare_cached("INSERT INTO tries VALUES (?1, ?2, ?3, ?4, ?5, ?6)")?.execute(
            params![
                position,
                tried.number,
                tried.at_ms as i64,
                tried.duration_ms as i64,
                tried.status_code,
                tried.error,
            ],
        )?;
        connection
            .prepare_cached("DELETE FROM tries WHERE place = ?1 AND number <= ?2")?
            .execute(params![position, i64::from(tried.number) - i64::from(MAX_STORED_ATTEMPTS)])?;
    }
    Ok(SaveResult::Saved)
}

pub(super) fn list_pending(
    connection: &Connection,
    after: Option<&(u64, CallId)>,
    limit: usize,
) -> Result<Vec<Delivery>, StoreError> {
    let (after_ms, after_id) = after.map_or((-1, ""), |(ms, id)| (*ms as i64, id.as_str()));
    let sql = format!(
        "SELECT {COLUMNS} FROM deliveries INDEXED BY deliveries_due \
         WHERE due_ms IS NOT NULL AND (due_ms, call_id) > (?1, ?2) \
         ORDER BY due_ms, call_id LIMIT ?3"
    );
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    query_map(connection, &sql, params![after_ms, after_id, limit], |row| read(row))
}

pub(super) fn list(
    connection: &Connection,
    filter: &DeliveryFilter,
) -> Result<Vec<Delivery>, StoreError> {
    let mut sql = format!("SELECT {COLUMNS} FROM deliveries WHERE project = ?1");
    let mut bound: Vec<Box<dyn ToSql>> = vec![Box::new(filter.project.clone())];
    if let Some(status) = filter.status {
        bound.push(Box::new(status.as_str()));
        sql.push_str(&format!(" AND status = ?{}", bound.len()));
    }
    if let Some(before) = &filter.before {
        bound.push(Box::new(before.as_str().to_owned()));
        sql.push_str(&format!(" AND call_id < ?{}", bound.len()));
    }
    let limit = i64::try_from(filter.limit).unwrap_or(i64::MAX);
    sql.push_str(&format!(" ORDER BY call_id DESC LIMIT {limit}"));
    let bound: Vec<&dyn ToSql> = bound.iter().map(AsRef::as_ref).collect();
    query_map(connection, &sql, &bound, |row| read(row))
}

pub(super) fn find_delivery(
    connection: &Connection,
    project: &str,
    id: &CallId,
) -> Result<Option<(Delivery, Vec<DeliveryAttempt>)>, StoreError> {
    let sql = format!("SELECT {COLUMNS} FROM deliveries WHERE project = ?1 AND call_id = ?2");
    let found = query_map(connection, &sql, params![project, id.as_str()], |row| read(row))?.pop();
    let Some(delivery) = found else { return Ok(None) };
    let sql = "SELECT number, at_ms, duration_ms, status_code, error FROM tries \
               WHERE place = (SELECT place FROM deliveries WHERE project = ?1 AND call_id = ?2) \
               ORDER BY number";
    let tries = query_map(connection, sql, params![project, id.as_str()], |row| read_try(row))?;
    Ok(Some((delivery, tries)))
}
