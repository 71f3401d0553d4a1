//! Conversations that are kept between two requests of their asker: what was said in one, and what
//! its calls came to, that the asker itself does not have. Who comes back with results of its own
//! tools finds the crib's results of the same step here, also after a restart, so that no model is
//! left to think that a call was not made and makes it again.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Engine, unavailable};
use crate::caller::Caller;
use crate::fault::Error;
use crate::json::Json;
use crate::store::Run;
use crate::turn::Awaited;

/// What is kept of a conversation.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Thread {
    /// Messages in the chat form.
    pub messages: Vec<Value>,
    /// Calls whose results come late.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub awaited: Vec<Awaited>,
}

#[derive(Serialize, Deserialize)]
struct Kept<T> {
    /// Threads of one agent are not another's.
    agent: String,
    thread: T,
}

impl Engine {
    /// Keeps a conversation under this id, instead of what was kept before.
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

    /// The conversation that this caller kept under this id.
    pub async fn thread(&self, caller: &Caller, id: &str) -> Result<Option<Thread>, Error> {
        let stored =
            self.inner.store.run(&caller.project, &place(id)).await.map_err(unavailable)?;
        let Some(stored) = stored else { return Ok(None) };
        let kept: Kept<Thread> = serde_json::from_str(stored.tool_definitions.text())
            .map_err(|error| Error::Internal(Box::new(error)))?;
        Ok((kept.agent == caller.agent).then_some(kept.thread))
    }
}

/// Beside the runs that callers name: no name of theirs has a control character.
fn place(id: &str) -> String {
    format!("\u{1}thread/{id}")
}
