//! UTP turns: an agent leases a turn, dispatches the calls of a step, is suspended until all
//! results are in, is woken, and resumes with the results. Every new lease, resume, stop and expiry
//! starts a new epoch, and requests for an older epoch are refused.

mod dispatch;
mod refused;
mod stop;

use serde_json::{Value, json};

use super::{Engine, Inner, unavailable};
use crate::bus::Topic;
use crate::caller::Caller;
use crate::fault::{Code, Error, Fault};
use crate::store::Saved;
use crate::store::utp::TurnChange;
use crate::utp::news::{News, Step, Task};
use crate::utp::{
    AfterExecution, DEFAULT_CHANNEL, MAX_DEPTH, Turn, TurnStatus, Waiting, is_token, trace,
};

pub use dispatch::{Dispatch, Dispatched, StepCall};

/// Default duration of a lease.
const LEASE_MS: u64 = 300_000;
const LEASE_RANGE_MS: std::ops::RangeInclusive<u64> = 1_000..=86_400_000;

/// Maximum number of attempts to save a turn that others change concurrently.
const TRIES: usize = 8;

/// A request to lease a turn.
#[derive(Debug, Clone, Default)]
pub struct Lease {
    /// Generated if `None`.
    pub turn_id: Option<String>,
    pub channel: Option<String>,
    pub lease_ms: Option<u64>,
    pub traceparent: Option<String>,
    pub tracestate: Option<String>,
    pub parent_step_id: Option<String>,
    pub context_box_id: Option<String>,
    pub depth: u32,
}

/// The result of one step call, for the agent that resumes.
#[derive(Debug, Clone)]
pub struct StepResult {
    pub tool_call_id: String,
    pub tool_name: String,
    /// One of the five UTP statuses.
    pub status: String,
    /// The effective value: the result card takes precedence over the definition.
    pub after_execution: AfterExecution,
    pub card_id: String,
    pub result: Value,
    pub error: Value,
}

/// A turn that was resumed, or ended by its results.
#[derive(Debug, Clone)]
pub struct Resumed {
    pub turn: Turn,
    pub results: Vec<StepResult>,
}

/// A change that an agent requests for its running turn.
enum Wish {
    Renew,
    Suspend,
    Finish(Option<String>),
}

fn conflict(turn: &Turn, message: String) -> Error {
    let detail = json!({
        "agent_turn_id": turn.turn_id,
        "status": turn.status.as_str(),
        "turn_epoch": turn.epoch,
    });
    Fault::new(Code::Conflict, message).with_detail(detail).into()
}

fn too_fast() -> Error {
    Error::later(Code::Overloaded, "the turn changes too fast; try again", 100)
}

fn invalid(message: impl Into<String>) -> Error {
    Error::refused(Code::ValidationError, message)
}

