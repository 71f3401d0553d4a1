//! The conversations behind responses of OpenAI's API. Each exists only while its request does.
//!
//! A conversation is saved between two requests of a caller if it has messages and tool results
//! that the caller itself does not have. A caller that returns with the results of its own tools
//! finds Toolcrib's results of the same step here, even after a restart. Without them, the model
//! would assume that a call was not made, and make it again.
//!
//! A conversation stores a checkpoint before it makes calls with side effects. After a crash the
//! repeated request continues from there, and the calls that were made are found by their
//! idempotency keys.

mod ended;
use std::sync::Arc;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::calls::Calls;
use crate::calls::rejoin::PendingDelivery;
use crate::domain::caller::Caller;
use crate::domain::fault::Error;
use crate::domain::json::{Json, canonicalize};
use crate::domain::run::handoff::ActiveAgent;
use crate::domain::run::progress::{Conversation, PendingCall};
use crate::ports::core::{Core, from_store_error};
use crate::ports::store::RunToolDefinitions;
use crate::ports::store::undelivered::UndeliveredRequest;
use crate::registry::Registry;
use crate::runs::rejoin;

pub use ended::EndedConversation;

/// Saves conversations, and joins the repeated requests that continue them.
pub struct Conversations {
    core: Arc<Core>,
    registry: Arc<Registry>,
    calls: Arc<Calls>,
}

/// A saved conversation.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct SavedConversation {
    /// Messages in the chat format.
    pub messages: Vec<Value>,
    /// Calls whose results arrive later.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[serde(rename = "awaited")]
    pub pending_calls: Vec<PendingCall>,
}

#[derive(Serialize, Deserialize)]
struct StoredConversation<T> {
    /// Owner. An agent cannot load the conversations of another.
    agent: String,
    #[serde(rename = "thread")]
    conversation: T,
}

/// A conversation that a repeated request can continue.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ConversationCheckpoint {
    /// Run that the calls belong to.
    pub run_id: String,
    /// The messages, and the reply whose calls are about to be made.
    pub conversation: Conversation,
    /// Number of messages that came with the request.
    pub known_messages: usize,
    /// Summaries of the calls so far, for the response.
    pub call_summaries: Vec<Value>,
    /// The agent that continues the conversation after a handoff.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub active_agent: Option<Box<ActiveAgent>>,
}

#[derive(Serialize, Deserialize)]
struct StoredCheckpoint<T> {
    /// Owner. An agent cannot continue the conversations of another.
    agent: String,
    checkpoint: T,
}

impl Conversations {
    pub(crate) fn new(core: &Arc<Core>, registry: &Arc<Registry>, calls: &Arc<Calls>) -> Self {
        Self { core: core.clone(), registry: registry.clone(), calls: calls.clone() }
    }

    /// Saves a conversation under this id, replacing any earlier one.
    pub async fn save(
        &self,
        caller: &Caller,
        id: &str,
        conversation: &SavedConversation,
    ) -> Result<(), Error> {
        let saved = StoredConversation { agent: caller.owner_name(), conversation };
        let run = RunToolDefinitions {
            project: caller.project.clone(),
            run_id: conversation_key(id),
            tool_definitions: to_json(&saved)?,
            updated_ms: self.core.wall_ms(),
        };
        self.core.store.put_run_tool_definitions(run).await.map_err(from_store_error)
    }

    /// Loads the conversation that this caller saved under this id.
    pub async fn load(
        &self,
        caller: &Caller,
        id: &str,
    ) -> Result<Option<SavedConversation>, Error> {
        let saved: Option<StoredConversation<SavedConversation>> =
            self.read(caller, &conversation_key(id)).await?;
        let own = saved.filter(|saved| saved.agent == caller.owner_name());
        Ok(own.map(|saved| saved.conversation))
    }

