//! Webhook deliveries: lists them, requests redelivery, and tracks the attempts in flight. The
//! attempts themselves are made by [`crate::maintenance::webhook_dispatcher`].

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::json;
use tokio::sync::Notify;

use super::{Engine, Inner, unavailable};
use crate::caller::Caller;
use crate::delivery::{Delivery, DeliveryStatus, Try};
use crate::event::{Kind, Record};
use crate::fault::{Code, Error, Fault};
use crate::id::CallId;
use crate::notify::{Notifier, Notifying};
use crate::store::{DeliveryFilter, Saved};

/// Maximum length of a callback URL.
const MAX_URL_BYTES: usize = 2_048;

/// Maximum number of paused receivers. Beyond it all are forgotten; each will ask for a delay
/// again.
const MANY_RECEIVERS: usize = 1_024;

/// Filter for a list of deliveries.
#[derive(Debug, Clone, Default)]
pub struct DeliveryQuery {
    pub status: Option<DeliveryStatus>,
    /// Id of the last call of the previous page.
    pub before: Option<CallId>,
    pub limit: usize,
}

/// A page of deliveries, newest calls first.
#[derive(Debug)]
pub struct DeliveryPage {
    pub deliveries: Vec<Delivery>,
    /// Cursor for the next page, if there is one.
    pub before: Option<CallId>,
}

impl Engine {
    /// Returns a page of the project's deliveries, newest calls first.
    pub async fn deliveries(
        &self,
        caller: &Caller,
        query: DeliveryQuery,
    ) -> Result<DeliveryPage, Error> {
        require_caller(caller)?;
        let limit = query.limit.clamp(1, 200);
        let filter = DeliveryFilter {
            project: caller.project.clone(),
            status: query.status,
            before: query.before,
            // One more than requested shows whether there is another page.
            limit: limit + 1,
        };
        let mut listed = self.inner.store.deliveries(filter).await.map_err(unavailable)?;
        let more = listed.len() > limit;
        listed.truncate(limit);
        let before = listed.last().filter(|_| more).map(|last| last.call_id.clone());
        Ok(DeliveryPage { deliveries: listed, before })
    }

    /// Returns the delivery of a call with its last attempts; `None` if the call has no callback
    /// URL.
    pub async fn delivery(
        &self,
        caller: &Caller,
        id: &CallId,
    ) -> Result<Option<(Delivery, Vec<Try>)>, Error> {
        require_caller(caller)?;
        self.call(caller, id).await?;
        self.inner.store.delivery(&caller.project, id).await.map_err(unavailable)
    }

    /// Delivers a webhook again, whatever its previous result: now, and with a new retry schedule.
    pub async fn repeat_delivery(&self, caller: &Caller, id: &CallId) -> Result<Delivery, Error> {
        loop {
            let Some((delivery, _)) = self.delivery(caller, id).await? else {
                let message = format!("call \"{id}\" was made without a callback_url");
                return Err(Error::refused(Code::NotFound, message));
            };
            let Some(again) = delivery.asked_again(self.inner.clock.now_ms()) else {
                let message =
                    format!("call \"{id}\" has not ended; its delivery follows when it has");
                return Err(Error::refused(Code::Conflict, message));
            };
            let saved = self.inner.store.save_delivery(again.clone(), None).await;
            if saved.map_err(unavailable)? == Saved::Yes {
                self.inner.notices.wake();
                return Ok(again);
            }
        }
    }

    /// Returns the last progress that the executor of a call reported.
    pub async fn newest_progress(
        &self,
        caller: &Caller,
        id: &CallId,
    ) -> Result<Option<Record>, Error> {
        let read = self.inner.store.newest_record(&caller.project, id, Kind::Progress).await;
        read.map_err(unavailable)
    }
}

/// Requires a caller that may make calls. Receiver URLs are not for keys that only provide tools.
fn require_caller(caller: &Caller) -> Result<(), Error> {
    if caller.may_invoke() {
        return Ok(());
    }
    let message = "a provider's key can neither see nor repeat deliveries";
    Err(Error::refused(Code::PermissionDenied, message))
}

