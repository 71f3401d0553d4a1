//! Toolcrib's server: sources, doors, configuration and the command line around the engine.
//!
//! `assemble` constructs and connects everything; `serve` runs it. Doors know the engine and their
//! own wire forms and nothing else; sources know their protocol and nothing else.

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
