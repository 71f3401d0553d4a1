//! The desk: where work for connected clients waits, and who has what in hand.
//!
//! One queue behind three doors (WebSocket, SSE, long poll). The desk is the source of client
//! tools: starting an attempt puts a request here; a client that offers the tool is given it. It
//! holds no truth: after a restart the engine puts every open request here again. It opens no
//! socket, and it never decides a status: acknowledgements and results go to the engine.
//!
//! A client has a window: so many requests in hand and no more, so a slow one neither fills memory
//! nor keeps work from the others. A request that was given and not acknowledged goes back in line
//! when its connection ends. One that was acknowledged stays with its client; when that client
//! comes back it is given again (marked so) where twice is as good as once, or where the client
//! said that it keeps a record and can answer from it.

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

/// How long a polled, unacknowledged request stays with the client that polled it.
pub const POLL_LEASE_MS: u64 = 30_000;

/// How long a client may be away before what it had acknowledged goes to another (where allowed).
pub const AWAY_GRACE_MS: u64 = 30_000;

/// A piece of work for a client.
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
    /// The span that the attempt is.
    pub traceparent: Option<TraceParent>,
    /// It may have been given before.
    pub redelivered: bool,
}

/// What a connected client hears.
#[derive(Debug, Clone)]
pub enum Message {
    Request(Request),
    /// Nobody wants this any more.
    Cancel {
        call_id: CallId,
        attempt: u32,
    },
}

/// What a client can do when it is given something a second time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Memory {
    /// It may do it twice: irreversible work it had acknowledged is not given again.
    Forgets,
    /// It keeps a record and answers from it: everything unanswered is given again.
    Remembers,
}

/// How long a connection lasts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Line {
    /// It is held open, and what was not acknowledged goes back in line when it ends.
    Open,
    /// One question, one answer; what was lent and not acknowledged goes back after
    /// [`POLL_LEASE_MS`], what the answer did not bring goes back at once.
    Poll,
}

/// A client that is connecting.
#[derive(Debug, Clone)]
pub struct Arrival {
    pub project: String,
    pub client_id: String,
    pub offers: HashSet<String>,
    pub window: usize,
    pub memory: Memory,
    pub line: Line,
}

/// The queue.
pub struct Desk {
    state: Arc<Mutex<State>>,
    clock: Arc<dyn Clock>,
}

/// One connection of a client; dropping it hangs up.
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
    /// An empty desk.
    pub fn new(clock: Arc<dyn Clock>) -> Self {
        Self { state: Arc::default(), clock }
    }

    /// A client connects, and is given what waits for it.
    pub fn connect(&self, arrival: Arrival) -> Session {
        let (sender, inbox) = mpsc::unbounded_channel();
        let client = (arrival.project.clone(), arrival.client_id.clone());
        let number = self.state.lock().connect(arrival, sender, self.clock.now_ms());
        let (state, clock) = (self.state.clone(), self.clock.clone());
        Session { state, clock, client, number, inbox, kept: Vec::new() }
    }

    /// A client offers other tools than before.
    pub fn reoffer(&self, project: &str, client_id: &str, offers: &HashSet<String>) {
        self.state.lock().reoffer(project, client_id, offers, self.clock.now_ms());
    }

    /// A client acknowledged a request: it stays with that client now.
    pub fn acknowledged(&self, project: &str, client_id: &str, call_id: &CallId) {
        let now_ms = self.clock.now_ms();
        self.state.lock().acknowledged(project, client_id, call_id, now_ms);
    }

    /// Who has this request in hand.
    pub fn holder(&self, call_id: &CallId) -> Option<String> {
        self.state.lock().holder(call_id)
    }

    /// The clients that are or were connected, of one project.
    pub fn clients(&self, project: &str) -> Vec<ClientView> {
        self.state.lock().view(project)
    }

    /// Whether a client is connected or has requests that it has not answered.
    pub fn is_busy(&self, project: &str, client_id: &str) -> bool {
        self.state.lock().is_busy(&(project.to_owned(), client_id.to_owned()))
    }

    /// A client that has nothing in hand or in line and is not connected is seen no more.
    pub fn forget(&self, project: &str, client_id: &str) {
        self.state.lock().forget(&(project.to_owned(), client_id.to_owned()));
    }

    /// Hangs up on everybody, for good.
    pub fn close(&self) {
        self.state.lock().close();
    }

    /// How many connections are open.
    pub fn connections(&self) -> usize {
        self.state.lock().connections()
    }

    /// Puts back in line what was polled and never acknowledged, and what a client that stayed
    /// away had acknowledged, where twice is as good as once.
    pub fn run_once(&self) {
        self.state.lock().return_overdue(self.clock.now_ms());
    }
}

impl Session {
    /// The next message; none once the desk was closed.
    pub async fn next(&mut self) -> Option<Message> {
        self.inbox.recv().await
    }

    /// The request leaves with the answer and may be acknowledged later: it stays with the client
    /// for [`POLL_LEASE_MS`] after this connection ended.
    pub fn lend(&self, call_id: &CallId) {
        self.state.lock().lend(&self.client, call_id, self.clock.now_ms());
    }

    /// A message that is already there.
    pub fn ready(&mut self) -> Option<Message> {
        self.inbox.try_recv().ok()
    }

    /// This message is passed on later: until [`Session::canceled`] gives it out, a cancellation
    /// is not lost when this connection ends.
    pub fn keep(&mut self, message: Message) {
        if let Message::Cancel { .. } = message {
            self.kept.push(message);
        }
    }

    /// All that is canceled by now: what was kept, and what came since. Requests that came too go
    /// back in line when this connection ends.
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
        // Under the lock nothing more comes: what is not read by now is for another connection.
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
