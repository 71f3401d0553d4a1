//! The interfaces that the engine needs from outside: store, bus, clock, sources, models, webhook
//! sender and observer. Each comes with the implementation that needs nothing: the store in memory,
//! the local bus, the system clock, and tools written as Rust functions.
//!
//! Beside them is what all parts of the engine share: its state (`core`) and its metrics
//! (`engine_metrics`).

pub mod bus;
pub mod clock;
pub mod core;
pub(crate) mod engine_metrics;
pub mod fn_tool;
pub mod model;
pub mod observer;
pub mod source;
pub mod store;
pub mod webhook_sender;
