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
const FULL_BATCH: usize = 24;
/// Time after which a batch in flight counts as slow.
const SLOW_AFTER: Duration = Duration::from_millis(20);
/// Maximum number of requests in one batch, and of their bytes.
const MAX_BATCH_REQUESTS: usize = 100;
const MAX_BATCH_BYTES: usize = 262_144;

/// An RPC that accepts many requests in one message.
pub(super) trait BatchRpc: Send + Sync + 'static {
    type RpcRequest: Send + Sync + 'static;
    type RpcResponse: Send + 'static;

    /// Returns the approximate size of a request on the wire.
    fn request_bytes(question: &Self::RpcRequest) -> usize;

    /// Sends all requests in one message. Returns `None` if the batch could not be answered, and
    /// each request has to be sent alone.
    fn send_batch(
        &self,
        prefix: &str,
        questions: &[Self::RpcRequest],
    ) -> impl Future<Output = Option<Vec<Self::RpcResponse>>> + Send;
}

struct PendingRequest<E: BatchRpc> {
    request: E::RpcRequest,
    reply: oneshot::Sender<Option<E::RpcResponse>>,
}

struct CoalescerQueue<E: BatchRpc> {
    pending: VecDeque<PendingRequest<E>>,
    /// Batches in flight, and the number of them that are slow.
    in_flight: usize,
    slow: usize,
    /// True if a worker is about to start.
    worker_scheduled: bool,
}

impl<E: BatchRpc> CoalescerQueue<E> {
    /// Returns true if a new worker must start for the queued requests, and marks it as scheduled.
    fn should_start_worker(&mut self) -> bool {
        let free = self.in_flight == self.slow || self.pending.len() >= FULL_BATCH;
        let start_worker = !self.worker_scheduled && free && !self.pending.is_empty();
        self.worker_scheduled |= start_worker;
        start_worker
    }
}

impl<E: BatchRpc> Default for CoalescerQueue<E> {
    fn default() -> Self {
        Self { pending: VecDeque::new(), in_flight: 0, slow: 0, worker_scheduled: false }
    }
}

/// The queues of all subject prefixes.
pub(super) struct Coalescer<E: BatchRpc> {
    inner: Arc<CoalescerShared<E>>,
}

struct CoalescerShared<E: BatchRpc> {
    rpc: E,
    queues: Mutex<HashMap<String, CoalescerQueue<E>>>,
}

impl<E: BatchRpc> Coalescer<E> {
    pub(super) fn new(rpc: E) -> Self {
        Self { inner: Arc::new(CoalescerShared { rpc, queues: Mutex::default() }) }
    }

    /// Sends a request, batched with other requests to the same prefix. Returns `None` if the batch
    /// could not be answered.
    pub(super) async fn request(
        &self,
        prefix: String,
        request: E::RpcRequest,
    ) -> Option<E::RpcResponse> {
        let (reply, response) = oneshot::channel();
        let start_worker = {
            let mut queues = self.inner.queues.lock();
            let queue = queues.entry(prefix.clone()).or_default();
            queue.pending.push_back(PendingRequest { request, reply });
            queue.should_start_worker()
        };
        if start_worker {
            tokio::spawn(self.inner.clone().run_worker(prefix));
        }
        response.await.ok().flatten()
    }
}

impl<E: BatchRpc> CoalescerShared<E> {
    /// Sends batches until the queue is empty.
    async fn run_worker(self: Arc<Self>, prefix: String) {
        // Requests of the same instant join the first batch.
        tokio::task::yield_now().await;
        if let Some(queue) = self.queues.lock().get_mut(&prefix) {
            queue.worker_scheduled = false;
            queue.in_flight += 1;
        }
        while let Some(batch) = self.next_batch(&prefix) {
            let (requests, replies): (Vec<_>, Vec<_>) =
                batch.into_iter().map(|pending| (pending.request, pending.reply)).unzip();
            let response = self.rpc.send_batch(&prefix, &requests);
            let answers = self.clone().await_or_mark_slow(&prefix, response).await;
            let mut answers = answers.map(Vec::into_iter);
            for reply in replies {
                // An error means that the requester has been dropped.
                let _ = reply.send(answers.as_mut().and_then(Iterator::next));
            }
        }
    }

    /// Awaits a batch. If it is slow, starts another worker, so that queued requests need not wait.
    async fn await_or_mark_slow<T>(
        self: Arc<Self>,
        prefix: &str,
        response: impl Future<Output = T>,
    ) -> T {
        let mut response = std::pin::pin!(response);
        tokio::select! {
            biased;
            answers = &mut response => return answers,
            () = tokio::time::sleep(SLOW_AFTER) => {}
        }
        let start_worker = self.queues.lock().get_mut(prefix).is_some_and(|queue| {
            queue.slow += 1;
            queue.should_start_worker()
        });
        if start_worker {
            tokio::spawn(self.clone().run_worker_boxed(prefix.to_owned()));
        }
        let answers = response.await;
        if let Some(queue) = self.queues.lock().get_mut(prefix) {
            queue.slow -= 1;
        }
        answers
    }

