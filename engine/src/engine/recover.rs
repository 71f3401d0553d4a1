//! Adopts the calls that were open when the previous process stopped.
//!
//! No separate list of running work exists: recovery scans the store's open calls and applies the
//! event `OwnerLost` to each; `step` decides the consequence.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use futures::StreamExt;

use super::live::Entry;
use super::{Engine, Inner, unavailable};
use crate::call::Call;
use crate::fault::Error;
use crate::lifecycle::Event;

/// Number of calls read, and number decided concurrently, at a time.
const PAGE: usize = 1_000;
const AT_ONCE: usize = 128;

impl Engine {
    /// Adopts every open call that this process does not hold. Returns their number.
    pub async fn recover(&self) -> Result<usize, Error> {
        let inner = &self.inner;
        // All are loaded before any continues, so that attempts still in flight elsewhere get their
        // slots before a new call can take them.
        let found = inner.left_open().await?;
        let taken: Vec<_> = found.into_iter().filter_map(|call| inner.take_up(call)).collect();
        inner.gate.end_counting();
        let count = taken.len();
        let lost = futures::stream::iter(taken);
        lost.for_each_concurrent(AT_ONCE, |entry| inner.lose(entry)).await;
        inner.recovered.store(true, Ordering::Release);
        if count > 0 {
            metrics::counter!("toolcrib_reconciled_calls_total").increment(count as u64);
            tracing::info!(count, "adopted open calls");
        }
        Ok(count)
    }
}

impl Inner {
    /// Finds the open calls of other processes.
    async fn left_open(&self) -> Result<Vec<Arc<Call>>, Error> {
        let (mut after, mut found) = (0, Vec::new());
        loop {
            let page = self.store.open_calls(after, PAGE).await.map_err(unavailable)?;
            let Some(last) = page.last() else { return Ok(found) };
            after = last.place;
            let mine = Some(self.node.as_str());
            let others = page.into_iter().filter(|listed| listed.call.node.as_deref() != mine);
            found.extend(others.map(|listed| Arc::new(listed.call)));
        }
    }

    fn take_up(self: &Arc<Self>, call: Arc<Call>) -> Option<Arc<Entry>> {
        let slot = call.goes_on_elsewhere().then(|| self.gate.enter(self.place(&call).0));
        let entry = Entry::found(call, slot);
        self.live.take_in(entry.clone()).then_some(entry)
    }

    async fn lose(self: &Arc<Self>, entry: Arc<Entry>) {
        let found = entry.call();
        let lost = Event::Lost { node: self.node.clone() };
        self.advance_surely(&found.project, &found.id, lost).await;
        // The call may have ended between the scan and its adoption.
        let now = entry.call();
        if now.status.is_terminal() {
            self.live.moved(&found, &now);
            entry.free_place();
        }
    }
}
