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
use toolcrib::domain::fault::{Code, Fault};
use toolcrib::domain::model_reply::ModelReply;
use toolcrib::ports::model::{DeltaListener, ModelError};
use toolcrib_protocol::outbound::{is_loopback_host, retry_after_ms};
use toolcrib_protocol::sse::SseParser;

use super::{ModelApi, sanitize_name};
use crate::models::key_redaction::{KeyRedactor, redact_key};

/// Timeout of a connection attempt.
const MODEL_CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum size of an error body that is read, and maximum length of the message quoted from it.
const MAX_ERROR_BODY_BYTES: usize = 64 << 10;
const MAX_ERROR_MESSAGE_CHARS: usize = 300;

/// Time to wait for the end of a response after its last event, so that the connection can be
/// reused.
const TRAILING_READ_TIMEOUT: Duration = Duration::from_secs(1);

/// The address and settings of a model endpoint.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelEndpoint {
    pub kind: ModelApi,
    /// The base URL, without a trailing slash.
    pub base_url: String,
    pub key: ApiKeySource,
    /// Default of `max_tokens` for requests that set none.
    pub max_tokens: Option<u32>,
    pub limits: ModelResponseLimits,
    /// True if the endpoint has the API's own search for deferred tools.
    pub native_tool_search: bool,
}

/// The source of an API key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiKeySource {
    pub variable: Option<String>,
    /// A file with the key, which takes precedence over the variable.
    pub file: Option<PathBuf>,
    /// True if a missing key is an error.
    pub is_required: bool,
}

/// Limits of one response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModelResponseLimits {
    pub total: Duration,
    /// Maximum time until the first byte, and between any two chunks.
    pub idle: Duration,
    pub max_bytes: usize,
}

impl Default for ModelResponseLimits {
    fn default() -> Self {
        let (total, idle) = (Duration::from_secs(600), Duration::from_secs(120));
        Self { total, idle, max_bytes: 16 << 20 }
    }
}

impl ApiKeySource {
    /// Reads the key, if there is one. The error says what is missing.
    fn load(&self) -> Result<Option<String>, String> {
        if let Some(file) = &self.file {
            let read = std::fs::read_to_string(file);
            let text = read.map_err(|error| format!("the file {}: {error}", file.display()))?;
            return Ok(Some(text.trim().to_owned()));
        }
        let Some(variable) = &self.variable else { return Ok(None) };
        let key = std::env::var(variable).unwrap_or_default().trim().to_owned();
        match key.is_empty() {
            false => Ok(Some(key)),
            true if self.is_required => {
                Err(format!("the environment variable {variable} is not set"))
            }
            true => Ok(None),
        }
    }
}

/// An endpoint and its HTTP client.
pub(super) struct EndpointClient {
    pub(super) endpoint: ModelEndpoint,
    /// The endpoint's name in messages: its host, without anything secret.
    host: String,
    /// Created by the first request, because loading certificates takes time.
    client: OnceLock<Client>,
}

/// The header that carries the key.
pub(super) enum KeyHeader {
    Bearer,
    Header(HeaderName),
}

impl EndpointClient {
    pub(super) fn new(endpoint: ModelEndpoint) -> Self {
        let url = Url::parse(&endpoint.base_url).ok();
        let host = url.as_ref().and_then(Url::host_str).unwrap_or("the model's endpoint");
        let port = url.as_ref().and_then(Url::port).map(|port| format!(":{port}"));
        let host = format!("{host}{}", port.unwrap_or_default());
        Self { endpoint, host, client: OnceLock::new() }
    }

    fn client(&self) -> Result<&Client, ModelError> {
        if let Some(client) = self.client.get() {
            return Ok(client);
        }
        let mut builder = Client::builder()
            .connect_timeout(MODEL_CONNECT_TIMEOUT)
            // A redirect could send the key to another host.
            .redirect(reqwest::redirect::Policy::none())
            .pool_max_idle_per_host(256)
            .tcp_nodelay(true)
            .user_agent(concat!("toolcrib/", env!("CARGO_PKG_VERSION")));
        if is_loopback_host(&self.host) {
            builder = builder.no_proxy();
        }
        let built = builder.build().map_err(|error| {
            permanent_error(format!("no HTTP client: {}", error.without_url()), None)
        })?;
        Ok(self.client.get_or_init(|| built))
    }

