//! Starts an attempt at its source, with the command that a tool service or an HTTP API receives
//! for it, and handles its result.

use std::sync::Arc;

use crate::calls::Dispatcher;
use crate::domain::call::Call;
use crate::domain::call::elicitation::ElicitationRequest;
use crate::domain::fault::{Code, Fault};
use crate::domain::json::Json;
use crate::domain::tool::Executor;
use crate::domain::{derived, utp};
use crate::lifecycle::Event;
use crate::lifecycle::time_limits::connect_deadline;
use crate::ports::engine_metrics;
use crate::ports::source::{Attempt, AttemptProgress, ProgressSink, StartResult, ToolCommand};

impl Dispatcher {
    /// Starts the attempt that the call's state has in flight. It runs in a separate task, and
    /// every result of that task is reported.
    pub(crate) fn start_attempt(self: &Arc<Self>, call: &Arc<Call>, again: bool) {
        let mut attempt = self.build_attempt(call, again);
        let (dispatcher, call) = (self.clone(), call.clone());
        self.attempts.spawn(async move {
            let executor = call.target.executor;
            let Some(source) = dispatcher.sources.get(&executor).cloned() else {
                let message = format!("this server has no source \"{}\"", executor.as_str());
                let fault = Fault::new(Code::UpstreamUnavailable, message).without_side_effect();
                return Box::pin(dispatcher.report_attempt(&call, Err(fault.retryable(false))))
                    .await;
            };
            if call.target.traits.needs_command {
                let command = match dispatcher.build_command(&call).await {
                    Ok(command) => dispatcher.publish_command_card(&call, command).await,
                    Err(fault) => Err(fault),
                };
                attempt.command = match command {
                    Ok(command) => Some(Box::new(command)),
                    Err(fault) => {
                        return Box::pin(dispatcher.report_attempt(&call, Err(fault))).await;
                    }
                };
            }
            // A call that has ended meanwhile, by a cancel or a kill switch, executes nothing.
            if !dispatcher.is_attempt_in_flight(&call) {
                return;
            }
            let sink = dispatcher.progress_sink(&call);
            let mut starting = source.start(attempt, sink);
            let mut is_checked = false;
            let started = std::future::poll_fn(|context| {
                let polled = starting.as_mut().poll(context);
                // The call may have ended before the source knew the attempt: it could not be
                // canceled then.
                let is_first = !std::mem::replace(&mut is_checked, true);
                if is_first && polled.is_pending() && !dispatcher.is_attempt_in_flight(&call) {
                    source.cancel(&call.id, call.attempt);
                }
                polled
            });
            let started = started.await;
            // Boxed to keep this future small: most attempts of remote sources end at `Accepted`,
            // and their results arrive on another path.
            match started {
                StartResult::Accepted => {
                    engine_metrics::count_parked(executor);
                    // The call may have ended before the source accepted the attempt. Nothing else
                    // would remove the attempt from the source.
                    if dispatcher.open_calls.get(&call.id).is_none() {
                        source.cancel(&call.id, call.attempt);
                        source.release_attempt(&call.id, call.attempt);
                    }
                }
                started => Box::pin(dispatcher.handle_started(&call, started)).await,
            }
        });
    }

    /// Returns true if the attempt that is in flight in this state of a call is still in flight.
    fn is_attempt_in_flight(&self, call: &Call) -> bool {
        let open = self.open_calls.get(&call.id).map(|entry| entry.call());
        open.is_some_and(|now| now.has_attempt_in_flight() && now.attempt == call.attempt)
    }

    /// Handles the result of a started attempt.
    pub(crate) async fn handle_started(self: &Arc<Self>, call: &Call, started: StartResult) {
        let executor = call.target.executor;
        match started {
            StartResult::Accepted => engine_metrics::count_parked(executor),
            StartResult::Finished(result) => {
                engine_metrics::count_attempt(executor, result.is_ok());
                self.report_attempt(call, result).await;
            }
            StartResult::NeedsInput(questions) => self.request_input(call, questions).await,
            StartResult::Detached { handle, rest } => {
                let event = Event::Detached { attempt: call.attempt, handle };
                self.advance_with_retry(&call.project, &call.id, event).await;
                Box::pin(self.handle_started(call, rest.await)).await;
            }
        }
    }

    async fn request_input(self: &Arc<Self>, call: &Call, questions: ElicitationRequest) {
        if let Some(problem) = questions.find_problem() {
            return self.report_attempt(call, Err(Fault::runtime(problem).retryable(false))).await;
        }
        let event = Event::InputRequired { attempt: call.attempt, questions };
        self.advance_with_retry(&call.project, &call.id, event).await;
    }

