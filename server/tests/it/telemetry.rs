//! Traces and metrics: the call continues the caller's trace, spans reach a real OTLP endpoint, and
//! failures of that endpoint do not affect calls.

mod context;
mod export;
mod prometheus;
mod spans;