impl Engine {
    /// Leases a turn: a new one, or one whose lease has expired.
    pub async fn lease(
        &self,
        caller: &Caller,
        agent_id: &str,
        wanted: Lease,
    ) -> Result<Turn, Error> {
        self.require_agent(caller, agent_id)?;
        self.member(caller, agent_id)?;
        let inner = &self.inner;
        let now_ms = inner.clock.now_ms();
        let lease_ms = wanted.lease_ms.unwrap_or(LEASE_MS);
        if !LEASE_RANGE_MS.contains(&lease_ms) {
            return Err(invalid("lease_ms must be from 1000 to 86400000 (24 h)"));
        }
        if wanted.depth >= MAX_DEPTH {
            return Err(invalid(format!("recursion_depth_exceeded: at most {}", MAX_DEPTH - 1)));
        }
        check_lineage(&wanted)?;
        let turn_id = wanted.turn_id.unwrap_or_else(|| inner.minter.text("turn_", now_ms));
        let channel = wanted.channel.unwrap_or_else(|| DEFAULT_CHANNEL.to_owned());
        let words = [
            ("project_id", &caller.project),
            ("agent_turn_id", &turn_id),
            ("channel_id", &channel),
        ];
        for (field, word) in words {
            if !is_token(word) {
                return Err(invalid(format!("{field} cannot be part of a NATS subject")));
            }
        }
        let known = inner.store.utp().turn(&caller.project, &turn_id).await;
        let asked = wanted.traceparent.as_deref().and_then(trace::normal);
        let turn = match known.map_err(unavailable)? {
            Some(known) => taken_over(known, agent_id, now_ms, lease_ms)?,
            None => Turn {
                project: caller.project.clone(),
                agent_id: agent_id.to_owned(),
                traceparent: Some(asked.unwrap_or_else(|| trace::from_seed(&turn_id))),
                tracestate: wanted.tracestate,
                parent_step_id: wanted.parent_step_id,
                context_box_id: wanted.context_box_id,
                depth: wanted.depth,
                epoch: 1,
                status: TurnStatus::Running,
                channel,
                step_id: None,
                steps: Vec::new(),
                lease_until_ms: now_ms + lease_ms,
                lease_ms,
                resume_deadline_ms: None,
                created_ms: now_ms,
                updated_ms: now_ms,
                reason: None,
                version: 1,
                turn_id,
            },
        };
        inner.save_turn(turn, TurnChange::default(), News::default()).await
    }

    /// Returns one turn of an agent.
    pub async fn turn(
        &self,
        caller: &Caller,
        agent_id: &str,
        turn_id: &str,
    ) -> Result<Turn, Error> {
        self.require_agent(caller, agent_id)?;
        let found = self.inner.store.utp().turn(&caller.project, turn_id).await;
        let found = found.map_err(unavailable)?.filter(|turn| turn.agent_id == agent_id);
        found.ok_or_else(|| {
            let shown: String = turn_id.chars().take(80).collect();
            let message = format!("agent \"{agent_id}\" has no turn \"{shown}\"");
            Error::refused(Code::NotFound, message)
        })
    }

