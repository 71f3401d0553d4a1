//! Applies kill switches: ends the calls that they cover, also while they run, and the runs of
//! agents and projects that are off.

use std::sync::Arc;

use futures::StreamExt;

use crate::calls::Calls;
use crate::runs::Runs;

/// Number of calls that are ended concurrently; they share commits.
const MAX_CONCURRENT: usize = 512;

pub(crate) async fn run(calls: Arc<Calls>, runs: Arc<Runs>) {
    let (mut seen, mut applied) = (0, None);
    while let Some(version) = calls.registry.wait_for_directory_change(seen).await {
        seen = version;
        let switches = calls.registry.catalog().switches().clone();
        // Most changes of the directory concern tools and clients.
        if applied.as_ref() != Some(&switches) {
            applied = Some(switches);
            run_once(&calls, &runs).await;
        }
    }
}

/// Runs one pass. Returns the number of calls that a switch covers.
pub async fn run_once(calls: &Arc<Calls>, runs: &Arc<Runs>) -> usize {
    if calls.registry.catalog().switches().is_empty() {
        return 0;
    }
    // Before the calls: a run whose call ends must not make the next one.
    runs.active_runs.interrupt_switched_off(runs.registry.catalog().switches());
    let open = futures::stream::iter(calls.dispatcher.open_calls.all());
    let ends = open.map(|entry| async move { calls.dispatcher.end_if_switched_off(&entry).await });
    let ended = ends.buffer_unordered(MAX_CONCURRENT).filter(|ended| std::future::ready(*ended));
    ended.count().await
}
