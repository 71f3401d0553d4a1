//! One attempt at an upstream: the request, the elicitations it causes, and its outcome.
//!
//! An upstream of revision 2026-07-28 ends an attempt with its elicitations and is called again
//! with the answers. One of an older revision sends elicitations while the request is in flight:
//! then the request is suspended, and the next attempt resumes it. Suspended requests live in
//! memory only and are lost with the process; the tool's effect then decides whether the call may
//! be made again.

mod outcome;
mod upstream_task;
use std::sync::Arc;
use std::time::Duration;

use rmcp::ServiceError;
use rmcp::model::{
    CallToolRequest, CallToolRequestParams, ClientRequest, ErrorCode, JsonObject,
    RequestMetaObject, ServerResult,
};
use rmcp::service::PeerRequestOptions;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use toolcrib::domain::call::elicitation::{Elicitation, ElicitationRequest};
use toolcrib::domain::fault::{Code, Fault};
use toolcrib::domain::tool::Effect;
use toolcrib::ports::source::{Attempt, ProgressSink, StartResult};

use super::connection::{LiveConnection, log_messages};
use super::upstream::in_flight::{CANCEL_TIMEOUT, InFlightRequest, SuspendedRequest};
use super::upstream::{RunningAttempt, UpstreamServer};
use crate::mcp::connection::server_requests::{UpstreamCallEvent, UpstreamElicitation};
use crate::mcp::connection::stateless_call::{StatelessCallClient, StatelessCallResponse};

/// State that one attempt passes to the next, stored as the elicitation's source state.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct McpResumeState {
    /// The upstream's opaque request state.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) state: Option<String>,
    /// Id of the upstream's task.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) task: Option<String>,
    /// `true` if the upstream requires a URL to be opened before it is called again.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    #[serde(rename = "opens")]
    pub(super) needs_url_opened: bool,
    /// Number of elicitations that were received while the request was in flight.
    #[serde(skip_serializing_if = "is_zero")]
    #[serde(rename = "asked")]
    pub(super) questions_asked: u32,
}

fn is_zero(number: &u32) -> bool {
    *number == 0
}

impl McpResumeState {
    fn from_elicitation(elicitation: Option<&Elicitation>) -> Self {
        let text = elicitation.and_then(|elicitation| elicitation.source_state.as_deref());
        text.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default()
    }

    pub(super) fn text(&self) -> Option<String> {
        serde_json::to_string(self).ok()
    }
}

/// One attempt, with everything it needs.
pub(super) struct UpstreamAttempt {
    pub(super) upstream: Arc<UpstreamServer>,
    pub(super) attempt: Attempt,
    pub(super) progress: ProgressSink,
    pub(super) running: RunningAttempt,
}

impl UpstreamAttempt {
    /// Starts the attempt, or resumes a suspended request or task.
    pub(super) async fn run(self) -> StartResult {
        let suspended = self.upstream.suspended.lock().remove(&self.attempt.call_id);
        if let Some(suspended) = suspended {
            return self.resume(suspended).await;
        }
        let elicitation = self.attempt.elicitation.as_deref();
        let note = McpResumeState::from_elicitation(elicitation);
        if let Some(task) = elicitation.and_then(|elicitation| elicitation.handle.clone()) {
            return self.resume_task(task).await;
        }
        if let Some(task) = note.task {
            return self.answer_task(task).await;
        }
        if let Some(fault) =
            outcome::url_not_opened_fault(&self.attempt).filter(|_| note.needs_url_opened)
        {
            return StartResult::Finished(Err(fault));
        }
        if note.questions_asked > 0 && self.attempt.effect == Effect::Irreversible {
            let message = format!(
                "{} requested input, and its session was lost: it may have taken effect in part \
                 and was not retried; a retry is not safe",
                self.attempt.tool
            );
            return StartResult::Finished(Err(Fault::new(Code::OutcomeUnknown, message)));
        }
        let (live, upstream_tool) = match self.resolve_target().await {
            Ok(target) => target,
            Err(fault) => return StartResult::Finished(Err(fault)),
        };
        let direct = live.stateless.clone().filter(|_| {
            StatelessCallClient::supports_tool_name(&upstream_tool)
                && !self.upstream.mirrors_args_in_headers(&self.attempt.tool)
        });
        if let Some(direct) = direct {
            return self.call_stateless(&direct, live, &upstream_tool, note).await;
        }
        match self.send_request(live, upstream_tool, note).await {
            Ok(out) => self.wait_for_response(out).await,
            Err(fault) => StartResult::Finished(Err(fault)),
        }
    }

