//! An answer that may have been acted on before: by a process that died, or until its run was
//! canceled.

use std::collections::HashMap;

use super::act::key;
use super::{Awaited, Progress, RESULT_TOKENS, Terms};
use crate::caller::Caller;
use crate::engine::{Engine, unavailable};
use crate::fault::{Code, Error};
use crate::store::{Created, IdempotencyKey};

/// What is known of an answer's calls.
#[derive(Default)]
pub(super) struct Before {
    /// What those that were made came to, by their places in the answer.
    pub(super) made: HashMap<usize, String>,
}

impl Before {
    pub(super) async fn of(
        engine: &Engine,
        caller: &Caller,
        terms: &Terms,
        progress: &Progress,
    ) -> Result<Self, Error> {
        let mut made = HashMap::new();
        let budget = terms.acting.result_tokens.unwrap_or(RESULT_TOKENS);
        let calls = progress.reply.iter().flat_map(|reply| &reply.calls);
        for (place, call) in calls.enumerate() {
            let Some(key) = key(terms, progress, place) else { break };
            // Only whether it was used is asked, so it is no matter what for.
            let (agent, fingerprint) = (caller.agent.clone(), String::new());
            let key = IdempotencyKey { agent, key, fingerprint };
            let used = engine.inner.store.used(&caller.project, &key).await.map_err(unavailable)?;
            let tool_call_id = match used {
                Some(Created::Mismatch(id)) => id,
                Some(Created::Replayed(known)) => known.id,
                Some(Created::New) | None => continue,
            };
            let awaited =
                Awaited { tool_call_id, call_id: call.id.clone(), name: call.name.clone() };
            let came_to = match engine.late_content(caller, &awaited, budget).await {
                Ok(Some((content, _))) => content,
                Ok(None) => "it was begun, goes on, and its tool has been withdrawn".to_owned(),
                Err(error) if error.code() == Code::NotFound => "it was made".to_owned(),
                Err(error) => return Err(error),
            };
            made.insert(place, came_to);
        }
        Ok(Self { made })
    }
}
