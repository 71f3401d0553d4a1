//! Dispatches the calls of a step. A call that cannot be made fails at once, with cards and an
//! inbox item like any other, so that the agent can handle both cases the same way.

use futures::future::join_all;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use super::started::{
    add_step, charge_new_call, find_call_behind_refusal, find_started, is_final, used_calls,
};
use super::{
    MAX_CONFLICT_RETRIES, bump_version, conflict, invalid, open_step_call_ids, too_many_conflicts,
};
use crate::calls::request::CallRequest;
use crate::domain::access_rules::pattern_matches;
use crate::domain::caller::Caller;
use crate::domain::fault::{Code, Error, Fault};
use crate::domain::id::hex;
use crate::domain::json::Json;
use crate::domain::json::cursor::JsonKind;
use crate::domain::utp::card::{self, Card, TOOL_CALL, TOOL_RESULT, into_map};
use crate::domain::utp::turn_event::{StepProgress, TurnEvent};
use crate::domain::utp::{
    AfterExecution, InboxItem, Route, StepCall, Turn, TurnStatus, is_token, trace,
};
use crate::ports::core::from_store_error;
use crate::ports::store::utp::TurnChange;
use crate::utp::Utp;
use crate::utp::inbox::derive_inbox_id;
use crate::utp::trees::CallCharge;

/// Maximum number of calls in one step.
const MAX_CALLS: usize = 128;
/// Maximum number of inbox items to search for results of a turn.
const MAX_UNREAD_ITEMS: usize = 1_000;

/// A request for one call of a step.
#[derive(Debug, Clone)]
pub struct StepCallRequest {
    /// Unique within its turn.
    pub tool_call_id: String,
    /// Name of the tool.
    pub tool_name: String,
    /// An object, or its JSON text as models write it. Null counts as an empty object.
    pub arguments: Json,
    /// Timeout of the call in milliseconds. Defaults to the tool's own.
    pub timeout_ms: Option<u64>,
    /// Time limit of each attempt in milliseconds. Defaults to the execution policies.
    pub attempt_timeout_ms: Option<u64>,
    /// Time that the call waits for input, in milliseconds. Defaults to the execution policies.
    pub input_timeout_ms: Option<u64>,
}

/// A request to dispatch the calls of a step.
#[derive(Debug, Clone)]
pub struct DispatchRequest {
    /// Epoch of the turn; the dispatch is refused if it is not the current one.
    pub epoch: u64,
    /// Generated if `None`.
    pub step_id: Option<String>,
    /// Calls of the step, which run concurrently.
    pub calls: Vec<StepCallRequest>,
    /// True if the dispatch suspends the turn.
    pub suspends_turn: bool,
    /// Tokens that the model of the worker has used for the turn up to now.
    pub tokens: Option<u64>,
}

/// A turn and the calls of its dispatched step.
#[derive(Debug, Clone)]
pub struct DispatchedStep {
    /// The turn after the dispatch.
    pub turn: Turn,
    /// Calls of the step, with the results that are already in.
    pub calls: Vec<StepCall>,
}

impl Utp {
    /// Dispatches the calls of a step concurrently. The operation is idempotent: the same request
    /// again returns the same calls.
    pub async fn dispatch_step(
        &self,
        caller: &Caller,
        agent_id: &str,
        turn_id: &str,
        request: DispatchRequest,
    ) -> Result<DispatchedStep, Error> {
        check_dispatch_request(&request)?;
        let turn = self.turn(caller, agent_id, turn_id).await?;
        if let Some(existing) = self.find_dispatched_step(turn, &request).await? {
            return Ok(existing);
        }
        let error = match self.dispatch_new_step(caller, agent_id, turn_id, &request).await {
            Err(error) if error.code() == Code::Conflict => error,
            other => return other,
        };
        // The same request may have arrived twice concurrently. Then these are its calls.
        let turn = self.turn(caller, agent_id, turn_id).await?;
        self.find_dispatched_step(turn, &request).await?.ok_or(error)
    }

