//! Ends a turn without its agent: the turn is stopped, or its lease expires.

use serde_json::json;

use super::delegated::{set_status, turn_item_id};
use super::{MAX_CONFLICT_RETRIES, bump_version, conflict, too_many_conflicts};
use crate::domain::agent::{AGENT_TOOL_PREFIX, OnParentEnd};
use crate::domain::call::Call;
use crate::domain::caller::Caller;
use crate::domain::fault::{Code, Error, Fault};
use crate::domain::tool::Executor;
use crate::domain::utp::card::into_map;
use crate::domain::utp::turn_event::{TurnCompletion, TurnEvent};
use crate::domain::utp::{InboxItem, StepCall, ToolStatus, Turn, TurnStatus, trace};
use crate::ports::store::utp::TurnChange;
use crate::utp::Utp;
use crate::utp::inbox::derive_inbox_id;

/// Reason of the cancellation of a call whose caller has ended.
const CALLER_ENDED: &str = "the caller of this agent has ended";

impl Utp {
    /// Stops a turn that has not ended: its open calls are canceled, later results are refused, and
    /// the agent receives a `stop` item in its inbox. A turn that is stopped already stays so; one
    /// that ended otherwise is a conflict.
    pub async fn stop_turn(
        &self,
        caller: &Caller,
        agent_id: &str,
        turn_id: &str,
        reason: Option<String>,
    ) -> Result<Turn, Error> {
        for _ in 0..MAX_CONFLICT_RETRIES {
            let turn = self.turn(caller, agent_id, turn_id).await?;
            if turn.status == TurnStatus::Stopped {
                return Ok(turn);
            }
            if turn.status.is_terminal() {
                return Err(conflict(&turn, "the turn has ended already".into()));
            }
            // No worker has to begin a turn that is stopped.
            let acknowledged_inbox_ids = turn_item_id(&turn);
            let mut turn = bump_version(turn);
            turn.epoch += 1;
            turn.status = TurnStatus::Stopped;
            turn.reason = reason.clone();
            set_status(&mut turn, ToolStatus::Canceled);
            let deliverable = self.cards.put_fallback_deliverable(&turn, reason.as_deref()).await?;
            turn.deliverable_card_id = Some(deliverable);
            let item = self.build_stop_item(&turn);
            let messages = self.build_wakeup(&item, &turn.channel).into_iter().collect();
            let change = TurnChange {
                acknowledged_inbox_ids,
                inbox: vec![item],
                outbox: messages,
                ..TurnChange::default()
            };
            let (error_code, error) = (Some("stopped"), reason.clone());
            let (status, tool_result_card_id) = ("failed".to_owned(), None);
            let task = Some(TurnCompletion { status, tool_result_card_id, error_code, error });
            let listener = TurnEvent { completion: task, ..TurnEvent::default() };
            let stopped = match self.save_and_publish_turn(turn, change, listener).await {
                Ok(turn) => turn,
                Err(error) if error.code() == Code::Conflict => continue,
                Err(error) => return Err(error),
            };
            // Covers the calls of every step, including those of a step that was never stored
            // because its dispatch failed halfway.
            let in_turn = |call: &Call| {
                let route = call.origin.route.as_ref();
                route.is_some_and(|route| route.turn_id == turn_id) && !self.outlives_caller(call)
            };
            self.calls.cancel_open_calls(caller, turn_id, "the turn was stopped", in_turn).await;
            self.wake_inbox_listeners(&stopped.project, agent_id, true);
            self.conclude_turn(&stopped).await;
            return Ok(stopped);
        }
        Err(too_many_conflicts())
    }

    /// Acts on the committed end of a turn: reports its result, and cancels the agents that it
    /// called, unless they continue without it. After a crash, `cancel_orphaned_tasks` does so.
    pub(crate) async fn conclude_turn(&self, turn: &Turn) {
        self.report_delegation(turn).await;
        if turn.status.is_terminal() {
            let is_own = |call: &Call| {
                let route = call.origin.route.as_ref();
                route.is_some_and(|route| route.agent_id == turn.agent_id)
            };
            self.cancel_called_agents(&turn.project, &turn.turn_id, is_own).await;
        }
    }

