//! The webhook sender port: sends one message to a caller's URL.
//!
//! The engine decides when to send and what a response means ([`crate::domain::delivery`]); the
//! sender makes one HTTP request.

use std::sync::Arc;

use async_trait::async_trait;

use crate::domain::call::Call;
use crate::domain::call::approval::Approval;
use crate::domain::delivery::{Delivery, DeliveryResponse, RetrySchedule};

/// The content of one delivery attempt.
#[derive(Debug, Clone)]
pub struct WebhookMessage {
    /// The delivery with its URL and the number of attempts so far.
    pub delivery: Delivery,
    /// The call with its outcome.
    pub call: Arc<Call>,
}

/// The announcement of an approval that waits for a decision.
#[derive(Debug, Clone)]
pub struct ApprovalMessage {
    /// The receiver's URL.
    pub url: String,
    /// The pending approval.
    pub approval: Approval,
    /// Link to the approval.
    pub link: String,
}

/// The wakeup of an agent's worker: an item waits in the agent's inbox.
#[derive(Debug, Clone)]
pub struct WakeupMessage {
    /// The receiver's URL.
    pub url: String,
    /// Id of the agent's project.
    pub project: String,
    /// Id of the agent.
    pub agent_id: String,
    /// Id of the item that is announced.
    pub inbox_id: String,
    /// Type of that item: `turn`, `tool_result`, `timeout` or `stop`.
    pub reason: String,
    /// Id of the turn that it concerns.
    pub turn_id: String,
    /// Time of the wakeup, in Unix milliseconds.
    pub sent_ms: u64,
}

/// Sends messages to the URLs that callers gave.
#[async_trait]
pub trait WebhookSender: Send + Sync + 'static {
    /// Returns the URL as stored, or the reason why it is not acceptable. The engine checks it
    /// before it accepts a call.
    fn check_url(&self, project: &str, url: &str) -> Result<String, String>;

    /// Makes one attempt. The implementation limits its duration.
    async fn send(&self, message: WebhookMessage) -> DeliveryResponse;

    /// Makes one attempt to announce an approval. A sender that cannot do so refuses it.
    async fn send_approval(&self, _message: ApprovalMessage) -> DeliveryResponse {
        let result = Err("this sender announces no approvals".to_owned());
        DeliveryResponse { result, retry_after_ms: None }
    }

    /// Makes one attempt to wake the worker of an agent. A sender that cannot do so refuses it.
    async fn send_wakeup(&self, _message: WakeupMessage) -> DeliveryResponse {
        let result = Err("this sender wakes no agents".to_owned());
        DeliveryResponse { result, retry_after_ms: None }
    }
}

/// Settings of webhook delivery.
#[derive(Debug, Clone, PartialEq)]
pub struct DeliverySettings {
    /// Delays between attempts; no retry follows the last.
    pub schedule: RetrySchedule,
    /// Maximum attempts in flight.
    pub max_parallel: usize,
    /// Maximum attempts in flight to one receiver, so that a slow one does not delay the others.
    pub max_parallel_per_receiver: usize,
}

impl Default for DeliverySettings {
    fn default() -> Self {
        Self { schedule: RetrySchedule::default(), max_parallel: 64, max_parallel_per_receiver: 8 }
    }
}