    /// Returns the step if it was dispatched before.
    async fn find_dispatched_step(
        &self,
        turn: Turn,
        request: &DispatchRequest,
    ) -> Result<Option<DispatchedStep>, Error> {
        let runs_on = turn.status == TurnStatus::Running && !request.suspends_turn;
        let stands = runs_on || turn.status == TurnStatus::Suspended;
        let step_id = request.step_id.as_deref().filter(|_| stands && turn.epoch == request.epoch);
        let Some(step_id) = step_id else { return Ok(None) };
        let calls = self.load_step_calls(&turn, step_id).await?;
        if calls.is_empty() || calls.iter().any(|call| call.epoch != turn.epoch) {
            return Ok(None);
        }
        self.check_same_calls(&turn, &calls, &request.calls).await?;
        Ok(Some(DispatchedStep { turn, calls }))
    }

    async fn dispatch_new_step(
        &self,
        caller: &Caller,
        agent_id: &str,
        turn_id: &str,
        request: &DispatchRequest,
    ) -> Result<DispatchedStep, Error> {
        let mut turn = self.require_running_turn(caller, agent_id, turn_id, request.epoch).await?;
        if let Some(delegation) = &mut turn.delegation {
            delegation.report_tokens(request.tokens);
        }
        let now_ms = self.core.clock.wall_ms();
        let mint = || self.core.id_generator.next_id("step_", now_ms);
        let step_id = request.step_id.clone().unwrap_or_else(mint);
        self.check_ids_unused(&turn, &step_id, &request.calls).await?;
        let mut out = self.step_calls(&turn).await?;
        out.retain(|call| call.epoch == turn.epoch);
        let (stored, others) = out.into_iter().partition(|call| call.step_id == step_id);
        let (stored, mut out): (Vec<StepCall>, Vec<StepCall>) = (stored, others);
        let agent = self.acting_agent(caller, agent_id, Some(&turn)).await?;
        let inbox_open = self.has_unread_results(&turn, &out).await?;
        let sent = request.calls.iter().map(|call| {
            let route = build_route(&turn, &step_id, call);
            let is_charged = stored.iter().any(|stored| stored.tool_call_id == call.tool_call_id);
            self.send_step_call(&agent, &turn, route, call, SendState { inbox_open, is_charged })
        });
        let DispatchSummary { change, deadline_ms, error: refused, mut charges } =
            self.collect_sent_calls(&turn, join_all(sent).await);
        let calls = change.step_calls.clone();
        if let Some(error) = refused {
            self.abort_if_epoch_changed(caller, &turn, &calls).await;
            return Err(error);
        }
        out.extend(calls.iter().cloned());
        let mut steps: Vec<String> = out.iter().map(|call| call.step_id.clone()).collect();
        steps.dedup();
        let mut delegation = turn.delegation.clone();
        if let Some(delegation) = &mut delegation {
            let is_new = |call: &&StepCall| {
                let id = &call.tool_call_id;
                call.call_id.is_some() && !stored.iter().any(|stored| stored.tool_call_id == *id)
            };
            delegation.used_calls += calls.iter().filter(is_new).count() as u64;
        }
        let step = Turn {
            step_id: Some(step_id),
            steps,
            delegation,
            resume_deadline_ms: turn.resume_deadline_ms.max(Some(deadline_ms)),
            status: if request.suspends_turn { TurnStatus::Suspended } else { turn.status },
            ..turn.clone()
        };
        let waiting = open_step_call_ids(&out);
        let stored =
            self.store_step(caller, &turn, step, change, waiting, charges.as_mut_slice()).await;
        let turn = match stored {
            Ok(turn) => turn,
            Err(error) => {
                self.abort_undispatched(caller, &calls).await;
                return Err(error);
            }
        };
        self.deliver_early_outcomes(&turn, &calls).await?;
        self.wake_inbox_listeners(&turn.project, agent_id, true);
        let step_id = turn.step_id.clone().unwrap_or_default();
        let calls = self.load_step_calls(&turn, &step_id).await?;
        Ok(DispatchedStep { turn, calls })
    }