    /// Returns the connection to use, and the upstream's own name for the tool.
    async fn resolve_target(&self) -> Result<(Arc<LiveConnection>, String), Fault> {
        let (upstream, attempt) = (&self.upstream, &self.attempt);
        upstream.check_pin(&attempt.tool)?;
        let live =
            upstream.wait_connected(attempt.connect_deadline_ms, &self.running.token).await?;
        // The upstream may have reconnected with a different tool during the wait.
        upstream.check_pin(&attempt.tool)?;
        Ok((live, upstream.upstream_tool_name(&attempt.tool)?))
    }

    /// Makes the call as one stateless request.
    async fn call_stateless(
        self,
        direct: &StatelessCallClient,
        live: Arc<LiveConnection>,
        upstream_tool: &str,
        note: McpResumeState,
    ) -> StartResult {
        let answers = self.attempt.elicitation.as_ref().map(|elicitation| &elicitation.answers);
        let answers = answers.filter(|answers| !answers.is_empty());
        let state = note.state.as_deref();
        let call = direct.call(upstream_tool, &self.attempt, answers, state, &self.progress);
        let reply = tokio::select! {
            reply = call => reply,
            // Closing the connection cancels the request.
            () = self.running.token.cancelled() => {
                return StartResult::Finished(Err(Fault::new(Code::Canceled, "canceled")));
            }
        };
        let name = &self.upstream.settings.name;
        let answer = match reply {
            StatelessCallResponse::Result(result) => Ok(ServerResult::CallToolResult(result)),
            StatelessCallResponse::InputRequired(asks) => {
                Ok(ServerResult::InputRequiredResult(asks))
            }
            StatelessCallResponse::Task(task) => Ok(ServerResult::CreateTaskResult(task)),
            StatelessCallResponse::Error(error) => Err(ServiceError::McpError(error)),
            StatelessCallResponse::NotSent(reason) => {
                // The supervisor checks the connection and updates the upstream's state.
                self.upstream.retry_now.notify_one();
                let message = format!("the MCP server {name} is not available: {reason}");
                return StartResult::Finished(Err(Fault::unreachable(message)));
            }
            StatelessCallResponse::Overloaded(status, after_ms) => {
                let fault =
                    outcome::overloaded_fault(name, &self.attempt, status.as_u16(), after_ms);
                return StartResult::Finished(Err(fault));
            }
            StatelessCallResponse::Unknown(reason) => {
                let message = format!("{name}: {}", self.upstream.redact(&reason));
                return StartResult::Finished(Err(outcome::malformed_answer_fault(
                    &self.attempt,
                    message,
                )));
            }
        };
        self.finish(&live, answer).await
    }

