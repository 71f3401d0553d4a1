//! Answers one request for a model response, in either of OpenAI's formats: runs the agent loop
//! over Toolcrib's tools until there is a response for the caller.
//!
//! A caller sees none of the calls of Toolcrib's tools, so it cannot send them back. If the model
//! calls the caller's own tools after or beside Toolcrib's, Toolcrib saves the messages that the
//! caller does not see (a saved conversation) and puts its id into the call ids that it returns:
//! `call_CONVERSATION_0`. When the caller returns the results, the saved messages replace the
//! caller's message with these calls.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::Request;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use parking_lot::Mutex;
use serde_json::{Value, json};
use toolcrib::batch::Settled;
use toolcrib::engine::Thread;
use toolcrib::fault::{Code, Error};
use toolcrib::model::{Chosen, Piece, Stopped, Usage, Wanted};
use toolcrib::turn::{Happening, Loop, Next, Talk, Terms, check_messages};
use toolcrib::{Caller, Engine};

use super::super::Door;
use super::super::question;
use super::fields::{Extras, Fields, check_tools};
use super::refusal::{Refusal, invalid, no_model};
use crate::auth;

/// Default time to wait for late results.
const WAIT_MS: u64 = 30_000;

/// Maximum number of saved conversations that are restored into one request: the newest ones.
const MAX_THREADS: usize = 256;

/// The caller and the fields of a request.
pub(super) struct Asker {
    pub(super) caller: Caller,
    pub(super) fields: Fields,
    traceparent: Option<String>,
}

impl Asker {
    /// Authenticates the caller and parses the body.
    pub(super) async fn of(door: &Door, request: Request) -> Result<Self, Refusal> {
        let headers = request.headers();
        let caller = auth::caller(&door.engine, headers)?;
        let traceparent = question::traceparent(headers).map(|trace| trace.to_string());
        let bytes = question::read(request, door.settings.max_body_bytes).await?;
        let fields = Fields(question::parse(&bytes)?);
        Ok(Self { caller, fields, traceparent })
    }
}

/// The messages and the caller's own tools of a request, in the chat format.
pub(super) struct Said {
    /// The system message that comes first.
    pub(super) instructions: Option<String>,
    pub(super) messages: Vec<Value>,
    pub(super) tools: Vec<Value>,
}

/// A conversation that is ready to run.
pub(super) struct Conversation {
    pub(super) engine: Engine,
    pub(super) caller: Caller,
    chosen: Chosen,
    pub(super) terms: Terms,
    talk: Talk,
    /// Number of messages that the caller has or has seen.
    known: usize,
    wait: Duration,
}

/// An event of the conversation that is streamed to the caller.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum News {
    /// The model started another response.
    Step,
    Text(String),
    /// The model finished a response; calls may follow.
    Replied,
}

/// Receives the events of a conversation.
pub(super) type Teller<'a> = &'a (dyn Fn(News) + Send + Sync);

/// The result of a conversation.
#[derive(Debug)]
pub(super) struct Ending {
    /// The last text of the model.
    pub(super) text: String,
    /// The non-empty texts of all steps.
    pub(super) texts: Vec<String>,
    /// Calls of the caller's own tools.
    pub(super) calls: Vec<Wanted>,
    pub(super) stopped: Stopped,
    pub(super) usage: Usage,
    /// Additional information: the run, its steps, its calls, and the limit that ended it.
    pub(super) about: Value,
    /// The whole conversation, and the calls whose results are outstanding.
    pub(super) thread: Thread,
}

