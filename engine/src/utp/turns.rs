//! UTP turns: an agent leases a turn, dispatches the calls of a step, is suspended until all
//! results are in, is woken, and resumes with the results. Every new lease, resume, stop and expiry
//! starts a new epoch, and requests for an older epoch are refused.

pub(crate) mod delegated;
pub(crate) mod dispatch;
pub(crate) mod started;
mod stop;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::domain::caller::Caller;
use crate::domain::fault::{Code, Error, Fault};
use crate::domain::id::hex;
use crate::domain::utp::turn_event::{StepProgress, TurnCompletion, TurnEvent};
use crate::domain::utp::{
    AfterExecution, DEFAULT_CHANNEL, MAX_DEPTH, StepCall, ToolStatus, Turn, TurnRequest,
    TurnStatus, is_token, trace,
};
use crate::ports::bus::Topic;
use crate::ports::core::from_store_error;
use crate::ports::store::SaveResult;
use crate::ports::store::utp::TurnChange;
use crate::utp::Utp;
use crate::utp::inbox::require_agent;
use crate::utp::trees::CallCharge;
use crate::utp::turns::started::CommandedCall;

pub use delegated::EnqueueRequest;
pub use dispatch::{DispatchRequest, DispatchedStep, StepCallRequest};

/// Default duration of a lease.
const DEFAULT_LEASE_MS: u64 = 300_000;
const LEASE_RANGE_MS: std::ops::RangeInclusive<u64> = 1_000..=86_400_000;

/// Maximum length of a request's id, in bytes.
const MAX_REQUEST_ID: usize = 128;

/// Maximum number of attempts to save a turn that others change concurrently.
const MAX_CONFLICT_RETRIES: usize = 8;

/// A request to lease a turn.
#[derive(Debug, Clone, Default)]
pub struct TurnLeaseRequest {
    /// Generated if `None`.
    pub turn_id: Option<String>,
    /// Channel of a new turn. Default: `public`.
    pub channel: Option<String>,
    /// Duration of the lease, from 1,000 to 86,400,000 ms. Default: 300,000 ms.
    pub lease_ms: Option<u64>,
    /// W3C `traceparent` of a new turn; derived from its id if missing or invalid.
    pub traceparent: Option<String>,
    /// W3C `tracestate` of a new turn, at most 512 printable ASCII characters.
    pub tracestate: Option<String>,
    /// Step of the parent agent that started the turn.
    pub parent_step_id: Option<String>,
    /// Id that the turn's commands pass on unchanged.
    pub context_box_id: Option<String>,
    /// Nesting depth of agents that call agents; below 20.
    pub depth: u32,
    /// Id of the request, 1 to 128 bytes. The same request again returns the same lease.
    pub request_id: Option<String>,
}

/// The result of one step call, for the agent that resumes.
#[derive(Debug, Clone)]
pub struct StepResult {
    /// Id of the call, unique within its turn.
    pub tool_call_id: String,
    /// Name of the requested tool.
    pub tool_name: String,
    /// One of the five UTP statuses.
    pub status: String,
    /// The effective value: the result card takes precedence over the definition.
    pub after_execution: AfterExecution,
    /// Id of the result card.
    pub card_id: String,
    /// Result in the card; null if there is none.
    pub result: Value,
    /// Error in the card; null if there is none.
    pub error: Value,
}

/// A turn that was resumed, or ended by its results.
#[derive(Debug, Clone)]
pub struct ResumedTurn {
    /// The turn in its new epoch.
    pub turn: Turn,
    /// Results of all steps since the last resume.
    pub results: Vec<StepResult>,
}

/// A request to resume a turn.
#[derive(Debug, Clone, Default)]
pub struct TurnResume {
    /// Epoch of the turn; the request is refused if it is not the current one.
    pub epoch: u64,
    /// Time to wait for the results, in milliseconds; the engine's limit caps it.
    pub wait_ms: u64,
    /// Id of the request, 1 to 128 bytes. The same request again returns the same results.
    pub request_id: Option<String>,
}

