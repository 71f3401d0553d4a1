//! Joins a repeated request for a run, or for a response of OpenAI's API, with the earlier one.
//!
//! A run is stored and driven by itself. The conversation behind a response of OpenAI's API lives
//! in its request, so it stores a checkpoint before it makes calls with side effects. After a crash
//! the repeated request continues from there, and the calls that were made are found by their
//! idempotency keys.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::calls::rejoin::{PendingDelivery, request_digest};
use crate::domain::caller::Caller;
use crate::domain::fault::Error;
use crate::domain::json::{Json, canonicalize};
use crate::domain::retry::ExecutionPolicy;
use crate::domain::run::progress::Conversation;
use crate::ports::core::from_store_error;
use crate::ports::store::RunToolDefinitions;
use crate::ports::store::undelivered::{RequestKind, UndeliveredRequest};
use crate::runs::Runs;
use crate::runs::active::StartedRun;
use crate::runs::subscribers::RunSubscription;

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
}

#[derive(Serialize, Deserialize)]
struct StoredCheckpoint<T> {
    /// Owner. An agent cannot continue the conversations of another.
    agent: String,
    checkpoint: T,
}

impl Runs {
    /// Returns the undelivered request of a run or conversation, or `None` if a repeated request
    /// must not join it. `api` keeps requests of different APIs apart.
    pub(crate) fn undelivered_run(
        &self,
        caller: &Caller,
        id: &str,
        api: &str,
        request: &str,
    ) -> Option<UndeliveredRequest> {
        let policy = self.project_policy(caller);
        let is_off = !policy.rejoin || policy.rejoin_window_ms == 0;
        if is_off || !self.registry.catalog().allows_rejoin(caller) {
            return None;
        }
        Some(UndeliveredRequest {
            id: id.to_owned(),
            digest: request_digest(caller, api, &[request]),
            kind: RequestKind::Run,
            project: caller.project.clone(),
            expires_ms: self.core.now_ms().saturating_add(policy.rejoin_window_ms),
        })
    }

    fn project_policy(&self, caller: &Caller) -> ExecutionPolicy {
        let policies = &self.core.policies;
        let project = policies.projects.get(&caller.project);
        project.map_or_else(|| policies.global.clone(), |patch| policies.global.with_patch(patch))
    }

    /// Returns an earlier run of the same request whose requester is gone.
    pub(crate) async fn join_earlier_run(
        &self,
        request: &UndeliveredRequest,
        subscribes: bool,
    ) -> Result<Option<StartedRun>, Error> {
        while let Some(delivery) = self.calls.rejoin.take_over(&request.digest) {
            let found = self.core.store.runs().run(&request.project, delivery.id()).await;
            let Some(run) = found.map_err(from_store_error)? else {
                delivery.mark_delivered();
                continue;
            };
            delivery.record_join();
            let active = self.active_runs.get(&run.project, &run.id).filter(|_| subscribes);
            let subscription = RunSubscription::new(active.map(|active| active.subscribe()));
            let delivery = Some(delivery);
            return Ok(Some(StartedRun {
                run,
                replayed: false,
                joined: true,
                delivery,
                subscription,
            }));
        }
        Ok(None)
    }

    /// Returns the request for a response of `api` as it is stored while its answer is not
    /// delivered, or `None` if a repeated request must not join it. Equal bodies of one caller have
    /// one digest.
    pub fn undelivered_conversation(
        &self,
        caller: &Caller,
        id: &str,
        api: &str,
        body: &str,
    ) -> Option<UndeliveredRequest> {
        self.undelivered_run(caller, id, api, &canonicalize(body))
    }

    /// Takes over the conversation of an earlier request with this digest whose requester is gone.
    pub fn take_over_conversation(&self, digest: &str) -> Option<PendingDelivery> {
        self.calls.rejoin.take_over(digest)
    }

    /// Stores a checkpoint of a conversation, and its request as undelivered.
    pub async fn save_checkpoint(
        &self,
        caller: &Caller,
        request: &UndeliveredRequest,
        checkpoint: &ConversationCheckpoint,
    ) -> Result<(), Error> {
        let agent = caller.agent.clone();
        let stored = RunToolDefinitions {
            project: caller.project.clone(),
            run_id: checkpoint_key(&request.id),
            tool_definitions: Json::from_serialize(&StoredCheckpoint { agent, checkpoint })
                .map_err(|error| Error::Internal(Box::new(error)))?,
            updated_ms: self.core.now_ms(),
        };
        let store = &self.core.store;
        let (saved, listed) = futures::join!(
            store.put_run_tool_definitions(stored),
            store.undelivered().put_undelivered(request.clone())
        );
        saved.and(listed).map_err(from_store_error)
    }

    /// Returns the delivery of a conversation whose first checkpoint was stored.
    pub fn start_delivery(&self, request: UndeliveredRequest) -> PendingDelivery {
        self.calls.rejoin.add_waiting(request)
    }

    /// Loads the checkpoint of a conversation of this caller.
    pub async fn load_checkpoint(
        &self,
        caller: &Caller,
        id: &str,
    ) -> Result<Option<ConversationCheckpoint>, Error> {
        let key = checkpoint_key(id);
        let stored = self.core.store.run_tool_definitions(&caller.project, &key).await;
        let Some(stored) = stored.map_err(from_store_error)? else { return Ok(None) };
        let stored: StoredCheckpoint<ConversationCheckpoint> =
            serde_json::from_str(stored.tool_definitions.text())
                .map_err(|error| Error::Internal(Box::new(error)))?;
        Ok((stored.agent == caller.agent).then_some(stored.checkpoint))
    }

    /// Waits for the grace period of a disconnected requester. Returns true if nothing has taken
    /// its conversation over since.
    pub async fn wait_for_requester(&self, caller: &Caller, id: &str) -> bool {
        let grace_ms = self.project_policy(caller).disconnect_grace_ms;
        self.calls.wait_for_requester(id, grace_ms).await
    }

    /// Waits until a disconnected requester can no longer take its conversation over. Returns
    /// false if it has done so.
    pub async fn wait_for_rejoin_window(&self, caller: &Caller, id: &str) -> bool {
        let window_ms = self.project_policy(caller).rejoin_window_ms;
        self.calls.wait_for_requester(id, window_ms).await
    }
}

/// Returns the storage key, which no run id of a caller can be: it has a control character.
fn checkpoint_key(id: &str) -> String {
    format!("\u{1}checkpoint/{id}")
}
