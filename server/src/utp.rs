//! Tools over NATS (UTP): the connection, the wire format, and the tool service side.
//!
//! A tool service in Rust takes a few lines; see [`ToolHost`].

pub mod follow;
pub mod host;
pub mod link;
pub mod report;
pub mod turn;
pub mod wire;

pub use host::{ToolHost, ToolJob, ToolJobResult};
pub use link::NatsConnection;

/// Default protocol version.
pub const DEFAULT_VERSION: &str = "v1r3";
