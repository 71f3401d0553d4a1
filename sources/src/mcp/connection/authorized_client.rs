//! The HTTP client that `rmcp` uses, with the current access token. When a token is refused, it is
//! renewed if possible and the request is repeated.
//!
//! `AuthClient` of `rmcp` 3.8.0 does not replace it: it reacts to a 401 for a token with one
//! refresh, and to nothing else. It neither begins a sign-in, nor obtains tokens with client
//! credentials, nor requests more scopes after a 403. With its rules at least six tests of
//! `upstreams::oauth` fail, among them `client_credentials_tokens_are_fetched`, and without the 403
//! alone `an_additional_scope_is_requested_once`. It also has no way to send the stateless calls
//! that do not pass through `rmcp`.
//!
//! `rmcp` opens the stream of server messages concurrently with the first request of a session
//! (`spawn_common_stream`). That request waits for it here (test
//! `no_request_precedes_the_event_stream`).

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use axum::http::{HeaderMap, HeaderName, HeaderValue};
use futures::stream::BoxStream;
use reqwest::{RequestBuilder, Response};
use rmcp::model::ClientJsonRpcMessage;
use rmcp::transport::streamable_http_client::{
    SseError, StreamableHttpClient, StreamableHttpPostResponse,
};
use sse_stream::Sse;
use tokio_util::sync::CancellationToken;

use super::http_error::{
    HttpTransportError, challenge_from_error, challenge_from_response, redact_error,
    request_secrets,
};
use super::http_post::McpPostRequest;
use super::message_limit::MAX_MESSAGE_BYTES;
use crate::mcp::oauth::{AuthChallenge, Authorizer};
use crate::mcp::raw_tool_list::ToolListCapture;

type Headers = HashMap<HeaderName, HeaderValue>;

/// Number of times a request is repeated with another token.
const MAX_TOKEN_RETRIES: u32 = 2;

/// Maximum time the first request of a session waits for the stream of server messages.
const LISTENS_WITHIN: Duration = Duration::from_secs(1);

/// An HTTP client with an optional authorizer.
#[derive(Clone)]
pub(super) struct AuthorizedClient {
    pub(super) client: reqwest::Client,
    pub(super) authorizer: Option<Arc<Authorizer>>,
    /// Captures raw tool lists.
    pub(super) capture: ToolListCapture,
    /// Canceled once the stream of server messages is open, or is known not to open.
    pub(super) stream_settled: CancellationToken,
}

impl AuthorizedClient {
    /// Waits until the stream of server messages is open, before the first request of a session.
    /// `rmcp` opens that stream concurrently, and messages sent before it is open may be lost.
    async fn wait_for_event_stream(&self, session: Option<&str>, message: &ClientJsonRpcMessage) {
        let asks = matches!(message, ClientJsonRpcMessage::Request(_));
        if session.is_none() || !asks || self.stream_settled.is_cancelled() {
            return;
        }
        if tokio::time::timeout(LISTENS_WITHIN, self.stream_settled.cancelled()).await.is_err() {
            // Some servers send no response headers before their first message.
            self.stream_settled.cancel();
        }
    }

    /// Sends a request that `rmcp` makes, and repeats it with another token while it is refused.
    async fn retry_with_token<T, F>(
        &self,
        first_token: Option<String>,
        send: impl FnMut(Option<String>) -> F,
    ) -> Result<T, HttpTransportError>
    where
        F: Future<Output = Result<T, HttpTransportError>>,
    {
        self.retry_refused(first_token, send, |answer| challenge_from_error(answer.as_ref().err()?))
            .await
    }

    /// Sends a request of Toolcrib's own. Only a refused request is repeated, so nothing takes
    /// effect twice.
    pub(super) async fn send(
        &self,
        make: impl Fn(&reqwest::Client, Option<&str>) -> RequestBuilder,
    ) -> Result<Response, reqwest::Error> {
        let send = |token: Option<String>| make(&self.client, token.as_deref()).send();
        self.retry_refused(None, send, |answer| challenge_from_response(answer.as_ref().ok()?))
            .await
    }

    /// Sends a request with the current token, and again with another one while it is refused.
    /// `challenge_in` finds the refusal in an answer.
    async fn retry_refused<T, E, F>(
        &self,
        first_token: Option<String>,
        mut send: impl FnMut(Option<String>) -> F,
        challenge_in: impl Fn(&Result<T, E>) -> Option<AuthChallenge>,
    ) -> Result<T, E>
    where
        F: Future<Output = Result<T, E>>,
    {
        let Some(authorizer) = &self.authorizer else { return send(first_token).await };
        let mut token = authorizer.token().await;
        let mut retries_left = MAX_TOKEN_RETRIES;
        loop {
            let answer = send(token.as_deref().map(str::to_owned)).await;
            let Some(challenge) = challenge_in(&answer) else {
                if answer.is_ok() {
                    authorizer.record_accepted(token.as_deref());
                }
                return answer;
            };
            let other = authorizer.replace_refused(token.as_deref(), challenge).await;
            match other.filter(|_| retries_left > 0) {
                Some(other) => token = Some(other),
                None => return answer,
            }
            retries_left -= 1;
        }
    }
}

impl StreamableHttpClient for AuthorizedClient {
    type Error = reqwest::Error;

    async fn post_message(
        &self,
        uri: Arc<str>,
        message: ClientJsonRpcMessage,
        session_id: Option<Arc<str>>,
        token: Option<String>,
        headers: Headers,
    ) -> Result<StreamableHttpPostResponse, HttpTransportError> {
        let limit = MAX_MESSAGE_BYTES;
        let response = self
            .post_message_with_max_sse_event_size(uri, message, session_id, token, headers, limit);
        response.await
    }

