//! Turns that a call hands to another agent. The turn waits for a worker of that agent; its
//! deliverable becomes the result of the call.
//!
//! The id of the turn derives from the call, so handing over is idempotent: after a crash the call
//! is delivered again and finds its turn. The call decides: it ends exactly once, by the report of
//! the turn, by its deadline or by a cancellation, and a turn whose call has ended is stopped.

use std::time::Duration;

use serde_json::{Value, json};

use super::conflict;
use crate::domain::call::Call;
use crate::domain::caller::Caller;
use crate::domain::derived;
use crate::domain::fault::{Code, Error, Fault};
use crate::domain::id::CallId;
use crate::domain::json::Json;
use crate::domain::utp::card::{Card, into_map};
use crate::domain::utp::delegation::{deliverable_value, depth_fault, text_content};
use crate::domain::utp::turn_event::TurnEvent;
use crate::domain::utp::{
    ExecutionEdge, InboxItem, MAX_DEPTH, Route, ToolStatus, Turn, TurnDelegation, TurnLineage,
    TurnStatus, trace,
};
use crate::lifecycle::{Event, RemoteOutcome};
use crate::ports::core::from_store_error;
use crate::ports::store::utp::TurnChange;
use crate::utp::Utp;
use crate::utp::inbox::derive_inbox_id;
use crate::utp::trees::CallCharge;

/// Duration of the first lease, unless the worker requests another.
const LEASE_MS: u64 = 300_000;
/// Number of workers that may lose the turn before it is given up.
const MAX_LOST_LEASES: u32 = 3;
/// Maximum size, in bytes, of an instruction that the inbox item repeats; the card always has it.
const MAX_INLINE_INSTRUCTION: usize = 16_384;
/// Delay before a report that could not be built is tried again.
const REPORT_RETRY_DELAY: Duration = Duration::from_millis(500);

/// A request to hand a turn to an agent.
#[derive(Debug, Clone, Default)]
pub struct EnqueueRequest {
    /// Id of the agent, which must be on the roster.
    pub agent_id: String,
    /// The task, in words.
    pub instruction: String,
    /// Further input of the task, if there is any.
    pub context: Option<Value>,
    /// Id of a box of cards. Default: that of the calling turn.
    pub context_box_id: Option<String>,
    /// Place of the turn in the tree of agents.
    pub lineage: TurnLineage,
}

/// Returns the id of the turn that executes this attempt of a call.
pub(crate) fn turn_id_of(call_id: &CallId, attempt: u32) -> String {
    let body = call_id.as_str().trim_start_matches(CallId::PREFIX);
    match attempt {
        0 | 1 => format!("turn_{body}"),
        attempt => format!("turn_{body}_a{attempt}"),
    }
}

/// Returns the id of the inbox item that announces the turn in its present epoch, as a list; empty
/// if the turn is not delegated.
pub(super) fn turn_item_id(turn: &Turn) -> Vec<String> {
    let key = turn_item_key(turn);
    let id = || derive_inbox_id(&turn.project, &turn.turn_id, &key);
    turn.delegation.iter().map(|_| id()).collect()
}

fn turn_item_key(turn: &Turn) -> String {
    format!("turn:{}", turn.epoch)
}

/// Records the status that a delegated turn ended with.
pub(super) fn set_status(turn: &mut Turn, status: ToolStatus) {
    if let Some(delegation) = &mut turn.delegation {
        delegation.status = Some(status);
    }
}

/// Returns the execution edge that a new state of a delegated turn adds: one when the turn is
/// handed over, one when it has ended.
pub(super) fn edge_of(turn: &Turn) -> Option<ExecutionEdge> {
    let delegation = turn.delegation.as_deref()?;
    let above = (
        delegation.parent_agent_id.clone(),
        delegation.parent_turn_id.clone(),
        turn.parent_step_id.clone(),
    );
    let below = (turn.agent_id.clone(), turn.turn_id.clone());
    let (primitive, phase, source, target) = match (turn.version, turn.status.is_terminal()) {
        (1, _) => ("enqueue", "request", above, below),
        (_, true) => {
            ("report", "response", (below.0, below.1, turn.step_id.clone()), (above.0, above.1))
        }
        _ => return None,
    };
    Some(ExecutionEdge {
        edge_id: format!("edge_{primitive}_{}", turn.turn_id),
        primitive,
        phase,
        source,
        target,
        correlation_id: turn.turn_id.clone(),
    })
}

