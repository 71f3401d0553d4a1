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

use super::oauth::{Challenge, Pass};
use super::post::Post;
use super::tape::Tape;

type Failed = StreamableHttpError<reqwest::Error>;
type Headers = HashMap<HeaderName, HeaderValue>;

/// Number of times a request is repeated with another token.
const AGAIN: u32 = 2;

/// Maximum time the first request of a session waits for the stream of server messages.
const LISTENS_WITHIN: Duration = Duration::from_secs(1);

/// An HTTP client with an optional authorizer.
#[derive(Clone)]
pub(super) struct Authorised {
    pub(super) client: reqwest::Client,
    pub(super) pass: Option<Arc<Pass>>,
    /// Captures raw tool lists.
    pub(super) tape: Tape,
    /// Canceled once the stream of server messages is open, or is known not to open.
    pub(super) listens: CancellationToken,
}

/// Returns the authentication challenge in an error, if it is one.
fn challenge(error: &Failed) -> Option<Challenge> {
    match error {
        StreamableHttpError::AuthRequired(said) => {
            Some(Challenge { forbidden: false, header: Some(said.www_authenticate_header.clone()) })
        }
        StreamableHttpError::InsufficientScope(said) => {
            Some(Challenge { forbidden: true, header: Some(said.www_authenticate_header.clone()) })
        }
        StreamableHttpError::UnexpectedServerResponse(said) if said.starts_with("HTTP 401") => {
            Some(Challenge { forbidden: false, header: None })
        }
        _ => None,
    }
}

impl Authorised {
    /// Waits until the stream of server messages is open, before the first request of a session.
    /// `rmcp` opens that stream concurrently, and messages sent before it is open may be lost.
    async fn when_listened_to(&self, session: Option<&str>, message: &ClientJsonRpcMessage) {
        let asks = matches!(message, ClientJsonRpcMessage::Request(_));
        if session.is_none() || !asks || self.listens.is_cancelled() {
            return;
        }
        if tokio::time::timeout(LISTENS_WITHIN, self.listens.cancelled()).await.is_err() {
            // Some servers send no response headers before their first message.
            self.listens.cancel();
        }
    }

    async fn with_token<T, F>(
        &self,
        given: Option<String>,
        mut ask: impl FnMut(Option<String>) -> F,
    ) -> Result<T, Failed>
    where
        F: Future<Output = Result<T, Failed>>,
    {
        let Some(pass) = &self.pass else { return ask(given).await };
        let mut token = pass.token().await;
        for _ in 0..AGAIN {
            let error = match ask(token.as_deref().map(str::to_owned)).await {
                Ok(answer) => {
                    pass.taken(token.as_deref());
                    return Ok(answer);
                }
                Err(error) => error,
            };
            let Some(challenge) = challenge(&error) else { return Err(error) };
            match pass.refused(token.as_deref(), challenge).await {
                Some(other) => token = Some(other),
                None => return Err(error),
            }
        }
        let last = ask(token.as_deref().map(str::to_owned)).await;
        match last.as_ref().err().and_then(challenge) {
            Some(challenge) => drop(pass.refused(token.as_deref(), challenge).await),
            None => pass.taken(token.as_deref()),
        }
        last
    }
}

/// Returns the authentication challenge in a response that `rmcp` has not read.
fn refusal(answer: &Response) -> Option<Challenge> {
    let status = answer.status();
    let header = answer.headers().get(WWW_AUTHENTICATE);
    let header = header.and_then(|value| value.to_str().ok()).map(str::to_owned);
    match status {
        StatusCode::UNAUTHORIZED => Some(Challenge { forbidden: false, header }),
        StatusCode::FORBIDDEN if header.is_some() => Some(Challenge { forbidden: true, header }),
        _ => None,
    }
}

impl Authorised {
    /// Sends a request of Toolcrib's own. Only a refused request is repeated, so nothing takes
    /// effect twice.
    pub(super) async fn send(
        &self,
        make: impl Fn(&reqwest::Client, Option<&str>) -> RequestBuilder,
    ) -> Result<Response, reqwest::Error> {
        let Some(pass) = &self.pass else { return make(&self.client, None).send().await };
        let mut token = pass.token().await;
        for _ in 0..AGAIN {
            let answer = make(&self.client, token.as_deref()).send().await?;
            let Some(challenge) = refusal(&answer) else {
                pass.taken(token.as_deref());
                return Ok(answer);
            };
            match pass.refused(token.as_deref(), challenge).await {
                Some(other) => token = Some(other),
                None => return Ok(answer),
            }
        }
        let last = make(&self.client, token.as_deref()).send().await?;
        match refusal(&last) {
            Some(challenge) => drop(pass.refused(token.as_deref(), challenge).await),
            None => pass.taken(token.as_deref()),
        }
        Ok(last)
    }
}

impl StreamableHttpClient for Authorised {
    type Error = reqwest::Error;

    async fn post_message(
        &self,
        uri: Arc<str>,
        message: ClientJsonRpcMessage,
        session_id: Option<Arc<str>>,
        token: Option<String>,
        headers: Headers,
    ) -> Result<StreamableHttpPostResponse, Failed> {
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
    ) -> Result<StreamableHttpPostResponse, Failed> {
        self.when_listened_to(session_id.as_deref(), &message).await;
        let headers: HeaderMap = headers.into_iter().collect();
        self.with_token(token, async |token| {
            let post = Post {
                uri: &uri,
                message: &message,
                session: session_id.as_deref(),
                token: token.as_deref(),
                headers: headers.clone(),
                limit,
                tape: &self.tape,
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
    ) -> Result<(), Failed> {
        self.with_token(token, |token| {
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
    ) -> Result<BoxStream<'static, Result<Sse, SseError>>, Failed> {
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
    ) -> Result<BoxStream<'static, Result<Sse, SseError>>, Failed> {
        let asking = self.with_token(token, |token| {
            let (uri, session, last) = (uri.clone(), session_id.clone(), last_event_id.clone());
            let headers = headers.clone();
            self.client
                .get_stream_with_max_sse_event_size(uri, session, last, token, headers, limit)
        });
        let stream = asking.await;
        self.listens.cancel();
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

    fn client() -> Authorised {
        Authorised {
            client: reqwest::Client::builder().no_proxy().build().unwrap(),
            pass: None,
            tape: Tape::default(),
            listens: CancellationToken::new(),
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
