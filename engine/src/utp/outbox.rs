//! The outbox: messages that a publisher sends over NATS, stored until they are published.

use std::sync::Arc;

use crate::domain::caller::Caller;
use crate::domain::fault::Error;
use crate::domain::utp::OutboxMessage;
use crate::ports::bus::{Listener, Topic};
use crate::ports::core::{Core, from_store_error};
use crate::registry::Registry;

/// Messages that wait to be published.
pub struct Outbox {
    pub(crate) core: Arc<Core>,
    pub(crate) registry: Arc<Registry>,
}

impl Outbox {
    /// Returns messages to publish, each with its number: oldest first, after this number.
    pub async fn messages(
        &self,
        after: u64,
        limit: usize,
    ) -> Result<Vec<(u64, OutboxMessage)>, Error> {
        self.core.store.utp().outbox(after, limit).await.map_err(from_store_error)
    }

    /// Removes messages that were published or are no longer needed.
    pub async fn remove(&self, ids: &[String]) -> Result<(), Error> {
        self.core.store.utp().remove_from_outbox(ids).await.map_err(from_store_error)
    }

    /// Adds a message.
    pub async fn enqueue(&self, caller: &Caller, message: OutboxMessage) -> Result<(), Error> {
        self.registry.require_admin(caller, None)?;
        self.core.store.utp().append_to_outbox(vec![message]).await.map_err(from_store_error)?;
        self.core.bus.wake(&Topic::Outbox);
        Ok(())
    }

    /// Subscribes to new messages.
    pub fn subscribe(&self) -> Listener {
        self.core.bus.listen(Topic::Outbox)
    }
}
