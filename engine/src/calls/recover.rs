//! Adopts the calls that were open when the previous process stopped.
//!
//! No separate list of running work exists: recovery scans the store's open calls and applies the
//! event `OwnerLost` to each; `step` decides the consequence.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use futures::StreamExt;

use crate::calls::Calls;
use crate::calls::open_calls::OpenCall;
use crate::domain::call::Call;
use crate::domain::fault::Error;
use crate::lifecycle::Event;
use crate::ports::core::from_store_error;

/// Number of calls read from the store at a time.
const PAGE_SIZE: usize = 1_000;
/// Maximum number of calls whose recovery is decided concurrently.
const MAX_CONCURRENT: usize = 128;

impl Calls {
    /// Adopts every open call that this process does not hold. Returns their number.
    pub async fn recover(self: &Arc<Self>) -> Result<usize, Error> {
        // All are loaded before any continues, so that attempts still in flight elsewhere get their
        // slots before a new call can take them.
        let orphaned = self.find_orphaned_calls().await?;
        let adopted: Vec<_> =
            orphaned.into_iter().filter_map(|call| self.adopt_call(call)).collect();
        self.dispatcher.limiter.end_recovery();
        self.dispatcher.is_recovering.store(false, Ordering::Release);
        let count = adopted.len();
        let adopted = futures::stream::iter(adopted);
        adopted.for_each_concurrent(MAX_CONCURRENT, |entry| self.report_owner_lost(entry)).await;
        self.dispatcher.recovered.store(true, Ordering::Release);
        if count > 0 {
            metrics::counter!("toolcrib_reconciled_calls_total").increment(count as u64);
            tracing::info!(count, "adopted open calls");
        }
        Ok(count)
    }
}

impl Calls {
    /// Finds the open calls of other processes.
    async fn find_orphaned_calls(&self) -> Result<Vec<Arc<Call>>, Error> {
        let (mut after, mut orphaned) = (0, Vec::new());
        loop {
            let page =
                self.core.store.open_calls(after, PAGE_SIZE).await.map_err(from_store_error)?;
            let Some(last) = page.last() else { return Ok(orphaned) };
            after = last.position;
            let this_node = Some(self.core.node.as_str());
            let foreign =
                page.into_iter().filter(|listed| listed.call.node.as_deref() != this_node);
            orphaned.extend(foreign.map(|listed| Arc::new(listed.call)));
        }
    }

    fn adopt_call(self: &Arc<Self>, call: Arc<Call>) -> Option<Arc<OpenCall>> {
        let slot = call.survives_node_loss().then(|| {
            self.dispatcher
                .limiter
                .force_acquire(self.dispatcher.slot_limits.resolve_slot_scope(&call).0)
        });
        let entry = OpenCall::from_store(call, slot, self.core.clock.wall_offset_ms());
        self.dispatcher.approval_index.update_waiting(&entry.call());
        self.dispatcher.open_calls.adopt(entry.clone()).then_some(entry)
    }

    async fn report_owner_lost(self: &Arc<Self>, entry: Arc<OpenCall>) {
        let before = entry.call();
        // The rules and switches may have changed while no process was running.
        if !self.dispatcher.end_if_switched_off(&entry).await
            && !self.dispatcher.stop_if_not_allowed(&before).await
        {
            let event = Event::OwnerLost { node: self.core.node.clone() };
            self.dispatcher.advance_with_retry(&before.project, &before.id, event).await;
        }
        // The call may have ended between the scan and its adoption.
        let after = entry.call();
        if after.status.is_terminal() {
            let wall_offset_ms = entry.wall_offset_ms();
            self.dispatcher.open_calls.apply_transition(&before, &after, wall_offset_ms);
            entry.release_slot();
        }
    }
}
