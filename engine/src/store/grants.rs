//! The part of the store port that keeps what upstreams' issuers have granted: tokens, so that
//! nobody has to sign in again after a start. What is in one is the business of who put it there.

use async_trait::async_trait;

use super::StoreError;

/// Where grants are kept: one text for each upstream. It goes when the upstream goes.
#[async_trait]
pub trait GrantStore: Send + Sync {
    /// What is kept for an upstream.
    async fn grant(&self, project: &str, upstream: &str) -> Result<Option<String>, StoreError>;

    /// Keeps this in place of what was there; nothing from now on, where nothing is given.
    async fn keep_grant(
        &self,
        project: &str,
        upstream: &str,
        grant: Option<String>,
    ) -> Result<(), StoreError>;

    /// The projects and names of upstreams for which something is kept.
    async fn grants(&self) -> Result<Vec<(String, String)>, StoreError>;
}
