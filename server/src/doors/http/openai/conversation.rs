//! One request to converse, whatever its wire: the loop over the crib's tools until there is
//! something to say to the client.
//!
//! A client sees none of the crib's calls, so it cannot send them back. Where its own tools are
//! called after or beside the crib's, what it does not see is kept as a thread, and the ids of the
//! calls that it is handed lead to it: `call_THREAD_0`. When it comes back with their results, its
//! message with these calls is replaced by what was really said there.

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

/// How long late results are waited for where the request does not say.
const WAIT_MS: u64 = 30_000;

/// How many threads one conversation is put together from: the newest ones.
const MAX_THREADS: usize = 256;

/// Who asks, and what.
pub(super) struct Asker {
    pub(super) caller: Caller,
    pub(super) fields: Fields,
    traceparent: Option<String>,
}

impl Asker {
    /// Recognises the caller and reads the body.
    pub(super) async fn of(door: &Door, request: Request) -> Result<Self, Refusal> {
        let headers = request.headers();
        let caller = auth::caller(&door.engine, headers)?;
        let traceparent = question::traceparent(headers).map(|trace| trace.to_string());
        let bytes = question::read(request, door.settings.max_body_bytes).await?;
        let fields = Fields(question::parse(&bytes)?);
        Ok(Self { caller, fields, traceparent })
    }
}

/// What a request brings: messages and the client's own tools, in the chat form.
pub(super) struct Said {
    /// What the system says first.
    pub(super) instructions: Option<String>,
    pub(super) messages: Vec<Value>,
    pub(super) tools: Vec<Value>,
}

/// A conversation that is about to be held.
pub(super) struct Conversation {
    pub(super) engine: Engine,
    pub(super) caller: Caller,
    chosen: Chosen,
    pub(super) terms: Terms,
    talk: Talk,
    /// How many of its messages the client has, or has heard of.
    known: usize,
    wait: Duration,
}

/// What happens, as a client may be told.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum News {
    /// The model begins to answer, for the so manieth time.
    Step,
    Text(String),
    /// The model has answered; calls may follow.
    Replied,
}

/// Who is told.
pub(super) type Teller<'a> = &'a (dyn Fn(News) + Send + Sync);

/// What a conversation came to.
#[derive(Debug)]
pub(super) struct Ending {
    /// What the model said last.
    pub(super) text: String,
    /// What it said in each step, where it said something.
    pub(super) texts: Vec<String>,
    /// Calls for the client.
    pub(super) calls: Vec<Wanted>,
    pub(super) stopped: Stopped,
    pub(super) usage: Usage,
    /// For who wants to know more: the run, its steps, its calls, the limit that ended it.
    pub(super) about: Value,
    /// The whole conversation, and the calls whose results come late.
    pub(super) thread: Thread,
}

impl Conversation {
    /// Puts a conversation together: what was said `before` and is kept here, and what the client
    /// says now. `tools` are the client's, in the chat form.
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

    /// Holds it, until there is something for the client.
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
                // An answer that was cut may have cut the arguments of its calls.
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

    /// Keeps what the client does not see, if there is anything, and gives its calls ids that lead
    /// there.
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

/// The conversation with what the client does not have of it.
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
        // Calls of one step that come back in several messages are one step all the same.
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
                // What came late was told, and answered, when the client went on from there.
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

/// Takes from the end what a thread has, too: what the model said before the crib's calls is a
/// message of its own in a response, and a client sends it back as one.
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

/// The thread that the calls of a message lead to.
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

/// The patterns that the loop refuses stand under `toolcrib` here.
fn named(error: Error) -> Error {
    let Error::Refused { mut fault, retry_after_ms } = error else { return error };
    let pointer = fault.detail.as_ref().and_then(|detail| detail["pointer"].as_str());
    if let (Code::ValidationError, Some(pointer)) = (fault.code, pointer) {
        fault.detail = Some(json!({ "pointer": format!("/toolcrib{pointer}") }));
        fault.message = format!("toolcrib.{}", fault.message);
    }
    Error::Refused { fault, retry_after_ms }
}

/// A run that was named and may not be.
fn about_run(error: Error) -> Error {
    let Error::Refused { mut fault, retry_after_ms } = error else { return error };
    if fault.code == Code::PermissionDenied {
        fault.detail = Some(json!({ "pointer": "/toolcrib/run_id" }));
    }
    Error::Refused { fault, retry_after_ms }
}

/// What was told of the step under way. An answer that was cut is asked for again; what of it was
/// told already is not told a second time, as far as the model says the same again.
struct Telling<'a> {
    tell: Teller<'a>,
    said: String,
    /// What was told of an answer that is void.
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
            // Told before.
        } else if let Some(more) = self.said.strip_prefix(&self.void) {
            // It goes on where it was cut.
            (self.tell)(News::Text(more.to_owned()));
            self.void.clear();
        } else {
            (self.tell)(News::Text(format!("\n\n{}", self.said)));
            self.void.clear();
        }
    }

    /// All of it is told, also what no piece was told of.
    fn end(&mut self, text: &str) {
        let missing = text.strip_prefix(self.said.as_str()).unwrap_or(text);
        if !missing.is_empty() && self.said != text {
            self.text(missing);
        }
    }
}

/// A conversation that ended with a fault.
pub(super) struct Broken {
    pub(super) error: Error,
    run_id: String,
    /// Calls were made by then. Clients repeat requests on their own; this one would make them
    /// all again.
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

/// An answer with the run that it came from.
pub(super) fn marked(mut answer: Response, run_id: &str) -> Response {
    if let Ok(run_id) = HeaderValue::from_str(run_id) {
        answer.headers_mut().insert("toolcrib-run-id", run_id);
    }
    answer
}

/// Ends a conversation whose client has gone.
pub(super) struct Leash(pub(super) tokio::task::AbortHandle);

impl Drop for Leash {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// News as they come, and then the end.
pub(super) enum Told {
    News(News),
    End(Box<Result<Ending, Broken>>),
}

/// Holds a conversation in a task of its own, which ends with the leash.
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
