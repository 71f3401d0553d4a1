//! Traces and metrics: the caller's trace goes on through the call, spans reach a real OTLP
//! endpoint, and whatever that endpoint does, calls go on.

mod context;
mod export;
mod prometheus;
mod spans;
