//! The queue in front of the writer: bounded, with memory in proportion to its length.
//!
//! The bounded channel of the standard library allocates all its slots in advance. At this capacity
//! that would be most of the memory of an idle server.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

/// Capacity that an empty queue retains.
const KEPT: usize = 512;

/// Queue length at which the sleeping consumer is woken although more items have been announced: it
/// then works in parallel with the producers, and is not woken for each item.
const WORTH_WAKING: usize = 24;

/// A queue with many producers and one consumer.
pub(super) struct Line<T> {
    waiting: Mutex<Waiting<T>>,
    came: Condvar,
    most: usize,
}

struct Waiting<T> {
    line: VecDeque<T>,
    closed: bool,
    /// The consumer sleeps and must be woken.
    asleep: bool,
    /// The consumer waits for announced items.
    expects: bool,
}

/// The reason why an item was not queued.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Refused {
    Full,
    Closed,
}

/// The result of waiting for an item.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Came<T> {
    Somebody(T),
    /// The timeout passed.
    Nobody,
    /// The queue is closed and empty.
    Closed,
}

impl<T> Line<T> {
    pub(super) fn new(most: usize) -> Self {
        let waiting =
            Waiting { line: VecDeque::new(), closed: false, asleep: false, expects: false };
        Self { waiting: Mutex::new(waiting), came: Condvar::new(), most }
    }

    pub(super) fn join(&self, one: T) -> Result<(), Refused> {
        let mut waiting = self.waiting.lock();
        if waiting.closed {
            return Err(Refused::Closed);
        }
        if waiting.line.len() >= self.most {
            return Err(Refused::Full);
        }
        waiting.line.push_back(one);
        let many = waiting.expects && waiting.line.len() >= WORTH_WAKING;
        waiting.expects &= !many;
        let wake = std::mem::take(&mut waiting.asleep) || many;
        drop(waiting);
        if wake {
            self.came.notify_one();
        }
        Ok(())
    }

    /// Closes the queue: it accepts no more items, and those in it can still be popped.
    pub(super) fn close(&self) {
        let mut waiting = self.waiting.lock();
        waiting.closed = true;
        waiting.asleep = false;
        drop(waiting);
        self.came.notify_one();
    }

    /// Pops the first item, if there is one.
    pub(super) fn next(&self) -> Option<T> {
        self.waiting.lock().line.pop_front()
    }

    /// Pops the first item. If the queue is empty but `more` reports announced items, waits
    /// briefly. A single push does not end this wait, so that several items can arrive:
    /// [`WAKE_BATCH`] items do, or [`Self::notify_group_complete`].
    pub(super) fn soon(&self, at_most: Duration, more: impl Fn() -> bool) -> Option<T> {
        let mut waiting = self.waiting.lock();
        if waiting.line.is_empty() && more() {
            waiting.expects = true;
            self.came.wait_for(&mut waiting, at_most);
            waiting.expects = false;
        }
        waiting.line.pop_front()
    }

    /// Signals that no more items have been announced.
    pub(super) fn all_came(&self) {
        let expects = self.waiting.lock().expects;
        if expects {
            self.came.notify_one();
        }
    }

    /// Pops the first item and waits for one if the queue is empty, at most for the given time.
    pub(super) fn wait(&self, at_most: Option<Duration>) -> Came<T> {
        let until = at_most.map(|time| Instant::now() + time);
        let mut waiting = self.waiting.lock();
        loop {
            if let Some(one) = waiting.line.pop_front() {
                return Came::Somebody(one);
            }
            if waiting.closed {
                return Came::Closed;
            }
            waiting.asleep = true;
            match until {
                None => self.came.wait(&mut waiting),
                Some(until) if self.came.wait_until(&mut waiting, until).timed_out() => {
                    waiting.asleep = false;
                    if waiting.line.is_empty() && !waiting.closed {
                        waiting.line.shrink_to(KEPT);
                        return Came::Nobody;
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
    fn everybody_is_taken_in_order_also_after_it_is_closed() {
        let line = Line::new(3);
        for n in 0..3 {
            line.join(n).unwrap();
        }
        assert_eq!(line.join(3), Err(Refused::Full));
        assert_eq!(line.next(), Some(0));
        line.close();
        assert_eq!(line.join(4), Err(Refused::Closed));
        assert_eq!(line.wait(None), Came::Somebody(1));
        assert_eq!(line.wait(Some(Duration::ZERO)), Came::Somebody(2));
        assert_eq!(line.wait(None), Came::<i32>::Closed);
    }

    #[test]
    fn who_joins_wakes_the_one_who_waits() {
        let line = Arc::new(Line::new(10_000));
        let taker = std::thread::spawn({
            let line = line.clone();
            move || {
                let mut taken = 0;
                loop {
                    match line.wait((taken % 2 == 0).then_some(Duration::from_micros(10))) {
                        Came::Somebody(()) => taken += 1,
                        Came::Nobody => {}
                        Came::Closed => return taken,
                    }
                }
            }
        });
        let joiners = (0..4).map(|_| {
            let line = line.clone();
            std::thread::spawn(move || (0..1_000).for_each(|_| line.join(()).unwrap()))
        });
        joiners.collect::<Vec<_>>().into_iter().for_each(|joiner| joiner.join().unwrap());
        line.close();
        assert_eq!(taker.join().unwrap(), 4_000);
    }

    #[test]
    fn who_is_on_the_way_is_waited_for() {
        let together = toolcrib::store::Together::default();
        let line = Arc::new(Line::new(10));
        let long = Duration::from_secs(60);
        assert_eq!(line.soon(long, || together.more()), None, "nobody is on the way");
        let coming = [together.expect(), together.expect()];
        let joiner = std::thread::spawn({
            let line = line.clone();
            move || {
                for (n, coming) in coming.into_iter().enumerate() {
                    line.join(n).unwrap();
                    drop(coming);
                }
                line.all_came();
            }
        });
        assert_eq!(line.soon(long, || together.more()), Some(0));
        joiner.join().unwrap();
        assert_eq!(line.soon(long, || together.more()), Some(1));
        // An announced item that is given up ends the wait.
        drop(together.expect());
        assert_eq!(line.soon(long, || together.more()), None);
    }
}
