//! The stream that answers `tools/call`, and its continuation on another connection.
//!
//! The stream opens when the call is stored, with an event that has an id and no message. The id
//! names the call and the JSON-RPC request, so an MCP client that lost the stream gets the response
//! with `GET` and `Last-Event-ID`, from this process or from the next one. No events are stored:
//! the call itself is.
//!
//! rmcp knows neither the call nor its id. This module therefore converts its response to events
//! with ids. A response that comes before the call is stored is passed on unchanged.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, BodyDataStream, Bytes};
use axum::http::{HeaderValue, header};
use axum::response::Response;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use futures::future::BoxFuture;
use futures::{Stream, StreamExt};
use parking_lot::Mutex;
use rmcp::ErrorData;
use rmcp::model::ClientCapabilities;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use toolcrib::CallId;
use toolcrib_protocol::sse::SseParser;

/// Interval of comments that keep an idle stream open.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(15);

/// The JSON-RPC request whose response a stream carries, as the id of an event holds it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct StreamedRequest {
    /// The id of the first stream. A continuation has the same one.
    #[serde(rename = "s")]
    pub(super) stream: String,
    /// The id of the JSON-RPC request.
    #[serde(rename = "i")]
    pub(super) id: Value,
    #[serde(rename = "p", default, skip_serializing_if = "Value::is_null")]
    pub(super) progress_token: Value,
    /// The capabilities of an MCP client without a session, which a continuation does not repeat.
    #[serde(rename = "c", default, skip_serializing_if = "Option::is_none")]
    pub(super) capabilities: Option<ClientCapabilities>,
}

impl StreamedRequest {
    /// Reads the request from its message. `None` if the message has no id to respond to.
    pub(super) fn parse(message: &Value) -> Option<Self> {
        let meta = &message["params"]["_meta"];
        let declared = &meta["io.modelcontextprotocol/clientCapabilities"];
        let capabilities = match declared.is_object() {
            true => serde_json::from_value(declared.clone()).ok(),
            false => None,
        };
        let id = message.get("id").filter(|id| id.is_string() || id.is_number())?;
        Some(Self {
            stream: ulid::Ulid::generate().to_string(),
            id: id.clone(),
            progress_token: meta["progressToken"].clone(),
            capabilities,
        })
    }
}

/// The call behind a stream, once it is stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct StreamedCall {
    pub(super) id: CallId,
    /// True if the MCP client called the tool through the catalogue.
    pub(super) through_catalogue: bool,
}

/// The id of an event: the call, and the request to respond to.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct CallEventId {
    pub(super) call: StreamedCall,
    pub(super) request: StreamedRequest,
}

impl CallEventId {
    pub(super) fn parse(text: &str) -> Option<Self> {
        let (call, rest) = text.split_once('.')?;
        let (kind, request) = rest.split_once('.')?;
        let through_catalogue = match kind {
            "l" => false,
            "c" => true,
            _ => return None,
        };
        let call = StreamedCall { id: call.parse().ok()?, through_catalogue };
        let request = URL_SAFE_NO_PAD.decode(request).ok()?;
        Some(Self { call, request: serde_json::from_slice(&request).ok()? })
    }

    pub(super) fn to_text(&self) -> String {
        let request = serde_json::to_vec(&self.request).unwrap_or_default();
        let kind = if self.call.through_catalogue { 'c' } else { 'l' };
        format!("{}.{kind}.{}", self.call.id, URL_SAFE_NO_PAD.encode(request))
    }
}

/// Reports the call of a request to the stream that answers the request; the value travels in the
/// extensions of the HTTP request.
#[derive(Clone)]
pub(super) struct CallStoredSignal(Arc<watch::Sender<Option<StreamedCall>>>);

impl CallStoredSignal {
    pub(super) fn new() -> (Self, watch::Receiver<Option<StreamedCall>>) {
        let (sender, receiver) = watch::channel(None);
        (Self(Arc::new(sender)), receiver)
    }

