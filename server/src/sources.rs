//! Where tools are executed, by protocol. A source knows its port and its protocol's crate; never
//! the store, another source or a door.

pub mod builtin;
pub mod http;
pub mod mcp;
pub mod utp;
