//! Limits the number of requests that are handled concurrently. A request that waits for an event
//! releases its permit, so waiting agents cannot block other requests.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use toolcrib::fault::{Code, Error};

/// Maximum number of requests that are handled concurrently.
const AT_ONCE: usize = 1_024;
/// Maximum number of waiting requests, per project and in total.
const WAITING_OF_ONE: usize = 4_096;
const WAITING: usize = 16_384;

#[derive(Clone)]
pub(super) struct Places {
    busy: Arc<Semaphore>,
    waiting: Arc<Mutex<HashMap<String, usize>>>,
}

/// The permit of one request.
pub(super) struct Place {
    busy: Option<OwnedSemaphorePermit>,
    places: Places,
}

/// A permit to wait, counted until it is dropped.
pub(super) struct Waits {
    project: String,
    places: Places,
}

impl Places {
    pub(super) fn new() -> Self {
        Self { busy: Arc::new(Semaphore::new(AT_ONCE)), waiting: Arc::default() }
    }

    /// Waits for a permit. Returns `None` if the semaphore is closed.
    pub(super) async fn take(&self) -> Option<Place> {
        let busy = self.busy.clone().acquire_owned().await.ok()?;
        Some(Place { busy: Some(busy), places: self.clone() })
    }
}

impl Place {
    /// Exchanges the active permit for a permit to wait.
    pub(super) fn waits(&mut self, project: &str) -> Result<Waits, Error> {
        {
            let mut waiting = self.places.waiting.lock();
            let (all, own) = (waiting.values().sum::<usize>(), waiting.get(project));
            if all >= WAITING || own.is_some_and(|own| *own >= WAITING_OF_ONE) {
                let message = "too many requests wait over NATS; ask without wait_ms";
                return Err(Error::later(Code::Overloaded, message, 1_000));
            }
            *waiting.entry(project.to_owned()).or_default() += 1;
        }
        self.busy = None;
        Ok(Waits { project: project.to_owned(), places: self.places.clone() })
    }
}

impl Drop for Waits {
    fn drop(&mut self) {
        let mut waiting = self.places.waiting.lock();
        if let Some(own) = waiting.get_mut(&self.project) {
            *own -= 1;
            if *own == 0 {
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
    async fn who_waits_takes_nobodys_place_and_not_without_end() {
        let places = Places::new();
        let mut all = Vec::new();
        for _ in 0..WAITING_OF_ONE {
            let mut place = places.take().await.unwrap();
            let waits = place.waits("p").unwrap();
            all.push((place, waits));
        }
        let mut place = places.take().await.unwrap();
        let refused = place.waits("p").map(drop).unwrap_err();
        assert_eq!(refused.code(), Code::Overloaded);
        drop(place.waits("q").unwrap());
        all.pop();
        drop(place.waits("p").unwrap());
        drop(all);
        assert!(places.waiting.lock().is_empty());
    }
}
