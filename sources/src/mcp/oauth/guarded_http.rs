//! The HTTP client for issuers of upstreams that were added with an API key. The URLs in their
//! metadata must not give access to the server's own network.

use std::sync::Arc;
use std::time::Duration;

use axum::http::Response;
use rmcp::transport::auth::{OAuthHttpClient, OAuthHttpClientFuture, OAuthHttpRequest};
use toolcrib_protocol::outbound::OutboundPolicy;

/// Maximum size of an issuer's response.
const MAX_RESPONSE_BYTES: usize = 1 << 20;

/// Maximum duration of a request to an issuer.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);

/// An HTTP client that obeys the outbound policy and follows no redirects.
pub(super) struct GuardedOauthClient {
    rules: Arc<OutboundPolicy>,
    client: reqwest::Client,
}

impl GuardedOauthClient {
    pub(super) fn new(rules: Arc<OutboundPolicy>) -> Result<Self, String> {
        let client = rules
            .client_builder()
            .timeout(REQUEST_TIMEOUT)
            .build()
            .map_err(|error| error.to_string())?;
        Ok(Self { rules, client })
    }
}

impl OAuthHttpClient for GuardedOauthClient {
    fn execute(&self, oauth_request: OAuthHttpRequest) -> OAuthHttpClientFuture<'_> {
        Box::pin(async move {
            let (head, body) = oauth_request.request.into_parts();
            let url = self.rules.check(&head.uri.to_string())?;
            let request = self.client.request(head.method, url).headers(head.headers).body(body);
            let mut answer = request.send().await?;
            let mut builder = Response::builder().status(answer.status());
            if let Some(headers) = builder.headers_mut() {
                headers.extend(answer.headers().clone());
            }
            let mut body = Vec::new();
            while let Some(chunk) = answer.chunk().await? {
                if body.len() + chunk.len() > MAX_RESPONSE_BYTES {
                    return Err(
                        format!("an issuer's answer is over {MAX_RESPONSE_BYTES} bytes").into()
                    );
                }
                body.extend_from_slice(&chunk);
            }
            Ok(builder.body(body)?)
        })
    }
}
