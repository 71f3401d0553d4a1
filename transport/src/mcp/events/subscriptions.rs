//! The subscriptions of MCP clients to events, delivered by webhook.
//!
//! A subscription is stored with its position, so that it continues after a restart. One task per
//! subscription delivers one event after another, and repeats a failed delivery until the receiver
//! accepts or rejects the event, so every event arrives at least once and in order. A position is
//! stored after the response to its event.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};
use tokio_util::sync::CancellationToken;
use toolcrib::domain::caller::{AuthMethod, CallerAttributes};
use toolcrib::domain::fault::Error;
use toolcrib::{Caller, Engine};

use super::types::{EventFilter, EventType};
use super::webhook::{DeliveryProblem, EventReceiver, EventSender};

/// Maximum number of subscriptions of one project.
pub(in crate::mcp) const MAX_SUBSCRIPTIONS: usize = 100;

/// Time for which messages are also signed with the secret that a refresh replaced.
const SECRET_OVERLAP_MS: u64 = 3_600_000;

/// First and longest delay between two attempts to deliver an event.
const FIRST_RETRY: Duration = Duration::from_secs(1);
const LONGEST_RETRY: Duration = Duration::from_secs(300);

/// A subscription as it is stored.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(in crate::mcp) struct EventSubscriptionRecord {
    pub(in crate::mcp) agent: String,
    roles: String,
    #[serde(default)]
    is_operator: bool,
    #[serde(default)]
    attributes: CallerAttributes,
    pub(in crate::mcp) name: String,
    pub(in crate::mcp) arguments: Value,
    pub(in crate::mcp) url: String,
    pub(in crate::mcp) secret: String,
    /// The secret that a refresh replaced, and the end of its use in Unix milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    previous_secret: Option<(String, u64)>,
    /// Position of the last event that the receiver accepted or rejected.
    pub(in crate::mcp) position: u64,
    /// End of the subscription in Unix milliseconds; `None` for one without an end.
    pub(in crate::mcp) expires_ms: Option<u64>,
    /// Events before this time, in Unix milliseconds, are omitted.
    #[serde(default)]
    pub(in crate::mcp) not_before_ms: Option<i64>,
}

impl EventSubscriptionRecord {
    /// Returns a record of a new subscription of this caller.
    pub(in crate::mcp) fn new(
        caller: &Caller,
        name: &str,
        arguments: Value,
        url: String,
        secret: String,
    ) -> Self {
        Self {
            agent: caller.agent.clone(),
            roles: caller.roles.to_string(),
            is_operator: caller.auth_method == AuthMethod::Local,
            attributes: (*caller.attributes).clone(),
            name: name.to_owned(),
            arguments,
            url,
            secret,
            previous_secret: None,
            position: 0,
            expires_ms: None,
            not_before_ms: None,
        }
    }

    /// Returns the id of the subscription, which its caller, URL, event and arguments determine.
    pub(in crate::mcp) fn id(&self, caller: &Caller) -> String {
        // The map of the arguments is sorted, so equal arguments have equal texts.
        let key = serde_json::json!([
            caller.project,
            caller.owner_name(),
            self.url,
            self.name,
            self.arguments
        ]);
        let digest = URL_SAFE_NO_PAD.encode(Sha256::digest(key.to_string()));
        format!("sub_{}", &digest[..24])
    }

    /// Takes over the secret of the subscription that this record refreshes: messages on their way
    /// are signed with both for a while.
    pub(in crate::mcp) fn keep_secret_of(&mut self, earlier: &Self, now_ms: u64) {
        self.previous_secret = match earlier.secret == self.secret {
            true => earlier.previous_secret.clone(),
            false => Some((earlier.secret.clone(), now_ms + SECRET_OVERLAP_MS)),
        };
    }

    /// Returns the caller that the subscription acts for.
    fn caller(&self, project: &str) -> Option<Caller> {
        let roles: toolcrib::RoleSet = self.roles.parse().ok()?;
        let method = if self.is_operator { AuthMethod::Local } else { AuthMethod::Key };
        let caller = Caller::new(project, self.agent.clone(), roles, method);
        Some(Caller { attributes: Arc::new(self.attributes.clone()), ..caller })
    }
}

/// The state of the delivery of one subscription.
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::mcp) struct EventDeliveryStatus {
    pub(in crate::mcp) last_delivery_ms: Option<i64>,
    pub(in crate::mcp) last_error: Option<DeliveryProblem>,
}

