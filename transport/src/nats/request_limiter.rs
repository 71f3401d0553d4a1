//! Limits the number of requests that are handled concurrently. A request that waits for an event
//! releases its permit, so waiting agents cannot block other requests.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use toolcrib::domain::fault::{Code, Error};

/// Maximum number of requests that are handled concurrently.
const MAX_ACTIVE: usize = 1_024;
/// Maximum number of waiting requests, per project and in total.
const MAX_WAITING_PER_PROJECT: usize = 4_096;
const MAX_WAITING: usize = 16_384;

#[derive(Clone)]
pub(super) struct RequestLimiter {
    active: Arc<Semaphore>,
    waiting: Arc<Mutex<HashMap<String, usize>>>,
}

/// The permit of one request.
pub(super) struct RequestPermit {
    active_permit: Option<OwnedSemaphorePermit>,
    limiter: RequestLimiter,
}

/// A permit to wait, counted until it is dropped.
pub(super) struct WaitPermit {
    project: String,
    limiter: RequestLimiter,
}

impl RequestLimiter {
    pub(super) fn new() -> Self {
        Self { active: Arc::new(Semaphore::new(MAX_ACTIVE)), waiting: Arc::default() }
    }

    /// Waits for a permit. Returns `None` if the semaphore is closed.
    pub(super) async fn acquire(&self) -> Option<RequestPermit> {
        let busy = self.active.clone().acquire_owned().await.ok()?;
        Some(RequestPermit { active_permit: Some(busy), limiter: self.clone() })
    }
}

impl RequestPermit {
    /// Exchanges the active permit for a permit to wait.
    pub(super) fn start_waiting(&mut self, project: &str) -> Result<WaitPermit, Error> {
        {
            let mut waiting = self.limiter.waiting.lock();
            let (all, in_project) = (waiting.values().sum::<usize>(), waiting.get(project));
            if all >= MAX_WAITING
                || in_project.is_some_and(|count| *count >= MAX_WAITING_PER_PROJECT)
            {
                let message = "too many requests wait over NATS; send it without wait_ms";
                return Err(Error::retry_later(Code::Overloaded, message, 1_000));
            }
            *waiting.entry(project.to_owned()).or_default() += 1;
        }
        self.active_permit = None;
        Ok(WaitPermit { project: project.to_owned(), limiter: self.limiter.clone() })
    }
}

impl Drop for WaitPermit {
    fn drop(&mut self) {
        let mut waiting = self.limiter.waiting.lock();
        if let Some(count) = waiting.get_mut(&self.project) {
            *count -= 1;
            if *count == 0 {
                waiting.remove(&self.project);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[tokio::test]
    async fn waiting_requests_hold_no_slot_and_are_limited_per_project() {
        let limiter = RequestLimiter::new();
        let mut all = Vec::new();
        for _ in 0..MAX_WAITING_PER_PROJECT {
            let mut permit = limiter.acquire().await.unwrap();
            let waiting_permit = permit.start_waiting("p").unwrap();
            all.push((permit, waiting_permit));
        }
        let mut permit = limiter.acquire().await.unwrap();
        let refused = permit.start_waiting("p").map(drop).unwrap_err();
        assert_eq!(refused.code(), Code::Overloaded);
        drop(permit.start_waiting("q").unwrap());
        all.pop();
        drop(permit.start_waiting("p").unwrap());
        drop(all);
        assert!(limiter.waiting.lock().is_empty());
    }
}