    async fn send_request(
        &self,
        live: Arc<LiveConnection>,
        upstream_tool: String,
        note: McpResumeState,
    ) -> Result<InFlightRequest, Fault> {
        let (upstream, attempt) = (&self.upstream, &self.attempt);
        let arguments: JsonObject = serde_json::from_str(attempt.args.text()).map_err(|_| {
            let message = "MCP takes arguments as an object only";
            Fault::new(Code::ValidationError, message).without_side_effect()
        })?;
        let mut params = CallToolRequestParams::new(upstream_tool).with_arguments(arguments);
        let answers = attempt.elicitation.as_ref().map(|elicitation| elicitation.answers.clone());
        let mut ready = answers.unwrap_or_default();
        params.request_state = note.state;
        if note.questions_asked == 0 && !note.needs_url_opened && !ready.is_empty() {
            params.input_responses = Some(std::mem::take(&mut ready).into_iter().collect());
        }
        let mut options = PeerRequestOptions::no_options();
        let meta = attempt.meta.as_ref().and_then(|meta| serde_json::from_str(meta.text()).ok());
        let mut meta: RequestMetaObject = meta.unwrap_or_default();
        if let Some(trace) = &attempt.traceparent {
            meta.set_traceparent(trace.to_string());
        }
        let log_level = log_messages::requested_level(&meta);
        if let Some(level) = log_level.filter(|_| !live.is_modern) {
            log_messages::remove_level(&mut meta);
            live.handler.log_level.include(&live.peer, level).await;
        }
        options = options.with_meta(meta);
        let request = ClientRequest::CallToolRequest(CallToolRequest::new(params));
        // If the upstream can send elicitations mid-call, all requests in flight must be known.
        let sending = match live.may_elicit_mid_call {
            true => {
                let remaining_ms = attempt.deadline_ms.saturating_sub(super::now_ms());
                let turn = tokio::time::timeout(
                    Duration::from_millis(remaining_ms),
                    live.handler.acquire_send_permit(),
                );
                let timed_out = |_| Fault::new(Code::Timeout, "it was not started in time");
                Some(turn.await.map_err(|late_by| timed_out(late_by).without_side_effect())?)
            }
            false => None,
        };
        // The wait for the permit may have been long.
        upstream.check_pin(&attempt.tool)?;
        let sent = live.peer.send_request_with_option(request, options).await;
        // The channel to the transport was closed, so the request was not sent.
        let handle = sent.map_err(|_| upstream.unavailable_fault())?;
        let (id, token) = (handle.id.clone(), handle.progress_token.clone());
        let (guard, events) =
            live.handler.register_call(id, token, self.progress.clone(), log_level);
        drop(sending);
        Ok(InFlightRequest {
            handle,
            events,
            connection: live,
            guard,
            prepared_answers: ready,
            questions_asked: 0,
        })
    }

    /// Waits for the response, an elicitation or cancellation.
    async fn wait_for_response(self, mut in_flight: InFlightRequest) -> StartResult {
        loop {
            let response = tokio::select! {
                biased;
                answer = &mut in_flight.handle.rx => Some(answer),
                event = in_flight.events.recv() => match event {
                    Some(UpstreamCallEvent::AmbiguousElicitation) => {
                        return self.fail_ambiguous(in_flight).await;
                    }
                    Some(UpstreamCallEvent::Elicitation(question)) => {
                        match self.handle_elicitation(in_flight, question) {
                            Ok(rest) => { in_flight = rest; continue; }
                            Err(asks) => return asks,
                        }
                    }
                    None => None,
                },
                () = self.running.token.cancelled() => {
                    let reason = Some("the call was canceled".to_owned());
                    // Best effort: the upstream is notified if that succeeds in time.
                    let notification = in_flight.handle.cancel(reason);
                    let _ = tokio::time::timeout(CANCEL_TIMEOUT, notification).await;
                    return StartResult::Finished(Err(Fault::new(Code::Canceled, "canceled")));
                }
            };
            let Some(answer) = response else { continue };
            in_flight.guard.mark_ended();
            let answer = answer.unwrap_or(Err(ServiceError::TransportClosed));
            return self.finish(&in_flight.connection, answer).await;
        }
    }

    /// Fails an attempt because an elicitation cannot be attributed to one of the upstream's calls.
    /// A guess might send one caller's answer to another.
    async fn fail_ambiguous(&self, out: InFlightRequest) -> StartResult {
        out.cancel_after_grace("the call that requested input cannot be determined").await;
        let name = &self.upstream.settings.name;
        let message = format!(
            "{name} requested input while several of its calls were in flight or one that was \
             given up may still be, and its revision of MCP does not say over stdio which call a \
             request belongs to: call its tools one at a time, or connect to it over HTTP"
        );
        let code = match self.attempt.effect {
            Effect::Irreversible => Code::OutcomeUnknown,
            _ => Code::UpstreamUnavailable,
        };
        StartResult::Finished(Err(Fault::new(code, message).retryable(false)))
    }

