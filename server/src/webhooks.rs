//! Webhooks for ended calls, requested approvals and wakeups of agents: one signed POST to a URL,
//! as Standard Webhooks defines it. The engine decides when to send and what the response means.
//!
//! This implements the engine's `WebhookSender` port. It is part of the server and not of the
//! sources crate, because a source executes tools and a receiver of webhooks executes nothing. Like
//! telemetry, it reports to the outside what has happened.
//!
//! Only the status and the headers of the response are used, never its body. The stored reason of a
//! failure never contains content from the receiver, which may be in a private network.

mod signing;
use std::error::Error as _;
use std::sync::OnceLock;
use std::time::Duration;

use async_trait::async_trait;
use jiff::Timestamp;
use reqwest::header::{CONTENT_TYPE, HeaderMap};
use serde::Serialize;
use signing::SigningKeySources;
use toolcrib::Call;
use toolcrib::domain::delivery::DeliveryResponse;
use toolcrib::ports::webhook_sender::{
    ApprovalMessage, WakeupMessage, WebhookMessage, WebhookSender,
};
use toolcrib_protocol::approval::ApprovalBody;
use toolcrib_protocol::background_task::TaskOutcome;
use toolcrib_protocol::outbound::{OutboundPolicy, find_private_address_error, retry_after_ms};

use crate::config::WebhookSettings;

pub use signing::encode_key;

/// Signs webhooks and posts them over HTTP, to addresses that the outbound policy permits.
pub struct HttpWebhookSender {
    keys: SigningKeySources,
    outbound: OutboundPolicy,
    timeout: Duration,
    max_data_bytes: usize,
    /// Created by the first delivery, because loading certificates takes time.
    client: OnceLock<reqwest::Client>,
}

/// The body of a webhook that announces an approval.
#[derive(Serialize)]
struct ApprovalPayload<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    /// The time at which the approval was requested.
    timestamp: String,
    data: ApprovalBody<'a>,
}

/// The body of a webhook that wakes the worker of an agent.
#[derive(Serialize)]
struct WakeupPayload<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    /// The time of the wakeup.
    timestamp: String,
    data: WakeupBody<'a>,
}

/// The item that waits for an agent, in the form of a wakeup over NATS.
#[derive(Serialize)]
struct WakeupBody<'a> {
    project_id: &'a str,
    agent_id: &'a str,
    inbox_id: &'a str,
    reason: &'a str,
    metadata: WakeupMetadata<'a>,
}

#[derive(Serialize)]
struct WakeupMetadata<'a> {
    agent_turn_id: &'a str,
}

/// The body of a webhook.
#[derive(Serialize)]
struct WebhookPayload<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    /// The time at which the call ended.
    timestamp: String,
    data: TaskOutcome<'a>,
}

impl HttpWebhookSender {
    /// Returns a sender with these settings. Fails if a signing key is invalid.
    pub fn new(settings: &WebhookSettings) -> Result<Self, String> {
        let keys = SigningKeySources::from_settings(settings);
        keys.check()?;
        Ok(Self {
            keys,
            outbound: OutboundPolicy::new(
                "webhooks",
                settings.allow_private,
                &settings.allow_hosts,
            ),
            timeout: Duration::from_millis(settings.timeout_ms),
            max_data_bytes: settings.max_data_bytes,
            client: OnceLock::new(),
        })
    }

    fn client(&self) -> Result<&reqwest::Client, String> {
        if let Some(client) = self.client.get() {
            return Ok(client);
        }
        let built = self.outbound.client_builder().build();
        let built = built.map_err(|error| format!("no HTTP client: {error}"))?;
        Ok(self.client.get_or_init(|| built))
    }

    /// Posts a signed message.
    async fn post(
        &self,
        project: &str,
        url: &str,
        id: String,
        payload: String,
    ) -> Result<(u16, HeaderMap), String> {
        let keys = self.keys.load_keys(project)?;
        // The rules may have changed since the URL was accepted.
        let url = self.outbound.check(url).map_err(|reason| format!("the URL {reason}"))?;
        // The wall clock and not the engine's clock, because the receiver compares it with its own.
        let timestamp = Timestamp::now().as_second();
        let signature = keys.sign(&id, timestamp, &payload);
        let request = self
            .client()?
            .post(url)
            .timeout(self.timeout)
            .header(CONTENT_TYPE, "application/json")
            .header("webhook-id", id)
            .header("webhook-timestamp", timestamp)
            .header("webhook-signature", signature)
            .body(payload);
        let answer = request.send().await.map_err(|error| self.describe_error(&error))?;
        Ok((answer.status().as_u16(), answer.headers().clone()))
    }

