//! Commands for the protocol's internal tools: each becomes a call, and its outcome a `tool.result`
//! card in the agent's inbox. A command that is refused is answered in the same way; one that
//! cannot be answered becomes a dead letter.

use std::sync::Arc;

use serde_json::{Value, json};

use super::inbox::derive_inbox_id;
use super::turns::dispatch::{failed_card_id, step_call_key};
use super::turns::started::{
    CommandedCall, charge_new_call, find_call_behind_refusal, find_started, is_final,
};
use crate::calls::request::CallRequest;
use crate::domain::access_rules::pattern_matches;
use crate::domain::call::Call;
use crate::domain::caller::Caller;
use crate::domain::fault::{Code, Error, Fault};
use crate::domain::json::Json;
use crate::domain::utp::card::{self, Card, TOOL_CALL, TOOL_RESULT, into_map};
use crate::domain::utp::{
    AfterExecution, InboxItem, MAX_DEPTH, Route, StepCall, Turn, TurnStatus, is_token, trace,
};
use crate::ports::core::from_store_error;
use crate::utp::Utp;

/// Author of the cards that refuse commands, as the protocol names the component.
const AUTHOR: &str = "sys.pmo";

/// A command for an internal tool. The fields that are not optional are those that its answer
/// needs.
#[derive(Debug, Clone, Default)]
pub struct InternalCommand {
    /// Name of the tool in the subject.
    pub tool: String,
    /// Channel in the subject.
    pub channel: String,
    /// Agent that sent the command.
    pub agent_id: String,
    /// Turn of the agent.
    pub turn_id: String,
    /// Epoch of the turn.
    pub epoch: u64,
    /// Id of the call, unique within its turn.
    pub tool_call_id: String,
    /// Step of the turn.
    pub step_id: Option<String>,
    /// Id of the card with the arguments.
    pub card_id: Option<String>,
    /// Name of the tool in the payload.
    pub tool_name: Option<String>,
    /// `suspend` or `terminate`, as received.
    pub after_execution: Option<String>,
    /// Id of a box of cards that the command names.
    pub context_box_id: Option<String>,
    /// Name of a field that the protocol forbids, if the payload has one.
    pub inline_field: Option<&'static str>,
    /// Nesting depth of agents that call agents, as received.
    pub depth: Option<String>,
    /// W3C `traceparent` of the command.
    pub traceparent: Option<String>,
    /// W3C `tracestate` of that trace.
    pub tracestate: Option<String>,
}

/// The result of a command.
#[derive(Debug, Clone)]
pub enum CommandReceipt {
    /// The command is a stored call, whose outcome goes to the agent's inbox.
    Accepted(Arc<Call>),
    /// The command was refused: a failed result is in the agent's inbox.
    Rejected {
        /// Id of the inbox item.
        inbox_id: String,
        /// The reason.
        fault: Fault,
    },
    /// The command cannot be answered: the turn that it names does not wait for it.
    Unanswerable {
        /// Reason code for the dead letter.
        reason: &'static str,
        /// Reason in words.
        message: String,
    },
}

fn bad_request(message: impl Into<String>) -> Fault {
    Fault::new(Code::BadRequest, message).without_side_effect()
}

fn named_fault(name: &str, message: String) -> Fault {
    bad_request(format!("{name}: {message}")).with_detail(json!({ "utp_code": name }))
}