    async fn post_message_with_max_sse_event_size(
        &self,
        uri: Arc<str>,
        message: ClientJsonRpcMessage,
        session_id: Option<Arc<str>>,
        token: Option<String>,
        headers: Headers,
        limit: usize,
    ) -> Result<StreamableHttpPostResponse, HttpTransportError> {
        self.wait_for_event_stream(session_id.as_deref(), &message).await;
        let headers: HeaderMap = headers.into_iter().collect();
        self.retry_with_token(token, async |token| {
            let post = McpPostRequest {
                uri: &uri,
                message: &message,
                session: session_id.as_deref(),
                token: token.as_deref(),
                headers: headers.clone(),
                limit,
                capture: &self.capture,
            };
            post.send(&self.client).await
        })
        .await
    }

    async fn delete_session(
        &self,
        uri: Arc<str>,
        session_id: Arc<str>,
        token: Option<String>,
        headers: Headers,
    ) -> Result<(), HttpTransportError> {
        self.retry_with_token(token, async |token: Option<String>| {
            let secrets = request_secrets(token.as_deref(), &headers);
            self.client
                .delete_session(uri.clone(), session_id.clone(), token, headers.clone())
                .await
                .map_err(|error| redact_error(error, &secrets))
        })
        .await
    }

    async fn get_stream(
        &self,
        uri: Arc<str>,
        session_id: Option<Arc<str>>,
        last_event_id: Option<String>,
        token: Option<String>,
        headers: Headers,
    ) -> Result<BoxStream<'static, Result<Sse, SseError>>, HttpTransportError> {
        let limit = MAX_MESSAGE_BYTES;
        let response = self.get_stream_with_max_sse_event_size(
            uri,
            session_id,
            last_event_id,
            token,
            headers,
            limit,
        );
        response.await
    }

    async fn get_stream_with_max_sse_event_size(
        &self,
        uri: Arc<str>,
        session_id: Option<Arc<str>>,
        last_event_id: Option<String>,
        token: Option<String>,
        headers: Headers,
        limit: usize,
    ) -> Result<BoxStream<'static, Result<Sse, SseError>>, HttpTransportError> {
        let response = self.retry_with_token(token, async |token: Option<String>| {
            let (uri, session, last) = (uri.clone(), session_id.clone(), last_event_id.clone());
            let secrets = request_secrets(token.as_deref(), &headers);
            let headers = headers.clone();
            self.client
                .get_stream_with_max_sse_event_size(uri, session, last, token, headers, limit)
                .await
                .map_err(|error| redact_error(error, &secrets))
        });
        let stream = response.await;
        self.stream_settled.cancel();
        stream
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use axum::Router;
    use axum::routing::get;
    use reqwest::StatusCode;
    use serde_json::json;
    use tokio::sync::Notify;

    use super::*;

    /// Starts a server that answers the request for its stream (with 405) only after a signal, and
    /// records whether it has received a POST.
    async fn server() -> (Arc<str>, Arc<Notify>, Arc<AtomicBool>) {
        let (open, requested) = (Arc::new(Notify::new()), Arc::new(AtomicBool::new(false)));
        let (opens, notes) = (open.clone(), requested.clone());
        let stream = async move || {
            opens.notified().await;
            StatusCode::METHOD_NOT_ALLOWED
        };
        let record_request = async move || {
            notes.store(true, Ordering::SeqCst);
            StatusCode::ACCEPTED
        };
        let router = Router::new().route("/mcp", get(stream).post(record_request));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let uri = format!("http://{}/mcp", listener.local_addr().unwrap()).into();
        tokio::spawn(async move { axum::serve(listener, router).await });
        (uri, open, requested)
    }

    fn client() -> AuthorizedClient {
        AuthorizedClient {
            client: reqwest::Client::builder().no_proxy().build().unwrap(),
            authorizer: None,
            capture: ToolListCapture::default(),
            stream_settled: CancellationToken::new(),
        }
    }

    fn tools_list_request() -> ClientJsonRpcMessage {
        let text = json!({ "jsonrpc": "2.0", "id": 1, "method": "tools/list" });
        serde_json::from_value(text).unwrap()
    }

    #[tokio::test]
    async fn no_request_precedes_the_event_stream() {
        let (uri, open, requested) = server().await;
        let (client, session) = (client(), Some(Arc::from("a session")));
        let listening = {
            let (client, uri, session) = (client.clone(), uri.clone(), session.clone());
            tokio::spawn(async move {
                let stream = client.get_stream(uri, session, None, None, Headers::new());
                assert!(stream.await.is_err());
            })
        };
        let posting = tokio::spawn(async move {
            let _ =
                client.post_message(uri, tools_list_request(), session, None, Headers::new()).await;
        });
        tokio::time::sleep(LISTENS_WITHIN / 4).await;
        assert!(!requested.load(Ordering::SeqCst), "a request came before the stream was open");
        open.notify_one();
        listening.await.unwrap();
        posting.await.unwrap();
        assert!(requested.load(Ordering::SeqCst));
    }

    #[tokio::test]
    async fn requests_are_sent_to_a_server_that_opens_no_stream() {
        let (uri, _, requested) = server().await;
        let (client, session) = (client(), Some(Arc::from("a session")));
        let _ = client
            .post_message(uri.clone(), tools_list_request(), None, None, Headers::new())
            .await;
        assert!(requested.swap(false, Ordering::SeqCst), "without a session there is no stream");
        let _ = client.post_message(uri, tools_list_request(), session, None, Headers::new()).await;
        assert!(requested.load(Ordering::SeqCst));
    }
}
