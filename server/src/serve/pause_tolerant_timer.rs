//! A timer for hyper that does not end a connection because the process was paused.
//!
//! After a pause of the process (SIGSTOP, a suspended machine) the time limits of idle connections
//! have passed, and hyper checks the timer before it reads. Without this timer, hyper would reset
//! the connection of a request that arrived during the pause.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use hyper::rt::{Sleep, Timer};

/// Lateness of a timer from which the process counts as paused.
const MIN_PAUSE: Duration = Duration::from_secs(1);

/// Time that a late timer waits again, in which the connection reads data that has arrived.
const GRACE: Duration = Duration::from_secs(1);

/// Makes timers that wait again if they end late.
#[derive(Clone, Copy)]
pub(super) struct PauseTolerantTimer;

struct PauseTolerantSleep {
    sleep: Pin<Box<tokio::time::Sleep>>,
}

impl Timer for PauseTolerantTimer {
    fn sleep(&self, duration: Duration) -> Pin<Box<dyn Sleep>> {
        Box::pin(PauseTolerantSleep { sleep: Box::pin(tokio::time::sleep(duration)) })
    }

    fn sleep_until(&self, deadline: Instant) -> Pin<Box<dyn Sleep>> {
        let sleep = tokio::time::sleep_until(deadline.into());
        Box::pin(PauseTolerantSleep { sleep: Box::pin(sleep) })
    }
}

impl Sleep for PauseTolerantSleep {}

impl Future for PauseTolerantSleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        loop {
            let deadline = self.sleep.deadline();
            ready!(self.sleep.as_mut().poll(context));
            let now = tokio::time::Instant::now();
            if now.duration_since(deadline) < MIN_PAUSE {
                return Poll::Ready(());
            }
            self.sleep.as_mut().reset(now + GRACE);
        }
    }
}