impl Utp {
    /// Accepts a command for an internal tool. The operation is idempotent: the same command again
    /// returns the same call.
    ///
    /// # Errors
    ///
    /// Fails if the command could not be stored now, and can be delivered again.
    pub async fn accept_command(
        &self,
        caller: &Caller,
        mut command: InternalCommand,
    ) -> Result<CommandReceipt, Error> {
        let project = &caller.project;
        let turn = self.core.store.utp().turn(project, &command.turn_id).await;
        let turn = turn.map_err(from_store_error)?;
        if let Some((reason, message)) = turn.as_ref().and_then(|turn| misfit(turn, &command)) {
            return Ok(CommandReceipt::Unanswerable { reason, message });
        }
        let checked = check_fields(&command, turn.as_ref());
        let (route, args) = match checked {
            Ok(depth) => {
                let mut route = command.route(depth);
                match self.load_arguments(project, &mut command, &mut route).await? {
                    Ok(args) => (route, args),
                    Err(fault) => return self.reject(caller, turn, &command, route, fault).await,
                }
            }
            Err(fault) => {
                let route = command.route(turn.as_ref().map_or(0, |turn| turn.depth));
                return self.reject(caller, turn, &command, route, fault).await;
            }
        };
        let request = command.to_request(&route, turn.as_ref(), args);
        let agent = self.acting_agent(caller, &command.agent_id, turn.as_ref()).await?;
        // A call that an earlier delivery started is not refused: it may be executing.
        if let Some(fault) = self.find_roster_fault(caller, &command)
            && find_started(self, &agent, &request).await?.is_none()
        {
            return self.reject(caller, turn, &command, route, fault).await;
        }
        let is_new = self.find_command_call(project, &command).await?.is_none();
        let charge = match &turn {
            Some(turn) if is_new => match charge_new_call(self, turn, &agent, &request).await? {
                Ok(charge) => charge,
                Err(fault) => {
                    return self.reject(caller, Some(turn.clone()), &command, route, fault).await;
                }
            },
            _ => None,
        };
        let invoked = match self.calls.invoke(&agent, request.clone()).await {
            Err(Error::Refused { fault, .. }) if is_final(&fault) => {
                match find_call_behind_refusal(self, &agent, &request, fault).await? {
                    Ok(started) => Ok(started),
                    Err(fault) => return self.reject(caller, turn, &command, route, fault).await,
                }
            }
            invoked => invoked.map(|ticket| ticket.call),
        };
        match invoked {
            Ok(call) => {
                let new = CommandedCall { is_new, charge };
                self.follow_command(turn, &command, &route, call, new).await
            }
            Err(error) if error.code() == Code::IdempotencyMismatch => {
                let id = &command.tool_call_id;
                let message = format!("tool_call_id \"{id}\" was used for another call");
                Ok(CommandReceipt::Unanswerable { reason: "wrong_call", message })
            }
            Err(error) => Err(error),
        }
    }

    /// Returns the call that a command has made, if it was delivered before.
    async fn find_command_call(
        &self,
        project: &str,
        command: &InternalCommand,
    ) -> Result<Option<StepCall>, Error> {
        let (turn_id, id) = (Some(command.turn_id.as_str()), &command.tool_call_id);
        let found = self.core.store.utp().step_call(project, turn_id, id).await;
        found.map_err(from_store_error)
    }

    /// Records an accepted call as one that the agent waits for. A new call counts against the
    /// budget of its turn.
    async fn follow_command(
        &self,
        turn: Option<Turn>,
        command: &InternalCommand,
        route: &Route,
        call: Arc<Call>,
        new: CommandedCall,
    ) -> Result<CommandReceipt, Error> {
        let step_call = command.step_call(&call.project, route, Some(call.id.to_string()));
        match turn {
            Some(turn) => {
                self.add_commanded_call(turn, &step_call, call.deadline_ms, new).await?;
            }
            None => {
                let stored = self.core.store.utp().add_step_call(step_call).await;
                stored.map_err(from_store_error)?;
            }
        }
        // The call may have ended before its step was stored.
        let now = self.cards.find_call(&call.project, &call.id).await?;
        if let Some(ended) = now.filter(|call| call.status.is_terminal()) {
            self.deliver_to_inbox(&ended).await?;
        }
        Ok(CommandReceipt::Accepted(call))
    }

    /// Returns the fault if the roster does not allow the agent this tool.
    fn find_roster_fault(&self, caller: &Caller, command: &InternalCommand) -> Option<Fault> {
        let entry = self.registry.find_agent_entry(&caller.project, &command.agent_id)?;
        let allowed = entry.allowed_tools?;
        let tool = &command.tool;
        let is_allowed = allowed.iter().any(|pattern| pattern_matches(pattern, tool));
        let message = format!("{tool} is not among the agent's allowed tools");
        let denied = || Fault::new(Code::PermissionDenied, message).without_side_effect();
        (!is_allowed).then(denied)
    }

