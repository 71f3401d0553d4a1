//! The durable join: makes the calls of several tasks, waits for them, and ends with the results
//! that are in.
//!
//! A join keeps no state of its own. Its tasks are calls, and its deadline counts from the start of
//! its own call; after a crash the call is delivered again, finds the calls of its tasks by
//! their idempotency keys, and waits on.

use std::sync::Arc;

use futures::StreamExt;
use futures::future::join_all;
use futures::stream::FuturesUnordered;
use serde_json::{Map, Value, json};
use tokio_util::sync::CancellationToken;

use super::definitions::{ForkJoinArgs, JoinMode, TargetStrategy};
use super::{DelegatedTask, Delegation, into_fault};
use crate::calls::{Ticket, Until};
use crate::domain::call::{Call, Status};
use crate::domain::fault::{Code, Error, Fault, SideEffect};
use crate::domain::json::Json;
use crate::domain::utp::ToolStatus;
use crate::domain::utp::delegation::{MAX_JOIN_TASKS, join_ms};
use crate::lifecycle::{Event, RemoteOutcome, split_warning};

/// Time that a task has after the deadline of its join, so that the join ends first.
const TASK_GRACE_MS: u64 = 2_000;
/// Time before the deadline of its own call at which a join ends.
const CALL_MARGIN_MS: u64 = 500;
/// Delay before the next attempt to start a task for which the server had no capacity.
const CAPACITY_RETRY_MS: u64 = 200;

/// The tasks of a join and the condition that ends it.
pub(super) struct Join {
    pub(super) tasks: Vec<DelegatedTask>,
    pub(super) mode: JoinMode,
    pub(super) is_fail_fast: bool,
    /// In Unix milliseconds.
    pub(super) deadline_ms: u64,
    /// Time for all tasks. Always the same for a call, also after a restart.
    pub(super) duration_ms: u64,
    /// True if the result of the only task is the result of the join.
    pub(super) is_question: bool,
}

/// Returns the time from which the deadline of a join counts: the start of its call, which may have
/// waited for an approval before.
pub(super) fn began_ms(call: &Call) -> u64 {
    call.started_ms.unwrap_or(call.created_ms)
}

/// The state of one task.
enum TaskState {
    Waiting(Ticket),
    Ended(Arc<Call>),
    /// No call was made.
    Refused(Fault),
    /// A call was made, and its outcome could not be read.
    Unknown(Ticket, Fault),
}

/// The reason why a join ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum JoinEnd {
    Complete,
    FirstFailure,
    Deadline,
}

impl Delegation {
    /// Builds the join of a `fork_join` call. Refuses it as a whole if one task cannot be given.
    pub(super) async fn build_fork(&self, call: &Call, args: ForkJoinArgs) -> Result<Join, Fault> {
        let count = args.tasks.len();
        if count > MAX_JOIN_TASKS {
            let message = format!(
                "fork_join has {count} tasks, at most {MAX_JOIN_TASKS}: split them into smaller \
                 batches"
            );
            return Err(Fault::new(Code::ValidationError, message).without_side_effect());
        }
        let mut tasks: Vec<DelegatedTask> = Vec::with_capacity(count);
        let mut reused: Vec<String> = Vec::new();
        for (index, task) in args.tasks.into_iter().enumerate() {
            if task.target_strategy == TargetStrategy::Reuse {
                if reused.contains(&task.target_ref) {
                    let message = format!(
                        "tasks {index} reuses agent \"{}\" a second time; use clone or new",
                        task.target_ref
                    );
                    return Err(Fault::new(Code::ValidationError, message).without_side_effect());
                }
                reused.push(task.target_ref.clone());
            }
            tasks.push(self.resolve_task(call, index, task).await?);
        }
        Ok(Join {
            tasks,
            mode: args.join,
            is_fail_fast: args.fail_fast,
            deadline_ms: began_ms(call) + join_ms(args.deadline_seconds),
            duration_ms: join_ms(args.deadline_seconds),
            is_question: false,
        })
    }