struct ActiveSubscription {
    project: String,
    record: EventSubscriptionRecord,
    status: EventDeliveryStatus,
    stop: CancellationToken,
}

/// The subscriptions of one server.
pub(in crate::mcp) struct EventSubscriptions {
    engine: Engine,
    pub(in crate::mcp) sender: EventSender,
    active: Mutex<HashMap<String, ActiveSubscription>>,
}

impl EventSubscriptions {
    pub(in crate::mcp) fn new(engine: Engine, sender: EventSender) -> Self {
        Self { engine, sender, active: Mutex::default() }
    }

    /// Continues the stored subscriptions.
    pub(in crate::mcp) fn start(self: &Arc<Self>) {
        let this = self.clone();
        // Without a runtime there are no requests either.
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        runtime.spawn(async move {
            let stored = match this.engine.upstreams().event_subscriptions().await {
                Ok(stored) => stored,
                Err(error) => {
                    tracing::error!(%error, "the subscriptions to events cannot be read");
                    return;
                }
            };
            for (project, id, text) in stored {
                match serde_json::from_str::<EventSubscriptionRecord>(&text) {
                    Ok(record) => this.run(&project, &id, record),
                    Err(error) => tracing::error!(id, %error, "a subscription cannot be read"),
                }
            }
        });
    }

    /// Stores a subscription and begins or continues its delivery.
    pub(in crate::mcp) async fn put(
        self: &Arc<Self>,
        project: &str,
        id: &str,
        record: EventSubscriptionRecord,
    ) -> Result<(), Error> {
        self.store(project, id, Some(&record)).await?;
        self.run(project, id, record);
        Ok(())
    }

    /// Removes a subscription. Returns false if there is none.
    pub(in crate::mcp) async fn remove(&self, project: &str, id: &str) -> Result<bool, Error> {
        let removed = self.active.lock().remove(id);
        if let Some(removed) = &removed {
            removed.stop.cancel();
        }
        self.store(project, id, None).await?;
        Ok(removed.is_some())
    }

    /// Returns the record of a subscription and the state of its delivery.
    pub(in crate::mcp) fn find(
        &self,
        id: &str,
    ) -> Option<(EventSubscriptionRecord, EventDeliveryStatus)> {
        self.active.lock().get(id).map(|active| (active.record.clone(), active.status))
    }

    /// Returns true if a caller's URL has confirmed before that it accepts messages.
    pub(in crate::mcp) fn is_verified(&self, caller: &Caller, url: &str) -> bool {
        let is_same = |active: &ActiveSubscription| {
            let record = &active.record;
            let owner = record.caller(&active.project).map(|caller| caller.owner_name());
            active.project == caller.project
                && record.url == url
                && owner == Some(caller.owner_name())
        };
        self.active.lock().values().any(is_same)
    }

    /// Returns the number of subscriptions of a project.
    pub(in crate::mcp) fn count(&self, project: &str) -> usize {
        self.active.lock().values().filter(|active| active.project == project).count()
    }

    async fn store(
        &self,
        project: &str,
        id: &str,
        record: Option<&EventSubscriptionRecord>,
    ) -> Result<(), Error> {
        let text = record.map(serde_json::to_string).transpose();
        let text = text.map_err(|error| Error::Internal(Box::new(error)))?;
        self.engine.upstreams().store_event_subscription(project, id, text).await
    }

    /// Delivers a subscription from its position on, in place of an earlier task.
    fn run(self: &Arc<Self>, project: &str, id: &str, record: EventSubscriptionRecord) {
        let stop = CancellationToken::new();
        let mut active = self.active.lock();
        let status = active.get(id).map(|earlier| earlier.status).unwrap_or_default();
        let subscription = ActiveSubscription {
            project: project.to_owned(),
            record: record.clone(),
            status,
            stop: stop.clone(),
        };
        if let Some(earlier) = active.insert(id.to_owned(), subscription) {
            earlier.stop.cancel();
        }
        drop(active);
        let (this, project, id) = (self.clone(), project.to_owned(), id.to_owned());
        tokio::spawn(async move {
            tokio::select! {
                () = stop.cancelled() => {}
                () = this.deliver_all(&project, &id, record) => {}
            }
        });
    }

