//! Undelivered requests in SQLite.

use async_trait::async_trait;
use rusqlite::{Connection, params};
use toolcrib::ports::store::StoreError;
use toolcrib::ports::store::undelivered::{UndeliveredRequest, UndeliveredRequestStore};

use crate::row::read_undelivered;
use crate::sqlite::SqliteStore;
use crate::sqlite::reader::query_map;

/// Inserts a request, or replaces the one with its id.
pub(crate) fn insert_undelivered(
    connection: &Connection,
    request: &UndeliveredRequest,
) -> rusqlite::Result<()> {
    connection
        .prepare_cached("INSERT OR REPLACE INTO undelivered_requests VALUES (?1, ?2, ?3, ?4, ?5)")?
        .execute(params![
            request.id,
            request.digest,
            request.kind.as_str(),
            request.project,
            i64::try_from(request.expires_ms).unwrap_or(i64::MAX),
        ])
        .map(|_| ())
}

#[async_trait]
impl UndeliveredRequestStore for SqliteStore {
    async fn put_undelivered(&self, request: UndeliveredRequest) -> Result<(), StoreError> {
        self.write(move |writer| insert_undelivered(writer.connection()?, &request)).await
    }

    async fn list_undelivered(&self, at_ms: u64) -> Result<Vec<UndeliveredRequest>, StoreError> {
        let sql = "SELECT id, digest, kind, project, expires_ms FROM undelivered_requests \
                   WHERE expires_ms >= ?1 ORDER BY id";
        let at_ms = i64::try_from(at_ms).unwrap_or(i64::MAX);
        self.read(move |connection| {
            query_map(connection, sql, params![at_ms], |row| read_undelivered(row))
        })
        .await
    }

    async fn remove_undelivered(
        &self,
        ids: Vec<String>,
        expired_before_ms: u64,
    ) -> Result<(), StoreError> {
        let before_ms = i64::try_from(expired_before_ms).unwrap_or(i64::MAX);
        self.write(move |writer| {
            let connection = writer.connection()?;
            for id in &ids {
                connection
                    .prepare_cached("DELETE FROM undelivered_requests WHERE id = ?1")?
                    .execute([id])?;
            }
            connection
                .prepare_cached("DELETE FROM undelivered_requests WHERE expires_ms < ?1")?
                .execute([before_ms])?;
            Ok(())
        })
        .await
    }
}