    /// Cancels the open calls of agents that an ended run or turn made, unless the agents continue
    /// without it.
    pub(crate) async fn cancel_called_agents(
        &self,
        project: &str,
        parent_id: &str,
        is_own: impl Fn(&Call) -> bool,
    ) {
        for entry in self.dispatcher.open_calls.all() {
            let call = entry.call();
            let is_child = call.target.executor == Executor::AGENT
                && call.project == project
                && call.run_id == parent_id;
            if !is_child || !is_own(&call) || self.outlives_caller(&call) {
                continue;
            }
            let reason = Some(CALLER_ENDED.to_owned());
            if let Err(error) = self.calls.cancel(&call.caller(), &call.id, reason).await {
                tracing::debug!(call = %call.id, %error, "call of an agent not canceled");
            }
        }
    }

    /// Returns true if a call is that of an agent that continues after its caller's end.
    pub(crate) fn outlives_caller(&self, call: &Call) -> bool {
        let agent_id = call.target.tool.strip_prefix(AGENT_TOOL_PREFIX).unwrap_or_default();
        call.target.executor == Executor::AGENT
            && self
                .registry
                .find_agent_definition(&call.project, agent_id)
                .is_some_and(|agent| agent.on_parent_end == OnParentEnd::Detach)
    }

    /// Ends a call of a step that was not dispatched. No caller canceled it, so it has failed.
    /// Failure is ignored: the call may have ended in the meantime.
    pub(super) async fn abort_best_effort(&self, caller: &Caller, call: &StepCall) {
        let Some(id) = call.call_id.as_deref().and_then(|id| id.parse().ok()) else { return };
        let message = "its step was not dispatched: the turn had changed; it may have taken effect";
        let fault = Fault::new(Code::Conflict, message);
        if let Err(error) = self.calls.abort(caller, &id, fault).await {
            tracing::debug!(call = %id, %error, "call not stopped");
        }
    }
}

impl Utp {
    fn build_stop_item(&self, turn: &Turn) -> InboxItem {
        let stop_id = format!("stop:{}", turn.turn_id);
        let inbox_id = derive_inbox_id(&turn.project, &turn.turn_id, &stop_id);
        let parent = turn.traceparent.clone().unwrap_or_default();
        InboxItem {
            project: turn.project.clone(),
            agent_id: turn.agent_id.clone(),
            message_type: "stop".to_owned(),
            turn_id: turn.turn_id.clone(),
            tool_call_id: stop_id,
            payload: into_map(json!({
                "agent_id": turn.agent_id,
                "agent_turn_id": turn.turn_id,
                "turn_epoch": turn.epoch,
                "reason": turn.reason,
            })),
            traceparent: trace::child_traceparent(&parent, &inbox_id),
            tracestate: turn.tracestate.clone(),
            parent_step_id: turn.step_id.clone(),
            source_agent_id: None,
            depth: turn.depth,
            created_ms: self.core.clock.wall_ms(),
            inbox_id,
        }
    }

    /// Marks a turn whose lease has run out as expired: its former holder can no longer change it.
    /// A delegated turn is handed to another worker, or stopped after several lost leases.
    pub(crate) async fn expire_turn(&self, turn: Turn) -> Result<(), Error> {
        let mut turn = bump_version(turn);
        turn.epoch += 1;
        turn.status = TurnStatus::Expired;
        turn.reason = Some("the lease ran out".to_owned());
        let is_delegated = turn.delegation.is_some();
        let change = self.redispatch_expired(&mut turn);
        match self.save_and_publish_turn(turn, change, TurnEvent::default()).await {
            // The turn was changed concurrently, so it no longer needs to expire.
            Err(error) if error.code() == Code::Conflict => Ok(()),
            Ok(turn) => {
                if is_delegated {
                    self.wake_inbox_listeners(&turn.project, &turn.agent_id, true);
                    self.conclude_turn(&turn).await;
                }
                Ok(())
            }
            Err(error) => Err(error),
        }
    }
}
