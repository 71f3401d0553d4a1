//! Webhook deliveries: lists them, requests redelivery, and tracks the attempts in flight. The
//! attempts themselves are made by [`super::dispatcher`].

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::domain::caller::Caller;
use crate::domain::delivery::{Delivery, DeliveryAttempt, DeliveryStatus};
use crate::domain::fault::{Code, Error};
use crate::domain::id::CallId;
use crate::ports::core::from_store_error;
use crate::ports::store::{DeliveryFilter, SaveResult};
use crate::ports::webhook_sender::{DeliverySettings, WebhookSender};
use crate::webhooks::Webhooks;

/// Maximum number of paused receivers. Beyond it all are forgotten; each will ask for a delay
/// again.
const MAX_PAUSED_RECEIVERS: usize = 1_024;

/// Filter for a list of deliveries.
#[derive(Debug, Clone, Default)]
pub struct DeliveryQuery {
    /// Current status of the deliveries.
    pub status: Option<DeliveryStatus>,
    /// Id of the last call of the previous page.
    pub before: Option<CallId>,
    /// Maximum number of deliveries on the page, clamped to 1 to 200.
    pub limit: usize,
}

/// A page of deliveries, newest calls first.
#[derive(Debug)]
pub struct DeliveryPage {
    /// The deliveries that match the query.
    pub deliveries: Vec<Delivery>,
    /// Cursor for the next page, if there is one.
    pub next_before: Option<CallId>,
}

impl Webhooks {
    /// Returns a page of the project's deliveries, newest calls first.
    pub async fn deliveries(
        &self,
        caller: &Caller,
        query: DeliveryQuery,
    ) -> Result<DeliveryPage, Error> {
        require_invoker(caller)?;
        let limit = query.limit.clamp(1, 200);
        let filter = DeliveryFilter {
            project: caller.project.clone(),
            status: query.status,
            before: query.before,
            // One more than requested shows whether there is another page.
            limit: limit + 1,
        };
        let mut listed = self.core.store.deliveries(filter).await.map_err(from_store_error)?;
        let more = listed.len() > limit;
        listed.truncate(limit);
        let before = listed.last().filter(|_| more).map(|last| last.call_id.clone());
        self.calls
            .retain_readable(caller, &mut listed, |delivery| Some(delivery.call_id.clone()))
            .await?;
        Ok(DeliveryPage { deliveries: listed, next_before: before })
    }

    /// Returns the delivery of a call with its last attempts; `None` if the call has no callback
    /// URL.
    pub async fn delivery(
        &self,
        caller: &Caller,
        id: &CallId,
    ) -> Result<Option<(Delivery, Vec<DeliveryAttempt>)>, Error> {
        require_invoker(caller)?;
        self.calls.call(caller, id).await?;
        self.core.store.delivery(&caller.project, id).await.map_err(from_store_error)
    }

    /// Delivers a webhook again, regardless of its previous result: now, and with a new retry
    /// schedule.
    pub async fn redeliver(&self, caller: &Caller, id: &CallId) -> Result<Delivery, Error> {
        loop {
            let Some((delivery, _)) = self.delivery(caller, id).await? else {
                let message = format!("call \"{id}\" was made without a callback_url");
                return Err(Error::refused(Code::NotFound, message));
            };
            let Some(again) = delivery.after_redelivery_request(self.core.clock.wall_ms()) else {
                let message =
                    format!("call \"{id}\" has not ended; its delivery follows when it has");
                return Err(Error::refused(Code::Conflict, message));
            };
            let saved = self.core.store.save_delivery(again.clone(), None).await;
            if saved.map_err(from_store_error)? == SaveResult::Saved {
                self.webhook_queue.wake();
                return Ok(again);
            }
        }
    }
}

/// Requires a caller that may make calls. Receiver URLs are not for keys that only provide tools.
fn require_invoker(caller: &Caller) -> Result<(), Error> {
    if caller.may_invoke() {
        return Ok(());
    }
    let message = "a provider's key can neither see nor repeat deliveries";
    Err(Error::refused(Code::PermissionDenied, message))
}

