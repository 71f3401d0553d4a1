//! The part of the store port that reads earlier versions of a project's access rules. The rules in
//! force are part of the directory, and a change of them is a directory change.

use async_trait::async_trait;

use super::StoreError;
use crate::domain::access_rules::{AccessRule, RuleSetVersion};

/// Reads the stored versions of the access rules.
#[async_trait]
pub trait RuleHistoryStore: Send + Sync {
    /// Returns the stored versions of a project's rules, newest first.
    async fn rule_versions(&self, project: &str) -> Result<Vec<RuleSetVersion>, StoreError>;

    /// Returns the rules of a version, by id. A version that is not stored has none.
    async fn rules_at(&self, project: &str, version: u64) -> Result<Vec<AccessRule>, StoreError>;
}
