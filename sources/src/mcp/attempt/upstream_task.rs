//! Follows tasks of upstreams to their end, also in another process than the one that started them.

use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use rmcp::ServiceError;
use rmcp::model::{
    CallToolResult, CancelTaskParams, DetailedTask, ErrorCode, GetTaskParams, TaskPayload,
    UpdateTaskParams,
};
use serde_json::Value;
use toolcrib::AttemptProgress;
use toolcrib::domain::call::elicitation::ElicitationRequest;
use toolcrib::domain::fault::{Code, Fault};
use toolcrib::ports::source::StartResult;

use super::{McpResumeState, UpstreamAttempt, outcome};
use crate::mcp::connection::LiveConnection;
use crate::mcp::connection::log_owner::UpstreamTaskGuard;
use crate::mcp::upstream::in_flight::CANCEL_TIMEOUT;

/// Bounds and default of the polling interval in milliseconds, regardless of the upstream's
/// request.
const MIN_POLL_MS: u64 = 50;
const MAX_POLL_MS: u64 = 30_000;
const DEFAULT_POLL_MS: u64 = 1_000;

/// Delay before an unavailable upstream is tried again.
const UNAVAILABLE_RETRY_DELAY: Duration = Duration::from_millis(500);

impl UpstreamAttempt {
    /// Detaches the attempt as a task. The engine stores the handle before it awaits the rest.
    pub(super) fn detach_as_task(
        self,
        task: String,
        live: Option<Arc<LiveConnection>>,
    ) -> StartResult {
        let handle = task.clone();
        let counted = live.as_ref().map(|live| live.handler.begin_task());
        StartResult::Detached { handle, rest: self.poll_task(task, live, counted).boxed() }
    }

    /// Resumes a task that another process started.
    pub(super) async fn resume_task(self, task: String) -> StartResult {
        self.poll_task(task, None, None).await
    }

    /// Sends the answers to a task, then follows it.
    pub(super) async fn answer_task(self, task: String) -> StartResult {
        let answers =
            self.attempt.elicitation.as_ref().map(|elicitation| elicitation.answers.clone());
        let answers = answers.unwrap_or_default().into_iter().collect();
        let deadline_ms = self.attempt.deadline_ms;
        let live = match self.upstream.wait_connected(deadline_ms, &self.running.token).await {
            Ok(live) => live,
            Err(fault) => return StartResult::Finished(Err(fault)),
        };
        let mut counted = live.handler.begin_task();
        let sent = live.peer.update_task(UpdateTaskParams::new(task.clone(), answers)).await;
        if let Err(error) = sent {
            // Answering twice is harmless: a question that has been answered is not pending any
            // more.
            let fault = outcome::fault_from_error(&self.upstream, &self.attempt, &error, None);
            let fault = Fault { code: Code::UpstreamUnavailable, ..fault }.without_side_effect();
            return StartResult::Finished(Err(fault.retryable(true)));
        }
        let detached = self.detach_as_task(task, Some(live));
        // The poll counts the task from here on.
        counted.mark_ended();
        detached
    }