    /// Sends a POST request. Returns the response if its status is a success.
    pub(super) async fn post(
        &self,
        path: &str,
        mut headers: HeaderMap,
        credential: KeyHeader,
        body: Vec<u8>,
    ) -> Result<ModelResponse<'_>, ModelError> {
        let key = self.endpoint.key.load();
        let key =
            key.map_err(|reason| permanent_error(format!("no key for the model: {reason}"), None))?;
        if let Some(key) = &key {
            let (name, text) = match credential {
                KeyHeader::Bearer => (reqwest::header::AUTHORIZATION, format!("Bearer {key}")),
                KeyHeader::Header(name) => (name, key.clone()),
            };
            let mut value = HeaderValue::from_str(&text)
                .map_err(|_| permanent_error("the model's key has invalid characters", None))?;
            value.set_sensitive(true);
            headers.insert(name, value);
        }
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        let mut url = Url::parse(&self.endpoint.base_url)
            .map_err(|_| permanent_error("the model's base_url is not a URL", None))?;
        // The query stays: some endpoints expect their version there.
        url.set_path(&format!("{}{path}", url.path().trim_end_matches('/')));
        let limits = self.endpoint.limits;
        let until = Instant::now() + limits.total;
        let request = self.client()?.post(url).headers(headers).body(body);
        let first = timeout(limits.idle.min(limits.total), request.send()).await;
        let response =
            first.map_err(|_| self.idle_error())?.map_err(|error| self.connection_error(&error))?;
        let answer =
            ModelResponse { client: self, response, deadline: until, bytes_left: limits.max_bytes };
        match answer.response.status() {
            status if status.is_success() => Ok(answer),
            status => Err(answer.error_from_status(status, key.as_deref()).await),
        }
    }

    fn idle_error(&self) -> ModelError {
        let ms = self.endpoint.limits.idle.as_millis();
        transient_error(format!("the model at {} sent nothing for {ms} ms", self.host))
    }

    fn connection_error(&self, error: &reqwest::Error) -> ModelError {
        let (mut cause, mut last) = (error.source(), None);
        while let Some(deeper) = cause {
            last = Some(deeper.to_string());
            cause = deeper.source();
        }
        let message = match error.is_connect() {
            true => format!("cannot connect to the model at {}", self.host),
            false => format!("the connection to the model at {} broke", self.host),
        };
        transient_error(last.map_or_else(|| message.clone(), |last| format!("{message}: {last}")))
    }

    /// Returns a redactor between the endpoint's deltas and the listener.
    pub(super) fn key_redactor<'l>(&self, listener: DeltaListener<'l>) -> KeyRedactor<'l> {
        KeyRedactor::new(self.endpoint.key.load().ok().flatten(), listener)
    }

    /// Returns the error for a response that ended before the model reported that it was done.
    pub(super) fn truncated_error(&self) -> ModelError {
        transient_error(format!("the answer of the model at {} was cut off", self.host))
    }

    /// Returns the error for a response that cannot be parsed.
    pub(super) fn malformed_error(&self) -> ModelError {
        transient_error(format!("the model at {} returned an invalid response", self.host))
    }

    /// Returns the error that the endpoint reported within its stream.
    pub(super) fn stream_error(&self, error: &Value) -> ModelError {
        let kind = error.get("type").and_then(Value::as_str).unwrap_or_default();
        let key = self.endpoint.key.load().ok().flatten();
        let detail = error_message(error, key.as_deref());
        let detail = detail.map(|text| format!(": {text}")).unwrap_or_default();
        let message = format!("the model at {} stopped with an error{detail}", self.host);
        match kind {
            "invalid_request_error"
            | "authentication_error"
            | "permission_error"
            | "not_found_error" => permanent_error(message, None),
            _ => transient_error(message),
        }
    }
}

/// A response that is read in chunks.
pub(super) struct ModelResponse<'l> {
    pub(super) client: &'l EndpointClient,
    response: Response,
    deadline: Instant,
    bytes_left: usize,
}

/// Assembles a reply from a stream of events.
pub(super) trait ReplyAssembler {
    /// Adds the data of one event. Returns true if the reply is complete.
    fn push_event(&mut self, data: &str, listener: DeltaListener<'_>) -> Result<bool, ModelError>;

    /// Returns the reply after the last event.
    fn finish(self) -> Result<ModelReply, ModelError>;
}

impl ModelResponse<'_> {
    /// Returns whether the response is a stream of events.
    pub(super) fn is_stream(&self) -> bool {
        let kind = self.response.headers().get(CONTENT_TYPE);
        let kind = kind.and_then(|kind| kind.to_str().ok()).unwrap_or_default();
        kind.trim_start().to_ascii_lowercase().starts_with("text/event-stream")
    }

    async fn next_chunk(&mut self) -> Result<Option<Bytes>, ModelError> {
        let (client, limits) = (self.client, self.client.endpoint.limits);
        let idle = timeout(limits.idle, self.response.chunk());
        let timed_out = |_| {
            let ms = limits.total.as_millis();
            transient_error(format!("the model at {} did not finish within {ms} ms", client.host))
        };
        let chunk = timeout_at(self.deadline, idle)
            .await
            .map_err(timed_out)?
            .map_err(|_| client.idle_error())?;
        let chunk = chunk.map_err(|error| client.connection_error(&error))?;
        let size = chunk.as_ref().map_or(0, Bytes::len);
        self.bytes_left = self.bytes_left.checked_sub(size).ok_or_else(|| {
            let (host, max_bytes) = (&client.host, limits.max_bytes);
            let message = format!("the model at {host} answered more than {max_bytes} bytes");
            model_error(Code::PayloadTooLarge, message, false)
        })?;
        Ok(chunk)
    }

