//! A limiter that divides capacity between projects.
//!
//! A plain semaphore serves requests in the order of their arrival, so one project with many slow
//! requests delays all others. Here a project never holds more than its share, and at most that
//! many of its requests compete for the rest.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Gives permits: a number in all, and a smaller number per project.
#[derive(Debug)]
pub struct ProjectLimiter {
    all: Arc<Semaphore>,
    per_project: usize,
    /// Semaphores of the projects that hold a permit or wait for one.
    projects: Mutex<HashMap<String, Weak<Semaphore>>>,
}

/// Capacity held while work is done. Dropping it releases the capacity.
#[derive(Debug)]
pub struct ProjectPermit {
    // Released first, so that the next request of another project is served before one of this
    // project joins the queue.
    _shared: Option<OwnedSemaphorePermit>,
    _project: Option<OwnedSemaphorePermit>,
}

impl ProjectLimiter {
    /// Creates a limiter of `total` permits, of which one project holds at most `per_project`.
    pub fn new(total: usize, per_project: usize) -> Self {
        let all = Arc::new(Semaphore::new(total.max(1)));
        Self { all, per_project: per_project.clamp(1, total.max(1)), projects: Mutex::default() }
    }

    /// Waits for a permit. Requests of one project are served in order, and those of different
    /// projects in turn.
    pub async fn acquire(&self, project: &str) -> ProjectPermit {
        // The semaphores are never closed, so acquiring cannot fail.
        let of_project = self.project_semaphore(project).acquire_owned().await.ok();
        let shared = Arc::clone(&self.all).acquire_owned().await.ok();
        ProjectPermit { _shared: shared, _project: of_project }
    }

    fn project_semaphore(&self, project: &str) -> Arc<Semaphore> {
        let mut projects = self.projects.lock();
        if let Some(semaphore) = projects.get(project).and_then(Weak::upgrade) {
            return semaphore;
        }
        projects.retain(|_, semaphore| semaphore.strong_count() > 0);
        let semaphore = Arc::new(Semaphore::new(self.per_project));
        projects.insert(project.to_owned(), Arc::downgrade(&semaphore));
        semaphore
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    #[tokio::test]
    async fn a_project_with_many_requests_leaves_permits_to_others() {
        let limiter = ProjectLimiter::new(4, 2);
        let held = [limiter.acquire("a").await, limiter.acquire("a").await];
        assert!(limiter.acquire("a").now_or_never().is_none());
        assert!(limiter.acquire("b").now_or_never().is_some());
        drop(held);
        assert!(limiter.acquire("a").now_or_never().is_some());
    }

    #[tokio::test]
    async fn a_released_permit_goes_to_the_next_project() {
        let limiter = ProjectLimiter::new(1, 1);
        let held = limiter.acquire("a").await;
        let mut next = Box::pin(limiter.acquire("a"));
        let mut other = Box::pin(limiter.acquire("b"));
        assert!((&mut next).now_or_never().is_none());
        assert!((&mut other).now_or_never().is_none());
        drop(held);
        assert!((&mut next).now_or_never().is_none(), "b was first in the common queue");
        assert!(other.now_or_never().is_some());
        assert!(next.now_or_never().is_some());
    }

    #[tokio::test]
    async fn projects_without_requests_take_no_memory() {
        let limiter = ProjectLimiter::new(2, 1);
        for n in 0..100 {
            drop(limiter.acquire(&format!("p{n}")).await);
        }
        assert!(limiter.projects.lock().len() <= 1);
    }
}
