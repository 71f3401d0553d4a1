//! Usage of rate limits in SQLite.

use async_trait::async_trait;
use rusqlite::Connection;
use toolcrib::ports::store::StoreError;
use toolcrib::ports::store::usage::{AcceptedCall, AcceptedCallScan, UsageStore};

use crate::row::{RowReader, read_accepted_call};
use crate::sqlite::SqliteStore;
use crate::sqlite::reader::{query_map, to_store_error};

fn scan_accepted_calls(
    connection: &Connection,
    since_ms: u64,
    limit: usize,
) -> Result<Vec<AcceptedCall>, StoreError> {
    let sql = "SELECT place, by_ms FROM clock_steps ORDER BY place";
    let steps = query_map(connection, sql, &[], |row| Ok((row.unsigned(0)?, row.integer(1)?)))?;
    let mut scan = AcceptedCallScan::new(since_ms, limit, steps);
    let broken = |error: rusqlite::Error| to_store_error(&error);
    let sql = "SELECT place, project, tool_name, created_ms, envelope FROM tool_calls \
               WHERE executor <> 'caller' ORDER BY place DESC";
    let mut select = connection.prepare_cached(sql).map_err(broken)?;
    let mut rows = select.query([]).map_err(broken)?;
    while let Some(row) = rows.next().map_err(broken)? {
        let (position, call) = read_accepted_call(row)?;
        if !scan.push(position, call) {
            break;
        }
    }
    Ok(scan.into_calls())
}

#[async_trait]
impl UsageStore for SqliteStore {
    async fn accepted_calls(
        &self,
        since_ms: u64,
        limit: usize,
    ) -> Result<Vec<AcceptedCall>, StoreError> {
        self.read(move |connection| scan_accepted_calls(connection, since_ms, limit)).await
    }

    async fn record_clock_step(&self, by_ms: i64) -> Result<(), StoreError> {
        self.write(move |writer| {
            let connection = writer.connection()?;
            connection.execute(
                "INSERT INTO clock_steps SELECT coalesce(max(place), 0), ?1 FROM tool_calls \
                 WHERE true ON CONFLICT (place) DO UPDATE SET by_ms = by_ms + excluded.by_ms",
                [by_ms],
            )?;
            // Only the last minute matters; a clock that is changed all the time must not fill the
            // table.
            connection.execute(
                "DELETE FROM clock_steps WHERE place < \
                 (SELECT min(place) FROM (SELECT place FROM clock_steps \
                  ORDER BY place DESC LIMIT 100))",
                [],
            )?;
            Ok(())
        })
        .await
    }
}
