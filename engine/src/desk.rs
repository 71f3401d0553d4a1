//! The queue of work items for connected clients, and the leases that say which client has which
//! item.
//!
//! One queue serves three transports (WebSocket, SSE, long poll). The queue is the source of client
//! tools: starting an attempt enqueues a work item, and a client that provides the tool receives
//! it. The queue is not durable: after a restart the engine enqueues every open item again. It
//! opens no socket, and it never decides a status: acknowledgements and results go to the engine.
//!
//! Each client has a window, the maximum number of items it holds at once, so a slow client neither
//! fills memory nor withholds work from the others. An item that was sent and not acknowledged
//! returns to the queue when its connection ends. An acknowledged item stays with its client; when
//! that client reconnects, it receives the item again (marked as redelivered) if the tool is safe
//! to repeat or the client declared that it keeps a record and can answer from it.

mod client;
mod state;

use std::collections::HashSet;
use std::sync::Arc;

use async_trait::async_trait;
use parking_lot::Mutex;
use tokio::sync::mpsc;

use crate::clock::Clock;
use crate::id::CallId;
use crate::json::Json;
use crate::source::{Attempt, ProgressSink, Source, Started};
use crate::tool::{Definition, Effect, Executor};
use crate::trace::TraceParent;

pub use state::ClientView;
use state::State;

/// Lease of a polled work item that its client has not acknowledged.
pub const POLL_LEASE_MS: u64 = 30_000;

/// Time a client may stay disconnected before its acknowledged items that are safe to repeat go to
/// another client.
pub const AWAY_GRACE_MS: u64 = 30_000;

/// A work item: one attempt queued for a client.
#[derive(Debug, Clone)]
pub struct Request {
    pub call_id: CallId,
    pub project: String,
    pub run_id: String,
    pub tool: String,
    pub args: Json,
    pub attempt: u32,
    pub effect: Effect,
    pub deadline_ms: u64,
    /// The span of the attempt.
    pub traceparent: Option<TraceParent>,
    /// True if the item may have been delivered before.
    pub redelivered: bool,
}

/// A message to a connected client.
#[derive(Debug, Clone)]
pub enum Message {
    Request(Request),
    /// The attempt is canceled; its result is no longer needed.
    Cancel {
        call_id: CallId,
        attempt: u32,
    },
}

/// The acknowledged items that a client receives again after it reconnects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Memory {
    /// The client may execute an item twice: irreversible items that it acknowledged are not
    /// redelivered.
    Forgets,
    /// The client keeps a record and answers from it: every unanswered item is redelivered.
    Remembers,
}

/// Kind of a client's connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Line {
    /// The connection stays open; items that are not acknowledged return to the queue when it ends.
    Open,
    /// One request, one response. An item that was handed out and not acknowledged returns to the
    /// queue after [`POLL_LEASE_MS`]; an item that the response did not carry returns at once.
    Poll,
}

/// A client's request to connect.
#[derive(Debug, Clone)]
pub struct Arrival {
    pub project: String,
    pub client_id: String,
    pub offers: HashSet<String>,
    pub window: usize,
    pub memory: Memory,
    pub line: Line,
}

/// The queue of work items for connected clients.
pub struct Desk {
    state: Arc<Mutex<State>>,
    clock: Arc<dyn Clock>,
}

/// One connection of a client; dropping it disconnects.
pub struct Session {
    state: Arc<Mutex<State>>,
    clock: Arc<dyn Clock>,
    client: (String, String),
    number: u64,
    inbox: mpsc::UnboundedReceiver<Message>,
    /// Cancellations that were read and not passed on yet.
    kept: Vec<Message>,
}

impl Desk {
    /// Creates an empty queue.
    pub fn new(clock: Arc<dyn Clock>) -> Self {
        Self { state: Arc::default(), clock }
    }

    /// Connects a client and sends it the items that wait for it.
    pub fn connect(&self, arrival: Arrival) -> Session {
        let (sender, inbox) = mpsc::unbounded_channel();
        let client = (arrival.project.clone(), arrival.client_id.clone());
        let number = self.state.lock().connect(arrival, sender, self.clock.now_ms());
        let (state, clock) = (self.state.clone(), self.clock.clone());
        Session { state, clock, client, number, inbox, kept: Vec::new() }
    }

