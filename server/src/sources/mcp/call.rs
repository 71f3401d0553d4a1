//! One attempt at an upstream: the request, the elicitations it causes, and its outcome.
//!
//! An upstream of revision 2026-07-28 ends an attempt with its elicitations and is called again
//! with the answers. One of an older revision sends elicitations while the request is in flight:
//! then the request is suspended, and the next attempt resumes it. Suspended requests live in
//! memory only and are lost with the process; the tool's effect then decides whether the call may
//! be made again.

use std::sync::Arc;
use std::time::Duration;

use rmcp::model::{
    CallToolRequest, CallToolRequestParams, ClientRequest, JsonObject, RequestMetaObject,
    ServerResult,
};
use rmcp::service::{PeerRequestOptions, RequestHandle};
use rmcp::{RoleClient, ServiceError};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tokio::sync::mpsc;
use toolcrib::dialogue::{Dialogue, Questions};
use toolcrib::fault::{Code, Fault};
use toolcrib::source::{Attempt, ProgressSink, Started};
use toolcrib::tool::Effect;

use super::direct::{Came, Direct};
use super::ears::{Followed, Heard, Question};
use super::outcome;
use super::upstream::{Live, Running, Upstream};

/// State that one attempt passes to the next, stored in the elicitation's note.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Note {
    /// The upstream's opaque request state.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) state: Option<String>,
    /// Id of the upstream's task.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) task: Option<String>,
    /// `true` if the upstream requires a URL to be opened before it is called again.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(super) opens: bool,
    /// Number of elicitations that were received while the request was in flight.
    #[serde(skip_serializing_if = "is_zero")]
    pub(super) asked: u32,
}

fn is_zero(number: &u32) -> bool {
    *number == 0
}

impl Note {
    fn of(dialogue: Option<&Dialogue>) -> Self {
        let text = dialogue.and_then(|dialogue| dialogue.note.as_deref());
        text.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default()
    }

    pub(super) fn text(&self) -> Option<String> {
        serde_json::to_string(self).ok()
    }
}

/// A request in flight.
pub(super) struct Out {
    handle: RequestHandle<RoleClient>,
    heard: mpsc::UnboundedReceiver<Heard>,
    live: Arc<Live>,
    followed: Followed,
    /// Answers from earlier attempts, by the number of their elicitation.
    ready: Map<String, Value>,
    asked: u32,
}

impl Out {
    /// Ends a request whose result is no longer needed, after its elicitation was canceled. The
    /// upstream may finish on its own because of that: then the call is known to have ended, which
    /// an upstream does not confirm for a canceled request. After a grace period the request is
    /// canceled.
    async fn give_up(mut self, reason: &str) {
        if tokio::time::timeout(super::TELLING, &mut self.handle.rx).await.is_ok() {
            self.followed.over();
        } else {
            let telling = self.handle.cancel(Some(reason.to_owned()));
            let _ = tokio::time::timeout(super::TELLING, telling).await;
        }
    }
}

/// A request that waits for an answer to its elicitation.
pub(super) struct Suspended {
    out: Out,
    key: String,
    question: Question,
    pub(super) attempt: u32,
    /// `true` once the engine has also released the attempt that sent the elicitation.
    pub(super) settled: bool,
}

impl Suspended {
    /// Gives up the request because no answer will come. Dropping the elicitation first tells the
    /// upstream that it was canceled.
    pub(super) async fn abandon(self) {
        let Self { out, question, .. } = self;
        drop(question);
        out.give_up("the call has ended").await;
    }
}

/// One attempt, with everything it needs.
pub(super) struct Try {
    pub(super) upstream: Arc<Upstream>,
    pub(super) attempt: Attempt,
    pub(super) progress: ProgressSink,
    pub(super) running: Running,
}

impl Try {
    /// Starts the attempt, or resumes a suspended request or task.
    pub(super) async fn run(self) -> Started {
        let suspended = self.upstream.suspended.lock().remove(&self.attempt.call_id);
        if let Some(suspended) = suspended {
            return self.resume(suspended).await;
        }
        let dialogue = self.attempt.dialogue.as_deref();
        let note = Note::of(dialogue);
        if let Some(task) = dialogue.and_then(|dialogue| dialogue.handle.clone()) {
            return self.follow(task).await;
        }
        if let Some(task) = note.task {
            return self.tell_task(task).await;
        }
        if let Some(fault) = outcome::not_opened(&self.attempt).filter(|_| note.opens) {
            return Started::Done(Err(fault));
        }
        if note.asked > 0 && self.attempt.effect == Effect::Irreversible {
            let message = format!(
                "{} asked something, and the session it asked in is lost: it may have happened in \
                 part, and was not tried again",
                self.attempt.tool
            );
            return Started::Done(Err(Fault::new(Code::OutcomeUnknown, message)));
        }
        let (live, theirs) = match self.place().await {
            Ok(place) => place,
            Err(fault) => return Started::Done(Err(fault)),
        };
        let direct = live
            .direct
            .clone()
            .filter(|_| Direct::takes(&theirs) && !self.upstream.is_mirrored(&self.attempt.tool));
        if let Some(direct) = direct {
            return self.straight(&direct, live, &theirs, note).await;
        }
        match self.send(live, theirs, note).await {
            Ok(out) => self.wait(out).await,
            Err(fault) => Started::Done(Err(fault)),
        }
    }