impl Utp {
    /// Hands a turn to an agent on behalf of a call: stores the turn as `dispatched`, puts a `turn`
    /// item into the agent's inbox and wakes its worker, in one commit. The operation is
    /// idempotent; a turn that has ended reports its result again.
    pub async fn enqueue_turn(&self, call: &Call, request: EnqueueRequest) -> Result<Turn, Error> {
        let turn_id = turn_id_of(&call.id, call.attempt);
        if let Some(turn) = self.find_turn(&call.project, &turn_id).await? {
            self.report_delegation(&turn).await;
            return Ok(turn);
        }
        let parent = Route::for_call(call);
        if parent.depth + 1 >= MAX_DEPTH {
            return Err(depth_fault().into());
        }
        self.require_agent_entry(&call.project, &request.agent_id)?;
        let (card, turn) = self.build_dispatched_turn(call, &parent, turn_id, &request);
        self.core.store.utp().put_card(card).await.map_err(from_store_error)?;
        let item = self.build_turn_item(&turn, Some(&request));
        let change = TurnChange {
            outbox: self.build_wakeup(&item, &turn.channel).into_iter().collect(),
            inbox: vec![item],
            ..TurnChange::default()
        };
        match self.save_and_publish_turn(turn.clone(), change, TurnEvent::default()).await {
            Ok(turn) => {
                self.wake_inbox_listeners(&turn.project, &turn.agent_id, true);
                Ok(turn)
            }
            // The same attempt was started twice.
            Err(error) if error.code() == Code::Conflict => {
                self.find_turn(&turn.project, &turn.turn_id).await?.ok_or(error)
            }
            Err(error) => Err(error),
        }
    }

    fn require_agent_entry(&self, project: &str, agent_id: &str) -> Result<(), Error> {
        if self.registry.find_agent_entry(project, agent_id).is_some() {
            return Ok(());
        }
        let message = format!("agent \"{agent_id}\" is not on the roster");
        Err(Fault::new(Code::NotFound, message).without_side_effect().into())
    }

    fn build_dispatched_turn(
        &self,
        call: &Call,
        parent: &Route,
        turn_id: String,
        request: &EnqueueRequest,
    ) -> (Card, Turn) {
        let wall_ms = self.core.clock.wall_ms();
        let traceparent = trace::child_traceparent(&derived::call_traceparent(call), &turn_id);
        let card_id = format!("task_{}", turn_id.trim_start_matches("turn_"));
        let delegation = TurnDelegation {
            call_id: call.id.to_string(),
            attempt: call.attempt,
            parent_agent_id: parent.agent_id.clone(),
            parent_turn_id: parent.turn_id.clone(),
            instruction_card_id: card_id.clone(),
            deadline_ms: call.deadline_ms,
            lost_leases: 0,
            status: None,
            lineage: request.lineage.clone(),
            used_calls: 0,
            used_tokens: 0,
        };
        let turn = Turn {
            project: call.project.clone(),
            agent_id: request.agent_id.clone(),
            epoch: 1,
            status: TurnStatus::Dispatched,
            channel: parent.channel.clone(),
            step_id: None,
            steps: Vec::new(),
            parent_step_id: Some(parent.step_id.clone()),
            traceparent: Some(traceparent),
            tracestate: parent.tracestate.clone(),
            context_box_id: request.context_box_id.clone().or(parent.context_box_id.clone()),
            depth: parent.depth + 1,
            lease_until_ms: 0,
            lease_ms: LEASE_MS,
            resume_deadline_ms: None,
            created_ms: wall_ms,
            updated_ms: wall_ms,
            reason: None,
            deliverable_card_id: None,
            delegation: Some(Box::new(delegation)),
            last_request: None,
            version: 1,
            turn_id,
        };
        let metadata = json!({
            "agent_turn_id": turn.turn_id,
            "step_id": parent.step_id,
            "trace_id": derived::trace_id_of(call),
            "parent_step_id": parent.parent_step_id,
        });
        let card = Card {
            card_id,
            project: call.project.clone(),
            kind: "task.instruction".to_owned(),
            content: text_content(&request.instruction),
            created_ms: wall_ms,
            author_id: parent.agent_id.clone(),
            metadata: into_map(metadata),
            tool_calls: None,
            tool_call_id: None,
            ttl_seconds: None,
        };
        (card, turn)
    }