    /// Handles an elicitation from an upstream of an older revision. Repeats an answer that is
    /// already known; otherwise suspends the call while its request stays in flight.
    fn handle_elicitation(
        &self,
        mut out: InFlightRequest,
        question: UpstreamElicitation,
    ) -> Result<InFlightRequest, StartResult> {
        out.questions_asked += 1;
        let key = format!("question_{}", out.questions_asked);
        if let Some(answer) = out.prepared_answers.remove(&key) {
            let _ = question.answer.send(answer);
            return Ok(out);
        }
        let questions = Map::from_iter([(key.clone(), question.request.clone())]);
        let note =
            McpResumeState { questions_asked: out.questions_asked, ..McpResumeState::default() }
                .text();
        let attempt = self.attempt.number;
        let suspended =
            SuspendedRequest { request: out, key, elicitation: question, attempt, released: false };
        self.upstream.suspend(&self.attempt, suspended);
        Err(StartResult::NeedsInput(ElicitationRequest { questions, source_state: note }))
    }

    /// Resumes a request that was waiting for an answer.
    async fn resume(self, suspended: SuspendedRequest) -> StartResult {
        let SuspendedRequest { request: out, key, elicitation: question, .. } = suspended;
        let answers = self.attempt.elicitation.as_ref().map(|elicitation| &elicitation.answers);
        let answer = answers.and_then(|answers| answers.get(&key).cloned());
        let answer = answer.map(|answer| fill_form_defaults(answer, &question.request));
        // The upstream may have given up in the meantime; its response is then already there.
        let _ = question.answer.send(answer.unwrap_or(Value::Null));
        self.wait_for_response(out).await
    }

    async fn finish(
        self,
        live: &Arc<LiveConnection>,
        answer: Result<ServerResult, ServiceError>,
    ) -> StartResult {
        match answer {
            Ok(ServerResult::CallToolResult(result)) => {
                StartResult::Finished(outcome::outcome_from_result(&self.attempt, result))
            }
            Ok(ServerResult::InputRequiredResult(result)) => {
                let requests = result.input_requests.unwrap_or_default();
                let questions = requests
                    .into_iter()
                    .filter_map(|(key, request)| Some((key, serde_json::to_value(request).ok()?)));
                let note =
                    McpResumeState { state: result.request_state, ..McpResumeState::default() }
                        .text();
                StartResult::NeedsInput(ElicitationRequest {
                    questions: questions.collect(),
                    source_state: note,
                })
            }
            Ok(ServerResult::CreateTaskResult(created)) => {
                let task = created.task.task_id.clone();
                self.detach_as_task(task, Some(live.clone()))
            }
            Ok(_) => {
                let message = format!("{} returned an invalid result", self.upstream.settings.name);
                StartResult::Finished(Err(outcome::malformed_answer_fault(&self.attempt, message)))
            }
            Err(ServiceError::McpError(error))
                if let Some(questions) = outcome::url_elicitations(&error) =>
            {
                let note =
                    McpResumeState { needs_url_opened: true, ..McpResumeState::default() }.text();
                StartResult::NeedsInput(ElicitationRequest { questions, source_state: note })
            }
            // The tool sent an elicitation in the middle of its call, which this revision does not
            // allow.
            Err(ServiceError::McpError(error))
                if error.code == ErrorCode::INVALID_REQUEST
                    && live.is_modern
                    && self.upstream.revision.require_legacy() =>
            {
                let name = &self.upstream.settings.name;
                let text = self.upstream.redact(&error.message);
                StartResult::Finished(Err(outcome::other_revision_fault(
                    name,
                    &self.attempt,
                    &text,
                )))
            }
            Err(error) => {
                let problem = live.diagnostics.problem();
                let fault =
                    outcome::fault_from_error(&self.upstream, &self.attempt, &error, problem);
                StartResult::Finished(Err(fault))
            }
        }
    }
}

/// Fills the fields that an accepted form omits with the form's defaults.
fn fill_form_defaults(mut answer: Value, elicitation: &Value) -> Value {
    if answer["action"] != "accept" {
        return answer;
    }
    let fields =
        elicitation.pointer("/params/requestedSchema/properties").and_then(Value::as_object);
    for (name, schema) in fields.into_iter().flatten() {
        let Some(default) = schema.get("default") else { continue };
        if let Value::Object(answer) = &mut answer {
            let content = answer.entry("content").or_insert_with(|| Value::Object(Map::new()));
            if let Value::Object(content) = content {
                content.entry(name.clone()).or_insert_with(|| default.clone());
            }
        }
    }
    answer
}
