//! The HTTP client of `toolcrib mcp`: a server that goes away and comes back is not noticed by the
//! MCP client.
//!
//! A message that did not reach the server is sent again, and a stream that breaks before its
//! response is continued. Each `tools/call` has an idempotency key, so a repeated one joins the
//! call that the server already has. A server that stays away ends the request with an error: no
//! request waits forever.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::http::{HeaderName, HeaderValue};
use futures::StreamExt;
use futures::stream::BoxStream;
use rmcp::model::{
    ClientJsonRpcMessage, ClientRequest, ErrorData, GetMeta, RequestId, ServerJsonRpcMessage,
};
use rmcp::transport::streamable_http_client::{
    SseError, StreamableHttpClient, StreamableHttpError, StreamableHttpPostResponse,
};
use sse_stream::Sse;
use tokio::time::Instant;
use tokio_util::task::TaskTracker;

type Headers = HashMap<HeaderName, HeaderValue>;
type HttpError = StreamableHttpError<reqwest::Error>;
type EventStream = BoxStream<'static, Result<Sse, SseError>>;

/// Maximum time that the server may be away before its requests fail.
const OUTAGE_LIMIT: Duration = Duration::from_secs(60);

/// Time before the first repetition; it doubles up to the maximum.
const FIRST_DELAY: Duration = Duration::from_millis(50);
const MAX_DELAY: Duration = Duration::from_secs(2);

/// The entry of `_meta` with which a repeated call joins the first one.
const IDEMPOTENCY_KEY: &str = "toolcrib/idempotency_key";

/// An HTTP client that repeats requests to a server that went away.
#[derive(Clone)]
pub(super) struct RetryingClient {
    http: reqwest::Client,
    /// URL of the server's API.
    server: Arc<str>,
    /// True once the server has responded. A server that never did is reported at once.
    has_responded: Arc<AtomicBool>,
    cancellations: TaskTracker,
}

/// A request with everything that is needed to send it again.
#[derive(Clone)]
struct SentRequest {
    uri: Arc<str>,
    message: ClientJsonRpcMessage,
    session: Option<Arc<str>>,
    auth: Option<String>,
    headers: Headers,
    max_event_bytes: usize,
}

impl SentRequest {
    fn id(&self) -> Option<&RequestId> {
        match &self.message {
            ClientJsonRpcMessage::Request(request) => Some(&request.id),
            _ => None,
        }
    }

    fn is_tool_call(&self) -> bool {
        matches!(&self.message, ClientJsonRpcMessage::Request(request)
            if matches!(request.request, ClientRequest::CallToolRequest(_)))
    }

    /// Gives a `tools/call` an idempotency key, unless the MCP client has chosen one.
    fn add_idempotency_key(&mut self) {
        if let ClientJsonRpcMessage::Request(request) = &mut self.message
            && matches!(request.request, ClientRequest::CallToolRequest(_))
        {
            let key = || format!("mcp-{}", ulid::Ulid::generate()).into();
            let meta = &mut request.request.get_meta_mut().0.0;
            meta.entry(IDEMPOTENCY_KEY).or_insert_with(key);
        }
    }
}

impl RetryingClient {
    pub(super) fn new(http: reqwest::Client, server: &str) -> Self {
        let (has_responded, cancellations) = (Arc::default(), TaskTracker::new());
        Self { http, server: server.into(), has_responded, cancellations }
    }

    /// Waits until the calls that were given up are canceled.
    pub(super) async fn finish(&self) {
        self.cancellations.close();
        self.cancellations.wait().await;
    }

    async fn post(&self, request: &SentRequest) -> Result<StreamableHttpPostResponse, HttpError> {
        let SentRequest { uri, message, session, auth, headers, max_event_bytes } = request.clone();
        let posted = self.http.post_message_with_max_sse_event_size(
            uri,
            message,
            session,
            auth,
            headers,
            max_event_bytes,
        );
        let response = posted.await;
        if !response.as_ref().is_err_and(is_outage) {
            self.has_responded.store(true, Ordering::Relaxed);
        }
        response
    }

    /// Begins an outage: the time in which a request is repeated.
    fn outage(&self) -> Outage {
        let has_responded = self.has_responded.clone();
        Outage { has_responded, until: Instant::now() + OUTAGE_LIMIT, delay: FIRST_DELAY }
    }

