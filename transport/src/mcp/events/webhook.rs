//! Posts signed messages to the URL of an MCP client, as Standard Webhooks defines it.

use std::sync::OnceLock;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hmac::{Hmac, KeyInit, Mac};
use reqwest::StatusCode;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use toolcrib_protocol::outbound::{OutboundPolicy, is_loopback_host};

/// Maximum time of one request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum size of the response to a verification.
const MAX_RESPONSE_BYTES: usize = 4 << 10;

const SECRET_PREFIX: &str = "whsec_";

/// The reason for which a message was not delivered, as a category.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::mcp) enum DeliveryProblem {
    ConnectionRefused,
    Timeout,
    ClientError,
    /// The receiver does not want this message, and no repetition of it.
    Rejected,
    ServerError,
    ChallengeFailed,
}

impl DeliveryProblem {
    /// Returns the category on the wire.
    pub(in crate::mcp) fn as_str(self) -> &'static str {
        match self {
            Self::ConnectionRefused => "connection_refused",
            Self::Timeout => "timeout",
            Self::ClientError | Self::Rejected => "http_4xx",
            Self::ServerError => "http_5xx",
            Self::ChallengeFailed => "challenge_failed",
        }
    }
}

/// The receiver of a subscription.
pub(in crate::mcp) struct EventReceiver<'a> {
    pub(in crate::mcp) url: &'a str,
    pub(in crate::mcp) secret: &'a str,
    /// The secret before a rotation, while messages are signed with both.
    pub(in crate::mcp) previous_secret: Option<&'a str>,
    pub(in crate::mcp) subscription_id: &'a str,
}

/// Returns the key in a secret: `whsec_` and 24 to 64 bytes in base64.
pub(in crate::mcp) fn parse_secret(secret: &str) -> Option<Vec<u8>> {
    let bytes = STANDARD.decode(secret.strip_prefix(SECRET_PREFIX)?).ok()?;
    (24..=64).contains(&bytes.len()).then_some(bytes)
}

/// Posts messages.
pub(in crate::mcp) struct EventSender {
    outbound: OutboundPolicy,
    client: OnceLock<Option<reqwest::Client>>,
}

impl EventSender {
    pub(in crate::mcp) fn new(outbound: OutboundPolicy) -> Self {
        Self { outbound, client: OnceLock::new() }
    }

    /// Returns the URL as stored, or the reason why it is not acceptable.
    pub(in crate::mcp) fn check_url(&self, url: &str) -> Result<String, String> {
        let url = self.outbound.check(url)?;
        let is_local = url.host_str().is_some_and(is_loopback_host);
        match url.scheme() == "https" || is_local {
            true => Ok(url.into()),
            false => Err("must begin with https://".to_owned()),
        }
    }

    /// Makes one attempt to deliver an occurrence.
    pub(in crate::mcp) async fn deliver(
        &self,
        receiver: &EventReceiver<'_>,
        occurrence: &Value,
    ) -> Result<(), DeliveryProblem> {
        let id = occurrence["eventId"].as_str().unwrap_or_default();
        self.post(receiver, id, occurrence).await.map(drop)
    }

    /// Makes one attempt to announce that a subscription has ended.
    pub(in crate::mcp) async fn announce_end(&self, receiver: &EventReceiver<'_>, reason: &str) {
        let error = json!({ "code": super::error_code::FORBIDDEN, "message": reason });
        let message = json!({ "type": "terminated", "error": error });
        let id = format!("msg_terminated_{}", ulid::Ulid::generate());
        // The subscription has ended, whether or not this message reaches its receiver.
        let _ = self.post(receiver, &id, &message).await;
    }

    /// Verifies that the receiver accepts messages: its response must repeat a random challenge.
    pub(in crate::mcp) async fn verify(
        &self,
        receiver: &EventReceiver<'_>,
    ) -> Result<(), DeliveryProblem> {
        let challenge = STANDARD.encode(Sha256::digest(crate::auth::generate_secret()));
        let message = json!({ "type": "verification", "challenge": challenge });
        let id = format!("msg_verification_{}", ulid::Ulid::generate());
        let mut response = self.post(receiver, &id, &message).await?;
        let mut body = Vec::new();
        while let Ok(Some(chunk)) = response.chunk().await {
            body.extend_from_slice(&chunk);
            if body.len() > MAX_RESPONSE_BYTES {
                return Err(DeliveryProblem::ChallengeFailed);
            }
        }
        let repeated = serde_json::from_slice::<Value>(&body).unwrap_or_default();
        let repeated = repeated["challenge"].as_str().unwrap_or_default();
        // Compares digests, so that the duration reveals nothing about the challenge.
        match Sha256::digest(repeated) == Sha256::digest(&challenge) {
            true => Ok(()),
            false => Err(DeliveryProblem::ChallengeFailed),
        }
    }

    async fn post(
        &self,
        receiver: &EventReceiver<'_>,
        id: &str,
        message: &Value,
    ) -> Result<reqwest::Response, DeliveryProblem> {
        let refused = DeliveryProblem::ConnectionRefused;
        // The rules may have changed since the URL was accepted.
        let url = self.check_url(receiver.url).map_err(|_| refused)?;
        let client = self.client.get_or_init(|| self.outbound.client_builder().build().ok());
        let client = client.as_ref().ok_or(refused)?;
        let (body, timestamp) = (message.to_string(), jiff::Timestamp::now().as_second());
        let secrets = [Some(receiver.secret), receiver.previous_secret].into_iter().flatten();
        let sign_with = |secret| sign(&parse_secret(secret)?, id, timestamp, &body);
        let signatures: Option<Vec<String>> = secrets.map(sign_with).collect();
        let signature = signatures.ok_or(refused)?.join(" ");
        let request = client
            .post(url)
            .timeout(REQUEST_TIMEOUT)
            .header("content-type", "application/json")
            .header("webhook-id", id)
            .header("webhook-timestamp", timestamp)
            .header("webhook-signature", signature)
            .header("x-mcp-subscription-id", receiver.subscription_id)
            .body(body);
        match request.send().await {
            Ok(response) if response.status().is_success() => Ok(response),
            Ok(response) if response.status().is_server_error() => {
                Err(DeliveryProblem::ServerError)
            }
            Ok(response) => match response.status() {
                StatusCode::GONE | StatusCode::PAYLOAD_TOO_LARGE => Err(DeliveryProblem::Rejected),
                _ => Err(DeliveryProblem::ClientError),
            },
            Err(error) if error.is_timeout() => Err(DeliveryProblem::Timeout),
            Err(_) => Err(refused),
        }
    }
}

/// Returns the signature header: `v1,` and the MAC over id, time and body.
fn sign(key: &[u8], id: &str, timestamp: i64, body: &str) -> Option<String> {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).ok()?;
    mac.update(format!("{id}.{timestamp}.{body}").as_bytes());
    Some(format!("v1,{}", STANDARD.encode(mac.finalize().into_bytes())))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_signed_as_standard_webhooks_defines() {
        // The example of the Standard Webhooks specification.
        let key = parse_secret("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw").unwrap();
        let signature =
            sign(&key, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1_614_265_330, r#"{"test": 2432232314}"#);
        assert_eq!(signature.unwrap(), "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=");
        for wrong in ["", "whsec_", "whsec_c2hvcnQ=", "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"] {
            assert!(parse_secret(wrong).is_none(), "{wrong}");
        }
    }
}
