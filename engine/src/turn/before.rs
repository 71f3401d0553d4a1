//! Looks up earlier executions of a reply's calls: by a process that crashed, or before the run was
//! canceled.

use std::collections::HashMap;

use super::act::key;
use super::{Awaited, Progress, RESULT_TOKENS, Terms};
use crate::caller::Caller;
use crate::engine::{Engine, unavailable};
use crate::fault::Error;
use crate::store::{Created, IdempotencyKey};

/// Earlier results of a reply's calls.
#[derive(Default)]
pub(super) struct Before {
    /// Content of each call that was made before, by its index in the reply.
    pub(super) made: HashMap<usize, String>,
}

impl Before {
    pub(super) async fn of(
        engine: &Engine,
        caller: &Caller,
        terms: &Terms,
        progress: &Progress,
    ) -> Result<Self, Error> {
        let (mut awaited, mut places) = (Vec::new(), HashMap::new());
        let budget = terms.acting.result_tokens.unwrap_or(RESULT_TOKENS);
        let calls = progress.reply.iter().flat_map(|reply| &reply.calls);
        for (place, call) in calls.enumerate() {
            let Some(key) = key(terms, progress, place) else { break };
            // The lookup only checks whether the key was used, so the fingerprint does not matter.
            let (agent, fingerprint) = (caller.agent.clone(), String::new());
            let key = IdempotencyKey { agent, key, fingerprint };
            let used = engine.inner.store.used(&caller.project, &key).await.map_err(unavailable)?;
            let tool_call_id = match used {
                Some(Created::Mismatch(id)) => id,
                Some(Created::Replayed(known)) => known.id,
                Some(Created::New) | None => continue,
            };
            places.insert(tool_call_id.clone(), place);
            let (call_id, name) = (call.id.clone(), call.name.clone());
            awaited.push(Awaited { tool_call_id, call_id, name });
        }
        let (ended, _) = engine.late_contents(caller, &awaited, budget).await?;
        let goes_on = "it was begun, goes on, and its tool has been withdrawn";
        let mut made: HashMap<usize, String> =
            places.values().map(|place| (*place, goes_on.to_owned())).collect();
        for (call, content) in ended {
            made.extend(places.get(&call.tool_call_id).map(|place| (*place, content)));
        }
        Ok(Self { made })
    }
}
