//! The streams of `GET /mcp`: the continuation of a call, and the stream of a session.
//!
//! A continuation is an internal `tools/call` that waits for the stored call instead of making one.
//! It goes through rmcp like the original request, so progress, elicitation and cancellation work
//! on it. Its JSON-RPC id is internal, because the session may still handle the original request;
//! the stream writes the id that the MCP client expects.
//!
//! The AI SDK (`@ai-sdk/mcp`, up to 2.0) differs: it does not resume the stream of a call, but it
//! reconnects the stream of its session and accepts a response there. The ids of its open calls are
//! therefore sent on that stream, in an event that it ignores, and the responses follow the
//! reconnection. In revision 2026-07-28 it has no such stream, so the response to its
//! `server/discover` makes it initialize a session.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures::{Stream, StreamExt};
use parking_lot::Mutex;
use rmcp::ErrorData;
use rmcp::model::ProtocolVersion;
use serde_json::{Value, json};
use tokio::sync::watch;
use toolcrib_protocol::sse::SseParser;

use super::call_stream::{
    self, CallEventId, InternalIds, OpenHook, PrimingFormat, ResumedCall, StreamId,
};
use super::request::{CallerView, remove_session_id};

const LAST_EVENT_ID: &str = "last-event-id";

/// Maximum number of open calls whose ids are sent on the stream of a session. The oldest ones are
/// omitted: a header of common size holds about this many.
const MAX_TRACKED_CALLS: usize = 16;

/// Begins the ids of events on the stream of a session.
const SESSION_EVENT: &str = "session";

/// The events of a stream, as text.
pub(super) type EventChunks = Pin<Box<dyn Stream<Item = Bytes> + Send>>;

/// Returns whether this MCP client resumes calls only on the stream of its session.
pub(super) fn needs_session(headers: &HeaderMap) -> bool {
    let agent = headers.get(header::USER_AGENT).and_then(|value| value.to_str().ok());
    agent.is_some_and(|agent| agent.split(' ').any(|product| product.starts_with("ai-sdk/")))
}

/// Returns the id of the last event that the MCP client received, or an empty text.
pub(super) fn last_event_id(headers: &HeaderMap) -> &str {
    headers.get(LAST_EVENT_ID).and_then(|value| value.to_str().ok()).unwrap_or_default()
}

/// Returns the form of the first event that this MCP client can read.
pub(super) fn priming_format(headers: &HeaderMap) -> PrimingFormat {
    if needs_session(headers) { PrimingFormat::NoData } else { PrimingFormat::EmptyData }
}

/// Returns the response to `server/discover` after which an MCP client uses `initialize`.
pub(super) fn undiscoverable_response(body: &[u8]) -> Response {
    let message = serde_json::from_slice::<Value>(body).unwrap_or_default();
    let error = ErrorData::new(
        rmcp::model::ErrorCode::METHOD_NOT_FOUND,
        "this client resumes calls only in a session: initialize",
        None,
    );
    let body = call_stream::error_message(&message["id"], &error);
    (StatusCode::NOT_FOUND, axum::Json(body)).into_response()
}

/// The streams that continue calls, and the open calls of sessions that continue them on their own
/// stream.
pub(super) struct ResumedStreams {
    /// Names this process in the ids of events.
    epoch: String,
    /// The internal request id, by session and the request id of the MCP client.
    internal_ids: Mutex<HashMap<(String, String), String>>,
    /// The ids of the open calls of a session, the oldest first.
    open_calls: Mutex<HashMap<String, watch::Sender<Vec<String>>>>,
}

/// Runs a function when it is dropped: removes an entry at the end of the stream it belongs to.
struct OnDrop<F: FnOnce()>(Option<F>);

impl<F: FnOnce()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        if let Some(remove) = self.0.take() {
            remove();
        }
    }
}

impl Default for ResumedStreams {
    fn default() -> Self {
        let epoch = ulid::Ulid::generate().to_string();
        Self { epoch, internal_ids: Mutex::default(), open_calls: Mutex::default() }
    }
}

impl ResumedStreams {
    /// Returns a hook that lists the call of a stream among the open calls of its session.
    pub(super) fn track_call(self: &Arc<Self>, session: Option<String>) -> OpenHook {
        let this = self.clone();
        Box::new(move |id| {
            let (session, id) = (session?, id.to_text());
            this.change_calls(&session, |calls| {
                calls.push(id.clone());
                let excess = calls.len().saturating_sub(MAX_TRACKED_CALLS);
                calls.drain(..excess);
            });
            let remove = move || this.change_calls(&session, |calls| calls.retain(|c| *c != id));
            Some(Box::new(OnDrop(Some(remove))))
        })
    }