    /// Builds the inbox item that announces a turn. Without the request, the worker reads the
    /// instruction from its card.
    fn build_turn_item(&self, turn: &Turn, request: Option<&EnqueueRequest>) -> InboxItem {
        let key = turn_item_key(turn);
        let inbox_id = derive_inbox_id(&turn.project, &turn.turn_id, &key);
        let delegation = turn.delegation.as_deref();
        let instruction = request.map(|request| request.instruction.as_str());
        let payload = json!({
            "agent_id": turn.agent_id,
            "agent_turn_id": turn.turn_id,
            "turn_epoch": turn.epoch,
            "instruction": instruction.filter(|text| text.len() <= MAX_INLINE_INSTRUCTION),
            "instruction_card_id": delegation.map(|delegation| &delegation.instruction_card_id),
            "context": request.and_then(|request| request.context.as_ref()),
            "context_box_id": turn.context_box_id,
            "parent_agent_id": delegation.map(|delegation| &delegation.parent_agent_id),
            "parent_agent_turn_id": delegation.map(|delegation| &delegation.parent_turn_id),
            "parent_step_id": turn.parent_step_id,
            "call_id": delegation.map(|delegation| &delegation.call_id),
            "deadline_at_ms": delegation.map(|delegation| delegation.deadline_ms),
        });
        let parent = turn.traceparent.clone().unwrap_or_default();
        InboxItem {
            project: turn.project.clone(),
            agent_id: turn.agent_id.clone(),
            message_type: "turn".to_owned(),
            turn_id: turn.turn_id.clone(),
            tool_call_id: key,
            payload: into_map(payload),
            traceparent: trace::child_traceparent(&parent, &inbox_id),
            tracestate: turn.tracestate.clone(),
            parent_step_id: turn.parent_step_id.clone(),
            source_agent_id: delegation.map(|delegation| delegation.parent_agent_id.clone()),
            depth: turn.depth,
            created_ms: self.core.clock.wall_ms(),
            inbox_id,
        }
    }
}

impl Utp {
    pub(crate) async fn find_turn(
        &self,
        project: &str,
        turn_id: &str,
    ) -> Result<Option<Turn>, Error> {
        self.core.store.utp().turn(project, turn_id).await.map_err(from_store_error)
    }

    /// Returns the call that waits for a delegated turn, if it is open.
    fn open_delegating_call(&self, turn: &Turn) -> Option<std::sync::Arc<Call>> {
        let id: CallId = turn.delegation.as_ref()?.call_id.parse().ok()?;
        let call = self.dispatcher.open_calls.get(&id)?.call();
        (call.project == turn.project && !call.status.is_terminal()).then_some(call)
    }

    /// Returns an agent as it calls tools in a turn. In a turn that a call handed over, the agent
    /// acts on behalf of that call's caller, so it never does what its caller may not do.
    pub(crate) async fn acting_agent(
        &self,
        caller: &Caller,
        agent_id: &str,
        turn: Option<&Turn>,
    ) -> Result<Caller, Error> {
        let agent = Caller { agent: agent_id.to_owned(), ..caller.clone() };
        let Some(delegation) = turn.and_then(|turn| turn.delegation.as_deref()) else {
            return Ok(agent);
        };
        let call = match delegation.call_id.parse() {
            Ok(id) => self.cards.find_call(&caller.project, &id).await?,
            Err(_) => None,
        };
        let Some(call) = call else {
            let message = "the call that handed this turn over is not stored any more";
            return Err(Fault::new(Code::Conflict, message).without_side_effect().into());
        };
        Ok(agent.on_behalf_of(&call.caller()))
    }

    /// Charges one call of a turn against the budget that it draws from, or returns the fault if
    /// the budget is used up. A call that has started is charged in any case. A turn that no open
    /// call handed over has no budget.
    pub(crate) async fn charge_call(
        &self,
        turn: &Turn,
        has_started: bool,
    ) -> Result<Result<Option<CallCharge>, Fault>, Error> {
        let id = turn.delegation.as_ref().map(|delegation| delegation.call_id.parse());
        let Some(Ok(id)) = id else { return Ok(Ok(None)) };
        if self.has_call_ended(&turn.project, &id).await? {
            return Ok(Ok(None));
        }
        let charge = self.trees.charge_call(turn, has_started).await?;
        // The call may have ended while its tree was read. Its end found no tree to release then.
        if self.has_call_ended(&turn.project, &id).await? {
            self.trees.budgets.end_turn(&turn.turn_id);
            return Ok(Ok(None));
        }
        Ok(charge.map(Some))
    }

    async fn has_call_ended(&self, project: &str, id: &CallId) -> Result<bool, Error> {
        let call = self.cards.find_call(project, id).await?;
        Ok(call.is_none_or(|call| call.status.is_terminal()))
    }

    /// Refuses a lease of a turn whose call has ended, and stops that turn: no result of it can
    /// reach an agent any more.
    pub(super) async fn require_open_delegation(&self, turn: &Turn) -> Result<(), Error> {
        let Some(delegation) = &turn.delegation else { return Ok(()) };
        let Ok(id) = delegation.call_id.parse::<CallId>() else { return Ok(()) };
        let call = self.cards.find_call(&turn.project, &id).await?;
        let Some(status) = call.map(|call| call.status).filter(|status| status.is_terminal())
        else {
            return Ok(());
        };
        self.stop_delegated_turn(&turn.project, &id, delegation.attempt).await;
        let message = format!("the call \"{id}\" of this turn has ended: {}", status.as_str());
        Err(conflict(turn, message))
    }

