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
//! returns to the queue when its connection ends. An acknowledged item stays with its client for a
//! grace period; if it is pinned to the client, or the tool is irreversible, until the deadline.
//! When that client reconnects, it receives the item again (marked as redelivered) if the tool is
//! safe to repeat or the client declared that it keeps a record and can answer from it.

mod client;
mod state;
use std::any::Any;
use std::collections::HashSet;
use std::sync::Arc;

use async_trait::async_trait;
use parking_lot::Mutex;
use state::ClientQueueState;
use tokio::sync::mpsc;

use crate::domain::id::CallId;
use crate::domain::json::Json;
use crate::domain::tool::availability::ToolClient;
use crate::domain::tool::{Effect, Executor, ToolDefinition};
use crate::domain::trace::TraceParent;
use crate::ports::clock::Clock;
use crate::ports::source::{Attempt, ProgressSink, Source, StartResult};
pub use state::ClientView;

/// Lease of a polled work item that its client has not acknowledged.
pub const POLL_LEASE_MS: u64 = 30_000;

/// Time a client may stay disconnected before its acknowledged items that are safe to repeat return
/// to the queue.
pub const DISCONNECT_GRACE_MS: u64 = 30_000;

/// The same time if another connected client can take the items.
pub const FAILOVER_GRACE_MS: u64 = 1_000;

/// A work item: one attempt queued for a client.
#[derive(Debug, Clone)]
pub struct WorkItem {
    /// Id of the call to execute.
    pub call_id: CallId,
    /// Project that the call belongs to.
    pub project: String,
    /// Run that the call belongs to.
    pub run_id: String,
    /// Name of the tool to execute.
    pub tool: String,
    /// Arguments to execute the tool with.
    pub args: Json,
    /// Number of the attempt within the call, from 1.
    pub attempt: u32,
    /// Side effect of the tool; decides whether an acknowledged item may be redelivered.
    pub effect: Effect,
    /// Deadline of the call, in Unix milliseconds.
    pub deadline_ms: u64,
    /// The deadline by the clock's `now_ms`, which leases use.
    pub(crate) lease_deadline_ms: u64,
    /// The span of the attempt.
    pub traceparent: Option<TraceParent>,
    /// True if the item may have been delivered before.
    pub redelivered: bool,
}

/// A message to a connected client.
#[derive(Debug, Clone)]
pub enum ClientMessage {
    /// A work item for the client to execute.
    Execute(WorkItem),
    /// The attempt is canceled; its result is no longer needed.
    Cancel {
        /// Id of the canceled call.
        call_id: CallId,
        /// Number of the canceled attempt.
        attempt: u32,
    },
}

/// The acknowledged items that a client receives again after it reconnects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Redelivery {
    /// The client may execute an item twice: irreversible items that it acknowledged are not
    /// redelivered.
    ReversibleOnly,
    /// The client keeps a record and answers from it: every unanswered item is redelivered.
    All,
}

/// Kind of a client's connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    /// The connection stays open; items that are not acknowledged return to the queue when it ends.
    Streaming,
    /// One request, one response. An item that was handed out and not acknowledged returns to the
    /// queue after `POLL_LEASE_MS`; an item that the response did not carry returns at once.
    Polling,
}

/// A client's request to connect.
#[derive(Debug, Clone)]
pub struct ConnectRequest {
    pub project: String,
    pub client_id: String,
    pub tools: HashSet<String>,
    pub window: usize,
    pub redelivery: Redelivery,
    pub transport: Transport,
}

/// Holds capacity for one item that a client has. Dropping it releases the capacity.
pub type DeliveryPermit = Box<dyn Any + Send>;

/// Limits the number of items that clients have at the same time.
pub trait DeliveryLimiter: Send + Sync {
    /// Acquires a permit for an item of this project, if one is free.
    fn try_acquire(&self, project: &str) -> Option<DeliveryPermit>;

    /// Acquires a permit for an item that a client has already, regardless of the limit.
    fn force_acquire(&self, project: &str) -> Option<DeliveryPermit>;
}

/// The queue of work items for connected clients.
pub struct ClientQueue {
    state: Arc<Mutex<ClientQueueState>>,
    clock: Arc<dyn Clock>,
}

/// One connection of a client; dropping it disconnects.
pub struct ClientSession {
    state: Arc<Mutex<ClientQueueState>>,
    clock: Arc<dyn Clock>,
    client: (String, String),
    number: u64,
    inbox: mpsc::UnboundedReceiver<ClientMessage>,
    /// Cancellations that were read and not passed on yet.
    deferred_cancels: Vec<ClientMessage>,
}

impl ClientQueue {
    /// Creates an empty queue.
    pub fn new(clock: Arc<dyn Clock>) -> Self {
        Self { state: Arc::default(), clock }
    }

    /// Connects a client and sends it the items that wait for it.
    pub fn connect(&self, arrival: ConnectRequest) -> ClientSession {
        let (sender, inbox) = mpsc::unbounded_channel();
        let client = (arrival.project.clone(), arrival.client_id.clone());
        let number = self.state.lock().connect(arrival, sender, self.clock.now_ms());
        let (state, clock) = (self.state.clone(), self.clock.clone());
        ClientSession { state, clock, client, number, inbox, deferred_cancels: Vec::new() }
    }

    /// Sets the limiter of the items that clients have. Without one there is no limit.
    pub fn set_limiter(&self, limiter: Arc<dyn DeliveryLimiter>) {
        self.state.lock().set_limiter(limiter);
    }

    /// Hands items that waited for a permit to clients, as far as permits are free.
    pub fn assign_waiting(&self) {
        self.state.lock().assign_waiting(self.clock.now_ms());
    }