impl Inner {
    /// Validates a callback URL and returns it in the form to store.
    pub(crate) fn check_callback(&self, caller: &Caller, url: &str) -> Result<String, Error> {
        let checked = if url.is_empty() || url.len() > MAX_URL_BYTES {
            Err(format!("must be a URL of 1 to {MAX_URL_BYTES} bytes"))
        } else if let Some(notifier) = &self.notices.notifier {
            notifier.check(&caller.project, url)
        } else {
            Err("cannot be used here: nobody was set up to deliver callbacks".to_owned())
        };
        checked.map_err(|why| {
            let fault = Fault::new(Code::ValidationError, format!("callback_url {why}"));
            fault.not_happened().with_detail(json!({ "pointer": "/callback_url" })).into()
        })
    }
}

/// The webhook sender and the deliveries in flight.
#[derive(Default)]
pub(crate) struct Notices {
    pub(crate) notifier: Option<Arc<dyn Notifier>>,
    pub(crate) settings: Notifying,
    news: Notify,
    traffic: Mutex<Traffic>,
}

#[derive(Default)]
struct Traffic {
    under_way: HashSet<CallId>,
    per_receiver: HashMap<String, usize>,
    /// Receivers that asked for a delay, with the time until which they are paused.
    quiet: HashMap<String, u64>,
}

/// Decision whether a delivery may be attempted now.
pub(crate) enum Entered {
    Yes(Lane),
    /// The limit of attempts in flight is reached. The end of any attempt wakes the dispatcher.
    Full,
    /// This delivery must wait. Either it is in flight or its receiver is at its limit (`None`: a
    /// wake-up follows), or its receiver is paused until the given time.
    NotNow(Option<u64>),
}

/// A delivery attempt in flight. Dropping it releases its capacity.
pub(crate) struct Lane {
    notices: Arc<Notices>,
    call_id: CallId,
    receiver: String,
}

impl Notices {
    pub(crate) fn new(notifier: Option<Arc<dyn Notifier>>, settings: Notifying) -> Self {
        Self { notifier, settings, ..Self::default() }
    }

    /// Signals that a delivery may be due.
    pub(crate) fn wake(&self) {
        self.news.notify_one();
    }

    /// Returns true if an attempt of this delivery is in flight.
    pub(crate) fn is_under_way(&self, call_id: &CallId) -> bool {
        self.traffic.lock().under_way.contains(call_id)
    }

    /// Waits until a delivery may be due.
    pub(crate) async fn woken(&self) {
        self.news.notified().await;
    }

    pub(crate) fn enter(self: &Arc<Self>, delivery: &Delivery, now_ms: u64) -> Entered {
        let mut traffic = self.traffic.lock();
        if traffic.under_way.len() >= self.settings.max_parallel {
            return Entered::Full;
        }
        let receiver = delivery.receiver();
        if let Some(until_ms) = traffic.quiet.get(receiver).copied() {
            if now_ms < until_ms {
                return Entered::NotNow(Some(until_ms));
            }
            traffic.quiet.remove(receiver);
        }
        let there = traffic.per_receiver.get(receiver).copied().unwrap_or(0);
        if there >= self.settings.max_parallel_per_receiver
            || !traffic.under_way.insert(delivery.call_id.clone())
        {
            return Entered::NotNow(None);
        }
        *traffic.per_receiver.entry(receiver.to_owned()).or_default() += 1;
        let (call_id, receiver) = (delivery.call_id.clone(), receiver.to_owned());
        Entered::Yes(Lane { notices: self.clone(), call_id, receiver })
    }
}

impl Lane {
    /// Pauses an overloaded receiver: no delivery goes there until `until_ms`.
    pub(crate) fn quiet_until(&self, until_ms: u64) {
        let mut traffic = self.notices.traffic.lock();
        if traffic.quiet.len() >= MANY_RECEIVERS {
            traffic.quiet.clear();
        }
        traffic.quiet.insert(self.receiver.clone(), until_ms);
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        let mut traffic = self.notices.traffic.lock();
        traffic.under_way.remove(&self.call_id);
        if let Some(count) = traffic.per_receiver.get_mut(&self.receiver) {
            *count -= 1;
            if *count == 0 {
                traffic.per_receiver.remove(&self.receiver);
            }
        }
        drop(traffic);
        self.notices.wake();
    }
}
