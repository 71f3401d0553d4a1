//! How calls are executed: time-outs, retries, alternates, and how many at once.

mod fallback;
mod outcome;
mod places;
mod retrying;
