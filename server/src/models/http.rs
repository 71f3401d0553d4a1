//! Sends one request to an endpoint and reads its response in chunks, within limits of size, total
//! time and idle time. An error becomes a [`ModelError`], which says whether a retry may help.

use std::error::Error as _;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

use axum::body::Bytes;
use reqwest::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use reqwest::{Client, Response, StatusCode, Url};
use serde_json::{Value, json};
use tokio::time::{Instant, timeout, timeout_at};
use toolcrib::fault::{Code, Fault};
use toolcrib::model::{Listener, Reply, Silence};

use super::discreet::{Discreet, without};
use super::{Kind, shown};
use crate::auth::is_loopback_name;
use crate::outbound::retry_after_ms;
use crate::sse::Parser;

/// Timeout of a connection attempt.
const CONNECT: Duration = Duration::from_secs(10);

/// Maximum size of an error body that is read, and maximum length of the message quoted from it.
const REFUSAL_BYTES: usize = 64 << 10;
const REFUSAL_SHOWN: usize = 300;

/// Time to wait for the end of a response after its last event, so that the connection can be
/// reused.
const LAST_BYTES: Duration = Duration::from_secs(1);

/// The address and settings of a model endpoint.
#[derive(Debug, Clone, PartialEq)]
pub struct Endpoint {
    pub kind: Kind,
    /// Without a trailing slash.
    pub base_url: String,
    pub key: KeyPlace,
    /// Default for requests that set none.
    pub max_tokens: Option<u32>,
    pub patience: Patience,
}

/// The source of an API key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyPlace {
    pub variable: Option<String>,
    /// Takes precedence over the variable.
    pub file: Option<PathBuf>,
    /// True if a missing key is an error.
    pub needed: bool,
}

/// Limits of one response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patience {
    pub whole: Duration,
    /// Until the first byte, and between any two chunks.
    pub idle: Duration,
    pub bytes: usize,
}

impl Default for Patience {
    fn default() -> Self {
        let (whole, idle) = (Duration::from_secs(600), Duration::from_secs(120));
        Self { whole, idle, bytes: 16 << 20 }
    }
}

impl KeyPlace {
    /// Reads the key, if there is one. The error says what is missing.
    fn key(&self) -> Result<Option<String>, String> {
        if let Some(file) = &self.file {
            let read = std::fs::read_to_string(file);
            let text = read.map_err(|error| format!("the file {}: {error}", file.display()))?;
            return Ok(Some(text.trim().to_owned()));
        }
        let Some(variable) = &self.variable else { return Ok(None) };
        let key = std::env::var(variable).unwrap_or_default().trim().to_owned();
        match key.is_empty() {
            false => Ok(Some(key)),
            true if self.needed => Err(format!("the environment variable {variable} is not set")),
            true => Ok(None),
        }
    }
}

/// An endpoint and its HTTP client.
pub(super) struct Line {
    pub(super) endpoint: Endpoint,
    /// The endpoint's name in messages: its host, without anything secret.
    host: String,
    /// Created by the first request, because loading certificates takes time.
    client: OnceLock<Client>,
}

/// The header that carries the key.
pub(super) enum Credential {
    Bearer,
    Header(HeaderName),
}

impl Line {
    pub(super) fn to(endpoint: Endpoint) -> Self {
        let url = Url::parse(&endpoint.base_url).ok();
        let host = url.as_ref().and_then(Url::host_str).unwrap_or("the model's endpoint");
        let port = url.as_ref().and_then(Url::port).map(|port| format!(":{port}"));
        let host = format!("{host}{}", port.unwrap_or_default());
        Self { endpoint, host, client: OnceLock::new() }
    }

    fn client(&self) -> Result<&Client, Silence> {
        if let Some(client) = self.client.get() {
            return Ok(client);
        }
        let mut builder = Client::builder()
            .connect_timeout(CONNECT)
            // A redirect could send the key to another host.
            .redirect(reqwest::redirect::Policy::none())
            .pool_max_idle_per_host(256)
            .tcp_nodelay(true)
            .user_agent(concat!("toolcrib/", env!("CARGO_PKG_VERSION")));
        if is_loopback_name(&self.host) {
            builder = builder.no_proxy();
        }
        let made = builder.build().map_err(|error| {
            final_silence(format!("no HTTP client: {}", error.without_url()), None)
        })?;
        Ok(self.client.get_or_init(|| made))
    }

