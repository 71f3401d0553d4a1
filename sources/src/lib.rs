//! Execution of tools, one module per protocol. A source knows its port and its protocol's crate;
//! it never uses the store, another source or a transport.

pub mod builtin;
pub mod child_reaper;
pub mod http;
pub mod mcp;
pub mod models;
pub mod utp;
