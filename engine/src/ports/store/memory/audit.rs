//! The audit log of the memory store.

use async_trait::async_trait;

use super::MemoryStore;
use crate::domain::directory::AuditEntry;
use crate::domain::directory::audit::{AuditChain, AuditLink, AuditRow};
use crate::ports::store::StoreError;
use crate::ports::store::audit::{AuditFilter, AuditOrder, AuditStore};

/// The rows in order, and the ends of their chain.
pub(super) struct MemoryAuditLog {
    rows: Vec<AuditRow>,
    head: AuditLink,
    pruned: AuditLink,
}

impl Default for MemoryAuditLog {
    fn default() -> Self {
        Self { rows: Vec::new(), head: AuditLink::first(), pruned: AuditLink::first() }
    }
}

impl MemoryAuditLog {
    pub(super) fn append(&mut self, entry: AuditEntry) {
        let row = AuditRow::following(&self.head, self.head.number + 1, entry);
        self.head.advance(&row);
        self.rows.push(row);
    }
}

#[async_trait]
impl AuditStore for MemoryStore {
    async fn audit_chain(&self) -> Result<AuditChain, StoreError> {
        let state = self.state.lock();
        let MemoryAuditLog { rows, head, pruned } = &state.audit;
        let last_number = rows.last().map_or(pruned.number, |row| row.number);
        Ok(AuditChain { head: head.clone(), pruned: pruned.clone(), last_number })
    }

    async fn audit_rows(&self, filter: AuditFilter) -> Result<Vec<AuditRow>, StoreError> {
        let state = self.state.lock();
        let concerns = |row: &&AuditRow| {
            filter.project.as_ref().is_none_or(|project| *project == row.entry.project)
        };
        let rows = state.audit.rows.iter();
        Ok(match filter.order {
            AuditOrder::NewestFirst { before } => {
                let earlier = rows.rev().filter(|row| row.number < before);
                earlier.filter(concerns).take(filter.limit).cloned().collect()
            }
            AuditOrder::OldestFirst { after } => {
                let later = rows.filter(|row| row.number > after);
                later.filter(concerns).take(filter.limit).cloned().collect()
            }
        })
    }

    async fn prune_audit_log(
        &self,
        before_ms: u64,
        now_ms: u64,
        limit: usize,
    ) -> Result<usize, StoreError> {
        let mut state = self.state.lock();
        let MemoryAuditLog { rows, pruned, .. } = &mut state.audit;
        let is_old = |row: &AuditRow| row.entry.at_ms < before_ms;
        let is_young = |row: &AuditRow| !is_old(row) && row.entry.at_ms <= now_ms;
        let first_young = rows.iter().position(is_young).unwrap_or(rows.len());
        let old = rows[..first_young].iter().rposition(is_old).map_or(0, |last| last + 1);
        let old = old.min(limit);
        rows.drain(..old).for_each(|row| pruned.advance(&row));
        Ok(old)
    }
}