impl Conversation {
    /// Builds a conversation from the saved messages (`before`) and those of the request. The tools
    /// of the request are the caller's own.
    pub(super) async fn new(
        door: &Door,
        asker: Asker,
        model: &str,
        before: Thread,
        said: Said,
        extras: Extras,
    ) -> Result<Self, Refusal> {
        let Asker { caller, fields, traceparent } = asker;
        let engine = door.engine.clone();
        let found = engine.models().find(model);
        let chosen = found.ok_or_else(|| no_model(model, &engine.models().names()))?;
        if let Some((field, why)) = extras.limits.problem() {
            return Err(invalid(&format!("toolcrib.limits.{field}"), why));
        }
        if let Some((field, why)) = extras.policy.problem(engine.limits()) {
            return Err(invalid(&format!("toolcrib.policy.{field}"), why));
        }
        let Said { instructions, messages, tools } = said;
        check_tools(&tools)?;
        check_messages(&messages)?;
        let Thread { mut messages, awaited } = whole(&engine, &caller, before, messages).await?;
        if let Some(text) = instructions {
            messages.insert(0, json!({ "role": "system", "content": text }));
        }
        if let Some(run_id) = &extras.run_id {
            engine.check_run_name(&caller, run_id).await.map_err(about_run)?;
        }
        let run_id = extras.run_id.unwrap_or_else(|| format!("run_{}", ulid::Ulid::generate()));
        let terms = Terms {
            tools: extras.tools,
            own_tools: tools,
            settings: fields.0,
            limits: extras.limits,
            asking: engine.asking().clone(),
            acting: extras.policy,
            traceparent,
            ..Terms::new(chosen.name.clone(), run_id)
        };
        let wait_ms = extras.wait_ms.unwrap_or(WAIT_MS).min(engine.limits().max_wait_ms);
        let mut talk = Talk::new(messages);
        talk.progress.awaited = awaited;
        let (known, wait) = (talk.messages.len(), Duration::from_millis(wait_ms));
        Ok(Self { engine, caller, chosen, terms, talk, known, wait })
    }

    /// Runs the agent loop until there is a response for the caller.
    pub(super) async fn held(mut self, tell: Teller<'_>) -> Result<Ending, Broken> {
        let made: Mutex<Vec<Value>> = Mutex::default();
        let ending = self.holding(tell, &made).await;
        let (run_id, made) = (self.terms.run_id, !made.lock().is_empty());
        ending.map_err(|error| Broken { error, run_id, made })
    }

    async fn holding(
        &mut self,
        tell: Teller<'_>,
        made: &Mutex<Vec<Value>>,
    ) -> Result<Ending, Error> {
        let telling = Mutex::new(Telling { tell, said: String::new(), void: String::new() });
        let how = Mutex::new(Stopped::ToolCalls);
        let watch = |happening: Happening<'_>| match happening {
            Happening::Asking { .. } => telling.lock().step(),
            Happening::Piece { piece: Piece::Text(text), .. } => telling.lock().text(&text),
            Happening::AskingAgain { .. } => telling.lock().again(),
            Happening::Replied { reply, .. } => {
                *how.lock() = reply.stopped;
                (tell)(News::Replied);
            }
            Happening::Settled { settled, .. } => made.lock().push(about_call(settled)),
            _ => {}
        };
        let (engine, caller, model) = (&self.engine, &self.caller, self.chosen.model.clone());
        let mut turns = Loop::new(engine, caller, &*model, &self.terms, &watch).map_err(named)?;
        let talk = &mut self.talk;
        let next = loop {
            match turns.turn(talk).await? {
                Next::GoesOn => {}
                Next::Sleeps => {
                    let woken = tokio::time::timeout(self.wait, turns.sleep(talk)).await;
                    match woken {
                        Ok(slept) => slept?,
                        Err(_) => break Next::Sleeps,
                    }
                }
                next => break next,
            }
        };
        drop(turns);
        let (text, calls, stopped, closing) = match next {
            Next::Answered(answer) => {
                (answer.text, Vec::new(), answer.stopped, answer.closing.map(|c| c.as_str()))
            }
            Next::HandedBack(calls) => {
                let calls = self.handed(calls).await?;
                // A response that was cut off may contain calls with incomplete arguments.
                let stopped = *how.lock();
                (last_text(&self.talk.messages[self.known..]), calls, stopped, None)
            }
            Next::Sleeps | Next::GoesOn => {
                let text = last_text(&self.talk.messages[self.known..]);
                let goes_on = || "It goes on in the background.".to_owned();
                let text = Some(text).filter(|text| !text.is_empty()).unwrap_or_else(goes_on);
                (text, Vec::new(), Stopped::Stop, None)
            }
        };
        telling.lock().end(&text);
        let texts = texts(&self.talk.messages[self.known..], &text);
        let progress = std::mem::take(&mut self.talk.progress);
        let about = json!({ "run_id": self.terms.run_id, "steps": progress.steps,
            "tool_calls": *made.lock(), "limit_reached": closing });
        let messages = std::mem::take(&mut self.talk.messages);
        let thread = Thread { messages, awaited: progress.awaited };
        Ok(Ending { text, texts, calls, stopped, usage: progress.usage, about, thread })
    }

    /// Saves the messages that the caller does not see, if there are any, and gives the returned
    /// calls ids that refer to them.
    async fn handed(&mut self, mut calls: Vec<Wanted>) -> Result<Vec<Wanted>, Error> {
        let unseen = self.talk.messages.len() - self.known;
        if unseen < 2 && self.talk.progress.awaited.is_empty() {
            return Ok(calls);
        }
        let id = ulid::Ulid::generate().to_string();
        let tail = &mut self.talk.messages[self.known..];
        let step = tail.iter_mut().rev().find(|message| message["role"] == "assistant");
        let asked = step.and_then(|message| message["tool_calls"].as_array_mut());
        for asked in asked.into_iter().flatten() {
            let place = calls.iter().position(|call| asked["id"] == call.id.as_str());
            if let Some(place) = place {
                asked["id"] = format!("call_{id}_{place}").into();
            }
        }
        for (place, call) in calls.iter_mut().enumerate() {
            call.id = format!("call_{id}_{place}");
        }
        let (messages, awaited) = (tail.to_vec(), self.talk.progress.awaited.clone());
        self.engine.keep_thread(&self.caller, &id, &Thread { messages, awaited }).await?;
        Ok(calls)
    }
}

