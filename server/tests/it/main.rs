//! Integration tests of the server: real HTTP and WebSocket requests, mostly to a server in this
//! process.
//!
//! One binary, one module per feature. `support` starts servers and has clients for them.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod agents;
mod approvals;
mod arguments;
mod audit;
mod bad_input;
mod batches;
mod builtins;
mod canceling;
mod chat;
mod command_line;
mod contexts;
mod crash;
mod documented_responses;
mod events;
mod examples;
mod fairness;
mod frameworks;
mod idempotency;
mod identity;
mod ingress;
mod integrations;
mod limits;
mod listing;
mod mcp;
mod models;
mod openapi;
mod payloads;
mod permissions_matrix;
mod policy;
mod postgres;
mod rejoin;
mod reliability;
mod results;
mod rules;
mod runs;
mod secrets;
mod seed;
mod soak;
mod submitting;
mod support;
mod tasks;
mod telemetry;
mod unknown_fields;
mod upstreams;
mod utp;
mod validation;
mod waiting;
mod webhooks;
mod wire_files;
