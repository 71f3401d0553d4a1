//! Conversations in progress: each runs in a task of its own and is followed by its requester.
//!
//! A conversation that only reads ends with its requester's connection. One that has made calls
//! with side effects continues: a repeated request takes it over, follows it from its first event
//! and gets its answer. If none comes within the grace period, the conversation stops; it can still
//! be continued from its checkpoint ([`toolcrib::runs::ConversationCheckpoint`]).

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use parking_lot::Mutex;
use serde_json::Value;
use tokio::sync::watch;
use toolcrib::calls::PendingDelivery;
use toolcrib::domain::fault::{Code, Error, Fault};
use toolcrib::domain::model_reply::{FinishReason, TokenUsage, ToolCallRequest};
use toolcrib::runs::{ActiveConversation, SavedConversation};
use toolcrib::{Caller, Engine};

use super::error::OpenAiError;
use crate::delivery::{AnswerDelivery, JOINED_HEADER, ResponseDeliveries};

/// An event of the conversation that is streamed to the caller.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum StreamEvent {
    /// The model started another response.
    StepStarted,
    TextDelta(String),
    /// The model finished a response; calls may follow.
    ModelReplied,
}

/// The result of a conversation.
#[derive(Debug)]
pub(super) struct ConversationResult {
    /// The last text of the model.
    pub(super) text: String,
    /// The non-empty texts of all steps.
    pub(super) texts: Vec<String>,
    /// Calls of the caller's own tools.
    pub(super) calls: Vec<ToolCallRequest>,
    pub(super) finish_reason: FinishReason,
    pub(super) usage: TokenUsage,
    /// Additional information: the run, its steps, its calls, and the limit that ended it.
    pub(super) metadata: Value,
    /// The whole conversation, and the calls whose results are outstanding.
    pub(super) conversation: SavedConversation,
}

/// A conversation that ended with an error.
pub(super) struct ConversationError {
    pub(super) error: Error,
    /// True if calls were made before the error. OpenAI's SDKs retry requests by themselves, and a
    /// retry would make all these calls again.
    pub(super) calls_made: bool,
}

impl ConversationError {
    /// Returns a copy of the error. An internal error keeps its message and loses its type, because
    /// the source of an error cannot be cloned.
    pub(super) fn to_error(&self) -> Error {
        match &self.error {
            Error::Refused { fault, retry_after_ms } => {
                Error::Refused { fault: fault.clone(), retry_after_ms: *retry_after_ms }
            }
            Error::Internal(source) => Error::Internal(source.to_string().into()),
        }
    }

    /// Returns the response. Several requesters may get it, one after the other.
    pub(super) fn to_response(&self) -> Response {
        let mut answer = OpenAiError(self.to_error()).into_response();
        if self.calls_made || self.error.code() == Code::Canceled {
            let never = HeaderValue::from_static("false");
            answer.headers_mut().insert("x-should-retry", never);
            answer.headers_mut().remove(header::RETRY_AFTER);
        }
        answer
    }
}

/// The end of a conversation.
pub(super) type ConversationEnd = Result<ConversationResult, ConversationError>;

/// The conversations that a repeated request can take over, by their ids.
#[derive(Clone, Default)]
pub struct LiveConversations(Arc<Mutex<HashMap<String, Arc<LiveConversation>>>>);

impl LiveConversations {
    pub(super) fn get(&self, id: &str) -> Option<Arc<LiveConversation>> {
        self.0.lock().get(id).cloned()
    }
}

#[derive(Default)]
struct LiveState {
    events: Vec<StreamEvent>,
    end: Option<Arc<ConversationEnd>>,
    /// True if the task is gone, with or without an end.
    is_over: bool,
    /// The delivery of the current requester; `None` before the first checkpoint.
    delivery: Option<PendingDelivery>,
    /// True if the requester disconnected before the first checkpoint: the conversation stops.
    is_abandoned: bool,
}

/// A conversation that runs in a task of its own.
pub(super) struct LiveConversation {
    id: String,
    pub(super) run_id: String,
    pub(super) engine: Engine,
    pub(super) caller: Caller,
    conversations: LiveConversations,
    state: Mutex<LiveState>,
    /// Wakes the requester when the state has changed.
    changes: watch::Sender<u64>,
    /// The run of the conversation while it is in progress. Gone once the record is stored.
    active: Mutex<Option<Arc<ActiveConversation>>>,
}

