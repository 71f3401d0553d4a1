//! The event stream of a run over SSE. Stored events of the run and its calls carry their number as
//! the message id. Deltas of the model's output come between them, without an id.
//!
//! A client that reconnects with `Last-Event-ID` gets all stored events after that one, and of the
//! response in progress only the deltas from then on.

use std::collections::VecDeque;
use std::pin::Pin;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::sse::Event as Message;
use futures::stream;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use toolcrib::domain::fault::Error;
use toolcrib::domain::run::{JournalEntry, JournalKind, RunEvent};
use toolcrib::runs::{RunDelta, RunSubscription};
use toolcrib::{Caller, Engine};
use utoipa::IntoParams;

use super::super::events::{EventStreamQuery, SseResponse, into_sse, resume_position};
use crate::auth::RequestCredentials;
use crate::http::HttpState;
use crate::http::extract::{AuthenticatedCaller, NamePath, QueryParams, invalid_parameter};
use crate::http::problem::ApiError;
use crate::http::wire::event_json;

/// Number of events read from the store per page.
const RUN_EVENT_PAGE_SIZE: usize = 200;

/// Maximum number of deltas buffered here; further deltas stay in the subscription.
const MAX_BUFFERED: usize = 256;

type PendingRead = Pin<Box<dyn Future<Output = Result<Vec<RunEvent>, Error>> + Send>>;

struct RunEventStream {
    engine: Engine,
    caller: Caller,
    credentials: RequestCredentials,
    run_id: String,
    after: u64,
    page: VecDeque<RunEvent>,
    live: RunSubscription,
    /// Deltas that were received but belong after a stored event that was not yet sent.
    buffered: VecDeque<RunDelta>,
    order: StreamPosition,
    /// True until the events that precede a conversation in progress are sent: those of earlier
    /// conversations under its run id. Its own events are stored when it ends.
    is_catching_up: bool,
    reading: Option<PendingRead>,
    /// True if the stream of a run id that only groups calls ends when the run is idle.
    ends_when_idle: bool,
}

/// Query of a run's event stream.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(in super::super) struct RunStreamQuery {
    /// Only events after this number. The header `Last-Event-ID` takes precedence.
    after: Option<u64>,
    /// `idle`: the stream of a run id that only groups calls ends when it has no open call and no
    /// chat completion or response in progress.
    until: Option<String>,
}

impl RunStreamQuery {
    fn ends_when_idle(&self) -> Result<bool, Error> {
        match self.until.as_deref() {
            None | Some("") => Ok(false),
            Some("idle") => Ok(true),
            Some(_) => Err(invalid_parameter("until", "until must be idle")),
        }
    }
}

/// The position of the stream within the run.
struct StreamPosition {
    /// Step of the last model response sent; `None` if the stream started in the middle of the run.
    step: Option<u32>,
    /// True while the results of that step's calls are still to be sent.
    calls_pending: bool,
}

impl StreamPosition {
    /// Returns true if deltas of this step can be sent now.
    fn has_reached(&self, step: u32) -> bool {
        self.step.is_none_or(|sent| !self.calls_pending && sent + 1 >= step)
    }

    fn advance(&mut self, entry: &JournalEntry) {
        let data = &entry.record.data;
        if entry.record.kind == JournalKind::Replied {
            self.step = data["step"].as_u64().map(|step| step as u32);
            self.calls_pending = data["calls"].as_array().is_some_and(|calls| !calls.is_empty());
        } else {
            self.calls_pending = false;
        }
    }
}

/// Streams the events of a run and all its calls, from its first event on.
///
/// For a run that Toolcrib drives, and for a chat completion or response in progress, the stream
/// includes the model's output as it is generated, and ends with the run.
#[utoipa::path(get, path = "/v1/runs/{run_id}/events", tag = "agents",
    params(("run_id" = String, Path, description = "The run"), RunStreamQuery,
        ("Last-Event-ID" = Option<u64>, Header, description = "Continue after this event")),
    responses((status = 200, description = "Server-sent events", content_type = "text/event-stream")))]
pub(in super::super) async fn run_events(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    NamePath(run_id): NamePath,
    QueryParams(query): QueryParams<RunStreamQuery>,
    headers: HeaderMap,
    credentials: RequestCredentials,
) -> Result<SseResponse, ApiError> {
    let ends_when_idle = query.ends_when_idle()?;
    let after = resume_position(&headers, &EventStreamQuery { after: query.after })?.unwrap_or(0);
    let subscription = state.engine.runs().streams().subscribe(&caller, &run_id).await?;
    let events = open_stream(state.engine.clone(), credentials, run_id, after, subscription);
    Ok(send_stream(RunEventStream { ends_when_idle, ..events }))
}

/// Streams a run until it ends. A run id that only groups calls has no end, and neither has its
/// stream.
pub(super) fn stream_run(
    engine: Engine,
    credentials: RequestCredentials,
    run_id: String,
    after: u64,
    subscription: RunSubscription,
) -> SseResponse {
    send_stream(open_stream(engine, credentials, run_id, after, subscription))
}

fn open_stream(
    engine: Engine,
    credentials: RequestCredentials,
    run_id: String,
    after: u64,
    subscription: RunSubscription,
) -> RunEventStream {
    // The run's first journal entry precedes all deltas.
    let awaits_first_entry = after == 0;
    let is_catching_up = subscription.is_of_conversation();
    let order =
        StreamPosition { step: awaits_first_entry.then_some(0), calls_pending: awaits_first_entry };
    let (page, buffered) = (VecDeque::new(), VecDeque::new());
    RunEventStream {
        engine,
        caller: credentials.caller().clone(),
        credentials,
        run_id,
        after,
        page,
        live: subscription,
        buffered,
        order,
        is_catching_up,
        reading: None,
        ends_when_idle: false,
    }
}

