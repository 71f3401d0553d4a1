//! Sends a request and reads its response, within limits, to permitted addresses only.

use std::time::Duration;

use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use reqwest::{Client, Method, StatusCode, Url, header};
use tokio::sync::OnceCell;
use toolcrib_protocol::http_operation::OperationRequest;
use toolcrib_protocol::outbound::{
    OutboundPolicy, error_chain_without_url, find_private_address_error, retry_after_ms,
};
use toolcrib_protocol::secrets::redaction::SecretRedactor;

use super::origin;

/// Maximum number of redirects, all within the same host.
const MAX_REDIRECTS: usize = 5;

/// A response.
pub(super) struct HttpApiResponse {
    pub(super) status: StatusCode,
    pub(super) content_type: String,
    pub(super) body: Vec<u8>,
    /// Time to wait before a retry, if the response says so.
    pub(super) retry_after_ms: Option<u64>,
    /// Redacts the secrets that the request contained.
    pub(super) secrets: SecretRedactor,
}

/// The reason why there is no response. The texts contain neither secrets nor the URL.
#[derive(Debug)]
pub(super) enum HttpApiError {
    /// The request cannot be built.
    InvalidRequest(String),
    /// The destination is not permitted.
    Forbidden(String),
    /// The connection failed.
    Unreachable(String),
    /// The request was sent, and the response was interrupted.
    Interrupted(String),
    /// The request was sent, and no response arrived in time.
    TimedOut(Duration),
    /// The response exceeds this limit.
    TooLarge(usize),
    /// The response redirects to a destination that is not followed.
    RedirectRefused(String),
}

/// The HTTP client for all tools.
pub(super) struct HttpApiClient {
    outbound: OutboundPolicy,
    max_bytes: usize,
    client: OnceCell<Client>,
}

impl HttpApiClient {
    pub(super) fn new(outbound: OutboundPolicy, max_bytes: usize) -> Self {
        Self { outbound, max_bytes, client: OnceCell::new() }
    }

    async fn client(&self) -> Result<&Client, HttpApiError> {
        let make = || async {
            let outbound = self.outbound.clone();
            let built = tokio::task::spawn_blocking(move || {
                outbound
                    .client_builder()
                    .connect_timeout(Duration::from_secs(10))
                    .pool_idle_timeout(Duration::from_secs(30))
                    .pool_max_idle_per_host(8)
                    .build()
            });
            let failed =
                |reason: String| HttpApiError::Unreachable(format!("no HTTP client: {reason}"));
            let built = built.await.map_err(|error| failed(error.to_string()))?;
            built.map_err(|error| failed(error.to_string()))
        };
        self.client.get_or_try_init(make).await
    }

    pub(super) async fn send(
        &self,
        request: &OperationRequest,
        limit: Duration,
    ) -> Result<HttpApiResponse, HttpApiError> {
        let asking = self.send_following_redirects(request);
        match tokio::time::timeout(limit, asking).await {
            Ok(response) => response,
            Err(_) => Err(HttpApiError::TimedOut(limit)),
        }
    }

    /// Sends a request, and follows redirects within the same host if the request only reads.
    async fn send_following_redirects(
        &self,
        request: &OperationRequest,
    ) -> Result<HttpApiResponse, HttpApiError> {
        let client = self.client().await?;
        let (headers, secrets) = build_headers(client, request)?;
        let method = Method::from_bytes(request.method.as_bytes())
            .map_err(|_| HttpApiError::InvalidRequest("the method is none".to_owned()))?;
        let reads = matches!(request.method.as_str(), "GET" | "HEAD");
        let mut url = request.url.clone();
        for _ in 0..=MAX_REDIRECTS {
            let mut sending = client.request(method.clone(), url.clone()).headers(headers.clone());
            if let Some((_, bytes)) = &request.body {
                sending = sending.body(bytes.clone());
            }
            let answer = sending.send().await.map_err(send_error)?;
            let target = answer.headers().get(header::LOCATION).cloned();
            let Some(target) = target.filter(|_| answer.status().is_redirection()) else {
                return self.read_response(answer, secrets).await;
            };
            url = redirect_target(&url, &target, reads)?;
        }
        Err(HttpApiError::RedirectRefused(format!(
            "sent the request on more than {MAX_REDIRECTS} times"
        )))
    }