/// A request to finish a turn.
#[derive(Debug, Clone, Default)]
pub struct TurnFinish {
    /// Epoch of the turn; the request is refused if it is not the current one.
    pub epoch: u64,
    /// Reason for the end, published with it.
    pub reason: Option<String>,
    /// Id of the card with the turn's deliverable; must exist. `None` stores one with the reason.
    pub deliverable_card_id: Option<String>,
    /// `success`, `partial` or `failed`. Default: `success`.
    pub status: Option<ToolStatus>,
    /// Tokens that the model of the worker has used for the turn.
    pub tokens: Option<u64>,
}

/// A change that an agent requests for its running turn.
enum TurnTransition {
    RenewLease,
    Suspend,
    Finish(TurnFinish),
}

fn conflict(turn: &Turn, message: String) -> Error {
    let detail = json!({
        "agent_turn_id": turn.turn_id,
        "status": turn.status.as_str(),
        "turn_epoch": turn.epoch,
    });
    Fault::new(Code::Conflict, message).with_detail(detail).into()
}

fn too_many_conflicts() -> Error {
    Error::retry_later(Code::Overloaded, "the turn changes too fast; try again", 100)
}

fn invalid(message: impl Into<String>) -> Error {
    Error::refused(Code::ValidationError, message)
}

impl Utp {
    /// Leases a turn: a new one, one that a call handed to the agent, or one whose lease has
    /// expired. The same request again renews its lease.
    pub async fn lease_turn(
        &self,
        caller: &Caller,
        agent_id: &str,
        lease_request: TurnLeaseRequest,
    ) -> Result<Turn, Error> {
        require_agent(caller, agent_id)?;
        self.registry.agent_entry(caller, agent_id)?;
        let (now_ms, wall_ms) = (self.core.clock.now_ms(), self.core.clock.wall_ms());
        let lease_ms = lease_request.lease_ms.unwrap_or(DEFAULT_LEASE_MS);
        if !LEASE_RANGE_MS.contains(&lease_ms) {
            return Err(invalid("lease_ms must be from 1000 to 86400000 (24 h)"));
        }
        if lease_request.depth >= MAX_DEPTH {
            return Err(invalid(format!("recursion_depth_exceeded: at most {}", MAX_DEPTH - 1)));
        }
        check_lineage(&lease_request)?;
        check_request_id(lease_request.request_id.as_deref())?;
        let next_id = || match &lease_request.request_id {
            Some(request_id) => derive_turn_id(&caller.project, agent_id, request_id),
            None => self.core.id_generator.next_id("turn_", wall_ms),
        };
        let turn_id = lease_request.turn_id.clone().unwrap_or_else(next_id);
        let channel = lease_request.channel.unwrap_or_else(|| DEFAULT_CHANNEL.to_owned());
        check_tokens(&[
            ("project_id", &caller.project),
            ("agent_turn_id", &turn_id),
            ("channel_id", &channel),
        ])?;
        let existing = self.core.store.utp().turn(&caller.project, &turn_id).await;
        let existing = existing.map_err(from_store_error)?;
        let request_id = lease_request.request_id.as_deref();
        let is_repeated =
            |turn: &&Turn| turn.is_answer_to(request_id) && is_leased_by(turn, agent_id, now_ms);
        if let Some(leased) = existing.as_ref().filter(is_repeated) {
            return self.renew_lease(caller, agent_id, &turn_id, leased.epoch).await;
        }
        let request = lease_request.traceparent.as_deref().and_then(trace::normalize);
        let mut change = TurnChange::default();
        let mut turn = match existing {
            Some(existing) => {
                change.acknowledged_inbox_ids = delegated::turn_item_id(&existing);
                let leased = take_over_turn(existing, agent_id, now_ms, lease_ms)?;
                self.require_open_delegation(&leased).await?;
                leased
            }
            None => Turn {
                project: caller.project.clone(),
                agent_id: agent_id.to_owned(),
                traceparent: Some(request.unwrap_or_else(|| trace::from_seed(&turn_id))),
                tracestate: lease_request.tracestate,
                parent_step_id: lease_request.parent_step_id,
                context_box_id: lease_request.context_box_id,
                depth: lease_request.depth,
                epoch: 1,
                status: TurnStatus::Running,
                channel,
                step_id: None,
                steps: Vec::new(),
                lease_until_ms: now_ms + lease_ms,
                lease_ms,
                resume_deadline_ms: None,
                created_ms: wall_ms,
                updated_ms: wall_ms,
                reason: None,
                deliverable_card_id: None,
                delegation: None,
                last_request: None,
                version: 1,
                turn_id,
            },
        };
        turn.last_request = TurnRequest::new(lease_request.request_id, turn.epoch, Vec::new());
        self.save_and_publish_turn(turn, change, TurnEvent::default()).await
    }

