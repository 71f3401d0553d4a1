//! The HTTP client that `rmcp` uses, with the current access token. When a token is refused, it is
//! renewed if possible and the request is repeated.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use axum::http::header::WWW_AUTHENTICATE;
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use futures::stream::BoxStream;
use reqwest::{RequestBuilder, Response, StatusCode};
use rmcp::model::ClientJsonRpcMessage;
use rmcp::transport::streamable_http_client::{
    SseError, StreamableHttpClient, StreamableHttpError, StreamableHttpPostResponse,
};
use sse_stream::Sse;
use tokio_util::sync::CancellationToken;

use super::oauth::{AuthChallenge, Authorizer};
use crate::mcp::http_post::McpPostRequest;
use crate::mcp::raw_tool_list::ToolListCapture;

type HttpTransportError = StreamableHttpError<reqwest::Error>;
type Headers = HashMap<HeaderName, HeaderValue>;

/// Number of times a request is repeated with another token.
const AGAIN: u32 = 2;

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

/// Returns the authentication challenge in an error, if it is one.
fn challenge_from_error(error: &HttpTransportError) -> Option<AuthChallenge> {
    match error {
        StreamableHttpError::AuthRequired(said) => Some(AuthChallenge {
            forbidden: false,
            header: Some(said.www_authenticate_header.clone()),
        }),
        StreamableHttpError::InsufficientScope(said) => Some(AuthChallenge {
            forbidden: true,
            header: Some(said.www_authenticate_header.clone()),
        }),
        StreamableHttpError::UnexpectedServerResponse(said) if said.starts_with("HTTP 401") => {
            Some(AuthChallenge { forbidden: false, header: None })
        }
        _ => None,
    }
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

    async fn retry_with_token<T, F>(
        &self,
        given: Option<String>,
        mut ask: impl FnMut(Option<String>) -> F,
    ) -> Result<T, HttpTransportError>
    where
        F: Future<Output = Result<T, HttpTransportError>>,
    {
        let Some(pass) = &self.authorizer else { return ask(given).await };
        let mut token = pass.token().await;
        for _ in 0..AGAIN {
            let error = match ask(token.as_deref().map(str::to_owned)).await {
                Ok(answer) => {
                    pass.record_accepted(token.as_deref());
                    return Ok(answer);
                }
                Err(error) => error,
            };
            let Some(challenge) = challenge_from_error(&error) else { return Err(error) };
            match pass.replace_refused(token.as_deref(), challenge).await {
                Some(other) => token = Some(other),
                None => return Err(error),
            }
        }
        let last = ask(token.as_deref().map(str::to_owned)).await;
        match last.as_ref().err().and_then(challenge_from_error) {
            Some(challenge) => drop(pass.replace_refused(token.as_deref(), challenge).await),
            None => pass.record_accepted(token.as_deref()),
        }
        last
    }
}

/// Returns the authentication challenge in a response that `rmcp` has not read.
fn challenge_from_response(answer: &Response) -> Option<AuthChallenge> {
    let status = answer.status();
    let header = answer.headers().get(WWW_AUTHENTICATE);
    let header = header.and_then(|value| value.to_str().ok()).map(str::to_owned);
    match status {
        StatusCode::UNAUTHORIZED => Some(AuthChallenge { forbidden: false, header }),
        StatusCode::FORBIDDEN if header.is_some() => {
            Some(AuthChallenge { forbidden: true, header })
        }
        _ => None,
    }
}