    /// Reads the arguments from the command's card, and completes the route and the trace with its
    /// lineage.
    async fn load_arguments(
        &self,
        project: &str,
        command: &mut InternalCommand,
        route: &mut Route,
    ) -> Result<Result<Value, Fault>, Error> {
        let card_id = command.card_id.as_deref().unwrap_or_default();
        let Some(card) = self.cards.find_card(project, card_id).await? else {
            let excerpt: String = card_id.chars().take(80).collect();
            let message = format!("there is no card \"{excerpt}\"");
            return Ok(Err(Fault::new(Code::NotFound, message).without_side_effect()));
        };
        if let Some(fault) = find_card_fault(&card, command) {
            return Ok(Err(fault));
        }
        route.parent_step_id = card.metadata_text("parent_step_id").map(str::to_owned);
        if command.traceparent.as_deref().and_then(trace::parse).is_none() {
            let from_card = |id: &str| format!("00-{id}-{}-01", &trace::from_seed(card_id)[36..52]);
            command.traceparent = card.metadata_text("trace_id").map(from_card);
        }
        Ok(Ok(card.content.get("arguments").cloned().unwrap_or(Value::Null)))
    }

    /// Answers a command with a failed result.
    async fn reject(
        &self,
        caller: &Caller,
        turn: Option<Turn>,
        command: &InternalCommand,
        route: Route,
        fault: Fault,
    ) -> Result<CommandReceipt, Error> {
        let project = &caller.project;
        let parent = command.parent_span(turn.as_ref());
        let card = self.build_rejection_card(project, command, &route, &parent, &fault);
        let card_id = card.card_id.clone();
        self.core.store.utp().put_card(card).await.map_err(from_store_error)?;
        let item = self.build_rejection_item(project, &route, &card_id, &parent);
        let (inbox_id, wakeup) = (item.inbox_id.clone(), self.build_wakeup(&item, &route.channel));
        let mut step_call = command.step_call(project, &route, None);
        step_call.result_card_id = Some(card_id.clone());
        step_call.inbox_id = Some(inbox_id.clone());
        let delivered = self.core.store.utp().deliver_to_inbox(item, &card_id, wakeup).await;
        delivered.map_err(from_store_error)?;
        if let Some(turn) = turn {
            let (now_ms, new) = (self.core.clock.wall_ms(), CommandedCall::default());
            self.add_commanded_call(turn, &step_call, now_ms, new).await?;
        }
        self.wake_inbox_listeners(project, &route.agent_id, true);
        Ok(CommandReceipt::Rejected { inbox_id, fault })
    }

    fn build_rejection_card(
        &self,
        project: &str,
        command: &InternalCommand,
        route: &Route,
        parent: &str,
        fault: &Fault,
    ) -> Card {
        let error = card::error_json(fault, "worker");
        let content = json!({
            "__type__": "ToolResultContent", "status": "failed", "after_execution": "suspend",
            "result": card::error_as_result(&error), "error": error,
        });
        let metadata = json!({
            "agent_turn_id": route.turn_id,
            "step_id": route.step_id,
            "tool_call_id": route.tool_call_id,
            "trace_id": trace::parse(parent).map(|(trace_id, _)| trace_id),
            "parent_step_id": route.parent_step_id,
            "role": "tool",
            "function_name": command.tool,
        });
        Card {
            card_id: failed_card_id(project, &route.turn_id, &route.tool_call_id, "result"),
            project: project.to_owned(),
            kind: TOOL_RESULT.to_owned(),
            content: into_map(content),
            created_ms: self.core.clock.wall_ms(),
            author_id: AUTHOR.to_owned(),
            metadata: into_map(metadata),
            tool_calls: None,
            tool_call_id: Some(route.tool_call_id.clone()),
            ttl_seconds: None,
        }
    }