    /// Replaces the set of tools that a client provides.
    pub fn reoffer(&self, project: &str, client_id: &str, offers: &HashSet<String>) {
        self.state.lock().reoffer(project, client_id, offers, self.clock.now_ms());
    }

    /// Records that a client acknowledged an item: the item now stays with that client.
    pub fn acknowledged(&self, project: &str, client_id: &str, call_id: &CallId) {
        let now_ms = self.clock.now_ms();
        self.state.lock().acknowledged(project, client_id, call_id, now_ms);
    }

    /// Returns the client that holds the lease on this item.
    pub fn holder(&self, call_id: &CallId) -> Option<String> {
        self.state.lock().holder(call_id)
    }

    /// Returns the clients of a project that are or were connected.
    pub fn clients(&self, project: &str) -> Vec<ClientView> {
        self.state.lock().view(project)
    }

    /// Returns true if a client is connected or has unanswered items.
    pub fn is_busy(&self, project: &str, client_id: &str) -> bool {
        self.state.lock().is_busy(&(project.to_owned(), client_id.to_owned()))
    }

    /// Removes a client that has no connection, no lease and no queued item.
    pub fn forget(&self, project: &str, client_id: &str) {
        self.state.lock().forget(&(project.to_owned(), client_id.to_owned()));
    }

    /// Disconnects every client and refuses new connections.
    pub fn close(&self) {
        self.state.lock().close();
    }

    /// Returns the number of open connections.
    pub fn connections(&self) -> usize {
        self.state.lock().connections()
    }

    /// Requeues polled items that were never acknowledged, and acknowledged items of clients that
    /// stayed away, if the tool is safe to repeat.
    pub fn run_once(&self) {
        self.state.lock().return_overdue(self.clock.now_ms());
    }
}

impl Session {
    /// Waits for the next message; `None` once the queue is closed.
    pub async fn next(&mut self) -> Option<Message> {
        self.inbox.recv().await
    }

    /// Starts the poll lease: the item leaves with the response and may be acknowledged later, so
    /// it stays with the client for [`POLL_LEASE_MS`] although this connection ends.
    pub fn lend(&self, call_id: &CallId) {
        self.state.lock().lend(&self.client, call_id, self.clock.now_ms());
    }

    /// Returns a message that has already arrived.
    pub fn ready(&mut self) -> Option<Message> {
        self.inbox.try_recv().ok()
    }

    /// Defers a message to a later response. A deferred cancellation survives the end of this
    /// connection until [`ClientSession::take_cancels`] returns it.
    pub fn keep(&mut self, message: Message) {
        if let Message::Cancel { .. } = message {
            self.kept.push(message);
        }
    }

    /// Returns all cancellations so far: the deferred ones and those that have arrived since. Work
    /// items that arrived too return to the queue when this connection ends.
    pub fn canceled(&mut self) -> Vec<Message> {
        while let Some(message) = self.ready() {
            self.keep(message);
        }
        std::mem::take(&mut self.kept)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let (state, now_ms) = (self.state.clone(), self.clock.now_ms());
        // While the lock is held no message arrives: unread cancellations go to another connection.
        let mut state = state.lock();
        let unheard = self.canceled();
        state.hang_up(&self.client, self.number, unheard, now_ms);
    }
}

#[async_trait]
impl Source for Desk {
    fn executor(&self) -> Executor {
        Executor::Client
    }

    fn list(&self) -> Vec<Definition> {
        Vec::new()
    }

    async fn start(&self, attempt: Attempt, _progress: ProgressSink) -> Started {
        let request = Request {
            call_id: attempt.call_id,
            project: attempt.project,
            run_id: attempt.run_id,
            tool: attempt.tool,
            args: attempt.args,
            attempt: attempt.number,
            effect: attempt.effect,
            deadline_ms: attempt.deadline_ms,
            traceparent: attempt.traceparent,
            redelivered: attempt.again,
        };
        let now_ms = self.clock.now_ms();
        self.state.lock().put(request, attempt.client_id, attempt.taken_by, now_ms);
        Started::Parked
    }

    fn cancel(&self, call_id: &CallId, attempt: u32) {
        self.state.lock().cancel(call_id, attempt);
    }

    fn settled(&self, call_id: &CallId, _attempt: u32) {
        self.state.lock().settled(call_id, self.clock.now_ms());
    }
}

#[cfg(test)]
mod tests;
