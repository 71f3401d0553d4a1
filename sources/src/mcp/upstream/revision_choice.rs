//! The revision of MCP that Toolcrib uses with an upstream.
//!
//! Toolcrib prefers 2026-07-28. In that revision a server ends a call with its questions and is
//! called again; a tool that instead asks in the middle of its call fails with the error that its
//! request is invalid (`-32600`). From then on Toolcrib uses 2025-11-25 with that upstream, a
//! revision in which it can ask. The stored tools of the upstream record the choice, so that it
//! holds after a restart.

use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::Notify;

/// The choice for one upstream.
#[derive(Default)]
pub(in crate::mcp) struct RevisionChoice {
    requires_legacy: AtomicBool,
    /// True if the upstream does not accept a legacy handshake.
    refuses_legacy: AtomicBool,
    changed: Notify,
}

impl RevisionChoice {
    /// Returns true if Toolcrib has to use 2025-11-25 with the upstream.
    pub(in crate::mcp) fn requires_legacy(&self) -> bool {
        self.requires_legacy.load(Ordering::Acquire)
    }

    /// Records what the stored tools of the upstream say.
    pub(super) fn restore(&self, requires_legacy: bool) {
        if requires_legacy && !self.refuses_legacy.load(Ordering::Acquire) {
            self.requires_legacy.store(true, Ordering::Release);
        }
    }

    /// Records that the upstream can ask in 2025-11-25 only. Returns false if it does not accept
    /// that revision.
    pub(in crate::mcp) fn require_legacy(&self) -> bool {
        if self.refuses_legacy.load(Ordering::Acquire) {
            return false;
        }
        if !self.requires_legacy.swap(true, Ordering::AcqRel) {
            self.changed.notify_one();
        }
        true
    }

    /// Records that the upstream does not accept a legacy handshake.
    pub(super) fn record_refusal(&self) {
        if self.requires_legacy.swap(false, Ordering::AcqRel) {
            self.refuses_legacy.store(true, Ordering::Release);
        }
    }

    /// Waits until Toolcrib has to use 2025-11-25 with the upstream.
    pub(super) async fn wait_until_legacy(&self) {
        loop {
            let changed = self.changed.notified();
            if self.requires_legacy() {
                return;
            }
            changed.await;
        }
    }
}