impl LiveConversation {
    /// Creates a conversation that has not started.
    pub(super) fn new(
        id: String,
        run_id: String,
        engine: Engine,
        caller: Caller,
        conversations: &LiveConversations,
    ) -> Arc<Self> {
        Arc::new(Self {
            id,
            run_id,
            engine,
            caller,
            conversations: conversations.clone(),
            state: Mutex::default(),
            changes: watch::Sender::new(0),
            active: Mutex::default(),
        })
    }

    /// Runs the conversation in a task of its own. `resumed` is the delivery of a repeated request
    /// that continues it from its checkpoint. Returns its first requester.
    pub(super) fn start<F>(
        self: Arc<Self>,
        resumed: Option<PendingDelivery>,
        active: ActiveConversation,
        run: impl FnOnce(Arc<Self>, Arc<ActiveConversation>) -> F,
    ) -> Requester
    where
        F: Future<Output = ConversationEnd> + Send + 'static,
    {
        let joined = resumed.is_some();
        if let Some(delivery) = resumed {
            self.set_delivery(delivery);
        }
        let active = Arc::new(active);
        *self.active.lock() = Some(active.clone());
        let (running, ended) = (Box::pin(run(self.clone(), active)), EndedOnDrop(self.clone()));
        tokio::spawn(async move {
            let end = running.await;
            ended.0.update(|state| state.end = Some(Arc::new(end)));
        });
        Requester::new(self, joined)
    }

    /// Continues a conversation for a repeated request. Returns its new requester.
    pub(super) fn take_over(self: Arc<Self>, delivery: PendingDelivery) -> Requester {
        self.state.lock().delivery = Some(delivery);
        Requester::new(self, true)
    }

    /// Adds an event.
    pub(super) fn push(&self, event: StreamEvent) {
        self.update(|state| state.events.push(event));
    }

    /// Returns true if the conversation has a checkpoint.
    pub(super) fn has_checkpoint(&self) -> bool {
        self.conversations.0.lock().contains_key(&self.id)
    }

    /// Sets the delivery of the requester: from here on the conversation can be taken over. Returns
    /// false if the requester is gone, so that the conversation must stop.
    pub(super) fn set_delivery(self: &Arc<Self>, delivery: PendingDelivery) -> bool {
        let mut state = self.state.lock();
        if state.is_abandoned {
            return false;
        }
        state.delivery = Some(delivery);
        self.conversations.0.lock().insert(self.id.clone(), self.clone());
        true
    }

    fn update(&self, change: impl FnOnce(&mut LiveState)) {
        change(&mut self.state.lock());
        self.changes.send_modify(|count| *count += 1);
    }

    /// Stops the conversation, whose requester is gone. Its run ends as CANCELED.
    fn stop(&self) {
        if let Some(active) = &*self.active.lock() {
            let message = "the requester has disconnected";
            active.stop(Fault::new(Code::Canceled, message));
        }
        self.conversations.0.lock().remove(&self.id);
    }

    /// Stops the conversation if its requester does not return in time.
    async fn stop_after_grace(self: Arc<Self>) {
        let conversations = self.engine.runs().conversations();
        if !conversations.wait_for_requester(&self.caller, &self.id).await {
            return;
        }
        // A repeated request gets the answer of an ended conversation until the rejoin window
        // closes.
        let has_ended = self.state.lock().end.is_some();
        if !has_ended || conversations.wait_for_rejoin_window(&self.caller, &self.id).await {
            self.stop();
        }
    }
}

/// Wakes the requester however the task ends.
struct EndedOnDrop(Arc<LiveConversation>);

impl Drop for EndedOnDrop {
    fn drop(&mut self) {
        *self.0.active.lock() = None;
        self.0.update(|state| state.is_over = true);
    }
}

/// An update for the requester of a conversation.
pub(super) enum ConversationUpdate {
    Event(StreamEvent),
    Finished(Arc<ConversationEnd>),
}

