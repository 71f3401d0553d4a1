//! Sends a request and reads its response, within limits, to permitted addresses only.

use std::time::Duration;

use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use reqwest::{Client, Method, StatusCode, Url, header};
use tokio::sync::OnceCell;

use super::place;
use crate::operation::Request;
use crate::operation::secrets::Secrets;
use crate::outbound::{Outbound, forbidden, plainly, retry_after_ms};

/// Maximum number of redirects, all within the same host.
const MAX_REDIRECTS: usize = 5;

/// A response.
pub(super) struct Came {
    pub(super) status: StatusCode,
    pub(super) content_type: String,
    pub(super) body: Vec<u8>,
    /// Time to wait before a retry, if the response says so.
    pub(super) retry_after_ms: Option<u64>,
    /// Redacts the secrets that the request contained.
    pub(super) secrets: Secrets,
}

/// The reason why there is no response. The texts contain neither secrets nor the URL.
#[derive(Debug)]
pub(super) enum Trouble {
    /// The request cannot be built.
    Unsendable(String),
    /// The destination is not permitted.
    Forbidden(String),
    /// The connection failed.
    Unreachable(String),
    /// The request was sent, and the response was interrupted.
    Broken(String),
    /// The request was sent, and no response arrived in time.
    Slow(Duration),
    /// The response exceeds this limit.
    TooLarge(usize),
    /// The response redirects to a destination that is not followed.
    Elsewhere(String),
}

/// The HTTP client for all tools.
pub(super) struct Upstream {
    outbound: Outbound,
    max_bytes: usize,
    client: OnceCell<Client>,
}

impl Upstream {
    pub(super) fn new(outbound: Outbound, max_bytes: usize) -> Self {
        Self { outbound, max_bytes, client: OnceCell::new() }
    }

    async fn client(&self) -> Result<&Client, Trouble> {
        let make = || async {
            let outbound = self.outbound.clone();
            let built = tokio::task::spawn_blocking(move || {
                outbound
                    .client()
                    .connect_timeout(Duration::from_secs(10))
                    .pool_idle_timeout(Duration::from_secs(30))
                    .pool_max_idle_per_host(8)
                    .build()
            });
            let failed = |why: String| Trouble::Unreachable(format!("no HTTP client: {why}"));
            let built = built.await.map_err(|error| failed(error.to_string()))?;
            built.map_err(|error| failed(error.to_string()))
        };
        self.client.get_or_try_init(make).await
    }

    pub(super) async fn ask(&self, request: &Request, limit: Duration) -> Result<Came, Trouble> {
        let asking = self.follow(request);
        match tokio::time::timeout(limit, asking).await {
            Ok(came) => came,
            Err(_) => Err(Trouble::Slow(limit)),
        }
    }

    /// Sends a request, and follows redirects within the same host if the request only reads.
    async fn follow(&self, request: &Request) -> Result<Came, Trouble> {
        let client = self.client().await?;
        let (headers, secrets) = headers(client, request)?;
        let method = Method::from_bytes(request.method.as_bytes())
            .map_err(|_| Trouble::Unsendable("the method is none".to_owned()))?;
        let reads = matches!(request.method.as_str(), "GET" | "HEAD");
        let mut url = request.url.clone();
        for _ in 0..=MAX_REDIRECTS {
            let mut sending = client.request(method.clone(), url.clone()).headers(headers.clone());
            if let Some((_, bytes)) = &request.body {
                sending = sending.body(bytes.clone());
            }
            let answer = sending.send().await.map_err(unsent)?;
            let target = answer.headers().get(header::LOCATION).cloned();
            let Some(target) = target.filter(|_| answer.status().is_redirection()) else {
                return self.read(answer, secrets).await;
            };
            url = next(&url, &target, reads)?;
        }
        Err(Trouble::Elsewhere(format!("sent the request on more than {MAX_REDIRECTS} times")))
    }

    async fn read(&self, mut answer: reqwest::Response, secrets: Secrets) -> Result<Came, Trouble> {
        let status = answer.status();
        let kind = answer.headers().get(header::CONTENT_TYPE);
        let content_type = kind.and_then(|kind| kind.to_str().ok()).unwrap_or_default().to_owned();
        let retry_after_ms = retry_after_ms(answer.headers());
        let mut body = Vec::new();
        let broken = |error: reqwest::Error| Trouble::Broken(plainly(error));
        while let Some(chunk) = answer.chunk().await.map_err(broken)? {
            if body.len() + chunk.len() > self.max_bytes {
                return Err(Trouble::TooLarge(self.max_bytes));
            }
            body.extend_from_slice(&chunk);
        }
        Ok(Came { status, content_type, body, retry_after_ms, secrets })
    }
}

fn next(from: &Url, target: &HeaderValue, reads: bool) -> Result<Url, Trouble> {
    let unreadable = || Trouble::Elsewhere("sent the request on to what is not a URL".to_owned());
    let target = target.to_str().map_err(|_| unreadable())?;
    let to = from.join(target).map_err(|_| unreadable())?;
    if to.origin() != from.origin() {
        let place = place(&to);
        let message = format!("sent the request on to another host, {place}: not followed");
        return Err(Trouble::Elsewhere(message));
    }
    if !reads {
        let message = "sent the request on; what does more than read is not sent twice";
        return Err(Trouble::Elsewhere(message.to_owned()));
    }
    Ok(to)
}

/// Builds the headers, marked as sensitive so that they are not logged. Also returns the secrets
/// that a server may echo from them.
fn headers(client: &Client, request: &Request) -> Result<(HeaderMap, Secrets), Trouble> {
    let mut secrets = request.secrets.clone();
    let mut headers = HeaderMap::new();
    let mut all = request.headers.clone();
    if let Some((kind, _)) = &request.body {
        all.retain(|(name, _)| !name.eq_ignore_ascii_case("content-type"));
        all.push(("content-type".into(), kind.clone()));
    }
    for (name, value) in all {
        let unusable = |what: &str| Trouble::Unsendable(format!("the header {name} {what}"));
        let key = HeaderName::from_bytes(name.as_bytes());
        let key = key.map_err(|_| unusable("has no usable name"))?;
        let mut value = HeaderValue::from_bytes(value.as_bytes())
            .map_err(|_| unusable("cannot have this value"))?;
        value.set_sensitive(true);
        headers.insert(key, value);
    }
    if let Some((name, password)) = &request.basic {
        let made = client.get("http://basic.invalid").basic_auth(name, Some(password));
        let made = made.build().map_err(|_| Trouble::Unsendable("no Authorization".to_owned()))?;
        if let Some(value) = made.headers().get(header::AUTHORIZATION) {
            let text = value.to_str().unwrap_or_default();
            secrets.add(text.trim_start_matches("Basic "));
            headers.insert(header::AUTHORIZATION, value.clone());
        }
    }
    Ok((headers, secrets))
}

fn unsent(error: reqwest::Error) -> Trouble {
    if let Some(private) = forbidden(&error) {
        return Trouble::Forbidden(private.to_string());
    }
    if error.is_builder() {
        return Trouble::Unsendable(plainly(error));
    }
    match error.is_connect() {
        true => Trouble::Unreachable(plainly(error)),
        false => Trouble::Broken(plainly(error)),
    }
}