    /// Returns one turn of an agent.
    pub async fn turn(
        &self,
        caller: &Caller,
        agent_id: &str,
        turn_id: &str,
    ) -> Result<Turn, Error> {
        require_agent(caller, agent_id)?;
        let found = self.core.store.utp().turn(&caller.project, turn_id).await;
        let found = found.map_err(from_store_error)?.filter(|turn| turn.agent_id == agent_id);
        found.ok_or_else(|| {
            let excerpt: String = turn_id.chars().take(80).collect();
            let message = format!("agent \"{agent_id}\" has no turn \"{excerpt}\"");
            Error::refused(Code::NotFound, message)
        })
    }

    /// Returns the calls of every step that the turn waits for, or last waited for.
    pub async fn step_calls(&self, turn: &Turn) -> Result<Vec<StepCall>, Error> {
        let mut calls = Vec::new();
        for step_id in turn.last_steps() {
            calls.extend(self.load_step_calls(turn, step_id).await?);
        }
        Ok(calls)
    }

    /// Renews the lease of a running turn.
    pub async fn renew_lease(
        &self,
        caller: &Caller,
        agent_id: &str,
        turn_id: &str,
        epoch: u64,
    ) -> Result<Turn, Error> {
        self.transition_running_turn(caller, agent_id, turn_id, epoch, TurnTransition::RenewLease)
            .await
    }

    /// Suspends a turn until the results of its calls are in.
    pub async fn suspend_turn(
        &self,
        caller: &Caller,
        agent_id: &str,
        turn_id: &str,
        epoch: u64,
    ) -> Result<Turn, Error> {
        self.transition_running_turn(caller, agent_id, turn_id, epoch, TurnTransition::Suspend)
            .await
    }

