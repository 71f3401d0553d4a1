//! Wakeups by webhook: tell the receiver of an agent that an item waits in the agent's inbox, once
//! for each new item. The inbox is the truth: while it has unread items, the oldest is announced
//! again.

use std::collections::{HashMap, HashSet};
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

/// Maximum number of unread items of an agent to search for new ones.
const MAX_UNREAD_ITEMS: usize = 1_000;

/// The reason to wake an agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WakeReason {
    /// Its inbox may have new items: each of them is announced.
    NewItems,
    /// Its inbox has had unread items for some time: without a new item, the oldest is announced.
    StillUnread,
}

/// The agents that have to be woken by webhook.
pub(crate) struct WebhookWakeups {
    core: Arc<Core>,
    registry: Arc<Registry>,
    due: Mutex<HashMap<AgentKey, WakeReason>>,
    signal: Notify,
    /// Ids of the unread items that this process has announced, or is announcing.
    announced: Mutex<HashMap<AgentKey, HashSet<String>>>,
    /// Time of the start, in Unix milliseconds. Older items are not new.
    started_ms: u64,
}

impl WebhookWakeups {
    /// Creates an empty queue.
    pub(crate) fn new(core: Arc<Core>, registry: Arc<Registry>) -> Self {
        let started_ms = core.clock.wall_ms();
        let (due, announced) = (Mutex::default(), Mutex::default());
        Self { core, registry, due, signal: Notify::new(), announced, started_ms }
    }

    /// Returns the agents in the queue, and empties it. Waits until there is one.
    pub(crate) async fn take_due(&self) -> Vec<(AgentKey, WakeReason)> {
        loop {
            let due: Vec<(AgentKey, WakeReason)> = self.due.lock().drain().collect();
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
    pub(crate) fn queue(&self, project: &str, agent_id: &str, reason: WakeReason) {
        if self.wakeup_url(project, agent_id).is_some() {
            let key = (project.to_owned(), agent_id.to_owned());
            let mut due = self.due.lock();
            let queued = due.entry(key).or_insert(reason);
            if reason == WakeReason::StillUnread {
                *queued = reason;
            }
            self.signal.notify_one();
        }
    }

    /// Makes one attempt to announce an agent's items. Returns true if no other attempt is needed:
    /// the receiver accepted the wakeups, there is nothing to announce, or the agent has no URL.
    pub(crate) async fn send(
        &self,
        project: &str,
        agent_id: &str,
        reason: WakeReason,
    ) -> Result<bool, Error> {
        let Some(url) = self.wakeup_url(project, agent_id) else { return Ok(true) };
        let unread = self.core.store.utp().inbox(project, agent_id, MAX_UNREAD_ITEMS).await;
        let unread = unread.map_err(from_store_error)?;
        let oldest = unread.first().filter(|_| reason == WakeReason::StillUnread).cloned();
        let key = (project.to_owned(), agent_id.to_owned());
        let mut items = self.claim_new_items(&key, unread);
        if items.is_empty() {
            items.extend(oldest);
        }
        let mut items = items.into_iter();
        while let Some(item) = items.next() {
            let inbox_id = item.inbox_id.clone();
            if !self.send_item(&url, item).await {
                let failed = std::iter::once(inbox_id).chain(items.map(|item| item.inbox_id));
                self.release_items(&key, failed);
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Returns the items that were not announced before, in order, and records that they are.
    fn claim_new_items(&self, key: &AgentKey, mut unread: Vec<InboxItem>) -> Vec<InboxItem> {
        let mut announced = self.announced.lock();
        if unread.is_empty() {
            announced.remove(key);
            return unread;
        }
        let known = announced.entry(key.clone()).or_default();
        let ids: HashSet<&str> = unread.iter().map(|item| item.inbox_id.as_str()).collect();
        known.retain(|id| ids.contains(id.as_str()));
        unread.retain(|item| {
            item.created_ms >= self.started_ms && known.insert(item.inbox_id.clone())
        });
        unread
    }

    /// Records that these items have still to be announced.
    fn release_items(&self, key: &AgentKey, inbox_ids: impl Iterator<Item = String>) {
        let mut announced = self.announced.lock();
        let Some(known) = announced.get_mut(key) else { return };
        for id in inbox_ids {
            known.remove(&id);
        }
    }

    /// Announces one item. Returns true if the receiver accepted the wakeup.
    async fn send_item(&self, url: &str, item: InboxItem) -> bool {
        let Some(sender) = self.core.webhook_sender.clone() else { return true };
        let InboxItem { project, agent_id, inbox_id, message_type, turn_id, .. } = item;
        let message = WakeupMessage {
            url: url.to_owned(),
            project,
            agent_id: agent_id.clone(),
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
        is_delivered
    }
}
