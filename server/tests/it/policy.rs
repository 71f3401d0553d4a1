//! Execution policy: timeouts, retries, fallbacks and concurrency limits.

mod attempt_time;
mod fallback;
mod limits;
mod outcome;
mod retrying;
