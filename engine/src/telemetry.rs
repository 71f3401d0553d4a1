//! The engine's own measurements: metrics, and calls and attempts as an observer sees them.

pub mod engine_metrics;
pub mod observer;
