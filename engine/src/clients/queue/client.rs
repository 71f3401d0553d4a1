//! One client of the queue: its connections, its leases, and its undelivered cancellations.

use std::collections::{BTreeMap, HashSet, VecDeque};

use tokio::sync::mpsc::UnboundedSender;

use super::{ClientMessage, DISCONNECT_GRACE_MS, POLL_LEASE_MS, Transport, WorkItem};
use crate::domain::id::CallId;
use crate::domain::tool::Effect;

/// Maximum cancellations buffered for a disconnected client; it learns of further ones when it
/// reports.
const MAX_UNDELIVERED_CANCELS: usize = 256;

pub(super) struct Lease {
    pub(super) acknowledged: bool,
    /// Time when the client received the item.
    pub(super) since_ms: u64,
    /// The connection that received the item; `None` if the client has disconnected.
    pub(super) session: Option<u64>,
    /// True if the item left with the response to a poll: the server cannot detect when that client
    /// goes away.
    pub(super) polled: bool,
    /// Time when the item returns to the queue; `None` if the lease does not end with time alone.
    pub(super) lease_until_ms: Option<u64>,
}

impl Lease {
    /// Sets the lease of an acknowledged item. A client that keeps polling has an item that is safe
    /// to repeat for half of the call's remaining time.
    pub(super) fn extend(&mut self, request: &WorkItem, now_ms: u64) {
        let rest_ms = request.lease_deadline_ms.saturating_sub(now_ms);
        let until_ms = now_ms.saturating_add(POLL_LEASE_MS.max(rest_ms / 2));
        let harmless = request.effect != Effect::Irreversible;
        self.lease_until_ms = (harmless && self.polled).then_some(until_ms);
    }
}

#[derive(Default)]
pub(super) struct QueueClient {
    pub(super) tools: HashSet<String>,
    pub(super) sessions: Vec<ClientConnection>,
    /// Items queued for this client alone.
    pub(super) pinned: BTreeMap<u64, CallId>,
    /// Keyed by id, so that redelivered items arrive in the order of the requests.
    pub(super) leases: BTreeMap<CallId, Lease>,
    /// Cancellations for the next connection: none was open when they occurred.
    pub(super) undelivered_cancels: VecDeque<ClientMessage>,
    pub(super) last_assigned: u64,
    pub(super) last_seen_ms: u64,
    /// True if the last connection was a poll: the client is there between two polls as well.
    pub(super) is_polling: bool,
}

pub(super) struct ClientConnection {
    pub(super) number: u64,
    pub(super) sender: UnboundedSender<ClientMessage>,
    pub(super) window: usize,
    pub(super) transport: Transport,
}

impl QueueClient {
    /// Returns the connection for the next item, if the client has capacity.
    pub(super) fn connection_with_capacity(&self) -> Option<&ClientConnection> {
        let in_hand = self.leases.values().filter(|lease| lease.session.is_some()).count();
        self.sessions.iter().rev().find(|connection| in_hand < connection.window)
    }

    /// Sends a message on this connection, or on another one, or buffers it for the next one. A
    /// polling client receives it in the pending poll or in the next one.
    pub(super) fn send_or_buffer(&mut self, session: Option<u64>, message: ClientMessage) {
        let assigned = self.sessions.iter().find(|c| Some(c.number) == session);
        match assigned.or_else(|| self.sessions.last()) {
            Some(connection) => drop(connection.sender.send(message)),
            None => {
                self.undelivered_cancels.push_back(message);
                if self.undelivered_cancels.len() > MAX_UNDELIVERED_CANCELS {
                    self.undelivered_cancels.pop_front();
                }
            }
        }
    }

    /// Returns true if the client is connected, or polled recently, or works on polled items.
    pub(super) fn is_present(&self, now_ms: u64) -> bool {
        let is_recent = self.last_seen_ms.saturating_add(DISCONNECT_GRACE_MS) > now_ms;
        let works = || {
            let mut until_ms = self.leases.values().filter_map(|lease| lease.lease_until_ms);
            until_ms.any(|until_ms| until_ms > now_ms)
        };
        !self.sessions.is_empty() || (self.is_polling && (is_recent || works()))
    }

    /// Returns true if removing the client loses nothing: it has no connection, no lease, no queued
    /// item and no undelivered cancellation.
    pub(super) fn is_idle(&self) -> bool {
        let nothing_out = self.sessions.is_empty() && self.leases.is_empty();
        nothing_out && self.pinned.is_empty() && self.undelivered_cancels.is_empty()
    }
}
