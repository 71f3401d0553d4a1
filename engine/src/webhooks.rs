//! Webhooks: the queue of deliveries, and the dispatcher that sends them.

pub mod dispatcher;
pub mod queue;