    /// Returns the future of `run_worker` boxed, because `run_worker` starts itself recursively.
    fn run_worker_boxed(self: Arc<Self>, prefix: String) -> BoxFuture<'static, ()> {
        self.run_worker(prefix).boxed()
    }

    fn next_batch(&self, prefix: &str) -> Option<Vec<PendingRequest<E>>> {
        let mut queues = self.queues.lock();
        let queue = queues.get_mut(prefix)?;
        let (mut batch, mut bytes) = (Vec::new(), 0);
        while batch.len() < MAX_BATCH_REQUESTS {
            let Some(next) = queue.pending.front() else { break };
            bytes += E::request_bytes(&next.request);
            if bytes > MAX_BATCH_BYTES && !batch.is_empty() {
                break;
            }
            batch.extend(queue.pending.pop_front().filter(|pending| !pending.reply.is_closed()));
        }
        if !batch.is_empty() {
            return Some(batch);
        }
        queue.in_flight -= 1;
        if queue.in_flight == 0 && !queue.worker_scheduled {
            queues.remove(prefix);
        }
        None
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Replies when the test permits it.
    struct CountingRpc {
        open: tokio::sync::Semaphore,
        batch_sizes: Mutex<Vec<usize>>,
    }

    impl BatchRpc for Arc<CountingRpc> {
        type RpcRequest = usize;
        type RpcResponse = usize;

        fn request_bytes(_: &usize) -> usize {
            1
        }

        async fn send_batch(&self, _: &str, questions: &[usize]) -> Option<Vec<usize>> {
            self.batch_sizes.lock().push(questions.len());
            self.open.acquire().await.unwrap().forget();
            Some(questions.to_vec())
        }
    }

    fn counting_rpc() -> Arc<CountingRpc> {
        Arc::new(CountingRpc {
            open: tokio::sync::Semaphore::new(0),
            batch_sizes: Mutex::default(),
        })
    }

    #[tokio::test]
    async fn requests_made_during_a_batch_are_sent_together() {
        let rpc = counting_rpc();
        let coalescer = Arc::new(Coalescer::new(rpc.clone()));
        let send = |n: usize| {
            let coalescer = coalescer.clone();
            tokio::spawn(async move { coalescer.request("here".into(), n).await })
        };
        let mut requests = vec![send(0)];
        while rpc.batch_sizes.lock().is_empty() {
            tokio::task::yield_now().await;
        }
        requests.extend((1..FULL_BATCH).map(&send));
        while coalescer.inner.queues.lock().get("here").unwrap().pending.len() < FULL_BATCH - 1 {
            tokio::task::yield_now().await;
        }
        assert_eq!(rpc.batch_sizes.lock().len(), 1, "they wait for the batch in flight");
        requests.push(send(FULL_BATCH));
        while rpc.batch_sizes.lock().len() < 2 {
            tokio::task::yield_now().await;
        }
        rpc.open.add_permits(2);
        for (n, one) in requests.into_iter().enumerate() {
            assert_eq!(one.await.unwrap(), Some(n));
        }
        assert_eq!(*rpc.batch_sizes.lock(), [1, FULL_BATCH], "a full batch is sent at once");
        assert!(coalescer.inner.queues.lock().is_empty(), "idle queues are removed");
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_batch_does_not_delay_later_requests() {
        let rpc = counting_rpc();
        let coalescer = Arc::new(Coalescer::new(rpc.clone()));
        let send = |n: usize| {
            let coalescer = coalescer.clone();
            tokio::spawn(async move { coalescer.request("here".into(), n).await })
        };
        let first = send(1);
        while rpc.batch_sizes.lock().is_empty() {
            tokio::task::yield_now().await;
        }
        let others = [send(2), send(3)];
        while rpc.batch_sizes.lock().len() < 2 {
            tokio::time::sleep(SLOW_AFTER).await;
        }
        assert_eq!(*rpc.batch_sizes.lock(), [1, 2]);
        rpc.open.add_permits(2);
        assert_eq!(first.await.unwrap(), Some(1));
        for (n, other) in others.into_iter().enumerate() {
            assert_eq!(other.await.unwrap(), Some(n + 2));
        }
        while !coalescer.inner.queues.lock().is_empty() {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn dropped_requests_are_not_sent() {
        let rpc = counting_rpc();
        let coalescer = Coalescer::new(rpc.clone());
        let dropped = futures::future::FutureExt::now_or_never(coalescer.request("here".into(), 1));
        assert_eq!(dropped, None);
        rpc.open.add_permits(1);
        assert_eq!(coalescer.request("here".into(), 2).await, Some(2));
        assert_eq!(*rpc.batch_sizes.lock(), [1]);
    }
}