    /// Sends a POST request. Returns the response if its status is a success.
    pub(super) async fn post(
        &self,
        path: &str,
        mut headers: HeaderMap,
        credential: Credential,
        body: Vec<u8>,
    ) -> Result<Answer<'_>, Silence> {
        let key = self.endpoint.key.key();
        let key = key.map_err(|why| final_silence(format!("no key for the model: {why}"), None))?;
        if let Some(key) = &key {
            let (name, text) = match credential {
                Credential::Bearer => (reqwest::header::AUTHORIZATION, format!("Bearer {key}")),
                Credential::Header(name) => (name, key.clone()),
            };
            let mut value = HeaderValue::from_str(&text).map_err(|_| {
                final_silence("the model's key has characters that no key has", None)
            })?;
            value.set_sensitive(true);
            headers.insert(name, value);
        }
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        let mut url = Url::parse(&self.endpoint.base_url)
            .map_err(|_| final_silence("the model's base_url is not a URL", None))?;
        // The query stays: some endpoints expect their version there.
        url.set_path(&format!("{}{path}", url.path().trim_end_matches('/')));
        let patience = self.endpoint.patience;
        let until = Instant::now() + patience.whole;
        let request = self.client()?.post(url).headers(headers).body(body);
        let first = timeout(patience.idle.min(patience.whole), request.send()).await;
        let response = first.map_err(|_| self.idle())?.map_err(|error| self.broken(&error))?;
        let answer = Answer { line: self, response, until, left: patience.bytes };
        match answer.response.status() {
            status if status.is_success() => Ok(answer),
            status => Err(answer.refusal(status, key.as_deref()).await),
        }
    }

    fn idle(&self) -> Silence {
        let ms = self.endpoint.patience.idle.as_millis();
        passing(format!("the model at {} said nothing for {ms} ms", self.host))
    }

    fn broken(&self, error: &reqwest::Error) -> Silence {
        let (mut cause, mut last) = (error.source(), None);
        while let Some(deeper) = cause {
            last = Some(deeper.to_string());
            cause = deeper.source();
        }
        let what = match error.is_connect() {
            true => format!("cannot connect to the model at {}", self.host),
            false => format!("the connection to the model at {} broke", self.host),
        };
        passing(last.map_or_else(|| what.clone(), |last| format!("{what}: {last}")))
    }

    /// Returns a redactor between the endpoint's deltas and the listener.
    pub(super) fn discreet<'l>(&self, listener: Listener<'l>) -> Discreet<'l> {
        Discreet::new(self.endpoint.key.key().ok().flatten(), listener)
    }

    /// Returns the error for a response that ended before the model reported that it was done.
    pub(super) fn cut(&self) -> Silence {
        passing(format!("the answer of the model at {} was cut", self.host))
    }

    /// Returns the error for a response that cannot be parsed.
    pub(super) fn garbled(&self) -> Silence {
        passing(format!("the model at {} answered something that is not its protocol", self.host))
    }

    /// Returns the error that the endpoint reported within its stream.
    pub(super) fn gave_up(&self, error: &Value) -> Silence {
        let kind = error.get("type").and_then(Value::as_str).unwrap_or_default();
        let key = self.endpoint.key.key().ok().flatten();
        let what = said(error, key.as_deref());
        let what = what.map(|said| format!(": {said}")).unwrap_or_default();
        let message = format!("the model at {} gave up{what}", self.host);
        match kind {
            "invalid_request_error"
            | "authentication_error"
            | "permission_error"
            | "not_found_error" => final_silence(message, None),
            _ => passing(message),
        }
    }
}

/// A response that is read in chunks.
pub(super) struct Answer<'l> {
    pub(super) line: &'l Line,
    response: Response,
    until: Instant,
    left: usize,
}

/// Assembles a reply from a stream of events.
pub(super) trait Assembly {
    /// Adds the data of one event. Returns true if the reply is complete.
    fn take(&mut self, data: &str, listener: Listener<'_>) -> Result<bool, Silence>;

    /// Returns the reply after the last event.
    fn whole(self) -> Result<Reply, Silence>;
}

impl Answer<'_> {
    /// Returns whether the response is a stream of events.
    pub(super) fn is_stream(&self) -> bool {
        let kind = self.response.headers().get(CONTENT_TYPE);
        let kind = kind.and_then(|kind| kind.to_str().ok()).unwrap_or_default();
        kind.trim_start().to_ascii_lowercase().starts_with("text/event-stream")
    }

    async fn next(&mut self) -> Result<Option<Bytes>, Silence> {
        let (line, patience) = (self.line, self.line.endpoint.patience);
        let idle = timeout(patience.idle, self.response.chunk());
        let late = |_| {
            let ms = patience.whole.as_millis();
            passing(format!("the model at {} was not done after {ms} ms", line.host))
        };
        let chunk = timeout_at(self.until, idle).await.map_err(late)?.map_err(|_| line.idle())?;
        let chunk = chunk.map_err(|error| line.broken(&error))?;
        let size = chunk.as_ref().map_or(0, Bytes::len);
        self.left = self.left.checked_sub(size).ok_or_else(|| {
            let (host, most) = (&line.host, patience.bytes);
            let message = format!("the model at {host} answered more than {most} bytes");
            silence(Code::PayloadTooLarge, message, false)
        })?;
        Ok(chunk)
    }

