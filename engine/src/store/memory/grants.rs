//! Upstream credentials in memory.

use std::collections::BTreeMap;

use async_trait::async_trait;

use super::MemoryStore;
use crate::store::StoreError;
use crate::store::grants::GrantStore;

/// Credentials by project and name of the upstream.
pub(super) type Grants = BTreeMap<(String, String), String>;

#[async_trait]
impl GrantStore for MemoryStore {
    async fn grant(&self, project: &str, upstream: &str) -> Result<Option<String>, StoreError> {
        let place = (project.to_owned(), upstream.to_owned());
        Ok(self.state.lock().grants.get(&place).cloned())
    }

    async fn keep_grant(
        &self,
        project: &str,
        upstream: &str,
        grant: Option<String>,
    ) -> Result<(), StoreError> {
        let place = (project.to_owned(), upstream.to_owned());
        let mut state = self.state.lock();
        match grant {
            Some(grant) => state.grants.insert(place, grant),
            None => state.grants.remove(&place),
        };
        Ok(())
    }

    async fn grants(&self) -> Result<Vec<(String, String)>, StoreError> {
        Ok(self.state.lock().grants.keys().cloned().collect())
    }
}