    /// Opens a stream again after its last event.
    async fn reopen(
        &self,
        request: &SentRequest,
        last_event_id: Option<String>,
    ) -> Result<StreamableHttpPostResponse, HttpError> {
        // A request whose stream has no event id is sent again.
        if last_event_id.is_none() && request.id().is_some() {
            return self.post(request).await;
        }
        let is_version = |name: &HeaderName| name.as_str() == "mcp-protocol-version";
        let headers = request.headers.iter().filter(|(name, _)| is_version(name));
        let stream = self.http.get_stream_with_max_sse_event_size(
            request.uri.clone(),
            request.session.clone(),
            last_event_id,
            request.auth.clone(),
            headers.map(|(name, value)| (name.clone(), value.clone())).collect(),
            request.max_event_bytes,
        );
        Ok(StreamableHttpPostResponse::Sse(stream.await?, None))
    }

    /// Cancels the call that a stream belongs to. Closing the stream cancels no call with an
    /// idempotency key.
    fn cancel_call(&self, event_id: &str) {
        let Some((call, _)) = event_id.split_once('.') else { return };
        let url = format!("{}/v1/tool_calls/{call}/cancel", self.server);
        let body = serde_json::json!({ "reason": "the client canceled the request" });
        let request = self.http.post(url).json(&body);
        // A call that has ended meanwhile needs no cancellation.
        self.cancellations.spawn(async move { drop(request.send().await) });
    }
}

/// Returns whether the server is away, so that the same request may succeed later.
fn is_outage(error: &HttpError) -> bool {
    match error {
        HttpError::Client(error) => error.status().is_none() && !error.is_builder(),
        HttpError::HttpStatus(error) => matches!(error.status, 502..=504),
        HttpError::Sse(_) | HttpError::Io(_) | HttpError::UnexpectedEndOfStream => true,
        _ => false,
    }
}

/// The repetitions of one request while the server is away.
struct Outage {
    has_responded: Arc<AtomicBool>,
    until: Instant,
    delay: Duration,
}

impl Outage {
    /// Waits before the next repetition. Returns `false` if the error is final: the server refused
    /// the request, has never responded, or has been away for too long.
    async fn wait_after(&mut self, error: &HttpError) -> bool {
        let is_over = Instant::now() + self.delay >= self.until;
        if is_over || !is_outage(error) || !self.has_responded.load(Ordering::Relaxed) {
            return false;
        }
        tokio::time::sleep(self.delay).await;
        self.delay = (self.delay * 2).min(MAX_DELAY);
        true
    }
}

/// A stream that is continued until its response has arrived.
struct ContinuedStream {
    client: RetryingClient,
    request: SentRequest,
    events: EventStream,
    last_event_id: Option<String>,
    has_ended: bool,
}

impl ContinuedStream {
    fn open(client: &RetryingClient, request: SentRequest, events: EventStream) -> EventStream {
        let (client, last_event_id) = (client.clone(), None);
        let stream = Self { client, request, events, last_event_id, has_ended: false };
        futures::stream::unfold(stream, async |mut stream| Some((stream.next().await?, stream)))
            .boxed()
    }

    async fn next(&mut self) -> Option<Result<Sse, SseError>> {
        while !self.has_ended {
            if let Some(Ok(event)) = self.events.next().await {
                if let Some(id) = event.id.as_ref().filter(|id| !id.is_empty()) {
                    self.last_event_id = Some(id.clone());
                }
                self.has_ended = self.is_response(&event);
                return Some(Ok(event));
            }
            match self.reopen().await {
                Ok(StreamableHttpPostResponse::Sse(events, _)) => self.events = events,
                Ok(StreamableHttpPostResponse::Json(message, _)) => {
                    self.has_ended = true;
                    return Some(Ok(message_event(&message)));
                }
                // The stream of a session may end: the MCP client then receives no notifications.
                Ok(_) => self.has_ended = true,
                Err(error) => {
                    self.has_ended = true;
                    let id = self.request.id()?.clone();
                    let uri = &self.request.uri;
                    let error = ErrorData::internal_error(format!("{uri}: {error}"), None);
                    return Some(Ok(message_event(&ServerJsonRpcMessage::error(error, Some(id)))));
                }
            }
        }
        None
    }

