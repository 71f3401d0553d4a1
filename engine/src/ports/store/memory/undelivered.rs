//! Undelivered requests in memory.

use async_trait::async_trait;

use super::MemoryStore;
use crate::ports::store::StoreError;
use crate::ports::store::undelivered::{UndeliveredRequest, UndeliveredRequestStore};

#[async_trait]
impl UndeliveredRequestStore for MemoryStore {
    async fn put_undelivered(&self, request: UndeliveredRequest) -> Result<(), StoreError> {
        self.state.lock().undelivered.insert(request.id.clone(), request);
        Ok(())
    }

    async fn list_undelivered(&self, at_ms: u64) -> Result<Vec<UndeliveredRequest>, StoreError> {
        let state = self.state.lock();
        let current = state.undelivered.values().filter(|request| request.expires_ms >= at_ms);
        Ok(current.cloned().collect())
    }

    async fn remove_undelivered(
        &self,
        ids: Vec<String>,
        expired_before_ms: u64,
    ) -> Result<(), StoreError> {
        let undelivered = &mut self.state.lock().undelivered;
        for id in ids {
            undelivered.remove(&id);
        }
        undelivered.retain(|_, request| request.expires_ms >= expired_before_ms);
        Ok(())
    }
}