/// Restores the messages that the caller does not have into the conversation.
async fn whole(
    engine: &Engine,
    caller: &Caller,
    before: Thread,
    messages: Vec<Value>,
) -> Result<Thread, Refusal> {
    let mut all = before;
    let known = all.messages.len();
    let mut newest: Vec<String> = Vec::new();
    for id in messages.iter().rev().filter_map(thread_of) {
        if newest.len() < MAX_THREADS && !newest.contains(&id) {
            newest.push(id);
        }
    }
    let mut told: HashSet<String> = HashSet::new();
    let last_said = messages.iter().rfind(|message| message["role"] != "tool");
    let goes_on_from = last_said.and_then(thread_of);
    for message in messages {
        let id = thread_of(&message).filter(|id| newest.contains(id));
        // Calls of one step that come back in several messages still belong to one step.
        if id.as_ref().is_some_and(|id| told.contains(id)) {
            continue;
        }
        let kept = match &id {
            Some(id) => engine.thread(caller, id).await?,
            None => None,
        };
        match (kept, id) {
            (Some(thread), Some(id)) => {
                drop_said(&mut all.messages, known, &thread.messages);
                all.messages.extend(thread.messages);
                // For earlier saved conversations, late results were delivered and answered when
                // the caller continued from there.
                if goes_on_from.as_ref() == Some(&id) {
                    all.awaited.extend(thread.awaited);
                }
                told.insert(id);
            }
            _ => all.messages.push(message),
        }
    }
    Ok(all)
}

/// Drops trailing messages that the saved conversation contains as well: in the Responses format,
/// the text before a call of Toolcrib's tools is a separate message, and callers send it back as
/// one.
fn drop_said(messages: &mut Vec<Value>, known: usize, thread: &[Value]) {
    let said = thread.iter().rev().filter(|message| message["role"] == "assistant");
    let mut said = said.map(|message| &message["content"]);
    while messages.len() > known
        && let Some(last) = messages.last()
        && last["role"] == "assistant"
        && last.get("tool_calls").is_none_or(Value::is_null)
        && said.any(|content| *content == last["content"])
    {
        messages.pop();
    }
}

/// Returns the id of the saved conversation that the calls of a message refer to.
fn thread_of(message: &Value) -> Option<String> {
    let calls = message.get("tool_calls")?.as_array()?;
    let lead = |call: &Value| {
        let (id, place) = call.get("id")?.as_str()?.strip_prefix("call_")?.split_once('_')?;
        let is_ours = ulid::Ulid::from_string(id).is_ok() && place.parse::<usize>().is_ok();
        is_ours.then(|| id.to_owned())
    };
    calls.iter().find_map(lead)
}

fn last_text(messages: &[Value]) -> String {
    let said = messages.iter().rev().find(|message| message["role"] == "assistant");
    said.and_then(|message| message["content"].as_str()).unwrap_or_default().to_owned()
}

fn texts(messages: &[Value], last: &str) -> Vec<String> {
    let said = messages.iter().filter(|message| message["role"] == "assistant");
    let said = said.filter_map(|message| message["content"].as_str());
    let mut texts: Vec<String> = said.filter(|t| !t.is_empty()).map(str::to_owned).collect();
    if !last.is_empty() && texts.last().is_none_or(|text| text != last) {
        texts.push(last.to_owned());
    }
    texts
}