    /// Delivers events until the subscription ends or the engine shuts down.
    async fn deliver_all(&self, project: &str, id: &str, record: EventSubscriptionRecord) {
        let (Some(kind), Some(caller)) = (EventType::parse(&record.name), record.caller(project))
        else {
            return;
        };
        let filter: EventFilter =
            serde_json::from_value(record.arguments.clone()).unwrap_or_default();
        let filter = filter.with_start(record.not_before_ms);
        let mut position = record.position;
        loop {
            let page = tokio::select! {
                page = kind.wait_for_page(&self.engine, &caller, &filter, position) => page,
                () = sleep_until(record.expires_ms) => return self.end(project, id).await,
            };
            let page = match page {
                Ok(Some(page)) => page,
                Ok(None) => return,
                // The store is unavailable for the moment.
                Err(_) => {
                    tokio::time::sleep(FIRST_RETRY).await;
                    continue;
                }
            };
            for (number, occurrence) in &page.occurrences {
                if !self.engine.registry().credentials().is_credential_active(&caller) {
                    let receiver = receiver(&record, id);
                    self.sender.announce_end(&receiver, "the credentials were revoked").await;
                    return self.end(project, id).await;
                }
                if !self.deliver(id, &record, occurrence).await {
                    return self.end(project, id).await;
                }
                self.save_position(project, id, *number).await;
            }
            position = page.position;
            self.remember_position(id, position);
        }
    }

    /// Delivers one event, and repeats failed attempts. Returns false if the subscription ended
    /// before.
    async fn deliver(&self, id: &str, record: &EventSubscriptionRecord, event: &Value) -> bool {
        let mut delay = FIRST_RETRY;
        loop {
            let sent = tokio::select! {
                sent = self.deliver_once(id, record, event) => sent,
                () = sleep_until(record.expires_ms) => return false,
            };
            if sent {
                return true;
            }
            tokio::select! {
                () = tokio::time::sleep(delay) => {}
                () = sleep_until(record.expires_ms) => return false,
            }
            delay = (delay * 2).min(LONGEST_RETRY);
        }
    }

    /// Makes one attempt. Returns false if it must be repeated: a rejected event is not sent again.
    async fn deliver_once(
        &self,
        id: &str,
        record: &EventSubscriptionRecord,
        event: &Value,
    ) -> bool {
        let sent = self.sender.deliver(&receiver(record, id), event).await;
        let result = if sent.is_ok() { "ok" } else { "failed" };
        metrics::counter!("toolcrib_mcp_event_deliveries_total", "result" => result).increment(1);
        if let Some(active) = self.active.lock().get_mut(id) {
            active.status.last_error = sent.err();
            if sent.is_ok() {
                active.status.last_delivery_ms = Some(jiff::Timestamp::now().as_millisecond());
            }
        }
        matches!(sent, Ok(()) | Err(DeliveryProblem::Rejected))
    }

    /// Stores the position of a delivered event. If that fails, the event is delivered again after
    /// a restart.
    async fn save_position(&self, project: &str, id: &str, position: u64) {
        self.remember_position(id, position);
        let record = self.find(id).map(|(record, _)| record);
        if let Some(record) = record
            && let Err(error) = self.store(project, id, Some(&record)).await
        {
            tracing::warn!(id, %error, "the position of a subscription cannot be stored");
        }
    }

    fn remember_position(&self, id: &str, position: u64) {
        if let Some(active) = self.active.lock().get_mut(id) {
            active.record.position = active.record.position.max(position);
        }
    }

    async fn end(&self, project: &str, id: &str) {
        if let Err(error) = self.remove(project, id).await {
            tracing::warn!(id, %error, "a subscription that ended cannot be removed");
        }
    }
}

fn receiver<'a>(record: &'a EventSubscriptionRecord, id: &'a str) -> EventReceiver<'a> {
    let now_ms = u64::try_from(jiff::Timestamp::now().as_millisecond()).unwrap_or_default();
    let previous = record.previous_secret.as_ref().filter(|(_, until_ms)| now_ms < *until_ms);
    EventReceiver {
        url: &record.url,
        secret: &record.secret,
        previous_secret: previous.map(|(secret, _)| secret.as_str()),
        subscription_id: id,
    }
}

/// Waits until a time in Unix milliseconds; forever if there is none.
async fn sleep_until(time_ms: Option<u64>) {
    let Some(time_ms) = time_ms else { return std::future::pending().await };
    loop {
        let now_ms = u64::try_from(jiff::Timestamp::now().as_millisecond()).unwrap_or_default();
        if now_ms >= time_ms {
            return;
        }
        // The time of day may be changed while this waits.
        let rest = Duration::from_millis(time_ms - now_ms).min(Duration::from_secs(60));
        tokio::time::sleep(rest).await;
    }
}
