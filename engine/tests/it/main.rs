//! Tests of the engine's public interface: its guarantees under a seeded simulation, and the
//! project's coding rules.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod access_rules;
mod agent_loop;
mod agents;
mod batch;
mod clients;
mod clock_steps;
mod context;
mod credentials;
mod delegation;
mod denials;
mod digest_facts;
mod endings;
mod engine;
mod examples;
mod limits;
mod observer;
mod rejoin;
mod results;
mod rules;
mod runs;
mod schema_cost;
mod script;
mod simulation;
mod speculative_reads;
mod standing_approvals;
mod support;
mod switches;
mod tidy;
mod tool_modes;
mod turns;
mod webhooks;
