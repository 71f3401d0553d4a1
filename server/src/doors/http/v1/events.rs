//! Event streams over SSE: of one call, of a run, of the project. The id of each message is the
//! number of its event; a client that reconnects with `Last-Event-ID` continues after that event.

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

/// Number of events read from the store per page.
const PAGE: usize = 200;

pub(super) type Messages = Sse<
    axum::response::sse::KeepAliveStream<
        std::pin::Pin<Box<dyn Stream<Item = Result<Message, Infallible>> + Send>>,
    >,
>;

/// Start position of an event stream.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct From {
    /// Only events after this number. The header `Last-Event-ID` takes precedence.
    after: Option<u64>,
}

/// Streams the events of one call until it ends.
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

/// Streams the events of a run and all its calls, from its first event on.
///
/// For a run that Toolcrib drives, the stream includes the model's output as it is generated, and
/// ends with the run.
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

/// Streams the events of all calls of the project, by default from now on.
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
    // The first message carries the start position, so that a client that disconnects before the
    // first event misses none.
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

/// Streams the events of one call as a task: fewer events, under the names of the task protocol.
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
    /// Returns the next event. The stream ends when the call has ended, when the key was revoked,
    /// or when the store is unavailable (the client reconnects and continues where it was).
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