    /// Opens the stream: the call is stored and has not ended.
    pub(super) fn send(&self, call: StreamedCall) {
        self.0.send_replace(Some(call));
    }
}

/// The call that a continuation waits for; the value travels in the extensions of the HTTP request
/// in place of the call's arguments.
#[derive(Clone)]
pub(super) struct ResumedCall(pub(super) StreamedCall);

/// The id of the stream that a request belongs to; it travels in the extensions of the request.
#[derive(Clone)]
pub(super) struct StreamId(pub(super) String);

/// The waiters behind the streams. A continuation supersedes the waiter of the stream before it,
/// which may not have noticed that its connection is lost.
#[derive(Default)]
pub(super) struct StreamWaiters(Mutex<HashMap<String, CancellationToken>>);

impl StreamWaiters {
    /// Registers a waiter for a stream, and supersedes the present one.
    pub(super) fn register(self: &Arc<Self>, stream: &str) -> StreamWaiter {
        let superseded = CancellationToken::new();
        let before = self.0.lock().insert(stream.to_owned(), superseded.clone());
        if let Some(before) = before {
            before.cancel();
        }
        StreamWaiter { waiters: self.clone(), stream: stream.to_owned(), superseded }
    }
}

/// Marks the error of a waiter that another one supersedes.
const SUPERSEDED: &str = "toolcrib/superseded";

/// Returns the end of a waiter that another one supersedes. The MCP client may still read the
/// stream of this waiter next to the other one, and would take an error for the response, so the
/// stream ends without a message.
pub(super) fn superseded_error() -> ErrorData {
    let data = json!({ SUPERSEDED: true });
    ErrorData::internal_error("the response is sent on another stream", Some(data))
}

fn is_superseded_error(message: &str) -> bool {
    let has_mark = |message: Value| message["error"]["data"][SUPERSEDED] == true;
    message.contains(SUPERSEDED) && serde_json::from_str(message).is_ok_and(has_mark)
}

/// The registration of one waiter.
pub(super) struct StreamWaiter {
    waiters: Arc<StreamWaiters>,
    stream: String,
    superseded: CancellationToken,
}

impl StreamWaiter {
    /// Returns once another waiter has taken over the stream.
    pub(super) async fn superseded(&self) {
        self.superseded.cancelled().await;
    }

    pub(super) fn is_superseded(&self) -> bool {
        self.superseded.is_cancelled()
    }
}

impl Drop for StreamWaiter {
    fn drop(&mut self) {
        if !self.superseded.is_cancelled() {
            self.waiters.0.lock().remove(&self.stream);
        }
    }
}

/// The form of the events that one MCP client can read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PrimingFormat {
    /// An event with empty data, as the protocol specifies.
    EmptyData,
    /// A field block without data, which dispatches no event, for MCP clients that take an empty
    /// event for a message and report an error.
    NoData,
}

/// The id and the progress token of a request that continues another one. They are random, because
/// the session may still handle the original request, and route messages by them.
#[derive(Debug, Clone)]
pub(super) struct InternalIds {
    pub(super) request: String,
    pub(super) progress_token: String,
}

/// The options of a stream.
pub(super) struct CallStreamOptions {
    pub(super) request: StreamedRequest,
    pub(super) retry_ms: u64,
    pub(super) priming: PrimingFormat,
    /// The id and the progress token of the internal request, if they are not those of the MCP
    /// client.
    pub(super) internal: Option<InternalIds>,
}

/// Registers a stream when it opens. Returns a value that is dropped when the stream ends.
pub(super) type OpenHook = Box<dyn FnOnce(&CallEventId) -> Option<StreamGuard> + Send>;

/// A value that is dropped when the stream ends.
pub(super) type StreamGuard = Box<dyn std::any::Any + Send>;