/// The webhook sender and the deliveries in flight.
#[derive(Default)]
pub(crate) struct WebhookQueue {
    pub(crate) sender: Option<Arc<dyn WebhookSender>>,
    pub(crate) settings: DeliverySettings,
    wake_signal: Notify,
    in_flight: Mutex<InFlightDeliveries>,
}

#[derive(Default)]
struct InFlightDeliveries {
    call_ids: HashSet<CallId>,
    per_receiver: HashMap<String, usize>,
    /// Receivers that asked for a delay, with the time until which they are paused, by the clock's
    /// `now_ms`.
    paused_until_ms: HashMap<String, u64>,
}

/// Decision whether a delivery may be attempted now.
pub(crate) enum DeliveryAdmission {
    Admitted(DeliverySlot),
    /// The limit of attempts in flight is reached. The end of any attempt wakes the dispatcher.
    AtCapacity,
    /// This delivery must wait. Either it is in flight or its receiver is at its limit (`None`: the
    /// end of an attempt wakes the dispatcher), or its receiver is paused until the given time.
    Deferred(Option<u64>),
}

/// A delivery attempt in flight. Dropping it releases its capacity.
pub(crate) struct DeliverySlot {
    queue: Arc<WebhookQueue>,
    call_id: CallId,
    receiver: String,
}

impl WebhookQueue {
    pub(crate) fn new(sender: Option<Arc<dyn WebhookSender>>, settings: DeliverySettings) -> Self {
        Self { sender, settings, ..Self::default() }
    }

    /// Signals that a delivery may be due.
    pub(crate) fn wake(&self) {
        self.wake_signal.notify_one();
    }

    /// Returns true if an attempt of this delivery is in flight.
    pub(crate) fn is_in_flight(&self, call_id: &CallId) -> bool {
        self.in_flight.lock().call_ids.contains(call_id)
    }

    /// Waits until a delivery may be due.
    pub(crate) async fn wait_woken(&self) {
        self.wake_signal.notified().await;
    }

    pub(crate) fn try_admit(
        self: &Arc<Self>,
        delivery: &Delivery,
        now_ms: u64,
    ) -> DeliveryAdmission {
        let mut traffic = self.in_flight.lock();
        if traffic.call_ids.len() >= self.settings.max_parallel {
            return DeliveryAdmission::AtCapacity;
        }
        let receiver = delivery.receiver();
        if let Some(until_ms) = traffic.paused_until_ms.get(receiver).copied() {
            if now_ms < until_ms {
                return DeliveryAdmission::Deferred(Some(until_ms));
            }
            traffic.paused_until_ms.remove(receiver);
        }
        let in_flight = traffic.per_receiver.get(receiver).copied().unwrap_or(0);
        if in_flight >= self.settings.max_parallel_per_receiver
            || !traffic.call_ids.insert(delivery.call_id.clone())
        {
            return DeliveryAdmission::Deferred(None);
        }
        *traffic.per_receiver.entry(receiver.to_owned()).or_default() += 1;
        let (call_id, receiver) = (delivery.call_id.clone(), receiver.to_owned());
        DeliveryAdmission::Admitted(DeliverySlot { queue: self.clone(), call_id, receiver })
    }
}

impl DeliverySlot {
    /// Pauses an overloaded receiver: no delivery goes there until `until_ms`.
    pub(crate) fn pause_receiver_until(&self, until_ms: u64) {
        let mut traffic = self.queue.in_flight.lock();
        if traffic.paused_until_ms.len() >= MAX_PAUSED_RECEIVERS {
            traffic.paused_until_ms.clear();
        }
        traffic.paused_until_ms.insert(self.receiver.clone(), until_ms);
    }
}

impl Drop for DeliverySlot {
    fn drop(&mut self) {
        let mut traffic = self.queue.in_flight.lock();
        traffic.call_ids.remove(&self.call_id);
        if let Some(count) = traffic.per_receiver.get_mut(&self.receiver) {
            *count -= 1;
            if *count == 0 {
                traffic.per_receiver.remove(&self.receiver);
            }
        }
        drop(traffic);
        self.queue.wake();
    }
}
