//! Tells the operator of a tool service whether a server answers its requests. Without a server, a
//! service can neither read the card of a command nor report a result, and its commands wait.

use std::collections::HashSet;
use std::sync::Arc;

use parking_lot::Mutex;

/// Maximum number of subject prefixes that are remembered.
const MAX_PREFIXES: usize = 1_000;

/// The subject prefixes (`cg.<version>.<project>.<channel>`) that no server answers. Cheap to
/// clone.
#[derive(Clone, Default)]
pub(super) struct ServerReachability(Arc<Mutex<HashSet<String>>>);

impl ServerReachability {
    /// Records that a request was not answered. Logs the first of each prefix.
    pub(super) fn record_no_reply(&self, subject: &str) {
        let Some((prefix, _)) = subject.split_once(".rpc.") else { return };
        {
            let mut unanswered = self.0.lock();
            if unanswered.len() >= MAX_PREFIXES || !unanswered.insert(prefix.to_owned()) {
                return;
            }
        }
        let version = prefix.split('.').nth(1).unwrap_or_default();
        tracing::warn!(
            "cards cannot be read: no server answers {prefix}.rpc.sys.cards.get. Commands wait until \
             one does. This needs `toolcrib serve --nats URL` on this NATS server, in the same \
             account, with nats.version = \"{version}\", and the permission to publish to \
             {prefix}.rpc.sys.> and to receive the replies"
        );
    }

    /// Records that a request was answered. Logs it if an earlier one was not.
    pub(super) fn record_reply(&self, subject: &str) {
        let Some((prefix, _)) = subject.split_once(".rpc.") else { return };
        let was_unanswered = {
            let mut unanswered = self.0.lock();
            !unanswered.is_empty() && unanswered.remove(prefix)
        };
        if was_unanswered {
            tracing::info!("cards can be read: a server answers {prefix}.rpc.sys.cards.get");
        }
    }
}