    /// Returns true if the inbox has results of these calls of the turn. Items of other turns do
    /// not count: they stay in the inbox when this turn ends.
    async fn has_unread_results(&self, turn: &Turn, calls: &[StepCall]) -> Result<bool, Error> {
        let received: Vec<&String> =
            calls.iter().filter_map(|call| call.inbox_id.as_ref()).collect();
        if received.is_empty() {
            return Ok(false);
        }
        let inbox = self.core.store.utp();
        let unread = inbox.inbox(&turn.project, &turn.agent_id, MAX_UNREAD_ITEMS).await;
        let unread = unread.map_err(from_store_error)?;
        Ok(unread.iter().any(|item| received.contains(&&item.inbox_id)))
    }

    /// Ends the calls that started before one was refused, if the turn has moved to another epoch.
    /// In the same epoch they continue: a repetition of the request finds them, or `stop_turn`
    /// cancels them.
    async fn abort_if_epoch_changed(&self, caller: &Caller, turn: &Turn, calls: &[StepCall]) {
        let now = self.turn(caller, &turn.agent_id, &turn.turn_id).await;
        if now.is_ok_and(|now| now.epoch != turn.epoch) {
            self.abort_undispatched(caller, calls).await;
        }
    }

    /// Stores a step whose calls have started. Retries after a concurrent change that leaves the
    /// turn in its step, such as a renewal of the lease or a command.
    async fn store_step(
        &self,
        caller: &Caller,
        before: &Turn,
        mut step: Turn,
        change: TurnChange,
        waiting: Vec<String>,
        charges: &mut [CallCharge],
    ) -> Result<Turn, Error> {
        let new_card_ids: Vec<String> = change.step_calls.iter().filter_map(call_card_id).collect();
        let new_calls = used_calls(&step).saturating_sub(used_calls(before));
        for _ in 0..MAX_CONFLICT_RETRIES {
            let listener = TurnEvent {
                pending_tool_call_ids: waiting.clone(),
                step: Some(StepProgress { phase: "executing", new_card_ids: new_card_ids.clone() }),
                completion: None,
            };
            let saved = self
                .save_and_publish_calls(
                    bump_version(step.clone()),
                    change.clone(),
                    listener,
                    charges,
                )
                .await;
            let error = match saved {
                Err(error) if error.code() == Code::Conflict => error,
                other => return other,
            };
            let now = self.turn(caller, &step.agent_id, &step.turn_id).await?;
            let stands = |turn: &Turn| (turn.epoch, turn.status, turn.step_id.clone());
            if stands(&now) != stands(before) {
                return Err(error);
            }
            step = add_step(now, step, new_calls);
        }
        Err(too_many_conflicts())
    }

    /// Ends the calls of a step that was not stored, except those that belong to a stored step.
    async fn abort_undispatched(&self, caller: &Caller, calls: &[StepCall]) {
        for call in calls {
            let (turn, id) = (Some(call.turn_id.as_str()), &call.tool_call_id);
            let stored = self.core.store.utp().step_call(&call.project, turn, id).await;
            let stays = |stored: StepCall| stored.call_id == call.call_id;
            if !stored.ok().flatten().is_some_and(stays) {
                self.abort_best_effort(caller, call).await;
            }
        }
    }

    /// Delivers the outcomes of calls that ended before their step was stored.
    async fn deliver_early_outcomes(&self, turn: &Turn, calls: &[StepCall]) -> Result<(), Error> {
        for call in calls {
            let Some(id) = call.call_id.as_deref().and_then(|id| id.parse().ok()) else { continue };
            let found = self.cards.find_call(&turn.project, &id).await?;
            if let Some(call) = found.filter(|call| call.status.is_terminal()) {
                self.deliver_to_inbox(&call).await?;
            }
        }
        Ok(())
    }

