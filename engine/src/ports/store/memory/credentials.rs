//! Upstream credentials in memory.

use std::collections::BTreeMap;

use async_trait::async_trait;

use super::MemoryStore;
use crate::ports::store::StoreError;
use crate::ports::store::credentials::UpstreamCredentialStore;

/// Credentials by project and name of the upstream.
pub(super) type Credentials = BTreeMap<(String, String), String>;

#[async_trait]
impl UpstreamCredentialStore for MemoryStore {
    async fn credential(
        &self,
        project: &str,
        upstream: &str,
    ) -> Result<Option<String>, StoreError> {
        let key = (project.to_owned(), upstream.to_owned());
        Ok(self.state.lock().credentials.get(&key).cloned())
    }

    async fn set_credential(
        &self,
        project: &str,
        upstream: &str,
        grant: Option<String>,
    ) -> Result<(), StoreError> {
        let key = (project.to_owned(), upstream.to_owned());
        let mut state = self.state.lock();
        match grant {
            Some(grant) => state.credentials.insert(key, grant),
            None => state.credentials.remove(&key),
        };
        Ok(())
    }

    async fn upstreams_with_credentials(&self) -> Result<Vec<(String, String)>, StoreError> {
        Ok(self.state.lock().credentials.keys().cloned().collect())
    }
}
