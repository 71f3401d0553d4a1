//! Credentials that the issuers of upstreams have granted, in PostgreSQL.

use async_trait::async_trait;
use toolcrib::store::StoreError;
use toolcrib::store::grants::GrantStore;

use super::PostgresStore;
use super::link::Broke;
use super::writer::Desk;
use crate::row::Fields;

type Grant = (String, String, Option<String>);

async fn keep(desk: &mut Desk, (project, upstream, grant): &Grant) -> Result<(), Broke> {
    let session = &desk.session;
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
impl GrantStore for PostgresStore {
    async fn grant(&self, project: &str, upstream: &str) -> Result<Option<String>, StoreError> {
        let sql = "SELECT body FROM upstream_grants WHERE project = $1 AND upstream = $2";
        let lent = self.pool.lend().await?;
        let found = lent.row(sql, &[&project, &upstream]).await.map_err(Broke::into_error)?;
        found.map(|row| row.text(0)).transpose()
    }

    async fn keep_grant(
        &self,
        project: &str,
        upstream: &str,
        grant: Option<String>,
    ) -> Result<(), StoreError> {
        let given = (project.to_owned(), upstream.to_owned(), grant);
        self.write(given, |desk, given| Box::pin(keep(desk, given))).await
    }

    async fn grants(&self) -> Result<Vec<(String, String)>, StoreError> {
        let sql = "SELECT project, upstream FROM upstream_grants ORDER BY 1, 2";
        let lent = self.pool.lend().await?;
        let read = |row: &tokio_postgres::Row| Ok((row.text(0)?, row.text(1)?));
        lent.collect(sql, &[], read).await.map_err(Broke::into_error)
    }
}