    async fn report_attempt(self: &Arc<Self>, call: &Call, result: Result<Json, Fault>) {
        // An attempt that was stopped has nothing to report: its call or its time limit has ended.
        let was_canceled = matches!(&result, Err(fault) if fault.code == Code::Canceled);
        if was_canceled && !self.is_attempt_in_flight(call) {
            return;
        }
        self.prepare_output_schema(call).await;
        let result = self.validate_result(call, result);
        let event = Event::Report { attempt: Some(call.attempt), by: None, result };
        self.advance_with_retry(&call.project, &call.id, event).await;
    }

    fn progress_sink(self: &Arc<Self>, call: &Arc<Call>) -> ProgressSink {
        let (dispatcher, call) = (self.clone(), call.clone());
        Arc::new(move |progress: AttemptProgress| dispatcher.spawn_progress_record(&call, progress))
    }

    pub(crate) fn spawn_progress_record(
        self: &Arc<Self>,
        call: &Arc<Call>,
        progress: AttemptProgress,
    ) {
        let (dispatcher, call) = (self.clone(), call.clone());
        tokio::spawn(async move {
            let recorded = dispatcher.record_progress(&call.id, call.attempt, progress).await;
            if let Err(error) = recorded {
                tracing::debug!(call = %call.id, %error, "progress was not stored");
            }
        });
    }
}

impl Dispatcher {
    /// Builds the attempt that the call's state has in flight.
    pub(crate) fn build_attempt(&self, call: &Call, again: bool) -> Attempt {
        Attempt {
            call_id: call.id.clone(),
            project: call.project.clone(),
            run_id: call.run_id.clone(),
            agent: call.origin.agent.clone(),
            auth_method: call.origin.auth_method,
            attributes: call.origin.attributes.clone(),
            number: call.attempt,
            tool: call.target.tool.clone(),
            effect: call.target.effect,
            args: call.target.args.clone(),
            deadline_ms: match call.target.traits.reports_later {
                // The time limit of the attempt starts when its executor acknowledges it.
                true => call.deadline_ms,
                false => call.attempt_deadline_ms.unwrap_or(call.deadline_ms),
            },
            connect_deadline_ms: connect_deadline(call, self.core.clock.now_ms()),
            input_timeout_ms: call.input_timeout_ms,
            traceparent: self.telemetry.attempt_traceparent(call),
            command: None,
            client_id: call.origin.client_id.clone(),
            acknowledged_by: call.acknowledged_by.clone(),
            redelivered: again,
            elicitation: call.elicitation.clone(),
            meta: call.origin.meta.clone(),
        }
    }

    /// Builds the command that a tool service or an HTTP API receives for the attempt in flight.
    async fn build_command(&self, call: &Arc<Call>) -> Result<ToolCommand, Fault> {
        let loaded_binding = self.registry.load_binding(call).await.map_err(|error| {
            let message = format!("cannot read the tool definition: {error}");
            Fault::new(Code::UpstreamUnavailable, message).without_side_effect()
        })?;
        let Some(binding) = loaded_binding else {
            let message = format!("the definition of {} no longer exists", call.target.tool);
            return Err(Fault::new(Code::Internal, message).without_side_effect().retryable(false));
        };
        let card_id = utp::card::derived_id(&call.id, utp::card::TOOL_CALL);
        let attempt_traceparent =
            self.telemetry.attempt_traceparent(call).map(|span| span.to_string());
        let traceparent = attempt_traceparent.unwrap_or_else(|| derived::call_traceparent(call));
        let (route, call) = (utp::Route::for_call(call), call.clone());
        Ok(ToolCommand { call, route, binding, card_id, traceparent })
    }

    /// Writes the command's card to the shared tables, where the tool service may read it, before
    /// the command is sent.
    async fn publish_command_card(
        &self,
        call: &Call,
        command: ToolCommand,
    ) -> Result<ToolCommand, Fault> {
        let shared =
            self.core.store.utp().shared_tables().filter(|_| call.target.executor == Executor::UTP);
        let Some(shared) = shared else { return Ok(command) };
        let card = derived::call_card(call, Some(&command.binding));
        match shared.write_command(card, &command.route, &command.traceparent).await {
            Ok(()) => Ok(command),
            Err(error) => {
                let message = format!("cannot store the card of the command: {error}");
                Err(Fault::new(Code::UpstreamUnavailable, message).without_side_effect())
            }
        }
    }
}
