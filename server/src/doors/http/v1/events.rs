//! Events as SSE: of one call, of a run, of the project. Each message's id is the event's number;
//! a client that comes back with `Last-Event-ID` goes on where it was.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::sse::{Event as Message, KeepAlive, Sse};
use futures::stream::{self, Stream, StreamExt};
use serde::Deserialize;
use toolcrib::engine::EventQuery;
use toolcrib::event::Event;
use toolcrib::fault::{Code, Error};
use toolcrib::{CallId, Caller, Engine};
use utoipa::IntoParams;

use super::super::Door;
use super::super::answer::{Problem, Refused};
use super::super::question::{Asked, CallPath, NamePath, Who};
use super::super::wire::{event_text, task_event_text};
use crate::auth::Standing;
use crate::task::event_name;

/// How many events are read from the store at once.
const PAGE: usize = 200;

pub(super) type Messages = Sse<
    axum::response::sse::KeepAliveStream<
        std::pin::Pin<Box<dyn Stream<Item = Result<Message, Infallible>> + Send>>,
    >,
>;

/// Where to go on.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct From {
    /// Only events after this number; the header `Last-Event-ID` wins.
    after: Option<u64>,
}

/// Follows one call to its end.
#[utoipa::path(get, path = "/v1/tool_calls/{tool_call_id}/events", tag = "agents",
    params(("tool_call_id" = String, Path, description = "The ticket"), From,
        ("Last-Event-ID" = Option<u64>, Header, description = "Go on after this event")),
    responses((status = 200, description = "Server-sent events", content_type = "text/event-stream"),
        (status = 404, body = Problem)))]
pub(super) async fn of_call(
    State(door): State<Door>,
    Who(caller): Who,
    CallPath(id): CallPath,
    Asked(from): Asked<From>,
    headers: HeaderMap,
) -> Result<Messages, Refused> {
    door.engine.call(&caller, &id).await?;
    let after = after(&headers, &from)?.unwrap_or(0);
    Ok(follow(door.engine, caller, &headers, EventQuery::Call(id), after))
}

/// Follows a run and all its calls, from its first event on; a run that is a conversation with a
/// model, until it is over, with what the model says while it says it.
#[utoipa::path(get, path = "/v1/runs/{run_id}/events", tag = "agents",
    params(("run_id" = String, Path, description = "The run"), From,
        ("Last-Event-ID" = Option<u64>, Header, description = "Go on after this event")),
    responses((status = 200, description = "Server-sent events", content_type = "text/event-stream")))]
pub(super) async fn of_run(
    State(door): State<Door>,
    Who(caller): Who,
    NamePath(run_id): NamePath,
    Asked(from): Asked<From>,
    headers: HeaderMap,
) -> Result<Messages, Refused> {
    let after = after(&headers, &from)?.unwrap_or(0);
    let news = door.engine.listen_to_run(&caller, &run_id);
    Ok(super::runs::follow(door.engine, caller, &headers, run_id, after, news))
}

/// Follows all calls of the project, from now on unless told otherwise.
#[utoipa::path(get, path = "/v1/events", tag = "agents",
    params(From, ("Last-Event-ID" = Option<u64>, Header, description = "Go on after this event")),
    responses((status = 200, description = "Server-sent events", content_type = "text/event-stream")))]
pub(super) async fn of_project(
    State(door): State<Door>,
    Who(caller): Who,
    Asked(from): Asked<From>,
    headers: HeaderMap,
) -> Result<Messages, Refused> {
    if let Some(after) = after(&headers, &from)? {
        return Ok(follow(door.engine, caller, &headers, EventQuery::Project, after));
    }
    let after = door.engine.newest_event(&caller).await?;
    // Where it begins, so that who loses the stream before the first event misses none.
    let begins = Message::default().id(after.to_string());
    let rest = following(door.engine, caller, &headers, EventQuery::Project, after);
    Ok(sent(stream::once(async { Ok(begins) }).chain(rest)))
}

pub(super) fn after(headers: &HeaderMap, from: &From) -> Result<Option<u64>, Refused> {
    let Some(header) = headers.get("last-event-id") else { return Ok(from.after) };
    let number = header.to_str().ok().and_then(|text| text.trim().parse().ok());
    let message = "Last-Event-ID must be the number of an event";
    Ok(Some(number.ok_or_else(|| Error::refused(Code::BadRequest, message))?))
}

struct Following {
    engine: Engine,
    caller: Caller,
    standing: Standing,
    query: EventQuery,
    after: u64,
    page: VecDeque<Event>,
}

fn follow(
    engine: Engine,
    caller: Caller,
    headers: &HeaderMap,
    query: EventQuery,
    after: u64,
) -> Messages {
    sent(following(engine, caller, headers, query, after))
}

fn following(
    engine: Engine,
    caller: Caller,
    headers: &HeaderMap,
    query: EventQuery,
    after: u64,
) -> impl Stream<Item = Result<Message, Infallible>> + Send + 'static {
    let standing = Standing::new(&caller, headers);
    let following = Following { engine, caller, standing, query, after, page: VecDeque::new() };
    stream::unfold(following, async |mut following| {
        let event = following.next().await?;
        let message = message(&event, event.record.kind.as_str(), event_text(&event));
        Some((Ok(message), following))
    })
}

/// The same for one call as a task: fewer events, by the names that tasks have.
pub(super) fn follow_task(
    engine: Engine,
    caller: Caller,
    headers: &HeaderMap,
    id: CallId,
    after: u64,
) -> Messages {
    let (standing, query) = (Standing::new(&caller, headers), EventQuery::Call(id));
    let following = Following { engine, caller, standing, query, after, page: VecDeque::new() };
    sent(stream::unfold(following, async |mut following| {
        loop {
            let event = following.next().await?;
            let Some(name) = event_name(event.record.kind) else { continue };
            let call = following.engine.call(&following.caller, &event.call_id).await.ok()?;
            let message = message(&event, name, task_event_text(&event, name, &call));
            return Some((Ok(message), following));
        }
    }))
}

fn message(event: &Event, name: &str, text: String) -> Message {
    Message::default().id(event.number.to_string()).event(name).data(text)
}

pub(super) fn sent(
    messages: impl Stream<Item = Result<Message, Infallible>> + Send + 'static,
) -> Messages {
    let messages: std::pin::Pin<Box<dyn Stream<Item = _> + Send>> = Box::pin(messages);
    Sse::new(messages).keep_alive(KeepAlive::new().interval(Duration::from_secs(15)))
}

impl Following {
    /// The next event; none at the end of the call, when the key was revoked, or when the store is
    /// away (the client comes back and goes on where it was).
    async fn next(&mut self) -> Option<Event> {
        if self.page.is_empty() {
            let read = self.engine.events(&self.caller, &self.query, self.after, PAGE).await;
            self.page = read.ok()?.into();
        }
        self.standing.check(&self.engine).ok()?;
        let event = self.page.pop_front()?;
        self.after = event.number;
        Some(event)
    }
}
