//! Starts an attempt at its source and handles its result.

use std::sync::Arc;

use super::{Inner, measure};
use crate::call::Call;
use crate::dialogue::Questions;
use crate::fault::{Code, Fault};
use crate::function::Progress;
use crate::lifecycle::Event;
use crate::source::{Attempt, Command, ProgressSink, Started};
use crate::tool::Executor;
use crate::utp;

impl Inner {
    /// Starts the attempt that the call's state has in flight. It runs in a separate task, and
    /// every result of that task is reported.
    pub(super) fn start_attempt(self: &Arc<Self>, call: &Arc<Call>, again: bool) {
        let mut attempt = self.attempt(call, again);
        let (inner, call) = (self.clone(), call.clone());
        self.attempts.spawn(async move {
            let executor = call.target.executor;
            let Some(source) = inner.sources.get(&executor).cloned() else {
                let message = format!("this server has no source \"{}\"", executor.as_str());
                let fault = Fault::new(Code::UpstreamUnavailable, message).not_happened();
                return Box::pin(inner.report_attempt(&call, Err(fault.retryable(false)))).await;
            };
            if matches!(executor, Executor::Utp | Executor::Http) {
                let command = match inner.command(&call).await {
                    Ok(command) => inner.shown(&call, command).await,
                    Err(fault) => Err(fault),
                };
                attempt.command = match command {
                    Ok(command) => Some(Box::new(command)),
                    Err(fault) => return Box::pin(inner.report_attempt(&call, Err(fault))).await,
                };
            }
            let sink = inner.progress_sink(&call);
            // Boxed to keep this future small: most attempts of remote sources end at `Accepted`,
            // and their results arrive on another path.
            match source.start(attempt, sink).await {
                Started::Parked => {
                    measure::parked(executor);
                    // The call may have ended before the source accepted the attempt. Nothing else
                    // would remove the attempt from the source.
                    if inner.live.get(&call.id).is_none() {
                        source.cancel(&call.id, call.attempt);
                        source.settled(&call.id, call.attempt);
                    }
                }
                started => Box::pin(inner.take_back(&call, started)).await,
            }
        });
    }

    /// Handles the result of a started attempt.
    pub(super) async fn take_back(self: &Arc<Self>, call: &Call, started: Started) {
        let executor = call.target.executor;
        match started {
            Started::Parked => measure::parked(executor),
            Started::Done(result) => {
                measure::attempted(executor, result.is_ok());
                self.report_attempt(call, result).await;
            }
            Started::Asks(questions) => self.ask(call, questions).await,
            Started::GoesOn { handle, rest } => {
                let event = Event::Handed { attempt: call.attempt, handle };
                self.advance_surely(&call.project, &call.id, event).await;
                Box::pin(self.take_back(call, rest.await)).await;
            }
        }
    }

    async fn ask(self: &Arc<Self>, call: &Call, questions: Questions) {
        if let Some(problem) = questions.problem() {
            return self.report_attempt(call, Err(Fault::runtime(problem).retryable(false))).await;
        }
        let event = Event::Ask { attempt: call.attempt, questions };
        self.advance_surely(&call.project, &call.id, event).await;
    }

    async fn report_attempt(
        self: &Arc<Self>,
        call: &Call,
        result: Result<crate::json::Json, Fault>,
    ) {
        // An attempt that was stopped because its call had ended has nothing to report.
        let stopped = matches!(&result, Err(fault) if fault.code == Code::Canceled);
        if stopped && self.live.get(&call.id).is_none() {
            return;
        }
        let result = self.checked(call, result);
        let event = Event::Report { attempt: Some(call.attempt), by: None, result };
        self.advance_surely(&call.project, &call.id, event).await;
    }

    /// Builds the command that a tool service or an HTTP API receives for the attempt in flight.
    async fn command(&self, call: &Arc<Call>) -> Result<Command, Fault> {
        let found = self.binding_of(call).await.map_err(|error| {
            let message = format!("the definition cannot be read: {error}");
            Fault::new(Code::UpstreamUnavailable, message).not_happened()
        })?;
        let Some(binding) = found else {
            let message = format!("the definition of {} is gone", call.target.tool);
            return Err(Fault::new(Code::Internal, message).not_happened().retryable(false));
        };
        let card_id = utp::card::id_of(&call.id, utp::card::TOOL_CALL);
        let handed_on = self.handed_on(call).map(|span| span.to_string());
        let traceparent = handed_on.unwrap_or_else(|| utp::trace::of_call(call));
        let (route, call) = (utp::Route::of(call), call.clone());
        Ok(Command { call, route, binding, card_id, traceparent })
    }

    fn progress_sink(self: &Arc<Self>, call: &Arc<Call>) -> ProgressSink {
        let (inner, call) = (self.clone(), call.clone());
        Arc::new(move |progress: Progress| inner.note_progress_soon(&call, progress))
    }

    pub(super) fn note_progress_soon(self: &Arc<Self>, call: &Arc<Call>, progress: Progress) {
        let (inner, call) = (self.clone(), call.clone());
        tokio::spawn(async move {
            let noted = inner.note_progress(&call.id, call.attempt, progress).await;
            if let Err(error) = noted {
                tracing::debug!(call = %call.id, %error, "progress was not stored");
            }
        });
    }
}

impl Inner {
    /// Builds the attempt that the call's state has in flight.
    pub(super) fn attempt(&self, call: &Call, again: bool) -> Attempt {
        Attempt {
            call_id: call.id.clone(),
            project: call.project.clone(),
            run_id: call.run_id.clone(),
            agent: call.asked.agent.clone(),
            number: call.attempt,
            tool: call.target.tool.clone(),
            effect: call.target.effect,
            args: call.target.args.clone(),
            deadline_ms: call.deadline_ms,
            traceparent: self.handed_on(call),
            command: None,
            client_id: call.asked.client_id.clone(),
            taken_by: call.taken_by.clone(),
            again,
            dialogue: call.dialogue.clone(),
        }
    }
}