/// Answers with the response, or, if the call is stored before there is one, with a stream. The
/// stream opens at once: an MCP client that loses its connection before the first event does not
/// know the call, and cannot ask for its result.
pub(super) async fn respond(
    mut handling: BoxFuture<'static, Response>,
    notifications: Option<mpsc::Receiver<String>>,
    mut stored: watch::Receiver<Option<StreamedCall>>,
    options: CallStreamOptions,
    on_open: OpenHook,
) -> Response {
    let mut stream = CallStream::new(options);
    stream.notifications = notifications;
    tokio::select! {
        biased;
        response = &mut handling => {
            if !is_event_stream(&response) {
                return stream.finish(response, &stored, on_open).await;
            }
            // rmcp opens the streams of sessions at once, before there is a call.
            stream.body = Some(response.into_body().into_data_stream());
            stream.unopened = Some((stored, on_open));
        }
        call = next_call(&mut stored) => {
            stream.handling = Some(handling);
            stream.open(call, on_open);
        }
    }
    stream.into_response()
}

/// Returns a stream that continues a call. It opens when its request waits for the call, so that
/// the MCP client can cancel it from then on.
pub(super) fn resume(
    handling: BoxFuture<'static, Response>,
    stored: watch::Receiver<Option<StreamedCall>>,
    options: CallStreamOptions,
    on_open: OpenHook,
) -> CallStream {
    let mut stream = CallStream::new(options);
    stream.handling = Some(handling);
    stream.unopened = Some((stored, on_open));
    stream
}

async fn next_call(stored: &mut watch::Receiver<Option<StreamedCall>>) -> StreamedCall {
    match stored.wait_for(Option::is_some).await.map(|call| call.clone()) {
        Ok(Some(call)) => call,
        // The request has ended without a stored call.
        _ => std::future::pending().await,
    }
}

fn is_event_stream(response: &Response) -> bool {
    let kind = response.headers().get(header::CONTENT_TYPE);
    kind.is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"))
}

/// The events of one stream.
pub(super) struct CallStream {
    options: CallStreamOptions,
    /// The pending response of rmcp; `None` once it has arrived.
    handling: Option<BoxFuture<'static, Response>>,
    /// The body of rmcp's response, if that is a stream.
    body: Option<BodyDataStream>,
    /// The notifications before the response, of a request that rmcp does not serve.
    notifications: Option<mpsc::Receiver<String>>,
    /// The signal that opens the stream; `None` once the stream is open.
    unopened: Option<(watch::Receiver<Option<StreamedCall>>, OpenHook)>,
    parser: SseParser,
    queue: VecDeque<Bytes>,
    has_ended: bool,
    guard: Option<StreamGuard>,
}

impl CallStream {
    fn new(options: CallStreamOptions) -> Self {
        Self {
            options,
            handling: None,
            body: None,
            notifications: None,
            unopened: None,
            parser: SseParser::default(),
            queue: VecDeque::new(),
            has_ended: false,
            guard: None,
        }
    }

    /// Answers with a response that came before the stream was opened, or with a stream if
    /// notifications precede it.
    async fn finish(
        mut self,
        response: Response,
        stored: &watch::Receiver<Option<StreamedCall>>,
        on_open: OpenHook,
    ) -> Response {
        while let Some(Ok(message)) = self.notifications.as_mut().map(mpsc::Receiver::try_recv) {
            self.queue_message(&message);
        }
        if self.queue.is_empty() {
            return response;
        }
        if let Some(call) = stored.borrow().clone() {
            self.open(call, on_open);
        }
        self.take_response(response).await;
        self.into_response()
    }

    /// Queues the event that makes the stream resumable, before all others.
    fn open(&mut self, call: StreamedCall, on_open: OpenHook) {
        let id = CallEventId { call, request: self.options.request.clone() };
        self.guard = on_open(&id);
        let retry = self.options.retry_ms;
        let data = match self.options.priming {
            PrimingFormat::EmptyData => "data: \n",
            PrimingFormat::NoData => "",
        };
        let event = format!("id: {}\nretry: {retry}\n{data}\n", id.to_text());
        self.queue.push_front(event.into());
    }

