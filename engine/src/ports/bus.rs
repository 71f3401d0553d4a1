//! The bus port: wakeups without data. A lost wakeup costs one timer tick, never a call.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::domain::id::CallId;

/// A subject that a listener waits on.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Topic {
    /// Any change to this call.
    Call(CallId),
    /// Any change to any call of this run.
    Run {
        /// Project that the run belongs to.
        project: String,
        /// Id of the run, unique within its project.
        run_id: String,
    },
    /// Any change in the project.
    Project(String),
    /// A new item in an agent's inbox.
    Inbox {
        /// Project that the agent belongs to.
        project: String,
        /// Agent that owns the inbox.
        agent: String,
    },
    /// A new message to publish.
    Outbox,
    /// A change to tools, keys or rules.
    Directory,
}

/// The number of wakeups of a topic, and the listeners that wait for the next one.
#[derive(Default)]
struct WakeCounter {
    count: AtomicU64,
    notify: Notify,
}

/// Waits for wakeups on one topic.
pub struct Listener {
    seen: u64,
    // Also keeps the topic registered while the listener exists; see `LocalBus::wake`.
    wakes: Arc<WakeCounter>,
    _followed: Option<BroadListenerGuard>,
}

/// Counts one listener for as long as the guard lives.
struct BroadListenerGuard(Arc<AtomicUsize>);

impl BroadListenerGuard {
    fn new(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::AcqRel);
        Self(count.clone())
    }
}

impl Drop for BroadListenerGuard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Listener {
    /// Waits for the first wakeup since the listener was created or last returned.
    pub async fn wait_for_wake(&mut self) {
        loop {
            let mut woken = std::pin::pin!(self.wakes.notify.notified());
            // Register before reading the count, so that a wakeup between the two is not missed.
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

/// Delivers wakeups.
pub trait Bus: Send + Sync + 'static {
    /// Wakes every listener of the topic.
    fn wake(&self, topic: &Topic);

    /// Creates a listener for wakeups from now on.
    fn listen(&self, topic: Topic) -> Listener;

    /// Returns true if a listener may wait on more than a single call. Callers check it before they
    /// build such a topic.
    fn has_broad_listeners(&self) -> bool {
        true
    }
}

/// Delivers wakeups within one process.
#[derive(Default)]
pub struct LocalBus {
    topics: Mutex<HashMap<Topic, Arc<WakeCounter>>>,
    /// Number of listeners on runs, projects, inboxes, the outbox and the directory.
    broad_listeners: Arc<AtomicUsize>,
}

impl Bus for LocalBus {
    fn wake(&self, topic: &Topic) {
        let mut topics = self.topics.lock();
        let Some(wakes) = topics.get(topic) else { return };
        // The last listener is gone: remove the topic, so that the map never outgrows its
        // listeners.
        if Arc::strong_count(wakes) == 1 {
            topics.remove(topic);
            return;
        }
        wakes.count.fetch_add(1, Ordering::AcqRel);
        wakes.notify.notify_waiters();
    }

    fn listen(&self, topic: Topic) -> Listener {
        let mut topics = self.topics.lock();
        if topics.len() > 1024 && topics.len().is_power_of_two() {
            topics.retain(|_, wakes| Arc::strong_count(wakes) > 1);
        }
        let followed = (!matches!(topic, Topic::Call(_)))
            .then(|| BroadListenerGuard::new(&self.broad_listeners));
        let wakes = topics.entry(topic).or_default().clone();
        Listener { seen: wakes.count.load(Ordering::Acquire), wakes, _followed: followed }
    }

    fn has_broad_listeners(&self) -> bool {
        self.broad_listeners.load(Ordering::Acquire) > 0
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
        listener.wait_for_wake().await;
        drop(listener);
        assert!(!bus.has_broad_listeners());
        bus.wake(&Topic::Directory);
        assert!(bus.topics.lock().is_empty(), "a topic without listeners is forgotten");
    }
}
