//! Checks waiting calls when the access rules change: ends those that the rules no longer allow,
//! and holds those that need an approval now. An attempt that is already running finishes.

use std::sync::Arc;

use crate::calls::Calls;

pub(crate) async fn run(calls: Arc<Calls>) {
    let (mut seen, mut checked_rules) = (0, None);
    while let Some(version) = calls.registry.wait_for_directory_change(seen).await {
        seen = version;
        let catalog = calls.registry.catalog();
        // Most changes of the directory concern tools and clients.
        let rules = &catalog.directory().rules;
        if checked_rules.as_ref() != Some(rules) {
            checked_rules = Some(rules.clone());
            run_once(&calls).await;
        }
    }
}

/// Runs one pass. Returns the number of calls that it ended or held.
pub async fn run_once(calls: &Arc<Calls>) -> usize {
    let mut count = 0;
    for entry in calls.dispatcher.open_calls.all() {
        count += usize::from(calls.dispatcher.stop_if_not_allowed(&entry.call()).await);
    }
    count
}
