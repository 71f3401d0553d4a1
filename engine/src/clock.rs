//! The clock port: system time, or a clock that tests and the simulation turn by hand.

use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use tokio::sync::Notify;

/// A boxed wait.
pub type Sleep<'a> = Pin<Box<dyn Future<Output = ()> + Send + 'a>>;

/// Tells the time and waits for it.
pub trait Clock: Send + Sync + 'static {
    /// Unix milliseconds.
    fn now_ms(&self) -> u64;

    /// Returns once `now_ms` has reached this.
    fn sleep_until(&self, at_ms: u64) -> Sleep<'_>;
}

/// The machine's clock. It looks at the wall once and then counts monotonically, so a clock set
/// forward or back while the crib runs neither ends calls early nor keeps them for ever.
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

    fn sleep_until(&self, at_ms: u64) -> Sleep<'_> {
        let wait = Duration::from_millis(at_ms.saturating_sub(self.now_ms()));
        Box::pin(tokio::time::sleep(wait))
    }
}

/// A clock that stands still until it is told otherwise. Who waits is woken in the order they
/// came, so that a simulation tells the same story each time.
#[derive(Clone)]
pub struct ManualClock {
    now: Arc<(Mutex<u64>, Notify)>,
}

impl ManualClock {
    /// A clock that shows this time.
    pub fn at(now_ms: u64) -> Self {
        Self { now: Arc::new((Mutex::new(now_ms), Notify::new())) }
    }

    /// Turns it forward.
    pub fn advance(&self, by_ms: u64) {
        *self.now.0.lock() += by_ms;
        self.now.1.notify_waiters();
    }
}

impl Clock for ManualClock {
    fn now_ms(&self) -> u64 {
        *self.now.0.lock()
    }

    fn sleep_until(&self, at_ms: u64) -> Sleep<'_> {
        Box::pin(async move {
            loop {
                let mut turned = std::pin::pin!(self.now.1.notified());
                // In line before looking, so that a turn between the two is not missed.
                turned.as_mut().enable();
                if self.now_ms() >= at_ms {
                    return;
                }
                turned.await;
            }
        })
    }
}
