//! The life of a call: accepting, validating, committing, attempting, reporting, waiting.
//!
//! `accept` takes a call in, `commit` is the only writer of calls after that, and
//! [`crate::lifecycle::step`] is the only place that decides a status.

pub mod accept;
pub mod attempt;
pub mod batch;
pub mod commit;
pub mod dependents;
pub mod detach_on_drop;
pub mod key_counts;
pub mod limiter;
pub mod open_calls;
pub mod recover;
pub mod report;
pub mod route;
pub mod speculative_read;
pub mod validate_args;
pub mod validate_request;
pub mod wait;
