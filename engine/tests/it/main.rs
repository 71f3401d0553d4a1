//! Tests of the engine's public interface: its guarantees under a seeded simulation, and the
//! project's coding rules.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod ahead;
mod batch;
mod clients;
mod context;
mod engine;
mod examples;
mod notify;
mod observing;
mod results;
mod runs;
mod script;
mod simulation;
mod support;
mod tidy;
mod turn;
mod turns;