    /// Resumes a turn with the results of everything dispatched since the last resume, once all of
    /// them are in; waits for that, at most `wait_ms`. If a result terminates the turn, the turn
    /// ends instead.
    pub async fn resume_turn(
        &self,
        caller: &Caller,
        agent_id: &str,
        turn_id: &str,
        request: TurnResume,
    ) -> Result<ResumedTurn, Error> {
        let TurnResume { epoch, wait_ms, request_id } = request;
        check_request_id(request_id.as_deref())?;
        let until_ms = self.core.clock.now_ms() + wait_ms.min(self.core.limits.max_wait_ms);
        let (project, agent) = (caller.project.clone(), agent_id.to_owned());
        let mut listener = self.core.bus.listen(Topic::Inbox { project, agent });
        let (turn, calls) = loop {
            let turn = self.turn(caller, agent_id, turn_id).await?;
            if turn.epoch == epoch + 1 && turn.is_answer_to(request_id.as_deref()) {
                return self.load_resumed(turn).await;
            }
            if turn.status != TurnStatus::Suspended || turn.epoch != epoch {
                let message =
                    format!("the turn is {} in epoch {}", turn.status.as_str(), turn.epoch);
                return Err(conflict(&turn, message));
            }
            let calls = self.step_calls(&turn).await?;
            let open: Vec<&str> = calls
                .iter()
                .filter(|call| call.inbox_id.is_none())
                .map(|call| call.tool_call_id.as_str())
                .collect();
            if open.is_empty() {
                break (turn, calls);
            }
            let now_ms = self.core.clock.now_ms();
            if now_ms >= until_ms || self.core.shutdown.is_cancelled() {
                let message = format!("{} of {} calls have not ended", open.len(), calls.len());
                let detail = json!({ "waiting": open, "status": "suspended", "turn_epoch": epoch });
                return Err(Fault::new(Code::Conflict, message).with_detail(detail).into());
            }
            tokio::select! {
                () = listener.wait_for_wake() => {}
                () = self.core.clock.sleep_until(until_ms.min(now_ms + 2_000)) => {}
                () = self.core.shutdown.cancelled() => {}
            }
        };
        let results = self.load_step_results(&turn, &calls).await?;
        let ends = results.iter().find(|r| r.after_execution == AfterExecution::Terminate);
        let now_ms = self.core.clock.now_ms();
        let mut turn = bump_version(turn);
        turn.epoch += 1;
        let steps = turn.last_steps().to_vec();
        turn.last_request = TurnRequest::new(request_id, turn.epoch, steps);
        turn.steps.clear();
        turn.resume_deadline_ms = None;
        turn.lease_until_ms = now_ms + turn.lease_ms;
        turn.status = match ends {
            Some(_) => TurnStatus::Finished,
            None => TurnStatus::Running,
        };
        turn.reason = ends.map(|result| format!("terminated by {}", result.tool_name));
        let completion = ends.map(|_| task_from_results(&results));
        turn.deliverable_card_id =
            completion.as_ref().and_then(|task| task.tool_result_card_id.clone());
        if let Some(status) = completion.as_ref().and_then(|task| task.status.parse().ok()) {
            delegated::set_status(&mut turn, status);
        }
        let inbox_ids = calls.into_iter().filter_map(|call| call.inbox_id).collect();
        let change = TurnChange { acknowledged_inbox_ids: inbox_ids, ..TurnChange::default() };
        let new_card_ids = results.iter().map(|result| result.card_id.clone()).collect();
        let step = Some(StepProgress { phase: "completed", new_card_ids });
        let listener = TurnEvent { step, completion, ..TurnEvent::default() };
        let turn = self.save_and_publish_turn(turn, change, listener).await?;
        self.conclude_turn(&turn).await;
        Ok(ResumedTurn { turn, results })
    }

    /// Returns the turn and the results of its last resume again: the response was lost.
    async fn load_resumed(&self, turn: Turn) -> Result<ResumedTurn, Error> {
        let steps = turn.last_request.iter().flat_map(|request| request.steps.clone());
        let mut calls = Vec::new();
        for step_id in steps.collect::<Vec<_>>() {
            calls.extend(self.load_step_calls(&turn, &step_id).await?);
        }
        let results = self.load_step_results(&turn, &calls).await?;
        Ok(ResumedTurn { turn, results })
    }

    /// Finishes a running turn. The same request again returns the finished turn.
    pub async fn finish_turn(
        &self,
        caller: &Caller,
        agent_id: &str,
        turn_id: &str,
        mut finish: TurnFinish,
    ) -> Result<Turn, Error> {
        let epoch = finish.epoch;
        let now = self.turn(caller, agent_id, turn_id).await?;
        let is_repeated = now.status == TurnStatus::Finished
            && now.epoch == epoch
            && finish.deliverable_card_id.is_some()
            && now.deliverable_card_id == finish.deliverable_card_id;
        if is_repeated {
            return Ok(now);
        }
        // Checked in this order, so that only the agent learns which cards exist.
        let turn = self.require_running_turn(caller, agent_id, turn_id, epoch).await?;
        let status = finish.status.unwrap_or(ToolStatus::Success);
        if matches!(status, ToolStatus::Canceled | ToolStatus::Timeout) {
            return Err(invalid("status must be success, partial or failed"));
        }
        let deliverable_card_id = match &finish.deliverable_card_id {
            Some(card_id) => self.cards.card(caller, card_id).await?.card_id,
            None => self.cards.put_fallback_deliverable(&turn, finish.reason.as_deref()).await?,
        };
        finish.deliverable_card_id = Some(deliverable_card_id);
        let wish = TurnTransition::Finish(finish);
        let turn = self.transition_running_turn(caller, agent_id, turn_id, epoch, wish).await?;
        self.conclude_turn(&turn).await;
        Ok(turn)
    }

