//! Usage of rate limits in PostgreSQL.

use async_trait::async_trait;
use toolcrib::ports::store::StoreError;
use toolcrib::ports::store::usage::{AcceptedCall, AcceptedCallScan, UsageStore};

use crate::postgres::PostgresStore;
use crate::postgres::session::{Session, SessionError};
use crate::row::{RowReader, read_accepted_call};

/// Number of calls read at a time.
const PAGE_SIZE: i64 = 1_000;

async fn scan_accepted_calls(
    session: &Session,
    since_ms: u64,
    limit: usize,
) -> Result<Vec<AcceptedCall>, SessionError> {
    let read_step =
        |row: &tokio_postgres::Row| Ok::<_, StoreError>((row.unsigned(0)?, row.integer(1)?));
    let sql = "SELECT place, by_ms FROM clock_steps ORDER BY place";
    let steps = session.query_map(sql, &[], read_step).await?;
    let mut scan = AcceptedCallScan::new(since_ms, limit, steps);
    let mut before = i64::MAX;
    loop {
        let sql = "SELECT place, project, tool_name, created_ms, envelope FROM tool_calls \
                   WHERE executor <> 'caller' AND place < $1 ORDER BY place DESC LIMIT $2";
        let page = session.query_map(sql, &[&before, &PAGE_SIZE], read_accepted_call).await?;
        let is_last = (page.len() as i64) < PAGE_SIZE;
        for (position, call) in page {
            before = position as i64;
            if !scan.push(position, call) {
                return Ok(scan.into_calls());
            }
        }
        if is_last {
            return Ok(scan.into_calls());
        }
    }
}

#[async_trait]
impl UsageStore for PostgresStore {
    async fn accepted_calls(
        &self,
        since_ms: u64,
        limit: usize,
    ) -> Result<Vec<AcceptedCall>, StoreError> {
        let session = self.pool.acquire().await?;
        let scanned = scan_accepted_calls(&session, since_ms, limit).await;
        scanned.map_err(SessionError::into_store_error)
    }

    async fn record_clock_step(&self, by_ms: i64) -> Result<(), StoreError> {
        self.write(by_ms, |writer, by_ms| {
            Box::pin(async move {
                let sql = "INSERT INTO clock_steps SELECT coalesce(max(place), 0), $1::bigint \
                           FROM tool_calls ON CONFLICT (place) \
                           DO UPDATE SET by_ms = clock_steps.by_ms + excluded.by_ms";
                writer.session.execute(sql, &[by_ms]).await?;
                // Only the last minute matters; a clock that is changed all the time must not fill
                // the table.
                let sql = "DELETE FROM clock_steps WHERE place < \
                           (SELECT min(place) FROM (SELECT place FROM clock_steps \
                            ORDER BY place DESC LIMIT 100) AS newest)";
                writer.session.execute(sql, &[]).await.map(|_| ())
            })
        })
        .await
    }
}