    /// Checks that the ids are unused. A call id used in another step of the turn would receive
    /// that step's result, and a step that was dispatched before already has its calls.
    async fn check_ids_unused(
        &self,
        turn: &Turn,
        step_id: &str,
        calls: &[StepCallRequest],
    ) -> Result<(), Error> {
        let utp = self.core.store.utp();
        let existing = self.load_step_calls(turn, step_id).await?;
        if !existing.is_empty() {
            if existing.iter().any(|call| call.epoch != turn.epoch) {
                let message = format!("step_id \"{step_id}\" was used in this turn before");
                return Err(conflict(turn, message));
            }
            self.check_same_calls(turn, &existing, calls).await?;
        }
        for call in calls {
            let id = &call.tool_call_id;
            let existing = utp.step_call(&turn.project, Some(&turn.turn_id), id).await;
            let existing = existing.map_err(from_store_error)?;
            if existing.is_some_and(|existing| existing.step_id != step_id) {
                let message = format!("tool_call_id \"{id}\" was used in this turn before");
                return Err(conflict(turn, message));
            }
        }
        Ok(())
    }

    /// Checks that a repeated step has the same calls.
    async fn check_same_calls(
        &self,
        turn: &Turn,
        existing: &[StepCall],
        calls: &[StepCallRequest],
    ) -> Result<(), Error> {
        let mut is_same = existing.len() == calls.len();
        for (stored, call) in existing.iter().zip(calls) {
            is_same = is_same
                && (&stored.tool_call_id, &stored.tool_name)
                    == (&call.tool_call_id, &call.tool_name)
                && self
                    .load_dispatched_args(stored)
                    .await?
                    .is_none_or(|args| args == parse_arguments(&call.arguments).0.to_value());
        }
        match is_same {
            true => Ok(()),
            false => Err(conflict(turn, "this step was dispatched with other calls".to_owned())),
        }
    }

    /// Loads the arguments of a dispatched call, if they are still stored.
    async fn load_dispatched_args(&self, step_call: &StepCall) -> Result<Option<Value>, Error> {
        if let Some(id) = step_call.call_id.as_deref().and_then(|id| id.parse().ok()) {
            let call = self.cards.find_call(&step_call.project, &id).await?;
            return Ok(call.map(|call| call.args.to_value()));
        }
        let card_id =
            failed_card_id(&step_call.project, &step_call.turn_id, &step_call.tool_call_id, "call");
        let card = self.cards.find_card(&step_call.project, &card_id).await?;
        Ok(card.and_then(|card| card.content.get("arguments").cloned()))
    }

    async fn send_step_call(
        &self,
        agent: &Caller,
        turn: &Turn,
        route: Route,
        call: &StepCallRequest,
        state: SendState,
    ) -> Result<SentCall, Error> {
        let (args, unreadable) = parse_arguments(&call.arguments);
        if let Some(fault) = unreadable {
            return self.record_failed_call(turn, &route, call, &args.to_value(), &fault).await;
        }
        let invocation = build_invocation(turn, &route, call, args.clone());
        // A call that an earlier request started is not refused: it may be executing.
        let refused = self.find_step_call_fault(agent, call, state.inbox_open);
        if let Some(fault) = refused
            && find_started(self, agent, &invocation).await?.is_none()
        {
            return self.record_failed_call(turn, &route, call, &args.to_value(), &fault).await;
        }
        let charge = match state.is_charged {
            true => None,
            false => match charge_new_call(self, turn, agent, &invocation).await? {
                Ok(charge) => charge,
                Err(fault) => {
                    let args = args.to_value();
                    return self.record_failed_call(turn, &route, call, &args, &fault).await;
                }
            },
        };
        let invoked = match self.calls.invoke(agent, invocation).await {
            Err(Error::Refused { fault, .. }) if is_final(&fault) => {
                let request = build_invocation(turn, &route, call, args.clone());
                match find_call_behind_refusal(self, agent, &request, fault).await? {
                    Ok(started) => Ok(started),
                    Err(fault) => {
                        let args = args.to_value();
                        return self.record_failed_call(turn, &route, call, &args, &fault).await;
                    }
                }
            }
            invoked => invoked.map(|ticket| ticket.call),
        };
        match invoked {
            Ok(started) => Ok(SentCall {
                step_call: build_step_call(turn, &route, call, Some(started.id.to_string())),
                deadline_ms: started.deadline_ms,
                inbox_item: None,
                charge,
            }),
            Err(error) if error.code() == Code::IdempotencyMismatch => {
                let id = &call.tool_call_id;
                Err(conflict(turn, format!("tool_call_id \"{id}\" was used for another call")))
            }
            Err(error) => Err(error),
        }
    }
}