    /// Changes a turn that is running in this epoch. Retries if a concurrent change, such as a
    /// renewed lease, leaves it running.
    async fn transition_running_turn(
        &self,
        caller: &Caller,
        agent_id: &str,
        turn_id: &str,
        epoch: u64,
        wish: TurnTransition,
    ) -> Result<Turn, Error> {
        for _ in 0..MAX_CONFLICT_RETRIES {
            let mut turn = self.require_running_turn(caller, agent_id, turn_id, epoch).await?;
            let listener = self.apply_turn_transition(&mut turn, &wish).await?;
            let (turn, change) = (bump_version(turn), TurnChange::default());
            let saved = match listener {
                Some(listener) => self.save_and_publish_turn(turn, change, listener).await,
                None => self.store_turn(turn, change, &mut []).await,
            };
            match saved {
                Err(error) if error.code() == Code::Conflict => {}
                other => return other,
            }
        }
        Err(too_many_conflicts())
    }

    /// Applies the transition to a turn. Returns the event to publish, if there is one.
    async fn apply_turn_transition(
        &self,
        turn: &mut Turn,
        wish: &TurnTransition,
    ) -> Result<Option<TurnEvent>, Error> {
        match wish {
            TurnTransition::RenewLease => {
                turn.lease_until_ms = self.core.clock.now_ms() + turn.lease_ms;
                Ok(None)
            }
            TurnTransition::Suspend => {
                let calls = self.step_calls(turn).await?;
                if !calls.iter().any(|call| call.epoch == turn.epoch) {
                    let message = "no call is in flight, so there is nothing to wait for";
                    return Err(conflict(turn, message.into()));
                }
                turn.status = TurnStatus::Suspended;
                Ok(Some(TurnEvent {
                    pending_tool_call_ids: open_step_call_ids(&calls),
                    ..TurnEvent::default()
                }))
            }
            TurnTransition::Finish(finish) => {
                turn.status = TurnStatus::Finished;
                turn.reason = finish.reason.clone();
                turn.deliverable_card_id = finish.deliverable_card_id.clone();
                let status = finish.status.unwrap_or(ToolStatus::Success);
                let has_failed = status == ToolStatus::Failed;
                delegated::set_status(turn, status);
                if let Some(delegation) = &mut turn.delegation {
                    delegation.report_tokens(finish.tokens);
                }
                let task = TurnCompletion {
                    status: status.as_str().to_owned(),
                    tool_result_card_id: None,
                    error_code: has_failed.then_some("agent_failed"),
                    error: finish.reason.clone().filter(|_| has_failed),
                };
                Ok(Some(TurnEvent { completion: Some(task), ..TurnEvent::default() }))
            }
        }
    }

    /// Returns the turn if it is running in this epoch under a valid lease.
    async fn require_running_turn(
        &self,
        caller: &Caller,
        agent_id: &str,
        turn_id: &str,
        epoch: u64,
    ) -> Result<Turn, Error> {
        let turn = self.turn(caller, agent_id, turn_id).await?;
        if turn.epoch != epoch {
            let message = format!("the turn is in epoch {}, not {epoch}", turn.epoch);
            return Err(conflict(&turn, message));
        }
        if turn.status != TurnStatus::Running {
            return Err(conflict(&turn, format!("the turn is {}", turn.status.as_str())));
        }
        if turn.lease_until_ms <= self.core.clock.now_ms() {
            return Err(conflict(&turn, "the lease has run out; lease the turn again".into()));
        }
        Ok(turn)
    }
}

fn check_tokens(words: &[(&str, &String)]) -> Result<(), Error> {
    match words.iter().find(|(_, word)| !is_token(word)) {
        Some((field, _)) => Err(invalid(format!("{field} cannot be part of a NATS subject"))),
        None => Ok(()),
    }
}

/// Returns true if a worker of this agent holds the lease.
fn is_leased_by(turn: &Turn, agent_id: &str, now_ms: u64) -> bool {
    turn.agent_id == agent_id && turn.status == TurnStatus::Running && turn.lease_until_ms > now_ms
}