    /// Replaces the set of tools that a client provides.
    pub fn set_tools(&self, project: &str, client_id: &str, offers: &HashSet<String>) {
        self.state.lock().set_tools(project, client_id, offers, self.clock.now_ms());
    }

    /// Records that a client acknowledged an item: the item now stays with that client.
    pub fn acknowledge(&self, project: &str, client_id: &str, call_id: &CallId) {
        let now_ms = self.clock.now_ms();
        self.state.lock().acknowledge(project, client_id, call_id, now_ms);
    }

    /// Returns the client that holds the lease on this item.
    pub fn lease_holder(&self, call_id: &CallId) -> Option<String> {
        self.state.lock().lease_holder(call_id)
    }

    /// Returns the time since which a client has this item; `None` if no client has it.
    pub fn delivered_ms(&self, call_id: &CallId) -> Option<u64> {
        self.state.lock().delivered_ms(call_id)
    }

    /// Returns the clients of a project that are or were connected.
    pub fn clients(&self, project: &str) -> Vec<ClientView> {
        let mut clients = self.state.lock().list_clients(project);
        let wall_offset_ms = self.clock.wall_offset_ms();
        for seen_ms in clients.iter_mut().filter_map(|client| client.last_seen_ms.as_mut()) {
            *seen_ms = seen_ms.saturating_add_signed(wall_offset_ms);
        }
        clients
    }

    /// Returns a client that offers a tool, as the callers of the tool see it.
    pub fn tool_client(&self, project: &str, client_id: &str) -> ToolClient {
        self.state.lock().tool_client(project, client_id, self.clock.now_ms())
    }

    /// Returns true if a client is connected or has unanswered items.
    pub fn is_busy(&self, project: &str, client_id: &str) -> bool {
        self.state.lock().is_busy(&(project.to_owned(), client_id.to_owned()))
    }

    /// Removes a client that has no connection, no lease and no queued item.
    pub fn remove_if_idle(&self, project: &str, client_id: &str) {
        self.state.lock().remove_if_idle(&(project.to_owned(), client_id.to_owned()));
    }

    /// Disconnects every client and refuses new connections.
    pub fn close(&self) {
        self.state.lock().close();
    }

    /// Returns the number of open connections.
    pub fn connection_count(&self) -> usize {
        self.state.lock().connection_count()
    }

    /// Requeues polled items that were never acknowledged, and acknowledged items of clients that
    /// stayed away, if the tool is safe to repeat.
    pub fn requeue_expired(&self) {
        self.state.lock().requeue_expired(self.clock.now_ms());
    }
}

impl ClientSession {
    /// Waits for the next message; `None` once the queue is closed.
    pub async fn next(&mut self) -> Option<ClientMessage> {
        self.inbox.recv().await
    }

    /// Starts the poll lease: the item leaves with the response and may be acknowledged later, so
    /// it stays with the client for `POLL_LEASE_MS` although this connection ends.
    pub fn start_poll_lease(&self, call_id: &CallId) {
        self.state.lock().start_poll_lease(&self.client, call_id, self.clock.now_ms());
    }

    /// Returns a message that has already arrived.
    pub fn try_next(&mut self) -> Option<ClientMessage> {
        self.inbox.try_recv().ok()
    }

    /// Defers a message to a later response. A deferred cancellation survives the end of this
    /// connection until [`ClientSession::take_cancels`] returns it.
    pub fn defer_cancel(&mut self, message: ClientMessage) {
        if let ClientMessage::Cancel { .. } = message {
            self.deferred_cancels.push(message);
        }
    }

    /// Returns all cancellations so far: the deferred ones and those that have arrived since. Work
    /// items that arrived too return to the queue when this connection ends.
    pub fn take_cancels(&mut self) -> Vec<ClientMessage> {
        while let Some(message) = self.try_next() {
            self.defer_cancel(message);
        }
        std::mem::take(&mut self.deferred_cancels)
    }
}

impl Drop for ClientSession {
    fn drop(&mut self) {
        let (state, now_ms) = (self.state.clone(), self.clock.now_ms());
        // While the lock is held no message arrives: unread cancellations go to another connection.
        let mut state = state.lock();
        let unheard = self.take_cancels();
        state.disconnect(&self.client, self.number, unheard, now_ms);
    }
}

#[async_trait]
impl Source for ClientQueue {
    fn executor(&self) -> Executor {
        Executor::CLIENT
    }

    fn list(&self) -> Vec<ToolDefinition> {
        Vec::new()
    }

    async fn start(&self, attempt: Attempt, _progress: ProgressSink) -> StartResult {
        let request = WorkItem {
            call_id: attempt.call_id,
            project: attempt.project,
            run_id: attempt.run_id,
            tool: attempt.tool,
            args: attempt.args,
            attempt: attempt.number,
            effect: attempt.effect,
            deadline_ms: attempt.deadline_ms,
            lease_deadline_ms: self.clock.to_monotonic_ms(attempt.deadline_ms),
            traceparent: attempt.traceparent,
            redelivered: attempt.redelivered,
        };
        let now_ms = self.clock.now_ms();
        self.state.lock().enqueue(request, attempt.client_id, attempt.acknowledged_by, now_ms);
        StartResult::Accepted
    }

    fn cancel(&self, call_id: &CallId, attempt: u32) {
        self.state.lock().cancel(call_id, attempt);
    }

    fn release_attempt(&self, call_id: &CallId, _attempt: u32) {
        self.state.lock().release(call_id, self.clock.now_ms());
    }
}

#[cfg(test)]
mod tests;
