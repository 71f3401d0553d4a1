//! The line in front of the writer: bounded, and as long in memory as it is in truth.
//!
//! The channel of the standard library sets all its places aside beforehand, which for a line of
//! this length is most of what an idle server would need.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

/// Places that an empty line keeps.
const KEPT: usize = 512;

/// So many are worth waking the taker for while others are still on the way: it then works beside
/// who sends them, and is not woken for each.
const WORTH_WAKING: usize = 24;

/// Many join, one takes.
pub(super) struct Line<T> {
    waiting: Mutex<Waiting<T>>,
    came: Condvar,
    most: usize,
}

struct Waiting<T> {
    line: VecDeque<T>,
    closed: bool,
    /// The taker sleeps and must be woken.
    asleep: bool,
    /// The taker waits for those that are on the way.
    expects: bool,
}

/// Why one may not join.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Refused {
    Full,
    Closed,
}

/// What the taker waited for.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Came<T> {
    Somebody(T),
    /// The time passed.
    Nobody,
    /// The line is closed, and nobody is left in it.
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

    /// Nobody may join any more; who is in the line is still taken.
    pub(super) fn close(&self) {
        let mut waiting = self.waiting.lock();
        waiting.closed = true;
        waiting.asleep = false;
        drop(waiting);
        self.came.notify_one();
    }

    /// The first in the line, if anybody is there.
    pub(super) fn next(&self) -> Option<T> {
        self.waiting.lock().line.pop_front()
    }

    /// The first in the line; where nobody is there but somebody is known to be on the way, waits
    /// a moment. Who joins meanwhile does not end it, so that several can: some more do, or
    /// [`Self::all_came`].
    pub(super) fn soon(&self, at_most: Duration, more: impl Fn() -> bool) -> Option<T> {
        let mut waiting = self.waiting.lock();
        if waiting.line.is_empty() && more() {
            waiting.expects = true;
            self.came.wait_for(&mut waiting, at_most);
            waiting.expects = false;
        }
        waiting.line.pop_front()
    }

    /// Nobody more is on the way.
    pub(super) fn all_came(&self) {
        let expects = self.waiting.lock().expects;
        if expects {
            self.came.notify_one();
        }
    }

    /// The first in the line; waits for one, at most until then where a time is given.
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
        // Given up on the way, it is waited for no longer.
        drop(together.expect());
        assert_eq!(line.soon(long, || together.more()), None);
    }
}
