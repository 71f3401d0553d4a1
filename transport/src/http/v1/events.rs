//! Event streams over SSE: of one call, and of the project. The id of each message is the number of
//! its event; a client that reconnects with `Last-Event-ID` continues after that event. Streams of
//! runs (`runs/stream.rs`) and tasks (`tasks.rs`) use the functions here.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::sse::{Event as Message, KeepAlive, Sse};
use futures::stream::{self, Stream, StreamExt};
use serde::Deserialize;
use toolcrib::calls::EventQuery;
use toolcrib::domain::event::CallEvent;
use toolcrib::domain::fault::{Code, Error};
use toolcrib::{CallId, Caller, Engine};
use toolcrib_protocol::background_task::task_event_name;
use utoipa::IntoParams;

use super::super::HttpState;
use super::super::wire::{event_json, task_event_json};
use crate::auth::RequestCredentials;
use crate::http::extract::{AuthenticatedCaller, CallPath, QueryParams};
use crate::http::problem::{ApiError, ProblemDetails};

/// Number of events read from the store per page.
const CALL_EVENT_PAGE_SIZE: usize = 200;

pub(super) type SseResponse = Sse<
    axum::response::sse::KeepAliveStream<
        std::pin::Pin<Box<dyn Stream<Item = Result<Message, Infallible>> + Send>>,
    >,
>;

/// Start position of an event stream.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct EventStreamQuery {
    /// Only events after this number. The header `Last-Event-ID` takes precedence.
    pub(super) after: Option<u64>,
}

/// Streams the events of one call until it ends.
#[utoipa::path(get, path = "/v1/tool_calls/{tool_call_id}/events", tag = "agents",
    params(("tool_call_id" = String, Path, description = "The ticket"), EventStreamQuery,
        ("Last-Event-ID" = Option<u64>, Header, description = "Continue after this event")),
    responses((status = 200, description = "Server-sent events", content_type = "text/event-stream"),
        (status = 404, body = ProblemDetails)))]
pub(super) async fn call_events(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    CallPath(id): CallPath,
    QueryParams(from): QueryParams<EventStreamQuery>,
    headers: HeaderMap,
    credentials: RequestCredentials,
) -> Result<SseResponse, ApiError> {
    state.engine.calls().call(&caller, &id).await?;
    let after = resume_position(&headers, &from)?.unwrap_or(0);
    Ok(stream_events(state.engine.clone(), credentials, EventQuery::Call(id), after))
}

/// Streams the events of all calls of the project, by default from now on.
#[utoipa::path(get, path = "/v1/events", tag = "agents",
    params(EventStreamQuery, ("Last-Event-ID" = Option<u64>, Header, description = "Continue after this event")),
    responses((status = 200, description = "Server-sent events", content_type = "text/event-stream")))]
pub(super) async fn project_events(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    QueryParams(from): QueryParams<EventStreamQuery>,
    headers: HeaderMap,
    credentials: RequestCredentials,
) -> Result<SseResponse, ApiError> {
    if let Some(after) = resume_position(&headers, &from)? {
        return Ok(stream_events(state.engine.clone(), credentials, EventQuery::Project, after));
    }
    let after = state.engine.calls().newest_event(&caller).await?;
    // The first message carries the start position, so that a client that disconnects before the
    // first event misses none.
    let begins = Message::default().id(after.to_string());
    let rest = event_messages(state.engine.clone(), credentials, EventQuery::Project, after);
    Ok(into_sse(stream::once(async { Ok(begins) }).chain(rest)))
}

pub(super) fn resume_position(
    headers: &HeaderMap,
    from: &EventStreamQuery,
) -> Result<Option<u64>, ApiError> {
    let Some(header) = headers.get("last-event-id") else { return Ok(from.after) };
    let number = header.to_str().ok().and_then(|text| text.trim().parse().ok());
    let message = "Last-Event-ID must be the number of an event";
    Ok(Some(number.ok_or_else(|| Error::refused(Code::BadRequest, message))?))
}

struct EventSubscription {
    engine: Engine,
    caller: Caller,
    credentials: RequestCredentials,
    query: EventQuery,
    after: u64,
    page: VecDeque<CallEvent>,
}

fn stream_events(
    engine: Engine,
    credentials: RequestCredentials,
    query: EventQuery,
    after: u64,
) -> SseResponse {
    into_sse(event_messages(engine, credentials, query, after))
}

fn event_messages(
    engine: Engine,
    credentials: RequestCredentials,
    query: EventQuery,
    after: u64,
) -> impl Stream<Item = Result<Message, Infallible>> + Send + 'static {
    let following = EventSubscription::new(engine, credentials, query, after);
    stream::unfold(following, async |mut following| {
        let event = following.next().await?;
        let message = sse_message(&event, event.record.kind.as_str(), event_json(&event));
        Some((Ok(message), following))
    })
}

/// Streams the events of one call as a task: fewer events, under the names of the task protocol.
pub(super) fn stream_task_events(
    engine: Engine,
    credentials: RequestCredentials,
    id: CallId,
    after: u64,
) -> SseResponse {
    let following = EventSubscription::new(engine, credentials, EventQuery::Call(id), after);
    into_sse(stream::unfold(following, async |mut following| {
        loop {
            let event = following.next().await?;
            let Some(name) = task_event_name(event.record.kind) else { continue };
            let call =
                following.engine.calls().call(&following.caller, &event.call_id).await.ok()?;
            let message = sse_message(&event, name, task_event_json(&event, name, &call));
            return Some((Ok(message), following));
        }
    }))
}

fn sse_message(event: &CallEvent, name: &str, text: String) -> Message {
    Message::default().id(event.number.to_string()).event(name).data(text)
}

pub(super) fn into_sse(
    messages: impl Stream<Item = Result<Message, Infallible>> + Send + 'static,
) -> SseResponse {
    let messages: std::pin::Pin<Box<dyn Stream<Item = _> + Send>> = Box::pin(messages);
    Sse::new(messages).keep_alive(KeepAlive::new().interval(Duration::from_secs(15)))
}

impl EventSubscription {
    fn new(engine: Engine, credentials: RequestCredentials, query: EventQuery, after: u64) -> Self {
        let caller = credentials.caller().clone();
        Self { engine, caller, credentials, query, after, page: VecDeque::new() }
    }

    /// Returns the next event. The stream ends when the call has ended, when the key was revoked,
    /// or when the store is unavailable (the client reconnects and continues where it was).
    async fn next(&mut self) -> Option<CallEvent> {
        if self.page.is_empty() {
            let read = self
                .engine
                .calls()
                .events(&self.caller, &self.query, self.after, CALL_EVENT_PAGE_SIZE)
                .await;
            self.page = read.ok()?.into();
        }
        self.credentials.revalidate(&self.engine).ok()?;
        let event = self.page.pop_front()?;
        self.after = event.number;
        Some(event)
    }
}
