//! Execution of tools, one module per protocol. A source knows its port and its protocol's crate;
//! it never uses the store, another source or a transport.
//!
//! A new source is a module here that implements [`toolcrib::ports::source::Source`] under its own
//! [`toolcrib::Executor`] name, its settings, and a line in the server's `bootstrap`;
//! `docs/ARCHITECTURE.md` has the steps.

pub mod builtin;
pub mod child_reaper;
pub mod http;
pub mod mcp;
pub mod models;
pub mod utp;