fn send_stream(following: RunEventStream) -> SseResponse {
    into_sse(stream::unfold(following, async |mut following| {
        let message = following.next().await?;
        Some((Ok(message), following))
    }))
}

impl RunEventStream {
    /// Returns the next message. The stream ends when the run has ended, when the key was revoked,
    /// or when the store is unavailable (the client reconnects and continues where it was).
    async fn next(&mut self) -> Option<Message> {
        self.credentials.revalidate(&self.engine).ok()?;
        loop {
            while self.buffered.len() < MAX_BUFFERED
                && let Some(note) = self.live.try_next()
            {
                self.buffered.push_back(note);
            }
            if let Some(note) = self.take_due_delta() {
                return Some(delta_message(&self.run_id, &note));
            }
            if let Some(event) = self.page.pop_front() {
                self.after = event.number();
                if let RunEvent::Run(entry) = &event {
                    self.order.advance(entry);
                }
                return Some(stored_message(&event));
            }
            if self.is_catching_up {
                self.read_earlier_events().await.ok()?;
                continue;
            }
            let reading = self.reading.get_or_insert_with(|| {
                let (engine, caller) = (self.engine.clone(), self.caller.clone());
                let (run_id, after) = (self.run_id.clone(), self.after);
                let (limit, ends_when_idle) = (RUN_EVENT_PAGE_SIZE, self.ends_when_idle);
                Box::pin(async move {
                    let streams = engine.runs().streams();
                    match ends_when_idle {
                        true => streams.events_until_idle(&caller, &run_id, after, limit).await,
                        false => streams.events(&caller, &run_id, after, limit).await,
                    }
                })
            });
            tokio::select! {
                biased;
                note = self.live.next(), if self.buffered.len() < MAX_BUFFERED => {
                    self.buffered.push_back(note);
                }
                read = reading => {
                    self.reading = None;
                    self.page = read.ok()?.into();
                    if self.page.is_empty() {
                        return None;
                    }
                }
            }
        }
    }

    /// Reads the next events that precede a conversation in progress.
    async fn read_earlier_events(&mut self) -> Result<(), Error> {
        let streams = self.engine.runs().streams();
        let (after, limit) = (self.after, RUN_EVENT_PAGE_SIZE);
        self.page = streams.stored_events(&self.caller, &self.run_id, after, limit).await?.into();
        self.is_catching_up = !self.page.is_empty();
        if !self.is_catching_up && self.live.has_conversation_ended() {
            // Its events may be among those that were sent, with its complete text.
            self.live = RunSubscription::default();
            self.buffered.clear();
        }
        Ok(())
    }

    /// Takes the next delta that can be sent: in its place, or at the latest before the complete
    /// response.
    fn take_due_delta(&mut self) -> Option<RunDelta> {
        let step = self.buffered.front()?.step();
        if self.live.is_of_conversation() {
            return if self.is_catching_up { None } else { self.buffered.pop_front() };
        }
        let whole_is_next = match self.page.front() {
            Some(RunEvent::Run(entry)) if entry.record.kind == JournalKind::Replied => {
                entry.record.data["step"].as_u64().is_some_and(|whole| whole >= u64::from(step))
            }
            _ => false,
        };
        let none_before = self.page.is_empty() && self.order.has_reached(step);
        if whole_is_next || none_before { self.buffered.pop_front() } else { None }
    }
}

fn delta_message(run_id: &str, note: &RunDelta) -> Message {
    let (name, mut data) = match note {
        RunDelta::RequestStarted { step, last } => {
            ("run.asking", json!({ "step": step, "last": last }))
        }
        RunDelta::Text { step, text } => ("run.text", json!({ "step": step, "text": text })),
        RunDelta::ToolCall { step, index, id, name, arguments } => (
            "run.call",
            json!({
                "step": step, "index": index, "call_id": id, "name": name, "arguments": arguments,
            }),
        ),
        RunDelta::RequestRetried { step, retry, wait_ms, why: reason } => (
            "run.asking_again",
            json!({ "step": step, "retry": retry, "wait_ms": wait_ms, "error": reason }),
        ),
        RunDelta::Lagged { step } => ("run.missed", json!({ "step": step })),
    };
    data["type"] = name.into();
    data["run_id"] = run_id.into();
    Message::default().event(name).data(data.to_string())
}

fn stored_message(run_event: &RunEvent) -> Message {
    let (number, name, text) = match run_event {
        RunEvent::Call(event) => (event.number, event.record.kind.as_str(), event_json(event)),
        RunEvent::Run(entry) => {
            (entry.number, entry.record.kind.as_str(), journal_entry_json(entry))
        }
    };
    Message::default().id(number.to_string()).event(name).data(text)
}

/// Serializes a journal entry as the data of an SSE message.
fn journal_entry_json(entry: &JournalEntry) -> String {
    let mut body = Map::new();
    body.insert("number".into(), entry.number.into());
    body.insert("type".into(), entry.record.kind.as_str().into());
    body.insert("run_id".into(), entry.run_id.clone().into());
    body.insert("at_ms".into(), entry.record.at_ms.into());
    if let Value::Object(data) = &entry.record.data {
        body.extend(data.clone());
    }
    Value::Object(body).to_string()
}