    /// Returns the request for a response of `api` as it is stored while its answer is not
    /// delivered, or `None` if a repeated request must not join it. Equal bodies of one caller have
    /// one digest.
    pub fn undelivered_request(
        &self,
        caller: &Caller,
        id: &str,
        api: &str,
        body: &str,
    ) -> Option<UndeliveredRequest> {
        let body = canonicalize(body);
        rejoin::undelivered_request(&self.core, &self.registry, caller, id, api, &body)
    }

    /// Takes over the conversation of an earlier request with this digest whose requester is gone.
    pub fn take_over(&self, digest: &str) -> Option<PendingDelivery> {
        self.calls.rejoin.take_over(digest)
    }

    /// Stores a checkpoint of a conversation, and its request as undelivered.
    pub async fn save_checkpoint(
        &self,
        caller: &Caller,
        request: &UndeliveredRequest,
        checkpoint: &ConversationCheckpoint,
    ) -> Result<(), Error> {
        let agent = caller.owner_name();
        let stored = RunToolDefinitions {
            project: caller.project.clone(),
            run_id: checkpoint_key(&request.id),
            tool_definitions: to_json(&StoredCheckpoint { agent, checkpoint })?,
            updated_ms: self.core.now_ms(),
        };
        let store = &self.core.store;
        let (saved, listed) = futures::join!(
            store.put_run_tool_definitions(stored),
            store.undelivered().put_undelivered(request.clone())
        );
        saved.and(listed).map_err(from_store_error)
    }

    /// Loads the checkpoint of a conversation of this caller.
    pub async fn load_checkpoint(
        &self,
        caller: &Caller,
        id: &str,
    ) -> Result<Option<ConversationCheckpoint>, Error> {
        let stored: Option<StoredCheckpoint<ConversationCheckpoint>> =
            self.read(caller, &checkpoint_key(id)).await?;
        let own = stored.filter(|stored| stored.agent == caller.owner_name());
        Ok(own.map(|stored| stored.checkpoint))
    }

    /// Returns the delivery of a conversation whose first checkpoint was stored.
    pub fn start_delivery(&self, request: UndeliveredRequest) -> PendingDelivery {
        self.calls.rejoin.add_waiting(request)
    }

    /// Waits for the grace period of a disconnected requester. Returns true if nothing has taken
    /// its conversation over since.
    pub async fn wait_for_requester(&self, caller: &Caller, id: &str) -> bool {
        let grace_ms = rejoin::project_policy(&self.core, caller).disconnect_grace_ms;
        self.calls.rejoin.wait_for_requester(id, grace_ms).await
    }

    /// Waits until a disconnected requester can no longer take its conversation over. Returns
    /// false if it has done so.
    pub async fn wait_for_rejoin_window(&self, caller: &Caller, id: &str) -> bool {
        let window_ms = rejoin::project_policy(&self.core, caller).rejoin_window_ms;
        self.calls.rejoin.wait_for_requester(id, window_ms).await
    }

    async fn read<T: DeserializeOwned>(
        &self,
        caller: &Caller,
        key: &str,
    ) -> Result<Option<T>, Error> {
        let stored = self.core.store.run_tool_definitions(&caller.project, key).await;
        let Some(stored) = stored.map_err(from_store_error)? else { return Ok(None) };
        let read = serde_json::from_str(stored.tool_definitions.text());
        read.map(Some).map_err(|error| Error::Internal(Box::new(error)))
    }
}

fn to_json(value: &impl Serialize) -> Result<Json, Error> {
    Json::from_serialize(value).map_err(|error| Error::Internal(Box::new(error)))
}

/// Returns the storage key of a saved conversation. It shares a namespace with the run ids of
/// callers; no run id can contain a control character, so they never collide.
fn conversation_key(id: &str) -> String {
    format!("\u{1}thread/{id}")
}

/// Returns the storage key of a checkpoint, in the same namespace.
fn checkpoint_key(id: &str) -> String {
    format!("\u{1}checkpoint/{id}")
}
