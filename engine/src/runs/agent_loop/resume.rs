//! Looks up earlier executions of a reply's calls: by a process that crashed, or before the run was
//! canceled.

use std::collections::HashMap;
use std::sync::Arc;

use crate::domain::call::Call;
use crate::domain::caller::Caller;
use crate::domain::fault::Error;
use crate::domain::run::options::{DEFAULT_RESULT_TOKENS, RunOptions};
use crate::domain::run::progress::{PendingCall, RunProgress};
use crate::ports::core::from_store_error;
use crate::ports::store::{CreateCallResult, IdempotencyKey};
use crate::runs::Runs;
use crate::runs::agent_loop::late_results::LateResult;
use crate::runs::agent_loop::limits::idempotency_key;

/// Earlier results of a reply's calls.
#[derive(Default)]
pub(super) struct PriorResults {
    /// Result of each call that was made before, by its index in the reply.
    pub(super) results: HashMap<usize, PriorResult>,
    /// Content of each tool search, by its index in the reply.
    pub(super) searches: HashMap<usize, String>,
}

/// The earlier result of one call.
pub(super) struct PriorResult {
    /// The content for the model.
    pub(super) content: String,
    /// The call, if it has ended.
    pub(super) call: Option<Arc<Call>>,
}

impl PriorResults {
    pub(super) async fn load(
        engine: &Arc<Runs>,
        caller: &Caller,
        options: &RunOptions,
        progress: &RunProgress,
    ) -> Result<Self, Error> {
        let (mut pending, mut indexes) = (Vec::new(), HashMap::new());
        let budget = options.execution_options.result_tokens.unwrap_or(DEFAULT_RESULT_TOKENS);
        let calls = progress.pending_reply.iter().flat_map(|reply| &reply.calls);
        for (index, call) in calls.enumerate() {
            let Some(key) = idempotency_key(options, progress, index) else { break };
            // The lookup only checks whether the key was used, so the fingerprint does not matter.
            let (agent, fingerprint) = (caller.owner_name(), String::new());
            let key = IdempotencyKey { agent, key, fingerprint };
            let used = engine
                .core
                .store
                .find_by_idempotency_key(&caller.project, &key)
                .await
                .map_err(from_store_error)?;
            let tool_call_id = match used {
                Some(CreateCallResult::Mismatch(id)) => id,
                Some(CreateCallResult::Replayed(existing)) => existing.id,
                Some(CreateCallResult::New) | None => continue,
            };
            indexes.insert(tool_call_id.clone(), index);
            let (call_id, name) = (call.id.clone(), call.name.clone());
            pending.push(PendingCall {
                tool_call_id,
                call_id,
                name,
                suspends: false,
                is_detached: false,
            });
        }
        let (ended, _) = engine.render_late_results(caller, &pending, budget).await?;
        let still_open = "it was started and is still running; its tool was removed";
        let open_result = || PriorResult { content: still_open.to_owned(), call: None };
        let mut results: HashMap<usize, PriorResult> =
            indexes.values().map(|index| (*index, open_result())).collect();
        for LateResult { pending, content, call } in ended {
            let index = indexes.get(&pending.tool_call_id);
            results.extend(index.map(|index| (*index, PriorResult { content, call })));
        }
        Ok(Self { results, searches: HashMap::new() })
    }
}