    /// Reads the full response as JSON.
    pub(super) async fn json(mut self) -> Result<Value, Silence> {
        let mut text = Vec::new();
        while let Some(chunk) = self.next().await? {
            text.extend_from_slice(&chunk);
        }
        serde_json::from_slice(&text).map_err(|_| self.line.garbled())
    }

    /// Reads the events and assembles the reply.
    pub(super) async fn events<A: Assembly>(
        mut self,
        mut assembly: A,
        listener: Listener<'_>,
    ) -> Result<Reply, Silence> {
        let mut parser = Parser::default();
        loop {
            let chunk = match self.next().await {
                Ok(Some(chunk)) => chunk,
                Ok(None) => return assembly.whole(),
                // If the reply was complete before the connection broke, nothing is missing.
                Err(silence) => return assembly.whole().map_err(|_| silence),
            };
            for event in parser.push(&chunk).map_err(|_| self.line.garbled())? {
                if !event.data.is_empty() && assembly.take(&event.data, listener)? {
                    self.let_go();
                    return assembly.whole();
                }
            }
        }
    }

    /// Reads the remaining bytes in the background, so that the connection can be reused.
    fn let_go(self) {
        let mut response = self.response;
        tokio::spawn(timeout(LAST_BYTES, async move {
            for _ in 0..8 {
                if !matches!(response.chunk().await, Ok(Some(_))) {
                    break;
                }
            }
        }));
    }

    /// Converts an error response into a model error.
    async fn refusal(mut self, status: StatusCode, key: Option<&str>) -> Silence {
        let wait = retry_after_ms(self.response.headers());
        let finer = self.response.headers().get("retry-after-ms");
        let finer = finer.and_then(|ms| ms.to_str().ok()?.parse::<u64>().ok());
        self.left = self.left.min(REFUSAL_BYTES);
        let mut text = Vec::new();
        while let Ok(Some(chunk)) = self.next().await {
            text.extend_from_slice(&chunk);
        }
        let body: Value = serde_json::from_slice(&text).unwrap_or_default();
        // `{error: {…}}`, as almost all endpoints do, or the fields alone.
        let error = body.get("error").filter(|error| error.is_object()).unwrap_or(&body);
        // An endpoint may quote a wrong key in its error, so nothing of the body is repeated.
        let error = if matches!(status.as_u16(), 401 | 403) { &Value::Null } else { error };
        let word = |field: &str| {
            let word = error.get(field).and_then(Value::as_str);
            word.map(|word| shown(&without(word, key)))
        };
        let (kind, code, said) = (word("type"), word("code"), said(error, key));
        let said = said.map(|said| format!(": {said}")).unwrap_or_default();
        let message = format!("the model at {} answered {}{said}", self.line.host, status.as_u16());
        let detail = json!({ "http_status": status.as_u16(), "type": kind, "code": code });
        let spent = code.as_deref() == Some("insufficient_quota");
        let passes = matches!(status.as_u16(), 408 | 409 | 425 | 429) || status.is_server_error();
        if spent || !passes {
            return final_silence(message, Some(detail));
        }
        let mut silence = passing(message);
        let mut detail = detail;
        if let Some(ms) = finer.or(wait) {
            detail["retry_after_ms"] = ms.into();
            silence.retry_after = Some(Duration::from_millis(ms));
        }
        silence.fault.detail = Some(detail);
        silence
    }
}

/// Returns the endpoint's error message with the key redacted.
fn said(error: &Value, key: Option<&str>) -> Option<String> {
    let text = error.get("message").or(Some(error)).and_then(Value::as_str)?;
    let text: String =
        without(text, key).chars().filter(|c| !c.is_control()).take(REFUSAL_SHOWN).collect();
    Some(text).filter(|text| !text.is_empty())
}

fn silence(code: Code, message: impl Into<String>, passing: bool) -> Silence {
    let fault = Fault::new(code, message).not_happened().retryable(passing);
    Silence { fault, passing, retry_after: None }
}

fn passing(message: impl Into<String>) -> Silence {
    silence(Code::UpstreamUnavailable, message, true)
}

fn final_silence(message: impl Into<String>, detail: Option<Value>) -> Silence {
    let mut silence = silence(Code::UpstreamUnavailable, message, false);
    silence.fault.detail = detail;
    silence
}
