//! The HTTP client that `rmcp` speaks through, with the token of the moment: one that is refused is
//! renewed where it can be, and the request is made again.

use std::collections::HashMap;
use std::sync::Arc;

use axum::http::header::WWW_AUTHENTICATE;
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use futures::stream::BoxStream;
use reqwest::{RequestBuilder, Response, StatusCode};
use rmcp::model::ClientJsonRpcMessage;
use rmcp::transport::streamable_http_client::{
    SseError, StreamableHttpClient, StreamableHttpError, StreamableHttpPostResponse,
};
use sse_stream::Sse;

use super::oauth::{Challenge, Pass};
use super::post::Post;
use super::tape::Tape;

type Failed = StreamableHttpError<reqwest::Error>;
type Headers = HashMap<HeaderName, HeaderValue>;

/// How often a request is made again with another token.
const AGAIN: u32 = 2;

/// A client that may have a pass.
#[derive(Clone)]
pub(super) struct Authorised {
    pub(super) client: reqwest::Client,
    pub(super) pass: Option<Arc<Pass>>,
    /// Where lists of tools are kept as they came.
    pub(super) tape: Tape,
}

/// Whether an upstream does not let us in, and what it says about that.
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

/// The same of an answer that was not read by `rmcp`.
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
    /// Makes a request of our own. The one that is made again was turned away, so nothing happens
    /// twice.
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
        self.with_token(token, |token| {
            let (uri, session, last) = (uri.clone(), session_id.clone(), last_event_id.clone());
            let headers = headers.clone();
            self.client
                .get_stream_with_max_sse_event_size(uri, session, last, token, headers, limit)
        })
        .await
    }
}
