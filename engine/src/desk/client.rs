//! One client at the desk: its connections, what it has in hand, and what it has yet to hear.

use std::collections::{BTreeMap, HashSet, VecDeque};

use tokio::sync::mpsc::UnboundedSender;

use super::{Line, Message, POLL_LEASE_MS, Request};
use crate::id::CallId;
use crate::tool::Effect;

/// Cancellations kept for a client that is away; it finds out about more when it reports.
const MAX_UNHEARD: usize = 256;

pub(super) struct InHand {
    pub(super) acknowledged: bool,
    /// The connection it was given on; none = its client hung up.
    pub(super) session: Option<u64>,
    /// It left with the answer to a poll, whose client is never seen to go away.
    pub(super) polled: bool,
    /// When it goes back in line.
    pub(super) lease_until_ms: Option<u64>,
}

impl InHand {
    /// How long an acknowledged request stays with a client that is never seen to go away. Where
    /// twice is as good as once, that is half of the call's time.
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
    /// In line for this client alone.
    pub(super) pinned: BTreeMap<u64, CallId>,
    /// By id, so that what comes again comes in the order it was asked for.
    pub(super) in_hand: BTreeMap<CallId, InHand>,
    /// Cancellations for its next connection: there was none when they came.
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
    /// The connection to give the next request on, if the client can take one.
    pub(super) fn open_place(&self) -> Option<&Connection> {
        let in_hand = self.in_hand.values().filter(|held| held.session.is_some()).count();
        self.sessions.iter().rev().find(|connection| in_hand < connection.window)
    }

    /// Says it on this connection, or on another one, or on the next one there is. A client that
    /// polls is told in the poll that waits, or in the next one.
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

    /// Whether nothing is lost when it is forgotten: it is not connected, and has nothing in hand,
    /// in line or to hear.
    pub(super) fn is_idle(&self) -> bool {
        let nothing_out = self.sessions.is_empty() && self.in_hand.is_empty();
        nothing_out && self.pinned.is_empty() && self.unheard.is_empty()
    }
}