    /// Returns the calls of every step that the turn waits for, or last waited for.
    pub async fn step_calls(&self, turn: &Turn) -> Result<Vec<Waiting>, Error> {
        let mut calls = Vec::new();
        for step_id in turn.last_steps() {
            calls.extend(self.inner.calls_of(turn, step_id).await?);
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
        self.change_running(caller, agent_id, turn_id, epoch, Wish::Renew).await
    }

    /// Suspends a turn until the results of its calls are in.
    pub async fn suspend(
        &self,
        caller: &Caller,
        agent_id: &str,
        turn_id: &str,
        epoch: u64,
    ) -> Result<Turn, Error> {
        self.change_running(caller, agent_id, turn_id, epoch, Wish::Suspend).await
    }

    /// Resumes a turn with the results of everything dispatched since the last resume, once all of
    /// them are in; waits for that, at most `wait_ms`. If a result terminates the turn, the turn
    /// ends instead.
    pub async fn resume(
        &self,
        caller: &Caller,
        agent_id: &str,
        turn_id: &str,
        epoch: u64,
        wait_ms: u64,
    ) -> Result<Resumed, Error> {
        let inner = &self.inner;
        let until_ms = inner.clock.now_ms() + wait_ms.min(inner.limits.max_wait_ms);
        let (project, agent) = (caller.project.clone(), agent_id.to_owned());
        let mut news = inner.bus.listen(Topic::Inbox { project, agent });
        let (turn, calls) = loop {
            let turn = self.turn(caller, agent_id, turn_id).await?;
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
            let now_ms = inner.clock.now_ms();
            if now_ms >= until_ms || inner.stopping.is_cancelled() {
                let message = format!("{} of {} calls are not in", open.len(), calls.len());
                let detail = json!({ "waiting": open, "status": "suspended", "turn_epoch": epoch });
                return Err(Fault::new(Code::Conflict, message).with_detail(detail).into());
            }
            tokio::select! {
                () = news.woken() => {}
                () = inner.clock.sleep_until(until_ms.min(now_ms + 2_000)) => {}
                () = inner.stopping.cancelled() => {}
            }
        };
        let results = inner.results(&turn, &calls).await?;
        let ends = results.iter().find(|r| r.after_execution == AfterExecution::Terminate);
        let now_ms = inner.clock.now_ms();
        let mut turn = next(turn);
        turn.epoch += 1;
        turn.steps.clear();
        turn.resume_deadline_ms = None;
        turn.lease_until_ms = now_ms + turn.lease_ms;
        turn.status = match ends {
            Some(_) => TurnStatus::Finished,
            None => TurnStatus::Running,
        };
        turn.reason = ends.map(|result| format!("terminated by {}", result.tool_name));
        let taken = calls.into_iter().filter_map(|call| call.inbox_id).collect();
        let change = TurnChange { taken, ..TurnChange::default() };
        let new_card_ids = results.iter().map(|result| result.card_id.clone()).collect();
        let step = Some(Step { phase: "completed", new_card_ids });
        let news = News { step, task: ends.map(|_| ended_by(&results)), ..News::default() };
        let turn = inner.save_turn(turn, change, news).await?;
        Ok(Resumed { turn, results })
    }

    /// Finishes a running turn.
    pub async fn finish(
        &self,
        caller: &Caller,
        agent_id: &str,
        turn_id: &str,
        epoch: u64,
        reason: Option<String>,
    ) -> Result<Turn, Error> {
        self.change_running(caller, agent_id, turn_id, epoch, Wish::Finish(reason)).await
    }

    /// Changes a turn that is running in this epoch. Retries if a concurrent change, such as a
    /// renewed lease, leaves it running.
    async fn change_running(
        &self,
        caller: &Caller,
        agent_id: &str,
        turn_id: &str,
        epoch: u64,
        wish: Wish,
    ) -> Result<Turn, Error> {
        for _ in 0..TRIES {
            let mut turn = self.running(caller, agent_id, turn_id, epoch).await?;
            let news = self.granted(&mut turn, &wish).await?;
            let (turn, change) = (next(turn), TurnChange::default());
            let saved = match news {
                Some(news) => self.inner.save_turn(turn, change, news).await,
                None => self.inner.keep_turn(turn, change).await,
            };
            match saved {
                Err(error) if error.code() == Code::Conflict => {}
                other => return other,
            }
        }
        Err(too_fast())
    }

    /// Applies the transition to a turn. Returns the event to publish, if there is one.
    async fn granted(&self, turn: &mut Turn, wish: &Wish) -> Result<Option<News>, Error> {
        match wish {
            Wish::Renew => {
                turn.lease_until_ms = self.inner.clock.now_ms() + turn.lease_ms;
                Ok(None)
            }
            Wish::Suspend => {
                let calls = self.step_calls(turn).await?;
                if !calls.iter().any(|call| call.epoch == turn.epoch) {
                    let message = "there is nothing to wait for: no call is out";
                    return Err(conflict(turn, message.into()));
                }
                turn.status = TurnStatus::Suspended;
                Ok(Some(News { waiting: open_calls(&calls), ..News::default() }))
            }
            Wish::Finish(reason) => {
                turn.status = TurnStatus::Finished;
                turn.reason = reason.clone();
                let (tool_result_card_id, error_code, error) = (None, None, None);
                let status = "success".to_owned();
                let task = Task { status, tool_result_card_id, error_code, error };
                Ok(Some(News { task: Some(task), ..News::default() }))
            }
        }
    }

    /// Returns the turn if it is running in this epoch under a valid lease.
    async fn running(
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
        if turn.lease_until_ms <= self.inner.clock.now_ms() {
            return Err(conflict(&turn, "the lease has run out; lease the turn again".into()));
        }
        Ok(turn)
    }
}

/// Checks the lineage of a turn. It is copied into headers and commands, so it must be valid there.
fn check_lineage(wanted: &Lease) -> Result<(), Error> {
    if wanted.tracestate.as_deref().is_some_and(|state| !trace::is_state(state)) {
        return Err(invalid("tracestate must be at most 512 printable ASCII characters"));
    }
    let ids =
        [("parent_step_id", &wanted.parent_step_id), ("context_box_id", &wanted.context_box_id)];
    match ids.iter().find(|(_, id)| id.as_deref().is_some_and(|id| !is_token(id))) {
        Some((field, _)) => Err(invalid(format!("{field} cannot be part of a NATS subject"))),
        None => Ok(()),
    }
}

fn taken_over(known: Turn, agent_id: &str, now_ms: u64, lease_ms: u64) -> Result<Turn, Error> {
    if known.agent_id != agent_id {
        return Err(conflict(&known, "the turn is another agent's".into()));
    }
    let lapsed = known.status == TurnStatus::Running && known.lease_until_ms <= now_ms;
    if !lapsed && known.status != TurnStatus::Expired {
        let what = match known.status {
            TurnStatus::Running => "it is leased",
            TurnStatus::Suspended => "it is suspended: resume it",
            _ => "it has ended",
        };
        return Err(conflict(&known, format!("the turn cannot be leased: {what}")));
    }
    let mut turn = next(known);
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
fn ended_by(results: &[StepResult]) -> Task {
    let ending = || results.iter().filter(|r| r.after_execution == AfterExecution::Terminate);
    let decides = ending().find(|result| result.status != "success").or_else(|| ending().next());
    let error = |name: &str| decides.and_then(|r| r.error[name].as_str()).map(str::to_owned);
    Task {
        status: decides.map_or_else(|| "success".to_owned(), |result| result.status.clone()),
        tool_result_card_id: decides.map(|result| result.card_id.clone()),
        error_code: decides.filter(|r| r.status != "success").map(|_| "tool_failed"),
        error: error("message"),
    }
}

/// Returns the model's ids of the calls whose results are not in yet.
fn open_calls(calls: &[Waiting]) -> Vec<String> {
    let open = calls.iter().filter(|call| call.inbox_id.is_none());
    open.map(|call| call.tool_call_id.clone()).collect()
}

fn next(turn: Turn) -> Turn {
    Turn { version: turn.version + 1, ..turn }
}

impl Inner {
    /// Saves a turn together with the events that announce it, and wakes the publisher.
    async fn save_turn(
        &self,
        turn: Turn,
        mut change: TurnChange,
        news: News,
    ) -> Result<Turn, Error> {
        if self.publishes {
            let turn = Turn { updated_ms: self.clock.now_ms(), ..turn.clone() };
            change.letters.extend(news.letters(&turn));
        }
        let saved = self.keep_turn(turn, change).await?;
        if self.publishes {
            self.bus.wake(&Topic::Outbox);
        }
        Ok(saved)
    }

    async fn keep_turn(&self, mut turn: Turn, change: TurnChange) -> Result<Turn, Error> {
        turn.updated_ms = self.clock.now_ms();
        let saved = self.store.utp().save_turn(turn.clone(), change).await;
        match saved.map_err(unavailable)? {
            Saved::Yes => Ok(turn),
            Saved::Stale => {
                let message = "somebody else changed the turn meanwhile; look at it again";
                Err(conflict(&turn, message.to_owned()))
            }
        }
    }

    async fn calls_of(&self, turn: &Turn, step_id: &str) -> Result<Vec<Waiting>, Error> {
        let found = self.store.utp().waiting(&turn.project, &turn.turn_id, step_id).await;
        found.map_err(unavailable)
    }

    async fn results(&self, turn: &Turn, calls: &[Waiting]) -> Result<Vec<StepResult>, Error> {
        let mut results = Vec::with_capacity(calls.len());
        for call in calls {
            let Some(card_id) = &call.result_card_id else { continue };
            let Some(card) = self.find_card(&turn.project, card_id).await? else { continue };
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