/// Builds the request for a call of a step. Its idempotency key derives from the turn and the id of
/// the call, so a repetition finds the same call.
fn build_invocation(turn: &Turn, route: &Route, call: &StepCallRequest, args: Json) -> CallRequest {
    let mut request = CallRequest::of(call.tool_name.as_str(), args);
    request.run_id = turn.turn_id.clone();
    request.call_id = Some(call.tool_call_id.clone());
    request.timeout_ms = call.timeout_ms;
    request.attempt_timeout_ms = call.attempt_timeout_ms;
    request.input_timeout_ms = call.input_timeout_ms;
    request.idempotency_key = Some(step_call_key(&turn.turn_id, &call.tool_call_id));
    request.traceparent = turn.traceparent.clone();
    request.route = Some(Box::new(route.clone()));
    request
}

/// A call that was accepted, or failed at once.
pub(super) struct SentCall {
    pub(super) step_call: StepCall,
    pub(super) deadline_ms: u64,
    pub(super) inbox_item: Option<InboxItem>,
    /// The charge of a call that counts against a budget and is not stored with the turn yet.
    charge: Option<CallCharge>,
}

/// The state in which a call is sent.
#[derive(Debug, Clone, Copy)]
struct SendState {
    /// True if results of the turn wait in the inbox.
    inbox_open: bool,
    /// True if the turn was stored with the call before.
    is_charged: bool,
}

/// Summary of the calls of a step.
struct DispatchSummary {
    change: TurnChange,
    /// Latest deadline of all calls.
    deadline_ms: u64,
    /// The first error that prevented a call from being sent.
    error: Option<Error>,
    /// Charges of the calls that count against a budget.
    charges: Vec<CallCharge>,
}

impl Utp {
    fn collect_sent_calls(
        &self,
        turn: &Turn,
        sent: Vec<Result<SentCall, Error>>,
    ) -> DispatchSummary {
        let (mut change, mut refused, mut charges) = (TurnChange::default(), None, Vec::new());
        let mut deadline_ms = self.core.clock.wall_ms();
        for sent in sent {
            let SentCall { step_call: waiting, deadline_ms: due_ms, inbox_item: inbox, charge } =
                match sent {
                    Ok(sent) => sent,
                    Err(error) => {
                        refused.get_or_insert(error);
                        continue;
                    }
                };
            charges.extend(charge);
            deadline_ms = deadline_ms.max(due_ms);
            let messages = inbox.iter().filter_map(|item| self.build_wakeup(item, &turn.channel));
            change.outbox.extend(messages.collect::<Vec<_>>());
            change.inbox.extend(inbox);
            change.step_calls.push(waiting);
        }
        DispatchSummary { change, deadline_ms, error: refused, charges }
    }
}

fn check_dispatch_request(request: &DispatchRequest) -> Result<(), Error> {
    if request.calls.is_empty() || request.calls.len() > MAX_CALLS {
        return Err(invalid(format!("calls must be 1 to {MAX_CALLS}")));
    }
    let ids = request.calls.iter().map(|call| ("tool_call_id", &call.tool_call_id));
    let step = request.step_id.iter().map(|id| ("step_id", id));
    for (field, id) in step.chain(ids) {
        if !is_token(id) {
            let message = format!(
                "{field} must be 1 to 128 printable ASCII characters without blanks, '.', '*' and '>'"
            );
            return Err(invalid(message));
        }
    }
    let mut seen = std::collections::HashSet::new();
    for call in &request.calls {
        let id = &call.tool_call_id;
        if id.starts_with("tc_") {
            return Err(invalid("tool_call_id cannot begin with tc_, as Toolcrib's own do"));
        }
        if !seen.insert(id) {
            return Err(invalid(format!("tool_call_id \"{id}\" is in the step twice")));
        }
    }
    Ok(())
}

