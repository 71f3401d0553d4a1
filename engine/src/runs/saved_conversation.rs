//! Conversations saved between two requests of a caller: messages and tool results that the caller
//! itself does not have. A caller that returns with the results of its own tools finds Toolcrib's
//! results of the same step here, even after a restart. Without them, the model would assume that a
//! call was not made, and make it again.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::domain::caller::Caller;
use crate::domain::fault::Error;
use crate::domain::json::Json;
use crate::domain::run::progress::PendingCall;
use crate::ports::core::from_store_error;
use crate::ports::store::RunToolDefinitions;
use crate::runs::Runs;

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

impl Runs {
    /// Saves a conversation under this id, replacing any earlier one.
    pub async fn save_conversation(
        &self,
        caller: &Caller,
        id: &str,
        thread: &SavedConversation,
    ) -> Result<(), Error> {
        let saved = StoredConversation { agent: caller.owner_name(), conversation: thread };
        let run = RunToolDefinitions {
            project: caller.project.clone(),
            run_id: storage_key(id),
            tool_definitions: Json::from_serialize(&saved)
                .map_err(|error| Error::Internal(Box::new(error)))?,
            updated_ms: self.core.wall_ms(),
        };
        self.core.store.put_run_tool_definitions(run).await.map_err(from_store_error)
    }

    /// Loads the conversation that this caller saved under this id.
    pub async fn load_saved_conversation(
        &self,
        caller: &Caller,
        id: &str,
    ) -> Result<Option<SavedConversation>, Error> {
        let stored = self
            .core
            .store
            .run_tool_definitions(&caller.project, &storage_key(id))
            .await
            .map_err(from_store_error)?;
        let Some(stored) = stored else { return Ok(None) };
        let saved: StoredConversation<SavedConversation> =
            serde_json::from_str(stored.tool_definitions.text())
                .map_err(|error| Error::Internal(Box::new(error)))?;
        Ok((saved.agent == caller.owner_name()).then_some(saved.conversation))
    }
}

/// Returns the storage key, which shares a namespace with the run ids of callers. No run id can
/// contain a control character, so they never collide.
fn storage_key(id: &str) -> String {
    format!("\u{1}thread/{id}")
}
