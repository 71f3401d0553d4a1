//! Coalesces requests to one subject prefix into batches. While a request is in flight, new ones
//! queue up and go out together in the next batch.
//!
//! A request is never delayed to fill a batch: if none is in flight, it goes out at once. A slow
//! request does not block the queue, and a queue that fills a batch does not wait for the request
//! in flight.

use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use parking_lot::Mutex;
use tokio::sync::oneshot;

/// Number of queued requests that do not wait for the batch in flight.
const ENOUGH: usize = 24;
/// Time after which a batch in flight counts as slow.
const LONG: Duration = Duration::from_millis(20);
/// Maximum number of requests in one batch, and of their bytes.
const MANY: usize = 100;
const BYTES: usize = 262_144;

/// An RPC that accepts many requests in one message.
pub(super) trait Errand: Send + Sync + 'static {
    type Question: Send + Sync + 'static;
    type Answer: Send + 'static;

    /// Returns the approximate size of a request on the wire.
    fn size(question: &Self::Question) -> usize;

    /// Sends all requests in one message. Returns `None` if the batch could not be answered, and
    /// each request has to be sent alone.
    fn ask(
        &self,
        place: &str,
        questions: &[Self::Question],
    ) -> impl Future<Output = Option<Vec<Self::Answer>>> + Send;
}

struct Waiting<E: Errand> {
    question: E::Question,
    tell: oneshot::Sender<Option<E::Answer>>,
}

struct Line<E: Errand> {
    waiting: VecDeque<Waiting<E>>,
    /// Batches in flight, and the number of them that are slow.
    out: usize,
    slow: usize,
    /// True if a worker is about to start.
    called: bool,
}

impl<E: Errand> Line<E> {
    /// Returns true if a new worker must start for the queued requests, and marks it as scheduled.
    fn calls(&mut self) -> bool {
        let free = self.out == self.slow || self.waiting.len() >= ENOUGH;
        let calls = !self.called && free && !self.waiting.is_empty();
        self.called |= calls;
        calls
    }
}

impl<E: Errand> Default for Line<E> {
    fn default() -> Self {
        Self { waiting: VecDeque::new(), out: 0, slow: 0, called: false }
    }
}

/// The queues of all subject prefixes.
pub(super) struct Bundles<E: Errand> {
    inner: Arc<Inner<E>>,
}

struct Inner<E: Errand> {
    errand: E,
    lines: Mutex<HashMap<String, Line<E>>>,
}

impl<E: Errand> Bundles<E> {
    pub(super) fn new(errand: E) -> Self {
        Self { inner: Arc::new(Inner { errand, lines: Mutex::default() }) }
    }

    /// Sends a request, batched with other requests to the same prefix. Returns `None` if the batch
    /// could not be answered.
    pub(super) async fn ask(&self, place: String, question: E::Question) -> Option<E::Answer> {
        let (tell, told) = oneshot::channel();
        let begins = {
            let mut lines = self.inner.lines.lock();
            let line = lines.entry(place.clone()).or_default();
            line.waiting.push_back(Waiting { question, tell });
            line.calls()
        };
        if begins {
            tokio::spawn(self.inner.clone().carry(place));
        }
        told.await.ok().flatten()
    }
}

impl<E: Errand> Inner<E> {
    /// Sends batches until the queue is empty.
    async fn carry(self: Arc<Self>, place: String) {
        // Requests of the same instant join the first batch.
        tokio::task::yield_now().await;
        if let Some(line) = self.lines.lock().get_mut(&place) {
            line.called = false;
            line.out += 1;
        }
        while let Some(some) = self.some(&place) {
            let (questions, tells): (Vec<_>, Vec<_>) =
                some.into_iter().map(|one| (one.question, one.tell)).unzip();
            let asking = self.errand.ask(&place, &questions);
            let answers = self.clone().unless_slow(&place, asking).await;
            let mut answers = answers.map(Vec::into_iter);
            for tell in tells {
                // An error means that the requester has been dropped.
                let _ = tell.send(answers.as_mut().and_then(Iterator::next));
            }
        }
    }

    /// Awaits a batch. If it is slow, starts another worker, so that queued requests need not wait.
    async fn unless_slow<T>(self: Arc<Self>, place: &str, asking: impl Future<Output = T>) -> T {
        let mut asking = std::pin::pin!(asking);
        tokio::select! {
            biased;
            answers = &mut asking => return answers,
            () = tokio::time::sleep(LONG) => {}
        }
        let calls = self.lines.lock().get_mut(place).is_some_and(|line| {
            line.slow += 1;
            line.calls()
        });
        if calls {
            tokio::spawn(self.clone().carry_boxed(place.to_owned()));
        }
        let answers = asking.await;
        if let Some(line) = self.lines.lock().get_mut(place) {
            line.slow -= 1;
        }
        answers
    }

