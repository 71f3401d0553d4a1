//! The queue in front of the writer: bounded, with memory in proportion to its length.
//!
//! The bounded channel of the standard library allocates all its slots in advance. At this capacity
//! that would be most of the memory of an idle server.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

/// Capacity that an empty queue retains.
const RETAINED_CAPACITY: usize = 512;

/// Queue length at which the sleeping consumer is woken although more items have been announced: it
/// then works in parallel with the producers, and is not woken for each item.
const WAKE_BATCH: usize = 24;

/// A queue with many producers and one consumer.
pub(super) struct WriteQueue<T> {
    state: Mutex<WriteQueueState<T>>,
    wakeup: Condvar,
    capacity: usize,
}

struct WriteQueueState<T> {
    items: VecDeque<T>,
    closed: bool,
    /// True if the consumer sleeps and must be woken.
    consumer_asleep: bool,
    /// True if the consumer waits for announced items.
    consumer_expects_group: bool,
}

/// The reason why an item was not queued.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum PushError {
    Full,
    Closed,
}

/// The result of waiting for an item.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum PopResult<T> {
    Item(T),
    /// The timeout passed.
    TimedOut,
    /// The queue is closed and empty.
    Closed,
}

impl<T> WriteQueue<T> {
    pub(super) fn new(capacity: usize) -> Self {
        let waiting = WriteQueueState {
            items: VecDeque::new(),
            closed: false,
            consumer_asleep: false,
            consumer_expects_group: false,
        };
        Self { state: Mutex::new(waiting), wakeup: Condvar::new(), capacity }
    }

    pub(super) fn push(&self, item: T) -> Result<(), PushError> {
        let mut waiting = self.state.lock();
        if waiting.closed {
            return Err(PushError::Closed);
        }
        if waiting.items.len() >= self.capacity {
            return Err(PushError::Full);
        }
        waiting.items.push_back(item);
        let many = waiting.consumer_expects_group && waiting.items.len() >= WAKE_BATCH;
        waiting.consumer_expects_group &= !many;
        let wake = std::mem::take(&mut waiting.consumer_asleep) || many;
        drop(waiting);
        if wake {
            self.wakeup.notify_one();
        }
        Ok(())
    }

    /// Closes the queue: it accepts no more items, and those in it can still be popped.
    pub(super) fn close(&self) {
        let mut waiting = self.state.lock();
        waiting.closed = true;
        waiting.consumer_asleep = false;
        drop(waiting);
        self.wakeup.notify_one();
    }

    /// Pops the first item, if there is one.
    pub(super) fn try_pop(&self) -> Option<T> {
        self.state.lock().items.pop_front()
    }

    /// Pops the first item. If the queue is empty but `more` reports announced items, waits
    /// briefly. A single push does not end this wait, so that several items can arrive:
    /// [`WAKE_BATCH`] items do, or [`Self::notify_group_complete`].
    pub(super) fn pop_expected(&self, at_most: Duration, more: impl Fn() -> bool) -> Option<T> {
        let mut waiting = self.state.lock();
        if waiting.items.is_empty() && more() {
            waiting.consumer_expects_group = true;
            self.wakeup.wait_for(&mut waiting, at_most);
            waiting.consumer_expects_group = false;
        }
        waiting.items.pop_front()
    }

    /// Signals that no more items have been announced.
    pub(super) fn notify_group_complete(&self) {
        let expects = self.state.lock().consumer_expects_group;
        if expects {
            self.wakeup.notify_one();
        }
    }

    /// Pops the first item and waits for one if the queue is empty, at most for the given time.
    pub(super) fn pop(&self, at_most: Option<Duration>) -> PopResult<T> {
        let until = at_most.map(|time| Instant::now() + time);
        let mut waiting = self.state.lock();
        loop {
            if let Some(item) = waiting.items.pop_front() {
                return PopResult::Item(item);
            }
            if waiting.closed {
                return PopResult::Closed;
            }
            waiting.consumer_asleep = true;
            match until {
                None => self.wakeup.wait(&mut waiting),
                Some(until) if self.wakeup.wait_until(&mut waiting, until).timed_out() => {
                    waiting.consumer_asleep = false;
                    if waiting.items.is_empty() && !waiting.closed {
                        waiting.items.shrink_to(RETAINED_CAPACITY);
                        return PopResult::TimedOut;
                    }
                }
                Some(_) => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn items_are_popped_in_order_even_after_closing() {
        let queue = WriteQueue::new(3);
        for n in 0..3 {
            queue.push(n).unwrap();
        }
        assert_eq!(queue.push(3), Err(PushError::Full));
        assert_eq!(queue.try_pop(), Some(0));
        queue.close();
        assert_eq!(queue.push(4), Err(PushError::Closed));
        assert_eq!(queue.pop(None), PopResult::Item(1));
        assert_eq!(queue.pop(Some(Duration::ZERO)), PopResult::Item(2));
        assert_eq!(queue.pop(None), PopResult::<i32>::Closed);
    }

    #[test]
    fn pushing_wakes_a_waiting_consumer() {
        let queue = Arc::new(WriteQueue::new(10_000));
        let consumer = std::thread::spawn({
            let queue = queue.clone();
            move || {
                let mut popped = 0;
                loop {
                    match queue.pop((popped % 2 == 0).then_some(Duration::from_micros(10))) {
                        PopResult::Item(()) => popped += 1,
                        PopResult::TimedOut => {}
                        PopResult::Closed => return popped,
                    }
                }
            }
        });
        let producers = (0..4).map(|_| {
            let queue = queue.clone();
            std::thread::spawn(move || (0..1_000).for_each(|_| queue.push(()).unwrap()))
        });
        producers.collect::<Vec<_>>().into_iter().for_each(|producer| producer.join().unwrap());
        queue.close();
        assert_eq!(consumer.join().unwrap(), 4_000);
    }

    #[test]
    fn announced_items_are_waited_for() {
        let commit_group = toolcrib::ports::store::CommitGroup::default();
        let queue = Arc::new(WriteQueue::new(10));
        let long = Duration::from_secs(60);
        assert_eq!(
            queue.pop_expected(long, || commit_group.has_pending()),
            None,
            "no item is announced"
        );
        let members = [commit_group.add_member(), commit_group.add_member()];
        let producer = std::thread::spawn({
            let queue = queue.clone();
            move || {
                for (n, member) in members.into_iter().enumerate() {
                    queue.push(n).unwrap();
                    drop(member);
                }
                queue.notify_group_complete();
            }
        });
        assert_eq!(queue.pop_expected(long, || commit_group.has_pending()), Some(0));
        producer.join().unwrap();
        assert_eq!(queue.pop_expected(long, || commit_group.has_pending()), Some(1));
        // An announced item that is given up ends the wait.
        drop(commit_group.add_member());
        assert_eq!(queue.pop_expected(long, || commit_group.has_pending()), None);
    }
}
