//! The clock port: system time, or a clock that tests and the simulation advance manually.

use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use tokio::sync::Notify;

/// A boxed sleep future.
pub type SleepFuture<'a> = Pin<Box<dyn Future<Output = ()> + Send + 'a>>;

/// Reads the time and sleeps until a time.
pub trait Clock: Send + Sync + 'static {
    /// Returns the current time in Unix milliseconds.
    fn now_ms(&self) -> u64;

    /// Returns once `now_ms` has reached `at_ms`.
    fn sleep_until(&self, at_ms: u64) -> SleepFuture<'_>;
}

/// The machine's clock. It reads the wall clock once and then counts monotonically, so a change of
/// the system time while the server runs neither ends calls early nor keeps them open forever.
pub struct SystemClock {
    wall_ms: u64,
    started: Instant,
}

impl Default for SystemClock {
    fn default() -> Self {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { wall_ms: wall.as_millis() as u64, started: Instant::now() }
    }
}

impl Clock for SystemClock {
    fn now_ms(&self) -> u64 {
        self.wall_ms + self.started.elapsed().as_millis() as u64
    }

    fn sleep_until(&self, at_ms: u64) -> SleepFuture<'_> {
        let wait = Duration::from_millis(at_ms.saturating_sub(self.now_ms()));
        Box::pin(tokio::time::sleep(wait))
    }
}

/// A clock that moves only when it is advanced. It wakes sleepers in the order in which they
/// registered, so that a simulation is reproducible.
#[derive(Clone)]
pub struct ManualClock {
    now: Arc<(Mutex<u64>, Notify)>,
}

impl ManualClock {
    /// Creates a clock that shows this time.
    pub fn at(now_ms: u64) -> Self {
        Self { now: Arc::new((Mutex::new(now_ms), Notify::new())) }
    }

    /// Advances the clock.
    pub fn advance(&self, by_ms: u64) {
        *self.now.0.lock() += by_ms;
        self.now.1.notify_waiters();
    }
}

impl Clock for ManualClock {
    fn now_ms(&self) -> u64 {
        *self.now.0.lock()
    }

    fn sleep_until(&self, at_ms: u64) -> SleepFuture<'_> {
        Box::pin(async move {
            loop {
                let mut turned = std::pin::pin!(self.now.1.notified());
                // Register before reading the time, so that an advance between the two is not
                // missed.
                turned.as_mut().enable();
                if self.now_ms() >= at_ms {
                    return;
                }
                turned.await;
            }
        })
    }
}