    /// Executes a join to its end, and reports the outcome to its call. Ends early, without a
    /// report, if the call has ended or the engine shuts down.
    pub(super) async fn run_join(
        &self,
        call: Arc<Call>,
        mut join: Join,
        canceled: CancellationToken,
    ) {
        // Never before the creation of the call, even if the clock was set back.
        let latest_ms = call.deadline_ms.saturating_sub(CALL_MARGIN_MS).max(call.created_ms);
        join.deadline_ms = join.deadline_ms.min(latest_ms);
        for task in &mut join.tasks {
            task.timeout_ms = Some(join.duration_ms + TASK_GRACE_MS);
        }
        let deadline_ms = join.deadline_ms;
        let starting =
            join.tasks.iter().map(|task| self.start_task(&call, task, deadline_ms, &canceled));
        let mut states = join_all(starting).await;
        let Some(end) = self.wait_for_tasks(&call, &join, &mut states, &canceled).await else {
            if canceled.is_cancelled() {
                self.cancel_tasks(&call, &states, "the call that joins it has ended").await;
            }
            return;
        };
        let reason = match end {
            JoinEnd::Deadline => "the deadline of the join passed",
            JoinEnd::FirstFailure => "another task of the join failed",
            JoinEnd::Complete => "another task of the join has the result",
        };
        self.cancel_tasks(&call, &states, reason).await;
        let event = match join.is_question {
            true => question_event(&call, &join, &states),
            false => self.fork_event(&call, &join, &states, end),
        };
        self.dispatcher.advance_with_retry(&call.project, &call.id, event).await;
    }

    /// Makes the call of a task. Waits if the server has no capacity for it, also because it is
    /// shutting down: then the next process makes the call.
    async fn start_task(
        &self,
        call: &Call,
        task: &DelegatedTask,
        deadline_ms: u64,
        canceled: &CancellationToken,
    ) -> TaskState {
        loop {
            let error = match self.invoke_agent(call, task).await {
                Ok(ticket) => return TaskState::Waiting(ticket),
                Err(error) => error,
            };
            let is_full = matches!(error.code(), Code::Overloaded | Code::RateLimited);
            let is_late = deadline_ms <= self.core.wall_ms();
            if !is_full || is_late {
                return TaskState::Refused(into_fault(error));
            }
            let until_ms = self.core.clock.now_ms() + CAPACITY_RETRY_MS;
            tokio::select! {
                () = self.core.clock.sleep_until(until_ms) => {}
                () = canceled.cancelled() => return TaskState::Refused(into_fault(error)),
                () = self.core.shutdown.cancelled() => {
                    return TaskState::Refused(into_fault(error));
                }
            }
        }
    }

    /// Waits until the join ends. Returns `None` if it is canceled or the engine shuts down.
    async fn wait_for_tasks(
        &self,
        call: &Call,
        join: &Join,
        states: &mut [TaskState],
        canceled: &CancellationToken,
    ) -> Option<JoinEnd> {
        let caller = call.caller();
        let waiting = states.iter().enumerate().filter_map(|(index, state)| match state {
            TaskState::Waiting(ticket) => Some((index, ticket.clone())),
            TaskState::Ended(_) | TaskState::Refused(_) | TaskState::Unknown(..) => None,
        });
        let waiting: Vec<(usize, Ticket)> = waiting.collect();
        let caller = &caller;
        let mut waiting: FuturesUnordered<_> = waiting
            .into_iter()
            .map(|(index, ticket)| async move {
                (index, self.calls.wait(caller, &ticket, Until::Ended).await)
            })
            .collect();
        let remaining_ms = join.deadline_ms.saturating_sub(self.core.clock.wall_ms());
        let mut deadline =
            std::pin::pin!(self.core.clock.sleep_until(self.core.clock.now_ms() + remaining_ms));
        loop {
            if self.core.shutdown.is_cancelled() {
                return None;
            }
            if let Some(end) = join.find_end(states) {
                return Some(end);
            }
            tokio::select! {
                Some((index, ended)) = waiting.next() => match ended {
                    Ok(ended) => states[index] = TaskState::Ended(ended),
                    // The engine shuts down; the next process continues the wait.
                    Err(Error::Refused { fault, .. }) if fault.code == Code::Overloaded => {
                        return None;
                    }
                    Err(error) => states[index].lose(into_fault(error)),
                },
                () = &mut deadline => return Some(JoinEnd::Deadline),
                () = canceled.cancelled() => return None,
                () = self.core.shutdown.cancelled() => return None,
            }
        }
    }