fn check_request_id(request_id: Option<&str>) -> Result<(), Error> {
    match request_id.is_none_or(|id| (1..=MAX_REQUEST_ID).contains(&id.len())) {
        true => Ok(()),
        false => Err(invalid(format!("request_id must be 1 to {MAX_REQUEST_ID} bytes"))),
    }
}

/// Returns the id of a turn that a request without one leases: the same request finds it again.
fn derive_turn_id(project: &str, agent_id: &str, request_id: &str) -> String {
    let seed = json!([project, agent_id, request_id]).to_string();
    format!("turn_{}", hex(&Sha256::digest(seed.as_bytes())[..16]))
}

/// Checks the lineage of a turn. Headers and NATS subjects of its commands contain the lineage, so
/// it must be valid there.
fn check_lineage(lease_request: &TurnLeaseRequest) -> Result<(), Error> {
    if lease_request.tracestate.as_deref().is_some_and(|state| !trace::is_valid_tracestate(state)) {
        return Err(invalid("tracestate must be at most 512 printable ASCII characters"));
    }
    let ids = [
        ("parent_step_id", &lease_request.parent_step_id),
        ("context_box_id", &lease_request.context_box_id),
    ];
    match ids.iter().find(|(_, id)| id.as_deref().is_some_and(|id| !is_token(id))) {
        Some((field, _)) => Err(invalid(format!("{field} cannot be part of a NATS subject"))),
        None => Ok(()),
    }
}

fn take_over_turn(
    existing: Turn,
    agent_id: &str,
    now_ms: u64,
    lease_ms: u64,
) -> Result<Turn, Error> {
    if existing.agent_id != agent_id {
        return Err(conflict(&existing, "the turn is another agent's".into()));
    }
    let lapsed = existing.status == TurnStatus::Running && existing.lease_until_ms <= now_ms;
    let is_free = matches!(existing.status, TurnStatus::Dispatched | TurnStatus::Expired);
    if !lapsed && !is_free {
        let reason = match existing.status {
            TurnStatus::Running => "it is leased",
            TurnStatus::Suspended => "it is suspended: resume it",
            _ => "it has ended",
        };
        return Err(conflict(&existing, format!("the turn cannot be leased: {reason}")));
    }
    let mut turn = bump_version(existing);
    turn.epoch += 1;
    turn.status = TurnStatus::Running;
    turn.lease_ms = lease_ms;
    turn.lease_until_ms = now_ms + lease_ms;
    turn.step_id = None;
    turn.steps.clear();
    turn.resume_deadline_ms = None;
    Ok(turn)
}

/// Derives the turn's completion from the results that terminate it: the first one that did not
/// succeed decides.
fn task_from_results(results: &[StepResult]) -> TurnCompletion {
    let ending = || results.iter().filter(|r| r.after_execution == AfterExecution::Terminate);
    let decides = ending().find(|result| result.status != "success").or_else(|| ending().next());
    let error = |name: &str| decides.and_then(|r| r.error[name].as_str()).map(str::to_owned);
    TurnCompletion {
        status: decides.map_or_else(|| "success".to_owned(), |result| result.status.clone()),
        tool_result_card_id: decides.map(|result| result.card_id.clone()),
        error_code: decides.filter(|r| r.status != "success").map(|_| "tool_failed"),
        error: error("message"),
    }
}

/// Returns the ids, unique within the turn, of the calls whose results are not in yet.
fn open_step_call_ids(calls: &[StepCall]) -> Vec<String> {
    let open = calls.iter().filter(|call| call.inbox_id.is_none());
    open.map(|call| call.tool_call_id.clone()).collect()
}

fn bump_version(turn: Turn) -> Turn {
    Turn { version: turn.version + 1, ..turn }
}

impl Utp {
    /// Saves a turn together with the events that announce it, and wakes the publisher.
    async fn save_and_publish_turn(
        &self,
        turn: Turn,
        change: TurnChange,
        listener: TurnEvent,
    ) -> Result<Turn, Error> {
        self.save_and_publish_calls(turn, change, listener, &mut []).await
    }

