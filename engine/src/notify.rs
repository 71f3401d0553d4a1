//! The notifier port: whoever can tell a caller, somewhere else, that its call has ended.
//!
//! When something is told, and what an answer means, is decided here in the engine
//! ([`crate::delivery`], [`crate::task::notify`]); the notifier carries one message once.

use std::sync::Arc;

use async_trait::async_trait;

use crate::call::Call;
use crate::delivery::{Answer, Delivery, Schedule};

/// One try at telling.
#[derive(Debug, Clone)]
pub struct Notice {
    pub delivery: Delivery,
    /// The call as it ended.
    pub call: Arc<Call>,
}

/// Carries messages to the URLs that callers gave.
#[async_trait]
pub trait Notifier: Send + Sync + 'static {
    /// The URL as it is kept, or why it cannot be one: asked before a call is taken.
    fn check(&self, project: &str, url: &str) -> Result<String, String>;

    /// Tells once. Returns within a time of its own.
    async fn deliver(&self, notice: Notice) -> Answer;
}

/// How deliveries are made.
#[derive(Debug, Clone, PartialEq)]
pub struct Notifying {
    pub schedule: Schedule,
    /// Tries under way at once.
    pub max_parallel: usize,
    /// The same to one receiver, so that a slow one does not hold up the others.
    pub max_parallel_per_receiver: usize,
}

impl Default for Notifying {
    fn default() -> Self {
        Self { schedule: Schedule::default(), max_parallel: 64, max_parallel_per_receiver: 8 }
    }
}