    /// Polls a task until it ends or requests input. `counted` counts it at its connection.
    async fn poll_task(
        self,
        task: String,
        mut live: Option<Arc<LiveConnection>>,
        mut counted: Option<UpstreamTaskGuard>,
    ) -> StartResult {
        let token = self.running.token.clone();
        loop {
            let connected = match live.take().filter(|live| !live.peer.is_transport_closed()) {
                Some(live) => live,
                None => {
                    match self.upstream.wait_connected(self.attempt.deadline_ms, &token).await {
                        Ok(live) => {
                            counted = Some(live.handler.begin_task());
                            live
                        }
                        Err(fault) if token.is_cancelled() => {
                            return StartResult::Finished(Err(fault));
                        }
                        // The task exists as long as the upstream keeps it: only the deadline ends
                        // the wait.
                        Err(_) => {
                            tokio::select! {
                                () = tokio::time::sleep(UNAVAILABLE_RETRY_DELAY) => continue,
                                () = token.cancelled() => return canceled(),
                            }
                        }
                    }
                }
            };
            let response = tokio::select! {
                response = connected.peer.get_task(GetTaskParams::new(task.clone())) => response,
                () = token.cancelled() => return self.cancel_task(&connected, task).await,
            };
            let wait = match response {
                Ok(found) => match self.evaluate_task(&task, found.task) {
                    Ok(wait) => wait,
                    Err(end) => {
                        if let Some(counted) = &mut counted {
                            counted.mark_ended();
                        }
                        return end;
                    }
                },
                Err(ServiceError::McpError(error)) if is_task_lost(error.code) => {
                    let message = format!(
                        "{} no longer knows its task ({}): the outcome is unknown",
                        self.upstream.settings.name,
                        self.upstream.redact(&error.message)
                    );
                    return StartResult::Finished(Err(Fault::new(Code::OutcomeUnknown, message)));
                }
                Err(_) => UNAVAILABLE_RETRY_DELAY,
            };
            live = Some(connected.clone());
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                () = token.cancelled() => return self.cancel_task(&connected, task).await,
            }
        }
    }

    /// Evaluates a task's state. Returns the delay before the next poll, or the outcome.
    fn evaluate_task(&self, task: &str, found: DetailedTask) -> Result<Duration, StartResult> {
        let wait =
            found.task.poll_interval_ms.unwrap_or(DEFAULT_POLL_MS).clamp(MIN_POLL_MS, MAX_POLL_MS);
        match found.payload {
            TaskPayload::Working => {
                if let Some(message) = found.task.status_message {
                    self.report(message);
                }
                Ok(Duration::from_millis(wait))
            }
            TaskPayload::InputRequired { input_requests } => {
                let questions = input_requests
                    .into_iter()
                    .filter_map(|(key, request)| Some((key, serde_json::to_value(request).ok()?)));
                let note =
                    McpResumeState { task: Some(task.to_owned()), ..McpResumeState::default() }
                        .text();
                Err(StartResult::NeedsInput(ElicitationRequest {
                    questions: questions.collect(),
                    source_state: note,
                }))
            }
            TaskPayload::Completed { result } => {
                let read = serde_json::from_value::<CallToolResult>(Value::Object(result));
                let done = match read {
                    Ok(result) => outcome::outcome_from_result(&self.attempt, result),
                    Err(_) => {
                        let name = &self.upstream.settings.name;
                        let message = format!("the task of {name} ended with an invalid result");
                        Err(outcome::malformed_answer_fault(&self.attempt, message))
                    }
                };
                Err(StartResult::Finished(done))
            }
            TaskPayload::Failed { error } => {
                let description =
                    error.get("message").and_then(Value::as_str).unwrap_or("no reason given");
                let description: String = description.chars().take(2_000).collect();
                Err(StartResult::Finished(Err(Fault::runtime(description))))
            }
            TaskPayload::Cancelled => {
                let name = &self.upstream.settings.name;
                let message = format!("{name} canceled its task by itself");
                Err(StartResult::Finished(Err(Fault::runtime(message).retryable(false))))
            }
            _ => Ok(Duration::from_millis(wait)),
        }
    }

    /// Reports progress, once for each new message.
    fn report(&self, message: String) {
        let mut last = self.running.last_message.lock();
        if *last != message {
            last.clone_from(&message);
            (self.progress)(AttemptProgress {
                message: Some(message),
                ..AttemptProgress::default()
            });
        }
    }

    async fn cancel_task(&self, live: &Arc<LiveConnection>, task: String) -> StartResult {
        let telling = live.peer.cancel_task(CancelTaskParams::new(task));
        let _ = tokio::time::timeout(CANCEL_TIMEOUT, telling).await;
        canceled()
    }
}

fn canceled() -> StartResult {
    StartResult::Finished(Err(Fault::new(Code::Canceled, "canceled")))
}

fn is_task_lost(code: ErrorCode) -> bool {
    code == ErrorCode::INVALID_PARAMS
        || code == ErrorCode::METHOD_NOT_FOUND
        || code == ErrorCode::RESOURCE_NOT_FOUND
}
