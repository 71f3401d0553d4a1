//! One POST of the MCP protocol, as the `StreamableHttpClient` that `rmcp` 3.8.0 implements for
//! `reqwest::Client` makes it, with what that one lacks:
//!
//! - A size limit of responses that are not streams. `rmcp` reads them whole, regardless of their
//!   size (test `upstreams::bad::an_oversized_http_response_is_rejected`).
//! - The capture of tool lists as they were written, see `raw_tool_list` (test
//!   `upstreams::odd::unreadable_tools_are_skipped_by_name_and_the_others_work`).
//! - An error for a response to another request. `rmcp` drops it, and the call waits for its
//!   deadline (test `upstreams::odd::a_response_to_another_request_ends_with_outcome_unknown`).
//! - A tool list that is the first event of a stream is passed on as a plain response. If the
//!   stream ends right after it, `rmcp` may forward it from `drain_queued_stream_messages`, which
//!   does not record the header annotations of the tools.
//!
//! With `rmcp`'s own POST these three tests fail; the fourth case is a race and has no test.

use std::borrow::Cow;

use axum::http::header::{ACCEPT, CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use axum::http::{HeaderMap, HeaderValue};
use futures::{StreamExt, TryStreamExt};
use reqwest::{Response, StatusCode};
use rmcp::ErrorData;
use rmcp::model::{ClientJsonRpcMessage, ClientRequest, JsonRpcMessage, ServerJsonRpcMessage};
use rmcp::transport::auth::WWWAuthenticateParams;
use rmcp::transport::streamable_http_client::{
    AuthRequiredError, HttpStatusError, InsufficientScopeError, StreamableHttpError,
    StreamableHttpPostResponse,
};
use sse_stream::Sse;
use toolcrib_protocol::secrets::redaction::SecretRedactor;

use super::http_error::{HttpTransportError, redact_error, request_secrets};
use super::message_limit::{BodyError, SseEventStream, limited_event_stream, read_body};
use crate::mcp::raw_tool_list::ToolListCapture;

const SESSION: &str = "mcp-session-id";
const STREAM: &str = "text/event-stream";
const JSON: &str = "application/json";

/// Maximum number of characters shown of a response that cannot be parsed.
const MAX_EXCERPT_CHARS: usize = 300;

/// Maximum size of a response of which an excerpt is shown; a larger one is no error message.
const MAX_REDACTED_BYTES: usize = 64 << 10;

/// A message and the parameters of its request.
pub(super) struct McpPostRequest<'a> {
    pub(super) uri: &'a str,
    pub(super) message: &'a ClientJsonRpcMessage,
    pub(super) session: Option<&'a str>,
    pub(super) token: Option<&'a str>,
    pub(super) headers: HeaderMap,
    /// Maximum size of a response, or of one event of a stream.
    pub(super) limit: usize,
    /// Captures raw tool lists.
    pub(super) capture: &'a ToolListCapture,
}