impl AuthorizedClient {
    /// Sends a request of Toolcrib's own. Only a refused request is repeated, so nothing takes
    /// effect twice.
    pub(super) async fn send(
        &self,
        make: impl Fn(&reqwest::Client, Option<&str>) -> RequestBuilder,
    ) -> Result<Response, reqwest::Error> {
        let Some(pass) = &self.authorizer else { return make(&self.client, None).send().await };
        let mut token = pass.token().await;
        for _ in 0..AGAIN {
            let answer = make(&self.client, token.as_deref()).send().await?;
            let Some(challenge) = challenge_from_response(&answer) else {
                pass.record_accepted(token.as_deref());
                return Ok(answer);
            };
            match pass.replace_refused(token.as_deref(), challenge).await {
                Some(other) => token = Some(other),
                None => return Ok(answer),
            }
        }
        let last = make(&self.client, token.as_deref()).send().await?;
        match challenge_from_response(&last) {
            Some(challenge) => drop(pass.replace_refused(token.as_deref(), challenge).await),
            None => pass.record_accepted(token.as_deref()),
        }
        Ok(last)
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
        let limit = super::connection::MAX_MESSAGE_BYTES;
        let asking = self
            .post_message_with_max_sse_event_size(uri, message, session_id, token, headers, limit);
        asking.await
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
        self.retry_with_token(token, |token| {
            self.client.delete_session(uri.clone(), session_id.clone(), token, headers.clone())
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
        let limit = super::connection::MAX_MESSAGE_BYTES;
        let asking = self.get_stream_with_max_sse_event_size(
            uri,
            session_id,
            last_event_id,
            token,
            headers,
            limit,
        );
        asking.await
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
        let asking = self.retry_with_token(token, |token| {
            let (uri, session, last) = (uri.clone(), session_id.clone(), last_event_id.clone());
            let headers = headers.clone();
            self.client
                .get_stream_with_max_sse_event_size(uri, session, last, token, headers, limit)
        });
        let stream = asking.await;
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
    use serde_json::json;
    use tokio::sync::Notify;

    use super::*;

    /// Starts a server that opens its stream on a signal, and records whether a request came
    /// before.
    async fn server() -> (Arc<str>, Arc<Notify>, Arc<AtomicBool>) {
        let (open, asked) = (Arc::new(Notify::new()), Arc::new(AtomicBool::new(false)));
        let (opens, notes) = (open.clone(), asked.clone());
        let stream = async move || {
            opens.notified().await;
            StatusCode::METHOD_NOT_ALLOWED
        };
        let ask = async move || {
            notes.store(true, Ordering::SeqCst);
            StatusCode::ACCEPTED
        };
        let router = Router::new().route("/mcp", get(stream).post(ask));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let uri = format!("http://{}/mcp", listener.local_addr().unwrap()).into();
        tokio::spawn(async move { axum::serve(listener, router).await });
        (uri, open, asked)
    }

    fn client() -> AuthorizedClient {
        AuthorizedClient {
            client: reqwest::Client::builder().no_proxy().build().unwrap(),
            authorizer: None,
            capture: ToolListCapture::default(),
            stream_settled: CancellationToken::new(),
        }
    }

    fn question() -> ClientJsonRpcMessage {
        let text = json!({ "jsonrpc": "2.0", "id": 1, "method": "tools/list" });
        serde_json::from_value(text).unwrap()
    }

    #[tokio::test]
    async fn nothing_is_asked_in_a_session_before_somebody_listens() {
        let (uri, open, asked) = server().await;
        let (client, session) = (client(), Some(Arc::from("a session")));
        let listening = {
            let (client, uri, session) = (client.clone(), uri.clone(), session.clone());
            tokio::spawn(async move {
                let stream = client.get_stream(uri, session, None, None, Headers::new());
                assert!(stream.await.is_err());
            })
        };
        let asking = tokio::spawn(async move {
            let _ = client.post_message(uri, question(), session, None, Headers::new()).await;
        });
        tokio::time::sleep(LISTENS_WITHIN / 4).await;
        assert!(!asked.load(Ordering::SeqCst), "asked before the stream was open");
        open.notify_one();
        listening.await.unwrap();
        asking.await.unwrap();
        assert!(asked.load(Ordering::SeqCst));
    }

    #[tokio::test]
    async fn a_server_that_opens_no_stream_is_asked_all_the_same() {
        let (uri, _, asked) = server().await;
        let (client, session) = (client(), Some(Arc::from("a session")));
        let _ = client.post_message(uri.clone(), question(), None, None, Headers::new()).await;
        assert!(asked.swap(false, Ordering::SeqCst), "without a session there is no stream");
        let _ = client.post_message(uri, question(), session, None, Headers::new()).await;
        assert!(asked.load(Ordering::SeqCst));
    }
}
