//! Undelivered requests in PostgreSQL.

use async_trait::async_trait;
use toolcrib::ports::store::StoreError;
use toolcrib::ports::store::undelivered::{UndeliveredRequest, UndeliveredRequestStore};

use super::PostgresStore;
use super::session::{Session, SessionError, SqlParams};
use crate::row::read_undelivered;

/// Inserts a request, or replaces the one with its id.
pub(super) async fn insert_undelivered(
    session: &Session,
    request: &UndeliveredRequest,
) -> Result<(), SessionError> {
    let sql = "INSERT INTO undelivered_requests VALUES ($1, $2, $3, $4, $5) ON CONFLICT (id) \
               DO UPDATE SET digest = $2, kind = $3, project = $4, expires_ms = $5";
    let params: SqlParams<'_> = &[
        &request.id,
        &request.digest,
        &request.kind.as_str(),
        &request.project,
        &i64::try_from(request.expires_ms).unwrap_or(i64::MAX),
    ];
    session.execute(sql, params).await.map(|_| ())
}

#[async_trait]
impl UndeliveredRequestStore for PostgresStore {
    async fn put_undelivered(&self, request: UndeliveredRequest) -> Result<(), StoreError> {
        self.write(request, |writer, request| {
            Box::pin(insert_undelivered(&writer.session, request))
        })
        .await
    }

    async fn list_undelivered(&self, at_ms: u64) -> Result<Vec<UndeliveredRequest>, StoreError> {
        let sql = "SELECT id, digest, kind, project, expires_ms FROM undelivered_requests \
                   WHERE expires_ms >= $1 ORDER BY id";
        let at_ms = i64::try_from(at_ms).unwrap_or(i64::MAX);
        let session = self.pool.acquire().await?;
        let listed = session.query_map(sql, &[&at_ms], read_undelivered).await;
        listed.map_err(SessionError::into_store_error)
    }

    async fn remove_undelivered(
        &self,
        ids: Vec<String>,
        expired_before_ms: u64,
    ) -> Result<(), StoreError> {
        let before_ms = i64::try_from(expired_before_ms).unwrap_or(i64::MAX);
        self.write((ids, before_ms), |writer, (ids, before_ms)| {
            Box::pin(async move {
                let sql = "DELETE FROM undelivered_requests \
                           WHERE id = ANY ($1::text[]) OR expires_ms < $2";
                writer.session.execute(sql, &[ids, before_ms]).await.map(|_| ())
            })
        })
        .await
    }
}