impl McpPostRequest<'_> {
    pub(super) async fn send(
        mut self,
        client: &reqwest::Client,
    ) -> Result<StreamableHttpPostResponse, HttpTransportError> {
        let accepted = HeaderValue::from_static("text/event-stream, application/json");
        self.headers.insert(ACCEPT, accepted);
        if let Some(session) = self.session.and_then(|id| HeaderValue::from_str(id).ok()) {
            self.headers.insert(SESSION, session);
        }
        let mut request = client.post(self.uri).headers(self.headers.clone());
        if let Some(token) = self.token {
            request = request.bearer_auth(token);
        }
        let mut answer = request.json(self.message).send().await?;
        let status = answer.status();
        if let Some(refused) = self.auth_error(&answer) {
            return Err(redact_error(refused, &self.secrets()));
        }
        if matches!(status, StatusCode::ACCEPTED | StatusCode::NO_CONTENT) {
            return Ok(StreamableHttpPostResponse::Accepted);
        }
        if status == StatusCode::NOT_FOUND && self.session.is_some() {
            return Err(StreamableHttpError::SessionExpired);
        }
        let kind = header_text(answer.headers(), CONTENT_TYPE.as_str()).unwrap_or_default();
        let failed = overload_error(&answer);
        if let Some(failed) = failed
            && (!kind.starts_with(JSON) || status == StatusCode::TOO_MANY_REQUESTS)
        {
            return Err(failed.into());
        }
        let session = header_text(answer.headers(), SESSION);
        if status.is_success() && answer.content_length() == Some(0) && !self.is_request() {
            return Ok(StreamableHttpPostResponse::Accepted);
        }
        if status.is_success() && kind.starts_with(STREAM) {
            let events = limited_event_stream(answer, self.limit);
            return Ok(match self.tool_list_capture().cloned() {
                Some(capture) => {
                    let events =
                        events.map_ok(move |event| drop_unreadable_tools(event, &capture)).boxed();
                    self.unwrap_tool_list(events, session).await
                }
                None => StreamableHttpPostResponse::Sse(events, session),
            });
        }
        if status.is_success() && !kind.starts_with(JSON) {
            let error = StreamableHttpError::UnexpectedContentType(Some(kind));
            return Err(redact_error(error, &self.secrets()));
        }
        let body = read_body(&mut answer, self.limit).await.map_err(|error| match error {
            BodyError::Connection(error) => StreamableHttpError::Client(error),
            too_large @ BodyError::TooLarge(_) => unexpected(too_large.to_string()),
        })?;
        match status.is_success() {
            true => self.parse_response(&body, session),
            false => self.handle_error_status(status, &kind, &body, session),
        }
    }

    fn is_request(&self) -> bool {
        matches!(self.message, ClientJsonRpcMessage::Request(_))
    }

    /// Returns the id of the request.
    fn request_id(&self) -> Option<rmcp::model::RequestId> {
        let ClientJsonRpcMessage::Request(request) = self.message else { return None };
        Some(request.id.clone())
    }

    /// Returns the capture if the message requests a tool list.
    fn tool_list_capture(&self) -> Option<&ToolListCapture> {
        let ClientJsonRpcMessage::Request(request) = self.message else { return None };
        matches!(request.request, ClientRequest::ListToolsRequest(_)).then_some(self.capture)
    }

    /// Returns a tool list that is the first event of its stream as a plain JSON response. When the
    /// stream ends right after the list, `rmcp` may see the end first, and then ignores the header
    /// annotations of the tools.
    async fn unwrap_tool_list(
        &self,
        mut events: SseEventStream,
        session: Option<String>,
    ) -> StreamableHttpPostResponse {
        let mut seen = Vec::new();
        while let Some(event) = events.next().await {
            let data = event.as_ref().ok().and_then(|event| event.data.as_deref());
            let data = data.filter(|data| !data.is_empty()).map(str::to_owned);
            let ended = event.is_err();
            seen.push(event);
            let Some(data) = data else { if ended { break } else { continue } };
            match serde_json::from_str::<ServerJsonRpcMessage>(&data) {
                Ok(JsonRpcMessage::Response(answer))
                    if self.request_id() == Some(answer.id.clone()) =>
                {
                    let answer = JsonRpcMessage::Response(answer);
                    return StreamableHttpPostResponse::Json(answer, session);
                }
                _ => break,
            }
        }
        let events = futures::stream::iter(seen).chain(events).boxed();
        StreamableHttpPostResponse::Sse(events, session)
    }

    /// Returns the error for a 401 or 403 response that carries an authentication challenge.
    fn auth_error(&self, answer: &Response) -> Option<HttpTransportError> {
        let challenge = header_text(answer.headers(), WWW_AUTHENTICATE.as_str())?;
        match answer.status() {
            StatusCode::UNAUTHORIZED => {
                Some(StreamableHttpError::AuthRequired(AuthRequiredError::new(challenge)))
            }
            StatusCode::FORBIDDEN => {
                let base = reqwest::Url::parse(self.uri).ok()?;
                let scope = WWWAuthenticateParams::parse(&challenge, &base).scope;
                let error = InsufficientScopeError::new(challenge, scope);
                Some(StreamableHttpError::InsufficientScope(error))
            }
            _ => None,
        }
    }

    fn parse_response(
        &self,
        body: &[u8],
        session: Option<String>,
    ) -> Result<StreamableHttpPostResponse, HttpTransportError> {
        let rest = self.tool_list_capture().and_then(|capture| capture.capture_response(body));
        let body = rest.as_ref().map_or(body, |rest| rest.as_bytes());
        match serde_json::from_slice::<ServerJsonRpcMessage>(body) {
            // `rmcp` would drop a response with another id, and the request would wait forever.
            Ok(JsonRpcMessage::Response(answer))
                if self.request_id().is_some_and(|id| id != answer.id) =>
            {
                Err(unexpected("it answered another request than was made".to_owned()))
            }
            Ok(message) => Ok(StreamableHttpPostResponse::Json(message, session)),
            // A notification expects no response.
            Err(_) if !self.is_request() => Ok(StreamableHttpPostResponse::Accepted),
            Err(error) => Err(unexpected(format!("{error}: {}", self.body_excerpt(body)))),
        }
    }

    /// Interprets a response with an error status.
    fn handle_error_status(
        &self,
        status: StatusCode,
        kind: &str,
        body: &[u8],
        session: Option<String>,
    ) -> Result<StreamableHttpPostResponse, HttpTransportError> {
        let rpc_error = serde_json::from_slice::<ServerJsonRpcMessage>(body).ok();
        let rpc_error = rpc_error.filter(|message| matches!(message, JsonRpcMessage::Error(_)));
        let is_unauthorized = matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN);
        if let Some(id) =
            self.discovery_request_id().filter(|_| status.is_client_error() && !is_unauthorized)
        {
            // A legacy server does not know the discovery request: its refusal is the answer.
            let error = match rpc_error {
                Some(JsonRpcMessage::Error(rpc_error)) => rpc_error.error,
                _ => ErrorData::invalid_request(
                    format!("HTTP {status}: {}", self.body_excerpt(body)),
                    None,
                ),
            };
            let answer = ServerJsonRpcMessage::error(error, Some(id));
            return Ok(StreamableHttpPostResponse::Json(answer, None));
        }
        match rpc_error.filter(|_| !is_unauthorized && kind.starts_with(JSON)) {
            Some(message) => Ok(StreamableHttpPostResponse::Json(message, session)),
            None if status.is_server_error() => {
                Err(HttpStatusError::new(status.as_u16(), None).into())
            }
            None => Err(unexpected(format!("HTTP {status}: {}", self.body_excerpt(body)))),
        }
    }

    /// Returns the start of a response, without the credentials of the request. They are redacted
    /// before the text is truncated, because a part of one would not be recognized.
    fn body_excerpt(&self, body: &[u8]) -> String {
        if body.len() > MAX_REDACTED_BYTES {
            return format!("a response of {} bytes", body.len());
        }
        let text = self.secrets().redact(&String::from_utf8_lossy(body));
        text.chars().take(MAX_EXCERPT_CHARS).collect()
    }

    /// Returns the credentials of the request.
    fn secrets(&self) -> SecretRedactor {
        request_secrets(self.token, &self.headers)
    }

    /// Returns the request's id if it is the discovery request, sent before the revision is known.
    fn discovery_request_id(&self) -> Option<rmcp::model::RequestId> {
        let ClientJsonRpcMessage::Request(request) = self.message else { return None };
        let first = matches!(request.request, ClientRequest::DiscoverRequest(_));
        (first && self.session.is_none()).then(|| request.id.clone())
    }
}

/// Removes the tools that cannot be parsed from an event.
fn drop_unreadable_tools(mut event: Sse, capture: &ToolListCapture) -> Sse {
    let rest = event.data.as_ref().and_then(|data| capture.capture_response(data.as_bytes()));
    if rest.is_some() {
        event.data = rest;
    }
    event
}

fn header_text(headers: &HeaderMap, name: &str) -> Option<String> {
    headers.get(name).and_then(|value| value.to_str().ok()).map(str::to_owned)
}

fn unexpected(message: String) -> HttpTransportError {
    StreamableHttpError::UnexpectedServerResponse(Cow::Owned(message))
}

fn overload_error(answer: &Response) -> Option<HttpStatusError> {
    let status = answer.status();
    let busy = status == StatusCode::TOO_MANY_REQUESTS || status.is_server_error();
    let after = header_text(answer.headers(), RETRY_AFTER.as_str());
    busy.then(|| HttpStatusError::new(status.as_u16(), after))
}
