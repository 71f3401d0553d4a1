//! Adopts the calls that were open when the previous process stopped.
//!
//! No separate list of running work exists: recovery scans the store's open calls and applies the
//! event `OwnerLost` to each; `step` decides the consequence.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use futures::StreamExt;

use crate::calls::open_calls::OpenCall;
use crate::domain::call::Call;
use crate::domain::fault::Error;
use crate::engine::{Core, Engine, from_store_error};
use crate::lifecycle::Event;

/// Number of calls read, and number decided concurrently, at a time.
const PAGE_SIZE: usize = 1_000;
const MAX_CONCURRENT: usize = 128;

impl Engine {
    /// Adopts every open call that this process does not hold. Returns their number.
    pub async fn recover(&self) -> Result<usize, Error> {
        let inner = &self.core;
        // All are loaded before any continues, so that attempts still in flight elsewhere get their
        // slots before a new call can take them.
        let found = inner.find_orphaned_calls().await?;
        let taken: Vec<_> = found.into_iter().filter_map(|call| inner.adopt_call(call)).collect();
        inner.limiter.end_recovery();
        let count = taken.len();
        let lost = futures::stream::iter(taken);
        lost.for_each_concurrent(MAX_CONCURRENT, |entry| inner.report_owner_lost(entry)).await;
        inner.recovered.store(true, Ordering::Release);
        if count > 0 {
            metrics::counter!("toolcrib_reconciled_calls_total").increment(count as u64);
            tracing::info!(count, "adopted open calls");
        }
        Ok(count)
    }
}

impl Core {
    /// Finds the open calls of other processes.
    async fn find_orphaned_calls(&self) -> Result<Vec<Arc<Call>>, Error> {
        let (mut after, mut found) = (0, Vec::new());
        loop {
            let page = self.store.open_calls(after, PAGE_SIZE).await.map_err(from_store_error)?;
            let Some(last) = page.last() else { return Ok(found) };
            after = last.position;
            let mine = Some(self.node.as_str());
            let others = page.into_iter().filter(|listed| listed.call.node.as_deref() != mine);
            found.extend(others.map(|listed| Arc::new(listed.call)));
        }
    }

    fn adopt_call(self: &Arc<Self>, call: Arc<Call>) -> Option<Arc<OpenCall>> {
        let slot = call
            .survives_node_loss()
            .then(|| self.limiter.force_acquire(self.resolve_slot_scope(&call).0));
        let entry = OpenCall::from_store(call, slot);
        self.open_calls.adopt(entry.clone()).then_some(entry)
    }

    async fn report_owner_lost(self: &Arc<Self>, entry: Arc<OpenCall>) {
        let found = entry.call();
        let lost = Event::OwnerLost { node: self.node.clone() };
        self.advance_with_retry(&found.project, &found.id, lost).await;
        // The call may have ended between the scan and its adoption.
        let now = entry.call();
        if now.status.is_terminal() {
            self.open_calls.apply_transition(&found, &now);
            entry.release_slot();
        }
    }
}