    fn build_rejection_item(
        &self,
        project: &str,
        route: &Route,
        card_id: &str,
        parent: &str,
    ) -> InboxItem {
        let inbox_id = derive_inbox_id(project, &route.turn_id, &route.tool_call_id);
        let payload = json!({
            "tool_call_id": route.tool_call_id, "agent_turn_id": route.turn_id,
            "turn_epoch": route.epoch, "agent_id": route.agent_id,
            "after_execution": "suspend", "status": "failed",
            "tool_result_card_id": card_id, "step_id": route.step_id,
        });
        InboxItem {
            project: project.to_owned(),
            agent_id: route.agent_id.clone(),
            message_type: "tool_result".to_owned(),
            turn_id: route.turn_id.clone(),
            tool_call_id: route.tool_call_id.clone(),
            payload: into_map(payload),
            traceparent: trace::child_traceparent(parent, &inbox_id),
            tracestate: route.tracestate.clone(),
            parent_step_id: Some(route.step_id.clone()),
            source_agent_id: Some(AUTHOR.to_owned()),
            depth: route.depth,
            created_ms: self.core.clock.wall_ms(),
            inbox_id,
        }
    }
}

impl InternalCommand {
    fn route(&self, depth: u32) -> Route {
        Route {
            agent_id: self.agent_id.clone(),
            turn_id: self.turn_id.clone(),
            epoch: self.epoch,
            step_id: self.step_id.clone().unwrap_or_default(),
            tool_call_id: self.tool_call_id.clone(),
            channel: self.channel.clone(),
            parent_step_id: None,
            tracestate: self.tracestate.clone(),
            context_box_id: self.context_box_id.clone(),
            depth,
            project: None,
            joined_by: None,
            is_detached: false,
        }
    }

    /// Returns the span that the command continues: its own, else that of the turn.
    fn parent_span(&self, turn: Option<&Turn>) -> String {
        let own = self.traceparent.as_deref().and_then(trace::normalize);
        let of_turn = || turn.and_then(|turn| turn.traceparent.clone());
        own.or_else(of_turn).unwrap_or_else(|| trace::from_seed(&self.turn_id))
    }

    fn to_request(&self, route: &Route, turn: Option<&Turn>, args: Value) -> CallRequest {
        let mut request = CallRequest::of(self.tool.as_str(), Json::from_value(&args));
        request.run_id = self.turn_id.clone();
        request.call_id = Some(self.tool_call_id.clone());
        request.idempotency_key = Some(step_call_key(&self.turn_id, &self.tool_call_id));
        request.traceparent = Some(self.parent_span(turn));
        request.route = Some(Box::new(route.clone()));
        request
    }

    fn step_call(&self, project: &str, route: &Route, call_id: Option<String>) -> StepCall {
        StepCall {
            project: project.to_owned(),
            agent_id: self.agent_id.clone(),
            turn_id: self.turn_id.clone(),
            epoch: self.epoch,
            step_id: route.step_id.clone(),
            tool_call_id: self.tool_call_id.clone(),
            tool_name: self.tool.clone(),
            call_id,
            result_card_id: None,
            inbox_id: None,
        }
    }
}

/// Returns the reason why a turn does not wait for a command.
fn misfit(turn: &Turn, command: &InternalCommand) -> Option<(&'static str, String)> {
    let id = &turn.turn_id;
    if turn.agent_id != command.agent_id {
        let message = format!("turn \"{id}\" is not of agent \"{}\"", command.agent_id);
        return Some(("wrong_agent", message));
    }
    if turn.epoch != command.epoch {
        let message =
            format!("turn \"{id}\" is in turn_epoch {}, not {}", turn.epoch, command.epoch);
        return Some(("wrong_epoch", message));
    }
    let is_active = matches!(turn.status, TurnStatus::Running | TurnStatus::Suspended);
    let message = || format!("turn \"{id}\" is {}", turn.status.as_str());
    (!is_active).then(|| ("wrong_turn", message()))
}

