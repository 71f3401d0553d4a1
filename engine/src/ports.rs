//! The interfaces that the engine needs from outside: store, bus, clock, sources, models, webhook
//! sender and observer. Some have an implementation here that needs no other program: the store in
//! memory, the local bus, the system clock, and tools written as Rust functions.
//!
//! This module also holds the state (`core`) and the metrics (`engine_metrics`) that all parts of
//! the engine share.

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
