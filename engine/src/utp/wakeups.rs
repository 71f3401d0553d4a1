//! Wakeups by webhook: tell the receiver of an agent that an item waits in the agent's inbox. The
//! inbox is the truth: a wakeup that is lost is repeated while the item is unread.

use std::collections::HashSet;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::domain::fault::Error;
use crate::domain::utp::InboxItem;
use crate::ports::core::{Core, from_store_error};
use crate::ports::webhook_sender::WakeupMessage;
use crate::registry::Registry;

/// A project and an agent.
type AgentKey = (String, String);

/// The agents that have to be woken by webhook.
pub(crate) struct WebhookWakeups {
    core: Arc<Core>,
    registry: Arc<Registry>,
    due: Mutex<HashSet<AgentKey>>,
    signal: Notify,
}

impl WebhookWakeups {
    /// Creates an empty queue.
    pub(crate) fn new(core: Arc<Core>, registry: Arc<Registry>) -> Self {
        Self { core, registry, due: Mutex::default(), signal: Notify::new() }
    }

    /// Returns the agents in the queue, and empties it. Waits until there is one.
    pub(crate) async fn take_due(&self) -> Vec<AgentKey> {
        loop {
            let due: Vec<AgentKey> = self.due.lock().drain().collect();
            if !due.is_empty() {
                return due;
            }
            self.signal.notified().await;
        }
    }

    /// Returns the URL that receives a webhook when an item waits for an agent.
    fn wakeup_url(&self, project: &str, agent_id: &str) -> Option<String> {
        self.core.webhook_sender.as_ref()?;
        let entry = self.registry.find_agent_entry(project, agent_id)?;
        entry.definition?.wakeup_url
    }

    /// Returns true if an agent of any project is woken by webhook.
    pub(crate) fn has_urls(&self) -> bool {
        let catalog = self.registry.catalog();
        let mut agents = catalog.directory().roster.iter().filter_map(|e| e.definition.as_deref());
        self.core.webhook_sender.is_some() && agents.any(|agent| agent.wakeup_url.is_some())
    }

    /// Wakes an agent by webhook, if it has a URL.
    pub(crate) fn queue(&self, project: &str, agent_id: &str) {
        if self.wakeup_url(project, agent_id).is_some() {
            self.due.lock().insert((project.to_owned(), agent_id.to_owned()));
            self.signal.notify_one();
        }
    }

    /// Makes one attempt to wake an agent. Returns true if no other attempt is needed: its receiver
    /// accepted the wakeup, its inbox is empty, or it has no URL.
    pub(crate) async fn send(&self, project: &str, agent_id: &str) -> Result<bool, Error> {
        let Some(url) = self.wakeup_url(project, agent_id) else { return Ok(true) };
        let Some(sender) = self.core.webhook_sender.clone() else { return Ok(true) };
        let unread = self.core.store.utp().inbox(project, agent_id, 1).await;
        let Some(item) = unread.map_err(from_store_error)?.into_iter().next() else {
            return Ok(true);
        };
        let InboxItem { inbox_id, message_type, turn_id, .. } = item;
        let message = WakeupMessage {
            url,
            project: project.to_owned(),
            agent_id: agent_id.to_owned(),
            inbox_id,
            reason: message_type,
            turn_id,
            sent_ms: self.core.wall_ms(),
        };
        let response = sender.send_wakeup(message).await;
        let is_delivered = matches!(response.result, Ok(code) if (200..300).contains(&code));
        let result = if is_delivered { "ok" } else { "failed" };
        metrics::counter!("toolcrib_agent_wakeup_webhooks_total", "result" => result).increment(1);
        if !is_delivered {
            tracing::warn!(agent = agent_id, result = ?response.result, "agent not woken");
        }
        Ok(is_delivered)
    }
}