    /// Returns the next part of the response, or `None` at its end.
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if let Some(event) = self.queue.pop_front() {
                return Some(event);
            }
            if self.has_ended {
                self.guard = None;
                return None;
            }
            tokio::select! {
                biased;
                call = opening_call(&mut self.unopened) => {
                    if let Some((_, on_open)) = self.unopened.take() {
                        self.open(call, on_open);
                    }
                }
                message = next_notification(&mut self.notifications) => {
                    self.queue_message(&message);
                }
                response = pending_response(&mut self.handling) => {
                    self.handling = None;
                    self.take_response(response).await;
                }
                chunk = next_chunk(&mut self.body) => self.take_chunk(chunk),
                () = tokio::time::sleep(KEEP_ALIVE_INTERVAL) => {
                    self.queue.push_back(Bytes::from_static(b":\n\n"));
                }
            }
        }
    }

    async fn take_response(&mut self, response: Response) {
        if is_event_stream(&response) {
            self.body = Some(response.into_body().into_data_stream());
            return;
        }
        let body = axum::body::to_bytes(response.into_body(), usize::MAX).await;
        let message = body.ok().and_then(|body| String::from_utf8(body.to_vec()).ok());
        match message.filter(|message| message.starts_with('{') && !message.contains('\n')) {
            Some(message) => self.queue_message(&message),
            None => {
                let error = ErrorData::internal_error("the server could not respond", None);
                self.queue_error(&error);
            }
        }
        self.has_ended = true;
    }

    fn take_chunk(&mut self, chunk: Option<Result<Bytes, axum::Error>>) {
        let Some(Ok(chunk)) = chunk else {
            self.body = None;
            self.has_ended = true;
            return;
        };
        match self.parser.push(&chunk) {
            Ok(events) => {
                for event in events.into_iter().filter(|event| !event.data.is_empty()) {
                    self.queue_message(&event.data);
                }
            }
            Err(_) => {
                self.queue_error(&ErrorData::internal_error("the response is too long", None));
                self.has_ended = true;
            }
        }
    }

    fn queue_message(&mut self, message: &str) {
        if is_superseded_error(message) {
            return;
        }
        let request = &self.options.request;
        // The internal ids are random, so their first occurrence is the one to replace.
        let text = match &self.options.internal {
            Some(ids) => message
                .replacen(&format!("\"{}\"", ids.request), &request.id.to_string(), 1)
                .replacen(
                    &format!("\"{}\"", ids.progress_token),
                    &request.progress_token.to_string(),
                    1,
                ),
            None => message.to_owned(),
        };
        self.queue.push_back(format!("data: {text}\n\n").into());
    }

    fn queue_error(&mut self, error: &ErrorData) {
        let message = error_message(&self.options.request.id, error);
        self.queue.push_back(format!("data: {message}\n\n").into());
    }

    /// Returns the events as chunks of a body.
    pub(super) fn into_chunks(self) -> impl Stream<Item = Bytes> + Send + 'static {
        futures::stream::unfold(self, async |mut stream| Some((stream.next().await?, stream)))
    }

    pub(super) fn into_response(self) -> Response {
        event_stream_response(self.into_chunks())
    }
}

async fn opening_call(
    unopened: &mut Option<(watch::Receiver<Option<StreamedCall>>, OpenHook)>,
) -> StreamedCall {
    match unopened {
        Some((stored, _)) => next_call(stored).await,
        None => std::future::pending().await,
    }
}

async fn pending_response(handling: &mut Option<BoxFuture<'static, Response>>) -> Response {
    match handling {
        Some(handling) => handling.await,
        None => std::future::pending().await,
    }
}

async fn next_notification(notifications: &mut Option<mpsc::Receiver<String>>) -> String {
    match notifications {
        // When the sender is dropped, only the response remains to come.
        Some(queue) => match queue.recv().await {
            Some(message) => message,
            None => std::future::pending().await,
        },
        None => std::future::pending().await,
    }
}

async fn next_chunk(body: &mut Option<BodyDataStream>) -> Option<Result<Bytes, axum::Error>> {
    match body {
        Some(body) => body.next().await,
        None => std::future::pending().await,
    }
}

