//! One request to an endpoint, and its answer piece by piece: within a size, a time for the whole
//! and a time for each silence. What goes wrong becomes a [`Silence`] that says whether to ask
//! again may help.

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

/// How long a connection may take to come about.
const CONNECT: Duration = Duration::from_secs(10);

/// How much of a refusal is read, and how long of it is repeated.
const REFUSAL_BYTES: usize = 64 << 10;
const REFUSAL_SHOWN: usize = 300;

/// How long the end of an answer is waited for after all was said, so that its connection can be
/// used again.
const LAST_BYTES: Duration = Duration::from_secs(1);

/// Where and how models are asked.
#[derive(Debug, Clone, PartialEq)]
pub struct Endpoint {
    pub kind: Kind,
    /// Without a slash at its end.
    pub base_url: String,
    pub key: KeyPlace,
    /// Where the request does not say.
    pub max_tokens: Option<u32>,
    pub patience: Patience,
}

/// Where a key comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyPlace {
    pub variable: Option<String>,
    /// Goes before the variable.
    pub file: Option<PathBuf>,
    /// Whether there must be one.
    pub needed: bool,
}

/// What an answer may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patience {
    pub whole: Duration,
    /// Until the first byte, and between any two.
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
    /// The key, if there is one; or what is missing, in words.
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

/// An endpoint, and the connections to it.
pub(super) struct Line {
    pub(super) endpoint: Endpoint,
    /// As messages name the endpoint: its host, without anything secret.
    host: String,
    /// Made by the first request, as loading certificates takes a while.
    client: OnceLock<Client>,
}

/// How a key is sent.
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
            // A redirect would take the key along to somewhere else.
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

    /// Posts, and answers with what comes back if it is a success.
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
        // What follows a question mark stays: some endpoints want their version there.
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

    /// Between its answers and whoever listens to them.
    pub(super) fn discreet<'l>(&self, listener: Listener<'l>) -> Discreet<'l> {
        Discreet::new(self.endpoint.key.key().ok().flatten(), listener)
    }

    /// The answer ended before the model said that it was done.
    pub(super) fn cut(&self) -> Silence {
        passing(format!("the answer of the model at {} was cut", self.host))
    }

    /// The answer cannot be read.
    pub(super) fn garbled(&self) -> Silence {
        passing(format!("the model at {} answered something that is not its protocol", self.host))
    }

    /// The endpoint gave up in the middle of its answer.
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

/// An answer that comes piece by piece.
pub(super) struct Answer<'l> {
    pub(super) line: &'l Line,
    response: Response,
    until: Instant,
    left: usize,
}

/// Who puts a stream of events together.
pub(super) trait Assembly {
    /// Takes the data of one event. Whether the answer is complete with it.
    fn take(&mut self, data: &str, listener: Listener<'_>) -> Result<bool, Silence>;

    /// What it came to, after the last event.
    fn whole(self) -> Result<Reply, Silence>;
}

impl Answer<'_> {
    /// Whether it comes as a stream of events.
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

    /// The whole answer as JSON.
    pub(super) async fn json(mut self) -> Result<Value, Silence> {
        let mut text = Vec::new();
        while let Some(chunk) = self.next().await? {
            text.extend_from_slice(&chunk);
        }
        serde_json::from_slice(&text).map_err(|_| self.line.garbled())
    }

    /// The answer put together from its events.
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
                // If all was said before the connection broke, nothing is missing.
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

    /// Reads the last bytes, so that the connection can be used again; nobody waits for them.
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

    /// What a refusal means.
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
        // `{error: {…}}`, as almost all do; or the fields alone.
        let error = body.get("error").filter(|error| error.is_object()).unwrap_or(&body);
        // Of who sends the wrong key it is said which one it was, so nothing of that is repeated.
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

/// The endpoint's own words, without the key if it repeats it.
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