    /// Stops the turn of a call that has ended. Failure is ignored: the next lease of the turn
    /// finds that its call has ended.
    pub(crate) async fn stop_delegated_turn(&self, project: &str, id: &CallId, attempt: u32) {
        let turn_id = turn_id_of(id, attempt);
        let turn = match self.find_turn(project, &turn_id).await {
            Ok(Some(turn)) if !turn.status.is_terminal() => turn,
            _ => return,
        };
        let caller = Caller { agent: turn.agent_id.clone(), ..Caller::local(project) };
        let reason = Some("the call that handed it over has ended".to_owned());
        let stopped = Box::pin(self.stop_turn(&caller, &turn.agent_id, &turn_id, reason)).await;
        if let Err(error) = stopped {
            tracing::debug!(turn = turn_id, %error, "turn not stopped");
        }
    }

    /// Prepares a delegated turn whose lease has expired for another worker, or gives it up after
    /// several workers lost it.
    pub(super) fn redispatch_expired(&self, turn: &mut Turn) -> TurnChange {
        let Some(delegation) = &mut turn.delegation else { return TurnChange::default() };
        delegation.lost_leases += 1;
        if delegation.lost_leases >= MAX_LOST_LEASES {
            delegation.status = Some(ToolStatus::Failed);
            turn.status = TurnStatus::Stopped;
            turn.reason = Some(format!("its worker was lost {MAX_LOST_LEASES} times"));
            return TurnChange::default();
        }
        let item = self.build_turn_item(turn, None);
        let wakeup = self.build_wakeup(&item, &turn.channel);
        TurnChange {
            inbox: vec![item],
            outbox: wakeup.into_iter().collect(),
            ..TurnChange::default()
        }
    }

    /// Reports the end of a delegated turn to its call. Does nothing if the turn goes on or the
    /// call has ended. If the process stops before the report is committed, the next process
    /// delivers the call again and finds the turn ended.
    pub(super) async fn report_delegation(&self, turn: &Turn) {
        let Some(status) = turn.delegation.as_ref().and_then(|delegation| delegation.status) else {
            return;
        };
        let Some(call) = self.open_delegating_call(turn) else { return };
        self.dispatcher.prepare_output_schema(&call).await;
        let event = loop {
            match self.build_turn_report(&call, turn, status).await {
                Ok(event) => break event,
                Err(error) => {
                    tracing::warn!(turn = turn.turn_id, %error, "turn not reported; will retry");
                }
            }
            tokio::select! {
                () = tokio::time::sleep(REPORT_RETRY_DELAY) => {}
                () = self.core.shutdown.cancelled() => return,
            }
        };
        self.dispatcher.advance_with_retry(&call.project, &call.id, event).await;
    }

    /// Builds the event with which a turn ends its call.
    async fn build_turn_report(
        &self,
        call: &Call,
        turn: &Turn,
        status: ToolStatus,
    ) -> Result<Event, Error> {
        let attempt = turn.delegation.as_ref().map_or(call.attempt, |d| d.attempt);
        let by = turn.agent_id.clone();
        let reason = turn.reason.clone();
        let failed = |fallback: &str| {
            let reason = reason.clone().unwrap_or_else(|| fallback.to_owned());
            Fault::runtime(format!("agent \"{}\": {reason}", turn.agent_id)).retryable(false)
        };
        let result = match status {
            ToolStatus::Canceled => {
                let fault = Fault { code: Code::Canceled, ..failed("the turn was stopped") };
                let outcome = RemoteOutcome::Canceled(fault);
                return Ok(Event::RemoteOutcome { attempt, by, outcome });
            }
            ToolStatus::Failed | ToolStatus::Timeout => Err(failed("it failed without a reason")),
            ToolStatus::Success | ToolStatus::Partial => self.deliverable_of(turn).await?,
        };
        let result = result.map(|value| Json::from_value(&value));
        let result = self.dispatcher.validate_result(call, result);
        Ok(match (status, result) {
            (ToolStatus::Partial, Ok(data)) => {
                let outcome = RemoteOutcome::Partial(data);
                Event::RemoteOutcome { attempt, by, outcome }
            }
            (_, result) => Event::Report {
                attempt: Some(attempt),
                by: Some(by),
                result: result.map_err(|fault| fault.retryable(false)),
            },
        })
    }

    /// Returns the value of the turn's deliverable. A turn without one has its reason as its
    /// result.
    async fn deliverable_of(&self, turn: &Turn) -> Result<Result<Value, Fault>, Error> {
        let Some(card_id) = &turn.deliverable_card_id else {
            return Ok(Ok(json!({ "deliverable": null, "reason": turn.reason })));
        };
        Ok(match self.cards.find_card(&turn.project, card_id).await? {
            Some(card) => deliverable_value(&card),
            None => Err(Fault::runtime(format!("the deliverable \"{card_id}\" is gone"))),
        })
    }
}
