//! The part of the store port that holds the OAuth credentials of upstreams, so that a restart
//! requires no new sign-in. The component that writes a credential defines its content.

use async_trait::async_trait;

use super::StoreError;

/// Stores one credential text for each upstream. Removing the upstream removes its credential.
#[async_trait]
pub trait UpstreamCredentialStore: Send + Sync {
    /// Returns the credential of an upstream.
    async fn credential(&self, project: &str, upstream: &str)
    -> Result<Option<String>, StoreError>;

    /// Replaces the credential of an upstream; `None` removes it.
    async fn set_credential(
        &self,
        project: &str,
        upstream: &str,
        grant: Option<String>,
    ) -> Result<(), StoreError>;

    /// Returns the projects and names of upstreams with a credential.
    async fn upstreams_with_credentials(&self) -> Result<Vec<(String, String)>, StoreError>;
}
