//! Stores the OAuth credentials of upstreams in PostgreSQL.

use async_trait::async_trait;
use toolcrib::ports::store::StoreError;
use toolcrib::ports::store::credentials::UpstreamCredentialStore;

use super::PostgresStore;
use super::change::WriterConnection;
use crate::postgres::session::SessionError;
use crate::row::RowReader;

type GrantUpdate = (String, String, Option<String>);

async fn write_grant(
    writer: &mut WriterConnection,
    (project, upstream, grant): &GrantUpdate,
) -> Result<(), SessionError> {
    let session = &writer.session;
    match grant {
        Some(grant) => {
            let sql = "INSERT INTO upstream_grants VALUES ($1, $2, $3) \
                       ON CONFLICT (project, upstream) DO UPDATE SET body = excluded.body";
            session.execute(sql, &[project, upstream, grant]).await?
        }
        None => {
            let sql = "DELETE FROM upstream_grants WHERE project = $1 AND upstream = $2";
            session.execute(sql, &[project, upstream]).await?
        }
    };
    Ok(())
}

#[async_trait]
impl UpstreamCredentialStore for PostgresStore {
    async fn credential(
        &self,
        project: &str,
        upstream: &str,
    ) -> Result<Option<String>, StoreError> {
        let sql = "SELECT body FROM upstream_grants WHERE project = $1 AND upstream = $2";
        let session = self.pool.acquire().await?;
        let found = session
            .query_first(sql, &[&project, &upstream])
            .await
            .map_err(SessionError::into_store_error)?;
        found.map(|row| row.text(0)).transpose()
    }

    async fn set_credential(
        &self,
        project: &str,
        upstream: &str,
        grant: Option<String>,
    ) -> Result<(), StoreError> {
        let input = (project.to_owned(), upstream.to_owned(), grant);
        self.write(input, |writer, input| Box::pin(write_grant(writer, input))).await
    }

    async fn upstreams_with_credentials(&self) -> Result<Vec<(String, String)>, StoreError> {
        let sql = "SELECT project, upstream FROM upstream_grants ORDER BY 1, 2";
        let session = self.pool.acquire().await?;
        let read = |row: &tokio_postgres::Row| Ok((row.text(0)?, row.text(1)?));
        session.query_map(sql, &[], read).await.map_err(SessionError::into_store_error)
    }
}