    /// Cancels the calls of the tasks that have not ended.
    async fn cancel_tasks(&self, call: &Call, states: &[TaskState], reason: &str) {
        let caller = call.caller();
        let open = states.iter().filter_map(|state| match state {
            TaskState::Waiting(ticket) | TaskState::Unknown(ticket, _) => Some(&ticket.call.id),
            TaskState::Ended(_) | TaskState::Refused(_) => None,
        });
        let canceling = open.map(|id| self.calls.cancel(&caller, id, Some(reason.to_owned())));
        for canceled in join_all(canceling).await {
            if let Err(error) = canceled {
                tracing::debug!(%error, "task not canceled");
            }
        }
    }

    /// Builds the outcome of a fork.
    fn fork_event(&self, call: &Call, join: &Join, states: &[TaskState], end: JoinEnd) -> Event {
        let budget = self.core.limits.max_result_bytes / (join.tasks.len() + 1);
        let results: Vec<Value> = join
            .tasks
            .iter()
            .zip(states)
            .map(|(task, state)| describe_task(task, state, end, budget))
            .collect();
        let count = states.iter().filter(|state| state.has_succeeded()).count();
        let (attempt, by) = (call.attempt, "sys.pmo".to_owned());
        let is_complete = count == states.len() || join.mode == JoinMode::Any && count > 0;
        let status = match (is_complete, count, end) {
            (true, ..) => ToolStatus::Success,
            (false, _, JoinEnd::FirstFailure) => ToolStatus::Failed,
            (false, 0, JoinEnd::Deadline) => ToolStatus::Timeout,
            (false, 0, _) => ToolStatus::Failed,
            (false, ..) => ToolStatus::Partial,
        };
        let summary = json!({ "status": status.as_str(), "results": results });
        let outcome = match status {
            ToolStatus::Success => {
                let result = Ok(Json::from_value(&summary));
                return Event::Report { attempt: Some(attempt), by: Some(by), result };
            }
            ToolStatus::Partial => RemoteOutcome::Partial(Json::from_value(&summary)),
            ToolStatus::Timeout => {
                let message = "no task ended by the deadline; the tasks were canceled";
                RemoteOutcome::TimedOut(Fault::new(Code::Timeout, message).with_detail(summary))
            }
            ToolStatus::Failed | ToolStatus::Canceled => {
                let message = describe_failures(join, states, end);
                let fault = Fault::runtime(message).retryable(false).with_detail(summary);
                let result = Err(match states.iter().all(TaskState::is_harmless) {
                    true => fault.without_side_effect(),
                    false => fault,
                });
                return Event::Report { attempt: Some(attempt), by: Some(by), result };
            }
        };
        Event::RemoteOutcome { attempt, by, outcome }
    }
}

impl Join {
    /// Returns the reason to end now, if there is one.
    fn find_end(&self, states: &[TaskState]) -> Option<JoinEnd> {
        let has_failed = |state: &TaskState| !state.is_waiting() && !state.has_succeeded();
        if self.is_fail_fast && states.iter().any(has_failed) {
            return Some(JoinEnd::FirstFailure);
        }
        let is_answered = self.mode == JoinMode::Any && states.iter().any(TaskState::has_succeeded);
        let is_complete = is_answered || !states.iter().any(TaskState::is_waiting);
        is_complete.then_some(JoinEnd::Complete)
    }
}

impl TaskState {
    fn is_waiting(&self) -> bool {
        matches!(self, Self::Waiting(_))
    }

    fn has_succeeded(&self) -> bool {
        matches!(self, Self::Ended(call) if call.status == Status::Succeeded)
    }

    /// Returns true if the task certainly had no effect.
    fn is_harmless(&self) -> bool {
        match self {
            Self::Waiting(_) | Self::Unknown(..) => false,
            Self::Ended(_) => self.fault().is_some_and(|f| f.side_effect == SideEffect::None),
            Self::Refused(fault) => !fault.code.leaves_outcome_open(),
        }
    }

    /// Gives up waiting for a task whose outcome cannot be read.
    fn lose(&mut self, fault: Fault) {
        if let Self::Waiting(ticket) = self {
            let fault = Fault { side_effect: SideEffect::Possible, ..fault };
            *self = Self::Unknown(ticket.clone(), fault);
        }
    }

    fn fault(&self) -> Option<&Fault> {
        match self {
            Self::Waiting(_) => None,
            Self::Ended(call) => call.outcome.as_ref()?.error.as_ref(),
            Self::Refused(fault) | Self::Unknown(_, fault) => Some(fault),
        }
    }
}

