//! Toolcrib's server: configuration, bootstrap, telemetry and the command line around the engine,
//! the store, the sources and the transports.
//!
//! `bootstrap` builds and connects the parts; `serve` runs them.

pub mod bootstrap;
pub mod cli;
pub mod config;
pub mod mcp_servers;
pub mod open_store;
pub mod operator_token;
mod release_memory;
pub mod serve;
pub mod telemetry;
pub mod webhooks;