fn about_call(settled: &Settled) -> Value {
    let id = settled.call().map(|call| call.id.as_str());
    json!({ "tool_call_id": id, "name": settled.name, "ok": settled.ok() })
}

/// Prefixes the pointers of the loop's validation errors: the loop's options are under `toolcrib`
/// here.
fn named(error: Error) -> Error {
    let Error::Refused { mut fault, retry_after_ms } = error else { return error };
    let pointer = fault.detail.as_ref().and_then(|detail| detail["pointer"].as_str());
    if let (Code::ValidationError, Some(pointer)) = (fault.code, pointer) {
        fault.detail = Some(json!({ "pointer": format!("/toolcrib{pointer}") }));
        fault.message = format!("toolcrib.{}", fault.message);
    }
    Error::Refused { fault, retry_after_ms }
}

/// Points a refusal of the requested run at the field `toolcrib.run_id`.
fn about_run(error: Error) -> Error {
    let Error::Refused { mut fault, retry_after_ms } = error else { return error };
    if fault.code == Code::PermissionDenied {
        fault.detail = Some(json!({ "pointer": "/toolcrib/run_id" }));
    }
    Error::Refused { fault, retry_after_ms }
}

/// Forwards the text of the current step without repetition. After a response was cut off, the loop
/// requests it again; text that was already forwarded is not forwarded a second time, as far as the
/// model repeats it.
struct Telling<'a> {
    tell: Teller<'a>,
    said: String,
    /// Text that was forwarded of a discarded response.
    void: String,
}

impl Telling<'_> {
    fn step(&mut self) {
        (self.said, self.void) = (String::new(), String::new());
        (self.tell)(News::Step);
    }

    fn again(&mut self) {
        if self.void.len() < self.said.len() {
            self.void = std::mem::take(&mut self.said);
        }
        self.said.clear();
    }

    fn text(&mut self, text: &str) {
        self.said.push_str(text);
        if self.void.is_empty() {
            (self.tell)(News::Text(text.to_owned()));
        } else if self.void.starts_with(&self.said) {
            // Already forwarded.
        } else if let Some(more) = self.said.strip_prefix(&self.void) {
            // The new response continues where the discarded one was cut off.
            (self.tell)(News::Text(more.to_owned()));
            self.void.clear();
        } else {
            (self.tell)(News::Text(format!("\n\n{}", self.said)));
            self.void.clear();
        }
    }

    /// Forwards the rest of the text, including text that arrived without deltas.
    fn end(&mut self, text: &str) {
        let missing = text.strip_prefix(self.said.as_str()).unwrap_or(text);
        if !missing.is_empty() && self.said != text {
            self.text(missing);
        }
    }
}

/// A conversation that ended with an error.
pub(super) struct Broken {
    pub(super) error: Error,
    run_id: String,
    /// True if calls were made before the error. OpenAI's SDKs retry requests by themselves, and a
    /// retry would make all these calls again.
    made: bool,
}

impl IntoResponse for Broken {
    fn into_response(self) -> Response {
        let mut answer = Refusal(self.error).into_response();
        if self.made {
            let never = HeaderValue::from_static("false");
            answer.headers_mut().insert("x-should-retry", never);
            answer.headers_mut().remove(header::RETRY_AFTER);
        }
        marked(answer, &self.run_id)
    }
}

/// Adds the header with the run id to a response.
pub(super) fn marked(mut answer: Response, run_id: &str) -> Response {
    if let Ok(run_id) = HeaderValue::from_str(run_id) {
        answer.headers_mut().insert("toolcrib-run-id", run_id);
    }
    answer
}

/// Aborts a conversation when the caller disconnects.
pub(super) struct Leash(pub(super) tokio::task::AbortHandle);

impl Drop for Leash {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// The events of a conversation, and then its result.
pub(super) enum Told {
    News(News),
    End(Box<Result<Ending, Broken>>),
}

/// Runs a conversation in a separate task, which is aborted when the returned guard is dropped.
pub(super) fn begun(
    conversation: Conversation,
) -> (tokio::sync::mpsc::UnboundedReceiver<Told>, Leash) {
    let (send, receive) = tokio::sync::mpsc::unbounded_channel();
    let send = Arc::new(send);
    let task = tokio::spawn(async move {
        let teller = send.clone();
        let tell = move |news: News| {
            let _ = teller.send(Told::News(news));
        };
        let ending = Box::pin(conversation.held(&tell)).await;
        let _ = send.send(Told::End(Box::new(ending)));
    });
    (receive, Leash(task.abort_handle()))
}