    /// Writes the announcement of an approval.
    fn approval_payload(message: &ApprovalMessage) -> Result<String, String> {
        let approval = &message.approval;
        let created_ms = i64::try_from(approval.created_ms).unwrap_or_default();
        let timestamp = Timestamp::from_millisecond(created_ms).unwrap_or_default();
        let payload = ApprovalPayload {
            kind: "approval.requested",
            timestamp: format!("{timestamp:.3}"),
            data: ApprovalBody::new(approval, message.link.clone()),
        };
        serde_json::to_string(&payload).map_err(|error| format!("no payload: {error}"))
    }

    /// Writes the wakeup of an agent.
    fn wakeup_payload(message: &WakeupMessage) -> Result<String, String> {
        let sent_ms = i64::try_from(message.sent_ms).unwrap_or_default();
        let timestamp = Timestamp::from_millisecond(sent_ms).unwrap_or_default();
        let data = WakeupBody {
            project_id: &message.project,
            agent_id: &message.agent_id,
            inbox_id: &message.inbox_id,
            reason: &message.reason,
            metadata: WakeupMetadata { agent_turn_id: &message.turn_id },
        };
        let kind = "agent.wakeup";
        let payload = WakeupPayload { kind, timestamp: format!("{timestamp:.3}"), data };
        serde_json::to_string(&payload).map_err(|error| format!("no payload: {error}"))
    }

    fn payload(&self, call: &Call) -> Result<String, String> {
        let end = TaskOutcome::from_call(call, self.max_data_bytes);
        let ended_ms = i64::try_from(call.completed_ms.unwrap_or_default()).unwrap_or_default();
        let timestamp = Timestamp::from_millisecond(ended_ms).unwrap_or_default();
        let payload = WebhookPayload {
            kind: end.event_name(),
            timestamp: format!("{timestamp:.3}"),
            data: end,
        };
        serde_json::to_string(&payload).map_err(|error| format!("no payload: {error}"))
    }

    /// Describes why there was no response, without the URL, which may contain a secret.
    fn describe_error(&self, error: &reqwest::Error) -> String {
        if error.is_timeout() {
            return format!("no answer within {} ms", self.timeout.as_millis());
        }
        if let Some(private) = find_private_address_error(error) {
            return private.to_string();
        }
        let (mut cause, mut last) = (error.source(), None);
        while let Some(deeper) = cause {
            last = Some(deeper.to_string());
            cause = deeper.source();
        }
        let problem = if error.is_connect() { "cannot connect" } else { "the connection broke" };
        last.map_or_else(|| problem.to_owned(), |last| format!("{problem}: {last}"))
    }
}

#[async_trait]
impl WebhookSender for HttpWebhookSender {
    fn check_url(&self, project: &str, url: &str) -> Result<String, String> {
        let url = self.outbound.check(url)?;
        self.keys.load_keys(project).map_err(|reason| format!("cannot be used: {reason}"))?;
        Ok(url.into())
    }

    async fn send(&self, message: WebhookMessage) -> DeliveryResponse {
        let delivery = &message.delivery;
        let sent = match self.payload(&message.call) {
            Ok(payload) => {
                self.post(&delivery.project, &delivery.url, delivery.message_id(), payload).await
            }
            Err(reason) => Err(reason),
        };
        to_response(sent)
    }

    async fn send_approval(&self, message: ApprovalMessage) -> DeliveryResponse {
        let (project, url) = (&message.approval.project, &message.url);
        let sent = match Self::approval_payload(&message) {
            Ok(payload) => self.post(project, url, message.approval.id.clone(), payload).await,
            Err(reason) => Err(reason),
        };
        to_response(sent)
    }

    async fn send_wakeup(&self, message: WakeupMessage) -> DeliveryResponse {
        // A repeated wakeup is a message of its own.
        let id = format!("wake_{}_{}", message.inbox_id, message.sent_ms);
        let sent = match Self::wakeup_payload(&message) {
            Ok(payload) => self.post(&message.project, &message.url, id, payload).await,
            Err(reason) => Err(reason),
        };
        to_response(sent)
    }
}

fn to_response(sent: Result<(u16, HeaderMap), String>) -> DeliveryResponse {
    match sent {
        Ok((code, headers)) => {
            DeliveryResponse { result: Ok(code), retry_after_ms: retry_after_ms(&headers) }
        }
        Err(reason) => DeliveryResponse { result: Err(reason), retry_after_ms: None },
    }
}