/// Checks the fields of a command that can be answered. Returns its depth.
fn check_fields(command: &InternalCommand, turn: Option<&Turn>) -> Result<u32, Fault> {
    if let Some(name) = command.inline_field {
        let message = format!("payload.{name} is forbidden: the card has the arguments");
        return Err(bad_request(message));
    }
    let needed = [
        ("step_id", &command.step_id),
        ("tool_call_card_id", &command.card_id),
        ("after_execution", &command.after_execution),
    ];
    if let Some((name, _)) = needed.iter().find(|(_, value)| value.is_none()) {
        return Err(bad_request(format!("missing required field: {name}")));
    }
    let step_id = command.step_id.as_deref().unwrap_or_default();
    let ids = [("step_id", step_id), ("tool_call_id", command.tool_call_id.as_str())];
    if let Some((name, _)) = ids.iter().find(|(_, id)| !is_token(id)) {
        return Err(bad_request(format!("{name} cannot be part of a NATS subject")));
    }
    if let Some(name) = command.tool_name.as_ref().filter(|name| **name != command.tool) {
        let expected = &command.tool;
        return Err(bad_request(format!("tool_name mismatch: expected {expected}, got {name}")));
    }
    let after = command.after_execution.as_deref().unwrap_or_default();
    match after.parse::<AfterExecution>() {
        Ok(AfterExecution::Suspend) => {}
        Ok(AfterExecution::Terminate) => {
            let message = format!("{} is defined with suspend", command.tool);
            return Err(named_fault("after_execution_mismatch", message));
        }
        Err(()) => {
            let message = format!("\"{after}\" is neither suspend nor terminate");
            return Err(named_fault("invalid_after_execution", message));
        }
    }
    let of_turn = turn.map(|turn| turn.depth);
    let Some(text) = &command.depth else { return Ok(of_turn.unwrap_or(0)) };
    let depth: u32 = text
        .trim()
        .parse()
        .map_err(|_| bad_request("CG-Recursion-Depth must be a whole number from 0"))?;
    if depth >= MAX_DEPTH {
        let message = format!("at most {}", MAX_DEPTH - 1);
        return Err(named_fault("recursion_depth_exceeded", message));
    }
    match of_turn {
        Some(expected) if expected != depth => {
            Err(bad_request(format!("CG-Recursion-Depth of the turn is {expected}")))
        }
        _ => Ok(depth),
    }
}

/// Returns the fault of a card that does not belong to the command.
fn find_card_fault(card: &Card, command: &InternalCommand) -> Option<Fault> {
    let id = &card.card_id;
    if card.kind != TOOL_CALL {
        return Some(bad_request(format!("card \"{id}\" is a {}, not a tool.call", card.kind)));
    }
    if !card.content.get("arguments").is_some_and(Value::is_object) {
        return Some(bad_request(format!("card \"{id}\" has no ToolCallContent")));
    }
    let name = card.content_text("tool_name").unwrap_or_default();
    if name != command.tool {
        let message = format!("card \"{id}\" calls {name}, the command {}", command.tool);
        return Some(bad_request(message));
    }
    let own_trace = command.traceparent.as_deref().and_then(trace::parse).map(|(id, _)| id);
    let expected = [
        ("tool_call_id", card.tool_call_id.as_deref(), Some(command.tool_call_id.as_str())),
        ("agent_turn_id", card.turn_id(), Some(command.turn_id.as_str())),
        ("step_id", card.metadata_text("step_id"), command.step_id.as_deref()),
        ("trace_id", card.metadata_text("trace_id"), own_trace.as_deref()),
    ];
    let differs = |(_, on_card, in_command): &&(&str, Option<&str>, Option<&str>)| {
        on_card.is_some() && in_command.is_some() && on_card != in_command
    };
    let (name, ..) = expected.iter().find(differs)?;
    Some(bad_request(format!("{name} mismatch: card \"{id}\" is of another call")))
}