/// Builds the outcome of a question: the answer of its only task.
fn question_event(call: &Call, join: &Join, states: &[TaskState]) -> Event {
    let agent_id = join.tasks.first().map(|task| task.agent_id.as_str()).unwrap_or_default();
    let result = match states.first() {
        Some(TaskState::Ended(task)) if task.status == Status::Succeeded => {
            let outcome = task.outcome.as_ref();
            let data = outcome.and_then(|outcome| outcome.data.as_ref());
            Ok(Json::from_value(&json!({
                "status": "success",
                "agent_id": agent_id,
                "call_id": task.id.as_str(),
                "answer": data.map_or(Value::Null, Json::to_value),
            })))
        }
        state => {
            let fault = state.and_then(TaskState::fault).cloned();
            let silent = || {
                let message = format!("agent \"{agent_id}\" did not answer in time");
                Fault::new(Code::Timeout, message)
            };
            Err(fault.unwrap_or_else(silent).retryable(false))
        }
    };
    Event::Report { attempt: Some(call.attempt), by: Some("sys.pmo".to_owned()), result }
}

/// Describes a task and its outcome. A result of more than `budget` bytes is omitted: its call has
/// it.
fn describe_task(task: &DelegatedTask, state: &TaskState, end: JoinEnd, budget: usize) -> Value {
    let mut item = Map::new();
    item.insert("task_index".into(), task.index.into());
    let status = match (state, end) {
        (TaskState::Waiting(_), JoinEnd::Deadline) => ToolStatus::Timeout,
        (TaskState::Waiting(_), _) => ToolStatus::Canceled,
        (TaskState::Ended(call), _) => ToolStatus::from_call(call).unwrap_or(ToolStatus::Failed),
        (TaskState::Refused(_) | TaskState::Unknown(..), _) => ToolStatus::Failed,
    };
    item.insert("status".into(), status.as_str().into());
    item.insert("agent_id".into(), task.agent_id.as_str().into());
    let call = match state {
        TaskState::Waiting(ticket) | TaskState::Unknown(ticket, _) => Some(&ticket.call),
        TaskState::Ended(call) => Some(call),
        TaskState::Refused(_) => None,
    };
    if let Some(call) = call {
        item.insert("call_id".into(), call.id.as_str().into());
    }
    if let TaskState::Ended(call) = state
        && let Some(data) = call.outcome.as_ref().and_then(|outcome| outcome.data.as_ref())
    {
        match data.text().len() <= budget {
            true => drop(item.insert("result".into(), data.to_value())),
            false => {
                let note = format!(
                    "{} bytes are too long to repeat here; read the result of call_id",
                    data.text().len()
                );
                item.insert("result_omitted".into(), note.into());
            }
        }
    }
    if let Some(fault) = state.fault() {
        item.insert("error".into(), fault.message.as_str().into());
        item.insert("error_code".into(), fault.code.utp_code().into());
    } else if status == ToolStatus::Timeout {
        item.insert("error".into(), "it did not end by the deadline".into());
        item.insert("error_code".into(), Code::Timeout.utp_code().into());
    }
    Value::Object(item)
}

/// Describes the failed tasks of a fork in one sentence.
fn describe_failures(join: &Join, states: &[TaskState], end: JoinEnd) -> String {
    let failed = join.tasks.iter().zip(states).filter_map(|(task, state)| {
        let fault = state.fault()?;
        let (reason, _) = split_warning(&fault.message);
        Some(format!("task {} ({}): {reason}", task.index, task.agent_id))
    });
    let failed: Vec<String> = failed.collect();
    let (count, total) = (failed.len(), states.len());
    let rest = match end {
        JoinEnd::FirstFailure => "; the other tasks were canceled",
        JoinEnd::Complete | JoinEnd::Deadline => "",
    };
    format!("{count} of {total} tasks failed: {}{rest}", failed.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_task_is_harmless_if_its_outcome_is_known() {
        for (code, expected) in
            [(Code::PermissionDenied, true), (Code::OutcomeUnknown, false), (Code::Internal, false)]
        {
            let state = TaskState::Refused(Fault::new(code, "x"));
            assert_eq!(state.is_harmless(), expected, "{code:?}");
        }
    }
}