    fn change_calls(&self, session: &str, change: impl FnOnce(&mut Vec<String>)) {
        let mut open_calls = self.open_calls.lock();
        let calls = open_calls.entry(session.to_owned()).or_default();
        calls.send_modify(change);
        if calls.borrow().is_empty() && calls.receiver_count() == 0 {
            open_calls.remove(session);
        }
    }

    fn subscribe(&self, session: &str) -> watch::Receiver<Vec<String>> {
        let mut open_calls = self.open_calls.lock();
        open_calls.retain(|_, calls| calls.receiver_count() > 0 || !calls.borrow().is_empty());
        open_calls.entry(session.to_owned()).or_default().subscribe()
    }

    /// Returns a hook that maps the request id of the MCP client to the internal one.
    pub(super) fn map_request(
        self: &Arc<Self>,
        session: Option<String>,
        request: &Value,
        internal: &str,
    ) -> OpenHook {
        let (this, internal) = (self.clone(), internal.to_owned());
        let request = request.to_string();
        Box::new(move |_| {
            let key = (session?, request);
            this.internal_ids.lock().insert(key.clone(), internal.clone());
            let remove = move || {
                let mut ids = this.internal_ids.lock();
                if ids.get(&key).is_some_and(|id| *id == internal) {
                    ids.remove(&key);
                }
            };
            Some(Box::new(OnDrop(Some(remove))))
        })
    }

    /// Replaces the id of the last event on the stream of a session by the one that rmcp knows.
    /// Returns the ids of the calls that were open.
    pub(super) fn take_session_event(&self, headers: &mut HeaderMap) -> Vec<String> {
        let event = SessionEventId::parse(last_event_id(headers));
        headers.remove(LAST_EVENT_ID);
        let Some(event) = event else { return Vec::new() };
        // The ids of an earlier process mean nothing to the sessions of this one.
        if event.epoch == self.epoch
            && let Ok(number) = event.number.to_string().parse()
        {
            headers.insert(LAST_EVENT_ID, number);
        }
        event.calls
    }

    /// Returns the stream of a session over the messages of rmcp. `tracked` is the session if its
    /// MCP client continues calls on this stream, which then carries their ids.
    pub(super) fn session_stream(
        &self,
        messages: Body,
        tracked: Option<&str>,
        retry_ms: u64,
    ) -> EventChunks {
        let stream = SessionStream {
            epoch: self.epoch.clone(),
            retry_ms,
            body: messages.into_data_stream(),
            parser: SseParser::default(),
            calls: tracked.map(|session| self.subscribe(session)),
            number: 0,
            queue: Vec::new(),
            has_begun: false,
        };
        Box::pin(stream.into_chunks())
    }

    /// Returns the body of a `notifications/cancelled`, with the internal id of the request if the
    /// request has one.
    pub(super) fn with_internal_request_id(&self, session: &str, body: Bytes) -> Bytes {
        let Ok(mut message) = serde_json::from_slice::<Value>(&body) else { return body };
        let request = &mut message["params"]["requestId"];
        let key = (session.to_owned(), request.to_string());
        let Some(internal) = self.internal_ids.lock().get(&key).cloned() else { return body };
        *request = internal.into();
        message.to_string().into()
    }
}

