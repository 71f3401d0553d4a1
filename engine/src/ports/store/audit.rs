//! The part of the store port that holds the audit log: a chain of rows that are never changed.

use async_trait::async_trait;

use super::StoreError;
use crate::domain::directory::audit::{AuditChain, AuditRow};

/// Order and start of a page of the audit log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AuditOrder {
    /// Newest rows first, of those with a lower number than this.
    NewestFirst {
        /// Number after the first row of the page; `u64::MAX` starts with the newest.
        before: u64,
    },
    /// Oldest rows first, of those with a higher number than this.
    OldestFirst {
        /// Number before the first row of the page; 0 starts with the oldest.
        after: u64,
    },
}

/// Selects rows of the audit log.
#[derive(Debug, Clone)]
pub struct AuditFilter {
    /// Project that the rows concern; `None` selects all projects.
    pub project: Option<String>,
    /// Order and start of the page.
    pub order: AuditOrder,
    /// Maximum number of rows.
    pub limit: usize,
}

/// Reads and prunes the audit log. Rows are appended with the changes that they record.
#[async_trait]
pub trait AuditStore: Send + Sync {
    /// Returns the ends of the chain.
    async fn audit_chain(&self) -> Result<AuditChain, StoreError>;

    /// Returns a page of rows.
    async fn audit_rows(&self, filter: AuditFilter) -> Result<Vec<AuditRow>, StoreError>;

    /// Deletes up to `limit` of the first rows, as far as they are older than `before_ms`, and
    /// moves the checkpoint of the chain to the last of them. A row with a time after `now_ms` was
    /// written while the clock was wrong: it is deleted with the next row that is old. Returns the
    /// number of deleted rows.
    async fn prune_audit_log(
        &self,
        before_ms: u64,
        now_ms: u64,
        limit: usize,
    ) -> Result<usize, StoreError>;
}