    /// Reads the full response as JSON.
    pub(super) async fn read_json(mut self) -> Result<Value, ModelError> {
        let mut text = Vec::new();
        while let Some(chunk) = self.next_chunk().await? {
            text.extend_from_slice(&chunk);
        }
        serde_json::from_slice(&text).map_err(|_| self.client.malformed_error())
    }

    /// Reads the events and assembles the reply.
    pub(super) async fn read_events<A: ReplyAssembler>(
        mut self,
        mut assembly: A,
        listener: DeltaListener<'_>,
    ) -> Result<ModelReply, ModelError> {
        let mut parser = SseParser::default();
        loop {
            let chunk = match self.next_chunk().await {
                Ok(Some(chunk)) => chunk,
                Ok(None) => return assembly.finish(),
                // If the reply was complete before the connection broke, nothing is missing.
                Err(error) => return assembly.finish().map_err(|_| error),
            };
            for event in parser.push(&chunk).map_err(|_| self.client.malformed_error())? {
                if !event.data.is_empty() && assembly.push_event(&event.data, listener)? {
                    self.drain_for_reuse();
                    return assembly.finish();
                }
            }
        }
    }

    /// Reads the remaining bytes in the background, so that the connection can be reused.
    fn drain_for_reuse(self) {
        let mut response = self.response;
        tokio::spawn(timeout(TRAILING_READ_TIMEOUT, async move {
            for _ in 0..8 {
                if !matches!(response.chunk().await, Ok(Some(_))) {
                    break;
                }
            }
        }));
    }

    /// Converts an error response into a model error.
    async fn error_from_status(mut self, status: StatusCode, key: Option<&str>) -> ModelError {
        let wait = retry_after_ms(self.response.headers());
        let retry_after_ms_header = self.response.headers().get("retry-after-ms");
        let retry_after_ms_header =
            retry_after_ms_header.and_then(|ms| ms.to_str().ok()?.parse::<u64>().ok());
        self.bytes_left = self.bytes_left.min(MAX_ERROR_BODY_BYTES);
        let mut text = Vec::new();
        while let Ok(Some(chunk)) = self.next_chunk().await {
            text.extend_from_slice(&chunk);
        }
        let body: Value = serde_json::from_slice(&text).unwrap_or_default();
        // `{error: {…}}`, as almost all endpoints do, or the fields alone.
        let error = body.get("error").filter(|error| error.is_object()).unwrap_or(&body);
        // An endpoint may quote a wrong key in its error, so nothing of the body is repeated.
        let error = if matches!(status.as_u16(), 401 | 403) { &Value::Null } else { error };
        let word = |field: &str| {
            let word = error.get(field).and_then(Value::as_str);
            word.map(|word| sanitize_name(&redact_key(word, key)))
        };
        let (kind, code, reason) = (word("type"), word("code"), error_message(error, key));
        let reason = reason.map(|reason| format!(": {reason}")).unwrap_or_default();
        let message =
            format!("the model at {} answered {}{reason}", self.client.host, status.as_u16());
        let detail = json!({ "http_status": status.as_u16(), "type": kind, "code": code });
        let is_quota_exhausted = code.as_deref() == Some("insufficient_quota");
        let is_transient =
            matches!(status.as_u16(), 408 | 409 | 425 | 429) || status.is_server_error();
        if is_quota_exhausted || !is_transient {
            return permanent_error(message, Some(detail));
        }
        let mut model_error = transient_error(message);
        let mut detail = detail;
        if let Some(ms) = retry_after_ms_header.or(wait) {
            detail["retry_after_ms"] = ms.into();
            model_error.retry_after = Some(Duration::from_millis(ms));
        }
        model_error.fault.detail = Some(detail);
        model_error
    }
}

/// Returns the endpoint's error message with the key redacted.
fn error_message(error: &Value, key: Option<&str>) -> Option<String> {
    let text = error.get("message").or(Some(error)).and_then(Value::as_str)?;
    let text: String = redact_key(text, key)
        .chars()
        .filter(|c| !c.is_control())
        .take(MAX_ERROR_MESSAGE_CHARS)
        .collect();
    Some(text).filter(|text| !text.is_empty())
}

fn model_error(code: Code, message: impl Into<String>, passing: bool) -> ModelError {
    let fault = Fault::new(code, message).without_side_effect().retryable(passing);
    ModelError { fault, is_transient: passing, retry_after: None }
}

fn transient_error(message: impl Into<String>) -> ModelError {
    model_error(Code::UpstreamUnavailable, message, true)
}

fn permanent_error(message: impl Into<String>, detail: Option<Value>) -> ModelError {
    let mut error = model_error(Code::UpstreamUnavailable, message, false);
    error.fault.detail = detail;
    error
}