/// The requester of a conversation, which follows its events from the first one on.
pub(super) struct Requester {
    live: Arc<LiveConversation>,
    changes: watch::Receiver<u64>,
    read_events: usize,
    deliveries: ResponseDeliveries,
    /// True if the request joined a conversation of an earlier one.
    pub(super) joined: bool,
}

impl Requester {
    fn new(live: Arc<LiveConversation>, joined: bool) -> Self {
        let deliveries = ResponseDeliveries::default();
        deliveries
            .push(RequesterGuard { live: live.clone(), is_delivered: AtomicBool::new(false) });
        Self { changes: live.changes.subscribe(), read_events: 0, live, deliveries, joined }
    }

    /// Returns the additional information about a conversation for this requester.
    pub(super) fn metadata(&self, ending: &ConversationResult) -> Value {
        let mut metadata = ending.metadata.clone();
        if self.joined {
            metadata["joined"] = true.into();
        }
        metadata
    }

    /// Returns the headers and deliveries of the response to this requester.
    pub(super) fn response_head(&self) -> ResponseHead {
        let (run_id, joined) = (self.live.run_id.clone(), self.joined);
        ResponseHead { run_id, joined, deliveries: self.deliveries.clone() }
    }

    /// Returns the next update, or `None` if the conversation broke off. After the end, the next
    /// frame of the response carries the answer.
    pub(super) async fn next(&mut self) -> Option<ConversationUpdate> {
        loop {
            self.changes.borrow_and_update();
            {
                let state = self.live.state.lock();
                if let Some(event) = state.events.get(self.read_events) {
                    self.read_events += 1;
                    return Some(ConversationUpdate::Event(event.clone()));
                }
                if let Some(end) = &state.end {
                    self.deliveries.set_answered();
                    return Some(ConversationUpdate::Finished(end.clone()));
                }
                if state.is_over {
                    return None;
                }
            }
            self.changes.changed().await.ok()?;
        }
    }

    /// Waits for the end of the conversation.
    pub(super) async fn wait_for_end(&mut self) -> Result<Arc<ConversationEnd>, Error> {
        loop {
            match self.next().await {
                Some(ConversationUpdate::Event(_)) => {}
                Some(ConversationUpdate::Finished(end)) => return Ok(end),
                None => {
                    let message = "the conversation failed; see the server's log";
                    return Err(Error::refused(Code::Internal, message));
                }
            }
        }
    }
}

/// The part of a response that is the same in every format.
pub(super) struct ResponseHead {
    run_id: String,
    joined: bool,
    deliveries: ResponseDeliveries,
}

impl ResponseHead {
    /// Adds the headers with the run id and the joined conversation, and the deliveries that the
    /// response completes.
    pub(super) fn complete(self, mut response: Response) -> Response {
        response.extensions_mut().insert(self.deliveries);
        if let Ok(run_id) = HeaderValue::from_str(&self.run_id) {
            if self.joined {
                response.headers_mut().insert(JOINED_HEADER, run_id.clone());
            }
            response.headers_mut().insert("toolcrib-run-id", run_id);
        }
        response
    }
}

/// Tells the conversation whether its requester has the answer or is gone.
struct RequesterGuard {
    live: Arc<LiveConversation>,
    is_delivered: AtomicBool,
}

impl AnswerDelivery for RequesterGuard {
    fn mark_written(&self) {
        if let Some(delivery) = &self.live.state.lock().delivery {
            delivery.mark_written();
        }
    }

    fn mark_delivered(&self) {
        self.is_delivered.store(true, Ordering::Release);
        if let Some(delivery) = self.live.state.lock().delivery.take() {
            delivery.mark_delivered();
        }
        self.live.conversations.0.lock().remove(&self.live.id);
    }
}

impl Drop for RequesterGuard {
    fn drop(&mut self) {
        if *self.is_delivered.get_mut() {
            return;
        }
        // Dropping the delivery lets a repeated request take the conversation over.
        let delivery = {
            let mut state = self.live.state.lock();
            state.is_abandoned = state.delivery.is_none();
            state.delivery.take()
        };
        let Some(delivery) = delivery else { return self.live.stop() };
        drop(delivery);
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(self.live.clone().stop_after_grace());
        }
    }
}