/// Returns the arguments as an object. Also returns the fault if they are not valid JSON.
fn parse_arguments(input: &Json) -> (Json, Option<Fault>) {
    let wrap_raw = |raw: &Value| Json::from_value(&json!({ "_raw": raw }));
    let args = match JsonKind::of(input.text()) {
        JsonKind::Null => Json::empty_object(),
        JsonKind::Text => {
            let written = input.to_value();
            let text = written.as_str().unwrap_or_default();
            match Json::parse(text) {
                Ok(json) => json,
                Err(error) => {
                    let message = format!("the arguments are not JSON: {error}");
                    let fault = Fault::new(Code::BadRequest, message).without_side_effect();
                    return (wrap_raw(&written), Some(fault));
                }
            }
        }
        _ => input.clone(),
    };
    match JsonKind::of(args.text()) {
        JsonKind::Object => (args, None),
        _ => (wrap_raw(&args.to_value()), None),
    }
}

/// Returns the id of the card of an accepted call.
fn call_card_id(call: &StepCall) -> Option<String> {
    let id = call.call_id.as_deref()?.parse().ok()?;
    Some(card::derived_id(&id, TOOL_CALL))
}

/// Returns the idempotency key of a call of a turn.
pub(crate) fn step_call_key(turn_id: &str, tool_call_id: &str) -> String {
    let seed = json!([turn_id, tool_call_id]).to_string();
    format!("utp:{}", hex(&Sha256::digest(seed.as_bytes())))
}

fn build_route(turn: &Turn, step_id: &str, call: &StepCallRequest) -> Route {
    Route {
        agent_id: turn.agent_id.clone(),
        turn_id: turn.turn_id.clone(),
        epoch: turn.epoch,
        step_id: step_id.to_owned(),
        tool_call_id: call.tool_call_id.clone(),
        channel: turn.channel.clone(),
        parent_step_id: turn.parent_step_id.clone(),
        tracestate: turn.tracestate.clone(),
        context_box_id: turn.context_box_id.clone(),
        depth: turn.depth,
        project: None,
        joined_by: None,
        is_detached: false,
    }
}

pub(super) fn build_step_call(
    turn: &Turn,
    route: &Route,
    call: &StepCallRequest,
    call_id: Option<String>,
) -> StepCall {
    StepCall {
        project: turn.project.clone(),
        agent_id: turn.agent_id.clone(),
        turn_id: turn.turn_id.clone(),
        epoch: turn.epoch,
        step_id: route.step_id.clone(),
        tool_call_id: call.tool_call_id.clone(),
        tool_name: call.tool_name.clone(),
        call_id,
        result_card_id: None,
        inbox_id: None,
    }
}

/// Returns the id of a card that belongs to a refused call.
pub(crate) fn failed_card_id(
    project: &str,
    turn_id: &str,
    tool_call_id: &str,
    end: &str,
) -> String {
    let inbox_id = derive_inbox_id(project, turn_id, tool_call_id);
    format!("{end}{}", inbox_id.trim_start_matches("inbox_"))
}

impl Utp {
    /// Returns the fault if the roster or the protocol forbids the call. Checked before the call is
    /// invoked.
    fn find_step_call_fault(
        &self,
        agent: &Caller,
        call: &StepCallRequest,
        inbox_open: bool,
    ) -> Option<Fault> {
        let tool = &call.tool_name;
        let Some(member) = self.registry.find_agent_entry(&agent.project, &agent.agent) else {
            let message = format!("agent \"{}\" is not on the roster any more", agent.agent);
            return Some(Fault::new(Code::PermissionDenied, message).without_side_effect());
        };
        let allowed = member.allowed_tools;
        if allowed.is_some_and(|list| !list.iter().any(|pattern| pattern_matches(pattern, tool))) {
            let message = format!("{tool} is not among the agent's allowed tools");
            return Some(Fault::new(Code::PermissionDenied, message).without_side_effect());
        }
        let found = self.registry.catalog().find(&agent.project, tool);
        let ends = found.and_then(|entry| entry.definition.binding.clone());
        if inbox_open && ends.is_some_and(|utp| utp.after_execution == AfterExecution::Terminate) {
            let message =
                "inbox_not_empty: results of this turn wait in the inbox; resume the turn first";
            return Some(Fault::new(Code::Conflict, message).without_side_effect());
        }
        None
    }