    /// Opens the stream again, once the server is back.
    async fn reopen(&mut self) -> Result<StreamableHttpPostResponse, HttpError> {
        let mut outage = self.client.outage();
        loop {
            match self.client.reopen(&self.request, self.last_event_id.clone()).await {
                Err(error) if outage.wait_after(&error).await => {}
                result => return result,
            }
        }
    }

    /// Returns whether the event has the response to the request.
    fn is_response(&self, event: &Sse) -> bool {
        let Some(id) = self.request.id() else { return false };
        let data = event.data.as_deref().unwrap_or_default();
        match serde_json::from_str::<ServerJsonRpcMessage>(data) {
            Ok(ServerJsonRpcMessage::Response(response)) => response.id == *id,
            Ok(ServerJsonRpcMessage::Error(error)) => error.id.as_ref() == Some(id),
            _ => false,
        }
    }
}

impl Drop for ContinuedStream {
    fn drop(&mut self) {
        // An MCP client with a session cancels with a notification.
        let has_no_session = self.request.session.is_none() && self.request.is_tool_call();
        if let Some(id) = self.last_event_id.take().filter(|_| has_no_session && !self.has_ended) {
            self.client.cancel_call(&id);
        }
    }
}

fn message_event(message: &ServerJsonRpcMessage) -> Sse {
    Sse::default().data(serde_json::to_string(message).unwrap_or_default())
}

impl StreamableHttpClient for RetryingClient {
    type Error = reqwest::Error;

    async fn post_message(
        &self,
        uri: Arc<str>,
        message: ClientJsonRpcMessage,
        session: Option<Arc<str>>,
        auth: Option<String>,
        headers: Headers,
    ) -> Result<StreamableHttpPostResponse, HttpError> {
        let limit = usize::MAX;
        self.post_message_with_max_sse_event_size(uri, message, session, auth, headers, limit).await
    }

    async fn post_message_with_max_sse_event_size(
        &self,
        uri: Arc<str>,
        message: ClientJsonRpcMessage,
        session: Option<Arc<str>>,
        auth: Option<String>,
        headers: Headers,
        max_event_bytes: usize,
    ) -> Result<StreamableHttpPostResponse, HttpError> {
        let mut request = SentRequest { uri, message, session, auth, headers, max_event_bytes };
        request.add_idempotency_key();
        let mut outage = self.outage();
        loop {
            match self.post(&request).await {
                Ok(StreamableHttpPostResponse::Sse(events, session)) if request.id().is_some() => {
                    let events = ContinuedStream::open(self, request, events);
                    return Ok(StreamableHttpPostResponse::Sse(events, session));
                }
                Err(error) if outage.wait_after(&error).await => {}
                result => return result,
            }
        }
    }

    async fn delete_session(
        &self,
        uri: Arc<str>,
        session: Arc<str>,
        auth: Option<String>,
        headers: Headers,
    ) -> Result<(), HttpError> {
        self.http.delete_session(uri, session, auth, headers).await
    }

    async fn get_stream(
        &self,
        uri: Arc<str>,
        session: Option<Arc<str>>,
        last_event_id: Option<String>,
        auth: Option<String>,
        headers: Headers,
    ) -> Result<EventStream, HttpError> {
        let limit = usize::MAX;
        self.get_stream_with_max_sse_event_size(uri, session, last_event_id, auth, headers, limit)
            .await
    }

    async fn get_stream_with_max_sse_event_size(
        &self,
        uri: Arc<str>,
        session: Option<Arc<str>>,
        last_event_id: Option<String>,
        auth: Option<String>,
        headers: Headers,
        max_event_bytes: usize,
    ) -> Result<EventStream, HttpError> {
        let mut outage = self.outage();
        loop {
            let opened = self.http.get_stream_with_max_sse_event_size(
                uri.clone(),
                session.clone(),
                last_event_id.clone(),
                auth.clone(),
                headers.clone(),
                max_event_bytes,
            );
            match opened.await {
                Err(error) if outage.wait_after(&error).await => {}
                result => return result,
            }
        }
    }
}
