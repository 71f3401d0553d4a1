//! Taking up what was open when the process before this one stopped.
//!
//! There is no list of what was going on: the store's open calls are looked at one by one and each
//! is told that whoever held it is gone; `step` decides what that means.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use futures::StreamExt;

use super::live::Entry;
use super::{Engine, Inner, unavailable};
use crate::fault::Error;
use crate::lifecycle::Event;

/// How many are read, and how many decided, at a time.
const PAGE: usize = 1_000;
const AT_ONCE: usize = 128;

impl Engine {
    /// Takes up every open call that this process does not hold. Answers with how many.
    pub async fn recover(&self) -> Result<usize, Error> {
        let inner = &self.inner;
        let (mut after, mut count) = (0, 0);
        loop {
            let page = inner.store.open_calls(after, PAGE).await.map_err(unavailable)?;
            let Some(last) = page.last() else { break };
            after = last.place;
            let found: Vec<_> = page
                .into_iter()
                .filter(|listed| inner.live.get(&listed.call.id).is_none())
                .filter(|listed| listed.call.node.as_deref() != Some(inner.node.as_str()))
                .collect();
            count += found.len();
            futures::stream::iter(found)
                .for_each_concurrent(AT_ONCE, |listed| inner.take_up(Arc::new(listed.call)))
                .await;
        }
        inner.recovered.store(true, Ordering::Release);
        if count > 0 {
            metrics::counter!("toolcrib_reconciled_calls_total").increment(count as u64);
            tracing::info!(count, "took up calls that were open");
        }
        Ok(count)
    }
}

impl Inner {
    async fn take_up(self: &Arc<Self>, call: Arc<crate::call::Call>) {
        let (project, id) = (call.project.clone(), call.id.clone());
        if !self.live.take_in(Entry::new(call, None)) {
            return;
        }
        let lost = Event::Lost { node: self.node.clone() };
        self.advance_surely(&project, &id, lost).await;
    }
}
