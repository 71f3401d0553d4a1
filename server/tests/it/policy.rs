//! Execution policy: timeouts, retries, fallbacks and concurrency limits.

mod fallback;
mod limits;
mod outcome;
mod retrying;