    /// Records a refused call: stores its cards and builds its inbox item.
    async fn record_failed_call(
        &self,
        turn: &Turn,
        route: &Route,
        call: &StepCallRequest,
        args: &Value,
        fault: &Fault,
    ) -> Result<SentCall, Error> {
        let now_ms = self.core.clock.wall_ms();
        let inbox_id = derive_inbox_id(&turn.project, &route.turn_id, &route.tool_call_id);
        let error = card::error_json(fault, "worker");
        let trace_id = turn.traceparent.as_deref().and_then(trace::parse).map(|(id, _)| id);
        let mut metadata = into_map(json!({
            "agent_turn_id": route.turn_id,
            "step_id": route.step_id,
            "tool_call_id": route.tool_call_id,
            "trace_id": trace_id,
            "parent_step_id": route.parent_step_id,
        }));
        let make = |kind: &str, end: &str, content: Value, metadata: &Map<String, Value>| Card {
            card_id: failed_card_id(&turn.project, &route.turn_id, &route.tool_call_id, end),
            project: turn.project.clone(),
            kind: kind.to_owned(),
            content: into_map(content),
            created_ms: now_ms,
            author_id: turn.agent_id.clone(),
            metadata: metadata.clone(),
            tool_calls: None,
            tool_call_id: Some(route.tool_call_id.clone()),
            ttl_seconds: None,
        };
        let request = json!({
            "__type__": "ToolCallContent", "tool_name": call.tool_name, "arguments": args,
            "status": "called", "target_subject": null,
        });
        let request = make(TOOL_CALL, "call", request, &metadata);
        metadata.insert("role".into(), "tool".into());
        metadata.insert("function_name".into(), call.tool_name.as_str().into());
        let result = json!({
            "__type__": "ToolResultContent", "status": "failed", "after_execution": "suspend",
            "result": card::error_as_result(&error), "error": error,
        });
        let result = make(TOOL_RESULT, "result", result, &metadata);
        let card_id = result.card_id.clone();
        for card in [request, result] {
            self.core.store.utp().put_card(card).await.map_err(from_store_error)?;
        }
        let mut waiting = build_step_call(turn, route, call, None);
        waiting.result_card_id = Some(card_id.clone());
        waiting.inbox_id = Some(inbox_id.clone());
        let parent = turn.traceparent.clone().unwrap_or_default();
        let inbox = InboxItem {
            project: turn.project.clone(),
            agent_id: turn.agent_id.clone(),
            message_type: "tool_result".to_owned(),
            turn_id: route.turn_id.clone(),
            tool_call_id: route.tool_call_id.clone(),
            payload: into_map(json!({
                "tool_call_id": route.tool_call_id, "agent_turn_id": route.turn_id,
                "turn_epoch": route.epoch, "agent_id": route.agent_id,
                "after_execution": "suspend", "status": "failed",
                "tool_result_card_id": card_id, "step_id": route.step_id,
            })),
            traceparent: trace::child_traceparent(&parent, &inbox_id),
            tracestate: route.tracestate.clone(),
            parent_step_id: Some(route.step_id.clone()),
            source_agent_id: Some(turn.agent_id.clone()),
            depth: route.depth,
            created_ms: now_ms,
            inbox_id,
        };
        let inbox_item = Some(inbox);
        Ok(SentCall { step_call: waiting, deadline_ms: now_ms, inbox_item, charge: None })
    }
}
