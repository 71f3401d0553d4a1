//! One client of the queue: its connections, its leases, and its undelivered cancellations.

use std::collections::{BTreeMap, HashSet, VecDeque};

use tokio::sync::mpsc::UnboundedSender;

use super::{Line, Message, POLL_LEASE_MS, Request};
use crate::id::CallId;
use crate::tool::Effect;

/// Maximum cancellations buffered for a disconnected client; it learns of further ones when it
/// reports.
const MAX_UNHEARD: usize = 256;

pub(super) struct InHand {
    pub(super) acknowledged: bool,
    /// The connection that received the item; `None` if the client has disconnected.
    pub(super) session: Option<u64>,
    /// True if the item left with the response to a poll: the server cannot detect when that client
    /// goes away.
    pub(super) polled: bool,
    /// Time when the item returns to the queue.
    pub(super) lease_until_ms: Option<u64>,
}

impl InHand {
    /// Sets the lease of an acknowledged item. A client whose disconnect cannot be detected keeps
    /// an item that is safe to repeat for half of the call's remaining time.
    pub(super) fn stays(&mut self, request: &Request, now_ms: u64) {
        let rest_ms = request.deadline_ms.saturating_sub(now_ms);
        let until_ms = now_ms.saturating_add(POLL_LEASE_MS.max(rest_ms / 2));
        let harmless = request.effect != Effect::Irreversible;
        self.lease_until_ms = (harmless && self.polled).then_some(until_ms);
    }
}

#[derive(Default)]
pub(super) struct Client {
    pub(super) offers: HashSet<String>,
    pub(super) sessions: Vec<Connection>,
    /// Items queued for this client alone.
    pub(super) pinned: BTreeMap<u64, CallId>,
    /// Keyed by id, so that redelivered items arrive in the order of the requests.
    pub(super) in_hand: BTreeMap<CallId, InHand>,
    /// Cancellations for the next connection: none was open when they occurred.
    pub(super) unheard: VecDeque<Message>,
    pub(super) last_turn: u64,
    pub(super) last_seen_ms: u64,
}

pub(super) struct Connection {
    pub(super) number: u64,
    pub(super) sender: UnboundedSender<Message>,
    pub(super) window: usize,
    pub(super) line: Line,
}

impl Client {
    /// Returns the connection for the next item, if the client has capacity.
    pub(super) fn open_place(&self) -> Option<&Connection> {
        let in_hand = self.in_hand.values().filter(|held| held.session.is_some()).count();
        self.sessions.iter().rev().find(|connection| in_hand < connection.window)
    }

    /// Sends a message on this connection, or on another one, or buffers it for the next one. A
    /// polling client receives it in the pending poll or in the next one.
    pub(super) fn tell(&mut self, session: Option<u64>, message: Message) {
        let given_on = self.sessions.iter().find(|c| Some(c.number) == session);
        match given_on.or_else(|| self.sessions.last()) {
            Some(connection) => drop(connection.sender.send(message)),
            None => {
                self.unheard.push_back(message);
                if self.unheard.len() > MAX_UNHEARD {
                    self.unheard.pop_front();
                }
            }
        }
    }

    /// Returns true if removing the client loses nothing: it has no connection, no lease, no queued
    /// item and no undelivered cancellation.
    pub(super) fn is_idle(&self) -> bool {
        let nothing_out = self.sessions.is_empty() && self.in_hand.is_empty();
        nothing_out && self.pinned.is_empty() && self.unheard.is_empty()
    }
}
