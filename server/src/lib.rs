//! Toolcrib's server: configuration, bootstrap, transports, sources, telemetry and the command line
//! around the engine.
//!
//! `bootstrap` builds and connects the parts; `serve` runs them. A transport knows the engine and
//! its own wire format and nothing else; a source knows its protocol and nothing else.

pub mod assemble;
pub mod auth;
pub mod bench_fill;
pub mod cli;
pub mod config;
pub mod doors;
pub mod kept;
pub mod models;
pub mod openapi;
pub mod operation;
pub mod orphans;
pub mod outbound;
mod pages;
mod peer;
pub mod serve;
pub mod sources;
pub(crate) mod sse;
pub mod task;
pub mod telemetry;
mod time;
pub mod upstreams;
pub mod utp;
pub mod webhooks;
pub mod yaml;