    async fn read_response(
        &self,
        mut answer: reqwest::Response,
        secrets: SecretRedactor,
    ) -> Result<HttpApiResponse, HttpApiError> {
        let status = answer.status();
        let kind = answer.headers().get(header::CONTENT_TYPE);
        let content_type = kind.and_then(|kind| kind.to_str().ok()).unwrap_or_default().to_owned();
        let retry_after_ms = retry_after_ms(answer.headers());
        let mut body = Vec::new();
        let broken =
            |error: reqwest::Error| HttpApiError::Interrupted(error_chain_without_url(error));
        while let Some(chunk) = answer.chunk().await.map_err(broken)? {
            if body.len() + chunk.len() > self.max_bytes {
                return Err(HttpApiError::TooLarge(self.max_bytes));
            }
            body.extend_from_slice(&chunk);
        }
        Ok(HttpApiResponse { status, content_type, body, retry_after_ms, secrets })
    }
}

fn redirect_target(from: &Url, target: &HeaderValue, reads: bool) -> Result<Url, HttpApiError> {
    let unreadable =
        || HttpApiError::RedirectRefused("sent the request on to what is not a URL".to_owned());
    let target = target.to_str().map_err(|_| unreadable())?;
    let to = from.join(target).map_err(|_| unreadable())?;
    if to.origin() != from.origin() {
        let target_origin = origin(&to);
        let message = format!("sent the request on to another host, {target_origin}: not followed");
        return Err(HttpApiError::RedirectRefused(message));
    }
    if !reads {
        let message = "sent the request on; what does more than read is not sent twice";
        return Err(HttpApiError::RedirectRefused(message.to_owned()));
    }
    Ok(to)
}

/// Builds the headers, marked as sensitive so that they are not logged. Also returns the secrets
/// that a server may echo from them.
fn build_headers(
    client: &Client,
    request: &OperationRequest,
) -> Result<(HeaderMap, SecretRedactor), HttpApiError> {
    let mut secrets = request.secrets.clone();
    let mut headers = HeaderMap::new();
    let mut all = request.headers.clone();
    if let Some((kind, _)) = &request.body {
        all.retain(|(name, _)| !name.eq_ignore_ascii_case("content-type"));
        all.push(("content-type".into(), kind.clone()));
    }
    for (name, value) in all {
        let unusable =
            |problem: &str| HttpApiError::InvalidRequest(format!("the header {name} {problem}"));
        let key = HeaderName::from_bytes(name.as_bytes());
        let key = key.map_err(|_| unusable("has no usable name"))?;
        let mut value = HeaderValue::from_bytes(value.as_bytes())
            .map_err(|_| unusable("cannot have this value"))?;
        value.set_sensitive(true);
        headers.insert(key, value);
    }
    if let Some((name, password)) = &request.basic_auth {
        let signed = client.get("http://basic.invalid").basic_auth(name, Some(password));
        let signed = signed
            .build()
            .map_err(|_| HttpApiError::InvalidRequest("no Authorization".to_owned()))?;
        if let Some(value) = signed.headers().get(header::AUTHORIZATION) {
            let text = value.to_str().unwrap_or_default();
            secrets.add(text.trim_start_matches("Basic "));
            headers.insert(header::AUTHORIZATION, value.clone());
        }
    }
    Ok((headers, secrets))
}

fn send_error(error: reqwest::Error) -> HttpApiError {
    if let Some(private) = find_private_address_error(&error) {
        return HttpApiError::Forbidden(private.to_string());
    }
    if error.is_builder() {
        return HttpApiError::InvalidRequest(error_chain_without_url(error));
    }
    match error.is_connect() {
        true => HttpApiError::Unreachable(error_chain_without_url(error)),
        false => HttpApiError::Interrupted(error_chain_without_url(error)),
    }
}
