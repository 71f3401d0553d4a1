//! The resources of an upstream to whose changes MCP clients have subscribed. Toolcrib subscribes
//! to them again on every new connection.

use std::collections::VecDeque;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::sync::futures::Notified;

/// Maximum number of followed resources of one upstream. Above it, the oldest one is dropped: a new
/// connection does not subscribe to it.
const MAX_FOLLOWED_RESOURCES: usize = 1_000;

/// The URIs of the followed resources.
#[derive(Default)]
pub(in crate::mcp) struct FollowedResources {
    uris: Mutex<VecDeque<String>>,
    changed: Notify,
}

impl FollowedResources {
    /// Adds a resource.
    pub(in crate::mcp) fn add(&self, uri: &str) {
        {
            let mut uris = self.uris.lock();
            if uris.iter().any(|followed| followed == uri) {
                return;
            }
            if uris.len() >= MAX_FOLLOWED_RESOURCES {
                uris.pop_front();
            }
            uris.push_back(uri.to_owned());
        }
        self.changed.notify_waiters();
    }

    /// Returns the URIs.
    pub(super) fn uris(&self) -> Vec<String> {
        self.uris.lock().iter().cloned().collect()
    }

    /// Returns a future that is ready after the next change.
    pub(super) fn next_change(&self) -> Notified<'_> {
        self.changed.notified()
    }
}
