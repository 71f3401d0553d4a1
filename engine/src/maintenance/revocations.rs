//! Checks waiting calls when the access rules or the keys change: ends those that their callers may
//! no longer make, and holds those that need an approval now. An attempt that is already running
//! finishes.

use std::sync::Arc;

use futures::StreamExt;

use crate::calls::Calls;
use crate::domain::access_rules::AccessRule;
use crate::registry::Catalog;

/// Number of calls that are checked, and ended, at the same time.
const MAX_CONCURRENT: usize = 128;

pub(crate) async fn run(calls: Arc<Calls>) {
    let (mut seen, mut checked) = (0, None);
    while let Some(version) = calls.registry.wait_for_directory_change(seen).await {
        seen = version;
        // Most changes of the directory concern tools and clients.
        let permissions = Some(Permissions::of(&calls.registry.catalog()));
        if checked != permissions {
            checked = permissions;
            run_once(&calls).await;
        }
    }
}

/// The part of the directory that decides which calls are permitted.
#[derive(PartialEq)]
struct Permissions {
    rules: Vec<AccessRule>,
    /// Ids of the revoked keys and session tokens.
    revoked_credentials: Vec<String>,
}

impl Permissions {
    fn of(catalog: &Catalog) -> Self {
        let directory = catalog.directory();
        let keys = directory.keys.iter().filter(|key| key.revoked_ms.is_some());
        let tokens = directory.session_tokens.iter().filter(|token| token.revoked_ms.is_some());
        let ids = keys.map(|key| &key.id).chain(tokens.map(|token| &token.id));
        Self { rules: directory.rules.clone(), revoked_credentials: ids.cloned().collect() }
    }
}

/// Runs one pass. Returns the number of calls that it ended or held.
pub async fn run_once(calls: &Arc<Calls>) -> usize {
    // Concurrent ends share a commit.
    let checked = futures::stream::iter(calls.dispatcher.open_calls.all())
        .map(async |entry| calls.dispatcher.stop_if_not_allowed(&entry.call()).await)
        .buffer_unordered(MAX_CONCURRENT);
    checked.filter(|is_stopped| std::future::ready(*is_stopped)).count().await
}
