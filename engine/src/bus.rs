//! The bus port: wakes, which carry no data. Losing one costs a timer tick, never a call.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::id::CallId;

/// What somebody may wait for.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Topic {
    /// Anything new on this call.
    Call(CallId),
    /// Anything new on any call of this run.
    Run { project: String, run_id: String },
    /// Anything new in the project.
    Project(String),
    /// Something new in an agent's inbox.
    Inbox { project: String, agent: String },
    /// Something new to publish.
    Outbox,
    /// Tools, keys or rules changed.
    Directory,
}

/// How often a topic was woken, and who waits for the next time.
#[derive(Default)]
struct Wakes {
    count: AtomicU64,
    waiting: Notify,
}

/// Waits for wakes on one topic.
pub struct Listener {
    seen: u64,
    // Also keeps the topic registered while somebody listens; see `LocalBus::wake`.
    wakes: Arc<Wakes>,
    _followed: Option<Followed>,
}

/// Counts one listener for as long as it is kept.
struct Followed(Arc<AtomicUsize>);

impl Followed {
    fn new(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::AcqRel);
        Self(count.clone())
    }
}

impl Drop for Followed {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Listener {
    /// Returns at the first wake since the listener was made or last returned.
    pub async fn woken(&mut self) {
        loop {
            let mut woken = std::pin::pin!(self.wakes.waiting.notified());
            // In line before looking, so that a wake between the two is not missed.
            woken.as_mut().enable();
            let count = self.wakes.count.load(Ordering::Acquire);
            if count != self.seen {
                self.seen = count;
                return;
            }
            woken.await;
        }
    }
}

/// Carries wakes.
pub trait Bus: Send + Sync + 'static {
    /// Wakes everybody who listens.
    fn wake(&self, topic: &Topic);

    /// Listens from now on.
    fn listen(&self, topic: Topic) -> Listener;

    /// Whether anybody could listen to more than single calls; asked before such a topic is made.
    fn is_followed(&self) -> bool {
        true
    }
}

/// Wakes within one process.
#[derive(Default)]
pub struct LocalBus {
    topics: Mutex<HashMap<Topic, Arc<Wakes>>>,
    /// How many runs, projects and directories are listened to.
    followed: Arc<AtomicUsize>,
}

impl Bus for LocalBus {
    fn wake(&self, topic: &Topic) {
        let mut topics = self.topics.lock();
        let Some(wakes) = topics.get(topic) else { return };
        // Nobody listens any more: forget the topic, so the map is as large as its listeners.
        if Arc::strong_count(wakes) == 1 {
            topics.remove(topic);
            return;
        }
        wakes.count.fetch_add(1, Ordering::AcqRel);
        wakes.waiting.notify_waiters();
    }

    fn listen(&self, topic: Topic) -> Listener {
        let mut topics = self.topics.lock();
        if topics.len() > 1024 && topics.len().is_power_of_two() {
            topics.retain(|_, wakes| Arc::strong_count(wakes) > 1);
        }
        let followed = (!matches!(topic, Topic::Call(_))).then(|| Followed::new(&self.followed));
        let wakes = topics.entry(topic).or_default().clone();
        Listener { seen: wakes.count.load(Ordering::Acquire), wakes, _followed: followed }
    }

    fn is_followed(&self) -> bool {
        self.followed.load(Ordering::Acquire) > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_wake_between_listening_and_waiting_is_not_missed() {
        let bus = LocalBus::default();
        let mut listener = bus.listen(Topic::Directory);
        bus.wake(&Topic::Directory);
        listener.woken().await;
        drop(listener);
        assert!(!bus.is_followed());
        bus.wake(&Topic::Directory);
        assert!(bus.topics.lock().is_empty(), "a topic without listeners is forgotten");
    }
}