    /// Returns the connection to use, and the upstream's own name for the tool.
    async fn place(&self) -> Result<(Arc<Live>, String), Fault> {
        let (upstream, attempt) = (&self.upstream, &self.attempt);
        upstream.check_pin(&attempt.tool)?;
        let live = upstream.live(attempt.deadline_ms, &self.running.token).await?;
        // The upstream may have reconnected with a different tool during the wait.
        upstream.check_pin(&attempt.tool)?;
        Ok((live, upstream.their_name(&attempt.tool)?))
    }

    /// Makes the call as one stateless request.
    async fn straight(self, direct: &Direct, live: Arc<Live>, theirs: &str, note: Note) -> Started {
        let answers = self.attempt.dialogue.as_ref().map(|dialogue| &dialogue.answers);
        let answers = answers.filter(|answers| !answers.is_empty());
        let state = note.state.as_deref();
        let came = tokio::select! {
            came = direct.call(theirs, &self.attempt, answers, state, &self.progress) => came,
            // Closing the connection cancels the request.
            () = self.running.token.cancelled() => {
                return Started::Done(Err(Fault::new(Code::Canceled, "canceled")));
            }
        };
        let name = &self.upstream.settings.name;
        let answer = match came {
            Came::Result(result) => Ok(ServerResult::CallToolResult(result)),
            Came::Asks(asks) => Ok(ServerResult::InputRequiredResult(asks)),
            Came::Task(task) => Ok(ServerResult::CreateTaskResult(task)),
            Came::Error(error) => Err(ServiceError::McpError(error)),
            Came::NotSent(why) => {
                // The supervisor checks the connection and updates the upstream's state.
                self.upstream.again.notify_one();
                let message = format!("the MCP server {name} is not there: {why}");
                return Started::Done(Err(Fault::unreachable(message)));
            }
            Came::Busy(status, after_ms) => {
                let fault = outcome::busy(name, &self.attempt, status.as_u16(), after_ms);
                return Started::Done(Err(fault));
            }
            Came::Lost(why) => {
                let message = format!("{name}: {}", self.upstream.clean(&why));
                return Started::Done(Err(outcome::garbled(&self.attempt, message)));
            }
        };
        self.ended(&live, answer).await
    }

    async fn send(&self, live: Arc<Live>, theirs: String, note: Note) -> Result<Out, Fault> {
        let (upstream, attempt) = (&self.upstream, &self.attempt);
        let arguments: JsonObject = serde_json::from_str(attempt.args.text()).map_err(|_| {
            let message = "MCP takes arguments as an object only";
            Fault::new(Code::ValidationError, message).not_happened()
        })?;
        let mut params = CallToolRequestParams::new(theirs).with_arguments(arguments);
        let answers = attempt.dialogue.as_ref().map(|dialogue| dialogue.answers.clone());
        let mut ready = answers.unwrap_or_default();
        params.request_state = note.state;
        if note.asked == 0 && !note.opens && !ready.is_empty() {
            params.input_responses = Some(std::mem::take(&mut ready).into_iter().collect());
        }
        let mut options = PeerRequestOptions::no_options();
        if let Some(trace) = &attempt.traceparent {
            let mut meta = RequestMetaObject::new();
            meta.set_traceparent(trace.to_string());
            options = options.with_meta(meta);
        }
        let request = ClientRequest::CallToolRequest(CallToolRequest::new(params));
        // If the upstream can send elicitations mid-call, all requests in flight must be known.
        let sending = match live.asks_within {
            true => {
                let left = attempt.deadline_ms.saturating_sub(super::now_ms());
                let turn = tokio::time::timeout(Duration::from_millis(left), live.ears.send());
                let late = |_| Fault::new(Code::Timeout, "it was not its turn in time");
                Some(turn.await.map_err(|late_by| late(late_by).not_happened())?)
            }
            false => None,
        };
        // The wait for the permit may have been long.
        upstream.check_pin(&attempt.tool)?;
        let sent = live.peer.send_request_with_option(request, options).await;
        // The channel to the transport was closed, so the request was not sent.
        let handle = sent.map_err(|_| upstream.away())?;
        let (id, token) = (handle.id.clone(), handle.progress_token.clone());
        let (followed, heard) = live.ears.follow(id, token, self.progress.clone());
        drop(sending);
        Ok(Out { handle, heard, live, followed, ready, asked: 0 })
    }

