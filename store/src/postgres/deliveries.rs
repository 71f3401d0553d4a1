//! The SQL of webhook deliveries. Only calls with a callback URL have rows here.

use tokio_postgres::types::ToSql;
use toolcrib::domain::call::Call;
use toolcrib::domain::delivery::{Delivery, DeliveryAttempt, MAX_STORED_ATTEMPTS};
use toolcrib::domain::id::CallId;
use toolcrib::ports::store::{DeliveryFilter, SaveResult};

use super::change::WriterConnection;
use super::limit_param;
use crate::postgres::session::{Session, SessionError};
use crate::row::{DELIVERY_COLUMNS as COLUMNS, DeliveryColumn, RowReader, read_delivery, read_try};

/// Inserts the delivery that a new call requests, if any.
pub(super) async fn insert_delivery(
    session: &Session,
    call: &Call,
    position: i64,
) -> Result<(), SessionError> {
    let Some(delivery) = Delivery::for_call(call) else { return Ok(()) };
    let sql = format!(
        "INSERT INTO deliveries ({COLUMNS}, place) \
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)"
    );
    let params: crate::postgres::session::SqlParams<'_> = &[
        &delivery.project,
        &delivery.call_id.as_str(),
        &delivery.url,
        &delivery.status.as_str(),
        &delivery.due_ms.map(|ms| ms as i64),
        &i64::from(delivery.attempts),
        &i64::from(delivery.failures),
        &delivery.last_error,
        &(delivery.version as i64),
        &position,
    ];
    session.execute(&sql, params).await?;
    Ok(())
}

pub(super) async fn save_delivery(
    writer: &mut WriterConnection,
    (delivery, tried): &(Delivery, Option<DeliveryAttempt>),
) -> Result<SaveResult, SessionError> {
    let session = &writer.session;
    let sql = "UPDATE deliveries SET status = $1, due_ms = $2, tries = $3, failures = $4, \
               last_error = $5, version = $6 \
               WHERE project = $7 AND call_id = $8 AND version = $6::bigint - 1 RETURNING place";
    let params: crate::postgres::session::SqlParams<'_> = &[
        &delivery.status.as_str(),
        &delivery.due_ms.map(|ms| ms as i64),
        &i64::from(delivery.attempts),
        &i64::from(delivery.failures),
        &delivery.last_error.as_ref().map(|error| error.replace('\0', "")),
        &(delivery.version as i64),
        &delivery.project,
        &delivery.call_id.as_str(),
    ];
    let Some(row) = session.query_first(sql, params).await? else {
        return Ok(SaveResult::Conflict);
    };
    let position = row.integer(0)?;
    if let Some(tried) = tried {
        let params: crate::postgres::session::SqlParams<'_> = &[
            &position,
            &i64::from(tried.number),
            &(tried.at_ms as i64),
            &(tried.duration_ms as i64),
            &tried.status_code.map(i64::from),
            &tried.error.as_ref().map(|error| error.replace('\0', "")),
        ];
        session.execute("INSERT INTO tries VALUES ($1, $2, $3, $4, $5, $6)", params).await?;
        let last_deleted = i64::from(tried.number) - i64::from(MAX_STORED_ATTEMPTS);
        let sql = "DELETE FROM tries WHERE place = $1 AND number <= $2";
        session.execute(sql, &[&position, &last_deleted]).await?;
    }
    Ok(SaveResult::Saved)
}

pub(super) async fn list_pending(
    session: &Session,
    after: Option<&(u64, CallId)>,
    limit: usize,
) -> Result<Vec<Delivery>, SessionError> {
    let (after_ms, after_id) = after.map_or((-1, ""), |(ms, id)| (*ms as i64, id.as_str()));
    let sql = format!(
        "SELECT {COLUMNS} FROM deliveries WHERE due_ms IS NOT NULL \
         AND (due_ms, call_id) > ($1, $2) ORDER BY due_ms, call_id LIMIT $3"
    );
    let params: crate::postgres::session::SqlParams<'_> =
        &[&after_ms, &after_id, &limit_param(limit)];
    session.query_map(&sql, params, read_delivery).await
}

pub(super) async fn list(
    session: &Session,
    filter: &DeliveryFilter,
) -> Result<Vec<Delivery>, SessionError> {
    let mut sql = format!("SELECT {COLUMNS} FROM deliveries WHERE project = $1");
    let (status, limit) = (filter.status.map(|status| status.as_str()), limit_param(filter.limit));
    let before = filter.before.as_ref().map(CallId::as_str);
    let mut params: Vec<&(dyn ToSql + Sync)> = vec![&filter.project];
    if let Some(status) = &status {
        params.push(status);
        sql.push_str(&format!(" AND status = ${}", params.len()));
    }
    if let Some(before) = &before {
        params.push(before);
        sql.push_str(&format!(" AND call_id < ${}", params.len()));
    }
    params.push(&limit);
    sql.push_str(&format!(" ORDER BY call_id DESC LIMIT ${}", params.len()));
    session.query_map(&sql, &params, read_delivery).await
}

pub(super) async fn find_delivery(
    session: &Session,
    project: &str,
    id: &CallId,
) -> Result<Option<(Delivery, Vec<DeliveryAttempt>)>, SessionError> {
    let sql =
        format!("SELECT {COLUMNS}, place FROM deliveries WHERE project = $1 AND call_id = $2");
    let Some(row) = session.query_first(&sql, &[&project, &id.as_str()]).await? else {
        return Ok(None);
    };
    let sql = "SELECT number, at_ms, duration_ms, status_code, error FROM tries \
               WHERE place = $1 ORDER BY number";
    let tries = session.query_map(sql, &[&row.integer(DeliveryColumn::COUNT)?], read_try).await?;
    Ok(Some((read_delivery(&row)?, tries)))
}
