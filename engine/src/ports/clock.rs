//! The clock port: system time, or a clock that tests and the simulation advance manually.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use tokio::sync::Notify;

/// A boxed sleep future.
pub type SleepFuture<'a> = Pin<Box<dyn Future<Output = ()> + Send + 'a>>;

/// Reads the time and sleeps until a time.
///
/// There are two times. Waits, timers and leases use [`now_ms`](Self::now_ms), the monotonic time.
/// Times that are stored or shown use [`wall_ms`](Self::wall_ms), the time of day. They are equal
/// until the machine's time is changed or the machine is suspended.
pub trait Clock: Send + Sync + 'static {
    /// Returns a time in Unix milliseconds that never jumps and never goes back.
    fn now_ms(&self) -> u64;

    /// Returns once `now_ms` has reached `at_ms`.
    fn sleep_until(&self, at_ms: u64) -> SleepFuture<'_>;

    /// Returns the difference between the time of day and `now_ms`, in milliseconds.
    fn wall_offset_ms(&self) -> i64 {
        0
    }

    /// Returns the time of day in Unix milliseconds. It jumps when the machine's time is changed.
    fn wall_ms(&self) -> u64 {
        self.now_ms().saturating_add_signed(self.wall_offset_ms())
    }

    /// Returns the value of `now_ms` at this time of day, by the present difference.
    fn to_monotonic_ms(&self, wall_ms: u64) -> u64 {
        wall_ms.saturating_add_signed(self.wall_offset_ms().saturating_neg())
    }
}

/// Minimum difference that counts as a change of the time of day. Smaller differences are noise:
/// the two times are read one after the other, and the machine's time is corrected continuously.
const STEP_MS: u64 = 250;

/// The machine's clock. It reads the time of day at the start and then counts monotonically, so a
/// change of the system time while the server runs neither ends calls early nor keeps them open
/// forever. The time of day follows such a change.
pub struct SystemClock {
    start_ms: u64,
    started: Instant,
    offset_ms: AtomicI64,
    read_wall: fn() -> u64,
}

impl Default for SystemClock {
    fn default() -> Self {
        Self::with_wall(|| {
            let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            wall.as_millis() as u64
        })
    }
}

impl SystemClock {
    fn with_wall(read_wall: fn() -> u64) -> Self {
        let (start_ms, started) = (read_wall(), Instant::now());
        Self { start_ms, started, offset_ms: AtomicI64::new(0), read_wall }
    }
}

impl Clock for SystemClock {
    fn now_ms(&self) -> u64 {
        self.start_ms + self.started.elapsed().as_millis() as u64
    }

    fn sleep_until(&self, at_ms: u64) -> SleepFuture<'_> {
        let wait = Duration::from_millis(at_ms.saturating_sub(self.now_ms()));
        Box::pin(tokio::time::sleep(wait))
    }

    fn wall_offset_ms(&self) -> i64 {
        let measured_ms = (self.read_wall)().cast_signed() - self.now_ms().cast_signed();
        let known_ms = self.offset_ms.load(Ordering::Relaxed);
        if measured_ms.abs_diff(known_ms) < STEP_MS {
            return known_ms;
        }
        self.offset_ms.store(measured_ms, Ordering::Relaxed);
        measured_ms
    }
}

/// A clock that moves only when it is advanced. It wakes sleepers in the order in which they
/// registered, so that a simulation is reproducible.
#[derive(Clone)]
pub struct ManualClock {
    now: Arc<(Mutex<u64>, Notify)>,
    offset_ms: Arc<AtomicI64>,
}

impl ManualClock {
    /// Creates a clock that shows this time.
    pub fn at(now_ms: u64) -> Self {
        let now = Arc::new((Mutex::new(now_ms), Notify::new()));
        Self { now, offset_ms: Arc::default() }
    }

    /// Advances the clock.
    pub fn advance(&self, by_ms: u64) {
        *self.now.0.lock() += by_ms;
        self.now.1.notify_waiters();
    }

    /// Changes the time of day, as an operator or a time server does. No time passes.
    pub fn step_wall(&self, by_ms: i64) {
        self.offset_ms.fetch_add(by_ms, Ordering::Relaxed);
    }
}

impl Clock for ManualClock {
    fn now_ms(&self) -> u64 {
        *self.now.0.lock()
    }

    fn wall_offset_ms(&self) -> i64 {
        self.offset_ms.load(Ordering::Relaxed)
    }

    fn sleep_until(&self, at_ms: u64) -> SleepFuture<'_> {
        Box::pin(async move {
            loop {
                let mut advanced = std::pin::pin!(self.now.1.notified());
                // Register before reading the time, so that an advance between the two is not
                // missed.
                advanced.as_mut().enable();
                if self.now_ms() >= at_ms {
                    return;
                }
                advanced.await;
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;

    #[test]
    fn the_time_of_day_follows_a_step_and_the_count_does_not() {
        static WALL_MS: AtomicU64 = AtomicU64::new(1_790_000_000_000);
        let clock = SystemClock::with_wall(|| WALL_MS.load(Ordering::Relaxed));
        let before_ms = clock.now_ms();
        let wall_ms = || clock.wall_ms().abs_diff(WALL_MS.load(Ordering::Relaxed));
        assert!(wall_ms() < STEP_MS);
        for step_ms in [3_600_000_i64, -7_200_000, 1_000] {
            let stepped = WALL_MS.load(Ordering::Relaxed).saturating_add_signed(step_ms);
            WALL_MS.store(stepped, Ordering::Relaxed);
            assert!(wall_ms() < STEP_MS, "after a step of {step_ms} ms");
            assert!(clock.now_ms() - before_ms < 60_000, "the count does not jump");
            let now_ms = clock.to_monotonic_ms(clock.wall_ms());
            assert!(now_ms.abs_diff(clock.now_ms()) < STEP_MS);
        }
    }
}