/// Returns the JSON-RPC error for a request.
pub(super) fn error_message(id: &Value, error: &ErrorData) -> Value {
    json!({ "jsonrpc": "2.0", "id": id, "error": error })
}

/// Returns a response with these events.
pub(super) fn event_stream_response(
    chunks: impl Stream<Item = Bytes> + Send + 'static,
) -> Response {
    let chunks = chunks.map(Ok::<_, std::convert::Infallible>);
    let mut response = Response::new(Body::from_stream(chunks));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Proxies must not collect events.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn an_event_id_holds_the_call_and_the_request() {
        let call: CallId = "tc_01M7H30ZMCDEMEZ1FGH3FVXEPM".parse().unwrap();
        let declared = json!({ "elicitation": { "form": {} } });
        let meta = json!({ "progressToken": "p",
            "io.modelcontextprotocol/clientCapabilities": declared });
        for (id, meta) in [(json!(7), json!({})), (json!("seven \u{00e4}"), meta)] {
            let message = json!({ "id": id, "params": { "_meta": meta } });
            let request = StreamedRequest::parse(&message).unwrap();
            let through_catalogue = id.is_string();
            let call = StreamedCall { id: call.clone(), through_catalogue };
            let event = CallEventId { call, request };
            let text = event.to_text();
            assert!(text.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'~'), "{text}");
            assert_eq!(CallEventId::parse(&text), Some(event));
        }
        for wrong in ["", "0", "1/3", "tc_1.l.x", "session~a~1", "tc_01M7H30ZMCDEMEZ1FGH3FVXEPM.l."]
        {
            assert_eq!(CallEventId::parse(wrong), None, "{wrong}");
        }
    }

    /// Returns the media type of the response to a call that is stored at once and ends after
    /// `work`.
    async fn media_type_after(
        work: impl Future<Output = ()> + Send + 'static,
        notification: Option<&str>,
    ) -> String {
        let (signal, stored) = CallStoredSignal::new();
        let (sender, notifications) = mpsc::channel(1);
        if let Some(message) = notification {
            sender.send(message.to_owned()).await.unwrap();
        }
        let handling = async move {
            let id: CallId = "tc_01M7H30ZMCDEMEZ1FGH3FVXEPM".parse().unwrap();
            signal.send(StreamedCall { id, through_catalogue: false });
            work.await;
            drop(sender);
            axum::response::IntoResponse::into_response(axum::Json(json!({ "id": 1 })))
        };
        let request = StreamedRequest::parse(&json!({ "id": 1, "params": {} })).unwrap();
        let options = CallStreamOptions {
            request,
            retry_ms: 5_000,
            priming: PrimingFormat::EmptyData,
            internal: None,
        };
        let hook: OpenHook = Box::new(|_| None);
        let response =
            respond(Box::pin(handling), Some(notifications), stored, options, hook).await;
        response.headers()[header::CONTENT_TYPE].to_str().unwrap().to_owned()
    }

    #[tokio::test]
    async fn a_call_that_does_not_end_at_once_is_answered_with_a_stream() {
        let stream = "text/event-stream";
        assert_eq!(media_type_after(std::future::ready(()), None).await, "application/json");
        assert_eq!(media_type_after(tokio::task::yield_now(), None).await, stream);
        assert_eq!(media_type_after(std::future::pending(), None).await, stream);
        assert_eq!(media_type_after(std::future::ready(()), Some("{}")).await, stream);
    }

    #[test]
    fn a_later_waiter_supersedes_the_one_before() {
        let waiters = Arc::new(StreamWaiters::default());
        let first = waiters.register("one");
        let other = waiters.register("two");
        let second = waiters.register("one");
        assert!(first.is_superseded() && !second.is_superseded() && !other.is_superseded());
        drop(first);
        let third = waiters.register("one");
        assert!(second.is_superseded() && !third.is_superseded());
        drop((second, third, other));
        assert!(waiters.0.lock().is_empty());
    }
}