    /// Saves a turn with new calls, like [`Self::save_and_publish_turn`]. `charges` are those of
    /// the new calls.
    async fn save_and_publish_calls(
        &self,
        turn: Turn,
        mut change: TurnChange,
        listener: TurnEvent,
        charges: &mut [CallCharge],
    ) -> Result<Turn, Error> {
        if self.publishes_outbox {
            let turn = Turn { updated_ms: self.core.clock.wall_ms(), ..turn.clone() };
            change.outbox.extend(listener.into_messages(&turn));
        }
        let saved = self.store_turn(turn, change, charges).await?;
        if self.publishes_outbox {
            self.core.bus.wake(&Topic::Outbox);
        }
        Ok(saved)
    }

    /// Stores a turn. `charges` are those of the calls that are new in it.
    async fn store_turn(
        &self,
        mut turn: Turn,
        mut change: TurnChange,
        charges: &mut [CallCharge],
    ) -> Result<Turn, Error> {
        turn.updated_ms = self.core.clock.wall_ms();
        change.edges.extend(delegated::edge_of(&turn));
        let saved = self.core.store.utp().save_turn(turn.clone(), change).await;
        match saved.map_err(from_store_error)? {
            SaveResult::Saved => {
                if turn.delegation.is_some() {
                    self.trees.budgets.update_turn(&turn, charges);
                }
                Ok(turn)
            }
            SaveResult::Conflict => {
                let message = "another request changed the turn meanwhile; read it again";
                Err(conflict(&turn, message.to_owned()))
            }
        }
    }

    async fn load_step_calls(&self, turn: &Turn, step_id: &str) -> Result<Vec<StepCall>, Error> {
        let found = self.core.store.utp().step_calls(&turn.project, &turn.turn_id, step_id).await;
        found.map_err(from_store_error)
    }

    async fn load_step_results(
        &self,
        turn: &Turn,
        calls: &[StepCall],
    ) -> Result<Vec<StepResult>, Error> {
        let mut results = Vec::with_capacity(calls.len());
        for call in calls {
            let Some(card_id) = &call.result_card_id else { continue };
            let Some(card) = self.cards.find_card(&turn.project, card_id).await? else { continue };
            let content = |name: &str| card.content.get(name).cloned().unwrap_or(Value::Null);
            results.push(StepResult {
                tool_call_id: call.tool_call_id.clone(),
                tool_name: call.tool_name.clone(),
                status: card.content_text("status").unwrap_or_default().to_owned(),
                after_execution: card.after_execution(),
                card_id: card_id.clone(),
                result: content("result"),
                error: content("error"),
            });
        }
        Ok(results)
    }
}

impl Utp {
    /// Adds a call that the agent made by a command to its turn, which then waits for it. A new
    /// call counts against the budget of the turn.
    pub(crate) async fn add_commanded_call(
        &self,
        turn: Turn,
        step_call: &StepCall,
        deadline_ms: u64,
        mut new: CommandedCall,
    ) -> Result<(), Error> {
        let (project, turn_id) = (turn.project.clone(), turn.turn_id.clone());
        let mut current = turn;
        for _ in 0..MAX_CONFLICT_RETRIES {
            let mut next = bump_version(current);
            if !next.steps.contains(&step_call.step_id) {
                next.steps.push(step_call.step_id.clone());
            }
            if let Some(delegation) = next.delegation.as_mut().filter(|_| new.is_new) {
                delegation.used_calls += 1;
            }
            next.step_id = Some(step_call.step_id.clone());
            next.resume_deadline_ms = next.resume_deadline_ms.max(Some(deadline_ms));
            let change =
                TurnChange { step_calls: vec![step_call.clone()], ..TurnChange::default() };
            match self.store_turn(next, change, new.charge.as_mut_slice()).await {
                Err(error) if error.code() == Code::Conflict => {}
                other => return other.map(drop),
            }
            let stored = self.core.store.utp().turn(&project, &turn_id).await;
            match stored.map_err(from_store_error)? {
                Some(stored) if stored.epoch == step_call.epoch => current = stored,
                // The agent no longer waits for calls of this epoch.
                _ => return Ok(()),
            }
        }
        Err(too_many_conflicts())
    }
}