    /// The same with a nameable type, because `run_worker` starts itself recursively.
    fn carry_boxed(self: Arc<Self>, place: String) -> BoxFuture<'static, ()> {
        self.carry(place).boxed()
    }

    fn some(&self, place: &str) -> Option<Vec<Waiting<E>>> {
        let mut lines = self.lines.lock();
        let line = lines.get_mut(place)?;
        let (mut some, mut bytes) = (Vec::new(), 0);
        while some.len() < MANY {
            let Some(next) = line.waiting.front() else { break };
            bytes += E::size(&next.question);
            if bytes > BYTES && !some.is_empty() {
                break;
            }
            some.extend(line.waiting.pop_front().filter(|one| !one.tell.is_closed()));
        }
        if !some.is_empty() {
            return Some(some);
        }
        line.out -= 1;
        if line.out == 0 && !line.called {
            lines.remove(place);
        }
        None
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Replies when the test permits it.
    struct Counting {
        open: tokio::sync::Semaphore,
        asked: Mutex<Vec<usize>>,
    }

    impl Errand for Arc<Counting> {
        type Question = usize;
        type Answer = usize;

        fn size(_: &usize) -> usize {
            1
        }

        async fn ask(&self, _: &str, questions: &[usize]) -> Option<Vec<usize>> {
            self.asked.lock().push(questions.len());
            self.open.acquire().await.unwrap().forget();
            Some(questions.to_vec())
        }
    }

    fn counting() -> Arc<Counting> {
        Arc::new(Counting { open: tokio::sync::Semaphore::new(0), asked: Mutex::default() })
    }

    #[tokio::test]
    async fn what_comes_while_others_are_out_goes_together() {
        let errand = counting();
        let bundles = Arc::new(Bundles::new(errand.clone()));
        let ask = |n: usize| {
            let bundles = bundles.clone();
            tokio::spawn(async move { bundles.ask("here".into(), n).await })
        };
        let mut asked = vec![ask(0)];
        while errand.asked.lock().is_empty() {
            tokio::task::yield_now().await;
        }
        asked.extend((1..ENOUGH).map(&ask));
        while bundles.inner.lines.lock().get("here").unwrap().waiting.len() < ENOUGH - 1 {
            tokio::task::yield_now().await;
        }
        assert_eq!(errand.asked.lock().len(), 1, "they wait for the one that is out");
        asked.push(ask(ENOUGH));
        while errand.asked.lock().len() < 2 {
            tokio::task::yield_now().await;
        }
        errand.open.add_permits(2);
        for (n, one) in asked.into_iter().enumerate() {
            assert_eq!(one.await.unwrap(), Some(n));
        }
        assert_eq!(*errand.asked.lock(), [1, ENOUGH], "enough for another");
        assert!(bundles.inner.lines.lock().is_empty(), "nothing is kept of a place");
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_takes_long_holds_nobody_up() {
        let errand = counting();
        let bundles = Arc::new(Bundles::new(errand.clone()));
        let ask = |n: usize| {
            let bundles = bundles.clone();
            tokio::spawn(async move { bundles.ask("here".into(), n).await })
        };
        let first = ask(1);
        while errand.asked.lock().is_empty() {
            tokio::task::yield_now().await;
        }
        let others = [ask(2), ask(3)];
        while errand.asked.lock().len() < 2 {
            tokio::time::sleep(LONG).await;
        }
        assert_eq!(*errand.asked.lock(), [1, 2]);
        errand.open.add_permits(2);
        assert_eq!(first.await.unwrap(), Some(1));
        for (n, other) in others.into_iter().enumerate() {
            assert_eq!(other.await.unwrap(), Some(n + 2));
        }
        while !bundles.inner.lines.lock().is_empty() {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn nobody_who_went_away_is_asked_for() {
        let errand = counting();
        let bundles = Bundles::new(errand.clone());
        let gone = futures::future::FutureExt::now_or_never(bundles.ask("here".into(), 1));
        assert_eq!(gone, None);
        errand.open.add_permits(1);
        assert_eq!(bundles.ask("here".into(), 2).await, Some(2));
        assert_eq!(*errand.asked.lock(), [1]);
    }
}