    /// Waits for the response, an elicitation or cancellation.
    async fn wait(self, mut out: Out) -> Started {
        loop {
            let came = tokio::select! {
                biased;
                answer = &mut out.handle.rx => Some(answer),
                heard = out.heard.recv() => match heard {
                    Some(Heard::Unclear) => return self.unclear(out).await,
                    Some(Heard::Question(question)) => {
                        match self.take_question(out, question) {
                            Ok(rest) => { out = rest; continue; }
                            Err(asks) => return asks,
                        }
                    }
                    None => None,
                },
                () = self.running.token.cancelled() => {
                    let reason = Some("the call was canceled".to_owned());
                    // Best effort: the upstream is notified if that succeeds in time.
                    let telling = out.handle.cancel(reason);
                    let _ = tokio::time::timeout(super::TELLING, telling).await;
                    return Started::Done(Err(Fault::new(Code::Canceled, "canceled")));
                }
            };
            let Some(answer) = came else { continue };
            out.followed.over();
            let answer = answer.unwrap_or(Err(ServiceError::TransportClosed));
            return self.ended(&out.live, answer).await;
        }
    }

    /// Fails an attempt because an elicitation cannot be attributed to one of the upstream's calls.
    /// A guess might send one caller's answer to another.
    async fn unclear(&self, out: Out) -> Started {
        out.give_up("it is not clear which call asked").await;
        let name = &self.upstream.settings.name;
        let message = format!(
            "{name} asked something while several of its calls were out, or one that was given up \
             may still be, and its revision of MCP does not say over pipes which call a question \
             is for: call its tools one at a time, or reach it over HTTP"
        );
        let code = match self.attempt.effect {
            Effect::Irreversible => Code::OutcomeUnknown,
            _ => Code::UpstreamUnavailable,
        };
        Started::Done(Err(Fault::new(code, message).retryable(false)))
    }

    /// Handles an elicitation from an upstream of an older revision. Repeats an answer that is
    /// already known; otherwise suspends the call while its request stays in flight.
    fn take_question(&self, mut out: Out, question: Question) -> Result<Out, Started> {
        out.asked += 1;
        let key = format!("question_{}", out.asked);
        if let Some(answer) = out.ready.remove(&key) {
            let _ = question.answer.send(answer);
            return Ok(out);
        }
        let asked = Map::from_iter([(key.clone(), question.asked.clone())]);
        let note = Note { asked: out.asked, ..Note::default() }.text();
        let attempt = self.attempt.number;
        let suspended = Suspended { out, key, question, attempt, settled: false };
        self.upstream.suspend(&self.attempt, suspended);
        Err(Started::Asks(Questions { asked, note }))
    }

    /// Resumes a request that was waiting for an answer.
    async fn resume(self, suspended: Suspended) -> Started {
        let Suspended { out, key, question, .. } = suspended;
        let answers = self.attempt.dialogue.as_ref().map(|dialogue| &dialogue.answers);
        let answer = answers.and_then(|answers| answers.get(&key).cloned());
        let answer = answer.map(|answer| with_defaults(answer, &question.asked));
        // The upstream may have given up in the meantime; its response is then already there.
        let _ = question.answer.send(answer.unwrap_or(Value::Null));
        self.wait(out).await
    }

    async fn ended(self, live: &Arc<Live>, answer: Result<ServerResult, ServiceError>) -> Started {
        match answer {
            Ok(ServerResult::CallToolResult(result)) => {
                Started::Done(outcome::of_result(&self.attempt, result))
            }
            Ok(ServerResult::InputRequiredResult(result)) => {
                let requests = result.input_requests.unwrap_or_default();
                let asked = requests
                    .into_iter()
                    .filter_map(|(key, request)| Some((key, serde_json::to_value(request).ok()?)));
                let note = Note { state: result.request_state, ..Note::default() }.text();
                Started::Asks(Questions { asked: asked.collect(), note })
            }
            Ok(ServerResult::CreateTaskResult(made)) => {
                let task = made.task.task_id.clone();
                self.goes_on(task, Some(live.clone()))
            }
            Ok(_) => {
                let message = format!("{} answered what is no result", self.upstream.settings.name);
                Started::Done(Err(outcome::garbled(&self.attempt, message)))
            }
            Err(ServiceError::McpError(error)) if let Some(asked) = outcome::addresses(&error) => {
                let note = Note { opens: true, ..Note::default() }.text();
                Started::Asks(Questions { asked, note })
            }
            Err(error) => {
                let known = live.watch.trouble();
                let fault = outcome::of_error(&self.upstream, &self.attempt, &error, known);
                Started::Done(Err(fault))
            }
        }
    }
}

/// Fills the fields that an accepted form leaves out with the form's defaults.
fn with_defaults(mut answer: Value, asked: &Value) -> Value {
    if answer["action"] != "accept" {
        return answer;
    }
    let fields = asked.pointer("/params/requestedSchema/properties").and_then(Value::as_object);
    for (name, schema) in fields.into_iter().flatten() {
        let Some(usual) = schema.get("default") else { continue };
        if let Value::Object(answer) = &mut answer {
            let content = answer.entry("content").or_insert_with(|| Value::Object(Map::new()));
            if let Value::Object(content) = content {
                content.entry(name.clone()).or_insert_with(|| usual.clone());
            }
        }
    }
    answer
}
