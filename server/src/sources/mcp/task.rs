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
use toolcrib::Progress;
use toolcrib::dialogue::Questions;
use toolcrib::fault::{Code, Fault};
use toolcrib::source::Started;

use super::call::{Note, Try};
use super::outcome;
use super::upstream::Live;

/// Bounds and default of the polling interval in milliseconds, whatever the upstream asks for.
const SOONEST: u64 = 50;
const LATEST: u64 = 30_000;
const USUAL: u64 = 1_000;

/// Delay before an unavailable upstream is tried again.
const AWAY: Duration = Duration::from_millis(500);

impl Try {
    /// Detaches the attempt as a task. The engine stores the handle before it awaits the rest.
    pub(super) fn goes_on(self, task: String, live: Option<Arc<Live>>) -> Started {
        let handle = task.clone();
        Started::GoesOn { handle, rest: self.followed(task, live).boxed() }
    }

    /// Resumes a task that another process started.
    pub(super) async fn follow(self, task: String) -> Started {
        self.followed(task, None).await
    }

    /// Sends the answers to a task, then follows it.
    pub(super) async fn tell_task(self, task: String) -> Started {
        let answers = self.attempt.dialogue.as_ref().map(|dialogue| dialogue.answers.clone());
        let answers = answers.unwrap_or_default().into_iter().collect();
        let deadline_ms = self.attempt.deadline_ms;
        let live = match self.upstream.live(deadline_ms, &self.running.token).await {
            Ok(live) => live,
            Err(fault) => return Started::Done(Err(fault)),
        };
        let told = live.peer.update_task(UpdateTaskParams::new(task.clone(), answers)).await;
        if let Err(error) = told {
            // Answering twice is harmless: a question that has been answered is not pending any
            // more.
            let fault = outcome::of_error(&self.upstream, &self.attempt, &error, None);
            let fault = Fault { code: Code::UpstreamUnavailable, ..fault }.not_happened();
            return Started::Done(Err(fault.retryable(true)));
        }
        self.goes_on(task, Some(live))
    }

    async fn followed(self, task: String, mut live: Option<Arc<Live>>) -> Started {
        let token = self.running.token.clone();
        loop {
            let connected = match live.take().filter(|live| !live.peer.is_transport_closed()) {
                Some(live) => live,
                None => match self.upstream.live(self.attempt.deadline_ms, &token).await {
                    Ok(live) => live,
                    Err(fault) if token.is_cancelled() => return Started::Done(Err(fault)),
                    // The task exists as long as the upstream keeps it: only the deadline ends the
                    // wait.
                    Err(_) => {
                        tokio::select! {
                            () = tokio::time::sleep(AWAY) => continue,
                            () = token.cancelled() => return canceled(),
                        }
                    }
                },
            };
            let asked = tokio::select! {
                asked = connected.peer.get_task(GetTaskParams::new(task.clone())) => asked,
                () = token.cancelled() => return self.give_up(&connected, task).await,
            };
            let wait = match asked {
                Ok(found) => match self.seen(&task, found.task) {
                    Ok(wait) => wait,
                    Err(end) => return end,
                },
                Err(ServiceError::McpError(error)) if is_final(error.code) => {
                    let message = format!(
                        "{} does not know its task any more ({}): what became of it is unknown",
                        self.upstream.settings.name,
                        self.upstream.clean(&error.message)
                    );
                    return Started::Done(Err(Fault::new(Code::OutcomeUnknown, message)));
                }
                Err(_) => AWAY,
            };
            live = Some(connected.clone());
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                () = token.cancelled() => return self.give_up(&connected, task).await,
            }
        }
    }

    /// Evaluates a task's state. Returns the delay before the next poll, or the outcome.
    fn seen(&self, task: &str, found: DetailedTask) -> Result<Duration, Started> {
        let wait = found.task.poll_interval_ms.unwrap_or(USUAL).clamp(SOONEST, LATEST);
        match found.payload {
            TaskPayload::Working => {
                if let Some(message) = found.task.status_message {
                    self.report(message);
                }
                Ok(Duration::from_millis(wait))
            }
            TaskPayload::InputRequired { input_requests } => {
                let asked = input_requests
                    .into_iter()
                    .filter_map(|(key, request)| Some((key, serde_json::to_value(request).ok()?)));
                let note = Note { task: Some(task.to_owned()), ..Note::default() }.text();
                Err(Started::Asks(Questions { asked: asked.collect(), note }))
            }
            TaskPayload::Completed { result } => {
                let read = serde_json::from_value::<CallToolResult>(Value::Object(result));
                let done = match read {
                    Ok(result) => outcome::of_result(&self.attempt, result),
                    Err(_) => {
                        let name = &self.upstream.settings.name;
                        let message = format!("the task of {name} ended with what is no result");
                        Err(outcome::garbled(&self.attempt, message))
                    }
                };
                Err(Started::Done(done))
            }
            TaskPayload::Failed { error } => {
                let said =
                    error.get("message").and_then(Value::as_str).unwrap_or("no reason given");
                let said: String = said.chars().take(2_000).collect();
                Err(Started::Done(Err(Fault::runtime(said))))
            }
            TaskPayload::Cancelled => {
                let name = &self.upstream.settings.name;
                let message = format!("{name} canceled its task by itself");
                Err(Started::Done(Err(Fault::runtime(message).retryable(false))))
            }
            _ => Ok(Duration::from_millis(wait)),
        }
    }

    /// Reports progress, once for each new message.
    fn report(&self, message: String) {
        let mut last = self.running.said.lock();
        if *last != message {
            last.clone_from(&message);
            (self.progress)(Progress { message: Some(message), ..Progress::default() });
        }
    }

    async fn give_up(&self, live: &Arc<Live>, task: String) -> Started {
        let telling = live.peer.cancel_task(CancelTaskParams::new(task));
        let _ = tokio::time::timeout(super::TELLING, telling).await;
        canceled()
    }
}

fn canceled() -> Started {
    Started::Done(Err(Fault::new(Code::Canceled, "canceled")))
}

fn is_final(code: ErrorCode) -> bool {
    code == ErrorCode::INVALID_PARAMS
        || code == ErrorCode::METHOD_NOT_FOUND
        || code == ErrorCode::RESOURCE_NOT_FOUND
}
