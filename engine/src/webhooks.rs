//! Webhooks: the queue of deliveries, and the dispatcher that sends them.

pub mod dispatcher;
pub(crate) mod queue;
use std::sync::Arc;

use futures::future::BoxFuture;
use queue::WebhookQueue;

use crate::calls::{Calls, EndedCallListener};
use crate::domain::call::Call;
use crate::ports::core::Core;

pub use queue::{DeliveryPage, DeliveryQuery};

/// Lists, repeats and sends the webhooks of calls.
pub struct Webhooks {
    pub(crate) core: Arc<Core>,
    pub(crate) calls: Arc<Calls>,
    pub(crate) webhook_queue: Arc<WebhookQueue>,
}

impl EndedCallListener for Webhooks {
    fn call_ended<'a>(&'a self, call: &'a Arc<Call>) -> Option<BoxFuture<'a, ()>> {
        if call.origin.callback_url.is_some() {
            self.webhook_queue.wake();
        }
        None
    }
}
