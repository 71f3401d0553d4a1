//! The server as its users meet it: real HTTP and WebSocket against a server in this process.
//!
//! One binary, one module per promise. `support` starts servers and talks to them.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod bad_input;
mod builtins;
mod canceling;
mod crash;
mod events;
mod examples;
mod idempotency;
mod identity;
mod ingress;
mod listing;
mod policy;
mod seed;
mod submitting;
mod support;
mod utp;
mod validation;
mod waiting;
mod wire_files;
