//! Settings of approvals.

use schemars::JsonSchema;
use serde::Deserialize;
use toolcrib::domain::call::approval::DEFAULT_EXPIRES_IN_MS;

use super::ConfigError;

/// The longest time that a call may wait for an approval: 30 days in milliseconds.
const MAX_EXPIRES_IN_MS: u64 = 2_592_000_000;

/// Calls that wait for a person's approval.
#[derive(Debug, Clone, PartialEq, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ApprovalConfig {
    /// Time after which a call fails without a decision, unless its rule sets another.
    pub expires_in_ms: u64,
    /// URL that receives a signed webhook for each requested approval. The settings of `webhooks`
    /// apply to it.
    pub webhook_url: Option<String>,
}

impl Default for ApprovalConfig {
    fn default() -> Self {
        Self { expires_in_ms: DEFAULT_EXPIRES_IN_MS, webhook_url: None }
    }
}

impl ApprovalConfig {
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        if !(1_000..=MAX_EXPIRES_IN_MS).contains(&self.expires_in_ms) {
            let reason = "must be from 1000 to 2592000000 (30 days)";
            return Err(ConfigError::invalid("approvals.expires_in_ms", reason));
        }
        let is_url = |url: &String| url.starts_with("http://") || url.starts_with("https://");
        if self.webhook_url.as_ref().is_some_and(|url| !is_url(url)) {
            let reason = "must begin with http:// or https://";
            return Err(ConfigError::invalid("approvals.webhook_url", reason));
        }
        Ok(())
    }
}
