//! Stores the OAuth credentials of upstreams in SQLite.

use async_trait::async_trait;
use rusqlite::{OptionalExtension, params};
use toolcrib::ports::store::StoreError;
use toolcrib::ports::store::credentials::UpstreamCredentialStore;

use super::SqliteStore;
use super::reader::to_store_error;

#[async_trait]
impl UpstreamCredentialStore for SqliteStore {
    async fn credential(
        &self,
        project: &str,
        upstream: &str,
    ) -> Result<Option<String>, StoreError> {
        let (project, upstream) = (project.to_owned(), upstream.to_owned());
        self.read(move |connection| {
            let select = "SELECT body FROM upstream_grants WHERE project = ?1 AND upstream = ?2";
            let found = connection.query_row(select, [&project, &upstream], |row| row.get(0));
            found.optional().map_err(|error| to_store_error(&error))
        })
        .await
    }

    async fn set_credential(
        &self,
        project: &str,
        upstream: &str,
        grant: Option<String>,
    ) -> Result<(), StoreError> {
        let (project, upstream) = (project.to_owned(), upstream.to_owned());
        self.write(move |writer| {
            let connection = writer.connection()?;
            match &grant {
                Some(grant) => connection.execute(
                    "INSERT OR REPLACE INTO upstream_grants VALUES (?1, ?2, ?3)",
                    params![project, upstream, grant],
                )?,
                None => connection.execute(
                    "DELETE FROM upstream_grants WHERE project = ?1 AND upstream = ?2",
                    [&project, &upstream],
                )?,
            };
            Ok(())
        })
        .await
    }

    async fn upstreams_with_credentials(&self) -> Result<Vec<(String, String)>, StoreError> {
        self.read(|connection| {
            let rows = || -> rusqlite::Result<Vec<(String, String)>> {
                let select = "SELECT project, upstream FROM upstream_grants ORDER BY 1, 2";
                let mut select = connection.prepare(select)?;
                let rows = select.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?;
                rows.collect()
            };
            rows().map_err(|error| to_store_error(&error))
        })
        .await
    }
}
