//! Conversations saved between two requests of a caller: messages and tool results that the caller
//! itself does not have. A caller that returns with the results of its own tools finds Toolcrib's
//! results of the same step here, even after a restart. Without them, the model would assume that a
//! call was not made, and make it again.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Engine, unavailable};
use crate::caller::Caller;
use crate::fault::Error;
use crate::json::Json;
use crate::store::Run;
use crate::turn::Awaited;

/// A saved conversation.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Thread {
    /// Messages in the chat format.
    pub messages: Vec<Value>,
    /// Calls whose results arrive later.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub awaited: Vec<Awaited>,
}

#[derive(Serialize, Deserialize)]
struct Kept<T> {
    /// Owner. An agent cannot load the conversations of another.
    agent: String,
    thread: T,
}

impl Engine {
    /// Saves a conversation under this id, replacing any earlier one.
    pub async fn keep_thread(
        &self,
        caller: &Caller,
        id: &str,
        thread: &Thread,
    ) -> Result<(), Error> {
        let kept = Kept { agent: caller.agent.clone(), thread };
        let run = Run {
            project: caller.project.clone(),
            run_id: place(id),
            tool_definitions: Json::of(&kept).map_err(|error| Error::Internal(Box::new(error)))?,
            updated_ms: self.now_ms(),
        };
        self.inner.store.put_run(run).await.map_err(unavailable)
    }

    /// Loads the conversation that this caller saved under this id.
    pub async fn thread(&self, caller: &Caller, id: &str) -> Result<Option<Thread>, Error> {
        let stored =
            self.inner.store.run(&caller.project, &place(id)).await.map_err(unavailable)?;
        let Some(stored) = stored else { return Ok(None) };
        let kept: Kept<Thread> = serde_json::from_str(stored.tool_definitions.text())
            .map_err(|error| Error::Internal(Box::new(error)))?;
        Ok((kept.agent == caller.agent).then_some(kept.thread))
    }
}

/// Returns the storage key, which shares a namespace with the run ids of callers. No run id can
/// contain a control character, so they never collide.
fn place(id: &str) -> String {
    format!("\u{1}thread/{id}")
}