/// Builds the internal request that waits for a call.
pub(super) fn resuming_request(
    parts: &Parts,
    view: &CallerView,
    id: &CallEventId,
    tool: &str,
    internal: &InternalIds,
) -> (Parts, Value) {
    let mut parts = parts.clone();
    parts.method = Method::POST;
    parts.headers.remove(LAST_EVENT_ID);
    parts.extensions.insert(view.clone());
    parts.extensions.insert(ResumedCall(id.call.clone()));
    parts.extensions.insert(StreamId(id.request.stream.clone()));
    let json = HeaderValue::from_static("application/json");
    let both = HeaderValue::from_static("application/json, text/event-stream");
    parts.headers.insert(header::CONTENT_TYPE, json);
    parts.headers.insert(header::ACCEPT, both);
    let mut meta = json!({});
    if !id.request.progress_token.is_null() {
        meta["progressToken"] = internal.progress_token.as_str().into();
    }
    if let Some(capabilities) = &id.request.capabilities {
        let version = ProtocolVersion::V_2026_07_28;
        remove_session_id(&mut parts.headers);
        for (name, value) in [
            ("mcp-protocol-version", version.as_str()),
            ("mcp-method", "tools/call"),
            ("mcp-name", tool),
        ] {
            if let Ok(value) = HeaderValue::from_str(value) {
                parts.headers.insert(name, value);
            }
        }
        meta["io.modelcontextprotocol/protocolVersion"] = version.as_str().into();
        meta["io.modelcontextprotocol/clientInfo"] = json!({ "name": "resumed", "version": "1" });
        meta["io.modelcontextprotocol/clientCapabilities"] = json!(capabilities);
    }
    let params = json!({ "name": tool, "arguments": {}, "_meta": meta });
    let message = json!({ "jsonrpc": "2.0", "id": internal.request, "method": "tools/call",
        "params": params });
    (parts, message)
}

/// The id of an event on the stream of a session.
struct SessionEventId {
    /// The process that sent the event.
    epoch: String,
    /// The number of the last message, as rmcp counts them.
    number: u64,
    /// The ids of the calls that were open.
    calls: Vec<String>,
}

impl SessionEventId {
    fn parse(text: &str) -> Option<Self> {
        let mut fields = text.split('~');
        if fields.next() != Some(SESSION_EVENT) {
            return None;
        }
        let (epoch, number) = (fields.next()?.to_owned(), fields.next()?.parse().ok()?);
        Some(Self { epoch, number, calls: fields.map(str::to_owned).collect() })
    }
}

/// The stream of a session: the messages of rmcp, with ids that name this process.
struct SessionStream {
    epoch: String,
    retry_ms: u64,
    body: axum::body::BodyDataStream,
    parser: SseParser,
    /// The open calls, for an MCP client that resumes them here.
    calls: Option<watch::Receiver<Vec<String>>>,
    number: u64,
    queue: Vec<Bytes>,
    has_begun: bool,
}

impl SessionStream {
    fn into_chunks(self) -> impl Stream<Item = Bytes> + Send + 'static {
        futures::stream::unfold(self, async |mut stream| Some((stream.next().await?, stream)))
    }

    async fn next(&mut self) -> Option<Bytes> {
        if !self.has_begun {
            self.has_begun = true;
            // Sets the delay before a reconnect, and dispatches no event.
            return Some(format!("retry: {}\n\n", self.retry_ms).into());
        }
        loop {
            if !self.queue.is_empty() {
                return Some(self.queue.remove(0));
            }
            tokio::select! {
                calls = next_calls(&mut self.calls) => match calls {
                    Some(calls) => {
                        let id = self.event_id(&calls);
                        return Some(format!("event: calls\nid: {id}\ndata: {{}}\n\n").into());
                    }
                    None => self.calls = None,
                },
                chunk = self.body.next() => self.take_chunk(&chunk?.ok()?)?,
            }
        }
    }

    fn take_chunk(&mut self, chunk: &[u8]) -> Option<()> {
        let events = self.parser.push(chunk).ok()?;
        if events.is_empty() {
            // A comment, which keeps the connection open.
            self.queue.push(Bytes::from_static(b":\n\n"));
        }
        for event in events.into_iter().filter(|event| !event.data.is_empty()) {
            if let Some(number) = event.id.and_then(|id| id.parse().ok()) {
                self.number = number;
            }
            let calls = self.calls.as_ref().map(|calls| calls.borrow().clone());
            let id = self.event_id(&calls.unwrap_or_default());
            self.queue.push(format!("id: {id}\ndata: {}\n\n", event.data).into());
        }
        Some(())
    }

    fn event_id(&self, calls: &[String]) -> String {
        let calls = calls.iter().fold(String::new(), |text, call| text + "~" + call);
        format!("{SESSION_EVENT}~{}~{}{calls}", self.epoch, self.number)
    }
}

/// Returns the open calls when they have changed.
async fn next_calls(calls: &mut Option<watch::Receiver<Vec<String>>>) -> Option<Vec<String>> {
    let Some(calls) = calls else { return std::future::pending().await };
    calls.changed().await.ok()?;
    Some(calls.borrow_and_update().clone())
}
